//! The measurements, on a real service and real QEMU processes without a guest.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rtvirtio_apply::OnConflict;
use rtvirtio_daemon::api::Client;
use rtvirtio_daemon::{Snapshot, VmState, socket};
use rtvirtio_kernel::sched::{self, Policy};
use rtvirtio_kernel::{ProcessId, Root};
use rtvirtio_stats::Random;
use rtvirtio_testbed::LabHost;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Qmp, Role, VmHandle};
use rtvirtio_workflow::scopes::Scopes;
use rtvirtio_workflow::{Dirs, Progress, generated};
use rustix::process::{Pid, Signal};
use serde_json::json;

use super::month::simulate;
use super::plans::{self, Pattern};
use super::{DaemonData, Kills, observe};
use crate::experiment::host_facts;
use crate::planning::flash_twin;
use crate::saved::Saved as _;

/// Longest wait for a condition.
const CONDITION_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of polls for a condition: the resolution of the times.
const LOOK: Duration = Duration::from_millis(1);
/// VMs of the measurement at rest.
pub const IDLE_VMS: usize = 16;
/// Windows of the measurement at rest.
const IDLE_WINDOWS: usize = 3;
/// Months that are simulated, each with a seed of its own.
const MONTHS: u64 = 3;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// Program of the service.
    pub program: PathBuf,
    /// I/O threads to add.
    pub threads: usize,
    /// Restarts of a VM.
    pub restarts: usize,
    /// Times that the service is killed.
    pub kills: usize,
    /// Length of each window at rest.
    pub idle: Duration,
    /// Pairs of windows with and without observation.
    pub pairs: usize,
    /// Length of each of these windows.
    pub window: Duration,
    /// Days of a simulated month.
    pub days: u64,
    /// Seed of the random moments and of the months.
    pub seed: u64,
}

/// A service with directories of its own. On drop it is killed and all settings are restored.
pub(super) struct TestService {
    dir: tempfile::TempDir,
    dirs: Dirs,
    program: PathBuf,
    service: Option<Child>,
}

impl Drop for TestService {
    fn drop(&mut self) {
        self.kill();
        if let Ok(scopes) = Scopes::lock(&self.dirs) {
            let _ = scopes.put_all_back(OnConflict::Force);
        }
    }
}

impl TestService {
    pub fn new(program: &Path) -> anyhow::Result<Self> {
        // Short, because sockets below it have to fit into 107 bytes (unix(7)).
        let dir = tempfile::Builder::new().prefix(&ProcessId::prefix("daemon")).tempdir_in("/tmp")?;
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        fs::create_dir_all(dir.path().join("contracts.d"))?;
        Ok(Self { dir, dirs, program: program.to_owned(), service: None })
    }

    /// Directory of the service: `rtvirtiod.toml`, and `contracts.d` below it.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn dirs(&self) -> &Dirs {
        &self.dirs
    }

    pub fn start(&mut self) -> anyhow::Result<()> {
        let child = Command::new(&self.program)
            .arg("--config")
            .arg(self.dir.path().join("rtvirtiod.toml"))
            .arg("--contracts")
            .arg(self.dir.path().join("contracts.d"))
            .env("RTVIRTIO_RUN_DIR", &self.dirs.run)
            .env("RTVIRTIO_STATE_DIR", &self.dirs.state)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{}: build it first", self.program.display()))?;
        self.service = Some(child);
        wait("the service", || Ok(self.status().is_ok()))
    }

    /// Process id, while the process runs.
    pub fn pid(&self) -> Option<u32> {
        self.service.as_ref().map(Child::id)
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.service.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Ends the service with SIGTERM; returns the time that this takes.
    pub fn terminate(&mut self) -> anyhow::Result<Duration> {
        let (begin, child) = (Instant::now(), self.service.as_mut().context("the service")?);
        rustix::process::kill_process(Pid::from_child(child), Signal::TERM)?;
        wait("the end of the service", || Ok(child.try_wait()?.is_some()))?;
        self.service = None;
        Ok(begin.elapsed())
    }

    pub fn status(&self) -> anyhow::Result<Snapshot> {
        Ok(Client::new(socket(&self.dirs.run)).get("/v1/status")?)
    }

    pub fn state(&self, vm: &str) -> Option<VmState> {
        let status = self.status().ok()?;
        status.vms.iter().find(|v| v.name == vm).map(|v| v.state)
    }

    fn file(&self, vm: &str) -> PathBuf {
        self.dir.path().join("contracts.d").join(format!("{vm}.toml"))
    }

    fn contract(&self, vm: &BareQemu, budget_ms: u64) -> anyhow::Result<()> {
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\npriorities = \"rt\"\n\
             cpu = {{ budget = \"{budget_ms}ms\", period = \"20ms\" }}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            vm.name,
            vm.qmp.display()
        );
        // Renamed into place: a half-written file would be an error of its own.
        let new = self.dir.path().join("new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, self.file(&vm.name))?)
    }
}

/// QEMU with a stopped machine and two monitors: one for the service, one for us. Killed when it is
/// dropped.
struct BareQemu {
    name: String,
    qmp: PathBuf,
    ours: PathBuf,
    child: Child,
}

impl Drop for BareQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl BareQemu {
    fn start(dir: &Path, name: &str) -> anyhow::Result<Self> {
        let (qmp, ours) = (dir.join(format!("{name}.qmp")), dir.join(format!("{name}.ours")));
        let child = Self::spawn(name, &qmp, &ours)?;
        let vm = Self { name: name.to_owned(), qmp, ours, child };
        vm.ready()?;
        Ok(vm)
    }

    fn spawn(name: &str, qmp: &Path, ours: &Path) -> anyhow::Result<Child> {
        for socket in [qmp, ours] {
            let _ = fs::remove_file(socket);
        }
        Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-accel", "tcg"])
            .args(["-S", "-m", "32", "-name", &format!("{name},debug-threads=on")])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", ours.display())])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("qemu-system-x86_64")
    }

    fn monitor(&self) -> anyhow::Result<Qmp> {
        Ok(Qmp::connect(&self.ours, CONDITION_TIMEOUT)?)
    }

    fn ready(&self) -> anyhow::Result<()> {
        wait("QEMU's monitor", || Ok(self.monitor().is_ok()))
    }

    /// Kills QEMU with SIGKILL, and starts it again at the same sockets.
    fn restart(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = Self::spawn(&self.name, &self.qmp, &self.ours)?;
        self.ready()
    }

    /// Scheduling and cgroups of each thread, and the group of its contract.
    fn snapshot(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let mut all = BTreeMap::new();
        for t in discover(&Root::default(), &VmHandle::of_pid(self.child.id()))? {
            let cgroups: Vec<String> =
                t.cgroups.iter().map(|m| format!("{}:{}", m.controllers, m.path.display())).collect();
            let reset = t.reset_on_fork.unwrap_or_default();
            all.insert(
                format!("thread {} of {}", t.tid, t.start),
                format!("{} nice {} reset {reset} {} {cgroups:?}", t.scheduling(), t.nice, t.affinity),
            );
        }
        Ok(all)
    }

    fn vcpu_is_real_time(&self) -> bool {
        let threads = discover(&Root::default(), &VmHandle::of_pid(self.child.id())).unwrap_or_default();
        threads.iter().any(|t| matches!(t.role, Role::Vcpu(_)) && t.policy == Some(Policy::Fifo))
    }
}

pub(super) fn wait(what: &str, mut condition: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !condition()? {
        if begin.elapsed() > CONDITION_TIMEOUT {
            bail!("{what} did not come within {CONDITION_TIMEOUT:?}");
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Measures reactions, idle load, kills, months and the cost of observation.
///
/// # Errors
/// A service or a QEMU that does not start, or does not act, and cancellation.
pub fn measure(
    options: &DaemonOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<DaemonData> {
    let mut random = Random::new(options.seed);
    progress.step("a month of a simulated host, in virtual time");
    let months = (0..MONTHS).map(|i| simulate(options.seed + i, options.days)).collect();
    progress.step("months of plans under each pattern of load, in virtual time");
    let profile = flash_twin()?;
    let mut plans = Vec::new();
    for pattern in Pattern::ALL {
        for i in 0..MONTHS {
            progress.check_cancelled()?;
            // Every second operator accepts all pending plans.
            let accepts = i % 2 == 1;
            plans.push(plans::simulate(pattern, options.seed + i, options.days, accepts, &profile)?);
        }
    }
    let thread_ms = threads(options, &mut random, progress)?;
    let restart_s = restarts(options, progress)?;
    let kills = kills(options, &mut random, progress)?;
    let idle = idle(options, progress)?;
    let observed = observe::measure(&options.program, options.pairs, options.window, labs, progress)?;
    Ok(DaemonData {
        schema: DaemonData::SCHEMA.to_owned(),
        host: host_facts(("qemu", "tcg"), "no device"),
        command: format!(
            "rtvirtio-bench daemon --threads {} --restarts {} --kills {} --idle {}s --pairs {} --window {}s --days {} --seed {}",
            options.threads,
            options.restarts,
            options.kills,
            options.idle.as_secs(),
            options.pairs,
            options.window.as_secs(),
            options.days,
            options.seed
        ),
        generated: generated(),
        thread_ms,
        restart_s,
        idle,
        idle_seconds: options.idle.as_secs_f64(),
        observed,
        observed_by: None,
        kills,
        months,
        plans,
    })
}

/// Measures the cost of observation anew; the rest of the result stays.
///
/// # Errors
/// As [`observe::measure`].
pub fn measure_observation(
    data: &mut DaemonData,
    options: &DaemonOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    data.observed = observe::measure(&options.program, options.pairs, options.window, labs, progress)?;
    data.observed_by = Some(format!(
        "rtvirtio-bench daemon --only-observation --pairs {} --window {}s, {}",
        options.pairs,
        options.window.as_secs(),
        generated()
    ));
    Ok(())
}

/// From the command that adds an I/O thread to the thread's priority, in ms.
fn threads(
    options: &DaemonOptions,
    random: &mut Random,
    progress: &dyn Progress,
) -> anyhow::Result<Vec<f64>> {
    progress.step(&format!("{} threads that come", options.threads));
    let mut rig = TestService::new(&options.program)?;
    let vm = BareQemu::start(rig.dir.path(), "daemon-threads")?;
    rig.contract(&vm, 4)?;
    rig.start()?;
    wait("the contract", || Ok(rig.state(&vm.name) == Some(VmState::InForce)))?;
    let mut qmp = vm.monitor()?;
    let mut times = Vec::new();
    for i in 0..options.threads {
        progress.check_cancelled()?;
        // At any moment of a scan.
        std::thread::sleep(Duration::from_secs_f64(0.1 + 0.4 * random.unit()));
        let id = format!("added{i}");
        let begin = Instant::now();
        qmp.execute("object-add", Some(json!({ "qom-type": "iothread", "id": id })))?;
        let all = qmp.query_iothreads()?;
        let thread = all.iter().find(|t| t.id == id).context("the added thread")?.thread_id.unsigned_abs();
        wait("the thread's priority", || Ok(sched::get(thread)?.policy == Policy::Fifo))?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        qmp.execute("object-del", Some(json!({ "id": id })))?;
    }
    Ok(times)
}

/// From the first answer of a restarted QEMU's monitor to the contract of its vCPU, in s.
fn restarts(options: &DaemonOptions, progress: &dyn Progress) -> anyhow::Result<Vec<f64>> {
    progress.step(&format!("{} restarts of a VM", options.restarts));
    let mut rig = TestService::new(&options.program)?;
    let mut vm = BareQemu::start(rig.dir.path(), "daemon-restart")?;
    rig.contract(&vm, 4)?;
    rig.start()?;
    wait("the contract", || Ok(rig.state(&vm.name) == Some(VmState::InForce)))?;
    let mut times = Vec::new();
    for _ in 0..options.restarts {
        progress.check_cancelled()?;
        vm.restart()?;
        let begin = Instant::now();
        wait("the contract of the new start", || Ok(vm.vcpu_is_real_time()))?;
        times.push(begin.elapsed().as_secs_f64());
        wait("its journal", || Ok(rig.state(&vm.name) == Some(VmState::InForce)))?;
    }
    Ok(times)
}

/// Kills the service at random moments while it puts contracts in force, changes them and reverts
/// them. Started again and asked to revert all, it has to leave no difference.
fn kills(options: &DaemonOptions, random: &mut Random, progress: &dyn Progress) -> anyhow::Result<Kills> {
    progress.step(&format!("the service is killed {} times", options.kills));
    let mut rig = TestService::new(&options.program)?;
    let vm = BareQemu::start(rig.dir.path(), "daemon-kills")?;
    let before = vm.snapshot()?;
    let mut kills = Kills::default();
    rig.start()?;
    for i in 0..options.kills {
        progress.check_cancelled()?;
        match i % 3 {
            0 => rig.contract(&vm, 4)?,
            1 => rig.contract(&vm, 5)?,
            _ => fs::remove_file(rig.file(&vm.name))?,
        }
        // Most steps fall within one scan; some kills come before and after.
        std::thread::sleep(Duration::from_secs_f64(0.3 * random.unit()));
        let unsettled = rig.state(&vm.name) != Some(VmState::InForce);
        rig.kill();
        kills.n += 1;
        kills.unsettled += usize::from(unsettled);
        if i % 3 == 1 && random.unit() < 0.5 {
            // Not through the service: the journals alone restore the state.
            Scopes::lock(&rig.dirs)?.put_all_back(OnConflict::Report)?;
            compare(&before, &vm, &rig, i, &mut kills)?;
        }
        rig.start()?;
        let gone = i % 3 == 2;
        wait("the service to settle", || {
            // A service that has just started knows no contract yet: its journals say more.
            Ok(match gone {
                true => rtvirtio_workflow::scope_files::vms(&rig.dirs)?.is_empty(),
                false => rig.state(&vm.name) == Some(VmState::InForce),
            })
        })?;
        if gone {
            compare(&before, &vm, &rig, i, &mut kills)?;
        }
    }
    if rig.file(&vm.name).exists() {
        fs::remove_file(rig.file(&vm.name))?;
        wait("the end of the contract", || Ok(rtvirtio_workflow::scope_files::vms(&rig.dirs)?.is_empty()))?;
    }
    compare(&before, &vm, &rig, options.kills, &mut kills)?;
    Ok(kills)
}

fn compare(
    before: &BTreeMap<String, String>,
    vm: &BareQemu,
    rig: &TestService,
    kill: usize,
    kills: &mut Kills,
) -> anyhow::Result<()> {
    let after = vm.snapshot()?;
    for (thread, old) in before {
        // A thread that has ended took its settings along.
        if let Some(new) = after.get(thread).filter(|new| *new != old) {
            kills.differences.push(format!("after kill {kill}: {thread}: {old} -> {new}"));
        }
    }
    let group = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{}", vm.name));
    if group.exists() {
        kills.differences.push(format!("after kill {kill}: {} is left", group.display()));
    }
    let left = rtvirtio_workflow::scope_files::vms(&rig.dirs)?;
    kills.differences.extend(left.iter().map(|vm| format!("after kill {kill}: a journal of {vm} is left")));
    kills.compared += 1;
    Ok(())
}

/// Share of one CPU that the service uses while nothing happens.
fn idle(options: &DaemonOptions, progress: &dyn Progress) -> anyhow::Result<Vec<f64>> {
    progress.step(&format!("{IDLE_VMS} VMs at rest"));
    let mut rig = TestService::new(&options.program)?;
    let mut vms = Vec::new();
    for i in 0..IDLE_VMS {
        let vm = BareQemu::start(rig.dir.path(), &format!("daemon-idle{i}"))?;
        rig.contract(&vm, 1)?;
        vms.push(vm);
    }
    rig.start()?;
    wait("all contracts", || {
        let status = rig.status()?;
        let in_force = status.vms.iter().filter(|vm| vm.state == VmState::InForce).count();
        Ok(in_force == IDLE_VMS)
    })?;
    // The first checks of new threads are over, and the second observation.
    std::thread::sleep(Duration::from_secs(15));
    let pid = rig.service.as_ref().context("the service")?.id();
    let mut shares = Vec::new();
    for _ in 0..IDLE_WINDOWS {
        progress.check_cancelled()?;
        let (begin, used) = (Instant::now(), cpu_ticks(pid)?);
        progress.pause(options.idle)?;
        let ticks = cpu_ticks(pid)?.saturating_sub(used);
        shares.push(ticks as f64 / 100.0 / begin.elapsed().as_secs_f64());
    }
    Ok(shares)
}

/// CPU time of a process, its threads and the children that it has waited for, in 1/100 s
/// (proc_pid_stat(5), fields 14 to 17).
pub(super) fn cpu_ticks(pid: u32) -> anyhow::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = text.rsplit_once(')').context("a process's stat")?;
    let times = fields.split_whitespace().skip(11).take(4);
    times.map(|n| n.parse::<u64>().context("a time")).sum()
}
