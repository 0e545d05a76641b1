//! `rtvirtio-lab bench cyclictest`: how late a timed real-time thread in a guest wakes, beside I/O and cache load on the same core.

use std::hint::black_box;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_bench::cyclictest::{
    CyclictestData, INTERVAL_US, LARGEST_US, Latencies, Setup, WALK, WATCH_US, claims, parse,
};
use rtvirtio_cpu::{Contract, Order};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::steal::stolen;
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::image::{self, Kernel};
use rtvirtio_testbed::qemu::{DiskRegion, GUEST_DISK, QemuConfig, QemuGuest};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rtvirtio_vmm::threads::Named;
use rustix::thread::{ClockId, clock_nanosleep_absolute};

use super::arguments;
use super::cores::{FairGroup, bind, bind_this_thread, core_and_others, keep_awake, on_one_core};
use super::found::{Found, keep, read};
use super::turns::in_turn;
use super::{cores, guest, page};
use crate::args::{AccelName, BenchCyclictestArgs};
use crate::cmd::lab;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::held::{Contracts, Wanted};
use rtvirtio_workflow::site::kernel_release;

/// Where the result lies in a directory of results.
pub const FILE: &str = "cpu-cyclictest.json";
/// The guest's disk.
const DISK: Bytes = Bytes(256 << 20);
/// Load before the first wake-up that counts.
const WARM_UP: Duration = Duration::from_secs(1);
/// A guest under load may be as much slower than its own clock says.
const PATIENCE: Duration = Duration::from_secs(60);

/// `rtvirtio-lab bench cyclictest`.
pub fn run(args: &BenchCyclictestArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        arguments::result(&args.result)?;
        need_root("bench cyclictest")?;
        measure(args, &path, global, ui)?;
    }
    found(&path)?.tell("rtvirtio: latency in a guest", args.result.html.as_deref(), ui)
}

/// What a result shows.
pub fn found(path: &Path) -> anyhow::Result<Found> {
    let data: CyclictestData = read(path)?;
    let claims = claims(&data);
    let lead = vec![format!(
        "{} ({} under {}), {} held by {}, {}; {}.",
        data.host.device,
        data.host.vmm,
        data.host.accelerator,
        data.contract,
        data.backend,
        cores::idle(data.awake),
        data.commands.join("; ")
    )];
    Ok(Found {
        text: page::table(&claims),
        sections: page::cyclictest(&data),
        runs: Vec::new(),
        data: vec![serde_json::to_value(&data)?],
        host: data.host,
        claims,
        lead,
    })
}

/// Saves to `path` after each round, so that Ctrl-C loses no more than the one under way.
fn measure(args: &BenchCyclictestArgs, path: &Path, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    let length = Duration::from_nanos(args.length.0);
    if length < Duration::from_secs(1) {
        bail!("--for {}: cyclictest counts whole seconds, at least one", args.length);
    }
    let contract = Contract::new(args.budget, args.period).with_context(|| {
        format!(
            "--budget {} --period {}: at least 1us, and no more than the period",
            args.budget, args.period
        )
    })?;
    let before: Option<CyclictestData> = if args.add { Some(read(path)?) } else { None };
    let contracts = on_one_core(global, ui)?;
    let awake = if args.awake { keep_awake(ui) } else { None };
    let begun = |facts: &HostFacts| CyclictestData {
        schema: CyclictestData::SCHEMA.to_owned(),
        host: facts.clone(),
        commands: Vec::new(),
        generated: String::new(),
        awake: awake.is_some(),
        watched: true,
        backend: contracts.backend().to_string(),
        contract: contract.to_string(),
        series: Vec::new(),
    };
    let fits = |new: &CyclictestData| {
        if let Some(why) = before.as_ref().and_then(|old| old.differs(new)) {
            bail!(
                "--add: {} holds runs that cannot stand beside these: {why}; give another --out",
                path.display()
            );
        }
        Ok(())
    };
    // What need not be asked of a guest is asked before anything is made.
    if let Some(old) = &before {
        fits(&begun(&old.host))?;
    }
    // On a disk, not in memory: direct I/O.
    let dir = tempfile::Builder::new().prefix("rtvirtio-cyclictest-").tempdir_in(&args.disk_dir);
    let dir = dir.with_context(|| format!("--disk-dir {}", args.disk_dir.display()))?;
    let disk = dir.path().join("disk");
    write_disk(&disk).with_context(|| format!("cannot write {}", disk.display()))?;
    let kernels: &[Kernel] =
        if args.preempt_rt { &[Kernel::Standard, Kernel::Rt] } else { &[Kernel::Standard] };
    let asked = |s: &Setup| args.setups.is_empty() || args.setups.contains(s);
    let all: Vec<Setup> = Setup::ALL.into_iter().filter(asked).collect();
    let once = all.iter().filter(|s| **s == Setup::Host).count();
    let runs = (kernels.len() * (all.len() - once) + once) * usize::from(args.repeat);
    let mut bar = ui.bar("cyclictest", runs as u64);
    let mut data = before.clone();
    for (index, kernel) in kernels.iter().enumerate() {
        let mut bed = Bed::boot(*kernel, &contracts, contract, &disk, global, ui)?;
        let new = begun(&bed.facts);
        fits(&new)?;
        let data = data.get_or_insert(new);
        if index == 0 {
            data.commands.push(command(args));
        }
        // The host's own floor does not depend on the guest: it is measured once, beside the first one.
        let setups = all.iter().copied().filter(|s| *s != Setup::Host || index == 0).collect::<Vec<_>>();
        for round in 0..args.repeat {
            let seen = in_turn(&setups, round.into(), &mut bar, ui, |s| bed.measure(*s, length, ui))?;
            for (setup, mut seen) in setups.iter().zip(seen) {
                seen.seconds = length.as_secs_f64();
                let kernel = if *setup == Setup::Host { kernel_release() } else { bed.release.clone() };
                data.push(*setup, &kernel, seen);
            }
            data.generated = generated();
            keep(path, data)?;
        }
        bed.stop()?;
    }
    drop(bar);
    ui.step(&format!("wrote {}", path.display()));
    Ok(())
}

/// The command that these options are of.
fn command(args: &BenchCyclictestArgs) -> String {
    format!(
        "rtvirtio-lab bench cyclictest --for {} --repeat {} --budget {} --period {}{}{}{}{}",
        args.length,
        args.repeat,
        args.budget,
        args.period,
        if args.preempt_rt { " --preempt-rt" } else { "" },
        if args.awake { " --awake" } else { "" },
        if args.add { " --add" } else { "" },
        option(&args.setups)
    )
}

/// `--setups`, as it is written.
fn option(named: &[Setup]) -> String {
    let names: Vec<String> = named.iter().map(Setup::to_string).collect();
    if names.is_empty() { String::new() } else { format!(" --setups {}", names.join(",")) }
}

/// A guest on a core of its own, but for the load of the host.
struct Bed<'a> {
    contracts: &'a Contracts<'a>,
    contract: Contract,
    disk: &'a Path,
    name: String,
    release: String,
    core: u32,
    others: Vec<u32>,
    facts: HostFacts,
    vm: QemuGuest,
    /// Gone after the guest.
    group: FairGroup,
    _run_dir: tempfile::TempDir,
}

impl<'a> Bed<'a> {
    fn boot(
        kernel: Kernel,
        contracts: &'a Contracts<'a>,
        contract: Contract,
        disk: &'a Path,
        global: &Global,
        ui: &Ui,
    ) -> anyhow::Result<Self> {
        let (core, others) = core_and_others()?;
        // Guests inherit where this process runs, and boot faster on all CPUs.
        bind(std::process::id(), &[&others[..], &[core]].concat())?;
        let image = image::ensure_kernel(&global.cache_dir, kernel, &|line| ui.step(line));
        ui.check_cancelled()?;
        let image = image?;
        let accel = lab::choose_accel(AccelName::Auto, &image, ui)?;
        let release = image.release.clone();
        ui.step(&format!("booting a guest with {release}"));
        let run_dir = tempfile::Builder::new().prefix("rtvirtio-").tempdir()?;
        let name = format!("bench-{}", std::process::id());
        let group = FairGroup::make(&format!("{}fair", rtvirtio_kernel::ProcessId::prefix("bench")))?;
        let region = DiskRegion { path: disk.to_owned(), offset: Bytes(0), size: DISK };
        let config = QemuConfig {
            accel,
            workers: true,
            lock_memory: true,
            ..QemuConfig::new(&name, image, region, run_dir.path())
        };
        let mut vm = QemuGuest::start(&config)?;
        // A session of its own would be a fair group too, on kernels with autogroups; this one is there on all.
        group.take(vm.handle().process.pid)?;
        let facts = guest::facts(&mut vm, accel, format!("a guest of 1 vCPU on CPU {core}"))?;
        bind(std::process::id(), &others)?;
        Ok(Self {
            contracts,
            contract,
            disk,
            name,
            release,
            core,
            others,
            facts,
            vm,
            group,
            _run_dir: run_dir,
        })
    }

    fn measure(&mut self, setup: Setup, length: Duration, ui: &Ui) -> anyhow::Result<Latencies> {
        self.contracts.release()?;
        let pid = self.vm.handle().process.pid;
        // The host's floor is without a guest beside it.
        bind(pid, if setup == Setup::Host { &self.others } else { std::slice::from_ref(&self.core) })?;
        let order = match setup {
            Setup::Host | Setup::Guest => None,
            Setup::Prioritised => Some(Order::Contract),
            Setup::AioLowered | Setup::LoadMoved => Some(Order::Rt),
        };
        if let Some(order) = order {
            let named = Named::ask(&mut self.vm.qmp()?)?;
            self.contracts.hold(&[Wanted {
                vm: &self.name,
                handle: VmHandle { named, ..VmHandle::of_pid(pid) },
                vcpus_only: false,
                contract: self.contract,
                order,
                used: Vec::new(),
            }])?;
        }
        let _walk = Walk::start(self.core);
        let before = stolen(&Root::default(), self.core)?;
        let mut seen = match setup {
            Setup::Host => {
                let _fio = HostFio::start(self.disk, self.core)?;
                ui.pause(WARM_UP)?;
                let watch = Watch::start(self.core, INTERVAL_US, Some(length))?;
                // It ends by itself, to the wake-up.
                ui.pause(length)?;
                watch.finish()?
            }
            Setup::LoadMoved => {
                let _fio = HostFio::start(self.disk, self.core)?;
                ui.pause(WARM_UP)?;
                self.watched(length, ui)?
            }
            _ => {
                let argv = fio(GUEST_DISK);
                let load = self.vm.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())?;
                ui.pause(WARM_UP)?;
                let seen = self.watched(length, ui)?;
                if self.vm.poll(load)?.is_some() {
                    bail!("the I/O load in the guest ended by itself");
                }
                // Told to end, fio waits for requests that it takes to be under way; in five runs for seven of which the device had none.
                guest::say(&mut self.vm, &["killall", "-9", "fio"])?;
                guest::finish(&mut self.vm, load, PATIENCE, ui, &mut || Ok(()))?;
                seen
            }
        };
        // Warm-up included, which is short beside a run.
        let stolen = stolen(&Root::default(), self.core)?.saturating_sub(before);
        seen.stolen = Some(stolen.as_secs_f64());
        Ok(seen)
    }

    /// cyclictest in the guest, and the same on the host's core meanwhile.
    fn watched(&mut self, length: Duration, ui: &Ui) -> anyhow::Result<Latencies> {
        let watch = Watch::start(self.core, WATCH_US, None)?;
        let mut seen = in_guest(&mut self.vm, length, ui)?;
        seen.floor = Some(Box::new(watch.finish()?));
        Ok(seen)
    }

    fn stop(self) -> anyhow::Result<()> {
        self.contracts.release()?;
        self.vm.stop()?;
        drop(self.group);
        Ok(())
    }
}

/// The I/O load: what bonnie was in the paper, for ever.
fn fio(file: &str) -> Vec<String> {
    let fixed =
        ["fio", "--name=load", "--rw=randrw", "--bs=16k", "--ioengine=libaio", "--iodepth=8", "--direct=1"];
    let mut args: Vec<String> = fixed.iter().map(|a| (*a).to_owned()).collect();
    args.extend(["--time_based".to_owned(), "--runtime=1d".to_owned(), format!("--filename={file}")]);
    args.push(format!("--size={}", DISK.0));
    args
}

/// cyclictest in a guest, with the paper's options.
fn in_guest(vm: &mut QemuGuest, length: Duration, ui: &Ui) -> anyhow::Result<Latencies> {
    let argv = [
        "cyclictest".to_owned(),
        "-m".to_owned(),
        "-q".to_owned(),
        "-p99".to_owned(),
        format!("-i{INTERVAL_US}"),
        format!("-h{LARGEST_US}"),
        format!("-D{}", length.as_secs()),
    ];
    let process = vm.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())?;
    let output = guest::finish(vm, process, length * 2 + PATIENCE, ui, &mut || Ok(()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.success() {
        bail!("cyclictest in the guest: {said:.500}");
    }
    parse(&String::from_utf8_lossy(&output.stdout)).map_err(|e| anyhow::anyhow!("{e}; {said:.200}"))
}

/// What cyclictest does, on the host's core and above all that runs there, until it is finished or dropped: the floor of everything that a guest on it can
/// reach.
struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<Latencies>>>,
}

impl Watch {
    /// Returns when the thread has its core and its priority. After `length` it ends by itself.
    fn start(core: u32, interval_us: u64, length: Option<Duration>) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            bind_this_thread(core)?;
            sched::set(this_thread(), &Attr::fifo(99)).context("priority 99")?;
            let _ = ready.send(());
            Ok(wake_up(interval_us, length, &told))
        });
        let watch = Self { stop, thread: Some(thread) };
        match is_ready.recv() {
            Ok(()) => Ok(watch),
            // It has ended, and says why.
            Err(_) => Err(watch.finish().err().context("the thread that watches the host ended")?),
        }
    }

    fn finish(mut self) -> anyhow::Result<Latencies> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("finished twice")?;
        thread.join().unwrap_or_else(|_| bail!("the thread that watches the host panicked"))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Wakes in these intervals until told to stop, or for so long.
fn wake_up(interval_us: u64, length: Option<Duration>, stop: &AtomicBool) -> Latencies {
    let now = || {
        let t = rustix::time::clock_gettime(ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    };
    let mut all = Latencies::default();
    let begun = now();
    let end = length.map_or(u64::MAX, |l| begun + u64::try_from(l.as_nanos()).unwrap_or(u64::MAX / 2));
    let mut due = begun + interval_us * 1000;
    while due < end && !stop.load(Ordering::Relaxed) {
        let at = rustix::thread::Timespec {
            tv_sec: (due / 1_000_000_000) as i64,
            tv_nsec: (due % 1_000_000_000) as i64,
        };
        let _ = clock_nanosleep_absolute(ClockId::Monotonic, &at);
        let woke = now();
        all.add(woke.saturating_sub(due) / 1000);
        // As cyclictest does: what was slept through is not counted again.
        while due <= woke {
            due += interval_us * 1000;
        }
    }
    all.seconds = Duration::from_nanos(now() - begun).as_secs_f64();
    all
}

fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}

/// A thread of the host that walks through memory, until it is dropped.
struct Walk {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Walk {
    fn start(core: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let walk = move || {
            // On another core it would disturb less, which is no fault of the guest's.
            let _ = bind_this_thread(core);
            let mut memory = vec![0u8; WALK];
            while !told.load(Ordering::Relaxed) {
                // One byte of each cache line.
                memory.iter_mut().step_by(64).for_each(|b| *b = b.wrapping_add(1));
                black_box(&mut memory);
            }
        };
        Self { stop, thread: Some(std::thread::spawn(walk)) }
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It only walks; there is nothing to tell.
            let _ = thread.join();
        }
    }
}

/// The I/O load on the host, until it is dropped.
struct HostFio(Child);

impl HostFio {
    fn start(disk: &Path, core: u32) -> anyhow::Result<Self> {
        let args = fio(&disk.display().to_string());
        let mut command = Command::new(&args[0]);
        command.args(&args[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Its job as a thread, so that both end with this process, however that ends.
        command.arg("--thread");
        let child = spawn(command, Vec::new(), Lifetime::WithParent);
        let child = Self(child.context("cannot run fio on the host: install it")?);
        bind(child.0.id(), &[core])?;
        Ok(child)
    }
}

impl Drop for HostFio {
    fn drop(&mut self) {
        // Not SIGTERM, for the same reason as in the guest.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes the disk once, so that reads read.
fn write_disk(path: &Path) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    let block = vec![0x5a; 1 << 20];
    for _ in 0..DISK.0 >> 20 {
        file.write_all(&block)?;
    }
    file.sync_all()
}
