//! What it costs a guest to be observed: requests per second and CPU time per request with the
//! service that reads QEMU's counters, and without it, in turns.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_measure::workload::{self, Place, RunOptions, VmLoad};
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::qemu::{DiskRegion, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, LabHost, RamDisk, choose_accel};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use super::measure::{Rig, cpu_ticks};

/// Size of the guest's disk, in memory.
const DISK: Bytes = Bytes(64 << 20);
/// Between two looks: five times as often as by default.
const CONFIG: &str = "observe = \"2s\"\n";
/// Before each window: longer than the wait for the first look.
const REST: Duration = Duration::from_secs(4);
/// Longest wait for the first look.
const PATIENCE: Duration = Duration::from_secs(60);

/// One window.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Requests per second.
    pub iops: f64,
    /// CPU time of QEMU and the service for each request, in us.
    pub cpu_us: f64,
}

/// Windows one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// Without the service, and without histograms in QEMU.
    pub without: Load,
    /// With histograms in QEMU, and without the service.
    pub histograms: Load,
    /// With both.
    pub with: Load,
}

/// Measures so many pairs.
///
/// # Errors
/// A guest or a service that does not start, and cancellation.
pub fn measure(
    program: &std::path::Path,
    pairs: usize,
    window: Duration,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<Vec<Pair>> {
    progress.step(&format!("{pairs} pairs of windows with and without observation"));
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    let disk = RamDisk::new(DISK)?;
    let mut rig = Rig::new(program)?;
    let region = DiskRegion { path: disk.device().to_owned(), offset: Bytes(0), size: DISK };
    let config = QemuConfig { accel, ..QemuConfig::new("observed", image, region, rig.path()) };
    let mut guest = QemuGuest::start(&config)?;
    // QEMU serves one client of the agent.
    guest.close_agent();
    let handle = guest.handle().clone();
    let text = format!(
        "[device]\npath = \"{}\"\n[[vm]]\nname = \"observed\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\ndepth = 8\n\
         target = {{ percentile = \"p99\", latency = \"1s\" }}\n",
        disk.device().display(),
        handle.qmp_socket().display()
    );
    let spec = rtvirtio_spec::parse("observe.toml", &text)?;
    fs::write(rig.path().join("rtvirtiod.toml"), CONFIG)?;
    fs::write(rig.path().join("contracts.d/observed.toml"), &text)?;
    let place =
        Place::Guest { agent: handle.agent_socket().into(), target: "/dev/vda".into(), preload: true };
    let loads = [VmLoad::new(spec.vms[0].clone(), place)];
    let work_dir = rig.path().join("fio");
    let load = |service: Option<u32>| -> anyhow::Result<Load> {
        // Each window after the same rest: a guest that has just worked is warmer.
        progress.pause(REST)?;
        let ticks = || -> anyhow::Result<u64> {
            Ok(cpu_ticks(handle.process.pid)? + service.map_or(Ok(0), cpu_ticks)?)
        };
        let before = ticks()?;
        let mut options = RunOptions {
            length: window,
            warm_up: workload::WARM_UP,
            seed: 1,
            watch: false,
            disk: None,
            work_dir: &work_dir,
            cancel: progress.cancel_flag(),
            on_tick: &mut |_| {},
        };
        let (tasks, _, _) = workload::run(&loads, &mut options)?;
        let used = ticks()?.saturating_sub(before) as f64 / 100.0;
        let task = tasks.first().context("a task's result")?;
        ensure!(task.n > 0, "the guest sent no request");
        // The start of fio and its warm-up are in it, in each window alike.
        Ok(Load { iops: task.achieved_rate.0, cpu_us: used * 1e6 / task.n as f64 })
    };
    // Whatever the first window warms up.
    load(None)?;
    let mut out = Vec::new();
    for i in 0..pairs {
        // Either comes first as often as the other.
        let first = if i % 2 == 0 { Some(load(None)?) } else { None };
        rig.start()?;
        wait_for_histogram(&handle, true)?;
        let with = load(rig.pid())?;
        rig.kill();
        // They last as long as QEMU.
        let histograms = load(None)?;
        forget_histograms(&handle)?;
        let without = first.map_or_else(|| load(None), Ok)?;
        out.push(Pair { without, histograms, with });
    }
    guest.stop()?;
    Ok(out)
}

fn monitor(handle: &rtvirtio_testbed::qemu::QemuHandle) -> anyhow::Result<rtvirtio_vmm::Qmp> {
    Ok(rtvirtio_vmm::Qmp::connect(&handle.qmp_socket(), Duration::from_secs(5))?)
}

fn wait_for_histogram(handle: &rtvirtio_testbed::qemu::QemuHandle, there: bool) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        // The service may be the monitor's client at this moment.
        let disks = monitor(handle).and_then(|mut qmp| Ok(qmp.disk_stats()?)).unwrap_or_default();
        let mut disks = disks.iter().filter(|disk| disk.file.is_some()).peekable();
        if disks.peek().is_some() && disks.all(|disk| disk.read.histogram.is_some() == there) {
            return Ok(());
        }
        ensure!(begin.elapsed() < PATIENCE, "the service does not observe the guest");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// QEMU keeps a histogram until it ends, or is told otherwise.
fn forget_histograms(handle: &rtvirtio_testbed::qemu::QemuHandle) -> anyhow::Result<()> {
    let mut qmp = monitor(handle)?;
    for disk in qmp.disk_stats()?.iter().filter(|disk| disk.read.histogram.is_some()) {
        qmp.set_latency_histogram(&disk.id, &[])?;
    }
    drop(qmp);
    wait_for_histogram(handle, false)
}
