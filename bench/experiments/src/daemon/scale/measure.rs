//! The measurements, on a real service.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_apply::OnConflict;
use rtvirtio_daemon::VmState;
use rtvirtio_kernel::process;
use rtvirtio_kernel::sched::{self, Attr, Policy};
use rtvirtio_workflow::scopes::Scopes;
use rtvirtio_workflow::{Progress, generated};

use super::{CONTRACTS, IN_ONE_FILE, Large, Round, ScaleData, Start, THREADS};
use crate::daemon::measure::{TestService, wait};
use crate::experiment::host_facts;
use crate::saved::Saved as _;

/// Longest wait for contracts.
const SETTING_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval of polls for the state of all VMs, each of which costs the service time.
const POLL: Duration = Duration::from_millis(50);
/// Stack of a thread that only sleeps.
const STACK: usize = 64 << 10;
/// Name of the thread that is taken for a vCPU, as Cloud Hypervisor has it, and of the others, as
/// QEMU's workers have it.
const VCPU: &str = "vcpu0";
const WORKER: &str = "worker";
/// Changes of the neighbour's setting in a round: a program that changes it again and again is left
/// alone.
const CHANGES: usize = 2;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct ScaleOptions {
    /// Program of the service.
    pub service: PathBuf,
    /// Program and arguments of a process with so many threads as a further argument says, which
    /// calls [`sleep_with`].
    pub sleeper: (PathBuf, String),
    /// Rounds.
    pub repeat: usize,
}

/// Starts threads, prints a line when all have started, and sleeps until the process is killed.
///
/// # Errors
/// A thread that cannot be started.
pub fn sleep_with(threads: usize) -> anyhow::Result<()> {
    for i in 0..threads {
        let name = if i == 0 { VCPU } else { WORKER };
        std::thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK)
            .spawn(|| {
                loop {
                    std::thread::park();
                }
            })
            .with_context(|| format!("thread {i}"))?;
    }
    println!("ready");
    loop {
        std::thread::park();
    }
}

/// A process with a thread of a vCPU's name; killed when this is dropped.
struct ProcessVm {
    name: String,
    child: Child,
}

impl Drop for ProcessVm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl ProcessVm {
    fn contract(&self) -> String {
        format!(
            "[[vm]]\nname = \"{}\"\npid = {}\ncpu = {{ budget = \"1ms\", period = \"1s\" }}\n[[vm.task]]\nname = \"t\"\n\
             op = \"read\"\nblock = \"4KiB\"\n",
            self.name,
            self.child.id()
        )
    }

    fn is_real_time(&self) -> anyhow::Result<bool> {
        Ok(sched::get(self.child.id())?.policy == Policy::Fifo)
    }
}

/// Small VMs: one thread each.
fn small(rig: &TestService, count: usize) -> anyhow::Result<Vec<ProcessVm>> {
    let program = rig.path().join(VCPU);
    if !program.exists() {
        symlink("/bin/sleep", &program)?;
    }
    let mut vms = Vec::new();
    for i in 0..count {
        let child = Command::new(&program).arg("infinity").stdin(Stdio::null()).spawn()?;
        vms.push(ProcessVm { name: format!("scale{i}-{}", std::process::id()), child });
    }
    for vm in &vms {
        // Before that it is still this program.
        wait("the name of a process", || {
            Ok(process::name(&rtvirtio_kernel::Root::default(), vm.child.id())? == VCPU)
        })?;
    }
    Ok(vms)
}

fn large(options: &ScaleOptions) -> anyhow::Result<ProcessVm> {
    let (program, argument) = &options.sleeper;
    let mut child = Command::new(program)
        .args([argument, &THREADS.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| program.display().to_string())?;
    let out = child.stdout.take().context("its output")?;
    let vm = ProcessVm { name: format!("scale-large-{}", std::process::id()), child };
    let mut line = String::new();
    BufReader::new(out).read_line(&mut line)?;
    ensure!(line.trim() == "ready", "the process with {THREADS} threads has ended");
    Ok(vm)
}

const DEVICE: &str = "[device]\npath = \"/dev/sdz\"\n";

/// Waits until all of these are in force; notes failures on the way.
fn in_force(
    rig: &TestService,
    begin: Instant,
    count: usize,
    progress: &dyn Progress,
) -> anyhow::Result<Start> {
    let mut failed = BTreeSet::new();
    loop {
        progress.check_cancelled()?;
        // One that is busy does not answer in time.
        if let Ok(status) = rig.status() {
            let of_failed = status.vms.iter().filter(|vm| vm.state == VmState::Failed);
            failed.extend(of_failed.map(|vm| format!("{}: {}", vm.name, vm.why.clone().unwrap_or_default())));
            failed.extend(status.faults.iter().map(|fault| format!("{}: {}", fault.file, fault.why)));
            if status.vms.iter().filter(|vm| vm.state == VmState::InForce).count() == count {
                let in_force_s = Some(begin.elapsed().as_secs_f64());
                return Ok(Start { in_force_s, failed: failed.into_iter().collect() });
            }
        }
        if begin.elapsed() > SETTING_TIMEOUT {
            return Ok(Start { in_force_s: None, failed: failed.into_iter().collect() });
        }
        std::thread::sleep(POLL);
    }
}

/// Contracts of small VMs that are in place when the service starts.
fn contracts(
    options: &ScaleOptions,
    count: usize,
    one_file: bool,
    progress: &dyn Progress,
) -> anyhow::Result<Start> {
    // What is in force is put back before the VMs end.
    let vms;
    let mut rig = TestService::new(&options.service)?;
    vms = small(&rig, count)?;
    let dir = rig.path().join("contracts.d");
    if one_file {
        let all: String = vms.iter().map(ProcessVm::contract).collect();
        fs::write(dir.join("all.toml"), format!("{DEVICE}{all}"))?;
    } else {
        for vm in &vms {
            fs::write(dir.join(format!("{}.toml", vm.name)), format!("{DEVICE}{}", vm.contract()))?;
        }
    }
    let begin = Instant::now();
    rig.start()?;
    in_force(&rig, begin, count, progress)
}

/// The neighbour's setting is changed while the large VM's threads are taken in; at last SIGTERM
/// comes while they are.
fn threads(options: &ScaleOptions, progress: &dyn Progress) -> anyhow::Result<Large> {
    let vms;
    let mut rig = TestService::new(&options.service)?;
    vms = (small(&rig, 1)?, large(options)?);
    let (neighbour, vm) = (&vms.0[0], &vms.1);
    fs::write(rig.path().join("rtvirtiod.toml"), "compare = \"500ms\"\n")?;
    let file = |of: &ProcessVm| rig.path().join("contracts.d").join(format!("{}.toml", of.name));
    let set = |of: &ProcessVm| fs::write(file(of), format!("{DEVICE}{}", of.contract()));
    let (of_large, of_neighbour) = (file(vm), set(neighbour));
    of_neighbour?;
    rig.start()?;
    wait("the neighbour's contract", || Ok(rig.state(&neighbour.name) == Some(VmState::InForce)))?;
    let mut out = Large::default();
    let text = format!("{DEVICE}{}", vm.contract());
    fs::write(&of_large, &text)?;
    let begin = Instant::now();
    let is_taken_in = || rig.state(&vm.name) == Some(VmState::InForce);
    for _ in 0..CHANGES {
        std::thread::sleep(Duration::from_millis(500));
        if is_taken_in() {
            break;
        }
        sched::set(neighbour.child.id(), &Attr::other(0))?;
        let changed = Instant::now();
        // Its priority may be another by then, next to a second VM.
        wait("the neighbour's setting", || neighbour.is_real_time())?;
        out.restored_s.push(changed.elapsed().as_secs_f64());
    }
    while !is_taken_in() && begin.elapsed() < SETTING_TIMEOUT {
        progress.check_cancelled()?;
        std::thread::sleep(POLL);
    }
    out.in_force_s = is_taken_in().then(|| begin.elapsed().as_secs_f64());
    fs::remove_file(&of_large)?;
    wait("the end of its contract", || Ok(rig.state(&vm.name).is_none()))?;
    fs::write(&of_large, &text)?;
    let journal = rtvirtio_workflow::scope_files::dir(rig.dirs()).join(format!("vm-{}", vm.name));
    wait("its first threads", || Ok(journal.join(rtvirtio_apply::JOURNAL_FILE).exists()))?;
    std::thread::sleep(Duration::from_millis(200));
    out.ended_s = rig.terminate()?.as_secs_f64();
    let begin = Instant::now();
    for (of, reverted) in Scopes::lock(rig.dirs())?.put_all_back(OnConflict::Report)? {
        if !reverted.done {
            out.left.push(format!("{of}: {}", reverted.summary()));
        }
    }
    out.back_s = begin.elapsed().as_secs_f64();
    if neighbour.is_real_time()? {
        out.left.push(format!("the policy of {}", neighbour.name));
    }
    Ok(out)
}

/// Measures all, again and again.
///
/// # Errors
/// A service or a process that does not start, and cancellation.
pub fn measure(options: &ScaleOptions, progress: &dyn Progress) -> anyhow::Result<ScaleData> {
    let mut rounds = Vec::new();
    for i in 1..=options.repeat {
        let mut round = Round::default();
        for count in CONTRACTS {
            progress.step(&format!("round {i}: {count} contracts"));
            round.starts.push(contracts(options, count, false, progress)?);
        }
        progress.step(&format!("round {i}: {IN_ONE_FILE} contracts in one file"));
        round.one_file = contracts(options, IN_ONE_FILE, true, progress)?;
        progress.step(&format!("round {i}: a VM of {THREADS} threads"));
        round.large = threads(options, progress)?;
        rounds.push(round);
    }
    Ok(ScaleData {
        schema: ScaleData::SCHEMA.to_owned(),
        host: host_facts(("none", "none"), "no device"),
        command: format!("rtvirtio-bench daemon-scale --repeat {}", options.repeat),
        generated: generated(),
        rounds,
    })
}
