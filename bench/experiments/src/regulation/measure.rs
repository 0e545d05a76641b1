//! Measurement of all points, interleaved.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_testbed::RamDisk;
use rtvirtio_traffic::{Direction, Place, ServiceTarget, Tspec, Unit, choose, compile};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::{Progress, cpus, generated, kernel_release};

use super::cpu_budget::CpuBudget;
use super::device_load::DeviceLoad;
use super::memory_load::{MemoryLoad, largest_cache};
use super::model::{limit, model};
use super::{
    Beside, ChosenRate, Point, RefusedTarget, RegulationData, UNITS, VictimPoint, disk, network, point,
    rates, victim,
};
use crate::experiment::host_facts;
use crate::interleave::{Counter, interleaved};
use crate::saved::Saved as _;

/// Real-time priority of the I/O domain's engine, above that of the front end.
pub(super) const ENGINE: i32 = 30;
/// Real-time priority of the front end, above the memory load, which has none.
const FRONTEND: u32 = 20;
/// Size of the disk in memory.
pub(super) const DISK: Bytes = Bytes(256 << 20);
/// From the start of a flow to its first counted unit.
pub(super) const WARM_UP: Duration = Duration::from_millis(200);
/// Shortest time of a point, unless all are shorter.
const SHORTEST: Duration = Duration::from_millis(700);
/// Time of a flow without a regulator, and of victim and neighbour, unless all are shorter: far
/// more than ten thousand units.
const SATURATED: Duration = Duration::from_secs(3);
/// Most attempts at a measurement in which a CPU of the host stalls for more than a twentieth of
/// the time; the last one counts in any case.
const ATTEMPTS: u32 = 3;

/// Lateness that about one in ten thousand wake-ups of this machine exceeds.
const LATE: Duration = Duration::from_millis(10);
/// Targets of the victim's alpha, as shares of the range from its least value to its largest.
const TARGETS: [f64; 3] = [0.25, 0.5, 0.75];
/// Target of the victim's Delta over the longest measured one.
const SLACK: f64 = 1.5;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct RegulationOptions {
    /// Longest time of a point.
    pub longest: Duration,
    /// Largest regulated rate, per second.
    pub top: u64,
    /// Number of rates, each half of the one before.
    pub rates: u32,
    /// Measurements of the victim at each rate.
    pub rounds: u32,
    /// The command's options, for the result.
    pub words: String,
    /// Only these flows; all when empty.
    pub flows: Vec<Direction>,
    /// Loads next to the flow, one at a time.
    pub loads: Vec<Beside>,
}

/// Loads that can run next to a flow.
struct Loads {
    memory: MemoryLoad,
    device: Option<DeviceLoad>,
    // Dropped after its threads.
    budget: Option<CpuBudget>,
}

impl Loads {
    fn new(wanted: &[Beside], progress: &dyn Progress) -> anyhow::Result<Self> {
        let all_cpus: Vec<u32> = (0..cpus() as u32).collect();
        progress.step("making the memory of the load");
        let memory = MemoryLoad::new(&all_cpus)?;
        let device = wanted.contains(&Beside::Device).then(DeviceLoad::new).transpose()?;
        let held = wanted.contains(&Beside::Held);
        let budget = held.then(|| CpuBudget::new(&memory.threads())).transpose()?;
        Ok(Self { memory, device, budget })
    }

    /// Starts the loads of `beside`, and pauses the others.
    fn set(&self, beside: Beside) -> anyhow::Result<()> {
        if let Some(budget) = &self.budget {
            budget.hold(beside == Beside::Held)?;
        }
        if let Some(device) = &self.device {
            device.set(beside == Beside::Device)?;
        }
        self.memory.set(beside != Beside::Nothing);
        Ok(())
    }
}

/// Length of a point's measurement: ten thousand units where the time suffices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length {
    longest: Duration,
}

impl Length {
    pub(super) fn for_rate(self, rate: Option<u64>) -> Duration {
        // Two percent more, as the rate is not exceeded and the first units are not counted.
        let units = |rate: u64| Duration::from_secs_f64(1.02 * UNITS as f64 / rate as f64);
        rate.map_or(SATURATED, |rate| units(rate).max(SHORTEST)).min(self.longest)
    }
}

/// Measures all flows, victims and choices.
pub fn measure(options: &RegulationOptions, progress: &dyn Progress) -> anyhow::Result<RegulationData> {
    let length = Length { longest: options.longest };
    let rates = rates(options.top, options.rates);
    let dir = tempfile::Builder::new().prefix("rtvirtio-regulation-").tempdir()?;
    let ram = RamDisk::new(DISK)?;
    let load = Loads::new(&options.loads, progress)?;
    let mut spoiled = 0;
    let points = points(options, &rates, (dir.path(), ram.device()), &load, &mut spoiled, progress)?;
    let mut bed = VictimTestBed {
        dir: dir.path().to_owned(),
        device: ram.device().to_owned(),
        // All have the same time: the longest gap grows with the measured time.
        time: length.for_rate(None),
        rounds: options.rounds.max(1),
        spoiled,
    };
    let victims = bed.victims(&rates, progress)?;
    let (choices, refused) = bed.choices(&victims, progress)?;
    Ok(RegulationData {
        schema: RegulationData::SCHEMA.to_owned(),
        host: host_facts(("none: frontends without a VM", "none"), "a loop device over memory, and a bridge"),
        command: format!("rtvirtio-bench regulation{}", options.words),
        generated: generated(),
        cache: largest_cache(&Root::default())?,
        memory: load.memory.bytes,
        points,
        victims,
        choices,
        refused: Some(refused),
        spoiled: Some(bed.spoiled),
    })
}

/// Measures the points of the options' loads, and adds them to a saved result: points of the same
/// flow, load and rate are replaced, and the rest stays as it is.
///
/// # Errors
/// As [`measure`], and for a result of another host.
pub fn add(
    mut saved: RegulationData,
    options: &RegulationOptions,
    progress: &dyn Progress,
) -> anyhow::Result<RegulationData> {
    if saved.host.cpus != cpus() || saved.host.kernel != kernel_release() {
        bail!(
            "the saved result is of another host or kernel: measure all of it anew, or choose another --out"
        );
    }
    let rates = rates(options.top, options.rates);
    let dir = tempfile::Builder::new().prefix("rtvirtio-regulation-").tempdir()?;
    let ram = RamDisk::new(DISK)?;
    let load = Loads::new(&options.loads, progress)?;
    let mut spoiled = saved.spoiled.unwrap_or(0);
    let more = points(options, &rates, (dir.path(), ram.device()), &load, &mut spoiled, progress)?;
    let key = |p: &Point| (p.flow, p.beside, p.rate);
    saved.points.retain(|old| !more.iter().any(|new| key(new) == key(old)));
    saved.points.extend(more);
    saved.points.sort_by_key(|p| (p.flow, p.beside, p.rate.map_or((0, 0), |rate| (1, u64::MAX - rate))));
    saved.spoiled = Some(spoiled);
    saved.command = format!("{}; rtvirtio-bench regulation{}", saved.command, options.words);
    Ok(saved)
}

/// The points of every flow, load and rate, interleaved.
fn points(
    options: &RegulationOptions,
    rates: &[u64],
    (dir, device): (&Path, &Path),
    load: &Loads,
    spoiled: &mut u64,
    progress: &dyn Progress,
) -> anyhow::Result<Vec<Point>> {
    let length = Length { longest: options.longest };
    let flows = Direction::ALL.into_iter().filter(|f| options.flows.is_empty() || options.flows.contains(f));
    let items: Vec<(Direction, Beside, Option<u64>)> = flows
        .flat_map(|flow| options.loads.iter().map(move |beside| (flow, *beside)))
        .flat_map(|(flow, beside)| with_none(rates).into_iter().map(move |rate| (flow, beside, rate)))
        .collect();
    let mut counter = Counter::new(progress, "rates, directions and loads", items.len());
    interleaved(&items, 0, &mut counter, progress, |item| {
        measure_point(*item, length.for_rate(item.2), dir, device, load, spoiled)
    })
}

/// Prepends the unregulated flow to the rates.
fn with_none(rates: &[u64]) -> Vec<Option<u64>> {
    std::iter::once(None).chain(rates.iter().copied().map(Some)).collect()
}

/// Measures a victim next to a neighbour.
struct VictimTestBed {
    dir: PathBuf,
    device: PathBuf,
    time: Duration,
    rounds: u32,
    /// Number of repeated measurements.
    spoiled: u64,
}

impl VictimTestBed {
    fn measure_point(&mut self, rate: Option<u64>, round: u32) -> anyhow::Result<VictimPoint> {
        let time = self.time;
        until_quiet(
            &mut self.spoiled,
            |v: &VictimPoint| v.victim.awake_ns.is_some(),
            || {
                let (dir, device) = (self.dir.clone(), self.device.clone());
                let seen = on_frontend(move || victim::run(rate, time, &dir, &device))?;
                Ok(VictimPoint { round, ..seen })
            },
        )
    }

    /// Measures the victim without a neighbour and at each of its rates, in every round.
    fn victims(&mut self, rates: &[u64], progress: &dyn Progress) -> anyhow::Result<Vec<VictimPoint>> {
        let items = with_none(rates);
        let total = items.len() * self.rounds as usize;
        let mut counter = Counter::new(progress, "a victim next to a regulated neighbour", total);
        let mut all = Vec::new();
        for round in 0..self.rounds {
            let order = 1 + round as usize;
            all.extend(interleaved(&items, order, &mut counter, progress, |rate| {
                self.measure_point(*rate, round)
            })?);
        }
        Ok(all)
    }

    /// Chooses the neighbour's rate for targets between the best and the worst that the victim got,
    /// and measures each; and the targets for which there is none.
    fn choices(
        &mut self,
        victims: &[VictimPoint],
        progress: &dyn Progress,
    ) -> anyhow::Result<(Vec<ChosenRate>, Vec<RefusedTarget>)> {
        let Some(model) = model(victims) else { return Ok((Vec::new(), Vec::new())) };
        let alphas = || victims.iter().map(|v| v.victim.alpha);
        let (least, most) = (alphas().fold(f64::INFINITY, f64::min), alphas().fold(0.0, f64::max));
        let (mut chosen, mut refused) = (Vec::new(), Vec::new());
        for share in TARGETS {
            let alpha = least + share * (most - least);
            let target = ServiceTarget { alpha, delta: SLACK * model.longest() };
            match choose(model.curve(), &target, limit, |limit| model.bound(limit)) {
                Ok(choice) => chosen.push((target, choice.arrival.rate)),
                // A target that cannot be reached is reported with the reason.
                Err(why) => refused.push(RefusedTarget { target, why: why.to_string() }),
            }
        }
        let total = chosen.len() * self.rounds as usize;
        let mut counter = Counter::new(progress, "a victim with its neighbour's chosen rate", total);
        let mut all = Vec::new();
        for round in 0..self.rounds {
            let order = 1 + round as usize;
            all.extend(interleaved(&chosen, order, &mut counter, progress, |(target, chosen)| {
                let rate = (*chosen as u64).max(1);
                let measured = self.measure_point(Some(rate), round)?;
                let burst = Some(burst(rate) as f64);
                Ok(ChosenRate { target: *target, chosen: *chosen, burst, measured })
            })?);
        }
        Ok((all, refused))
    }
}

/// Repeats a measurement while the host stalls for too long to subtract; counts the repetitions.
fn until_quiet<T>(
    spoiled: &mut u64,
    is_quiet: impl Fn(&T) -> bool,
    mut measure: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut seen = measure()?;
    for _ in 1..ATTEMPTS {
        if is_quiet(&seen) {
            break;
        }
        *spoiled += 1;
        seen = measure()?;
    }
    Ok(seen)
}

/// Measures one point. Where the host stalls for most of its time it is repeated, for longer.
fn measure_point(
    item: (Direction, Beside, Option<u64>),
    time: Duration,
    dir: &Path,
    device: &Path,
    load: &Loads,
    spoiled: &mut u64,
) -> anyhow::Result<Point> {
    for times in [1, 2, 4] {
        let is_quiet = |p: &Option<Point>| p.is_none_or(|p| p.awake_ns.is_some());
        if let Some(point) = until_quiet(spoiled, is_quiet, || once(item, time * times, dir, device, load))? {
            return Ok(point);
        }
    }
    let (flow, _, rate) = item;
    let rate = rate.map_or_else(|| "no rate".to_owned(), |rate| format!("{rate}/s"));
    bail!("{} at {rate}: fewer than two units in {:?}: is the host overloaded?", flow.name(), time * 4)
}

/// Measures once; `None` where fewer than two units were completed.
fn once(
    item: (Direction, Beside, Option<u64>),
    time: Duration,
    dir: &Path,
    device: &Path,
    load: &Loads,
) -> anyhow::Result<Option<Point>> {
    let (flow, beside, rate) = item;
    load.set(beside)?;
    let (before, begin) = (load.memory.written(), Instant::now());
    let (dir, device) = (dir.to_owned(), device.to_owned());
    let seen = on_frontend(move || {
        let probe = NoiseProbe::start_above(ENGINE);
        let at = match flow {
            Direction::Read | Direction::Write => disk::run(flow, rate, time, &dir, &device),
            Direction::Rx | Direction::Tx => network::run(flow, rate, time, &dir),
        };
        let (_, stalls) = probe.finish();
        Ok(point(at?, stalls.as_ref(), item))
    });
    let memory = (beside != Beside::Nothing).then(|| load.memory.rate_since(before, begin));
    load.set(Beside::Nothing)?;
    Ok(seen?.map(|point| Point { memory, ..point }))
}

/// Runs a function on a thread of its own with a front end's priority: namespace and priority end
/// with the thread.
fn on_frontend<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let thread = std::thread::Builder::new().name("frontend".to_owned()).spawn(work)?;
    match thread.join() {
        Ok(done) => done,
        Err(_) => bail!("the frontend's thread: a defect"),
    }
}

/// Gives the calling thread a front end's priority: above the memory load, below the engine.
/// Threads that it starts later are ordinary.
pub(super) fn raise() -> anyhow::Result<()> {
    let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    sched::set(tid, &Attr::fifo(FRONTEND)).context("a frontend needs a real-time priority")
}

/// Burst of one unit, and the units of a late wake-up: a smaller bucket is full meanwhile, and the
/// tokens that do not fit are lost for alpha.
pub(super) fn burst(rate: u64) -> u64 {
    1 + (rate as f64 * LATE.as_secs_f64()).ceil() as u64
}

/// Line of the I/O domain's file that regulates a flow; empty without a rate.
pub(super) fn cap(flow: Direction, rate: Option<u64>) -> anyhow::Result<String> {
    let Some(rate) = rate else { return Ok(String::new()) };
    let one = Tspec { unit: Unit::Requests, rate, burst: burst(rate), peak: None, largest: 1 };
    let compiled = compile(&one, flow, &Place::IoDomain)?;
    Ok(compiled.settings.iter().map(|setting| format!("{setting}\n")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rate_has_ten_thousand_units_where_that_is_in_time() {
        let length = |seconds| Length { longest: Duration::from_secs(seconds) };
        assert_eq!(length(80).for_rate(Some(128)).as_millis(), 79_687);
        assert_eq!(length(10).for_rate(Some(128)), Duration::from_secs(10));
        assert_eq!(length(80).for_rate(Some(65_536)), SHORTEST);
        assert_eq!(
            (length(80).for_rate(None), length(1).for_rate(None)),
            (SATURATED, Duration::from_secs(1))
        );
    }

    #[test]
    fn what_is_spoiled_is_measured_again_and_counted() {
        let (mut spoiled, mut runs) = (0, 1u32..);
        let mut until = |wanted: u32| {
            until_quiet(&mut spoiled, |seen| *seen >= wanted, || runs.next().context("no more")).unwrap()
        };
        assert_eq!((until(2), until(9)), (2, 5), "the third attempt counts, whatever it is");
        assert_eq!(spoiled, 3);
    }
}
