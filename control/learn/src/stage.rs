//! The stage: VMs on which settings are applied, measured and put back, one run after the other.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_apply::{ApplyError, Binding, Guests, Machine, OnConflict, Session, Silent, resolve};
use rtvirtio_kernel::{HostError, Root};
use rtvirtio_measure::VmKind;
use rtvirtio_measure::fio::IoClass;
use rtvirtio_measure::workload::{self, Measured, Place, RunOptions, WorkloadError};
use rtvirtio_model::{Config, ModelKind};
use rtvirtio_planner::{Plan, Setting, settings_of};
use rtvirtio_spec::Spec;
use rtvirtio_workflow::traffic::with_limits;

use crate::rig::{Regulator, RegulatorError, Rig, RigError};

/// Warm-up of a run of process VMs: opens files and fills queues. Guests use [`workload::WARM_UP`].
const WARM_UP: Duration = Duration::from_secs(1);

/// Settings of the host for one run.
#[derive(Clone, Debug)]
pub struct Treatment {
    /// Knobs of host, VMs and guests.
    pub config: Config,
    /// I/O class per VM; all VMs then share one cgroup, because BFQ's classes do not act between
    /// groups.
    pub classes: Option<Vec<IoClass>>,
    /// Regulator of the VMs while their tasks run.
    pub regulator: Option<Arc<dyn Regulator>>,
}

/// Two regulators are equal only if they are the same instance.
impl PartialEq for Treatment {
    fn eq(&self, other: &Self) -> bool {
        let regulators = match (&self.regulator, &other.regulator) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        regulators && self.config == other.config && self.classes == other.classes
    }
}

impl Treatment {
    /// Treatment without I/O classes and regulator.
    #[must_use]
    pub fn knobs(config: Config) -> Self {
        Self { config, classes: None, regulator: None }
    }
}

/// Errors of a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// Settings cannot be applied or put back.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A setting could not be put back: a further run would measure under unknown settings.
    #[error(
        "not all settings could be put back after a run: `rtvirtio revert` puts them back, or `rtvirtio-lab down` those of a lab"
    )]
    NotReverted,
    /// The tasks could not be run.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The VMs cannot be used.
    #[error(transparent)]
    Rig(#[from] RigError),
    /// A kernel file cannot be read or written.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The regulator did not start.
    #[error(transparent)]
    Regulator(#[from] RegulatorError),
    /// The limits of the spec's `traffic` cannot be planned.
    #[error(transparent)]
    Traffic(rtvirtio_workflow::Error),
    /// The load has more VMs than the rig.
    #[error("the load has {asked} VMs, there are {there}")]
    TooManyVms {
        /// Number of VMs of the load.
        asked: usize,
        /// Number of VMs of the rig.
        there: usize,
    },
}

impl From<StageError> for rtvirtio_workflow::Error {
    fn from(e: StageError) -> Self {
        match e {
            StageError::Apply(e) => e.into(),
            StageError::Traffic(e) => e,
            e if e.is_cancelled() => Self::cancelled(),
            e => Self::from_source(rtvirtio_workflow::Kind::System, e),
        }
    }
}

impl StageError {
    /// Whether the user stopped the run.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        match self {
            Self::Workload(e) => e.is_cancelled(),
            Self::Rig(RigError::Cancelled) => true,
            _ => false,
        }
    }
}

/// Length and seed of a run.
#[derive(Clone, Copy)]
pub struct RunPlan<'a> {
    /// Length of the measured part.
    pub length: Duration,
    /// Seed of the addresses.
    pub seed: u64,
    /// Set to cancel the run.
    pub cancel: &'a AtomicBool,
}

/// VMs, with access to their settings.
pub struct Stage<'a> {
    rig: &'a dyn Rig,
    binding: Binding,
    /// Settings while no treatment is applied.
    baseline: Config,
    guests: &'a dyn Guests,
    session: Session,
    work_dir: PathBuf,
    awake: bool,
    fresh: bool,
}

impl<'a> Stage<'a> {
    /// A stage on `rig`, whose current settings are `baseline`. The journal is in `state_dir`,
    /// fio's files in `work_dir`.
    ///
    /// # Errors
    /// When the device cannot be found, or the state directory is in use.
    pub fn new(
        rig: &'a dyn Rig,
        baseline: Config,
        guests: &'a dyn Guests,
        state_dir: &Path,
        work_dir: &Path,
    ) -> Result<Self, StageError> {
        Ok(Self {
            binding: rig.binding()?,
            rig,
            baseline,
            guests,
            session: Session::open(state_dir)?,
            work_dir: work_dir.to_owned(),
            awake: false,
            fresh: false,
        })
    }

    /// Sets whether every run begins with a new instance of the elevator: BFQ carries the service
    /// owed to a VM's group over to the next run, at the weight of the old one. Only for devices
    /// created by this process: a kill while it is renewed leaves the elevator `none`.
    #[must_use]
    pub fn fresh(self, fresh: bool) -> Self {
        Self { fresh, ..self }
    }

    /// Sets whether the CPUs are kept from idle states ([`rtvirtio_measure::pm_qos`]), as recorded
    /// with a run.
    #[must_use]
    pub fn awake(self, awake: bool) -> Self {
        Self { awake, ..self }
    }

    /// Kind of the VMs.
    #[must_use]
    pub fn kind(&self) -> VmKind {
        self.rig.kind()
    }

    /// Applies the settings and the limits of the spec's `traffic`, runs its tasks on the first
    /// VMs, and puts the settings back, also when the run fails.
    ///
    /// # Errors
    /// [`StageError`]. After [`StageError::NotReverted`] no further run makes sense.
    pub fn run(&self, spec: &Spec, treatment: &Treatment, plan: RunPlan<'_>) -> Result<Measured, StageError> {
        let there = self.rig.vms();
        if spec.vms.len() > there {
            return Err(StageError::TooManyVms { asked: spec.vms.len(), there });
        }
        let mut start = self.baseline.clone();
        start.vms.truncate(spec.vms.len());
        self.run_settings(spec, settings_of(spec, &start, &treatment.config), treatment, plan)
    }

    /// Runs as [`Self::run`] does under settings that no configuration describes, such as those of
    /// io.cost; that of the treatment is not used.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_settings(
        &self,
        spec: &Spec,
        settings: Vec<Setting>,
        treatment: &Treatment,
        plan: RunPlan<'_>,
    ) -> Result<Measured, StageError> {
        let root = Root::default();
        // A guest's agent serves one client at a time and the load needs it too: the machine is
        // dropped before the load starts.
        let machine = || Machine::new(&root, self.guests);
        if self.fresh {
            // Restores the kernel's default elevator, which is the baseline of a created device.
            let baseline = self.baseline.elevator.name();
            self.binding.stack.disks.iter().try_for_each(|disk| disk.renew_elevator(&root, baseline))?;
        }
        let applying = machine();
        let settings = with_limits(&bare_plan(settings), spec);
        let writes = resolve(&settings.map_err(StageError::Traffic)?, &self.binding, &applying)?;
        self.session.apply(&writes, &applying, &mut Silent)?;
        drop(applying);
        let observed = self.observe(spec, treatment, plan);
        let reverted = self.session.revert(OnConflict::Force, &machine(), &mut Silent)?;
        match observed {
            Ok(_) if reverted.is_some_and(|r| !r.done) => Err(StageError::NotReverted),
            other => other,
        }
    }

    fn observe(&self, spec: &Spec, treatment: &Treatment, plan: RunPlan<'_>) -> Result<Measured, StageError> {
        let mut loads = self.rig.loads(spec)?;
        if let Some(classes) = &treatment.classes {
            let shared = loads.first().map(|l| l.place.clone());
            for (load, class) in loads.iter_mut().zip(classes) {
                load.io_class = Some(*class);
                if let (Place::Host { cgroup_procs, .. }, Some(Place::Host { cgroup_procs: first, .. })) =
                    (&mut load.place, &shared)
                {
                    cgroup_procs.clone_from(first);
                }
            }
        }
        let regulating = match &treatment.regulator {
            Some(regulator) => Some(regulator.start(&self.binding, spec)?),
            None => None,
        };
        let disk = self.binding.stack.device.sysfs();
        let mut options = RunOptions {
            length: plan.length,
            warm_up: if self.kind() == VmKind::Qemu { workload::WARM_UP } else { WARM_UP },
            seed: plan.seed,
            watch: true,
            disk: Some(&disk),
            work_dir: &self.work_dir,
            cancel: plan.cancel,
            on_tick: &mut |_| {},
            on_moment: &mut |_| {},
        };
        let measured = workload::measure(&loads, &mut options);
        // Lifts the regulator's limits before the settings are put back.
        drop(regulating);
        let _ = std::fs::remove_dir(&self.work_dir);
        let mut measured = measured?;
        if let Some(noise) = &mut measured.noise {
            noise.awake = self.awake;
        }
        Ok(measured)
    }
}

/// Reverts the settings of a killed process by the journal in its `state_dir`; `false` when there
/// is none. Must be called before the settings are read and before new VMs are created: the cgroups
/// of the old ones hold some of them.
///
/// # Errors
/// When the journal cannot be used, and [`StageError::NotReverted`].
pub fn revert_leftovers(state_dir: &Path, guests: &dyn Guests) -> Result<bool, StageError> {
    let root = Root::default();
    let session = Session::open(state_dir)?;
    let reverted = session.revert(OnConflict::Force, &Machine::new(&root, guests), &mut Silent)?;
    match reverted {
        Some(reverted) if !reverted.done => Err(StageError::NotReverted),
        found => Ok(found.is_some()),
    }
}

/// A plan with settings alone.
fn bare_plan(settings: Vec<Setting>) -> Plan {
    Plan {
        scheme: "bench".to_owned(),
        model: ModelKind::Slice,
        settings,
        tasks: Vec::new(),
        feasible: true,
        infeasible: None,
        evaluated: 0,
    }
}
