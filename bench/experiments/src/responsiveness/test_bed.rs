//! A device with a guest for each way to serve its disk, and one run of start-ups on it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::Kernel;
use rtvirtio_startup::FavourLimits;
use rtvirtio_testbed::qemu::{Accel, DiskRegion, GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, AppDisk, LabHost, choose_accel};
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::starts::{StartEvent, StartEventKind, StartVm, StartsOptions, follow_starts};

use super::cell::{APPS, Cell, DISK, Plane};
use super::load::{HostReaders, end_in_guest, start_in_guest};
use super::script::{Printed, SECTOR, read_script, script};
use super::{RunOfStarts, Start};
use crate::backend::Backend;
use crate::guest;
use crate::iod_startup::{MOUNT, Treatment, Tuning, config, socket};
use rtvirtio_harness::test_bed::TestBed;

/// Prints the device of the port whose name is the shell's.
const FIND_PORT: &str =
    "for d in /sys/class/virtio-ports/*; do read n <$d/name; [ $n != $0 ] || echo /dev/${d##*/}; done";
/// Name of the guest in the test bed's binding.
const VM: &str = "vm0";
/// The exit status of `timeout` in the guest: 128 + SIGTERM.
const TIMED_OUT: i32 = 143;
/// The agent answers late under load.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// The time in which the throughput of a load is measured, at the end of its settling.
const WINDOW: Duration = Duration::from_secs(2);
/// Longest wait until the kernel's plane has connected to the guest's port.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Number and time limits of the start-ups of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunPlan {
    /// Start-ups in a row.
    pub starts: usize,
    /// Time limit of a start-up.
    pub limit: Nanos,
    /// From the start of the load to the first start-up.
    pub settle: Duration,
}

/// A guest that runs, with its I/O scheduler.
struct Vm {
    guest: QemuGuest,
    scheduler: String,
    /// Device, in the guest, of the port on which starts are announced.
    port: Option<String>,
}

/// A device, and the guests on it: one whose disk QEMU serves, one on the I/O domain. Both have the
/// same part of the device, with the applications on it.
pub struct DeviceTestBed<'a> {
    bed: &'a TestBed<'a>,
    labs: &'a LabHost,
    progress: &'a dyn Progress,
    dir: &'a Path,
    device: PathBuf,
    apps: AppDisk,
    tuning: Option<Tuning>,
    elevator: String,
    accel: Option<Accel>,
    native: Option<Vm>,
    on_domain: Option<Vm>,
    // After the guest that it serves.
    domain: Option<Backend>,
    /// Host facts by the guests' QEMU; `None` before a guest has booted.
    pub facts: Option<HostFacts>,
}

impl<'a> DeviceTestBed<'a> {
    /// Writes the applications to the device. Guests boot when a run needs them.
    pub fn make(
        bed: &'a TestBed<'a>,
        tuning: Option<Tuning>,
        dir: &'a Path,
        labs: &'a LabHost,
        progress: &'a dyn Progress,
    ) -> anyhow::Result<Self> {
        let programs: Vec<&str> = APPS.iter().filter_map(|app| app.command.first().copied()).collect();
        let apps = AppDisk::make(dir, &programs, &[])?;
        ensure!(
            apps.size.0 <= super::cell::LOAD_FROM,
            "the applications need {}; there is room for {}",
            apps.size,
            Bytes(super::cell::LOAD_FROM)
        );
        let (device, size) = bed.without_elevator()?;
        ensure!(size >= 2 * DISK, "the device has {size} bytes; two disks need {}", 2 * DISK);
        progress.step(&format!("writing {} of applications to {}", apps.content, bed.device.name));
        crate::iod_startup::copy(&apps.file, &device)?;
        let elevator = "none".to_owned();
        let (native, on_domain, domain, facts) = (None, None, None, None);
        Ok(Self {
            bed,
            labs,
            progress,
            dir,
            device,
            apps,
            tuning,
            elevator,
            accel: None,
            native,
            on_domain,
            domain,
            facts,
        })
    }

    /// Bytes of the applications with all that they load.
    pub fn app_bytes(&self) -> u64 {
        self.apps.content.0
    }

    /// Measures the start-ups of a cell under a plane.
    pub fn run(
        &mut self,
        cell: &Cell,
        plane: Plane,
        repetition: usize,
        plan: &RunPlan,
    ) -> anyhow::Result<RunOfStarts> {
        self.place(cell, plane)?;
        let app = APPS.iter().position(|app| app.name == cell.app).context("no such application")?;
        let program = self.apps.programs.get(app).context("no such application")?.display().to_string();
        let mut argv = vec![program];
        argv.extend(APPS[app].command.iter().skip(1).map(|arg| (*arg).to_owned()));
        let (guest_load, host_load) = cell.guest().zip(cell.host()).context("no such load")?;
        let favour = if plane == Plane::Kernel { Some(self.favour(plan)?) } else { None };
        let device = self.device.clone();
        let host = match plane {
            Plane::Domain => HostReaders::on_domain(&host_load, &socket(self.dir, 1))?,
            _ => HostReaders::on_device(
                &host_load,
                &device.display().to_string(),
                &[self.bed.cgroup_procs(1)?],
            )?,
        };
        let (bed, progress) = (self.bed, self.progress);
        let vm = if plane == Plane::Domain { &mut self.on_domain } else { &mut self.native };
        let vm = vm.as_mut().context("no guest")?;
        let process = start_in_guest(&guest_load, &mut vm.guest)?;
        let loaded = process.is_some() || host_load.readers > 0;
        let throughput = if loaded { settle(&mut vm.guest, bed, plan.settle, progress)? } else { [0.0; 2] };
        let mut starts = Vec::new();
        let mut moved = Moved::default();
        for _ in 0..plan.starts {
            flush(&device)?;
            let (begin, sectors) = (Instant::now(), bed.sectors()?);
            let (start, of_guest) = start(vm, plane, &argv, plan.limit, progress)?;
            let device = (bed.sectors()? - sectors) * SECTOR;
            moved.add([(device, begin.elapsed().as_secs_f64()), of_guest]);
            starts.push(start);
            if start.timed_out {
                break;
            }
        }
        end_in_guest(process, &mut vm.guest)?;
        host.end()?;
        let favoured = favour.map(|favour| favour.end(progress)).transpose()?;
        let (cell, meanwhile) = (cell.clone(), loaded.then(|| moved.rates()));
        Ok(RunOfStarts { cell, plane, repetition, starts, throughput, meanwhile, favoured })
    }

    /// Sets the host's scheduler, the guest, its scheduler and its cgroup.
    fn place(&mut self, cell: &Cell, plane: Plane) -> anyhow::Result<()> {
        let elevator = if plane == Plane::Domain { "none" } else { cell.host_scheduler.as_str() };
        if self.elevator != elevator {
            self.bed.renew_elevator(elevator)?;
            elevator.clone_into(&mut self.elevator);
        }
        if plane == Plane::Domain {
            self.boot_on_domain()?;
        } else {
            self.boot_native()?;
        }
        let vm = if plane == Plane::Domain { &mut self.on_domain } else { &mut self.native };
        let vm = vm.as_mut().context("no guest")?;
        if vm.scheduler != cell.guest_scheduler {
            vm.guest.write_file("/sys/block/vda/queue/scheduler", cell.guest_scheduler.as_bytes())?;
            vm.scheduler.clone_from(&cell.guest_scheduler);
        }
        // The host's readers are in the second group.
        let group = match plane {
            Plane::Default => 1,
            Plane::Grouped | Plane::Kernel => 0,
            Plane::Domain => return Ok(()),
        };
        let pid = vm.guest.handle().process.pid.to_string();
        Ok(rtvirtio_kernel::Root::default().write(self.bed.cgroup_procs(group)?, &pid)?)
    }

    fn boot_native(&mut self) -> anyhow::Result<()> {
        if self.native.is_none() {
            let region = DiskRegion { path: self.device.clone(), offset: Bytes(0), size: Bytes(DISK) };
            let procs = vec![self.bed.cgroup_procs(0)?];
            self.native = Some(self.boot("native", region.into(), procs)?);
        }
        Ok(())
    }

    fn boot_on_domain(&mut self) -> anyhow::Result<()> {
        if self.on_domain.is_none() {
            let tuning = self.tuning.as_ref().context("the device's service times are not known")?;
            let text = config(Treatment::Urgent, tuning, &self.device, self.dir);
            self.domain = Some(Backend::start_domain(self.dir, &text)?);
            let disk = GuestDisk::VhostUser { socket: socket(self.dir, 0), queues: Some(1) };
            self.on_domain = Some(self.boot("on-domain", disk, Vec::new())?);
        }
        guest::wait_until_attached(&self.dir.join("control"), self.progress)
    }

    /// Boots a guest, and copies the files of start-ups into it.
    fn boot(&mut self, name: &str, disk: GuestDisk, procs: Vec<PathBuf>) -> anyhow::Result<Vm> {
        let image = self.labs.guest_image(Kernel::Standard, self.progress)?;
        let accel = match self.accel {
            Some(accel) => accel,
            None => choose_accel(AccelChoice::Auto, &image, self.progress)?,
        };
        self.accel = Some(accel);
        self.progress.step(&format!("booting a guest: {name}"));
        let config = QemuConfig {
            accel,
            start_port: true,
            cgroup_procs: procs,
            ..QemuConfig::new(name, image, disk, &self.dir.join("run"))
        };
        let mut guest = QemuGuest::start(&config)?;
        self.facts = Some(guest::facts(&mut guest, accel, String::new())?);
        guest::run_command(&mut guest, &["mount", "-t", "ext4", "-o", "ro,noatime", "/dev/vda", MOUNT])?;
        for dir in ["/dev", "/proc"] {
            guest::run_command(&mut guest, &["mount", "-o", "bind", dir, &format!("{MOUNT}{dir}")])?;
        }
        let port = guest::run_command(&mut guest, &["sh", "-c", FIND_PORT, rtvirtio_startup::PORT])?;
        let port = Some(port.trim().to_owned()).filter(|port| !port.is_empty());
        Ok(Vm { guest, scheduler: String::new(), port })
    }

    /// Favours the VM as `rtvirtio starts` does, with a budget for all starts of a run.
    fn favour(&self, plan: &RunPlan) -> anyhow::Result<Favouring> {
        let guest = &self.native.as_ref().context("no guest")?.guest;
        let vms = [StartVm { name: VM.to_owned(), socket: guest.handle().start_socket() }];
        let budget = Nanos(plan.limit.0.saturating_mul(plan.starts.max(1) as u64));
        let limits = FavourLimits { budget, within: budget, longest: plan.limit };
        let options = StartsOptions { limits, ..StartsOptions::default() };
        let (binding, dirs) = (self.bed.binding()?, self.bed.dirs().clone());
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("starts".to_owned()).spawn(move || {
            follow_starts(&vms, &binding, &options, &dirs, &*theirs, &mut |event| {
                lock(&theirs.events).push(event);
                Ok(())
            })
            .map(drop)
        })?;
        let favouring = Favouring { shared, thread: Some(thread) };
        let begin = Instant::now();
        while !lock(&favouring.shared.events).iter().any(|e| e.what == StartEventKind::Connected) {
            self.progress.check_cancelled()?;
            if favouring.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                favouring.end(self.progress)?;
                bail!("following the guest's port ended by itself");
            }
            ensure!(
                begin.elapsed() < CONNECT_TIMEOUT,
                "the guest's port {} is not connected",
                vms_path(guest)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(favouring)
    }
}

fn vms_path(guest: &QemuGuest) -> String {
    guest.handle().start_socket().display().to_string()
}

/// Flushes the device's own page cache. Later readers of the device bypass it.
fn flush(device: &Path) -> anyhow::Result<()> {
    let status = Command::new("blockdev").arg("--flushbufs").arg(device).status();
    let status = status.context("blockdev (util-linux) cannot be run")?;
    ensure!(status.success(), "blockdev --flushbufs {}: {status}", device.display());
    Ok(())
}

/// Bytes and seconds during starts, with the script's preparation: of the device, by the host's
/// clock, and of the guest's disk, by the guest's.
#[derive(Default)]
struct Moved([(u64, f64); 2]);

impl Moved {
    fn add(&mut self, more: [(u64, f64); 2]) {
        for (of, (bytes, seconds)) in self.0.iter_mut().zip(more) {
            *of = (of.0 + bytes, of.1 + seconds);
        }
    }

    fn rates(&self) -> [f64; 2] {
        self.0.map(|(bytes, seconds)| bytes as f64 / seconds.max(0.01))
    }
}

/// Waits until a load has settled. Bytes per second of the device, and the guest's part.
fn settle(
    vm: &mut QemuGuest,
    bed: &TestBed<'_>,
    time: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<[f64; 2]> {
    progress.pause(time.saturating_sub(WINDOW))?;
    let mut look = || -> anyhow::Result<(Instant, u64, f64, f64)> {
        let (now, sectors) = (Instant::now(), bed.sectors()?);
        let text = guest::run_command(vm, &["cat", "/proc/uptime", "/sys/block/vda/stat"])?;
        let fields: Vec<f64> = text.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        // Two fields of the uptime, then those of the disk: sectors read are its third, written its
        // seventh.
        let field = |i: usize| fields.get(i).copied().with_context(|| format!("the guest printed {text:?}"));
        Ok((now, sectors, field(0)?, field(4)? + field(8)?))
    };
    let before = look()?;
    progress.pause(WINDOW)?;
    let after = look()?;
    let rate = |sectors: f64, seconds: f64| sectors * SECTOR as f64 / seconds.max(0.01);
    let host = rate((after.1 - before.1) as f64, (after.0 - before.0).as_secs_f64());
    Ok([host, rate(after.3 - before.3, after.2 - before.2)])
}

/// Starts the application. Also returns the bytes that the guest read and wrote, and the seconds.
fn start(
    vm: &mut Vm,
    plane: Plane,
    app: &[String],
    limit: Nanos,
    progress: &dyn Progress,
) -> anyhow::Result<(Start, (u64, f64))> {
    let script = script(plane, limit.0.div_ceil(1_000_000_000));
    let port = vm.port.as_deref().unwrap_or_default();
    let mut argv = vec!["sh", "-c", &script, "sh", port];
    argv.extend(app.iter().map(String::as_str));
    let vm = &mut vm.guest;
    let process = vm.spawn(&argv)?;
    let timeout = Duration::from_nanos(limit.0) * 2 + AGENT_TIMEOUT;
    let output = guest::wait_for_exit(vm, process, timeout, progress, &mut || Ok(()))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let Printed { status, seconds, read, all } = read_script(&stdout)
        .with_context(|| format!("the guest printed {stdout:?} when it started {app:?}"))?;
    if status != 0 && status != TIMED_OUT {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!("{} ended with {status} in the guest: {why}", app[0]);
    }
    let (limit, timed_out) = (limit.as_secs_f64(), status == TIMED_OUT);
    let start = Start { seconds: if timed_out { limit } else { seconds.min(limit) }, timed_out, read };
    Ok((start, all))
}

/// The thread that favours the guest, until it is ended or dropped.
struct Favouring {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<rtvirtio_workflow::Result<()>>>,
}

/// Events of the favouring thread, and its cancellation.
#[derive(Default)]
struct Shared {
    cancel: AtomicBool,
    events: Mutex<Vec<StartEvent>>,
    warnings: Mutex<Vec<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Progress for Shared {
    fn warn(&self, text: &str) {
        lock(&self.warnings).push(text.to_owned());
    }

    fn cancel_flag(&self) -> &AtomicBool {
        &self.cancel
    }
}

impl Favouring {
    /// Ends the thread, with all weights restored. Time for which the guest was favoured, s.
    fn end(mut self, progress: &dyn Progress) -> anyhow::Result<f64> {
        let done = self.join();
        lock(&self.shared.warnings).drain(..).for_each(|warning| progress.warn(&warning));
        done?;
        let events = lock(&self.shared.events);
        let favoured = events.iter().rev().find_map(|e| match e.what {
            StartEventKind::Lowered(counters) => Some(counters.favoured.as_secs_f64()),
            _ => None,
        });
        favoured.context("the guest was never favoured: its word did not arrive")
    }

    fn join(&mut self) -> anyhow::Result<()> {
        self.shared.cancel.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().map_err(|_| anyhow::anyhow!("the thread that favours the guest panicked"))??;
        Ok(())
    }
}

impl Drop for Favouring {
    fn drop(&mut self) {
        // `end` reports the error; the test bed reverts remaining settings.
        let _ = self.join();
    }
}
