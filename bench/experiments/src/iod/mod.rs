//! The I/O domain compared with existing schedulers: a flood next to declared rates, and the cost
//! of a request.

pub(crate) mod measure;
mod page;
pub mod simulated;
pub mod window;

pub use measure::{IodOptions, measure};

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rtvirtio_domain_client::load::{Stream, StreamResult};
use rtvirtio_domain_config::DiskId;
use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::run::PLACEBO_NS;
use rtvirtio_measure::stalls::Stalls;
use rtvirtio_measure::{HostFacts, Run, TaskResult, VmKind};
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use rtvirtio_learn::statistic::median;
use simulated::Simulated;
use window::WindowRun;

/// Rates of the paper's tasks L, M and H, of each protected VM.
pub const RATES: [f64; 3] = [100.0, 500.0, 1_500.0];
/// VMs with declared rates.
pub const PROTECTED: usize = 3;
/// Requests that the flooding VM keeps outstanding.
pub const FLOOD_DEPTH: usize = 32;
/// Target of every task, and its deadline in the I/O domain when schemes are compared.
pub const TARGET: Nanos = Nanos(5_000_000);

/// Real-time priority of the I/O domain's engine.
pub const FIFO: i32 = 30;

/// Configuration of the I/O domain for a run of the flood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloodScheme {
    /// Id in results.
    pub name: &'static str,
    pub(crate) policy: &'static str,
    /// Window, as in the I/O domain's file.
    pub(crate) window: &'static str,
    /// Deadline of the reservations.
    pub(crate) deadline: Nanos,
    /// Whether the fourth VM floods.
    pub flood: bool,
}

/// Compared schemes: ours alone and with the flood, the I/O-domain paper's round robin, and first
/// come first served with all requests passed on, as in backends without a scheduler.
pub const FLOOD_SCHEMES: [FloodScheme; 4] = [
    FloodScheme { name: "edf, no flood", policy: "edf", window: "8", deadline: TARGET, flood: false },
    FloodScheme { name: "edf", policy: "edf", window: "8", deadline: TARGET, flood: true },
    FloodScheme { name: "round-robin", policy: "round-robin", window: "8", deadline: TARGET, flood: true },
    FloodScheme { name: "fifo", policy: "fifo", window: "64", deadline: TARGET, flood: true },
];

#[must_use]
pub fn socket(dir: &Path, vm: usize) -> PathBuf {
    dir.join(format!("vm{vm}.sock"))
}

/// Each VM's part of a device of `size` bytes: whole blocks.
#[must_use]
pub fn part_of(size: u64) -> u64 {
    size / (PROTECTED as u64 + 1) / 4_096 * 4_096
}

/// Configuration of the I/O domain for a run: each VM has a quarter of `size` bytes of the device.
/// `read` is the device's service time of 4 KiB.
#[must_use]
pub fn flood_config(scheme: &FloodScheme, device: &Path, size: u64, read: Nanos, dir: &Path) -> String {
    let mut s = format!(
        "control = {:?}\n[[device]]\nname = \"bench\"\npolicy = \"{}\"\nwindow = {}\nfifo = {FIFO}\n\
         cost = {{ read = {{ base = \"{}ns\", per_mib = \"1ms\" }}, write = {{ base = \"{}ns\", per_mib = \"1ms\" }} }}\n",
        dir.join("control").display().to_string(),
        scheme.policy,
        scheme.window,
        read.0.saturating_sub(4_000).max(1_000),
        read.0.saturating_sub(4_000).max(1_000),
    );
    let part = part_of(size);
    // Twenty per cent above the load, and bursts as large as the backlog of a 5 ms stall of a host
    // CPU.
    let asked: f64 = RATES.iter().sum();
    let share = asked * read.as_secs_f64() * 1.2 * 100.0;
    let burst = Nanos::from_secs_f64((asked * 5e-3 + 3.0).ceil() * read.as_secs_f64());
    for vm in 0..=PROTECTED {
        let _ = write!(
            s,
            "[[device.disk]]\nname = \"vm{vm}\"\nsocket = {:?}\npath = {:?}\noffset = \"{}B\"\nsize = \"{part}B\"\nshared = true\n",
            socket(dir, vm).display().to_string(),
            device.display().to_string(),
            part * vm as u64,
        );
        if vm < PROTECTED {
            let _ = writeln!(
                s,
                "reserve = {{ share = \"{share:.2}%\", burst = \"{}ns\", deadline = \"{}ns\" }}",
                burst.0, scheme.deadline.0
            );
        }
    }
    s
}

/// Streams of a run.
#[must_use]
pub fn flood_streams(flood: bool, span: u64) -> Vec<Stream> {
    let stream = |client: usize, name: &str, rate: Option<f64>, depth: usize| Stream {
        client,
        rate,
        ..Stream::reads(name, depth, span)
    };
    let mut streams: Vec<Stream> = (0..PROTECTED)
        .flat_map(|vm| RATES.iter().enumerate().map(move |(t, rate)| (vm, t, *rate)))
        // A declared rate is submitted on schedule, whatever is completed: with as many outstanding
        // requests as that takes.
        .map(|(vm, t, rate)| stream(vm, &format!("vm{vm}/{}", ["L", "M", "H"][t]), Some(rate), 150))
        .collect();
    if flood {
        streams.push(stream(PROTECTED, "flood", None, FLOOD_DEPTH));
    }
    streams
}

/// Converts a stream's outcome to a task result.
#[must_use]
pub fn as_run(
    scheme: &str,
    seconds: f64,
    streams: &[Stream],
    got: &[StreamResult],
    (noise, stalls): (Noise, Option<Stalls>),
) -> Run {
    let less = |got: &StreamResult, by: u64| {
        let stalls = stalls.as_ref()?.shifted(by);
        let mut all: Vec<u64> = got.spans.iter().map(|(a, b)| b - a - stalls.within(*a, *b)).collect();
        all.sort_unstable();
        // The maximum replaces p99.99 of fewer than 10 000 requests.
        let beyond = if all.len() < 10_000 { 0 } else { all.len() / 10_000 };
        all.len().checked_sub(1 + beyond).map(|i| Nanos(all[i]))
    };
    let task = |(stream, got): (&Stream, &StreamResult)| {
        let (vm, task) = got.name.split_once('/').unwrap_or((&got.name, ""));
        TaskResult {
            vm: vm.to_owned(),
            task: task.to_owned(),
            percentile: Percentile::P9999,
            target_ns: stream.rate.map(|_| TARGET),
            declared_rate: stream.rate.map(Iops),
            achieved_rate: Iops(got.rate),
            n: got.n,
            p50_ns: got.percentile(50.0),
            p99_ns: got.percentile(99.0),
            p9999_ns: got.tail(),
            p9999_excl_host_stalls_ns: less(got, 0),
            p9999_placebo_ns: less(got, PLACEBO_NS),
            max_ns: got.max(),
            fio_p9999_ns: got.tail(),
            at_target_ns: None,
            fio_cpus: 0.0,
            tail: None,
            predicted_ns: None,
            causes: None,
            causes_unread: Vec::new(),
            exceedances: 0,
            flow: None,
            verdict: None,
            why: format!("{} errors, {} unanswered", got.errors, got.unanswered),
        }
    };
    Run {
        scheme: scheme.to_owned(),
        kind: VmKind::Process,
        seconds,
        noise: Some(noise),
        disk: None,
        tasks: streams.iter().zip(got).map(task).collect(),
    }
}

/// Worst tail of the protected tasks of a run in ms, less the time in which a CPU of the host
/// stalled, where that is known.
fn worst_ms(run: &Run) -> f64 {
    protected(run)
        .map(|t| t.p9999_excl_host_stalls_ns.unwrap_or(t.p9999_ns).as_millis_f64())
        .fold(0.0, f64::max)
}

/// Slowest median of the protected tasks of a run, in ms.
pub(crate) fn middle_ms(run: &Run) -> f64 {
    protected(run).map(|t| t.p50_ns.as_millis_f64()).fold(0.0, f64::max)
}

/// Worst tail as measured, in ms.
pub(crate) fn measured_ms(run: &Run) -> f64 {
    protected(run).map(|t| t.p9999_ns.as_millis_f64()).fold(0.0, f64::max)
}

fn protected(run: &Run) -> impl Iterator<Item = &TaskResult> {
    run.tasks.iter().filter(|t| t.declared_rate.is_some())
}

/// Smallest share of a declared rate that was reached.
pub(crate) fn kept(run: &Run) -> f64 {
    let share = |t: &TaskResult| t.declared_rate.map_or(1.0, |r| t.achieved_rate.0 / r.0);
    protected(run).map(share).fold(1.0, f64::min)
}

pub(crate) fn total(run: &Run) -> f64 {
    run.tasks.iter().map(|t| t.achieved_rate.0).sum()
}

/// Claims of the flood. `rounds` holds the runs of each round in the order of [`FLOOD_SCHEMES`].
#[must_use]
pub fn flood_claims(rounds: &[Vec<Run>]) -> Vec<Claim> {
    let n = rounds.len();
    let middle = |f: &dyn Fn(&[Run]) -> f64| median(rounds.iter().map(|r| f(r)).collect());
    let asked = RATES.iter().sum::<f64>() * PROTECTED as f64;
    let mut claims = vec![
        Claim::new(
            "iod.flood.rate_kept",
            "smallest share of a declared rate under a flood of depth 32, worst round",
            rounds.iter().map(|r| kept(&r[1])).fold(1.0, f64::min),
            "share",
            n,
        )
        .at_least(0.99),
        Claim::new(
            "iod.flood.p9999_ms",
            "worst p99.99 of nine tasks under the flood, less the host's own stalls, median of rounds; at most 5 ms, or twice that without the flood where the host is noisier",
            middle(&|r| worst_ms(&r[1])),
            "ms",
            n,
        )
        .at_most((2.0 * middle(&|r| worst_ms(&r[0]))).max(5.0)),
        Claim::new(
            "iod.flood.p9999_over_solo",
            "the same over that of the same round without the flood, median of rounds",
            middle(&|r| worst_ms(&r[1]) / worst_ms(&r[0]).max(1e-6)),
            "times",
            n,
        )
        .at_most(1.5),
        Claim::new(
            "iod.flood.of_the_rest",
            "rate of the flood, as a share of the total rate under first come first served less the declared rates",
            middle(&|r| {
                let flood: f64 =
                    r[1].tasks.iter().filter(|t| t.declared_rate.is_none()).map(|t| t.achieved_rate.0).sum();
                flood / (total(&r[3]) - asked).max(1.0)
            }),
            "share",
            n,
        )
        .at_least(0.9),
    ];
    for (i, name) in [(0, "solo"), (1, "edf"), (2, "round_robin"), (3, "fifo")] {
        claims.push(Claim::new(
            format!("iod.flood.p9999_measured_ms.{name}"),
            format!("worst p99.99 of {} as measured, with the host's stalls", FLOOD_SCHEMES[i].name),
            middle(&|r| measured_ms(&r[i])),
            "ms",
            n,
        ));
        claims.push(Claim::new(
            format!("iod.flood.p50_ms.{name}"),
            format!("slowest median of the nine tasks, {}", FLOOD_SCHEMES[i].name),
            middle(&|r| middle_ms(&r[i])),
            "ms",
            n,
        ));
    }
    for (i, name) in [(2, "round_robin"), (3, "fifo")] {
        claims.push(Claim::new(
            format!("iod.flood.p9999_ms.{name}"),
            format!("worst p99.99 next to the flood under {}, less the host's stalls", FLOOD_SCHEMES[i].name),
            middle(&|r| worst_ms(&r[i])),
            "ms",
            n,
        ));
        claims.push(Claim::new(
            format!("iod.flood.rate_kept.{name}"),
            format!("smallest share of a declared rate under {}, for comparison", FLOOD_SCHEMES[i].name),
            rounds.iter().map(|r| kept(&r[i])).fold(1.0, f64::min),
            "share",
            n,
        ));
    }
    claims
}

/// Throughput and cost of a run against a backend over memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Requests outstanding at a time.
    pub depth: usize,
    /// Completed requests per second.
    pub iops: f64,
    /// Median latency, ns.
    pub p50: f64,
    /// CPU time of the backend per request, ns.
    pub cpu: f64,
    /// Whether the client polls for completions, as a guest with a core of its own does; else it
    /// sleeps.
    #[serde(default)]
    pub spin: bool,
}

/// Depths at which backends are compared.
pub const DEPTHS: [usize; 3] = [1, 32, 128];

/// Claims of the cost of a request: pairs of the same round and depth, ours and the peer's.
#[must_use]
pub fn cost_claims(pairs: &[(Cost, Cost)]) -> Vec<Claim> {
    let spins = if pairs.iter().any(|(ours, _)| ours.spin) { &[false, true][..] } else { &[false] };
    spins.iter().flat_map(|spin| cost_claims_of(pairs, *spin)).collect()
}

fn cost_claims_of(pairs: &[(Cost, Cost)], spin: bool) -> Vec<Claim> {
    let (id, client) = if spin { ("iod.polling", ", polling client") } else { ("iod", "") };
    let count = pairs.iter().filter(|(ours, _)| ours.spin == spin).count();
    let ratio = |depth: Option<usize>, f: &dyn Fn(&Cost) -> f64| {
        let of = pairs.iter().filter(|(ours, _)| ours.spin == spin && depth.is_none_or(|d| ours.depth == d));
        let ratios: Vec<f64> = of.map(|(ours, peer)| f(ours) / f(peer).max(1e-9)).collect();
        (ratios.len(), median(ratios))
    };
    let mut claims = Vec::new();
    for depth in DEPTHS {
        let (n, value) = ratio(Some(depth), &|c| c.iops);
        let what = format!(
            "requests per second at depth {depth}{client}, over qemu-storage-daemon's, median of pairs"
        );
        claims.push(Claim::new(format!("{id}.qd{depth}.iops_ratio"), what, value, "times", n).at_least(1.0));
    }
    let (n, p50) = ratio(Some(1), &|c| c.p50);
    claims.push(
        Claim::new(
            format!("{id}.qd1.p50_ratio"),
            format!("median latency at depth 1{client}, over qemu-storage-daemon's, median of pairs"),
            p50,
            "times",
            n,
        )
        .at_most(1.0),
    );
    let worst = DEPTHS.iter().map(|d| ratio(Some(*d), &|c| c.cpu).1).fold(0.0, f64::max);
    claims.push(
        Claim::new(
            format!("{id}.cpu_per_io_ratio"),
            format!("CPU time per request{client}, over qemu-storage-daemon's, worst of the depths' medians"),
            worst,
            "times",
            count,
        )
        .at_most(1.0),
    );
    claims
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IodData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Runs of the flood, each round in the order of [`FLOOD_SCHEMES`].
    pub rounds: Vec<Vec<Run>>,
    /// Cost of a request, ours and the peer's.
    pub pairs: Vec<(Cost, Cost)>,
    /// Requests per second of one busy disk at depth 32, on an engine of one disk and on one of 64,
    /// each round.
    #[serde(default)]
    pub many: Vec<[f64; 2]>,
    /// Lateness of pieces that a regulator had held: p99.99 in ns, and their number.
    pub late: Option<(u64, u64)>,
    /// Declared service time of a read of 4 KiB.
    #[serde(default)]
    pub read: Nanos,
    /// Results of the scheduler in simulation.
    #[serde(default)]
    pub simulated: Option<Simulated>,
    /// Latency of single requests from guest to device and back on an idle host: median and longest
    /// of each round, ns.
    #[serde(default)]
    pub path: Vec<(u64, u64)>,
    /// Runs of the flood, each round in the order of [`window::WINDOW_SCHEMES`].
    #[serde(default)]
    pub windows: Vec<Vec<WindowRun>>,
}

/// The bound of the protected VMs for the time without progress that the path shows when it is
/// idle, with the longest request of the flood's runs, both on this machine with its stalls.
fn bound_claims(data: &IodData) -> Vec<Claim> {
    let Some(stall) = data.path.iter().map(|(p50, longest)| longest.saturating_sub(*p50)).max() else {
        return Vec::new();
    };
    let alone = median(data.path.iter().map(|(p50, _)| *p50 as f64).collect());
    // The flood's file, which only the twin's own numbers enter.
    let text = flood_config(&FLOOD_SCHEMES[1], Path::new("/"), 1 << 30, data.read, Path::new("/"));
    let Ok(file) = rtvirtio_domain_config::File::parse(Path::new("flood"), &text) else { return Vec::new() };
    let later = (alone as u64).saturating_sub(data.read.0);
    let Some(bound) = file.devices.first().and_then(|d| d.bound(DiskId(0), Nanos(stall + later))) else {
        return Vec::new();
    };
    let longest = |r: &[Run]| protected(&r[1]).map(|t| t.max_ns.0).max().unwrap_or(1) as f64;
    let ratios: Vec<f64> = data.rounds.iter().map(|r| bound.0 as f64 / longest(r)).collect();
    let n = ratios.len();
    vec![
        Claim::new(
            "iod.bound.over_worst.measured",
            "bound, with the longest stall of the idle path, over the longest request as measured under the flood; median of rounds",
            median(ratios.clone()),
            "times",
            n,
        )
        .at_most(3.0),
        Claim::new(
            "iod.bound.over_worst.measured_least",
            "the same, worst round: below 1 when the host stalled for longer than while the path was idle",
            ratios.into_iter().fold(f64::INFINITY, f64::min),
            "times",
            n,
        )
        .at_least(1.0),
    ]
}

#[must_use]
pub fn claims(data: &IodData) -> Vec<Claim> {
    let mut claims = if data.rounds.is_empty() { Vec::new() } else { flood_claims(&data.rounds) };
    if !data.pairs.is_empty() {
        claims.extend(cost_claims(&data.pairs));
    }
    if !data.many.is_empty() {
        let ratios: Vec<f64> = data.many.iter().map(|[one, many]| many / one.max(1e-9)).collect();
        let (n, what) =
            (ratios.len(), "requests per second of one busy disk out of 64, over those of one disk");
        claims.push(Claim::new("iod.many.iops_ratio", what, median(ratios), "times", n).at_least(0.8));
    }
    if let Some((late, n)) = data.late {
        let what = "p99.99 of how much later than the exact moment requests went that a regulator had held";
        claims.push(
            Claim::new("iod.regulator.error_us", what, late as f64 / 1e3, "us", n as usize).at_most(100.0),
        );
    }
    claims.extend(data.simulated.iter().flat_map(simulated::claims));
    claims.extend(bound_claims(data));
    claims.extend(window::claims(&data.windows));
    claims
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_one() {
        for scheme in &FLOOD_SCHEMES {
            let text =
                flood_config(scheme, Path::new("/dev/loop0"), 1 << 30, Nanos(66_000), Path::new("/run/x"));
            let file = rtvirtio_domain_config::File::parse(Path::new("x"), &text).unwrap();
            let sched = file.devices[0].sched();
            assert_eq!(sched.vms.len(), 4);
            // 2100 requests of 66 us are 13.9 % of the device; a fifth more is reserved.
            assert_eq!(sched.vms[0].normal.unwrap().rate, 166_300_000);
            assert_eq!(sched.vms[3].normal, None);
        }
    }

    #[test]
    fn ratios_are_medians_of_pairs() {
        let cost = |iops: f64| Cost { depth: 1, iops, p50: 1e9 / iops, cpu: 1_000.0, spin: false };
        let claims =
            cost_claims(&[(cost(100.0), cost(50.0)), (cost(90.0), cost(100.0)), (cost(80.0), cost(80.0))]);
        assert_eq!((claims[0].value, claims[0].n, claims[0].met), (1.0, 3, true));
        // Depths that were not measured do not meet their limit.
        assert!(!claims[1].met);
    }
}
