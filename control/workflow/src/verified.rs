//! Settings of ours that are in force during a verification, and the last verification without any,
//! for comparison.

use std::path::PathBuf;

use rtvirtio_apply::{KnobState, KnobStatus, Machine, StateDir, Status};
use rtvirtio_kernel::Root;
use rtvirtio_measure::{ResultFile, Run, TaskResult};
use rtvirtio_planner::{Plan, scheme_name};
use rtvirtio_spec::Device;
use serde::{Deserialize, Serialize};

use crate::dirs::{Dirs, write_state};
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::files::generated;
use crate::guests::GuestAgents;
use crate::plan_file::HostPlan;
use crate::service_plan::{self, ServicePlan};
use crate::started::{self, StartedVm};
use crate::{domain, in_force, interrupts, scope_files};

/// File of the last verification without settings of ours, in the state directory.
pub const FILE: &str = "as-found.json";
/// Version of the file's form.
const SCHEMA: &str = "rtvirtio.as-found.v1";
/// Settings that a sentence names at most.
const MOST_NAMED: usize = 3;

/// A verification under the settings found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AsFound {
    /// Schema of the file, always `rtvirtio.as-found.v1`.
    pub schema: String,
    /// Time and version of the verification, as text.
    pub generated: String,
    /// Measured values of all tasks.
    pub result: ResultFile,
}

/// The settings of ours that a verification runs under.
#[derive(Debug, Default)]
pub struct ActiveSettings {
    /// Whether there are any: a plan, a CPU contract, or an I/O domain.
    pub any: bool,
    /// The plan, of `rtvirtio apply` or held by the service.
    pub plan: Option<HostPlan>,
    /// Description of the plan that the service holds; `None` for one of `rtvirtio apply`.
    pub held: Option<ServicePlan>,
    /// VMs that `rtvirtio apply` acted on and that have ended since: a later start has none of it.
    pub ended: Vec<StartedVm>,
    /// Sentences on settings that are not as they were applied, or not known to be.
    pub gaps: Vec<String>,
    /// Whether a VM of the plan has ended since, so that it acts in part.
    is_part: bool,
    /// Process that applied what is in force of `rtvirtio apply`.
    applied_by: Option<u32>,
}

impl ActiveSettings {
    /// Finds the settings in force now.
    pub fn find(dirs: &Dirs) -> Result<Self> {
        let own = in_force::plan(&dirs.state)?;
        let ended = started::ended(&dirs.state)?;
        // The service sets none while one of `apply` is in force.
        let held = if own.is_none() { service_plan::find(dirs)? } else { None };
        let is_part = !ended.is_empty() || (held.is_some() && !service_plan::ended(dirs)?.is_empty());
        let plan = if held.is_some() { service_plan::plan(dirs)? } else { own };
        let applied = compared(dirs)?;
        let mut gaps: Vec<String> = applied.iter().flat_map(not_as_applied).collect();
        if held.is_some() {
            match compared(&dirs.of_held_plan()) {
                Ok(status) => gaps.extend(status.iter().flat_map(not_as_applied)),
                Err(e) => gaps.push(format!("whether the held plan is in force is not known: {e:#}")),
            }
        }
        let any = applied.is_some() || scope_files::any_in_force(dirs)? || domain::status(dirs).is_some();
        let applied_by = applied.map(|status| status.pid);
        Ok(Self { any, plan, held, ended, gaps, is_part, applied_by })
    }

    /// Sentence on settings that have changed since they were found, or may have; `None` where they
    /// are the same. A change that was undone since is not seen, nor a contract of one VM of
    /// several.
    #[must_use]
    pub fn changed(&self, dirs: &Dirs) -> Option<String> {
        match Self::find(dirs) {
            Ok(now) if now.is_same(self) => None,
            Ok(now) => Some(format!(
                "the settings were changed during the measurement, so it proves nothing of them: now it is {}",
                scheme_name(&now.scheme())
            )),
            Err(e) => {
                Some(format!("whether the settings were changed during the measurement is not known: {e:#}"))
            }
        }
    }

    fn is_same(&self, before: &Self) -> bool {
        let since = |of: &Self| of.held.as_ref().map(|held| held.since.clone());
        let journals = |of: &Self| (of.any, of.applied_by, since(of));
        let state = |of: &Self| (of.is_part, of.ended.clone(), of.gaps.clone());
        self.plan == before.plan && journals(self) == journals(before) && state(self) == state(before)
    }

    /// The plan of a device that the service holds; else the first of the plan of `rtvirtio apply`,
    /// whose names of devices are those of its spec.
    #[must_use]
    pub fn plan_of(&self, device: &Device) -> Option<&Plan> {
        let plan = self.plan.as_ref()?;
        let key = service_plan::device_key(device);
        let of = match &self.held {
            Some(_) => plan.devices.iter().find(|of| of.device.as_ref() == Some(&key)),
            None => plan.devices.first(),
        };
        of.map(|of| &of.plan)
    }

    /// Names the settings in a result.
    #[must_use]
    pub fn scheme(&self) -> String {
        let Some(plan) = &self.plan else {
            let other = "no plan, contracts or the I/O domain in force";
            return if self.any { other } else { "as-found" }.to_owned();
        };
        let by = if self.held.is_some() { ", held by rtvirtiod" } else { "" };
        let part = match (self.is_part, self.gaps.is_empty()) {
            (true, _) => "a part of it",
            (false, false) => "a part of it at most",
            (false, true) if by.is_empty() => return plan.scheme().to_owned(),
            (false, true) => return format!("{}{by}", scheme_name(plan.scheme())),
        };
        format!("{} ({part}{by})", scheme_name(plan.scheme()))
    }

    /// Names the settings in a result that [`Self::changed`] is about.
    #[must_use]
    pub fn changed_scheme(&self) -> String {
        format!("{}, changed during the run", scheme_name(&self.scheme()))
    }
}

/// The journal of `rtvirtio apply`, or of the held plan, compared with the machine; `None` without
/// one.
fn compared(at: &Dirs) -> Result<Option<Status>> {
    let root = Root::default();
    let Some(mut status) = rtvirtio_apply::status(&at.state, &Machine::new(&root, &GuestAgents))? else {
        return Ok(None);
    };
    interrupts::count_by_vcpus(&mut status, at)?;
    Ok(Some(status))
}

/// Sentences on settings of a journal that are not as they were applied. Threads end all the time,
/// and VMs that have ended are named apart: what is gone does not count.
fn not_as_applied(status: &Status) -> Vec<String> {
    let mut out = Vec::new();
    if status.rebooted {
        let why = "the host was restarted since: the kernel has forgotten its settings";
        out.push(why.to_owned());
    }
    if !status.complete || status.reverting || status.leftover {
        out.push("the settings are half applied, or half put back: `rtvirtio revert`".to_owned());
    }
    let is_gone = |knob: &KnobStatus| matches!(knob.state, KnobState::Gone { .. });
    let differs = |knob: &&KnobStatus| knob.state != KnobState::InForce && !is_gone(knob);
    let others: Vec<&str> = status.knobs.iter().filter(differs).map(|knob| knob.knob.as_str()).collect();
    let named = others.iter().take(MOST_NAMED).copied().collect::<Vec<_>>().join(", ");
    match others.len() {
        0 if !status.knobs.is_empty() && status.knobs.iter().all(is_gone) => {
            out.push("all settings are gone with their device, cgroup, thread or guest".to_owned());
        }
        0 => {}
        n => {
            let more = n.saturating_sub(MOST_NAMED);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            out.push(format!("not in force as applied: {named}{more} (`rtvirtio status`)"));
        }
    }
    out
}

/// Keeps a result for later comparison.
pub fn keep(result: &ResultFile, dirs: &Dirs) -> Result<()> {
    let file = AsFound { schema: SCHEMA.to_owned(), generated: generated(), result: result.clone() };
    write_state(&dirs.state, FILE, &serde_json::to_vec_pretty(&file)?)
}

/// The run to compare `now` with: the last one of the same tasks, rates and targets on the same
/// device under the settings found. `None` where there is none.
///
/// # Errors
/// [`Kind::File`] when the file cannot be read.
pub fn comparable(now: &ResultFile, dirs: &Dirs) -> Result<Option<AsFound>> {
    let Some(dir) = StateDir::find(&dirs.state)? else { return Ok(None) };
    let path = path(dirs);
    let text = match dir.read(FILE) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let file: AsFound = serde_json::from_slice(&text)
        .map_err(|e| Error::from_source(Kind::File, e))
        .with_context(|| format!("{} is damaged: remove it", path.display()))?;
    if file.schema != SCHEMA {
        bail!(File, "{} has form {}, this rtvirtio knows {SCHEMA}: remove it", path.display(), file.schema);
    }
    let same_host = file.result.host == now.host;
    let same_tasks = match (file.result.runs.as_slice(), now.runs.as_slice()) {
        ([before], [after]) => asks_the_same(before, after),
        _ => false,
    };
    Ok((same_host && same_tasks).then_some(file))
}

/// Path of the file that [`keep`] writes.
#[must_use]
pub fn path(dirs: &Dirs) -> PathBuf {
    dirs.state.join(FILE)
}

fn asks_the_same(a: &Run, b: &Run) -> bool {
    let asked = |t: &TaskResult| (t.vm.clone(), t.task.clone(), t.percentile, t.target_ns, t.declared_rate);
    a.kind == b.kind && a.tasks.iter().map(asked).eq(b.tasks.iter().map(asked))
}

#[cfg(test)]
pub(crate) mod tests {
    use rtvirtio_apply::{Form, Session, Silent, Target, Write};
    use rtvirtio_measure::{HostFacts, RESULT_SCHEMA, VmKind};
    use rtvirtio_units::{Iops, Nanos, Percentile};

    use super::*;

    fn result(target_ms: u64) -> ResultFile {
        let task = TaskResult {
            vm: "a".into(),
            task: "t".into(),
            percentile: Percentile(99.0),
            target_ns: Some(Nanos::from_millis(target_ms)),
            declared_rate: Some(Iops(100.0)),
            achieved_rate: Iops(100.0),
            n: 100,
            p50_ns: Nanos(1),
            p99_ns: Nanos(2),
            p9999_ns: Nanos(3),
            p9999_excl_host_stalls_ns: None,
            p9999_placebo_ns: None,
            at_target_ns: None,
            max_ns: Nanos(3),
            fio_p9999_ns: Nanos(3),
            fio_cpus: 0.0,
            tail: None,
            predicted_ns: None,
            causes: None,
            causes_unread: Vec::new(),
            exceedances: 0,
            flow: None,
            verdict: None,
            why: String::new(),
        };
        let run = Run {
            scheme: "as-found".into(),
            kind: VmKind::Process,
            seconds: 1.0,
            noise: None,
            disk: None,
            tasks: vec![task],
        };
        let host = HostFacts {
            kernel: "k".into(),
            cpus: 2,
            vmm: "none".into(),
            accelerator: "none".into(),
            device: "loop0".into(),
        };
        ResultFile { schema: RESULT_SCHEMA.to_owned(), host, runs: vec![run] }
    }

    #[test]
    fn only_the_same_question_is_compared() {
        let (_dir, dirs) = crate::fixtures::dirs();
        assert_eq!(comparable(&result(10), &dirs).unwrap(), None, "nothing is kept");
        assert!(StateDir::open_or_create(&dirs.state).is_ok());
        keep(&result(10), &dirs).unwrap();
        assert_eq!(comparable(&result(10), &dirs).unwrap().unwrap().result, result(10));
        assert_eq!(comparable(&result(11), &dirs).unwrap(), None, "another target");
        let mut elsewhere = result(10);
        elsewhere.host.device = "loop1".into();
        assert_eq!(comparable(&elsewhere, &dirs).unwrap(), None, "another device");
        write_state(&dirs.state, FILE, b"{").unwrap();
        let error = format!("{:#}", comparable(&result(10), &dirs).unwrap_err());
        assert!(error.contains(FILE) && error.contains("remove it"), "{error}");
    }

    #[test]
    fn a_plan_that_the_service_holds_is_ours_and_named() {
        let (_dir, dirs) = crate::fixtures::dirs();
        let none = ActiveSettings::find(&dirs).unwrap();
        assert_eq!((none.any, none.scheme().as_str()), (false, "as-found"));
        let at = dirs.held_plan();
        std::fs::create_dir_all(&at).unwrap();
        let plan = serde_json::json!({ "schema": "rtvirtio.plan.v2", "feasible": true,
            "devices": [{ "device": "/dev/sdy", "plan": { "scheme": "by-hand", "model": "slice", "settings": [],
                "tasks": [], "feasible": true, "infeasible": null, "evaluated": 0 } }] });
        let held = serde_json::json!({ "contract": "c", "input": { "vms": ["plc"] }, "given_up": [], "starts": [],
            "yielded": [], "reason": "contracts are to be held", "since": "2026-11-26T07:12:03Z" });
        std::fs::write(at.join("plan.json"), plan.to_string()).unwrap();
        std::fs::write(at.join("held.json"), held.to_string()).unwrap();
        let without = ActiveSettings::find(&dirs).unwrap();
        assert!(!without.any && without.held.is_none(), "without a journal they mean nothing");
        std::fs::write(at.join(rtvirtio_apply::JOURNAL_FILE), "{}").unwrap();
        let under = ActiveSettings::find(&dirs).unwrap();
        assert!(under.any && under.scheme().ends_with(", held by rtvirtiod)"), "{under:?}");
        assert!(under.gaps[0].contains("is not known"), "the journal is damaged: {under:?}");
        assert_eq!(under.held.as_ref().unwrap().reason, "contracts are to be held");
        let of = |path: &str| under.plan_of(&Device::Path(path.into())).is_some();
        assert!(of("/dev/sdy") && !of("/dev/sdz"), "another device has no plan");
    }

    /// Directories with a plan in force whose only setting is a file that has `2`, which was `1`.
    pub(crate) fn applied(plan: &HostPlan) -> (tempfile::TempDir, Dirs, PathBuf) {
        let (dir, dirs) = crate::fixtures::dirs();
        let knob = dir.path().join("knob");
        std::fs::write(&knob, "1").unwrap();
        let (root, session) = (Root::default(), Session::open(&dirs.state).unwrap());
        in_force::save(plan, &dirs.state).unwrap();
        let write = Write::new("the knob", Target::host(&knob, Form::Plain), "2");
        session.apply(&[write], &Machine::new(&root, &GuestAgents), &mut Silent).unwrap();
        (dir, dirs, knob)
    }

    pub(crate) fn by_hand() -> HostPlan {
        let plan = serde_json::json!({ "scheme": "by-hand", "model": "slice", "settings": [], "tasks": [],
            "feasible": true, "infeasible": null, "evaluated": 0 });
        HostPlan::of_one(serde_json::from_value(plan).unwrap())
    }

    /// A run is not one under a plan that another program has changed, or put back meanwhile.
    #[test]
    fn settings_that_are_not_as_applied_are_said_and_a_change_during_a_run_is_seen() {
        let (_dir, dirs, knob) = applied(&by_hand());
        let whole = ActiveSettings::find(&dirs).unwrap();
        assert_eq!((whole.scheme().as_str(), &whole.gaps[..]), ("by-hand", &[][..]));
        assert_eq!(whole.changed(&dirs), None);
        std::fs::write(&knob, "3").unwrap();
        let changed = ActiveSettings::find(&dirs).unwrap();
        assert_eq!(changed.scheme(), "by-hand (a part of it at most)");
        assert!(changed.gaps.len() == 1 && changed.gaps[0].contains("the knob"), "{changed:?}");
        assert!(whole.changed(&dirs).unwrap().contains("changed during the measurement"));
        assert_eq!(changed.changed(&dirs), None);
        std::fs::write(&knob, "2").unwrap();
        assert_eq!(whole.changed(&dirs), None);
        crate::apply::revert_all(&dirs).unwrap();
        assert!(whole.changed(&dirs).unwrap().ends_with("now it is as-found"));
        assert_eq!(whole.changed_scheme(), "by-hand, changed during the run");
        std::fs::create_dir_all(&dirs.state).unwrap();
        std::fs::write(dirs.state.join(rtvirtio_apply::JOURNAL_FILE), "{").unwrap();
        assert!(whole.changed(&dirs).unwrap().contains("is not known"));
    }
}
