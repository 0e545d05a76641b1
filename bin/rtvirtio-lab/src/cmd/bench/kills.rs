//! Contracts of a guest that runs, applied and put back by a process that is killed (`kill -9`) before and after every single change.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use rtvirtio_apply::points::{CountedHost, CountedSteps, Points, kill_self};
use rtvirtio_apply::{JOURNAL_FILE, Machine, NoGuests, OnConflict, Session};
use rtvirtio_bench::reservation::Kills;
use rtvirtio_cpu::{Ask, Contract, Level, Order, choose, group_name, probe, settings};
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::discover;

use crate::args::{BenchKillAtArgs, KillAction, KillOrder};
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::held::release;

/// Budget and period of what is applied.
const CONTRACT: (Nanos, Nanos) = (Nanos::from_millis(20), Nanos::from_millis(100));

/// The process that is killed: does what it is told and ends itself at a point.
pub fn child(args: &BenchKillAtArgs) -> anyhow::Result<ExitCode> {
    let root = Root::default();
    let points = Points::new(args.at, kill_self);
    let host = CountedHost(&root, points.clone());
    let machine = Machine::with_host(&root, &host, &NoGuests);
    let mut observer = CountedSteps(points);
    let session = Session::open(&args.state)?;
    if args.action == KillAction::Revert {
        let reverted = session.revert(OnConflict::Report, &machine, &mut observer)?;
        let left = reverted.filter(|r| !r.done);
        return left.map_or(Ok(ExitCode::SUCCESS), |r| bail!("{}", r.summary()));
    }
    let order = match args.order {
        KillOrder::Contract => Order::Contract,
        KillOrder::Rt => Order::Rt,
    };
    let probe = probe(&root)?;
    let found = choose(&probe, None, true).context("this kernel holds no real-time threads to a budget")?;
    let threads = discover(&root, &VmHandle::of_pid(args.pid))?;
    let contract = Contract::new(CONTRACT.0, CONTRACT.1).context("the contract")?;
    let ask = Ask { vm: &args.vm, threads: &threads, contract, order, level: Level::ALONE, used: &[] };
    session.apply(&settings(&root, &probe, found.backend, &ask)?.writes, &machine, &mut observer)?;
    Ok(ExitCode::SUCCESS)
}

/// A guest whose contracts are killed.
struct Victim<'a> {
    vm: &'a str,
    pid: u32,
    state: &'a Path,
    order: KillOrder,
}

/// Kills `apply`, then `revert`, at every point, and puts back after each. The guest must be one that stays as it is meanwhile.
pub fn sweep(vm: &str, pid: u32, dir: &Path, ui: &Ui) -> anyhow::Result<Kills> {
    let mut kills = Kills { generated: generated(), apply: 0, revert: 0, differences: Vec::new() };
    ui.step("killing apply and revert of a contract at every change");
    for order in [KillOrder::Contract, KillOrder::Rt] {
        let state = dir.join("kills");
        let victim = Victim { vm, pid, state: &state, order };
        let before = victim.snapshot()?;
        let mut check = |what: String| -> anyhow::Result<()> {
            release(&Session::open(&state)?)?;
            let after = victim.snapshot()?;
            kills
                .differences
                .extend(differences(&before, &after).into_iter().map(|d| format!("{what}: {d}")));
            if state.join(JOURNAL_FILE).exists() {
                kills.differences.push(format!("{what}: a journal is left"));
            }
            Ok(())
        };
        let (mut apply, mut revert) = (0, 0);
        while victim.killed(KillAction::Apply, apply + 1)? {
            ui.check_cancelled()?;
            apply += 1;
            check(format!("apply killed at point {apply}"))?;
        }
        // It is in force now.
        if differences(&before, &victim.snapshot()?).is_empty() {
            bail!("the contract changed nothing");
        }
        while victim.killed(KillAction::Revert, revert + 1)? {
            ui.check_cancelled()?;
            revert += 1;
            check(format!("revert killed at point {revert}"))?;
            victim.killed(KillAction::Apply, 0)?;
        }
        check("reverted".to_owned())?;
        kills.apply += apply as usize;
        kills.revert += revert as usize;
    }
    Ok(kills)
}

impl Victim<'_> {
    /// True when the child was killed at that point, false when it was done before; 0 is no point.
    fn killed(&self, action: KillAction, at: u64) -> anyhow::Result<bool> {
        let out = Command::new(std::env::current_exe()?)
            .args(["bench", "kill-at", action.name(), self.order.name(), "--at", &at.to_string()])
            .args(["--vm", self.vm, "--pid", &self.pid.to_string(), "--state"])
            .arg(self.state)
            .output()?;
        match out.status.signal() {
            Some(9) => Ok(true),
            None if out.status.success() => Ok(false),
            _ => bail!("{}: {}", action.name(), String::from_utf8_lossy(&out.stderr).trim()),
        }
    }

    /// Scheduling, affinity and cgroups of each thread, and the groups that are there.
    fn snapshot(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let root = Root::default();
        let mut all = BTreeMap::new();
        for t in discover(&root, &VmHandle::of_pid(self.pid))? {
            let cgroups: Vec<String> =
                t.cgroups.iter().map(|m| format!("{}:{}", m.controllers, m.path.display())).collect();
            let reset = t.reset_on_fork.unwrap_or_default();
            let text = format!("{} nice {} reset {reset} {} {cgroups:?}", t.scheduling(), t.nice, t.affinity);
            all.insert(format!("thread {} ({}) of {}", t.tid, t.role, t.start), text);
        }
        let cgroups = Cgroups::detect_cpu(&root)?;
        for dir in cgroups.all_dirs(&root)? {
            if dir.ends_with(group_name(self.vm)) {
                all.insert(dir.display().to_string(), "present".to_owned());
            }
        }
        Ok(all)
    }
}

/// What differs between two snapshots. A thread that is in one of them only has begun or ended meanwhile.
fn differences(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<String> {
    let changed = before.iter().filter_map(|(what, old)| {
        let new = after.get(what)?;
        (new != old).then(|| format!("{what}: {old} -> {new}"))
    });
    let groups = after.keys().filter(|k| !k.starts_with("thread ") && !before.contains_key(*k));
    changed.chain(groups.map(|group| format!("{group} is left"))).collect()
}
