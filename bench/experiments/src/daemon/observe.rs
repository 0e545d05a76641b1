//! Cost of observation for a guest: requests per second and CPU time per request with the service
//! that reads QEMU's counters, and without it, alternately.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::qemu::{DiskRegion, QemuConfig, QemuGuest, QemuHandle};
use rtvirtio_testbed::{AccelChoice, LabHost, RamDisk, choose_accel};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Progress;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use super::measure::{TestService, cpu_ticks};
use crate::interleave::Counter;

/// Size of the guest's disk, in memory.
const DISK: Bytes = Bytes(64 << 20);
/// Command of the guest's constant load.
const LOAD: [&str; 10] = [
    "fio",
    "--name=load",
    "--filename=/dev/vda",
    "--rw=randread",
    "--bs=4k",
    "--direct=1",
    "--ioengine=libaio",
    "--iodepth=8",
    "--time_based",
    "--runtime=24h",
];
/// Observation interval: five times as often as by default.
const CONFIG: &str = "observe = \"2s\"\n";
/// Warm-up of the load.
const REST: Duration = Duration::from_secs(4);
/// Pause before each window.
const SETTLE: Duration = Duration::from_millis(200);
/// Interval of polls of QEMU's monitor.
const POLL: Duration = Duration::from_millis(100);
/// Attempts to connect to a monitor that a stopped service may hold.
const TRIES: u32 = 5;
/// Longest wait for the first observation.
const OBSERVATION_TIMEOUT: Duration = Duration::from_secs(60);

/// Load of the guest in one window.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// Requests completed per second.
    pub iops: f64,
    /// CPU time of QEMU and the service for each request, us.
    pub cpu_us: f64,
}

/// Load of three consecutive windows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// Without the service, and without histograms in QEMU.
    pub without: Load,
    /// With histograms in QEMU, and without the service.
    pub histograms: Load,
    /// With histograms in QEMU and with the service.
    pub with: Load,
}

/// Measures `pairs` pairs in one run of the guest's load, which never stops: between windows the
/// service is stopped (SIGSTOP) and continued, and QEMU's histograms are removed and set.
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
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    let disk = RamDisk::new(DISK)?;
    let mut rig = TestService::new(program)?;
    let region = DiskRegion { path: disk.device().to_owned(), offset: Bytes(0), size: DISK };
    let config = QemuConfig { accel, ..QemuConfig::new("observed", image, region, rig.path()) };
    let mut guest = QemuGuest::start(&config)?;
    let handle = guest.handle().clone();
    let text = format!(
        "[device]\npath = \"{}\"\n[[vm]]\nname = \"observed\"\nqmp = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\ndepth = 8\n\
         target = {{ percentile = \"p99\", latency = \"1s\" }}\n",
        disk.device().display(),
        handle.qmp_socket().display()
    );
    fs::write(rig.path().join("rtvirtiod.toml"), CONFIG)?;
    fs::write(rig.path().join("contracts.d/observed.toml"), &text)?;
    guest.spawn(&LOAD)?;
    // QEMU serves one client of the agent.
    guest.close_agent();
    rig.start()?;
    let service = rig.pid().map(Process::open).transpose()?.flatten().context("the service ended")?;
    wait_for_histogram(&handle, progress)?;
    progress.pause(REST)?;
    let device = BlockDevice::find(&Root::default(), disk.device())?;
    let load = || -> anyhow::Result<Load> {
        // The effect of a change between two windows is in neither.
        progress.pause(SETTLE)?;
        let count = || -> anyhow::Result<(u64, u64)> {
            let done = DeviceIo::read(&Root::default(), &device)?;
            Ok((done.reads + done.writes, cpu_ticks(handle.process.pid)? + cpu_ticks(service.pid())?))
        };
        let (begin, before) = (Instant::now(), count()?);
        progress.pause(window)?;
        let (took, after) = (begin.elapsed(), count()?);
        let n = after.0.saturating_sub(before.0) as f64;
        ensure!(n > 0.0, "the guest sends no requests");
        let used = after.1.saturating_sub(before.1) as f64 / 100.0;
        Ok(Load { iops: n / took.as_secs_f64(), cpu_us: used * 1e6 / n })
    };
    let mut out = Vec::new();
    let mut counter = Counter::new(progress, "windows with and without observation", 3 * pairs);
    for i in 0..pairs {
        // Either order is as frequent as the other. Histograms last as long as QEMU.
        let (without, histograms, with);
        if i % 2 == 0 {
            with = load()?;
            service.signal(Signal::STOP)?;
            histograms = load()?;
            forget_histograms(&handle, &service, progress)?;
            without = load()?;
            service.signal(Signal::CONT)?;
            wait_for_histogram(&handle, progress)?;
        } else {
            service.signal(Signal::STOP)?;
            forget_histograms(&handle, &service, progress)?;
            without = load()?;
            service.signal(Signal::CONT)?;
            wait_for_histogram(&handle, progress)?;
            service.signal(Signal::STOP)?;
            histograms = load()?;
            service.signal(Signal::CONT)?;
            with = load()?;
        }
        counter.set(3 * (i as u64 + 1));
        out.push(Pair { without, histograms, with });
    }
    drop(counter);
    rig.kill();
    guest.stop()?;
    Ok(out)
}

fn monitor(handle: &QemuHandle) -> anyhow::Result<rtvirtio_vmm::Qmp> {
    Ok(rtvirtio_vmm::Qmp::connect(&handle.qmp_socket(), Duration::from_secs(5))?)
}

/// Waits until each disk has a histogram.
fn wait_for_histogram(handle: &QemuHandle, progress: &dyn Progress) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        // The service may be the monitor's client at this moment.
        let disks = monitor(handle).and_then(|mut qmp| Ok(qmp.disk_stats()?));
        let is_there = disks.as_ref().is_ok_and(|disks| {
            let mut disks = disks.iter().filter(|disk| disk.file.is_some()).peekable();
            disks.peek().is_some() && disks.all(|disk| disk.read.histogram.is_some())
        });
        match disks {
            Ok(_) if is_there => return Ok(()),
            Ok(_) => ensure!(begin.elapsed() < OBSERVATION_TIMEOUT, "the service does not observe the guest"),
            Err(e) if begin.elapsed() > OBSERVATION_TIMEOUT => return Err(e),
            Err(_) => {}
        }
        progress.pause(POLL)?;
    }
}

/// Removes QEMU's histograms, which it would keep until it ends. The service is stopped; if it
/// holds the monitor it is continued for a moment.
fn forget_histograms(handle: &QemuHandle, service: &Process, progress: &dyn Progress) -> anyhow::Result<()> {
    let forget = || -> anyhow::Result<()> {
        let mut qmp = monitor(handle)?;
        for disk in qmp.disk_stats()?.iter().filter(|disk| disk.read.histogram.is_some()) {
            qmp.set_latency_histogram(&disk.id, &[])?;
        }
        Ok(())
    };
    for _ in 1..TRIES {
        if forget().is_ok() {
            return Ok(());
        }
        service.signal(Signal::CONT)?;
        progress.pause(POLL)?;
        service.signal(Signal::STOP)?;
    }
    forget()
}
