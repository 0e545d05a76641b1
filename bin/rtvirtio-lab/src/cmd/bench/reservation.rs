//! `rtvirtio-lab bench reservation`: two guests on one core, each with a CPU contract.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_bench::reservation::{
    Alone, BUDGETS, Beside, CONNECTIONS, DEADLINE_OVER_RESPONSE, Kills, LOAD_CONNECTIONS, NEIGHBOUR, OWN,
    ReservationData, WEB_SHARE, Web, claims,
};
use rtvirtio_bench::train::median;
use rtvirtio_cpu::{Contract, Order};
use rtvirtio_kernel::{ProcessId, Root};
use rtvirtio_measure::HostFacts;
use rtvirtio_measure::http::Load;
use rtvirtio_stats::Random;
use rtvirtio_testbed::image;
use rtvirtio_testbed::qemu::{GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::{Named, discover};

use super::arguments;
use super::cores::{FairGroup, bind, core_and_others, keep_awake, on_one_core};
use super::found::{Found, read, save};
use super::{cores, guest, kills, page, web};
use crate::args::{AccelName, BenchReservationArgs};
use crate::cmd::lab;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::held::{Contracts, Wanted};

/// Where the result lies in a directory of results.
pub const FILE: &str = "cpu-reservation.json";
/// Before a load is counted: some periods, and what the guest's caches and QEMU's translator need.
const WARM_UP: Duration = Duration::from_millis(1000);
/// Length of the pieces of a measurement.
const SLICE: Duration = Duration::from_secs(2);
/// Whose answer an error is of.
const SERVER: &str = "a client of the guest's web server";
/// Requests from which the unloaded response is known.
const CALIBRATION: usize = 30;

/// `rtvirtio-lab bench reservation`.
pub fn run(args: &BenchReservationArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        arguments::result(&args.result)?;
        need_root("bench reservation")?;
        let data =
            if args.kills { with_kills(read(&path)?, global, ui)? } else { measure(args, global, ui)? };
        save(&path, &data, ui)?;
    }
    found(&path)?.tell("rtvirtio: CPU contracts", args.result.html.as_deref(), ui)
}

/// What a result shows.
pub fn found(path: &Path) -> anyhow::Result<Found> {
    let data: ReservationData = read(path)?;
    let claims = claims(&data);
    let lead = vec![format!(
        "{} ({} under {}), their contracts held by {}, {}; {}.",
        data.host.device,
        data.host.vmm,
        data.host.accelerator,
        data.backend,
        cores::idle(data.awake),
        data.command
    )];
    Ok(Found {
        text: page::table(&claims),
        sections: page::reservation(&data),
        runs: Vec::new(),
        data: vec![serde_json::to_value(&data)?],
        host: data.host,
        claims,
        lead,
    })
}

/// A result with its kills made anew.
fn with_kills(mut data: ReservationData, global: &Global, ui: &Ui) -> anyhow::Result<ReservationData> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-cpu-").tempdir()?;
    let contracts = on_one_core(global, ui)?;
    let mut pair = Pair::boot(&contracts, 1, dir.path(), global, ui)?;
    if pair.facts != data.host {
        bail!(
            "--kills: the result is of another host (Linux {}, {}): give another --out, or measure all anew",
            data.host.kernel,
            data.host.vmm
        );
    }
    data.kills = pair.kills(dir.path(), ui)?;
    pair.stop()?;
    Ok(data)
}

fn measure(args: &BenchReservationArgs, global: &Global, ui: &Ui) -> anyhow::Result<ReservationData> {
    let budgets = if args.budgets.is_empty() { BUDGETS.to_vec() } else { args.budgets.clone() };
    if let Some(wrong) = budgets.iter().find(|b| !(1..=95).contains(*b)) {
        bail!("a budget of {wrong} %: it is 1 to 95 % of a core; the kernel keeps 5 % for others");
    }
    percent(1, args.period).with_context(|| format!("--period {}", args.period))?;
    let dir = tempfile::Builder::new().prefix("rtvirtio-cpu-").tempdir()?;
    let contracts = on_one_core(global, ui)?;
    let awake = if args.awake { keep_awake(ui) } else { None };
    // Throughput first, between two guests of one vCPU each: the paper's.
    let mut pair = Pair::boot(&contracts, 1, dir.path(), global, ui)?;
    ui.step("warming up");
    pair.throughput(&[true, true], Duration::from_secs(2), ui)?;
    let (alone, beside) = throughputs(&mut pair, &budgets, args, ui)?;
    let facts = pair.facts.clone();
    let kills = pair.kills(dir.path(), ui)?;
    pair.stop()?;
    let (mut response_ms, mut deadline_ms, mut web) = (0.0, 0.0, Vec::new());
    if args.requests > 0 {
        let mut pair = Pair::boot(&contracts, args.neighbour_vcpus, dir.path(), global, ui)?;
        pair.throughput(&[true, false], Duration::from_secs(2), ui)?;
        let (responses, _) = web::periodic(pair.ports[0], CALIBRATION, Duration::from_millis(100), ui)?;
        if responses.is_empty() {
            bail!("the guest answers no request");
        }
        response_ms = median(responses);
        // Whole milliseconds read better.
        deadline_ms = (response_ms * DEADLINE_OVER_RESPONSE).ceil();
        web = requests(&mut pair, deadline_ms, args, ui)?;
        pair.stop()?;
    }
    Ok(ReservationData {
        schema: ReservationData::SCHEMA.to_owned(),
        host: facts,
        command: format!(
            "rtvirtio-lab bench reservation --for {} --repeat {} --requests {} --period {} --neighbour-vcpus {}{}{}",
            args.length,
            args.repeat,
            args.requests,
            args.period,
            args.neighbour_vcpus,
            if args.neighbour_computes { " --neighbour-computes" } else { "" },
            if args.awake { " --awake" } else { "" }
        ),
        generated: generated(),
        awake: awake.is_some(),
        backend: contracts.backend().to_string(),
        neighbour_vcpus: args.neighbour_vcpus,
        length: args.length.as_secs_f64(),
        slices: slices(args.length).0,
        period_us: args.period.0 / 1000,
        neighbour_computes: args.neighbour_computes,
        alone,
        beside,
        response_ms,
        deadline_ms,
        web,
        kills,
    })
}

/// Throughput over budget: of one guest alone, and beside the other.
///
/// Each measurement is the mean of short ones, and those of all measurements and rounds are made in one order of chance: a host that becomes slower
/// for a minute is in all of them then, and in none alone.
fn throughputs(
    pair: &mut Pair<'_>,
    budgets: &[u64],
    args: &BenchReservationArgs,
    ui: &Ui,
) -> anyhow::Result<(Vec<Alone>, Vec<Beside>)> {
    let steps = steps(budgets, args.repeat);
    let (slices, slice) = slices(args.length);
    let mut order: Vec<usize> = (0..slices).flat_map(|_| 0..steps.len()).collect();
    Random::new(1).shuffle(&mut order);
    let mut sums = vec![([0.0; 2], 0.0); steps.len()];
    let mut bar = ui.bar("throughput over budget", order.len() as u64);
    for (done, i) in order.into_iter().enumerate() {
        bar.set(done as u64);
        let (mb_per_s, used) = pair.step(steps[i].1, args, slice, ui)?;
        let (sum, of_used) = &mut sums[i];
        sum.iter_mut().zip(mb_per_s).for_each(|(sum, mb)| *sum += mb / slices as f64);
        *of_used += used / slices as f64;
    }
    pair.contracts.release()?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for ((round, step), ([mb_per_s, neighbour_mb_per_s], used)) in steps.into_iter().zip(sums) {
        match step {
            Step::Alone(budget) => alone.push(Alone { budget, mb_per_s, used }),
            Step::Beside(neighbour, all_threads) => {
                beside.push(Beside { round, neighbour, all_threads, mb_per_s, neighbour_mb_per_s, used });
            }
        }
    }
    Ok((alone, beside))
}

/// What is measured, with its round.
fn steps(budgets: &[u64], rounds: usize) -> Vec<(usize, Step)> {
    let ends = [NEIGHBOUR[0], NEIGHBOUR[NEIGHBOUR.len() - 1]];
    let alone = budgets.iter().map(|b| Step::Alone(*b));
    let all = NEIGHBOUR.iter().map(|n| Step::Beside(*n, true));
    let vcpus_only = ends.iter().map(|n| Step::Beside(*n, false));
    let of_round: Vec<Step> = alone.chain(all).chain(vcpus_only).collect();
    (0..rounds).flat_map(|round| of_round.iter().map(move |s| (round, *s))).collect()
}

/// Into how many pieces a measurement of this length falls, and how long each is.
fn slices(length: Nanos) -> (usize, Duration) {
    let length = Duration::from_nanos(length.0);
    let n = (length.as_secs_f64() / SLICE.as_secs_f64()).round().max(1.0);
    (n as usize, length.div_f64(n))
}

/// Web requests beside an idle and a loaded neighbour, without and with a contract.
fn requests(
    pair: &mut Pair<'_>,
    deadline_ms: f64,
    args: &BenchReservationArgs,
    ui: &Ui,
) -> anyhow::Result<Vec<Web>> {
    let period = Duration::from_secs_f64(deadline_ms / 1e3);
    let budget = period.mul_f64(WEB_SHARE);
    let nanos = |d: Duration| Nanos(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
    let reserved = Contract::new(nanos(budget), nanos(period)).context("the deadline leaves no budget")?;
    let mut all = Vec::new();
    // Contract, load, and whether each guest has a group of its own.
    let conditions = [
        (false, false, false),
        (true, false, false),
        (false, true, false),
        (false, true, true),
        (true, true, false),
    ];
    let mut bar = ui.bar("web requests", conditions.len() as u64);
    for (i, (contract, loaded, apart)) in conditions.into_iter().enumerate() {
        bar.set(i as u64);
        pair.contracts.release()?;
        pair.group(apart)?;
        if contract {
            pair.hold(&[(0, reserved)], true)?;
        }
        let load = loaded.then(|| Load::start(&web::request(pair.ports[1]), LOAD_CONNECTIONS));
        if loaded {
            web::spin(&mut pair.vms[1], args.neighbour_vcpus)?;
        }
        ui.pause(WARM_UP)?;
        let (ms, failed) = web::periodic(pair.ports[0], args.requests, period, ui)?;
        if loaded {
            web::stop_spinning(&mut pair.vms[1])?;
        }
        load.map(Load::finish).transpose().context(SERVER)?;
        all.push(Web { loaded, contract, apart, ms, failed });
    }
    pair.contracts.release()?;
    Ok(all)
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Alone(u64),
    Beside(u64, bool),
}

/// A contract for this part of a core.
fn percent(budget: u64, period: Nanos) -> anyhow::Result<Contract> {
    Contract::new(Nanos(period.0 * budget / 100), period).context("a budget above its period")
}

/// Two guests with a web server each, bound to one core; this process is bound to the others.
struct Pair<'c> {
    contracts: &'c Contracts<'c>,
    names: [String; 2],
    vms: [QemuGuest; 2],
    /// One for both, and one for each. Gone after the guests.
    groups: [FairGroup; 3],
    ports: [u16; 2],
    facts: HostFacts,
}

impl<'c> Pair<'c> {
    fn boot(
        contracts: &'c Contracts<'c>,
        neighbour_vcpus: u16,
        dir: &Path,
        global: &Global,
        ui: &Ui,
    ) -> anyhow::Result<Self> {
        let (core, others) = core_and_others()?;
        // Guests inherit where this process runs, and boot faster on all CPUs.
        bind(std::process::id(), &[&others[..], &[core]].concat())?;
        let group = |name: &str| FairGroup::make(&format!("{}fair-{name}", ProcessId::prefix("bench")));
        let groups = [group("both")?, group("vm")?, group("neighbour")?];
        let image = image::ensure(&global.cache_dir, &|line| ui.step(line));
        ui.check_cancelled()?;
        let image = image?;
        let accel = lab::choose_accel(AccelName::Auto, &image, ui)?;
        ui.step("booting two guests");
        let names = ["vm", "neighbour"].map(|n| format!("bench-{}-{n}", std::process::id()));
        let ports = [web::free_port()?, web::free_port()?];
        let config = |i: usize| QemuConfig {
            accel,
            vcpus: if i == 0 { 1 } else { neighbour_vcpus },
            port: Some(ports[i]),
            ..QemuConfig::new(&names[i], image.clone(), GuestDisk::None, dir)
        };
        let mut vms = [QemuGuest::start(&config(0))?, QemuGuest::start(&config(1))?];
        for vm in &mut vms {
            web::serve(vm)?;
            bind(vm.handle().process.pid, &[core])?;
        }
        // Asked before this process is bound: it counts the CPUs that it may use.
        let device = format!("two guests on CPU {core}");
        let facts = guest::facts(&mut vms[0], accel, device)?;
        bind(std::process::id(), &others)?;
        let pair = Self { contracts, names, vms, groups, ports, facts };
        pair.group(false)?;
        Ok(pair)
    }

    /// Lets all threads of both guests compete with each other, as in the paper, or guest with guest. (The kernel's autogroups, or libvirt, do
    /// the latter.)
    fn group(&self, apart: bool) -> anyhow::Result<()> {
        for (i, vm) in self.vms.iter().enumerate() {
            let group = if apart { &self.groups[1 + i] } else { &self.groups[0] };
            group.take(vm.handle().process.pid)?;
        }
        Ok(())
    }

    /// Contracts of the first guest, killed while they are applied or put back.
    fn kills(&mut self, dir: &Path, ui: &Ui) -> anyhow::Result<Kills> {
        self.contracts.release()?;
        kills::sweep(&self.names[0], self.vms[0].handle().process.pid, dir, ui)
    }

    /// Contracts for these guests, and none for the other.
    fn hold(&mut self, all: &[(usize, Contract)], all_threads: bool) -> anyhow::Result<()> {
        let mut wanted = Vec::new();
        for &(i, contract) in all {
            let pid = self.vms[i].handle().process.pid;
            let named = Named::ask(&mut self.vms[i].qmp()?)?;
            wanted.push(Wanted {
                vm: &self.names[i],
                handle: VmHandle { named, ..VmHandle::of_pid(pid) },
                vcpus_only: !all_threads,
                contract,
                order: Order::Contract,
                used: Vec::new(),
            });
        }
        Ok(self.contracts.hold(&wanted)?)
    }

    /// One piece of a measurement: what the clients of both guests received, in MB/s, and the CPU time of the first guest, in percent of a core.
    fn step(
        &mut self,
        step: Step,
        args: &BenchReservationArgs,
        length: Duration,
        ui: &Ui,
    ) -> anyhow::Result<([f64; 2], f64)> {
        let (neighbour, all_threads) = match step {
            Step::Alone(budget) => {
                self.hold(&[(0, percent(budget, args.period)?)], true)?;
                return self.throughput(&[true, false], length, ui);
            }
            Step::Beside(neighbour, all_threads) => (neighbour, all_threads),
        };
        if args.neighbour_computes {
            self.contracts.release()?;
            web::spin(&mut self.vms[1], 1)?;
        }
        // The neighbour first: of equal periods it stands above, where the VM has more to lose.
        let both = [(1, percent(neighbour, args.period)?), (0, percent(OWN, args.period)?)];
        self.hold(&both, all_threads)?;
        let seen = self.throughput(&[true, !args.neighbour_computes], length, ui)?;
        if args.neighbour_computes {
            web::stop_spinning(&mut self.vms[1])?;
        }
        Ok(seen)
    }

    /// CPU time of all threads of a guest.
    fn used(&self, i: usize) -> anyhow::Result<Duration> {
        let threads = discover(&Root::default(), &VmHandle::of_pid(self.vms[i].handle().process.pid))?;
        Ok(threads.iter().map(|t| t.cpu_time).sum())
    }

    /// What clients of the guests received, in MB/s, where there are some, and the CPU time of the first guest, in percent of a core.
    fn throughput(&self, loaded: &[bool; 2], length: Duration, ui: &Ui) -> anyhow::Result<([f64; 2], f64)> {
        let start = |i: usize| loaded[i].then(|| Load::start(&web::request(self.ports[i]), CONNECTIONS));
        let loads = [start(0), start(1)];
        ui.pause(WARM_UP)?;
        let bytes = || [0, 1].map(|i: usize| loads[i].as_ref().map_or(0, Load::bytes));
        let (begin, before, used) = (Instant::now(), bytes(), self.used(0)?);
        ui.pause(length)?;
        let (after, used) = (bytes(), self.used(0)? - used);
        let seconds = begin.elapsed().as_secs_f64();
        for load in loads.into_iter().flatten() {
            load.finish().context(SERVER)?;
        }
        let mb_per_s = [0, 1].map(|i: usize| after[i].saturating_sub(before[i]) as f64 / 1e6 / seconds);
        Ok((mb_per_s, 100.0 * used.as_secs_f64() / seconds))
    }

    fn stop(self) -> anyhow::Result<()> {
        for vm in self.vms {
            vm.stop()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_measures_everything() {
        let all = steps(&[10, 90], 2);
        assert_eq!(all.len(), 2 * (2 + 4 + 2));
        let of = |round| all.iter().filter(|s| s.0 == round).map(|s| s.1).collect::<Vec<_>>();
        assert_eq!(of(0), of(1));
        assert!(of(0).contains(&Step::Beside(40, false)) && !of(0).contains(&Step::Beside(20, false)));
    }

    #[test]
    fn a_measurement_falls_into_equal_pieces() {
        for (length, n) in [(1, 1), (2, 1), (5, 3), (12, 6)] {
            let (slices, slice) = slices(Nanos(length * 1_000_000_000));
            assert_eq!(slices, n);
            assert!((slice.as_secs_f64() * n as f64 - length as f64).abs() < 1e-6);
        }
    }
}
