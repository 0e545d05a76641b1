//! The compared schemes: each turns a spec into settings of the host.

use std::sync::Arc;

use rtvirtio_measure::fio::IoClass;
use rtvirtio_model::{Config, HostModel, Profile};
use rtvirtio_paper::PaperModels;
use rtvirtio_paper::search::{by_equations, by_network};
use rtvirtio_planner::{Placements, PlanError, PlanOptions, Space, plan};
use rtvirtio_spec::{Spec, Vm};
use rtvirtio_units::{Iops, Nanos, Ratio};

use crate::cases::servers::{Server, ServerPerVm};
use rtvirtio_learn::stage::Treatment;

/// The input of a scheme.
pub struct Basis<'a> {
    /// The VMs with their tasks and targets.
    pub spec: &'a Spec,
    /// Measurement of the device.
    pub profile: &'a Profile,
    /// The settings in force: BFQ with the kernel's defaults.
    pub baseline: &'a Config,
    /// Knobs that may be used here.
    pub space: &'a Space,
    pub learned: Option<&'a Arc<HostModel>>,
    /// The paper's models, fitted on this host.
    pub paper: &'a PaperModels,
    /// [`PlanOptions::enough`] of our schemes.
    pub enough: Option<Ratio>,
}

/// A way to choose settings.
pub trait Scheme {
    /// Id in results.
    fn name(&self) -> &'static str;

    /// Host settings for a spec.
    ///
    /// # Errors
    /// [`PlanError`] when its model does not cover the spec.
    fn treat(&self, basis: &Basis<'_>) -> Result<Treatment, PlanError>;
}

/// All schemes that need no measurement of their own, in the order of the paper's Fig. 8, then
/// ours.
#[must_use]
pub fn all() -> Vec<Box<dyn Scheme>> {
    vec![
        Box::new(DefaultBfq),
        Box::new(Ionice),
        Box::new(RtXen),
        Box::new(Planned::RtVirtioAnalytical),
        Box::new(Planned::RtVirtioMlp),
        Box::new(Planned::Slice),
        Box::new(Planned::Bound),
    ]
}

/// BFQ with the kernel's defaults.
pub struct DefaultBfq;

impl Scheme for DefaultBfq {
    fn name(&self) -> &'static str {
        "default-bfq"
    }

    fn treat(&self, basis: &Basis<'_>) -> Result<Treatment, PlanError> {
        Ok(Treatment::knobs(basis.baseline.clone()))
    }
}

/// The paper's `ionice` scheme: the most urgent VM in the real-time class, the others best effort
/// by their targets. All VMs share one cgroup, because under BFQ a class acts only inside one.
pub struct Ionice;

impl Scheme for Ionice {
    fn name(&self) -> &'static str {
        "ionice"
    }

    fn treat(&self, basis: &Basis<'_>) -> Result<Treatment, PlanError> {
        let mut classes = vec![IoClass::BestEffort(7); basis.spec.vms.len()];
        for (rank, vm) in by_urgency(basis.spec).into_iter().enumerate() {
            classes[vm] = match rank {
                0 => IoClass::RealTime(0),
                _ => IoClass::BestEffort(u8::try_from(rank - 1).unwrap_or(7).min(7)),
            };
        }
        Ok(Treatment { config: basis.baseline.clone(), classes: Some(classes), regulator: None })
    }
}

/// The mimic of RT-Xen: a budget server per VM, rate-monotonic order by weights.
pub struct RtXen;

/// Weight of the server with the shortest period; each next one has half of it. Rate-monotonic
/// scheduling asks for an order only, and weights are the only order between cgroups on a stock
/// kernel.
const FIRST_WEIGHT: u32 = 1000;

/// Period of a VM without a target: a background server.
const BACKGROUND: Nanos = Nanos(100_000_000);

/// Largest budget over the declared rate.
const MOST_SLACK: f64 = 2.0;

/// Share of the device that all background servers may use together. RT-Xen leaves unused time of
/// its servers unused.
const BACKGROUND_SHARE: f64 = 0.2;

impl Scheme for RtXen {
    fn name(&self) -> &'static str {
        "rt-xen"
    }

    fn treat(&self, basis: &Basis<'_>) -> Result<Treatment, PlanError> {
        let most = basis.profile.read.iter().map(|p| p.iops.0).fold(0.0, f64::max);
        let spec = basis.spec;
        let background = spec.vms.iter().filter(|vm| vm.tightest_target().is_none()).count();
        let mut config = basis.baseline.clone();
        // Raising would override the order of the weights.
        config.bfq.low_latency = false;
        let rate = |vm: &Vm| vm.declared_rate().0;
        let all: f64 = spec.vms.iter().filter(|vm| vm.tightest_target().is_some()).map(rate).sum();
        // The undeclared rest of the device is the servers' slack, as in an analysis of their
        // interfaces: a late VM catches up with it.
        let available = if background > 0 { 1.0 - BACKGROUND_SHARE } else { 1.0 };
        let slack = (available * most / all.max(1.0)).clamp(1.0, MOST_SLACK);
        let mut servers = Vec::new();
        for vm in &spec.vms {
            servers.push(match vm.tightest_target() {
                Some(target) => Server::for_target(target, Iops(rate(vm) * slack)),
                None => {
                    // In requests of its own size: time per byte counts in full, as the profile
                    // does not separate it.
                    let size = vm.tasks.iter().map(|t| t.block.0).max().unwrap_or(1) as f64;
                    let smaller = (basis.profile.block.0 as f64 / size).min(1.0);
                    let rate = most * BACKGROUND_SHARE * smaller / background.max(1) as f64;
                    Server { budget: (rate * BACKGROUND.as_secs_f64()).ceil() as u64, period: BACKGROUND }
                }
            });
        }
        let mut order: Vec<usize> = (0..servers.len()).collect();
        order.sort_by_key(|&i| (servers[i].period, i));
        for (rank, &vm) in order.iter().enumerate() {
            config.vms[vm].weight = (FIRST_WEIGHT >> rank.min(9)).max(1);
        }
        Ok(Treatment { config, classes: None, regulator: Some(Arc::new(ServerPerVm(servers))) })
    }
}

/// Schemes that plan with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planned {
    /// The paper's search with its equations.
    RtVirtioAnalytical,
    /// The paper's search with its network.
    RtVirtioMlp,
    /// Our search with the slice model.
    Slice,
    /// Our search with the learned upper bound.
    Bound,
}

impl Scheme for Planned {
    fn name(&self) -> &'static str {
        match self {
            Self::RtVirtioAnalytical => "rt-virtio-analytical",
            Self::RtVirtioMlp => "rt-virtio-mlp",
            Self::Slice => "slice",
            Self::Bound => "bound",
        }
    }

    fn treat(&self, basis: &Basis<'_>) -> Result<Treatment, PlanError> {
        let options = self.options(basis)?;
        let Basis { spec, profile, .. } = *basis;
        Ok(Treatment::knobs(match self {
            Self::RtVirtioAnalytical => by_equations(spec, profile, &options, basis.paper)?,
            Self::RtVirtioMlp => by_network(spec, profile, &options, basis.paper)?,
            Self::Slice | Self::Bound => plan(spec, profile, &options)?.config(spec, basis.baseline)?,
        }))
    }
}

impl Planned {
    /// Options of the planner's search.
    ///
    /// # Errors
    /// When nothing was learned on this host and the scheme needs it.
    pub fn options(self, basis: &Basis<'_>) -> Result<PlanOptions, PlanError> {
        let start = basis.baseline.clone();
        let learned = || basis.learned.cloned().ok_or(rtvirtio_model::ModelError::NotLearned);
        let ours = |options: PlanOptions| PlanOptions {
            space: basis.space.clone(),
            enough: basis.enough,
            ..options
        };
        let mut options = match self {
            Self::RtVirtioAnalytical | Self::RtVirtioMlp => rtvirtio_paper::search::options(start),
            Self::Slice => ours(PlanOptions::new(start)),
            Self::Bound => ours(PlanOptions::bound(start, learned()?)),
        };
        options.placements = Placements::default();
        Ok(options)
    }
}

/// VMs with targets, most urgent first.
fn by_urgency(spec: &Spec) -> Vec<usize> {
    let mut order: Vec<(Nanos, usize)> =
        spec.vms.iter().enumerate().filter_map(|(i, vm)| vm.tightest_target().map(|t| (t, i))).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, i)| i).collect()
}
