//! `rtvirtio keep`: contracts in force hold for threads that appear later too.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use rtvirtio_apply::{Amended, ApplyError, JOURNAL_FILE, Machine, NoGuests, Session, Silent};
use rtvirtio_cpu::{Ask, Backend, Probe, domain_of, has_part, probe, resplit, take_in};
use rtvirtio_kernel::Root;
use rtvirtio_spec::Spec;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, Thread, VmHandle, Watcher};
use serde::Serialize;

use super::{is_there, need_root};
use crate::args::{Global, KeepArgs};
use crate::cpu_plan::{self, InForce};
use crate::site;
use crate::ui::Ui;
use crate::vm_threads;

/// Looking more often would itself be a load.
const LEAST: Duration = Duration::from_millis(10);
/// QEMU names a thread, and tells its monitor of a vCPU, some time after it was started: one whose role is not known is looked at so often again.
const LOOKS: u32 = 10;

/// How long use is seen before the budget is split by it.
const SEEN: Duration = Duration::from_secs(1);

/// A VM whose contract is kept.
struct Kept {
    of: InForce,
    handle: VmHandle,
    watcher: Watcher,
    /// Threads that were not taken in yet, by number and start, and how often they were looked at.
    pending: BTreeMap<(u32, u64), u32>,
    /// Threads with their CPU time at the last split, or at the begin.
    split: Vec<Thread>,
    split_at: Instant,
    split_every: Duration,
}

/// One line of output.
#[derive(Serialize)]
struct Event<'a> {
    /// `set`, `left` to somebody else who has changed it, or `failed`.
    event: &'static str,
    vm: &'a str,
    knob: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    old: Option<&'a str>,
    /// The new value, what somebody else has set, or why it failed.
    what: &'a str,
}

/// `rtvirtio keep`.
pub fn run(args: &KeepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("keep")?;
    let root = Root::default();
    let spec = site::load_spec(&args.spec)?;
    let by = match applied_by(global)? {
        Some(by) if is_there(&global.state_dir.join(cpu_plan::IN_FORCE_FILE))? => by,
        _ => bail!("no CPU contract is in force: `rtvirtio apply {}` first", args.spec.display()),
    };
    let probe = probe(&root)?;
    let every = Duration::from_nanos(args.every.0).max(LEAST);
    let split_every = Duration::from_nanos(args.split_every.0).max(every);
    let mut vms = Vec::new();
    for of in cpu_plan::in_force(&global.state_dir)? {
        if !spec.vms.iter().any(|vm| vm.name == of.vm) {
            bail!("the contracts in force are of another spec: it has a VM `{}`", of.vm);
        }
        // The others' contracts hold without it.
        match vm_threads::one_of_spec(&spec, &of.vm, global, ui) {
            Ok(vm) => vms.push(Kept::start(of, vm.handle, &root, split_every)),
            Err(e) => ui.warn(&format!("{} is not kept: {e:#}", of.vm)),
        }
    }
    if vms.is_empty() {
        bail!(
            "no VM with a CPU contract is there: start it, revert, and `rtvirtio apply {}`",
            args.spec.display()
        );
    }
    let mut next = Instant::now();
    while !ui.is_cancelled() {
        if !is_there(&global.state_dir.join(JOURNAL_FILE))? {
            ui.step("the contracts were put back: nothing is left to be kept");
            return Ok(ExitCode::SUCCESS);
        }
        for vm in &mut vms {
            vm.look(&root, &probe, by, &spec, global, ui)?;
        }
        vms.retain(|vm| vm.watcher.threads().next().is_some());
        if vms.is_empty() {
            ui.step("no thread is left: the VMs have ended");
            return Ok(ExitCode::SUCCESS);
        }
        // A look that took longer is not made up for.
        next = (next + every).max(Instant::now());
        // Ctrl-C ends it, and is no error: what is in force stays.
        let _ = ui.pause(next.saturating_duration_since(Instant::now()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Who applied what is in force.
fn applied_by(global: &Global) -> anyhow::Result<Option<u32>> {
    if !is_there(&global.state_dir)? {
        return Ok(None);
    }
    Ok(Session::open(&global.state_dir)?.applied_by()?)
}

impl Kept {
    /// Begins to watch. CPU time counts from here.
    fn start(of: InForce, handle: VmHandle, root: &Root, split_every: Duration) -> Self {
        Self {
            of,
            watcher: Watcher::new(handle.clone()),
            pending: BTreeMap::new(),
            split: discover(root, &handle).unwrap_or_default(),
            split_at: Instant::now(),
            split_every,
            handle,
        }
    }

    /// Whether the budget is to be split now: at the set times, and for a thread that is to have a part of it and has none, as soon as it is seen what the
    /// others use.
    fn splits(&self, threads: &[Thread], domain: &BTreeSet<u32>, now: Instant) -> bool {
        let waits = |t: &Thread| self.pending.contains_key(&(t.tid, t.start)) && self.lacks_part(t, domain);
        self.is_due(now) || (now >= self.split_at + SEEN && threads.iter().any(waits))
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.split_at + self.split_every
    }

    fn lacks_part(&self, t: &Thread, domain: &BTreeSet<u32>) -> bool {
        self.of.backend == Backend::Deadline && t.reservation.is_none() && has_part(t, self.of.order, domain)
    }

    /// Looks once, and does what is to be done.
    fn look(
        &mut self,
        root: &Root,
        probe: &Probe,
        by: u32,
        spec: &Spec,
        global: &Global,
        ui: &Ui,
    ) -> anyhow::Result<()> {
        let now = Instant::now();
        let changes = self.watcher.poll(root, now)?;
        for new in &changes.appeared {
            self.pending.insert((new.thread.tid, new.thread.start), 0);
        }
        let is_split = self.of.backend == Backend::Deadline;
        if self.pending.is_empty() && !(is_split && self.is_due(now)) {
            return Ok(());
        }
        if !self.pending.is_empty() {
            // A monitor that is taken, or a VM that is ending, only costs the certainty of the roles.
            if let Ok(vm) = vm_threads::one_of_spec(spec, &self.of.vm, global, ui) {
                self.handle = vm.handle;
            }
        }
        let threads = match discover(root, &self.handle) {
            Ok(threads) => threads,
            Err(e) if e.is_gone() => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let domain = if is_split { domain_of(root, &threads)? } else { BTreeSet::new() };
        if is_split && !self.splits(&threads, &domain, now) {
            let wait = |t: &Thread| self.lacks_part(t, &domain);
            self.pending = still_pending(&self.pending, &threads, wait);
            return Ok(());
        }
        let new: Vec<Thread> =
            threads.iter().filter(|t| self.pending.contains_key(&(t.tid, t.start))).cloned().collect();
        let since = |t: &Thread| {
            let old = self.split.iter().find(|o| (o.tid, o.start) == (t.tid, t.start));
            (t.tid, t.cpu_time.saturating_sub(old.map_or(Duration::ZERO, |o| o.cpu_time)))
        };
        let used: Vec<(u32, Duration)> = threads.iter().map(since).collect();
        let ask = Ask {
            vm: &self.of.vm,
            threads: if is_split { &threads } else { &new },
            contract: self.of.contract,
            order: self.of.order,
            level: self.of.level,
            used: &used,
        };
        let settings =
            if is_split { resplit(probe, &domain, &ask) } else { take_in(probe, self.of.backend, &ask) };
        let session = match Session::open(&global.state_dir) {
            Ok(session) => session,
            // Another rtvirtio is at work, perhaps a revert: again at the next look.
            Err(ApplyError::Locked { .. }) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        match session.applied_by()? {
            Some(now) if now == by => {}
            // The loop sees it.
            None => return Ok(()),
            Some(_) => bail!("other contracts have been applied meanwhile: start `rtvirtio keep` again"),
        }
        let amended = session.amend(&settings.writes, &Machine::new(root, &NoGuests), &mut Silent)?;
        drop(session);
        tell(&self.of.vm, &amended, ui)?;
        for note in &settings.notes {
            ui.step(&format!("{}: {note}", self.of.vm));
        }
        self.pending = still_pending(&self.pending, &threads, |_| false);
        if is_split {
            self.split_at = now;
            self.split = threads;
        }
        Ok(())
    }
}

/// New threads that are to be looked at again: those whose role is not known yet, some times, and those that `wait`.
fn still_pending(
    pending: &BTreeMap<(u32, u64), u32>,
    threads: &[Thread],
    wait: impl Fn(&Thread) -> bool,
) -> BTreeMap<(u32, u64), u32> {
    let mut again = BTreeMap::new();
    for t in threads {
        let key = (t.tid, t.start);
        let Some(looks) = pending.get(&key).map(|looks| looks + 1) else { continue };
        if (t.role == Role::Other && looks < LOOKS) || wait(t) {
            again.insert(key, looks);
        }
    }
    again
}

/// One line for each setting.
fn tell(vm: &str, amended: &Amended, ui: &Ui) -> anyhow::Result<()> {
    let set = amended.written.iter().map(|l| ("set", &l.knob, l.old.as_deref(), &l.new));
    let left = amended.left.iter().map(|(knob, found)| ("left", knob, None, found));
    let failed = amended.failed.iter().map(|(knob, why)| ("failed", knob, None, why));
    for warning in &amended.warnings {
        ui.warn(&format!("{vm}: {warning}"));
    }
    let mut out = std::io::stdout().lock();
    for (event, knob, old, what) in set.chain(left).chain(failed) {
        let result = if ui.json {
            let line = serde_json::to_string(&Event { event, vm, knob, old, what })?;
            writeln!(out, "{line}")
        } else {
            let what = rtvirtio_report::terminal(what, false);
            match event {
                "set" => writeln!(out, "{knob}: {} -> {what}", old.unwrap_or("-")),
                "left" => writeln!(out, "{knob}: somebody else has set {what}; left alone"),
                _ => writeln!(out, "{knob}: FAILED: {what}"),
            }
        };
        result.and_then(|()| out.flush())?;
    }
    Ok(())
}
