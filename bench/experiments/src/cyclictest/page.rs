//! Latency in a guest: the RT hypervisor paper's Figs. 1 to 5.

use crate::experiment::Experiment;

use super::{CyclictestData, LARGEST_US, Latencies, Setup, claims};
use crate::page::Section;
use crate::report::ExperimentReport;
use rtvirtio_harness::cores::idle_text;
use rtvirtio_report::svg::Spread;

use crate::page::xy::{axis, plot, series, table};

impl Experiment for CyclictestData {
    const FORM: &str = "rtvirtio-cpu-cyclictest/2";
    const FILE: &str = "cpu-cyclictest.json";
    const TITLE: &str = "rtvirtio: latency in a guest";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{} ({} under {}), {} held by {}, {}; {}.",
            self.host.device,
            self.host.vmm,
            self.host.accelerator,
            self.contract,
            self.backend,
            idle_text(self.awake),
            self.commands.join("; ")
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections(self))
    }
}

/// Sections, one for each guest kernel.
fn sections(data: &CyclictestData) -> Vec<Section> {
    data.kernels().into_iter().map(|kernel| section(data, kernel)).collect()
}

fn section(data: &CyclictestData, kernel: &str) -> Section {
    let (mut lines, mut rows) = (Vec::new(), Vec::new());
    for (index, setup) in Setup::ALL.into_iter().enumerate() {
        let Some(of) = data.series_for(kernel, setup) else { continue };
        let all = of.all();
        let at = |p: f64| all.at(p).to_string();
        let rounds: Vec<u64> = of.rounds.iter().map(|r| r.at(0.999)).collect();
        let (least, most) = (rounds.iter().min().unwrap_or(&0), rounds.iter().max().unwrap_or(&0));
        rows.push(vec![
            setup.name().to_owned(),
            format!("{:.1} in {}", all.seconds / 60.0, of.rounds.len()),
            all.n().to_string(),
            format!("{:.0}", all.mean()),
            at(0.5),
            at(0.99),
            format!("{} ({least} to {most})", all.at(0.999)),
            of.watched().at_beyond_floor(0.999).map_or("-".to_owned(), |us| us.to_string()),
            all.max_us.to_string(),
            all.stolen.map_or("-".to_owned(), |s| format!("{:.2} %", 100.0 * s / all.seconds)),
        ]);
        lines.push(series(index, setup.name(), points(&all)));
    }
    let (x, y) = (axis("latency, us", Spread::Log), axis("how often", Spread::Log));
    let head = [
        "set-up",
        "min in runs",
        "n",
        "mean us",
        "p50",
        "p99",
        "p99.9 (of the runs)",
        "p99.9 beyond the core's",
        "longest",
        "stolen",
    ];
    Section {
        title: format!("Latency in a guest with {kernel} (the RT hypervisor paper's Figs. 1 to 5)"),
        text: vec![format!(
            "cyclictest, set-ups in turn; {}. Stolen is the time in which the hypervisor below this host gave the core to others. Beyond the core's: less as many a second as a \
             thread of the host at priority 99 saw on the same core meanwhile. Both axes are logarithmic; {LARGEST_US} us and more are in the table only. The paper \
             measured over KVM for 15 minutes: without priorities multi-millisecond latencies, some above 100 ms; on a PREEMPT_RT host with AIO \
             lowered 75 us in the mean and less than 500 us at most.",
            data.contract
        )],
        plots: vec![(
            "how often each latency was seen".to_owned(),
            plot(&format!("latencies, {kernel}"), x, y, lines, None),
        )],
        tables: vec![table("latencies", &head, rows)],
    }
}

/// Counts in steps of a quarter octave, at their lower ends: single microseconds are too many to
/// draw.
pub(crate) fn points(latencies: &Latencies) -> Vec<(f64, f64, String)> {
    let mut steps: Vec<(i64, u64)> = Vec::new();
    for (us, n) in &latencies.counts {
        let step = (4.0 * (*us.max(&1) as f64).log2()).floor() as i64;
        match steps.last_mut() {
            Some(last) if last.0 == step => last.1 += n,
            _ => steps.push((step, *n)),
        }
    }
    let point = |(step, n): (i64, u64)| {
        let us = (step as f64 / 4.0).exp2();
        (us, n as f64, format!("{us:.0} us: {n}"))
    };
    steps.into_iter().map(point).collect()
}
