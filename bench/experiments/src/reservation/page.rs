//! Two guests on one core: the reservations paper's Figs. 1b, 2, 3 and 4.

use crate::experiment::Experiment;

use super::{Alone, NEIGHBOUR_BUDGETS, OWN_BUDGET, ReservationData, WEB_SHARE, claims};
use crate::page::Section;
use crate::report::ExperimentReport;
use rtvirtio_harness::cores::idle_text;
use rtvirtio_learn::statistic::median;
use rtvirtio_report::svg::Spread;

use crate::page::xy::{axis, plot, series, table};

impl Experiment for ReservationData {
    const FORM: &str = "rtvirtio-cpu-reservation/1";
    const FILE: &str = "cpu-reservation.json";
    const TITLE: &str = "rtvirtio: CPU contracts";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{} ({} under {}), their contracts held by {}, {}; {}.",
            self.host.device,
            self.host.vmm,
            self.host.accelerator,
            self.backend,
            idle_text(self.awake),
            self.command
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections(self))
    }
}

/// Sections of all figures.
fn sections(data: &ReservationData) -> Vec<Section> {
    let mut all = vec![alone(data), neighbour_section(data)];
    // With `--requests 0` there are none.
    all.extend((!data.web.is_empty()).then(|| web(data)));
    all
}

fn alone(data: &ReservationData) -> Section {
    let mut budgets: Vec<u64> = data.alone.iter().map(|a| a.budget).collect();
    budgets.sort_unstable();
    budgets.dedup();
    let mut points = Vec::new();
    let mut rows = Vec::new();
    for b in budgets {
        let of = |pick: &dyn Fn(&Alone) -> f64| -> Vec<f64> {
            data.alone.iter().filter(|a| a.budget == b).map(pick).collect()
        };
        let (mb, used) = (of(&|a| a.mb_per_s), of(&|a| a.used));
        let (least, most) = ends(&mb);
        points.push((b as f64, median(mb.clone()), format!("{b} %: {:.2} MB/s", median(mb.clone()))));
        rows.push(vec![
            format!("{b} %"),
            mb.len().to_string(),
            format!("{:.3} ({least:.3} to {most:.3})", median(mb)),
            format!("{:.1} %", median(used)),
        ]);
    }
    let (x, y) = (axis("budget, % of a core", Spread::Linear), axis("MB/s", Spread::Linear));
    Section {
        title: "Throughput of a VM over its budget (the paper's Fig. 1b)".to_owned(),
        text: vec![format!(
            "One VM alone, all of its threads in one contract with a period of {:.0} ms; {:.0} s each, in {} pieces between those of all others. The paper calls its own curve \
             nearly linear, over a real network card and KVM.",
            data.period_us as f64 / 1e3,
            data.length,
            data.slices
        )],
        plots: vec![(
            "throughput over budget".to_owned(),
            plot("throughput over budget", x, y, vec![series(0, "median", points)], None),
        )],
        tables: vec![table("throughput", &["budget", "n", "MB/s", "CPU used"], rows)],
    }
}

fn neighbour_section(data: &ReservationData) -> Section {
    let curve = |index: usize, name: &str, all_threads: bool| {
        let points = NEIGHBOUR_BUDGETS.iter().filter_map(|&n| {
            let (mb, count) = data.throughput_next_to(n, all_threads);
            (count > 0).then(|| (n as f64, mb, format!("{n} %: {mb:.2} MB/s")))
        });
        series(index, name, points.collect())
    };
    let rows = data.beside.iter().map(|b| {
        vec![
            format!("{} %", b.neighbour),
            if b.all_threads { "all threads" } else { "vCPUs only" }.to_owned(),
            format!("{:.3}", b.mb_per_s),
            format!("{:.3}", b.neighbour_mb_per_s),
            format!("{:.1} %", b.used),
        ]
    });
    let (x, y) =
        (axis("the neighbour's budget, % of the core", Spread::Linear), axis("MB/s", Spread::Linear));
    let lines = vec![curve(0, "all threads inside", true), curve(1, "vCPUs only inside", false)];
    let percent = |all| 100.0 * data.change(all).0;
    Section {
        title: "Throughput of a VM with a neighbour (the paper's Figs. 2 and 3)".to_owned(),
        text: vec![format!(
            "The VM has {OWN_BUDGET} % of the core, the neighbour{} 10 to 40 %. From 10 to 40 % the VM's throughput changes by {:+.1} % with all threads \
             inside the contracts, and by {:+.1} % with its vCPUs only; the paper reports -20 to -30 %.",
            if data.neighbour_computes { ", which only computes," } else { "" },
            percent(true),
            percent(false)
        )],
        plots: vec![(
            "throughput over the neighbour's budget".to_owned(),
            plot("throughput over the neighbour's budget", x, y, lines, None),
        )],
        tables: vec![table(
            "with a neighbour",
            &["neighbour", "inside", "MB/s", "neighbour's MB/s", "CPU used"],
            rows.collect(),
        )],
    }
}

fn web(data: &ReservationData) -> Section {
    let conditions = [
        (true, false, false, "loaded neighbour, no contract"),
        (true, true, false, "loaded neighbour, contract"),
        (true, false, true, "loaded neighbour, a fair group for each VM"),
        (false, false, false, "idle neighbour, no contract"),
        (false, true, false, "idle neighbour, contract"),
    ];
    let (mut lines, mut rows) = (Vec::new(), Vec::new());
    for (i, (loaded, contract, apart, name)) in conditions.into_iter().enumerate() {
        let mut ms = data.responses(loaded, contract, apart);
        if ms.is_empty() {
            continue;
        }
        ms.sort_by(f64::total_cmp);
        let n = ms.len();
        let (late, all) = data.late(loaded, contract, apart);
        rows.push(vec![
            name.to_owned(),
            all.to_string(),
            format!("{:.1}", median(ms.clone())),
            format!("{:.1}", ms[n - 1]),
            format!("{:.2}", ms[n - 1] / data.deadline_ms),
            format!("{late} ({:.1} %)", 100.0 * late as f64 / all as f64),
        ]);
        // Hundreds of points draw the same line as fifty do, and its end.
        let step = (n / 50).max(1);
        let shown = (0..n).filter(|i| i % step == 0 || *i == n - 1);
        let share = |i: usize| (i + 1) as f64 / n as f64;
        lines.push(series(i, name, shown.map(|i| (ms[i], share(i), format!("{:.1} ms", ms[i]))).collect()));
    }
    let (x, y) = (axis("response, ms (log)", Spread::Log), axis("share of the requests", Spread::Linear));
    Section {
        title: "Web requests with a loaded neighbour (the paper's Fig. 4)".to_owned(),
        text: vec![format!(
            "A file of 100 kB each {0:.0} ms, which is also the deadline: {1:.1} times an unloaded response of {2:.1} ms, as in the paper \
             (20 ms, 2.1 ms). The contract gives the VM {3:.0} % of a core in each period of {0:.0} ms (paper: 4 ms in 20 ms); the neighbour, \
             which serves clients too and computes on each of its {4} vCPUs, has none. The paper reports over 30 % late without and none with a contract, the longest at 36 % of the deadline.",
            data.deadline_ms,
            data.deadline_ms / data.response_ms,
            data.response_ms,
            100.0 * WEB_SHARE,
            data.neighbour_vcpus
        )],
        plots: vec![("cumulated shares".to_owned(), plot("responses", x, y, lines, None))],
        tables: vec![table(
            "responses",
            &["condition", "n", "median ms", "longest ms", "over the deadline", "late"],
            rows,
        )],
    }
}

fn ends(v: &[f64]) -> (f64, f64) {
    v.iter().fold((f64::INFINITY, 0.0), |(l, h), x| (l.min(*x), h.max(*x)))
}
