//! The stage: a lab on which one setting after the other is applied, measured and put back.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_apply::{ApplyError, Binding, Guests, Machine, OnConflict, Session, Silent, VmBinding, resolve};
use rtvirtio_kernel::{BlockDevice, Cgroups, HostError, Root};
use rtvirtio_measure::VmKind;
use rtvirtio_measure::fio::IoClass;
use rtvirtio_model::{Config, ModelKind};
use rtvirtio_planner::{PLAN_SCHEMA, Plan, settings_of};
use rtvirtio_spec::Spec;
use rtvirtio_testbed::workload::{self, Measured, Place, RunOptions, WorkloadError};
use rtvirtio_testbed::{Lab, LabError};

use crate::servers::{Server, Servers};

/// Warm-up of a run of process VMs: files are opened and queues filled. Guests take [`workload::WARM_UP`].
const WARM_UP: Duration = Duration::from_secs(1);

/// What is done to the host for one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Treatment {
    /// Knobs of host, VMs and guests.
    pub config: Config,
    /// I/O class per VM; all VMs then share one cgroup, because BFQ's classes do not act between groups.
    pub classes: Option<Vec<IoClass>>,
    /// A budget server per VM that holds its I/O back while its budget is used up.
    pub servers: Option<Vec<Server>>,
}

impl Treatment {
    /// Only knobs.
    #[must_use]
    pub fn knobs(config: Config) -> Self {
        Self { config, classes: None, servers: None }
    }
}

/// Why a run has no outcome.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The settings.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A setting that could not be put back: going on would measure under unknown settings.
    #[error("not all settings could be put back after a run; `rtvirtio lab down` puts them back")]
    NotReverted,
    /// The tasks.
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    /// The lab.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// A kernel file.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The budget servers.
    #[error("cannot start a thread for the budget servers: {0}")]
    Thread(std::io::Error),
    /// More VMs than the lab has.
    #[error("the load has {asked} VMs, the lab {there}")]
    TooManyVms {
        /// VMs of the load.
        asked: usize,
        /// VMs of the lab.
        there: usize,
    },
}

impl StageError {
    /// Whether the user stopped the run.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Workload(e) if e.is_cancelled())
            || matches!(self, Self::Lab(LabError::Cancelled))
    }
}

/// How a run goes.
pub struct RunPlan<'a> {
    /// Length of the measured part.
    pub length: Duration,
    /// Seed of the addresses.
    pub seed: u64,
    /// Set by anyone to stop.
    pub cancel: &'a AtomicBool,
    /// Called about ten times a second with the time since the start.
    pub on_tick: &'a mut dyn FnMut(Duration),
}

/// A lab that is up, with what is needed to change its settings.
pub struct Stage<'a> {
    lab: &'a Lab,
    binding: Binding,
    /// The settings of the lab when nothing is applied.
    baseline: Config,
    guests: &'a dyn Guests,
    session: Session,
    work_dir: PathBuf,
    kind: VmKind,
    awake: bool,
    fresh: bool,
}

impl<'a> Stage<'a> {
    /// A stage on `lab`, whose settings are `baseline` now. The journal lies in `state_dir`.
    ///
    /// # Errors
    /// When the device or the cgroups of the lab are not there, or the state directory is in use.
    pub fn new(
        lab: &'a Lab,
        baseline: Config,
        guests: &'a dyn Guests,
        state_dir: &Path,
        work_dir: &Path,
    ) -> Result<Self, StageError> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        let vms = lab.state().vms.iter().map(|vm| {
            let binding = VmBinding {
                cgroup: Some(vm.cgroup.clone()),
                agent: vm.qemu.as_ref().map(|q| q.agent_socket()),
                guest_disk: vm.qemu.as_ref().map(|_| "vda".to_owned()),
            };
            (vm.name.clone(), binding)
        });
        let vms = vms.collect();
        let binding =
            Binding { device: BlockDevice::find(&root, lab.device())?, cgroups: Some(cgroups), vms };
        let guest = lab.state().vms.iter().any(|vm| vm.qemu.is_some());
        Ok(Self {
            lab,
            binding,
            baseline,
            guests,
            session: Session::open(state_dir)?,
            work_dir: work_dir.to_owned(),
            kind: if guest { VmKind::Qemu } else { VmKind::Process },
            awake: false,
            fresh: false,
        })
    }

    /// Whether every run begins with a new instance of the elevator: BFQ keeps what a VM's group owes beyond a run, at the weight of that run. Only for
    /// devices that are made, because a kill in between leaves none.
    #[must_use]
    pub fn fresh(self, fresh: bool) -> Self {
        Self { fresh, ..self }
    }

    /// Says whether the CPUs are kept from sleeping ([`rtvirtio_measure::awake`]), for what is written about a run.
    #[must_use]
    pub fn awake(self, awake: bool) -> Self {
        Self { awake, ..self }
    }

    /// What the lab's VMs are.
    #[must_use]
    pub fn kind(&self) -> VmKind {
        self.kind
    }

    /// Applies the settings, runs the tasks of `spec` on the lab's first VMs, and puts the settings back, also when the run fails.
    ///
    /// # Errors
    /// [`StageError`]. After [`StageError::NotReverted`] no further run makes sense.
    pub fn run(
        &self,
        spec: &Spec,
        treatment: &Treatment,
        plan: &mut RunPlan<'_>,
    ) -> Result<Measured, StageError> {
        let there = self.lab.state().vms.len();
        if spec.vms.len() > there {
            return Err(StageError::TooManyVms { asked: spec.vms.len(), there });
        }
        let root = Root::default();
        // A guest's agent serves one client at a time, and the load is its second one: nobody may hold it while that runs.
        let machine = || Machine::new(&root, self.guests);
        if self.fresh {
            // With the kernel's defaults, as the baseline of a made device is.
            self.binding.device.renew_elevator(&root, self.baseline.elevator.name())?;
        }
        let mut start = self.baseline.clone();
        start.vms.truncate(spec.vms.len());
        let applying = machine();
        let writes = resolve(&bare_plan(spec, &start, &treatment.config), &self.binding, &applying)?;
        self.session.apply(&writes, &applying, &mut Silent)?;
        drop(applying);
        let observed = self.observe(spec, treatment, plan);
        let reverted = self.session.revert(OnConflict::Force, &machine(), &mut Silent)?;
        match observed {
            Ok(_) if reverted.is_some_and(|r| !r.done) => Err(StageError::NotReverted),
            other => other,
        }
    }

    fn observe(
        &self,
        spec: &Spec,
        treatment: &Treatment,
        plan: &mut RunPlan<'_>,
    ) -> Result<Measured, StageError> {
        let mut loads = self.lab.loads(spec)?;
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
        let servers = match &treatment.servers {
            Some(servers) => Some(Servers::start(servers, &self.binding, spec)?),
            None => None,
        };
        let disk = self.binding.device.sysfs();
        let mut options = RunOptions {
            length: plan.length,
            warm_up: if self.kind == VmKind::Qemu { workload::WARM_UP } else { WARM_UP },
            seed: plan.seed,
            watch: true,
            disk: Some(&disk),
            work_dir: &self.work_dir,
            cancel: plan.cancel,
            on_tick: plan.on_tick,
        };
        let measured = workload::measure(&loads, &mut options);
        // Its limits are lifted before the settings are put back.
        drop(servers);
        let _ = std::fs::remove_dir(&self.work_dir);
        let mut measured = measured?;
        if let Some(noise) = &mut measured.noise {
            noise.awake = self.awake;
        }
        Ok(measured)
    }
}

/// A plan that holds nothing but the settings from `start` to `config`.
fn bare_plan(spec: &Spec, start: &Config, config: &Config) -> Plan {
    Plan {
        schema: PLAN_SCHEMA.to_owned(),
        scheme: "bench".to_owned(),
        model: ModelKind::Slice,
        settings: settings_of(spec, start, config),
        tasks: Vec::new(),
        feasible: true,
        infeasible: None,
        evaluated: 0,
        spec_file: None,
    }
}
