//! A VM that was started again has new cgroups: it gets the weights and limits of the plan in
//! force, added to the plan's journal.

use std::path::Path;

use rtvirtio_apply::{Amended, Machine, Session, Silent, merge};
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
///
/// # Errors
/// A plan or a spec that cannot be read.
pub fn plan_in_force(dirs: &Dirs) -> Result<Option<(HostPlan, HostSpec)>> {
    let Some(plan) = in_force::plan(&dirs.state)? else { return Ok(None) };
    let Some(file) = plan.spec_file.clone() else { return Ok(None) };
    let host = load_host(Path::new(&file))?;
    plan.check_devices(&host)?;
    Ok(Some((plan, host)))
}

/// Gives a VM that was started again its weights and limits. `session` is that of the state
/// directory.
///
/// # Errors
/// [`Kind::NotInForce`](crate::Kind::NotInForce) without a plan;
/// [`Kind::NotRunning`](crate::Kind::NotRunning) while the VM does not run; as [`Session::amend`].
pub fn renew(session: &Session, vm: &str, dirs: &Dirs, progress: &dyn Progress) -> Result<Amended> {
    let Some((plan, host)) = plan_in_force(dirs)? else {
        bail!(NotInForce, "no plan that names its spec is in force: `rtvirtio apply SPEC`")
    };
    renew_of(session, vm, (&plan, &host), &dirs.state, &|_| true, dirs, progress)
}

/// Like `renew`, for a plan with its journal in `state`; `chosen` selects settings by name.
pub(crate) fn renew_of(
    session: &Session,
    vm: &str,
    (plan, host): (&HostPlan, &HostSpec),
    state: &Path,
    chosen: &dyn Fn(&str) -> bool,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Amended> {
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let (mut writes, mut start) = (Vec::new(), None);
    for (of, part) in plan.devices.iter().zip(host.parts()) {
        let Some(part) = only(part, vm) else { continue };
        let site = Site::find(part, dirs)?;
        let found = site.host_vms().next().map(|found| StartedVm::find(found, progress)).transpose()?;
        start = found.flatten().or(start);
        let own = traffic::with_limits(&of_vm(&of.plan, vm), &site.spec)?;
        if !own.settings.is_empty() {
            merge(&mut writes, rtvirtio_apply::resolve(&own, &site.binding()?, &machine)?)?;
        }
    }
    let start = start.with_context(|| format!("vm {vm}: its processes are not known"))?;
    writes.retain(|write| chosen(&write.knob));
    let amended = session.amend(&writes, &machine, &mut Silent)?;
    started::replace(start, state)?;
    Ok(amended)
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
        Knob::VmWeight { vm: of } | Knob::VmIoWeight { vm: of } | Knob::VmLimit { vm: of, .. } => of == vm,
        _ => false,
    };
    let settings = plan.settings.iter().filter(|s| is_own(&s.knob)).cloned().collect();
    Plan { settings, ..plan.clone() }
}
