//! Accuracy of the models on runs that they have not learned from.

pub mod calibrate;
mod claims;
mod coverage;
mod from_guests;
pub mod guest_pairs;
mod guests_page;
pub mod held_out;
mod in_guests;
pub mod judge;
mod limits;
pub mod networks;
mod page;
pub mod rates;
pub mod repeat;
pub mod sizes;
mod sizes_page;
mod text;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use calibrate::calibrate;
use judge::{Accuracy, Models, folds, judge, learning_curve};
use repeat::repeatability;
use rtvirtio_learn::dataset::{Dataset, Point, SWEEP};
use rtvirtio_learn::run::as_result;
use rtvirtio_learn::train::{TrainSettings, comparable};
use rtvirtio_measure::Run;
use rtvirtio_model::Profile;
use rtvirtio_paper::network::EPOCHS;
use rtvirtio_units::Nanos;
use sizes::loss_by_size;

use crate::report::ExperimentReport;
use in_guests::InGuests;
use limits::Limits;
use rtvirtio_workflow::model_choice;
use rtvirtio_workflow::{Progress, generated, write_file};

/// Points of the learning curve.
const SIZES: [usize; 7] = [120, 150, 200, 300, 450, 700, 1000];

/// Options of the experiment.
pub struct AccuracyOptions<'a> {
    /// Parts of the conditions, each judged by models fitted on the others.
    pub folds: usize,
    /// Seed of the split.
    pub seed: u64,
    /// Share of runs that may miss the bound.
    pub miss: f64,
    /// Runs in QEMU guests.
    pub guests: Option<&'a Path>,
    /// File for a model fitted on all runs; not saved without one.
    pub model: Option<&'a Path>,
}

/// Fits the models on a part of a dataset and judges them on the remaining runs.
///
/// # Errors
/// A dataset without a profile or with too few runs, and a file that cannot be written.
pub fn report(
    path: &Path,
    options: &AccuracyOptions<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<ExperimentReport> {
    let data = Dataset::load(path)?;
    let Some((device, profile)) = data.header.profiles.iter().next() else {
        anyhow::bail!("{}: it holds no profile of its device; measure again", path.display());
    };
    let guests = options.guests.map(|path| in_guests::Runs::load(path, device)).transpose()?;
    let settings = TrainSettings { seed: options.seed, miss: options.miss, ..TrainSettings::default() };
    let all: Vec<Point> = data.points.iter().filter(|p| p.scheme == SWEEP).cloned().collect();
    let points = comparable(&all);
    if points.len() < all.len() {
        let out = all.len() - points.len();
        progress.warn(&format!(
            "{out} runs are judged as measured only: the host's stalls during them are not known"
        ));
    }
    let parts = folds(&points, options.folds, options.seed);
    progress.step(&format!(
        "{device}: judging each of {} parts of {} runs by a model fitted on the others",
        parts.len(),
        points.len()
    ));
    let fitted = |(train, test): &(Vec<Point>, Vec<Point>)| {
        Models::fit(train, profile, &generated(), &settings).map(|models| (models, test.clone()))
    };
    let judged = parts.iter().map(fitted).collect::<anyhow::Result<Vec<_>>>()?;
    let accuracy = judge(&judged, profile)?;
    let guests =
        guests.map(|g| InGuests::evaluate(g, &judged, &parts, (&data, &all), &settings)).transpose()?;
    // The learning curve and the networks use the first split only.
    let (Some((train, test)), Some((model, _))) = (parts.into_iter().next(), judged.into_iter().next())
    else {
        anyhow::bail!("no runs are left to judge")
    };
    let unknown: Vec<Point> = all
        .iter()
        .filter(|p| points.iter().all(|known| known.id != p.id) && !train.iter().any(|t| t.repeats(p)))
        .cloned()
        .collect();
    let accuracy = accuracy.as_measured_with(&model, &unknown, profile)?;
    let lengths: Vec<usize> = SIZES.into_iter().filter(|n| *n < train.len()).chain([train.len()]).collect();
    let curve = learning_curve(&train, &test, profile, &lengths, &settings)?;
    let limits = Limits {
        repeat: repeatability(&points),
        networks: networks::evaluate(&train, &test, profile, &settings)?,
    };
    let sizes = loss_by_size(&points, options.seed, EPOCHS)?;
    let mut report =
        ExperimentReport { text: text::accuracy(device, &accuracy, &curve), ..ExperimentReport::new(&data) };
    report.text.push_str(&limits.text());
    report.text.push_str(&text::loss(&sizes));
    let calibration =
        calibrate(&points, profile, options.seed).inspect_err(|e| progress.warn(&e.to_string())).ok();
    report.text.extend(calibration.as_ref().map(text::calibration));
    if let Some(guests) = &guests {
        report.text.push_str(&guests.text());
        report.claims.extend(guests.claims(1.0 - options.miss));
    }
    report.claims.extend(claims::accuracy_claims(&accuracy, &curve, 1.0 - options.miss));
    report.runs = runs(&all, &accuracy);
    report.claims.extend(limits.claims());
    report.sections = page::accuracy(device, &accuracy, &curve);
    report.sections.extend(sizes_page::sizes(device, &sizes));
    report.sections.extend(guests.as_ref().and_then(|g| g.section(device)));
    report.sections.extend(calibration.as_ref().map(|c| page::calibration(device, c)));
    if let Some(out) = options.model {
        save_model(out, &points, guests.as_ref(), profile, &settings, progress)?;
    }
    Ok(report.with_suffix(device))
}

/// The runs, each with the expected tails of the model that has not learned from it.
fn runs(points: &[Point], a: &Accuracy) -> Vec<Run> {
    let mut runs: BTreeMap<&str, Run> = points.iter().map(|p| (p.id.as_str(), as_result(p))).collect();
    for held in &a.held {
        if let Some(task) = runs.get_mut(held.id.as_str()).and_then(|run| run.tasks.get_mut(held.task)) {
            task.predicted_ns = Some(Nanos::from_secs_f64(held.expected_ms / 1e3));
        }
    }
    runs.into_values().collect()
}

/// Saves a model fitted on all runs, and on those in guests where they suffice.
fn save_model(
    out: &Path,
    points: &[Point],
    guests: Option<&InGuests>,
    profile: &Profile,
    settings: &TrainSettings,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let Models { host, paper } = Models::fit(points, profile, &generated(), settings)?;
    let mut model = Arc::unwrap_or_clone(host);
    if let Some(guests) = guests {
        if let Some(warning) = guests.other_host_warning() {
            progress.warn(&warning);
        }
        match guests.learn(&model, settings) {
            Ok(part) => {
                progress.step(&format!(
                    "learned from {} runs in guests too; their bound is at {:.0} %",
                    part.points,
                    100.0 * part.confidence()
                ));
                model.guests = Some(part);
            }
            Err(e) => progress.warn(&format!("the model knows no guests: {e}")),
        }
    }
    if model.guests.is_none() {
        model_choice::keep_aside(out, progress)?;
    }
    write_file(out, &paper.to_json(&model)?)?;
    progress.step(&format!("saved {}", out.display()));
    Ok(())
}
