//! The runs, interleaved.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_cpu::{Backend, Contract};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::steal::stolen;
use rtvirtio_testbed::LabHost;
use rtvirtio_testbed::qemu::QemuGuest;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Progress, generated};

use super::chain::{self, DiskTestBed};
use super::guests::Guests;
use super::{Both, CHAIN_FILE, Cost, HONEST, INTERVAL_US, LIES, Lie, ParavirtData, Piece, Setup, interrupts};
use crate::cyclictest::wake_up_probe::WakeUpProbe;
use crate::cyclictest::{LARGEST_US, Latencies, WATCH_US, parse};
use crate::experiment::Experiment as _;
use crate::guest;
use crate::interleave::{Counter, interleaved};
use crate::report::write;
use crate::reservation::web::free_port;
use crate::saved::Saved as _;
use rtvirtio_harness::cores::{keep_awake, on_one_core, with_backend};

/// Load before the first counted wake-up.
pub(super) const WARM_UP: Duration = Duration::from_secs(1);
/// Longest time that a guest under load may need beyond the length on its own clock.
pub(super) const GUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval of polls of a job without finished work.
const WAIT: Duration = Duration::from_millis(100);
/// File in the guest with the count of a job's finished work.
pub(super) const WORK: &str = "/tmp/work";

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct ParavirtOptions {
    /// Length of each run, in whole seconds.
    #[arg(long = "for", value_name = "TIME", default_value = "20s")]
    pub length: Nanos,
    /// Runs of each set-up, interleaved.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Budget of the VM with the timed task in each period.
    #[arg(long, value_name = "TIME", default_value = "1800us")]
    pub budget: Nanos,
    /// The period.
    #[arg(long, value_name = "TIME", default_value = "2ms")]
    pub period: Nanos,
    /// CPU time above the floor in each second.
    #[arg(long, value_name = "TIME", default_value = "500ms")]
    pub boost: Nanos,
    /// Promotions that are timed in each round.
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub promotions: u32,
    /// Real-time priorities without a budget for the VM, as on kernels without
    /// CONFIG_RT_GROUP_SCHED; takes no budget from other programs.
    #[arg(long)]
    pub priorities_only: bool,
    /// Keep idle CPUs from sleeping, as on a real-time host.
    #[arg(long)]
    pub awake: bool,
    /// Only this part: both, cost, promotions, lies; or what is not run without --only: interrupts
    /// (requests raised by KVM's interrupts or not, under KVM), chain (from a timer by a read in
    /// the I/O domain to the answer, once); may be given several times.
    #[arg(long, value_name = "PART", conflicts_with = "report_only")]
    pub only: Vec<Piece>,
}

impl ParavirtOptions {
    fn has(&self, piece: Piece) -> bool {
        self.only.contains(&piece)
            || self.only.is_empty() && !matches!(piece, Piece::Chain | Piece::Interrupts)
    }

    /// File name of the result: single pieces have their own, and do not replace a whole result.
    #[must_use]
    pub fn file(&self) -> String {
        let pieces: Vec<Piece> = Piece::ALL.into_iter().filter(|piece| self.only.contains(piece)).collect();
        match pieces.as_slice() {
            [] => ParavirtData::FILE.to_owned(),
            [Piece::Chain] => CHAIN_FILE.to_owned(),
            pieces => {
                let names: Vec<String> = pieces.iter().map(Piece::to_string).collect();
                format!("cpu-paravirt-{}.json", names.join("-"))
            }
        }
    }
}

/// Measures all. The result is written to `path` after each round.
///
/// # Errors
/// A length or contract out of range, a guest that does not boot, and cancellation.
pub fn measure(
    options: &ParavirtOptions,
    path: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let length = Duration::from_nanos(options.length.0);
    if length < Duration::from_secs(2) {
        bail!("--for {}: two seconds at least: cyclictest counts whole ones", options.length);
    }
    let contract = Contract::new(options.budget, options.period).with_context(|| {
        format!(
            "--budget {} --period {}: at least 1us, and no more than the period",
            options.budget, options.period
        )
    })?;
    let contracts = if options.priorities_only {
        with_backend(&[Backend::Throttle], labs, progress)?
    } else {
        on_one_core(labs, progress)?
    };
    let awake = if options.awake { keep_awake(progress) } else { None };
    let dir = tempfile::Builder::new().prefix("rtvirtio-").tempdir()?;
    let disks = options.has(Piece::Chain).then(|| DiskTestBed::start(dir.path())).transpose()?;
    let asked = (contract, options.boost);
    let port = options.has(Piece::Interrupts).then(free_port).transpose()?;
    let mut guests = Guests::boot(&contracts, asked, (disks, port), dir.path(), labs, progress)?;
    let mut data = ParavirtData {
        schema: ParavirtData::SCHEMA.to_owned(),
        host: guests.facts.clone(),
        command: command(options),
        awake: awake.is_some(),
        backend: contracts.backend().to_string(),
        contract: contract.to_string(),
        budget_ns: options.boost.0,
        doorbell: true,
        ..ParavirtData::default()
    };
    let setups: &[Setup] = if options.has(Piece::Both) { &Setup::ALL } else { &[] };
    let costs: &[bool] = if options.has(Piece::Cost) { &[false, true] } else { &[] };
    let lies: Vec<&str> = std::iter::once(HONEST).chain(LIES).filter(|_| options.has(Piece::Lies)).collect();
    let promotes = options.has(Piece::Promotions);
    let interrupts: Vec<(bool, u16)> =
        port.into_iter().flat_map(|port| [(false, port), (true, port)]).collect();
    let runs = setups.len() + costs.len() + usize::from(promotes) + lies.len() + interrupts.len();
    let mut counter = Counter::new(progress, "paravirt", runs * usize::from(options.repeat));
    for round in 0..usize::from(options.repeat) {
        data.both.extend(interleaved(setups, round, &mut counter, progress, |setup| {
            both(&mut guests, *setup, length, progress)
        })?);
        data.cost.extend(interleaved(costs, round, &mut counter, progress, |reports| {
            cost(&mut guests, *reports, length, progress)
        })?);
        if promotes {
            data.promotions.push(promote(&mut guests, options.promotions, progress)?);
            counter.step();
        }
        data.lies.extend(interleaved(&lies, round, &mut counter, progress, |kind| {
            lie(&mut guests, kind, length / 2, progress)
        })?);
        data.interrupts.extend(interleaved(&interrupts, round, &mut counter, progress, |of| {
            interrupts::run(&mut guests, *of, length, progress)
        })?);
        data.generated = generated();
        write(path, &data)?;
    }
    drop(counter);
    if options.has(Piece::Chain) {
        progress.step("the whole chain");
        data.chain = Some(chain::run(&mut guests, length, progress)?);
        data.generated = generated();
        write(path, &data)?;
    }
    guests.stop()?;
    progress.step(&format!("wrote {}", path.display()));
    Ok(())
}

/// Starts a job that computes, after removing the count of an earlier one.
pub(super) fn start_work(vm: &mut QemuGuest) -> anyhow::Result<()> {
    vm.write_file(WORK, b"")?;
    vm.spawn(&["rtvirtio-guestload", "work", WORK])?;
    Ok(())
}

/// Finished pieces of work and the guest's clock, s. A job that the other VM leaves little CPU time
/// may take long for its first piece.
pub(super) fn work(vm: &mut QemuGuest, progress: &dyn Progress) -> anyhow::Result<(f64, f64)> {
    let begin = Instant::now();
    loop {
        let bytes = vm.read_file(WORK, 100)?;
        let text = String::from_utf8_lossy(&bytes);
        let mut words = text.split_whitespace().map(str::parse::<u64>);
        match (words.next(), words.next()) {
            (Some(Ok(done)), Some(Ok(at))) => return Ok((done as f64, at as f64 / 1e9)),
            _ if text.is_empty() && begin.elapsed() < GUEST_TIMEOUT => progress.pause(WAIT)?,
            _ => bail!("{WORK} in the guest holds `{text}`"),
        }
    }
}

/// Pieces of work per second between two readings.
pub(super) fn rate(before: (f64, f64), after: (f64, f64)) -> f64 {
    (after.0 - before.0) / (after.1 - before.1).max(1e-9)
}

/// Runs both VMs at once.
fn both(
    guests: &mut Guests<'_>,
    setup: Setup,
    length: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<Both> {
    guests.set(setup, progress)?;
    if setup == Setup::Urgency {
        guests.start_reporter(progress)?;
    }
    let has_job = setup != Setup::Alone;
    if has_job {
        start_work(&mut guests.vms[0])?;
    }
    start_work(&mut guests.vms[1])?;
    progress.pause(WARM_UP)?;
    let jobs = |guests: &mut Guests<'_>| -> anyhow::Result<[(f64, f64); 2]> {
        let background = if has_job { work(&mut guests.vms[0], progress)? } else { (0.0, 0.0) };
        Ok([background, work(&mut guests.vms[1], progress)?])
    };
    let before = jobs(guests)?;
    let stolen_before = stolen(&Root::default(), guests.core)?;
    let boosted_before = guests.status().map_or(0, |s| s.vcpus.iter().map(|v| v.counters.boosted.0).sum());
    let probe = WakeUpProbe::start(guests.core, WATCH_US, None)?;
    let mut latencies = cyclictest(&mut guests.vms[0], length, &["-p99"], progress)?;
    latencies.floor = Some(Box::new(probe.finish()?));
    latencies.stolen =
        Some(stolen(&Root::default(), guests.core)?.saturating_sub(stolen_before).as_secs_f64());
    let after = jobs(guests)?;
    let weight = guests.least_weight();
    let status = guests.unfollow()?;
    guests.kill(0, &["rtvirtio-guestload", "rtvirtio-guest"])?;
    guests.kill(1, &["rtvirtio-guestload"])?;
    guests.set(Setup::None, progress)?;
    let counters = status.iter().flat_map(|(s, _)| &s.vcpus).map(|v| v.counters);
    let raises =
        status.as_ref().and_then(|(s, _)| s.vcpus.iter().map(|v| v.raises).reduce(|a, b| a.with(&b)));
    let (promotions, boosted) = counters.fold((0, 0), |sum, c| (sum.0 + c.promotions, sum.1 + c.boosted.0));
    Ok(Both {
        setup,
        latencies,
        background: rate(before[0], after[0]),
        batch: rate(before[1], after[1]),
        promotions,
        boosted: boosted.saturating_sub(boosted_before) as f64 / 1e9,
        weight,
        raises,
    })
}

/// Runs cyclictest in a guest, with an interval of a millisecond.
fn cyclictest(
    vm: &mut QemuGuest,
    length: Duration,
    more: &[&str],
    progress: &dyn Progress,
) -> anyhow::Result<Latencies> {
    let (interval, largest) = (format!("-i{INTERVAL_US}"), format!("-h{LARGEST_US}"));
    let seconds = format!("-D{}", length.as_secs());
    let fixed = ["cyclictest", "-m", "-q", interval.as_str(), largest.as_str(), seconds.as_str()];
    let process = vm.spawn(&[&fixed[..], more].concat())?;
    let output = guest::wait_for_exit(vm, process, length * 2 + GUEST_TIMEOUT, progress, &mut || Ok(()))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.success() {
        bail!("cyclictest in the guest: {stderr:.500}");
    }
    let mut latencies =
        parse(&String::from_utf8_lossy(&output.stdout)).map_err(|e| anyhow::anyhow!("{e}; {stderr:.200}"))?;
    latencies.seconds = length.as_secs_f64();
    Ok(latencies)
}

/// Cost for A alone without urgent work: under its contract with reports, and as it is without.
fn cost(
    guests: &mut Guests<'_>,
    reports: bool,
    length: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<Cost> {
    guests.set(if reports { Setup::Urgency } else { Setup::None }, progress)?;
    if reports {
        guests.start_reporter(progress)?;
    }
    let half = length.as_secs().div_ceil(2).max(1);
    let vm = &mut guests.vms[0];
    let latencies = cyclictest(vm, Duration::from_secs(half), &["--policy=other"], progress)?;
    let process = vm.spawn(&["rtvirtio-guestload", "switches", &half.to_string()])?;
    let output = guest::wait_for_exit(vm, process, length * 2 + GUEST_TIMEOUT, progress, &mut || Ok(()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let switches = text.trim().parse();
    let switches = switches.with_context(|| {
        format!("switches in the guest: {text}{}", String::from_utf8_lossy(&output.stderr))
    })?;
    guests.kill(0, &["rtvirtio-guest"])?;
    guests.set(Setup::None, progress)?;
    Ok(Cost { reports, latency_us: latencies.mean(), wakeups: latencies.n(), switches })
}

/// Times from a report to the level that the host shows, A alone.
fn promote(guests: &mut Guests<'_>, n: u32, progress: &dyn Progress) -> anyhow::Result<Latencies> {
    guests.set(Setup::Urgency, progress)?;
    let probe = WakeUpProbe::start(guests.other, WATCH_US, None)?;
    let vm = &mut guests.vms[0];
    let process = vm.spawn(&["rtvirtio-guestload", "promote", &n.to_string()])?;
    let output = guest::wait_for_exit(vm, process, GUEST_TIMEOUT, progress, &mut || Ok(()))?;
    let floor = probe.finish()?;
    if !output.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let status = format!("{:?}", guests.status());
        bail!("promotions in the guest: {} ({status}; {:?})", stderr.trim(), guests.unfollow());
    }
    let mut all = Latencies::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let nanos: u64 = line.trim().parse().with_context(|| format!("promotions in the guest: {line}"))?;
        all.add(nanos.div_ceil(1000));
    }
    all.seconds = floor.seconds;
    all.floor = Some(Box::new(floor));
    guests.set(Setup::None, progress)?;
    Ok(all)
}

/// Runs a false report in A while B works.
fn lie(
    guests: &mut Guests<'_>,
    kind: &str,
    length: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<Lie> {
    guests.set(Setup::Urgency, progress)?;
    start_work(&mut guests.vms[1])?;
    let seconds = length.as_secs().max(1);
    let liar = guests.vms[0].spawn(&["rtvirtio-guestload", "lie", kind, &(seconds + 20).to_string()])?;
    progress.pause(WARM_UP)?;
    let boosted =
        |g: &Guests<'_>| g.status().map_or(0, |s| s.vcpus.iter().map(|v| v.counters.boosted.0).sum::<u64>());
    let (before, boosted_before) = (work(&mut guests.vms[1], progress)?, boosted(guests));
    progress.pause(length)?;
    let (after, boosted_after) = (work(&mut guests.vms[1], progress)?, boosted(guests));
    if let Some(out) = guests.vms[0].poll(liar)? {
        bail!("the guest that lies ended: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    let ended = guests.unfollow();
    guests.kill(0, &["rtvirtio-guestload"])?;
    guests.kill(1, &["rtvirtio-guestload"])?;
    guests.set(Setup::None, progress)?;
    // A panic is an expected result here.
    let (status, panicked) = match ended {
        Ok(Some((status, by_itself))) => (Some(status), by_itself),
        Ok(None) | Err(_) => (None, true),
    };
    Ok(Lie {
        kind: kind.to_owned(),
        batch: rate(before, after),
        boosted: boosted_after.saturating_sub(boosted_before) as f64 / 1e9,
        notices: status.map_or([0, 0], |s| s.notices),
        seconds: after.1 - before.1,
        panicked,
    })
}

/// Command line of these options.
fn command(options: &ParavirtOptions) -> String {
    let only = options.only.iter().map(|piece| format!(" --only {piece}"));
    format!(
        "rtvirtio-bench paravirt --for {} --repeat {} --budget {} --period {} --boost {} --promotions {}{}{}{}",
        options.length,
        options.repeat,
        options.budget,
        options.period,
        options.boost,
        options.promotions,
        if options.priorities_only { " --priorities-only" } else { "" },
        if options.awake { " --awake" } else { "" },
        only.collect::<String>()
    )
}
