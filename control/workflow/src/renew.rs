//! A VM that was started again has new cgroups: it gets the weights and limits of the plan in
//! force, added to the plan's journal.

use std::path::Path;

use rtvirtio_apply::{Amended, Machine, Session, Silent, Write, merge};
use rtvirtio_kernel::Root;
use rtvirtio_planner::{Knob, Plan};
use rtvirtio_spec::{HostSpec, Part};

use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::guests::GuestAgents;
use crate::in_force;
use crate::named::load_host;
use crate::plan_file::HostPlan;
use crate::progress::Progress;
use crate::site::Site;
use crate::started::{self, StartedVm};
use crate::traffic;

/// The plan in force with its spec; `None` where no plan is in force, or it does not name its spec.
pub fn plan_in_force(dirs: &Dirs) -> Result<Option<(HostPlan, HostSpec)>> {
    let Some(plan) = in_force::plan(&dirs.state)? else { return Ok(None) };
    let Some(file) = plan.spec_file.clone() else { return Ok(None) };
    let host = load_host(Path::new(&file))?;
    plan.check_devices(&host)?;
    Ok(Some((plan, host)))
}

/// Weights and limits of a VM that was started again: looked up and resolved, not written yet.
pub struct Renewal {
    plan: HostPlan,
    host: HostSpec,
    /// The VM on each of its devices.
    sites: Vec<Site>,
    writes: Vec<Write>,
    start: StartedVm,
}

impl Renewal {
    /// Looks a VM up, and resolves what the plan of `rtvirtio apply` sets for it. Writes nothing
    /// and needs no lock: the answer may take as long as the VM's monitor, or libvirt, does.
    ///
    /// # Errors
    /// [`Kind::NotInForce`](crate::Kind::NotInForce) without a plan;
    /// [`Kind::NotRunning`](crate::Kind::NotRunning) while the VM does not run.
    pub fn find(vm: &str, dirs: &Dirs, progress: &dyn Progress) -> Result<Self> {
        let Some((plan, host)) = plan_in_force(dirs)? else {
            bail!(NotInForce, "no plan that names its spec is in force: `rtvirtio apply SPEC`")
        };
        Self::of_plan(vm, plan, host, &|_| true, dirs, progress)
    }

    /// Like [`Renewal::find`], for another plan; `chosen` selects settings by name.
    pub(crate) fn of_plan(
        vm: &str,
        plan: HostPlan,
        host: HostSpec,
        chosen: &dyn Fn(&str) -> bool,
        dirs: &Dirs,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let root = Root::default();
        let machine = Machine::new(&root, &GuestAgents);
        let (mut sites, mut writes, mut start) = (Vec::new(), Vec::new(), None);
        for (of, part) in plan.devices.iter().zip(host.parts()) {
            let Some(part) = only(part, vm) else { continue };
            let site = Site::find(part, dirs)?;
            let found = site.host_vms().next().map(|found| StartedVm::find(found, progress)).transpose()?;
            start = found.flatten().or(start);
            let own = traffic::with_limits(&of_vm(&of.plan, vm), &site.spec)?;
            if !own.settings.is_empty() {
                merge(&mut writes, rtvirtio_apply::resolve(&own, &site.binding_for(&own)?, &machine)?)?;
            }
            sites.push(site);
        }
        let start = start.with_context(|| format!("vm {vm}: its processes are not known"))?;
        writes.retain(|write| chosen(&write.knob));
        Ok(Self { plan, host, sites, writes, start })
    }

    /// Name of the VM.
    pub(crate) fn vm(&self) -> &str {
        &self.start.vm
    }

    /// Whether plan and spec are the same as at the look-up, the start that was found has not
    /// ended, and devices and cgroups are where they were.
    pub(crate) fn is_current(&self, plan: &HostPlan, host: &HostSpec) -> bool {
        self.plan == *plan
            && self.host == *host
            && !self.start.has_ended()
            && self.sites.iter().all(Site::is_in_place)
    }

    /// Writes the settings, of a plan whose journal is in `state`.
    pub(crate) fn write(&self, session: &Session, state: &Path) -> Result<Amended> {
        let root = Root::default();
        let amended = session.amend(&self.writes, &Machine::new(&root, &GuestAgents), &mut Silent)?;
        started::replace(self.start.clone(), state)?;
        Ok(amended)
    }
}

/// Gives a VM that was started again its weights and limits; `None` where plan, spec or VM have
/// changed since the look-up. `session` is that of the state directory.
///
/// # Errors
/// A plan or a spec that cannot be read; as [`Session::amend`].
pub fn renew(session: &Session, renewal: &Renewal, dirs: &Dirs) -> Result<Option<Amended>> {
    match plan_in_force(dirs)? {
        Some((plan, host)) if renewal.is_current(&plan, &host) => {
            renewal.write(session, &dirs.state).map(Some)
        }
        _ => Ok(None),
    }
}

/// A part of a host with one of its VMs; `None` where it has no task there.
fn only(part: &Part, vm: &str) -> Option<Part> {
    let place = part.spec.vms.iter().position(|other| other.name == vm)?;
    let mut part = part.clone();
    part.spec.vms = vec![part.spec.vms.swap_remove(place)];
    part.disks = vec![part.disks.swap_remove(place)];
    Some(part)
}

/// The settings of a plan that act on a VM's cgroups.
fn of_vm(plan: &Plan, vm: &str) -> Plan {
    let is_own = |knob: &Knob| match knob {
        Knob::VmWeight { vm: of }
        | Knob::VmIoWeight { vm: of }
        | Knob::VmIoLatency { vm: of }
        | Knob::VmLimit { vm: of, .. } => of == vm,
        _ => false,
    };
    let settings = plan.settings.iter().filter(|s| is_own(&s.knob)).cloned().collect();
    Plan { settings, ..plan.clone() }
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::{Form, NoGuests, Target};
    use rtvirtio_kernel::ProcessId;
    use rtvirtio_model::ModelKind;

    use super::*;

    const SPEC: &str = "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n[[vm.task]]\n\
                        name = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n";

    fn no_settings() -> Plan {
        Plan {
            scheme: "test".to_owned(),
            model: ModelKind::Slice,
            settings: Vec::new(),
            tasks: Vec::new(),
            feasible: true,
            infeasible: None,
            evaluated: 0,
        }
    }

    #[test]
    fn what_was_found_for_an_earlier_start_or_another_plan_is_not_written() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let dirs = Dirs { state: at("state"), run: at("run") };
        let (spec, weight, other) = (at("plant.toml"), at("weight"), at("other"));
        for (path, text) in [(&spec, SPEC), (&weight, "100\n"), (&other, "1\n")] {
            std::fs::write(path, text).unwrap();
        }
        let write =
            |path: &Path, value: &str| Write::new("weight of plc", Target::host(path, Form::Plain), value);
        let session = Session::open(&dirs.state).unwrap();
        let root = Root::default();
        session.apply(&[write(&other, "2")], &Machine::new(&root, &NoGuests), &mut Silent).unwrap();
        let plan = |scheme: &str| HostPlan::of_one(Plan { scheme: scheme.to_owned(), ..no_settings() });
        let put_in_force = |scheme: &str| {
            in_force::save(&plan(scheme).of_spec_file(&spec).unwrap(), &dirs.state).unwrap();
        };
        put_in_force("one");
        let found = |process: &ProcessId| {
            let (plan, host) = plan_in_force(&dirs).unwrap().unwrap();
            let start = crate::fixtures::start("plc", &[process]);
            Renewal { plan, host, sites: Vec::new(), writes: vec![write(&weight, "700")], start }
        };
        let (this, ended) = crate::fixtures::alive_and_ended();
        assert_eq!(renew(&session, &found(&ended), &dirs).unwrap(), None, "it was started again since");
        let earlier = found(&this);
        put_in_force("two");
        assert_eq!(renew(&session, &earlier, &dirs).unwrap(), None, "another plan");
        let earlier = found(&this);
        std::fs::write(&spec, SPEC.replace("pid = 7", "pid = 8")).unwrap();
        assert_eq!(renew(&session, &earlier, &dirs).unwrap(), None, "the name may mean another VM");
        assert_eq!(std::fs::read_to_string(&weight).unwrap(), "100\n");
        let amended = renew(&session, &found(&this), &dirs).unwrap().unwrap();
        assert_eq!(amended.written.len(), 1, "{amended:?}");
        assert_eq!(std::fs::read_to_string(&weight).unwrap().trim(), "700");
        assert_eq!(started::applied_vms(&dirs.state).unwrap(), ["plc"]);
    }
}
