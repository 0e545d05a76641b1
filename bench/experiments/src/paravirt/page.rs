//! Page and report of the experiment.

use crate::experiment::{Experiment, report};
use std::path::Path;

use super::{Chain, HONEST, ParavirtData, Setup, claims, interrupts};
use crate::claims::Claim;
use crate::cyclictest::points;
use crate::page::xy::{axis, plot, series, table};
use crate::page::{Plot, Section};
use crate::report::{ExperimentReport, read};
use rtvirtio_harness::cores::idle_text;
use rtvirtio_learn::statistic::median;
use rtvirtio_report::svg::Spread;
use rtvirtio_units::Nanos;
use rtvirtio_urgency_host::Delays;

impl Experiment for ParavirtData {
    const FORM: &str = "rtvirtio-cpu-paravirt/1";
    const FILE: &str = "cpu-paravirt.json";
    const TITLE: &str = "rtvirtio: what a guest says is urgent";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{} ({} under {}), {} held by {}, {} above the floor in each second, {}; {}.",
            self.host.device,
            self.host.vmm,
            self.host.accelerator,
            self.contract,
            self.backend,
            Nanos(self.budget_ns),
            idle_text(self.awake),
            self.command
        );
        let mut sections = vec![both(self), raises(self), cost(self), lies(self)];
        if !self.interrupts.is_empty() {
            sections.push(interrupts::section(&self.interrupts));
        }
        sections.extend(self.chain.iter().map(Chain::section));
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections)
    }
}

/// Report of a result of `rtvirtio-lab box`. Its limits are those of a host whose CPU is not
/// emulated, so they do not apply here; the ids of its claims end with the file's name.
pub fn report_in_box(path: &Path) -> anyhow::Result<ExperimentReport> {
    let mut report = report::<ParavirtData>(path)?;
    report.claims = report.claims.into_iter().map(Claim::for_comparison).collect();
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    Ok(report.with_suffix(name.strip_prefix("cpu-paravirt-").unwrap_or(name)))
}

/// The latencies of a saved result as a picture: name of the file and its text.
///
/// # Errors
/// When the file cannot be read, or has none.
pub fn svg(path: &Path) -> anyhow::Result<(String, String)> {
    let data: ParavirtData = read(path)?;
    if data.both.is_empty() {
        anyhow::bail!("{} has no latencies of both VMs at once", path.display());
    }
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or("paravirt");
    Ok((format!("{name}.svg"), latencies(&data).standalone_svg()))
}

/// Histogram of latencies in each set-up.
fn latencies(data: &ParavirtData) -> Plot {
    let (x, y) = (axis("latency, us", Spread::Log), axis("how often", Spread::Log));
    let lines = Setup::ALL
        .into_iter()
        .enumerate()
        .map(|(index, setup)| series(index, setup.name(), points(&data.latencies(setup))));
    plot(&format!("A's timed task, Linux {}", data.host.kernel), x, y, lines.collect(), None)
}

/// `median (least to most)`.
fn spread(values: &[f64], digits: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if values.is_empty() {
        return "-".to_owned();
    }
    format!("{:.digits$} ({least:.digits$} to {most:.digits$})", median(values.to_vec()))
}

fn both(data: &ParavirtData) -> Section {
    let plots = if data.both.is_empty() {
        Vec::new()
    } else {
        vec![("how often each latency was seen".to_owned(), latencies(data))]
    };
    let mut rows = Vec::new();
    for setup in Setup::ALL {
        let all = data.latencies(setup);
        let of = |value: fn(&super::Both) -> f64| data.runs_of(setup).map(value).collect::<Vec<_>>();
        rows.push(vec![
            setup.name().to_owned(),
            data.runs_of(setup).count().to_string(),
            all.n().to_string(),
            format!("{:.0}", all.mean()),
            all.at(0.5).to_string(),
            all.at(0.99).to_string(),
            format!("{} [{}]", all.at(0.999), spread(&of(|b| b.latencies.at(0.999) as f64), 0)),
            all.at_beyond_floor(0.999).map_or("-".to_owned(), |us| us.to_string()),
            all.max_us.to_string(),
            spread(&of(|b| b.background), 1),
            spread(&of(|b| b.batch), 1),
            spread(&of(|b| b.boosted / b.latencies.seconds.max(1e-9) * 100.0), 1),
            spread(&data.runs_of(setup).filter_map(|b| b.weight).collect::<Vec<_>>(), 2),
        ]);
    }
    let head = [
        "set-up",
        "rounds",
        "wake-ups",
        "mean us",
        "p50",
        "p99",
        "p99.9 [of the rounds]",
        "p99.9 beyond the core's",
        "longest",
        "A's background, pieces/s",
        "B, pieces/s",
        "above the floor, % of a core",
        "A's least weight at the floor, of its own",
    ];
    Section {
        title: "Both at once: a timed task with a background job, next to a batch VM".to_owned(),
        text: vec![
            "VM A: cyclictest each millisecond at priority 99 and a job that computes; VM B computes. One core for both. Set-ups in turn in each round. Values are \
             medians with the least and the most of the rounds. Beyond the core's: less as many a second as a thread of the host at priority 99 saw on the same \
             core meanwhile."
                .to_owned(),
        ],
        plots,
        tables: vec![table("both at once", &head, rows)],
    }
}

/// Causes of the promotions of A's vCPU, and delays of the promotions and of the task.
fn raises(data: &ParavirtData) -> Section {
    let all = data.raises();
    let row = |name: &str, delays: &Delays| {
        let counts = delays.counts.iter().map(u64::to_string);
        let longest = delays.longest.0.div_ceil(1000).to_string();
        [vec![name.to_owned(), delays.n().to_string()], counts.collect(), vec![longest]].concat()
    };
    let rows = vec![
        row("raised for a timer, after it was to be", &all.timer),
        row("raised by a look, after the report", &all.look),
        row("raised by a notice, after the report", &all.notice),
        row("the task ran after its timer, where the vCPU was raised before it", &all.tasks_in_time),
        row("the task ran after its timer, where it was not", &all.tasks_late),
    ];
    let edges = Delays::EDGES_US.map(|us| format!("< {us} us"));
    let mut head = vec!["", "n"];
    head.extend(edges.iter().map(String::as_str));
    head.extend(["longer", "longest us"]);
    Section {
        title: "What raised A's vCPU while A says what is urgent".to_owned(),
        text: vec![
            "Counted by the host, warm-ups with it. The task's times are from its timer to its report, both by the guest's clock: where the vCPU was raised in \
             time, what is late is the guest, its emulation or the host's core."
                .to_owned(),
        ],
        plots: Vec::new(),
        tables: vec![table("raises", &head, rows)],
    }
}

fn cost(data: &ParavirtData) -> Section {
    let row = |reports: bool| {
        let of = |value: fn(&super::Cost) -> f64| {
            data.cost.iter().filter(|c| c.reports == reports).map(value).collect::<Vec<_>>()
        };
        let wakeups: u64 = data.cost.iter().filter(|c| c.reports == reports).map(|c| c.wakeups).sum();
        vec![
            if reports { "with reports" } else { "without" }.to_owned(),
            wakeups.to_string(),
            spread(&of(|c| c.latency_us), 1),
            spread(&of(|c| c.switches), 0),
        ]
    };
    let head = ["", "wake-ups", "mean latency, us", "a byte to and fro, times/s"];
    let mut promotions = crate::cyclictest::Latencies::default();
    data.promotions.iter().for_each(|p| promotions.merge(p));
    let doorbell = if data.doorbell { "with a doorbell" } else { "without a doorbell" };
    let text = format!(
        "A alone on the core, with reports under its contract, without them as an ordinary VM; cyclictest and a byte between two threads, both ordinary. From a report to the level that the host shows the \
         guest, {doorbell}: n {}, p50 {} us, p99 {} us, longest {} us; p99 beyond the stalls of the host's other core {} us.",
        promotions.n(),
        promotions.at(0.5),
        promotions.at(0.99),
        promotions.max_us,
        promotions.at_beyond_floor(0.99).map_or("-".to_owned(), |us| us.to_string())
    );
    Section {
        title: "What reports cost where nothing is urgent, and how fast a promotion is".to_owned(),
        text: vec![text],
        plots: Vec::new(),
        tables: vec![table("cost", &head, vec![row(false), row(true)])],
    }
}

fn lies(data: &ParavirtData) -> Section {
    let mut kinds: Vec<(String, f64)> = data.neighbour_ratios();
    kinds.insert(0, (HONEST.to_owned(), 1.0));
    let rows = kinds.iter().map(|(kind, ratio)| {
        let of: Vec<&super::Lie> = data.lies.iter().filter(|l| l.kind == *kind).collect();
        let values = |value: fn(&super::Lie) -> f64| of.iter().map(|l| value(l)).collect::<Vec<_>>();
        vec![
            kind.clone(),
            of.len().to_string(),
            spread(&values(|l| l.batch), 1),
            format!("{ratio:.3}"),
            spread(&values(|l| l.boosted / l.seconds.max(1e-9) * 1000.0), 0),
            of.iter().map(|l| l.notices[0]).sum::<u64>().to_string(),
            of.iter().map(|l| l.notices[1]).sum::<u64>().to_string(),
        ]
    });
    let head = [
        "what A says",
        "rounds",
        "B, pieces/s",
        "over next to an honest guest",
        "above the floor, ms/s",
        "notices",
        "ignored",
    ];
    let rows = rows.collect();
    Section {
        title: "A guest that lies".to_owned(),
        text: vec![
            "A computes all the time. `urgent` is what an honest guest says whose urgent work never ends: it may use its budget. The others are false; `torn` leaves \
             reports half written, `address` names memory that is not there."
                .to_owned(),
        ],
        plots: Vec::new(),
        tables: vec![table("lies", &head, rows)],
    }
}
