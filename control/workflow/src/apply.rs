//! From a plan to the host: resolve, apply, put back.

use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    ApplyError, Line, Machine, Observer, OnConflict, Reverted, Session, Silent, StateDir, Step, Write,
    append, dry_run, merge,
};
use rtvirtio_cpu::Probe;
use rtvirtio_kernel::Root;
use rtvirtio_model::{Config, ModelKind};
use rtvirtio_planner::{Knob, LimitKind, Plan, check_actable, plan};
use rtvirtio_spec::HostSpec;
use rtvirtio_units::Ratio;

use crate::acting;
use crate::block_sizes;
use crate::contracts::{self, InForce, VmCpu};
use crate::covered::{self, CoveredVm};
use crate::devices::Devices;
use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Result, bail};
use crate::find::{self, HostVm};
use crate::guests::GuestAgents;
use crate::holders::{self, Holder};
use crate::in_force;
use crate::model_choice::{ModelChoice, ModelName};
use crate::plan::{load_profile, warn_throttled};
use crate::plan_file::HostPlan;
use crate::progress::Progress;
use crate::scopes::Scopes;
use crate::site::Site;
use crate::started::{self, StartedVm};
use crate::traffic;

/// Options of a plan that is made because none is given.
#[derive(Clone, Copy, Debug)]
pub struct PlanWith<'a> {
    /// A profile file instead of the one saved for the device.
    pub profile: Option<&'a Path>,
    /// Name of the model that predicts.
    pub model: ModelName,
    /// Share of a target up to which margin counts: [`rtvirtio_planner::PlanOptions::enough`].
    pub enough: Option<Ratio>,
}

/// The spec of what is to be applied, and the plan if it is one already.
///
/// # Errors
/// [`Kind::File`](crate::Kind::File) for a file that is neither,
/// [`Kind::Argument`](crate::Kind::Argument) for a plan whose spec is not known.
pub fn load(source: &Path, spec: Option<&Path>) -> Result<(HostSpec, Option<HostPlan>)> {
    let saved = if is_spec(source) { None } else { Some(in_force::load_plan(source)?) };
    let path = match (spec, &saved) {
        (Some(spec), _) => spec.to_owned(),
        (None, None) => source.to_owned(),
        (None, Some(plan)) => match &plan.spec_file {
            Some(spec) => PathBuf::from(spec),
            None => {
                bail!(Argument, "say which spec the plan {} is for: --spec FILE.toml", source.display())
            }
        },
    };
    let host = crate::named::named_host(&path)?;
    saved.as_ref().map_or(Ok(()), |plan| plan.check_devices(&host))?;
    Ok((host, saved))
}

/// Whether a file is a spec by its name.
#[must_use]
pub fn is_spec(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "toml")
}

/// A plan for a site, made now; with the settings found.
///
/// # Errors
/// [`Kind::NotMeasured`](crate::Kind::NotMeasured) without a profile.
pub fn plan_now(
    site: &Site,
    with: &PlanWith<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<(Plan, Config)> {
    block_sizes::check(&site.spec, &site.stack.device, progress)?;
    let profile = load_profile(&site.spec, with.profile, dirs)?;
    let choice = ModelChoice::find(with.model, &site.spec, &profile, dirs, progress)?;
    let survey = site.survey(progress)?;
    let found_config = survey.config.clone();
    let mut options = site.options(survey, &choice)?;
    options.enough = with.enough;
    let plan = plan(&site.spec, &profile, &options)?;
    warn_throttled(&site.spec, &profile, &options.start, &plan, progress)?;
    Ok((plan, found_config))
}

/// Checks that a saved plan acts on this host: it may have been made, or edited, for another one.
///
/// # Errors
/// When one of its settings would have no effect here.
pub fn check_saved(plan: &Plan, site: &Site) -> Result<()> {
    let choice = ModelChoice::formula(ModelKind::Slice);
    let options = site.plan_options(site.config()?, &choice)?;
    // The models know no limits on bytes; written by hand they act all the same.
    let bytes =
        |knob: &Knob| matches!(knob, Knob::VmLimit { limit: LimitKind::ReadBps | LimitKind::WriteBps, .. });
    // Where nothing schedules, `resolve` names what can act; another elevator is no remedy there.
    let scheduled =
        |knob: &Knob| matches!(knob, Knob::HostElevator | Knob::HostBfq(_) | Knob::VmWeight { .. });
    let elsewhere = |knob: &Knob| bytes(knob) || (site.stack.disks.is_empty() && scheduled(knob));
    let known: Vec<_> = plan.settings.iter().filter(|s| !elsewhere(&s.knob)).cloned().collect();
    Ok(check_actable(&site.spec, &options.placements, &options.start, &known)?)
}

/// A plan's settings and the spec's CPU contracts, as writes on this host.
pub struct Resolved {
    /// Writes in the order in which they are carried out.
    pub writes: Vec<Write>,
    /// Settings of each VM's CPU contract.
    pub held: Vec<VmCpu>,
    /// Processes of each VM concerned, to recognise a restart.
    pub vms: Vec<StartedVm>,
    /// Devices of each VM for which the settings are.
    pub covered: Vec<CoveredVm>,
}

/// Everything that a plan and its spec's CPU contracts write: the settings of each device, then the
/// contract of each VM.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) when the contracts are more than the kernel
/// grants.
pub fn resolve(
    plan: &HostPlan,
    devices: &Devices,
    cpu_profiles: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Resolved> {
    let host = &devices.host;
    refuse_kept(host.vms().iter().map(|vm| vm.name.as_str()), dirs)?;
    let (cpu, held) = match contracts::of_vms(host.vms(), cpu_profiles, dirs, progress)? {
        Some(admitted) => contracts::writes(admitted, &devices.host_vms(), progress)?,
        None => (Vec::new(), Vec::new()),
    };
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let (mut writes, mut plans) = (Vec::new(), Vec::new());
    for (of, site) in plan.devices.iter().zip(&devices.sites) {
        let limited = traffic::with_limits(&of.plan, &site.spec)?;
        let of_device = rtvirtio_apply::resolve(&limited, &site.binding()?, &machine)?;
        merge(&mut writes, of_device)?;
        plans.push(limited);
    }
    append(&mut writes, cpu);
    traffic::name_unset(host.vms().iter(), progress);
    let covered = covered::of(plans.iter().zip(&devices.sites));
    Ok(Resolved { writes, held, vms: started(devices.host_vms().into_iter(), progress), covered })
}

/// The limits of a spec's `traffic` alone.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) for a spec without limits of disks; as [`resolve`].
pub fn resolve_traffic(devices: &Devices, dirs: &Dirs, progress: &dyn Progress) -> Result<Resolved> {
    refuse_kept(devices.host.vms().iter().map(|vm| vm.name.as_str()), dirs)?;
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let (mut writes, mut plans) = (Vec::new(), Vec::new());
    for site in &devices.sites {
        let limits = traffic::limits_only(&site.spec)?;
        merge(&mut writes, rtvirtio_apply::resolve(&limits, &site.binding()?, &machine)?)?;
        plans.push(limits);
    }
    traffic::name_unset(devices.host.vms().iter(), progress);
    if writes.is_empty() {
        bail!(Argument, "no VM of the spec has `traffic` for its disks: there is nothing to apply");
    }
    let covered = covered::of(plans.iter().zip(&devices.sites));
    let vms = started(devices.host_vms().into_iter(), progress);
    Ok(Resolved { writes, held: Vec::new(), vms, covered })
}

/// The CPU contracts of a spec alone.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) for a spec without contracts; as [`resolve`].
pub fn resolve_cpu(
    host: &HostSpec,
    cpu_profiles: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Resolved> {
    resolve_cpu_in(host, cpu_profiles, dirs, progress, contracts::room_of)
}

/// Like [`resolve_cpu`], for a journal of its own next to those of `others`, the contracts in force
/// here. The cgroups above those of managed VMs get what all contracts need together, in the
/// journal that they share, not by the returned writes.
///
/// # Errors
/// As [`resolve_cpu`], and [`Scopes::make_room`].
pub fn resolve_cpu_beside(
    host: &HostSpec,
    dirs: &Dirs,
    (scopes, others): (&Scopes<'_>, &[InForce]),
    progress: &dyn Progress,
) -> Result<Resolved> {
    resolve_cpu_in(host, &[], dirs, progress, |probe, held| {
        let all: Vec<InForce> = others.iter().cloned().chain(held.iter().map(InForce::of)).collect();
        scopes.make_room(probe, &all)?;
        Ok(Vec::new())
    })
}

/// `room` raises the budgets of the cgroups above the VMs' for the contracts, and returns the
/// writes that remain for that.
fn resolve_cpu_in(
    host: &HostSpec,
    cpu_profiles: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
    room: impl FnOnce(&Probe, &[VmCpu]) -> Result<Vec<Write>>,
) -> Result<Resolved> {
    refuse_kept(host.vms().iter().map(|vm| vm.name.as_str()), dirs)?;
    let Some(admitted) = contracts::of_vms(host.vms(), cpu_profiles, dirs, progress)? else {
        bail!(Argument, "no VM of the spec has `cpu`: there is nothing to apply");
    };
    let vms = find::of_host(host.vms(), dirs)?;
    let probe = admitted.probe.clone();
    let (of_vms, held) = contracts::writes_in_room(admitted, &vms.iter().collect::<Vec<_>>(), progress)?;
    let mut writes = room(&probe, &held)?;
    append(&mut writes, of_vms);
    let contracted = vms.iter().filter(|vm| held.iter().any(|h| h.vm == vm.name));
    let vms = started(contracted, progress);
    Ok(Resolved { writes, held, vms, covered: Vec::new() })
}

/// Refuses VMs whose contract the service or an agent keeps.
fn refuse_kept<'n>(vms: impl Iterator<Item = &'n str>, dirs: &Dirs) -> Result<()> {
    holders::refuse_names(vms, &Holder::Apply, dirs)
}

fn started<'v>(vms: impl Iterator<Item = &'v HostVm>, progress: &dyn Progress) -> Vec<StartedVm> {
    vms.filter_map(|vm| StartedVm::of(vm, progress)).collect()
}

impl Resolved {
    /// Every write as `path: old -> new`; nothing is changed.
    ///
    /// # Errors
    /// When an old value cannot be read.
    pub fn preview(&self) -> Result<Vec<Line>> {
        let root = Root::default();
        Ok(dry_run(&self.writes, &Machine::new(&root, &GuestAgents))?)
    }

    /// Writes them: captured, journaled, read back, rolled back on any failure. `plan` is the plan
    /// that they carry out, if any. Returns how many settings there are.
    ///
    /// # Errors
    /// [`Kind::InForce`](crate::Kind::InForce) when settings are in force, or the service holds a
    /// plan or a contract of one of the VMs;
    /// [`Kind::Cancelled`](crate::Kind::Cancelled) when the user stops it, after everything was put
    /// back.
    pub fn apply(&self, plan: Option<&HostPlan>, dirs: &Dirs, progress: &dyn Progress) -> Result<usize> {
        let session = Session::open(&dirs.state)?;
        let in_force = session.in_force()?;
        if !in_force && self.writes.is_empty() {
            // Nothing is set, so nothing is in force and there is nothing to put back.
            return Ok(0);
        }
        // Under the lock: the service may have set some since these were resolved.
        in_force::refuse_held(dirs)?;
        holders::refuse(&self.vms, &Holder::Apply, dirs)?;
        // Before the journal: these files mean nothing without one.
        if !in_force {
            acting::note(dirs)?;
            match plan {
                Some(plan) => in_force::save(plan, &dirs.state)?,
                None => in_force::forget(&dirs.state)?,
            }
            contracts::save(&self.held, &dirs.state)?;
            started::save(&self.vms, &dirs.state)?;
            covered::save(&self.covered, &dirs.state)?;
        }
        let root = Root::default();
        let applied =
            session.apply(&self.writes, &Machine::new(&root, &GuestAgents), &mut StopOnCancel(progress));
        if applied.is_err() {
            // A superfluous note is removed by the next step and has no effect until then.
            let _ = acting::settle(dirs);
        }
        match applied {
            Ok(applied) => Ok(applied.knobs.len()),
            Err(ApplyError::RolledBack { cause, rollback })
                if matches!(*cause, ApplyError::Interrupted) && rollback.done =>
            {
                progress.step(&rollback.summary());
                Err(Error::cancelled())
            }
            Err(e) => Err(e.into()),
        }
    }
}

/// Applies a plan's settings without CPU contracts and returns how many there are.
///
/// # Errors
/// As [`Resolved::apply`].
pub fn apply_plan(plan: &Plan, site: &Site, dirs: &Dirs, progress: &dyn Progress) -> Result<usize> {
    let root = Root::default();
    let limited = traffic::with_limits(plan, &site.spec)?;
    let writes = rtvirtio_apply::resolve(&limited, &site.binding()?, &Machine::new(&root, &GuestAgents))?;
    let host_plan = HostPlan::of_one(plan.clone());
    let vms = started(site.host_vms(), progress);
    let covered = covered::of(std::iter::once((&limited, site)));
    Resolved { writes, held: Vec::new(), vms, covered }.apply(Some(&host_plan), dirs, progress)
}

/// The session of a state directory; `None` when there is none, and so nothing that was applied.
///
/// # Errors
/// [`Kind::InForce`](crate::Kind::InForce) when another rtvirtio holds it.
pub fn open_session(dirs: &Dirs) -> Result<Option<Session>> {
    match StateDir::find(&dirs.state)? {
        Some(_) => Ok(Some(Session::open(&dirs.state)?)),
        None => Ok(None),
    }
}

/// Puts settings back; `None` when none were in force.
///
/// # Errors
/// When the journal cannot be used. The result names settings that remain.
pub fn put_back(session: &Session, on_conflict: OnConflict, dirs: &Dirs) -> Result<Option<Reverted>> {
    let root = Root::default();
    let mut reverted = session.revert(on_conflict, &Machine::new(&root, &GuestAgents), &mut Silent)?;
    if let Some(reverted) = reverted.as_mut().filter(|r| r.done) {
        // Without a journal they mean nothing, so the settings are back all the same.
        for done in [in_force::forget(&dirs.state), acting::settle(dirs)] {
            reverted.warnings.extend(done.err().map(|e| format!("{e:#}")));
        }
    }
    Ok(reverted)
}

/// Puts every setting back and returns their number.
///
/// # Errors
/// [`Kind::NotPutBack`](crate::Kind::NotPutBack) when a setting remains.
pub fn revert_all(dirs: &Dirs) -> Result<usize> {
    let Some(session) = open_session(dirs)? else { return Ok(0) };
    let reverted = put_back(&session, OnConflict::Report, dirs).context("putting settings back")?;
    match reverted {
        None => Ok(0),
        Some(reverted) if reverted.done => Ok(reverted.outcomes.len()),
        Some(reverted) => bail!(NotPutBack, "{}", reverted.summary()),
    }
}

/// Ctrl-C between two writes puts everything back.
struct StopOnCancel<'a>(&'a dyn Progress);

impl Observer for StopOnCancel<'_> {
    fn step(&mut self, _: Step) {}

    fn stop(&mut self) -> bool {
        self.0.is_cancelled()
    }
}
