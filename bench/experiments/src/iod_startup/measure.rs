//! Start-ups of an application in a guest on the I/O domain.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{
    DISK, FLOOD_BLOCK, LOAD_FROM, MOUNT, SCHEMES, Scheme, Start, StartupData, Tuning, config, flood,
    guest_load, read_script, script, socket,
};
use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_domain_client::load::{Plan, StreamResult, run_until};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::LabKind;
use rtvirtio_testbed::AppDisk;
use rtvirtio_testbed::qemu::QemuGuest;
use rtvirtio_testbed::twin::{Access, TwinProfile, mean_service};
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_vmm::agent::Process;

use crate::backend::Backend;
use crate::guest;
use crate::interleave::{Counter, interleaved};
use crate::saved::Saved as _;
use rtvirtio_harness::test_bed::TestBed;
use rtvirtio_testbed::LabHost;
use rtvirtio_workflow::{Progress, generated};

/// From the start of the load to the start of the application.
const SETTLE: Duration = Duration::from_secs(3);
/// The exit status of `timeout` in the guest: 128 + SIGTERM.
const TIMED_OUT: i32 = 143;
/// The agent answers late under load.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longer than any start-up: the load ends when it is stopped.
const UNLIMITED: Duration = Duration::from_secs(24 * 3_600);

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct StartupOptions {
    /// Emulated device.
    #[arg(value_name = "twin:NAME", default_value = "twin:microsd")]
    pub device: String,
    /// The application, a program of this host, with its arguments.
    #[arg(last = true, value_name = "COMMAND", default_values = ["qemu-system-x86_64", "--version"])]
    pub app: Vec<String>,
    /// A directory of this host that the application needs in addition to its libraries.
    #[arg(long = "with", value_name = "DIR")]
    pub with: Vec<PathBuf>,
    /// Only these schemes, such as idle,urgent.
    #[arg(long, value_delimiter = ',', value_name = "SCHEMES")]
    pub schemes: Vec<String>,
    /// Start-ups of each kind.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeat: usize,
    /// A longer start-up counts as failed.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub limit: Nanos,
    /// Largest piece of requests that are not urgent, where the guest's priority is read.
    #[arg(long, value_name = "BYTES", default_value = "16KiB")]
    pub quantum: Bytes,
    /// Largest piece of urgent requests: those that the guest marks real-time, within their
    /// reservation.
    #[arg(long, value_name = "BYTES", default_value = "128KiB")]
    pub urgent_quantum: Bytes,
    /// Pieces at the device under the domain's reservations.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub window: u32,
}

/// Measures all start-ups.
///
/// # Errors
/// An unknown scheme, a device or application that cannot be used, and cancellation.
pub fn measure(
    options: &StartupOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<StartupData> {
    let Some(twin) = options.device.strip_prefix("twin:") else {
        bail!("{}: start-ups are measured on an emulated device, `twin:NAME`", options.device);
    };
    let pieces = (options.quantum, options.urgent_quantum, options.window);
    let tuning = tuning(&rtvirtio_files::load_twin(twin)?, pieces);
    let schemes = schemes_named(&options.schemes)?;
    let Some((program, rest)) = options.app.split_first() else { bail!("no application given") };
    let dir = tempfile::Builder::new().prefix("rtvirtio-startup-").tempdir()?;
    let app = AppDisk::make(dir.path(), &[program], &options.with)?;
    let path = app.programs.first().context("no application given")?;
    if app.size.0 > LOAD_FROM {
        bail!("{program} and its files need {}; there is room for {LOAD_FROM} bytes", app.size);
    }
    let bed = TestBed::make(&options.device, 1, LabKind::Process, labs, progress)?;
    let (device, size) = bed.without_elevator()?;
    if size < 2 * DISK {
        bail!("the device has {size} bytes; two disks need {}", 2 * DISK);
    }
    progress.step(&format!("writing {program} with its libraries, {}, to the device", app.content));
    copy(&app.file, &device)?;
    let (dir, device) = (dir.path(), device.as_path());
    let mut domain = Domain { dir, device, tuning, running: None, scheme: None };
    domain.use_scheme(&SCHEMES[0])?;
    let (mut vm, facts) = guest::boot(&socket(dir, 0), 1, &dir.join("run"), labs, progress)?;
    guest::run_command(&mut vm, &["mount", "-t", "ext4", "-o", "ro,noatime", "/dev/vda", MOUNT])?;
    for dir in ["/dev", "/proc"] {
        guest::run_command(&mut vm, &["mount", "-o", "bind", dir, &format!("{MOUNT}{dir}")])?;
    }
    let mut argv = vec![path.display().to_string()];
    argv.extend(rest.iter().cloned());
    let mut starts = Vec::new();
    let mut counter =
        Counter::new(progress, &format!("start-ups of {program}"), options.repeat * schemes.len());
    for round in 0..options.repeat {
        starts.extend(interleaved(&schemes, round, &mut counter, progress, |scheme| {
            domain.use_scheme(scheme)?;
            guest::wait_until_attached(&domain.control(), progress)?;
            let start = start_app(&mut vm, scheme, &domain, &argv, options.limit, progress)?;
            Ok(Start { round, ..start })
        })?);
    }
    drop(counter);
    vm.stop()?;
    drop(domain);
    let device = bed.facts().device;
    bed.remove()?;
    Ok(StartupData {
        schema: StartupData::SCHEMA.to_owned(),
        host: HostFacts { device, ..facts },
        command: format!(
            "rtvirtio-bench iod-startup {} --repeat {} --quantum {} --urgent-quantum {} --window {}",
            options.device, options.repeat, options.quantum, options.urgent_quantum, options.window
        ),
        generated: generated(),
        app: options.app.clone(),
        app_bytes: app.content.0,
        limit: options.limit.as_secs_f64(),
        starts,
    })
}

/// Schemes with these names; all without a name.
fn schemes_named(names: &[String]) -> anyhow::Result<Vec<&'static Scheme>> {
    if let Some(unknown) = names.iter().find(|n| !SCHEMES.iter().any(|s| s.name == *n)) {
        let known = SCHEMES.map(|s| s.name).join(", ");
        bail!("no scheme \"{unknown}\"; there are {known}");
    }
    Ok(SCHEMES.iter().filter(|s| names.is_empty() || names.iter().any(|n| n == s.name)).collect())
}

/// Tuning of the I/O domain: service times of the device, and the sizes of pieces that are not
/// urgent, of urgent ones, and the window.
pub(crate) fn tuning(twin: &TwinProfile, (quantum, urgent_quantum, window): (Bytes, Bytes, u32)) -> Tuning {
    let line = |access| {
        let (none, mib) = (mean_service(twin, access, 0), mean_service(twin, access, 1 << 20));
        (none, Nanos(mib.0.saturating_sub(none.0)))
    };
    Tuning {
        quantum,
        urgent_quantum,
        window,
        read: line(Access::Read),
        write: line(Access::Write),
        stall: twin.garbage_collection.as_ref().map_or(Nanos(0), |g| g.pause),
    }
}

/// Writes a file system to the beginning of a device.
pub(crate) fn copy(file: &Path, device: &Path) -> anyhow::Result<()> {
    let mut from = std::fs::File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut to = std::fs::OpenOptions::new().write(true).open(device)?;
    let copied = std::io::copy(&mut from, &mut to).and_then(|_| to.flush()).and_then(|()| to.sync_all());
    copied.with_context(|| format!("cannot write {}", device.display()))
}

/// The I/O domain under the configuration of a scheme.
struct Domain<'a> {
    dir: &'a Path,
    device: &'a Path,
    tuning: Tuning,
    running: Option<Backend>,
    scheme: Option<&'static str>,
}

impl Domain<'_> {
    /// Restarts the I/O domain where the scheme needs other settings; the guest reconnects itself.
    fn use_scheme(&mut self, scheme: &Scheme) -> anyhow::Result<()> {
        let text = config(scheme.treatment, &self.tuning, self.device, self.dir);
        if self.running.is_none() || self.scheme != Some(scheme.name) {
            self.running = None;
            self.running = Some(Backend::start_domain(self.dir, &text)?);
            self.scheme = Some(scheme.name);
        }
        Ok(())
    }

    fn control(&self) -> std::path::PathBuf {
        self.dir.join("control")
    }

    /// Requests, bytes, and pieces by reservation of the guest so far.
    fn counts(&self) -> anyhow::Result<[u64; 3]> {
        let vm = guest::vm_status(&self.control())?;
        let (read, write) = (vm.read, vm.write);
        let both = |a: Option<u64>, b: Option<u64>| Some(a? + b?);
        let requests = both(read.requests, write.requests);
        let bytes = both(read.service.bytes, write.service.bytes);
        let [Some(requests), Some(bytes), Some(reserved)] = [requests, bytes, vm.reserved] else {
            bail!("the domain does not count the guest's requests");
        };
        Ok([requests, bytes, reserved])
    }
}

/// Starts the application under a scheme, with its load.
fn start_app(
    vm: &mut QemuGuest,
    scheme: &Scheme,
    domain: &Domain<'_>,
    app: &[String],
    limit: Nanos,
    progress: &dyn Progress,
) -> anyhow::Result<Start> {
    let load = if scheme.load { Some(Load::start(vm, domain.dir)?) } else { None };
    let settled = std::time::Instant::now() + SETTLE;
    while load.is_some() && std::time::Instant::now() < settled {
        progress.check_cancelled()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = domain.counts()?;
    let (script, seconds) = (script(scheme), limit.as_secs_f64().ceil().to_string());
    let mut argv = vec!["sh", "-c", &script, "sh", &seconds];
    argv.extend(app.iter().map(String::as_str));
    let process = vm.spawn(&argv)?;
    let timeout = Duration::from_nanos(limit.0) * 2 + AGENT_TIMEOUT;
    let output = guest::wait_for_exit(vm, process, timeout, progress, &mut || Ok(()))?;
    let after = domain.counts()?;
    let flood = match load {
        Some(load) => load.stop(vm)?,
        None => 0.0,
    };
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let (status, seconds) = read_script(&stdout)
        .with_context(|| format!("the guest printed {stdout:?} when it started {app:?}"))?;
    if status != 0 && status != TIMED_OUT {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!(
            "{} ended with {status} in the guest: {why}; does it need a directory? Name it `--with DIR`",
            app[0]
        );
    }
    Ok(Start {
        scheme: scheme.name.to_owned(),
        round: 0,
        seconds: seconds.min(limit.as_secs_f64()),
        timed_out: status == TIMED_OUT,
        requests: after[0] - before[0],
        bytes: after[1] - before[1],
        reserved: after[2] - before[2],
        flood,
    })
}

/// Load in the guest and from another VM.
struct Load {
    readers: Process,
    stop: Arc<AtomicBool>,
    flood: Option<JoinHandle<std::io::Result<Vec<StreamResult>>>>,
}

impl Load {
    fn start(vm: &mut QemuGuest, dir: &Path) -> anyhow::Result<Self> {
        let argv = guest_load();
        let readers = vm.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())?;
        let options = Options { buffer: FLOOD_BLOCK as usize, ..Options::default() };
        let mut client = [Client::connect(&socket(dir, 1), options)?];
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let plan = Plan { warm_up: SETTLE, length: UNLIMITED, seed: 1, spin: false };
        let flood = std::thread::Builder::new()
            .name("flood".to_owned())
            .spawn(move || run_until(&mut client, &[flood()], &plan, &flag))?;
        Ok(Self { readers, stop, flood: Some(flood) })
    }

    /// Ends both loads. Bytes per second of the other VM after the load has settled.
    fn stop(mut self, vm: &mut QemuGuest) -> anyhow::Result<f64> {
        let results = self.end()?;
        if let Some(bad) = results.iter().find(|g| g.errors > 0) {
            bail!("{} of the other VM's requests failed: a run with errors is not counted", bad.errors);
        }
        let agent = vm.agent()?;
        agent.terminate(self.readers, AGENT_TIMEOUT)?;
        Ok(results.iter().map(|g| g.rate * f64::from(FLOOD_BLOCK)).sum())
    }

    fn end(&mut self) -> anyhow::Result<Vec<StreamResult>> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.flood.take() else { return Ok(Vec::new()) };
        Ok(thread.join().map_err(|_| anyhow::anyhow!("the other VM's load panicked"))??)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // The load in the guest ends with the guest.
        let _ = self.end();
    }
}
