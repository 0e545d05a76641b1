//! `rtvirtio-lab bench accuracy`: how well the models hold on runs that they have not seen.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use rtvirtio_bench::accuracy::{Accuracy, Flowing, Group, enough, folds, judge, learning_curve};
use rtvirtio_bench::calibrate::{Calibration, calibrate};
use rtvirtio_bench::claims::Claim;
use rtvirtio_bench::dataset::{Dataset, Point, SWEEP};
use rtvirtio_bench::networks::{self, Networks};
use rtvirtio_bench::rates::Rates;
use rtvirtio_bench::repeat::{Repeatability, repeatability};
use rtvirtio_bench::run::as_result;
use rtvirtio_bench::sizes::{Size, loss_by_size};
use rtvirtio_bench::train::{MISS, TrainSettings, comparable, fit};
use rtvirtio_measure::Run;
use rtvirtio_units::Nanos;

use super::found::Found;
use super::in_guests::{self, InGuests};
use super::page;
use crate::args::BenchAccuracyArgs;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::write_file;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::model_choice;

/// Points of the learning curve.
const SIZES: [usize; 7] = [120, 150, 200, 300, 450, 700, 1000];

/// Largest share of the rates that are kept where BFQ does not idle, and that a forecast may doubt: each rules out a setting that is good.
const DOUBTED: f64 = 0.1;

/// Largest share of the tasks that were to keep their rate, and did not.
const BROKEN: f64 = 0.01;

/// How it is judged.
pub struct Options<'a> {
    /// Parts of the conditions, each judged by models fitted on the others.
    pub folds: usize,
    /// Which are in which.
    pub seed: u64,
    /// Share of runs that may miss the bound.
    pub miss: f64,
    /// Runs in QEMU guests.
    pub guests: Option<&'a Path>,
    /// Where a model fitted on all runs is saved.
    pub model: Option<&'a Path>,
}

/// `rtvirtio-lab bench accuracy`.
pub fn run(args: &BenchAccuracyArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let options = Options {
        folds: args.folds as usize,
        seed: args.seed,
        miss: 1.0 - f64::from(args.confidence) / 100.0,
        guests: args.guests.as_deref(),
        model: args.model.as_deref(),
    };
    let found = args.data.iter().map(|path| found(path, &options, ui)).collect::<anyhow::Result<Vec<_>>>()?;
    let all = found.into_iter().reduce(Found::with).context("no dataset was given")?;
    all.tell("rtvirtio: accuracy of the models", args.html.as_deref(), ui)
}

/// Fits the models on a part of a dataset and judges them on the rest.
pub fn found(path: &Path, options: &Options<'_>, ui: &Ui) -> anyhow::Result<Found> {
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
        ui.warn(&format!(
            "{out} runs are judged as measured only: it is not known of them when the host stood still"
        ));
    }
    let parts = folds(&points, options.folds, options.seed);
    ui.step(&format!(
        "{device}: judging each of {} parts of {} runs by a model fitted on the others",
        parts.len(),
        points.len()
    ));
    let fitted = |(train, test): &(Vec<Point>, Vec<Point>)| {
        fit(train, profile, &generated(), &settings).map(|model| (Arc::new(model), test.clone()))
    };
    let judged = parts.iter().map(fitted).collect::<Result<Vec<_>, _>>()?;
    let accuracy = judge(&judged, profile)?;
    let guests = guests.map(|g| InGuests::of(g, &judged, &parts, (&data, &all), &settings)).transpose()?;
    // What takes one split takes the first.
    let (Some((train, test)), Some((model, _))) = (parts.into_iter().next(), judged.into_iter().next())
    else {
        anyhow::bail!("no runs are left to judge")
    };
    let unknown: Vec<Point> = all
        .iter()
        .filter(|p| points.iter().all(|known| known.id != p.id) && !train.iter().any(|t| t.repeats(p)))
        .cloned()
        .collect();
    let accuracy = accuracy.as_measured_with(Arc::clone(&model), &unknown, profile)?;
    let lengths: Vec<usize> = SIZES.into_iter().filter(|n| *n < train.len()).chain([train.len()]).collect();
    let curve = learning_curve(&train, &test, profile, &lengths, &settings)?;
    let limits = Limits {
        repeat: repeatability(&points),
        networks: networks::evaluate(&train, &test, profile, &settings)?,
    };
    let sizes = loss_by_size(&points, profile, &settings)?;
    let mut found = Found { text: shown(device, &accuracy, &curve), ..Found::of(&data) };
    found.text.push_str(&limits.text());
    found.text.push_str(&loss(&sizes));
    let calibration = calibrate(&points, profile, options.seed).inspect_err(|e| ui.warn(&e.to_string())).ok();
    found.text.extend(calibration.as_ref().map(calibrated));
    if let Some(guests) = &guests {
        found.text.push_str(&guests.text());
        found.claims.extend(guests.claims(1.0 - options.miss));
    }
    found.claims.extend(of(&accuracy, &curve, 1.0 - options.miss));
    found.runs = runs(&all, &accuracy);
    found.claims.extend(limits.claims());
    found.sections = page::accuracy(device, &accuracy, &curve);
    found.sections.extend(page::sizes(device, &sizes));
    found.sections.extend(guests.as_ref().and_then(|g| g.section(device)));
    found.sections.extend(calibration.as_ref().map(|c| page::calibration(device, c)));
    if let Some(out) = options.model {
        let mut model = fit(&points, profile, &generated(), &settings)?;
        if let Some(guests) = &guests {
            guests.elsewhere().into_iter().for_each(|what| ui.warn(&what));
            match guests.learn(&model, &settings) {
                Ok(part) => {
                    ui.step(&format!(
                        "learned from {} runs in guests too; their bound is at {:.0} %",
                        part.points,
                        100.0 * part.confidence()
                    ));
                    model.guests = Some(part);
                }
                Err(e) => ui.warn(&format!("the model knows no guests: {e}")),
            }
        }
        if model.guests.is_none() {
            model_choice::keep_aside(out, ui)?;
        }
        write_file(out, &serde_json::to_vec(&model)?)?;
        ui.step(&format!("saved {}", out.display()));
    }
    Ok(found.about(device))
}

/// What limits the sharpness of any bound here.
struct Limits {
    repeat: Option<Repeatability>,
    networks: Networks,
}

impl Limits {
    fn text(&self) -> String {
        let net = &self.networks;
        let mut s = format!(
            "\nnetworks with the same inputs instead of the forest: typical factor {:.2}, coverage {:.2}%, upper/actual {:.2}\n",
            net.factor,
            100.0 * net.coverage,
            net.sharpness
        );
        let Some(r) = &self.repeat else {
            s.push_str("no condition ran twice: `bench sweep --again N` tells how far two runs of one condition differ\n");
            return s;
        };
        let _ = writeln!(
            s,
            "{} conditions ran {} times: a bound at 99% of runs needs {:.2} times a condition's own median (median over tasks)",
            r.conditions, r.runs, r.floor
        );
        if let Some((flowing, _)) = r.flowing {
            let _ = writeln!(s, "  {flowing:.2} times where BFQ does not idle");
        }
        for (name, n, typical, p90) in r.regimes.iter().filter(|r| r.1 > 0) {
            let _ = writeln!(s, "  {name:<24} {n:>5} pairs differ by {typical:.2} (median), {p90:.2} (p90)");
        }
        s
    }

    fn claims(&self) -> Vec<Claim> {
        let Some(r) = &self.repeat else { return Vec::new() };
        let needs = "what a perfect bound at 99 % would need above the median, from conditions that ran more than once";
        let all = Claim::new("accuracy.bound.floor", needs, r.floor, "ratio", r.runs);
        let flowing = r.flowing.map(|(floor, runs)| {
            let needs = format!("{needs}, where BFQ does not idle");
            Claim::new("accuracy.flowing.floor", needs, floor, "ratio", runs)
        });
        [all].into_iter().chain(flowing).collect()
    }
}

/// Claims of tails as measured, and, where the host's own stalls are known, of tails less these.
fn of(a: &Accuracy, curve: &[Accuracy], confidence: f64) -> Vec<Claim> {
    let n = a.held.len();
    let at = if confidence < 1.0 - MISS { format!(" at {:.0} %", 100.0 * confidence) } else { String::new() };
    let mut claims = Vec::new();
    let mut bound = |id: &str, of: &str, coverage: f64, sharpness: f64, n: usize, groups: &[Group]| {
        let covers = format!("held-out tails {of} below their upper bound{at}");
        claims.push(
            Claim::new(format!("accuracy.{id}.coverage"), covers, coverage, "share", n).at_least(confidence),
        );
        let sharp = format!("median of upper bound{at} over tail {}", of.trim_end_matches(','));
        claims
            .push(Claim::new(format!("accuracy.{id}.sharpness"), sharp, sharpness, "ratio", n).at_most(1.5));
        let (name, n, share) = groups.first().map_or((String::new(), 0, 0.0), Clone::clone);
        let group = format!("the same coverage{at} in its worst group ({name})");
        let claim = Claim::new(format!("accuracy.{id}.worst_group"), group, share, "share", n);
        claims.push(claim.at_least(confidence - 0.02));
    };
    match &a.with_host {
        Some(w) => {
            let of = "as measured, with the host's own stalls,";
            let more = match w.unknown {
                0 => of.to_owned(),
                runs => {
                    format!("{of} of {runs} runs more that stood still too often to be learned from too,")
                }
            };
            bound("bound", &more, w.coverage, w.sharpness, w.n, &w.groups);
            bound("awake", "less the host's own stalls", a.coverage, a.sharpness, n, &a.groups);
        }
        None => bound("bound", "as measured", a.coverage, a.sharpness, n, &a.groups),
    }
    let (flowing, measured) = a.flowing();
    let mut flows = |id: &str, of: &str, f: &Flowing| {
        let covers = format!(
            "held-out tails {of} below their upper bound{at} where BFQ does not idle, as it does not in most plans"
        );
        let claim = Claim::new(format!("accuracy.{id}.coverage"), covers, f.coverage, "share", f.n);
        claims.push(claim.at_least(confidence));
        let sharp = format!("median of that bound over the tail {of}");
        claims.push(Claim::new(format!("accuracy.{id}.sharpness"), sharp, f.sharpness, "ratio", f.n));
    };
    match (flowing, measured) {
        (none, _) if none.n == 0 => {}
        (awake, Some(measured)) => {
            flows("flowing", "as measured", &measured);
            flows("flowing_awake", "less the host's own stalls", &awake);
        }
        (measured, None) => flows("flowing", "as measured", &measured),
    }
    claims.extend(of_rates(a));
    let runs = "runs from which on more of them make the expected tail better by less than a tenth (typical factor, learning curve)";
    let enough = enough(curve);
    let mut claim =
        Claim::new("accuracy.points", runs, enough.unwrap_or(a.trained) as f64, "runs", a.trained);
    claim = claim.at_most(1000.0);
    if enough.is_none() {
        claim.what.push_str("; not reached, more runs would help");
        claim.met = false;
    }
    claims.push(claim);
    claims
}

/// Rates by whether BFQ idles: a name for claims, what it does, how well they were foretold, and the share of those kept that may be doubted.
fn rates(a: &Accuracy) -> [(&'static str, &'static str, Rates, Option<f64>); 2] {
    [
        ("flowing", "does not idle", a.flowing_rates, Some(DOUBTED)),
        // Who waits is chance, and a forecast that says so is right to doubt.
        ("idling", "idles", a.idling_rates, None),
    ]
}

/// Claims of rates.
fn of_rates(a: &Accuracy) -> Vec<Claim> {
    let mut claims = Vec::new();
    for (id, place, rates, doubted) in rates(a) {
        let what = format!(
            "held-out tasks that lost more than a hundredth of their rate, of those that were to keep it, where BFQ {place}"
        );
        let broken =
            Claim::new(format!("accuracy.{id}.broken"), what, rates.broken_share(), "share", rates.promised);
        let what =
            format!("held-out tasks that were to lose it, of those that kept their rate, where BFQ {place}");
        let refused =
            Claim::new(format!("accuracy.{id}.refused"), what, rates.refused_share(), "share", rates.kept);
        claims.extend((rates.promised > 0).then(|| broken.at_most(BROKEN)));
        claims.extend((rates.kept > 0).then(|| match doubted {
            Some(most) => refused.at_most(most),
            None => refused,
        }));
    }
    claims
}

/// The runs behind the claims, each with the expected tails of the model that had not seen it.
fn runs(points: &[Point], a: &Accuracy) -> Vec<Run> {
    let mut runs: BTreeMap<&str, Run> = points.iter().map(|p| (p.id.as_str(), as_result(p))).collect();
    for held in &a.held {
        if let Some(task) = runs.get_mut(held.id.as_str()).and_then(|run| run.tasks.get_mut(held.task)) {
            task.predicted_ns = Some(Nanos::from_secs_f64(held.expected_ms / 1e3));
        }
    }
    runs.into_values().collect()
}

fn shown(device: &str, a: &Accuracy, curve: &[Accuracy]) -> String {
    let mut s = format!(
        "{device}: {} runs with {} tasks, each judged by a model fitted on at most {} others\n\n",
        a.held_out,
        a.held.len(),
        a.trained
    );
    let _ = writeln!(
        s,
        "{:<22} {:>5} {:>10} {:>8} {:>8} {:>8} {:>12} {:>14}",
        "model", "n", "median p/a", "factor", "p90", "below", "error ms", "in -500..0 ms"
    );
    for m in &a.scores {
        let _ = writeln!(
            s,
            "{:<22} {:>5} {:>10.2} {:>8.2} {:>8.1} {:>7.1}% {:>12.1} {:>13.1}%",
            m.model,
            m.n,
            m.bias,
            m.factor,
            m.factor_p90,
            100.0 * m.underestimated,
            m.error_ms,
            100.0 * m.paper_band
        );
    }
    let _ = writeln!(
        s,
        "\nupper bound: {:.2}% of {} below it ({:.2} to {:.2}% at 95%), median upper/actual {:.2}",
        100.0 * a.coverage,
        a.held.len(),
        100.0 * a.coverage_interval[0],
        100.0 * a.coverage_interval[1],
        a.sharpness
    );
    if let Some(w) = &a.with_host {
        let _ = writeln!(
            s,
            "tails are less the time in which the host itself stood still; as measured {:.2}% of {} are below the bound plus {:.1} ms, median of that/actual {:.2}",
            100.0 * w.coverage,
            w.n,
            w.adds_ms,
            w.sharpness
        );
    }
    for (name, n, ratio) in &a.sharpness_by_regime {
        let _ = writeln!(s, "  {name:<24} n {n:>5}  upper/actual {ratio:.2}");
    }
    for (_, place, rates, _) in rates(a) {
        let _ = writeln!(
            s,
            "rates where BFQ {place}: {} of {} tasks that were to keep theirs did not, {} of {} that kept theirs were doubted",
            rates.broken, rates.promised, rates.refused, rates.kept
        );
    }
    s.push_str("worst groups:");
    for (name, n, share) in a.groups.iter().take(4) {
        let _ = write!(s, "  {name} {:.1}% of {n}", 100.0 * share);
    }
    s.push_str("\n\nlearning curve: runs, typical factor, coverage, upper/actual\n");
    for c in curve {
        let _ = writeln!(
            s,
            "  {:>5} {:>6.2} {:>7.2}% {:>6.2}",
            c.trained,
            c.scores[0].factor,
            100.0 * c.coverage,
            c.sharpness
        );
    }
    s
}

/// The paper's Fig. 3 for a terminal: a line for each number of layers.
fn loss(sizes: &[Size]) -> String {
    let Some(first) = sizes.first() else { return String::new() };
    let mut s = format!(
        "\nthe paper's network on {} tasks of its kind of runs, mean squared error of folds not learned from, s^2, by neurons in each hidden layer\n",
        first.n
    );
    for of in sizes.chunk_by(|a, b| a.layers == b.layers) {
        let _ = write!(s, "  {} hidden:", of[0].layers);
        for size in of {
            let _ = write!(s, "  {}: {:.3}", size.neurons, size.loss);
        }
        s.push('\n');
    }
    s
}

fn calibrated(c: &Calibration) -> String {
    let mut s = format!(
        "\nanalytical model fitted on {} runs under BFQ, {} tasks: typical factor {:.2} with Table III, {:.2} fitted; R2 {:.2}\n",
        c.runs, c.tasks, c.factor[0], c.factor[1], c.r_squared
    );
    for f in &c.fits {
        let limit = if f.at_limit { "  at its limit: the runs do not determine it" } else { "" };
        let _ = writeln!(
            s,
            "  {:<12} {:>8.3}  95% {:.3} to {:.3}  Table III {}{limit}",
            f.name, f.value, f.interval[0], f.interval[1], f.published
        );
    }
    let used: Vec<String> = c.in_use().iter().map(|(name, value)| format!("{name} {value:.3}")).collect();
    let _ = writeln!(
        s,
        "  models use {} (Table III where the runs do not determine one, the others fitted again beside it)",
        used.join(", ")
    );
    let residuals: Vec<String> = c.residuals.iter().map(|r| format!("{:.2}", r.exp())).collect();
    let _ = writeln!(s, "  measured / predicted, deciles: {}", residuals.join(" "));
    s
}
