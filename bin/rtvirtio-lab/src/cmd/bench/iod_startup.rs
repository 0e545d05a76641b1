//! `rtvirtio-lab bench iod-startup`: how long an application takes to start in a real guest on the I/O domain.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_bench::startup::{
    DISK, FLOOD_BLOCK, LOAD_FROM, MOUNT, SCHEMES, Scheme, Start, StartupData, Tuning, claims, config, flood,
    guest_load, read_script, script, socket,
};
use rtvirtio_domain_client::load::{Plan, StreamResult, run_until};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_measure::HostFacts;
use rtvirtio_report::{BenchSection, BenchTable};
use rtvirtio_spec::LabKind;
use rtvirtio_testbed::AppDisk;
use rtvirtio_testbed::qemu::QemuGuest;
use rtvirtio_testbed::twin::{Access, TwinProfile, mean_service};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::agent::Process;

use super::arguments;
use super::backend::Backend;
use super::bed::Bed;
use super::found::{Found, read, save};
use super::turns::in_turn;
use super::{guest, page};
use crate::args::BenchIodStartupArgs;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::need_root;
use rtvirtio_workflow::Progress as _;

/// Where the result lies in a directory of results.
pub const FILE: &str = "iod-startup.json";
/// From the begin of the load to the start of the application.
const SETTLE: Duration = Duration::from_secs(3);
/// The exit status of `timeout` in the guest: 128 + SIGTERM.
const TIMED_OUT: i32 = 143;
/// The agent's answer may come late under load.
const SLACK: Duration = Duration::from_secs(60);
/// Nobody waits longer for anything here.
const FOR_EVER: Duration = Duration::from_secs(24 * 3_600);

/// `rtvirtio-lab bench iod-startup`.
pub fn run(args: &BenchIodStartupArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FILE);
    if !args.result.report_only {
        arguments::device(&args.device)?;
        arguments::result(&args.result)?;
        need_root("bench iod-startup")?;
        save(&path, &measure(args, global, ui)?, ui)?;
    }
    found(&path)?.tell("rtvirtio: start-up of an application", args.result.html.as_deref(), ui)
}

/// What a result shows.
pub fn found(path: &Path) -> anyhow::Result<Found> {
    let data: StartupData = read(path)?;
    let claims = claims(&data);
    let lead = vec![format!(
        "{}: start-ups of `{}` in a guest ({} under {}); {}.",
        data.host.device,
        data.app.join(" "),
        data.host.vmm,
        data.host.accelerator,
        data.command
    )];
    Ok(Found {
        text: page::table(&claims),
        sections: vec![section(&data)],
        runs: Vec::new(),
        data: vec![serde_json::to_value(&data)?],
        host: data.host,
        claims,
        lead,
    })
}

fn section(data: &StartupData) -> BenchSection {
    let head = ["round", "scheme", "seconds", "requests", "bytes", "by reservation", "other VM, MB/s"];
    let rows = data.starts.iter().map(|s| {
        vec![
            (s.round + 1).to_string(),
            s.scheme.clone(),
            if s.timed_out { format!("over {}", data.limit) } else { format!("{:.2}", s.seconds) },
            s.requests.to_string(),
            s.bytes.to_string(),
            s.reserved.to_string(),
            format!("{:.2}", s.flood / 1e6),
        ]
    });
    BenchSection {
        title: "Start-up of an application in a guest".to_owned(),
        tables: vec![BenchTable {
            label: "starts".to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: rows.collect(),
        }],
        ..BenchSection::default()
    }
}

fn measure(args: &BenchIodStartupArgs, global: &Global, ui: &Ui) -> anyhow::Result<StartupData> {
    let Some(twin) = args.device.strip_prefix("twin:") else {
        bail!("{}: start-ups are measured on an emulated device, `twin:NAME`", args.device);
    };
    let tuning = tuning(&TwinProfile::load(twin)?, args);
    let schemes = chosen(&args.schemes)?;
    let Some((program, rest)) = args.app.split_first() else { bail!("no application given") };
    let dir = tempfile::Builder::new().prefix("rtvirtio-startup-").tempdir()?;
    let app = AppDisk::make(dir.path(), program, &args.with)?;
    if app.size.0 > LOAD_FROM {
        bail!("{program} and its files need {}; there is room for {LOAD_FROM} bytes", app.size);
    }
    let bed = Bed::made(&args.device, 1, LabKind::Process, global, ui)?;
    let (device, size) = bed.plain()?;
    if size < 2 * DISK {
        bail!("the device has {size} bytes; two disks need {}", 2 * DISK);
    }
    ui.step(&format!("writing {program} with its libraries, {}, to the device", app.content));
    copy(&app.file, &device)?;
    let (dir, device) = (dir.path(), device.as_path());
    let mut domain = Domain { dir, device, tuning, running: None, scheme: None };
    domain.run(&SCHEMES[0])?;
    let (mut vm, facts) = guest::boot(&socket(dir, 0), 1, &dir.join("run"), global, ui)?;
    guest::say(&mut vm, &["mount", "-t", "ext4", "-o", "ro,noatime", "/dev/vda", MOUNT])?;
    for dir in ["/dev", "/proc"] {
        guest::say(&mut vm, &["mount", "-o", "bind", dir, &format!("{MOUNT}{dir}")])?;
    }
    let mut argv = vec![app.program.display().to_string()];
    argv.extend(rest.iter().cloned());
    let mut starts = Vec::new();
    let mut bar = ui.bar(&format!("start-ups of {program}"), (args.repeat * schemes.len()) as u64);
    for round in 0..args.repeat {
        starts.extend(in_turn(&schemes, round, &mut bar, ui, |scheme| {
            domain.run(scheme)?;
            guest::attach(&domain.control(), ui)?;
            let start = one(&mut vm, scheme, &domain, &argv, args.limit, ui)?;
            Ok(Start { round, ..start })
        })?);
    }
    drop(bar);
    vm.stop()?;
    drop(domain);
    let device = bed.facts().device;
    bed.remove()?;
    Ok(StartupData {
        schema: StartupData::SCHEMA.to_owned(),
        host: HostFacts { device, ..facts },
        command: format!(
            "rtvirtio-lab bench iod-startup {} --repeat {} --quantum {} --urgent-quantum {} --window {}",
            args.device, args.repeat, args.quantum, args.urgent_quantum, args.window
        ),
        generated: generated(),
        app: args.app.clone(),
        app_bytes: app.content.0,
        limit: args.limit.as_secs_f64(),
        starts,
    })
}

/// The schemes of these names; all when none is named.
fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static Scheme>> {
    if let Some(unknown) = names.iter().find(|n| !SCHEMES.iter().any(|s| s.name == *n)) {
        let known = SCHEMES.map(|s| s.name).join(", ");
        bail!("no scheme \"{unknown}\"; there are {known}");
    }
    Ok(SCHEMES.iter().filter(|s| names.is_empty() || names.iter().any(|n| n == s.name)).collect())
}

/// What the device needs for requests, and the settings asked for.
fn tuning(twin: &TwinProfile, args: &BenchIodStartupArgs) -> Tuning {
    let line = |access| {
        let (none, mib) = (mean_service(twin, access, 0), mean_service(twin, access, 1 << 20));
        (none, Nanos(mib.0.saturating_sub(none.0)))
    };
    Tuning {
        quantum: args.quantum,
        urgent_quantum: args.urgent_quantum,
        window: args.window,
        read: line(Access::Read),
        write: line(Access::Write),
        stall: twin.garbage_collection.as_ref().map_or(Nanos(0), |g| g.pause),
    }
}

fn copy(file: &Path, device: &Path) -> anyhow::Result<()> {
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
    /// Starts it anew where the scheme needs another configuration; the guest connects again by itself.
    fn run(&mut self, scheme: &Scheme) -> anyhow::Result<()> {
        let text = config(scheme.treatment, &self.tuning, self.device, self.dir);
        if self.running.is_none() || self.scheme != Some(scheme.name) {
            self.running = None;
            self.running = Some(Backend::ours(self.dir, &text)?);
            self.scheme = Some(scheme.name);
        }
        Ok(())
    }

    fn control(&self) -> std::path::PathBuf {
        self.dir.join("control")
    }

    /// Requests, bytes, pieces by reservation of the guest so far.
    fn counts(&self) -> anyhow::Result<[u64; 3]> {
        let vm = guest::vm(&self.control())?;
        let number = |at: &str| vm.pointer(at).and_then(serde_json::Value::as_u64).unwrap_or(0);
        let both = |what: &str| number(&format!("/read/{what}")) + number(&format!("/write/{what}"));
        Ok([both("requests"), both("bytes"), number("/reserved")])
    }
}

/// One start-up under a scheme.
fn one(
    vm: &mut QemuGuest,
    scheme: &Scheme,
    domain: &Domain<'_>,
    app: &[String],
    limit: Nanos,
    ui: &Ui,
) -> anyhow::Result<Start> {
    let load = if scheme.load { Some(Load::start(vm, domain.dir)?) } else { None };
    let settled = std::time::Instant::now() + SETTLE;
    while load.is_some() && std::time::Instant::now() < settled {
        ui.check_cancelled()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    let before = domain.counts()?;
    let (script, seconds) = (script(scheme), limit.as_secs_f64().ceil().to_string());
    let mut argv = vec!["sh", "-c", &script, "sh", &seconds];
    argv.extend(app.iter().map(String::as_str));
    let process = vm.spawn(&argv)?;
    let patience = Duration::from_nanos(limit.0) * 2 + SLACK;
    let output = guest::finish(vm, process, patience, ui, &mut || Ok(()))?;
    let after = domain.counts()?;
    let flood = match load {
        Some(load) => load.stop(vm)?,
        None => 0.0,
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let (status, seconds) =
        read_script(&said).with_context(|| format!("the guest said {said:?} when asked to start {app:?}"))?;
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

/// Load in the guest and from the other VM.
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
        let plan = Plan { warm_up: SETTLE, length: FOR_EVER, seed: 1, spin: false };
        let flood = std::thread::Builder::new()
            .name("flood".to_owned())
            .spawn(move || run_until(&mut client, &[flood()], &plan, &flag))?;
        Ok(Self { readers, stop, flood: Some(flood) })
    }

    /// Ends both. Bytes per second of the other VM since the load has settled.
    fn stop(mut self, vm: &mut QemuGuest) -> anyhow::Result<f64> {
        let got = self.end()?;
        if let Some(bad) = got.iter().find(|g| g.errors > 0) {
            bail!("{} of the other VM's requests were refused; a run with errors says nothing", bad.errors);
        }
        let agent = vm.agent()?;
        agent.terminate(self.readers, SLACK)?;
        Ok(got.iter().map(|g| g.rate * f64::from(FLOOD_BLOCK)).sum())
    }

    fn end(&mut self) -> anyhow::Result<Vec<StreamResult>> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.flood.take() else { return Ok(Vec::new()) };
        Ok(thread.join().map_err(|_| anyhow::anyhow!("the other VM's load panicked"))??)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // The guest's part ends with the guest.
        let _ = self.end();
    }
}
