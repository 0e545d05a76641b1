//! Contracts of a running guest, applied and reverted by a child process that is killed (`kill -9`)
//! before and after every single change.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

use super::Kills;
use anyhow::{Context, bail};
use clap::ValueEnum;
use rtvirtio_apply::points::{CountedSteps, InterceptedHost, Points, kill_self};
use rtvirtio_apply::{JOURNAL_FILE, Machine, NoGuests, OnConflict, Session};
use rtvirtio_cpu::{Ask, Contract, Level, Order, choose, group_name, probe, settings};
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::discover;

use rtvirtio_workflow::scoped_contracts::release;
use rtvirtio_workflow::{Progress, generated};

/// Budget and period of the applied contract.
const CONTRACT: (Nanos, Nanos) = (Nanos::from_millis(20), Nanos::from_millis(100));

/// Actions of the child process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KillAction {
    /// Applies the contract of the run.
    Apply,
    /// Reverts the applied contract.
    Revert,
}

impl KillAction {
    /// Word on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::Revert => "revert",
        }
    }
}

/// Order of the guest's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KillOrder {
    /// The order of a contract.
    Contract,
    /// The RT hypervisor paper's priorities.
    Rt,
}

impl KillOrder {
    /// Word on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Contract => "contract",
            Self::Rt => "rt",
        }
    }
}

/// Parameters of one run of the child process.
#[derive(Clone, Copy, Debug)]
pub struct KillAt<'a> {
    /// Whether to apply or to revert.
    pub action: KillAction,
    /// Order of the guest's threads.
    pub order: KillOrder,
    /// Point at which the child kills itself; 0 for none.
    pub at: u64,
    /// Name of the guest.
    pub vm: &'a str,
    /// Process id of the guest.
    pub pid: u32,
    /// Directory of the journal.
    pub state: &'a Path,
}

/// Makes the command of a child process that calls [`run_child`].
pub type KillCommand = dyn Fn(&KillAt<'_>) -> std::io::Result<Command>;

/// The child process: applies or reverts, and kills itself at a point.
///
/// # Errors
/// When it cannot apply or revert, or leaves a setting.
pub fn run_child(run: &KillAt<'_>) -> anyhow::Result<()> {
    let root = Root::default();
    let points = Points::new(run.at, kill_self);
    let host = InterceptedHost(&root, points.clone());
    let machine = Machine::with_host(&root, &host, &NoGuests);
    let mut observer = CountedSteps(points);
    let session = Session::open(run.state)?;
    if run.action == KillAction::Revert {
        let reverted = session.revert(OnConflict::Report, &machine, &mut observer)?;
        let incomplete = reverted.filter(|r| !r.done);
        return incomplete.map_or(Ok(()), |r| bail!("{}", r.summary()));
    }
    let order = match run.order {
        KillOrder::Contract => Order::Contract,
        KillOrder::Rt => Order::Rt,
    };
    let probe = probe(&root)?;
    let choice = choose(&probe, None, true).context("this kernel holds no real-time threads to a budget")?;
    let threads = discover(&root, &VmHandle::of_pid(run.pid))?;
    let contract = Contract::new(CONTRACT.0, CONTRACT.1).context("the contract")?;
    let ask = Ask { vm: run.vm, threads: &threads, contract, order, level: Level::ALONE, used: &[] };
    session.apply(&settings(&root, &probe, choice.backend, &ask)?.writes, &machine, &mut observer)?;
    Ok(())
}

/// A guest whose contracts a killed child applies and reverts.
struct KilledContracts<'a> {
    kill_command: &'a KillCommand,
    vm: &'a str,
    pid: u32,
    state: &'a Path,
    order: KillOrder,
}

/// Kills `apply`, then `revert`, at every point, and reverts after each. The guest's threads must
/// not change meanwhile.
pub fn sweep(
    kill_command: &KillCommand,
    vm: &str,
    pid: u32,
    dir: &Path,
    progress: &dyn Progress,
) -> anyhow::Result<Kills> {
    let mut kills = Kills { generated: generated(), apply: 0, revert: 0, differences: Vec::new() };
    progress.step("killing apply and revert of a contract at every change");
    for order in [KillOrder::Contract, KillOrder::Rt] {
        let state = dir.join("kills");
        let child = KilledContracts { kill_command, vm, pid, state: &state, order };
        let before = child.snapshot()?;
        let mut check = |what: String| -> anyhow::Result<()> {
            release(&Session::open(&state)?)?;
            let after = child.snapshot()?;
            kills
                .differences
                .extend(differences(&before, &after).into_iter().map(|d| format!("{what}: {d}")));
            if state.join(JOURNAL_FILE).exists() {
                kills.differences.push(format!("{what}: a journal is left"));
            }
            Ok(())
        };
        let (mut apply, mut revert) = (0, 0);
        while child.killed(KillAction::Apply, apply + 1)? {
            progress.check_cancelled()?;
            apply += 1;
            check(format!("apply killed at point {apply}"))?;
        }
        // The contract is in force now.
        if differences(&before, &child.snapshot()?).is_empty() {
            bail!("the contract changed nothing");
        }
        while child.killed(KillAction::Revert, revert + 1)? {
            progress.check_cancelled()?;
            revert += 1;
            check(format!("revert killed at point {revert}"))?;
            child.killed(KillAction::Apply, 0)?;
        }
        check("reverted".to_owned())?;
        kills.apply += apply as usize;
        kills.revert += revert as usize;
    }
    Ok(kills)
}

impl KilledContracts<'_> {
    /// True when the child was killed at that point, false when it ended before; 0 is no point.
    fn killed(&self, action: KillAction, at: u64) -> anyhow::Result<bool> {
        let (order, vm, pid, state) = (self.order, self.vm, self.pid, self.state);
        let out = (self.kill_command)(&KillAt { action, order, at, vm, pid, state })?.output()?;
        match out.status.signal() {
            Some(9) => Ok(true),
            None if out.status.success() => Ok(false),
            _ => bail!("{}: {}", action.name(), String::from_utf8_lossy(&out.stderr).trim()),
        }
    }

    /// Scheduling, affinity and cgroups of each thread, and the cgroups of the guest.
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

/// Differences between two snapshots. A thread in only one of them has started or ended meanwhile.
fn differences(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<String> {
    let changed = before.iter().filter_map(|(what, old)| {
        let new = after.get(what)?;
        (new != old).then(|| format!("{what}: {old} -> {new}"))
    });
    let groups = after.keys().filter(|k| !k.starts_with("thread ") && !before.contains_key(*k));
    changed.chain(groups.map(|group| format!("{group} is left"))).collect()
}
