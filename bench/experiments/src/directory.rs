//! The report of all datasets and results in a directory.

use std::path::{Path, PathBuf};

use anyhow::Context;
use rayon::prelude::*;
use rtvirtio_learn::dataset::Dataset;
use rtvirtio_learn::train::{MISS, TrainError};
use rtvirtio_paper::PaperModels;
use rtvirtio_workflow::{Progress, model_choice};

use crate::accuracy::judge::FOLDS;
use crate::accuracy::{self, AccuracyOptions};
use crate::cases::{self, Tier};
use crate::report::ExperimentReport;
use crate::sweep::IN_GUESTS;
use crate::{
    before_after, contention, cyclictest, daemon, fleet, fleet_cluster, iod, iod_attach, iod_crash,
    iod_startup, net, paravirt, planning, regulation, reservation, responsiveness, tails,
};

/// File extension of datasets.
const DATASET: &str = "jsonl";

/// Reads a saved result.
type Reader = fn(&Path) -> anyhow::Result<ExperimentReport>;

/// The report of every dataset and result in a directory.
///
/// # Errors
/// A directory that holds none.
pub fn report(dir: &Path, progress: &dyn Progress) -> anyhow::Result<ExperimentReport> {
    // A file that is still being measured does not hide the others.
    let usable = |path: &Path, report: anyhow::Result<ExperimentReport>| {
        report.inspect_err(|e| progress.warn(&format!("{} is left out: {e:#}", path.display()))).ok()
    };
    let iod = iod_report(dir)?;
    let results: [(&str, Reader); 24] = [
        (before_after::FILE, before_after::report),
        (planning::FILE, planning::report),
        (tails::FILE, tails::report),
        (reservation::FILE, reservation::report),
        (cyclictest::FILE, cyclictest::report),
        (daemon::FILE, daemon::report),
        (daemon::day::FILE, daemon::day::report),
        (daemon::scale::FILE, daemon::scale::report),
        (fleet::FILE, fleet::report),
        (fleet_cluster::FILE, fleet_cluster::report),
        (fleet_cluster::DOMAINS_FILE, fleet_cluster::report),
        (fleet_cluster::PAUSED_FILE, fleet_cluster::report),
        (fleet_cluster::FENCING_FILE, fleet_cluster::report),
        (fleet_cluster::slow::FILE, fleet_cluster::slow::report),
        (paravirt::FILE, paravirt::report),
        (paravirt::CHAIN_FILE, paravirt::report),
        (paravirt::BOX_FILES[0], paravirt::report_in_box),
        (paravirt::BOX_FILES[1], paravirt::report_in_box),
        (paravirt::BOX_FILES[2], paravirt::report_in_box),
        (paravirt::BOX_FILES[3], paravirt::report_in_box),
        (regulation::FILE, regulation::report),
        (regulation::planned::FILE, regulation::planned::report),
        (responsiveness::FILE, responsiveness::report),
        (responsiveness::VIDEO_FILE, responsiveness::report_of_video),
    ];
    let results = results.map(|(file, read)| (dir.join(file), read)).into_iter().filter(|(p, _)| p.exists());
    let results: Vec<ExperimentReport> =
        results.filter_map(|(path, read)| usable(&path, read(&path))).collect();
    // Each dataset is judged by models fitted on it.
    let judge = |(name, path): (String, PathBuf)| (of_dataset(dir, &name, &path, progress), path);
    let data: Vec<_> = datasets(dir)?.into_par_iter().map(judge).collect();
    let data = data.into_iter().filter_map(|(report, path)| usable(&path, report));
    let all = data.chain(iod).chain(results).reduce(ExperimentReport::and);
    all.with_context(|| format!("{} holds no dataset", dir.display()))
}

/// The report of the I/O domain's results in a directory, those with guests included; `None`
/// without results.
///
/// # Errors
/// When a result cannot be read.
pub fn iod_report(dir: &Path) -> anyhow::Result<Option<ExperimentReport>> {
    let all: [(&str, Reader); 6] = [
        (iod::FILE, iod::report),
        (iod_attach::FILE, iod_attach::report),
        (iod_crash::FILE, iod_crash::report),
        (iod_startup::FILE, iod_startup::report),
        (net::FILE, net::report),
        (net::timeline::FILE, net::timeline::report),
    ];
    let present =
        all.into_iter().map(|(file, read)| (dir.join(file), read)).filter(|(path, _)| path.exists());
    let reports = present.map(|(path, read)| read(&path)).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(reports.into_iter().reduce(ExperimentReport::and))
}

/// Names and paths of the datasets in a directory, sorted. Runs in guests are judged with those of
/// process VMs.
fn datasets(dir: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let Some(name) = path.file_stem().and_then(|n| n.to_str()).map(str::to_owned) else { continue };
        if path.extension().is_some_and(|e| e == DATASET) && !name.ends_with(IN_GUESTS) {
            all.push((name, path));
        }
    }
    all.sort();
    Ok(all)
}

fn of_dataset(
    dir: &Path,
    name: &str,
    path: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<ExperimentReport> {
    if let Some(suffix) = name.strip_prefix(cases::PREFIX) {
        return Ok(cases::report(&Tier::ALL, &Dataset::load(path)?).with_suffix(suffix));
    }
    if let Some(device) = name.strip_prefix(contention::PREFIX) {
        let model = dir.join(format!("{device}.model.json"));
        let data = Dataset::load(path)?;
        let model = Some(model.as_path()).filter(|m| m.exists());
        let models = (model_choice::read_if(model)?, PaperModels::read_if(model)?);
        let models = (models.0.as_ref(), &models.1);
        return Ok(contention::report(models, &data, progress)?.with_suffix(device));
    }
    let guests = dir.join(format!("{name}{IN_GUESTS}.{DATASET}"));
    let judged = |miss| {
        let options = AccuracyOptions {
            folds: FOLDS,
            seed: 1,
            miss,
            guests: Some(guests.as_path()).filter(|g| g.exists()),
            model: None,
        };
        accuracy::report(path, &options, progress)
    };
    // A dataset too small for a bound at 99 % is judged at a lower confidence, which its claims
    // name.
    let is_too_small = |e: &anyhow::Error| matches!(e.downcast_ref(), Some(TrainError::TooFew { .. }));
    let at_lower_confidence = |miss: f64| {
        move |e: anyhow::Error| {
            if !is_too_small(&e) {
                return Err(e);
            }
            progress.warn(&format!(
                "{}: {e:#}; judged at {:.0} % instead",
                path.display(),
                100.0 * (1.0 - miss)
            ));
            judged(miss)
        }
    };
    judged(MISS).or_else(at_lower_confidence(0.05)).or_else(at_lower_confidence(0.1))
}
