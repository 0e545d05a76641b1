//! From a plan to the host: resolve, apply, put back.

use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    ApplyError, Line, Machine, OnConflict, Reverted, Session, Silent, StateDir, Write, append, dry_run, merge,
};
use rtvirtio_kernel::Root;
use rtvirtio_model::{Config, ModelKind, Profile};
use rtvirtio_planner::{Knob, LimitKind, Plan, check_actable, plan};
use rtvirtio_spec::HostSpec;
use rtvirtio_units::Ratio;

use crate::acting;
use crate::block_sizes;
use crate::contracts::{self, Admitted, InForce, VmCpu};
use crate::covered::{self, CoveredVm};
use crate::cpu_room::{self, CpuTime};
use crate::devices::Devices;
use crate::dirs::Dirs;
use crate::domain::engine_cpus;
use crate::error::{Context as _, Error, Result, bail};
use crate::fair_server;
use crate::find::{self, HostVm};
use crate::guests::GuestAgents;
use crate::holders::{self, Holder};
use crate::in_force;
use crate::interrupts;
use crate::memory;
use crate::model_choice::{ModelChoice, ModelName};
use crate::plan::{load_profile, warn_throttled};
use crate::plan_file::HostPlan;
use crate::progress::Progress;
use crate::scopes::{Scopes, refuse_next_to_service};
use crate::site::Site;
use crate::started::{self, StartedVm};
use crate::stop_on_cancel::StopOnCancel;
use crate::traffic;

mod taken;

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

/// CPU time for the requests of the guests of these devices now.
///
/// # Errors
/// [`Kind::NotMeasured`](crate::Kind::NotMeasured) without a profile; cancellation.
pub fn cpu_time(
    devices: &Devices,
    with: &PlanWith<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<CpuTime> {
    let of = |site: &Site| load_profile(&site.spec, with.profile, dirs);
    let profiles = devices.sites.iter().map(of).collect::<Result<Vec<Profile>>>()?;
    let parts = devices.sites.iter().map(|site| &site.spec).zip(&profiles);
    cpu_room::measure(&devices.host, parts, dirs, progress)
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
    let scheduled = |knob: &Knob| {
        !matches!(knob, Knob::VmLimit { .. } | Knob::GuestElevator { .. } | Knob::GuestBfq { .. })
    };
    let elsewhere = |knob: &Knob| bytes(knob) || (site.stack.disks.is_empty() && scheduled(knob));
    let known: Vec<_> = plan.settings.iter().filter(|s| !elsewhere(&s.knob)).cloned().collect();
    Ok(check_actable(&site.spec, &options.placements, &options.start, &known)?)
}

/// Settings of a spec that are to be applied.
pub enum Wanted {
    /// A plan, the limits of the spec's `traffic` and its CPU contracts.
    All {
        /// A plan for each device, in the order of the sites.
        plan: HostPlan,
        /// The spec on this host.
        devices: Devices,
    },
    /// The limits of the spec's `traffic` alone.
    Traffic {
        /// The spec on this host.
        devices: Devices,
    },
    /// The CPU contracts of the spec alone, for which no device is searched.
    Cpu {
        /// The spec.
        host: HostSpec,
    },
}

impl Wanted {
    /// The spec.
    #[must_use]
    pub fn host(&self) -> &HostSpec {
        match self {
            Self::All { devices, .. } | Self::Traffic { devices } => &devices.host,
            Self::Cpu { host } => host,
        }
    }

    /// The plan that is applied, if any.
    #[must_use]
    pub fn plan(&self) -> Option<&HostPlan> {
        match self {
            Self::All { plan, .. } => Some(plan),
            Self::Traffic { .. } | Self::Cpu { .. } => None,
        }
    }

    fn devices(&self) -> Option<&Devices> {
        match self {
            Self::All { devices, .. } | Self::Traffic { devices } => Some(devices),
            Self::Cpu { .. } => None,
        }
    }

    /// The settings of each device.
    fn disk_plans(&self) -> Result<Vec<(Plan, &Site)>> {
        match self {
            Self::All { plan, devices } => {
                let sites = plan.devices.iter().zip(&devices.sites);
                sites.map(|(of, site)| Ok((traffic::with_limits(&of.plan, &site.spec)?, site))).collect()
            }
            Self::Traffic { devices } => {
                devices.sites.iter().map(|site| Ok((traffic::limits_only(&site.spec)?, site))).collect()
            }
            Self::Cpu { .. } => Ok(Vec::new()),
        }
    }

    fn admitted(
        &self,
        cpu_profiles: &[String],
        dirs: &Dirs,
        progress: &dyn Progress,
    ) -> Result<Option<Admitted>> {
        let of_vms = || contracts::of_vms(self.host().vms(), cpu_profiles, dirs, progress);
        match self {
            Self::All { .. } => of_vms(),
            Self::Traffic { .. } => Ok(None),
            Self::Cpu { .. } => match of_vms()? {
                None if !memory::is_asked(self.host()) => {
                    bail!(Argument, "no VM of the spec has `cpu`: there is nothing to apply")
                }
                admitted => Ok(admitted),
            },
        }
    }
}

/// The journal that has the budgets of the cgroups above those of managed VMs.
#[derive(Clone, Copy)]
pub enum Room<'a> {
    /// The journal of the contracts themselves: the returned writes raise the budgets.
    Own,
    /// Like `Own`, for the one journal of a host that also has what contracts share with others:
    /// interrupts of controllers, threads of the I/O domain. The one of `rtvirtio apply`.
    OwnAndHost,
    /// The one that all contracts share: [`resolve`] raises the budgets to what the new contracts
    /// need together with the listed ones, which are in force. Before, it refuses VMs of which
    /// another program than this holder holds settings.
    Shared(&'a Scopes<'a>, &'a [InForce], &'a Holder),
}

/// Settings of devices and CPU contracts of VMs, as writes on this host.
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

/// Everything that is to be written: the settings of each device, then the contract of each VM.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) when the contracts are more than the kernel
/// grants, [`Kind::Argument`](crate::Kind::Argument) for a spec without what is wanted of it;
/// [`Scopes::make_room`]; where the fair server is to be off and cannot be.
pub fn resolve(
    wanted: &Wanted,
    cpu_profiles: &[String],
    room: Room<'_>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Resolved> {
    let host = wanted.host();
    // VMs whose contract the service or an agent keeps.
    holders::refuse_names(host.vms().iter().map(|vm| vm.name.as_str()), &Holder::Apply, dirs)?;
    let admitted = wanted.admitted(cpu_profiles, dirs, progress)?;
    let found;
    let mut vms = if let Some(devices) = wanted.devices() {
        devices.host_vms()
    } else {
        found = find::of_host(host.vms(), dirs)?;
        found.iter().collect()
    };
    let (mut of_vms, mut held, mut probe) = (Vec::new(), Vec::new(), None);
    if let Some(admitted) = admitted {
        probe = Some(admitted.probe.clone());
        let taken = room.cpus_taken(&admitted, dirs)?;
        (of_vms, held) = contracts::writes(admitted, &vms, &taken, progress)?;
        let with_partition = held.iter().find(|of| of.partition.is_some()).map(|of| of.vm.as_str());
        refuse_next_to_service(with_partition, dirs)?;
    }
    let (with_memory, of_memory) = match wanted {
        Wanted::Traffic { .. } => (Vec::new(), Vec::new()),
        _ => memory::writes(host, &vms, matches!(room, Room::OwnAndHost), progress)?,
    };
    match wanted {
        Wanted::All { .. } | Wanted::Traffic { .. } => traffic::name_unset(host.vms().iter(), progress),
        Wanted::Cpu { .. } => {
            vms.retain(|vm| held.iter().any(|h| h.vm == vm.name) || with_memory.contains(&vm.name));
        }
    }
    let vms = started(vms.into_iter(), progress)?;
    let (mut writes, covered) = of_disks(&wanted.disk_plans()?)?;
    if let Some(probe) = probe {
        append(&mut writes, room.writes(&probe, &held, &vms)?);
        append(&mut writes, of_vms);
        // Contracts of several journals may have one controller, and one I/O domain.
        if matches!(room, Room::OwnAndHost) {
            let sites = wanted.devices().map(|devices| devices.sites.as_slice());
            append(&mut writes, engine_cpus::writes(&held, &vms, dirs, progress));
            append(&mut writes, interrupts::writes(host, sites, &held, dirs, progress));
            append(&mut writes, fair_server::writes(host, &held, dirs, progress)?);
        } else {
            contracts::refuse_partitions(&held)?;
            fair_server::warn_left(host, &held, progress);
        }
    }
    append(&mut writes, of_memory);
    if writes.is_empty() && matches!(wanted, Wanted::Traffic { .. }) {
        bail!(Argument, "no VM of the spec has `traffic` for its disks: there is nothing to apply");
    }
    Ok(Resolved { writes, held, vms, covered })
}

/// Checks that the CPU contracts of a spec can take the place of what the journal of `own` has,
/// which does not count: they are admitted, their VMs are found, and there are CPUs for them. VMs
/// of which another program than this holder has settings in `dirs` are refused: those with
/// contracts, with `disk` the others too. Returns how many contracts there are.
///
/// # Errors
/// As [`resolve`].
pub fn check_replacing(
    host: &HostSpec,
    own: &Dirs,
    holder: &Holder,
    dirs: &Dirs,
    disk: bool,
    progress: &dyn Progress,
) -> Result<usize> {
    let admitted = contracts::of_vms(host.vms(), &[], own, progress)?;
    let mut vms = find::of_host(host.vms(), own)?;
    let contracted = admitted.as_ref().map_or(&[][..], |admitted| &admitted.contracts);
    vms.retain(|vm| disk || contracted.iter().any(|one| one.vm == vm.name));
    if let Some(admitted) = &admitted {
        let taken = Room::OwnAndHost.cpus_taken(admitted, dirs)?;
        contracts::check_cpus(admitted, &vms, &own.state, &taken, progress)?;
    }
    holders::refuse(&started(vms.iter(), progress)?, holder, dirs)?;
    Ok(contracted.len())
}

/// The writes of the devices' settings, and the VMs that they cover.
fn of_disks(plans: &[(Plan, &Site)]) -> Result<(Vec<Write>, Vec<CoveredVm>)> {
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let mut writes = Vec::new();
    for (plan, site) in plans {
        merge(&mut writes, rtvirtio_apply::resolve(plan, &site.binding_for(plan)?, &machine)?)?;
    }
    Ok((writes, covered::covered_vms(plans.iter().map(|(plan, site)| (plan, *site)))))
}

/// The current start of each VM; none is left out that another program may have settings of.
fn started<'v>(vms: impl Iterator<Item = &'v HostVm>, progress: &dyn Progress) -> Result<Vec<StartedVm>> {
    let one = |vm: &HostVm| match StartedVm::find(vm, progress) {
        // A VM that does not run has no start.
        Err(e) if e.kind() == crate::Kind::NotRunning => None,
        found => found.transpose(),
    };
    vms.filter_map(one).collect()
}

impl Resolved {
    /// Every write as `path: old -> new`; nothing is changed.
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
            session.apply(&self.writes, &Machine::new(&root, &GuestAgents), &mut StopOnCancel::new(progress));
        if applied.is_err() {
            // A superfluous note is removed by the next step and has no effect until then.
            let _ = acting::settle(dirs);
        }
        match applied {
            Ok(applied) => {
                interrupts::report(&applied, progress);
                Ok(applied.knobs.len())
            }
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
pub fn apply_plan(plan: &Plan, site: &Site, dirs: &Dirs, progress: &dyn Progress) -> Result<usize> {
    let (writes, covered) = of_disks(&[(traffic::with_limits(plan, &site.spec)?, site)])?;
    let vms = started(site.host_vms(), progress)?;
    let host_plan = HostPlan::of_one(plan.clone());
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
    put_back_on(&Machine::new(&root, &GuestAgents), session, on_conflict, dirs)
}

/// Like [`put_back`], on a machine whose guests are reached in another way.
pub fn put_back_on(
    machine: &Machine<'_>,
    session: &Session,
    on_conflict: OnConflict,
    dirs: &Dirs,
) -> Result<Option<Reverted>> {
    let mut reverted = session.revert(on_conflict, machine, &mut Silent)?;
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
