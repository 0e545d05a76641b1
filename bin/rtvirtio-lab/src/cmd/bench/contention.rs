//! `rtvirtio-lab bench contention`: the paper's Figs. 2 and 5, measured here.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use rtvirtio_bench::claims::Claim;
use rtvirtio_bench::contention::{Figure, Growth, Row, Setup, growth, rows, setups};
use rtvirtio_bench::dataset::Dataset;
use rtvirtio_bench::design::MAX_VMS;
use rtvirtio_bench::load::spec;
use rtvirtio_bench::stage::Treatment;
use rtvirtio_model::{Forecast, HostModel, Learned, ModelKind, Profile, TailModel, model};
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_stats::Random;
use rtvirtio_units::Bytes;

use super::arguments;
use super::bed::{Bed, device_name};
use super::found::Found;
use super::page;
use super::runs::{other_host, profile};
use crate::args::BenchContentionArgs;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::need_root;
use rtvirtio_learn::runs::Wanted;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::model_choice::read_if;

/// What the names of its data begin with.
pub const PREFIX: &str = "contention-";

/// Scheme of its points.
const SCHEME: &str = "contention";

/// A measured row with what the models say of it, ms.
pub struct Compared {
    /// Measured.
    pub row: Row,
    /// The paper's equations, with coefficients fitted on this host's runs where the model has them, else those of Table III.
    pub analytical: Option<f64>,
    /// The paper's network.
    pub mlp: Option<f64>,
    /// Our expected tail.
    pub expected: Option<f64>,
    /// Our upper bound.
    pub upper: Option<f64>,
}

/// `rtvirtio-lab bench contention`.
pub fn run(args: &BenchContentionArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = data_file(args);
    let learned = read_if(args.runs.model.as_deref())?;
    if !args.runs.report_only {
        arguments::of_contention(args)?;
        need_root("bench contention")?;
        let _lock = global.dirs().lock_vms()?;
        let bed = Bed::made(&args.runs.device, MAX_VMS, LabKind::Process, global, ui)?;
        let measured = measure(args, learned.as_deref(), &bed, &path, ui);
        bed.remove()?;
        measured?;
    }
    let data = Dataset::load(&path)?;
    let title = format!("rtvirtio: contention on {}", data.header.host.device);
    found(learned.as_ref(), &data, ui)?.about(device_name(&args.runs.device)).tell(
        &title,
        args.runs.html.as_deref(),
        ui,
    )
}

fn data_file(args: &BenchContentionArgs) -> PathBuf {
    args.runs.out.join(format!("{PREFIX}{}.jsonl", device_name(&args.runs.device)))
}

fn measure(
    args: &BenchContentionArgs,
    model: Option<&HostModel>,
    bed: &Bed<'_>,
    path: &Path,
    ui: &Ui,
) -> anyhow::Result<()> {
    let profile = profile(&args.runs, model, &bed.device.spec)?;
    let command = format!("rtvirtio-lab bench contention {} --for {}", args.runs.device, args.length);
    let mut runs = bed.runs(path, command, args.length, (profile, None), other_host(&args.runs))?;
    if let Some(model) = model {
        model.fits(&runs.profile)?;
    }
    let mut all = setups();
    all.retain(|s| args.only.as_ref().is_none_or(|only| s.id(0).contains(only.as_str())));
    let mut todo: Vec<(usize, &Setup)> =
        (0..args.repeat).flat_map(|r| all.iter().map(move |s| (r, s))).collect();
    // Interleaved: a slow change of the host falls on all set-ups alike.
    for (i, round) in todo.chunks_mut(all.len()).enumerate() {
        Random::new(i as u64 + 1).shuffle(round);
    }
    let mut bar = ui.bar(&format!("{} set-ups, {} repetitions", all.len(), args.repeat), todo.len() as u64);
    for (i, (repetition, setup)) in todo.into_iter().enumerate() {
        bar.set(i as u64);
        let id = setup.id(repetition);
        bar.say(&id);
        if runs.find(&id).is_none() {
            runs.measure(Wanted {
                id,
                scheme: SCHEME,
                treatment: Treatment::knobs(setup.knobs.config()),
                vms: &setup.vms,
                seed: repetition as u64 + 1,
                forecasts: Vec::new(),
                tries: None,
            })
            .map_err(rtvirtio_workflow::Error::from)?;
        }
    }
    Ok(())
}

/// Rows and claims from what is measured, with what the models say of it.
pub fn found(learned: Option<&Arc<HostModel>>, data: &Dataset, ui: &Ui) -> anyhow::Result<Found> {
    let Some(profile) = data.header.profiles.values().next() else {
        anyhow::bail!("the data hold no profile of their device; measure again");
    };
    // The figures need no model: one of elsewhere is no reason to hide them.
    let learned = learned.filter(|model| {
        let fits = model.fits(profile).inspect_err(|e| ui.warn(&format!("predictions are left out: {e}")));
        fits.is_ok()
    });
    let mut compared = Vec::new();
    for setup in setups() {
        for row in rows(&setup, &data.points) {
            if !row.tail.ms.is_empty() {
                compared.push(compare(&setup, row, profile, learned));
            }
        }
    }
    anyhow::ensure!(!compared.is_empty(), "nothing is measured yet");
    let mut found = Found::of(data);
    let fitted = learned.is_some_and(|m| m.analytical.is_some());
    let coefficients = if fitted { "fitted on this host" } else { "of the paper's Table III" };
    found.lead.push(format!("The paper's equations with coefficients {coefficients}."));
    Ok(Found {
        runs: data.points.iter().map(rtvirtio_bench::run::as_result).collect(),
        claims: claims(&compared),
        text: table(&compared),
        sections: Figure::ALL.iter().map(|f| page::contention(*f, &compared)).collect(),
        ..found
    })
}

fn compare(setup: &Setup, row: Row, profile: &Profile, learned: Option<&Arc<HostModel>>) -> Compared {
    let device = Device::Twin { profile: "any".to_owned(), size: Bytes(1 << 30) };
    let (spec, config) = (spec(&setup.vms, device, LabKind::Process), setup.knobs.config());
    let task = row.task;
    let of = |model: &dyn TailModel| -> Option<Forecast> {
        model.forecast(profile, &spec, &config).ok()?.get(task).cloned()
    };
    let ms = |f: Option<Forecast>| f.map(|f| f.latency_ns.as_millis_f64());
    let ours = learned.and_then(|m| of(&Learned::bound(Arc::clone(m))));
    Compared {
        analytical: ms(model(ModelKind::Analytical, learned).ok().and_then(|m| of(&*m))),
        mlp: ms(learned.and_then(|m| of(&Learned::paper(Arc::clone(m))))),
        upper: ours.as_ref().map(|f| f.judged().as_millis_f64()),
        expected: ms(ours),
        row,
    }
}

/// Numbers for comparison with the paper's Fig. 2; another device and machine have others.
fn claims(compared: &[Compared]) -> Vec<Claim> {
    let measured: Vec<Row> = compared.iter().map(|c| c.row.clone()).collect();
    let growth = growth(&measured);
    let n = measured.iter().filter(|r| r.figure == Figure::Fig2).map(|r| r.tail.ms.len()).sum();
    type Part = fn(&Growth) -> f64;
    let parts: [(&str, &str, Part); 3] = [
        ("mean_growth", "mean latency of four VMs over one, default BFQ (the paper: 4 to 11)", |g| g.mean),
        ("tail_growth", "p99.99 as measured of four VMs over one, default BFQ (the paper: 81 to 126)", |g| {
            g.tail
        }),
        (
            "tail_growth_awake",
            "the same less the host's own stalls, which are most of what one VM alone waits for",
            |g| g.awake,
        ),
    ];
    let mut out = Vec::new();
    for (name, what, part) in parts {
        for (which, choose) in [("least", f64::min as fn(f64, f64) -> f64), ("most", f64::max)] {
            let value = growth.iter().map(part).reduce(choose).unwrap_or(0.0);
            out.push(Claim::new(format!("contention.{name}.{which}"), what, value, "ratio", n));
        }
    }
    out
}

fn table(compared: &[Compared]) -> String {
    let mut s = format!(
        "{:<6} {:<22} {:>2} {:>9} {:>28} {:>9} {:>11} {:>9} {:>9} {:>9}\n",
        "figure",
        "set-up",
        "n",
        "mean ms",
        "p99.99 ms (least to most)",
        "no stalls",
        "analytical",
        "mlp",
        "expected",
        "bound"
    );
    for c in compared {
        let (tail, low, high) = c.row.tail.spread();
        let number = |v: Option<f64>| v.map_or("-".to_owned(), |v| format!("{v:.1}"));
        let _ = writeln!(
            s,
            "{:<6} {:<22} {:>2} {:>9.2} {:>28} {:>9.1} {:>11} {:>9} {:>9} {:>9}",
            c.row.figure.name(),
            c.row.label,
            c.row.tail.ms.len(),
            c.row.mean.spread().0,
            format!("{tail:.1} ({low:.1} to {high:.1})"),
            c.row.awake.spread().0,
            number(c.analytical),
            number(c.mlp),
            number(c.expected),
            number(c.upper)
        );
    }
    s.push_str("p99.99 of a task with fewer than 10 000 requests is its longest one\n");
    s.push_str("no stalls: p99.99 less the time in which the host itself stood still; what is expected, and the bound, are of that\n");
    s
}
