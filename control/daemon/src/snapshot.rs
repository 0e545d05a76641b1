//! The state of the service as clients see it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_fleet::Inventory;
use rtvirtio_kernel::ProcessId;
use rtvirtio_spec::{Criticality, HostHandle, LibvirtDomain, Reach};
use rtvirtio_units::{Enforcement, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::arrivals::{ArrivalSnapshot, ArrivalState, names_domain};
use crate::config::{Config, Mode};
use crate::desired::{Contract, Desired};
use crate::memory::Memory;
use crate::observed::{DriftSnapshot, Observed, ObservedVm, Presence, ScopeState, ScopeView, lost_words};
use crate::plan::PlanSnapshot;

/// Schema of [`Snapshot`] as JSON.
pub const SNAPSHOT_SCHEMA: &str = "rtvirtio.service.v1";

/// State of publication in Placement, as clients see it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementSnapshot {
    /// URL of the Placement API.
    pub url: String,
    /// The resource provider, as configured.
    pub provider: String,
    /// Whether inventories are only shown, because the service only observes.
    pub is_dry: bool,
    /// Time of the last successful publication, RFC 3339; `None` before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<String>,
    /// Inventories by resource class.
    pub inventories: BTreeMap<String, Inventory>,
    /// Reason why Placement is not up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Further remarks, such as an over-committed host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Number of failed rounds.
    pub failures: u64,
}

/// State of a VM's contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// In force as written.
    InForce,
    /// In force, but settings have other values, are gone or cannot be read.
    Drift,
    /// The VM does not run.
    Off,
    /// Whether the VM runs is not known.
    Unknown,
    /// The contract sets nothing: the VM is only observed.
    Observed,
    /// A device that its tasks use is not planned, so that nothing is promised for these; the rest
    /// of the contract is as it should be.
    Unplanned,
    /// A device that its tasks use is slower than its plan allows for, so that what was predicted
    /// for these does not hold; the rest of the contract is as it should be.
    Aged,
    /// The contract does not fit with the others.
    Refused,
    /// The contract waits for acceptance.
    Waiting,
    /// Not applied, because the service only observes.
    WouldApply,
    /// `rtvirtio apply` has settings for the VM.
    AppliedByHand,
    /// The last step failed, and is tried again.
    Failed,
    /// About to be put in force, or reverted.
    Pending,
    /// The contract's file has a mistake or cannot be read; what is in force stays as it is.
    Held,
}

/// A target of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TargetSnapshot {
    pub task: String,
    /// Percentile of completion latency.
    pub percentile: Percentile,
    /// Largest latency that the target allows.
    pub latency_ns: Nanos,
}

/// State of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmSnapshot {
    pub name: String,
    /// State of its contract.
    pub state: VmState,
    /// Reason for the state, where that is not obvious.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Criticality of its contract; `None` where the contract is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub criticality: Option<Criticality>,
    /// Origin of its contract: a file, or the metadata of a libvirt domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Name or UUID of its VM in libvirt, as its contract has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// URI of that VM's libvirt daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uri: Option<String>,
    /// Origin of a further contract of this VM, which does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overrides: Option<String>,
    /// Identifies the contract that is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contract: Option<String>,
    /// Identifies its contract as the service has read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
    /// The contract that waits for acceptance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Seconds since the service's last scan; `None` before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub looked_s: Option<f64>,
    /// Processes of the VM; none unless it is known to run.
    pub processes: Vec<ProcessId>,
    /// Settings that another program has changed.
    pub drift: Vec<DriftSnapshot>,
    /// Targets of the tasks in its contract.
    pub targets: Vec<TargetSnapshot>,
}

/// The state of the service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Always `SNAPSHOT_SCHEMA`, the name of this form.
    pub schema: String,
    /// Version of the service.
    pub version: String,
    /// Process id of the service.
    pub pid: u32,
    /// Whether the service observes, asks, or applies by itself.
    pub mode: Mode,
    /// The directory whose contract files it reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contracts: Option<PathBuf>,
    /// The libvirt daemon whose domains' metadata it reads; `None` where it reads none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<String>,
    /// The VMs with a contract, the most critical first, and those that still have settings.
    pub vms: Vec<VmSnapshot>,
    /// The plan that the service holds; `None` where it holds none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanSnapshot>,
    /// State of publication in OpenStack's Placement; `None` where nothing is published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementSnapshot>,
    /// VMs that are about to arrive, with reservations for their contracts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arrivals: Vec<ArrivalSnapshot>,
    /// Settings that `rtvirtio apply` has put in force and another program has changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub applied_drift: Vec<DriftSnapshot>,
    /// Files that are not used, each with the reason.
    pub faults: Vec<FaultSnapshot>,
    /// Problems that concern no single VM.
    pub problems: Vec<String>,
}

/// A file that is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultSnapshot {
    /// Origin of the contract.
    pub file: String,
    /// Reason why it is not used.
    pub why: String,
}

impl Snapshot {
    /// State of contracts, host, configuration and memory at one moment.
    #[must_use]
    pub fn build(desired: &Desired, observed: &Observed, config: &Config, memory: &Memory) -> Self {
        let contracts = desired.by_criticality(|_| false);
        let mut vms: Vec<VmSnapshot> = contracts
            .iter()
            .filter_map(|c| Some(contracted(c, observed.vms.get(&c.vm.name)?, observed, config, memory)))
            .collect();
        for (name, vm) in &observed.vms {
            if desired.contract_of(name).is_none() {
                vms.push(without_contract(name, vm, desired, memory));
            }
        }
        let fault =
            |f: &crate::ContractFault| FaultSnapshot { file: f.origin.to_string(), why: f.why.clone() };
        Self {
            schema: SNAPSHOT_SCHEMA.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            mode: config.mode,
            contracts: None,
            libvirt: config.libvirt.clone(),
            vms,
            plan: None,
            placement: None,
            arrivals: Vec::new(),
            applied_drift: observed.applied_drift.iter().map(DriftSnapshot::from_drift).collect(),
            faults: desired.faults.iter().map(fault).collect(),
            problems: Vec::new(),
        }
    }

    /// Sets the age of the scan. Beyond `limit` every VM's state becomes unknown.
    #[must_use]
    pub(crate) fn aged(mut self, age: Option<Duration>, limit: Duration) -> Self {
        let is_stale = age.is_some_and(|age| age > limit);
        for vm in &mut self.vms {
            vm.looked_s = age.map(|age| age.as_secs_f64());
            if let (true, Some(age)) = (is_stale, age) {
                vm.state = VmState::Unknown;
                vm.why = Some(format!("last checked {} s ago", age.as_secs()));
            }
        }
        if let (true, Some(age)) = (is_stale, age) {
            let why = "the service waits for the kernel, or has too little CPU time";
            self.problems.push(format!("the host was last checked {} s ago: {why}", age.as_secs()));
        }
        self
    }

    /// Sets the directory of contract files.
    #[must_use]
    pub(crate) fn with_contracts(mut self, dir: &Path) -> Self {
        // Absolute, for clients in other directories.
        self.contracts = Some(std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned()));
        self
    }

    /// Sets the service's plan. A VM with tasks on a device that is not planned becomes `Unplanned`
    /// where it would be `InForce` or `Observed`.
    #[must_use]
    pub(crate) fn with_plan(mut self, plan: Option<PlanSnapshot>) -> Self {
        for device in plan.iter().flat_map(|plan| &plan.unplanned) {
            for vm in self.vms.iter_mut().filter(|vm| device.vms.contains(&vm.name)) {
                if matches!(vm.state, VmState::InForce | VmState::Observed) {
                    (vm.state, vm.why) = (VmState::Unplanned, Some(device.message()));
                }
            }
        }
        self.plan = plan;
        self
    }

    /// The VM of libvirt with this name and UUID: its contract names it so, or no contract does,
    /// and one that does not name it by libvirt has its name.
    pub(crate) fn of_domain(&self, name: &str, uuid: &str) -> Option<&VmSnapshot> {
        let uri = self.libvirt.as_deref().unwrap_or(LibvirtDomain::DEFAULT_URI);
        let is_domain = |vm: &&VmSnapshot| {
            vm.uri.as_deref() == Some(uri)
                && vm.domain.as_ref().is_some_and(|of| names_domain(of, name, uuid))
        };
        let is_named = |vm: &&VmSnapshot| vm.domain.is_none() && vm.name == name;
        self.vms.iter().find(is_domain).or_else(|| self.vms.iter().find(is_named))
    }

    /// Whether every contract is in force, or needs nothing, or its VM is off.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let fine = |vm: &VmSnapshot| matches!(vm.state, VmState::InForce | VmState::Off | VmState::Observed);
        self.faults.is_empty()
            && self.applied_drift.is_empty()
            && self.plan.as_ref().is_none_or(PlanSnapshot::is_whole)
            && self.problems.is_empty()
            && self.arrivals.iter().all(|of| of.state == ArrivalState::Reserved)
            && self.vms.iter().all(fine)
    }
}

fn base(name: &str, vm: &ObservedVm) -> VmSnapshot {
    let drift = vm.scope.iter().flat_map(|s| &s.drift).map(DriftSnapshot::from_drift);
    let processes = match &vm.presence {
        Presence::Running(processes) => processes.clone(),
        Presence::Off(_) | Presence::Unknown(_) => Vec::new(),
    };
    VmSnapshot {
        name: name.to_owned(),
        state: VmState::Pending,
        why: None,
        criticality: None,
        file: None,
        domain: None,
        uri: None,
        overrides: None,
        contract: vm.scope.as_ref().map(|s| s.contract.clone()),
        written: None,
        waits_for: None,
        looked_s: None,
        processes,
        drift: drift.collect(),
        targets: Vec::new(),
    }
}

fn without_contract(name: &str, vm: &ObservedVm, desired: &Desired, memory: &Memory) -> VmSnapshot {
    let held = desired.holds(name);
    let (state, why) = match memory.failure(name) {
        _ if vm.scope.is_none() => {
            (VmState::AppliedByHand, "a plan that `rtvirtio apply` has put in force acts on it")
        }
        _ if held && desired.is_incomplete => {
            (VmState::Held, "not all contracts are known yet: what is in force stays")
        }
        _ if held && desired.has_unread => {
            (VmState::Held, "a contract cannot be read: what is in force stays")
        }
        _ if held => (VmState::Held, "its contract has a mistake or cannot be read: what is in force stays"),
        Some(why) => (VmState::Failed, why),
        None => (VmState::Pending, "its contract was removed"),
    };
    VmSnapshot { state, why: Some(why.to_owned()), ..base(name, vm) }
}

/// Reason why the settings in force for a VM are not those of its contract now.
pub(crate) fn kept_words(is_changed: bool, why: &str) -> String {
    let what = if is_changed { "its contract was changed, and the new one" } else { "its contract" };
    format!("{what} cannot be met: {why}; the settings in force stay until the VM ends")
}

/// Note of a CPU contract that nothing enforces.
fn hint_words(scope: &ScopeView) -> Option<String> {
    let backend = scope.cpu.filter(|backend| backend.strength() == Enforcement::Hint)?;
    Some(format!("its CPU contract is a hint only, by {backend}: nothing keeps its budget"))
}

fn contracted(
    contract: &Contract,
    vm: &ObservedVm,
    observed: &Observed,
    config: &Config,
    memory: &Memory,
) -> VmSnapshot {
    let name = &contract.vm.name;
    let waits = config.mode == Mode::Ask
        && contract.sets_something()
        && !memory.is_accepted(name, &contract.id)
        && vm.scope.as_ref().is_none_or(|s| s.contract != contract.id);
    let refused = observed.admission.refused.get(name);
    let is_changed = vm.scope.as_ref().is_some_and(|s| s.contract != contract.id);
    let kept = observed.admission.kept.get(name).filter(|_| vm.scope.is_some());
    let (state, why) = match (&vm.presence, &vm.scope) {
        (_, Some(ScopeView { state: ScopeState::Unusable(why), .. })) => (VmState::Failed, Some(why.clone())),
        // A failed step is reported before the reason of the step.
        (_, Some(_)) if memory.failure(name).is_some() => {
            (VmState::Failed, memory.failure(name).map(str::to_owned))
        }
        (Presence::Unknown(why), _) => (VmState::Unknown, Some(why.clone())),
        _ if refused.is_some() => (VmState::Refused, refused.cloned()),
        _ if is_changed && kept.is_some() => (VmState::Refused, kept.map(|why| kept_words(true, why))),
        (Presence::Off(why), _) => (VmState::Off, Some(why.clone())),
        _ if !contract.sets_something() => (VmState::Observed, None),
        _ if vm.applied_by_hand => {
            let why = "`rtvirtio apply` has put its settings in force: `rtvirtio revert`, and they come from its contract";
            (VmState::AppliedByHand, Some(why.to_owned()))
        }
        _ if memory.failure(name).is_some() => (VmState::Failed, memory.failure(name).map(str::to_owned)),
        _ if waits => (VmState::Waiting, Some(format!("`rtvirtio contract accept {name}`"))),
        (_, Some(scope)) if scope.state == ScopeState::Whole && scope.contract == contract.id => {
            let runs = matches!(vm.presence, Presence::Running(_));
            let outside = vm.outside.why().or_else(|| vm.without_cpu.clone()).filter(|_| runs);
            if let Some(why) = outside {
                return VmSnapshot { why: Some(why), ..of_contract(contract, vm, VmState::Pending) };
            }
            let lost = lost_words(&scope.lost);
            let is_whole = scope.drift.is_empty() && lost.is_none();
            let why = lost.or_else(|| kept.map(|why| kept_words(false, why))).or_else(|| hint_words(scope));
            (if is_whole { VmState::InForce } else { VmState::Drift }, why)
        }
        _ if config.mode == Mode::Observe => (VmState::WouldApply, None),
        _ => (VmState::Pending, None),
    };
    VmSnapshot { why, waits_for: waits.then(|| contract.id.clone()), ..of_contract(contract, vm, state) }
}

/// State of a VM, with the fields that its contract determines.
fn of_contract(contract: &Contract, vm: &ObservedVm, state: VmState) -> VmSnapshot {
    let targets = contract.vm.tasks.iter().flat_map(|task| {
        task.goals().flatten().map(|target| TargetSnapshot {
            task: task.name.clone(),
            percentile: target.percentile,
            latency_ns: target.latency,
        })
    });
    let domain = match &contract.vm.reach {
        Reach::Existing { host: HostHandle::Domain(of), .. } => Some(of),
        _ => None,
    };
    VmSnapshot {
        state,
        criticality: Some(contract.criticality()),
        file: Some(contract.origin.to_string()),
        domain: domain.map(|of| of.domain.clone()),
        uri: domain.map(|of| of.uri().to_owned()),
        overrides: contract.overrides.as_ref().map(ToString::to_string),
        written: Some(contract.id.clone()),
        targets: targets.collect(),
        ..base(&contract.vm.name, vm)
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::HostSpec;

    use super::*;

    #[test]
    fn the_contract_of_a_domain_is_found_by_its_uuid_and_not_by_another_ones_name() {
        const ONE: &str = "a9949d75-95e3-4747-82e3-c9fee1047601";
        const OTHER: &str = "a9949d75-95e3-4747-82e3-c9fee1047602";
        let contract = |name: &str, reach: &str| {
            let text = format!(
                "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{name}\"\n{reach}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
            );
            let spec = HostSpec::parse("x.toml", &text).unwrap();
            Contract::of_spec(&spec, Path::new("x.toml")).remove(0)
        };
        let by_uuid = format!("domain = \"{}\"", ONE.to_uppercase());
        let contracts = vec![
            contract("plc", &by_uuid),
            contract("hist", "domain = \"historian\""),
            contract("session", "domain = \"desk\"\nuri = \"qemu:///session\""),
            contract("hmi", "pid = 7"),
        ];
        let names = ["plc", "hist", "session", "hmi"];
        let vms = names.map(|vm| (vm.to_owned(), ObservedVm::off("it is off")));
        let observed = Observed { vms: vms.into(), ..Observed::default() };
        let desired = Desired { contracts, ..Desired::default() };
        let snapshot = Snapshot::build(&desired, &observed, &Config::default(), &Memory::default());
        let found = |name: &str, uuid: &str| snapshot.of_domain(name, uuid).map(|vm| vm.name.as_str());
        for name in ["plc", "renamed", "hmi"] {
            assert_eq!(found(name, ONE), Some("plc"), "{name}");
        }
        assert_eq!(found("plc", OTHER), None, "another VM with the name of that contract");
        assert_eq!(found("historian", OTHER), Some("hist"));
        assert_eq!(found("hmi", OTHER), Some("hmi"), "a contract that does not name its VM by libvirt");
        assert_eq!((found("desk", OTHER), found(ONE, OTHER)), (None, None));
    }
}
