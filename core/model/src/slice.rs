//! The slice model: waiting time of a request under each host elevator.
//!
//! Two regimes. While BFQ idles ([`idling`]) it gives the device to one queue at a time and a
//! request waits for the others' *slices*. Otherwise ([`fifo`]) requests share the device and each
//! waits for the others' *requests*. Both add the device's own stalls and the part of guest and
//! VMM. Formulas and their validation: `docs/explanation/models.md`.

mod fifo;
mod idling;
mod phases;

use rtvirtio_spec::Spec;

use crate::device::{Device, MIN_SLACK};
use crate::flow::Flow;
use crate::guest::{CpuLoad, overhead, overhead_statistic, round_trip};
use crate::load::{flows, is_guest};
use crate::saturation::{Kind, kinds};
use crate::tail_model::{by_goal, check_config, check_syncs, further_targets};
use crate::terms::{Sum, Terms, Total};
use crate::types::{Brief, Config, Elevator, Forecast, Profile, Side};
use crate::{ModelError, TailModel};

use phases::{Share, Unchecked, recovered, without_bursts};

/// The slice model. It covers every elevator and needs no coefficients beyond its named constants.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slice;

/// Length of a run over which the lateness of a saturated task is counted, s. A task that keeps a
/// share k of its rate is (1 - k) * HORIZON late at its end, counted from the intended start:
/// large, finite, and falling with k.
pub(crate) const HORIZON: f64 = 60.0;

/// Name of the term that is counted over [`HORIZON`].
pub(crate) const BACKLOG: &str = "backlog";

/// Prediction of one regime for one task, times in s.
#[derive(Default)]
struct Wait {
    own_vm: f64,
    other_vms: f64,
    /// Share of the offered rate that gets through, at most 1.
    kept: f64,
    /// Spare share of the rate the task could have, for working off a stall's backlog.
    slack: f64,
    /// Service time of the request itself.
    service: f64,
}

/// Whether per-VM weights change anything under this configuration: without BFQ's idling the device
/// decides the order.
#[must_use]
pub fn weights_act(spec: &Spec, config: &Config) -> bool {
    spec.vms.len() > 1 && idling::acts(spec, config)
}

impl TailModel for Slice {
    fn forecast_tasks(
        &self,
        profile: &Profile,
        spec: &Spec,
        config: &Config,
    ) -> Result<Vec<Forecast>, ModelError> {
        check_config(spec, config)?;
        check_syncs(profile, spec)?;
        let device = Device::new(profile, config.elevator == Elevator::Bfq)?;
        Ok(tails::<Sum>(profile, spec, config, &device))
    }
}

/// The slice model for many configurations of the same tasks: the profile is evaluated once, and no
/// terms are kept.
pub struct SliceSearch<'a> {
    profile: &'a Profile,
    spec: &'a Spec,
    /// Specs with the further targets of tasks that have several.
    rest: Vec<Spec>,
    /// The device under BFQ, and under the other elevators.
    with_bfq: Device,
    without: Device,
}

impl<'a> SliceSearch<'a> {
    pub fn new(profile: &'a Profile, spec: &'a Spec) -> Result<Self, ModelError> {
        check_syncs(profile, spec)?;
        Ok(Self {
            profile,
            spec,
            rest: further_targets(spec),
            with_bfq: Device::new(profile, true)?,
            without: Device::new(profile, false)?,
        })
    }

    /// The forecasts of [`Slice`], in the order of [`Spec::goals`], without their terms.
    pub fn briefs(&self, config: &Config) -> Result<Vec<Brief>, ModelError> {
        check_config(self.spec, config)?;
        let device = if config.elevator == Elevator::Bfq { &self.with_bfq } else { &self.without };
        let of = |spec: &Spec| tails::<Total>(self.profile, spec, config, device);
        if self.rest.is_empty() {
            return Ok(of(self.spec));
        }
        let layers = std::iter::once(self.spec).chain(&self.rest).map(of).collect();
        Ok(by_goal(self.spec, layers))
    }
}

/// Forecasts of every task, in spec order.
fn tails<T: Terms>(profile: &Profile, spec: &Spec, config: &Config, device: &Device) -> Vec<T::Whole> {
    let flows = flows(spec, config, device);
    let cpu = CpuLoad::new(profile, spec, config, &flows);
    let regime = |flows: &[Flow]| {
        if idling::acts(spec, config) {
            idling::waits(spec, config, flows)
        } else {
            fifo::waits(spec, config, flows)
        }
    };
    let waits = regime(&flows);
    // Neighbours with bursts are active and idle for equal times.
    let burst = spec.tasks().filter(|(_, t)| t.rate.is_none()).filter_map(|(_, t)| t.busy_period()).max();
    let resting = burst.map(|b| (b.as_secs_f64(), regime(&without_bursts(spec, &flows))));
    let unchecked = Unchecked::from_flows(&flows, &regime);
    let mut saturated = Saturated::from_flows(spec, config, &flows, device);
    let mut out = Vec::with_capacity(flows.len());
    for (i, (flow, wait)) in flows.iter().zip(&waits).enumerate() {
        let vm = &spec.vms[flow.vm];
        let mut sum = T::default();
        if is_guest(vm) {
            sum.add(Side::Guest, "virtualization", overhead(profile, vm, &cpu, flow.exceedance));
            sum.note_statistic(|| overhead_statistic(profile, flow.exceedance));
            sum.add(Side::Guest, "other-tasks", idling::guest_wait(config, &flows, i));
        }
        sum.add(Side::Host, "own-service", wait.service);
        sum.add(Side::Host, "own-vm", wait.own_vm);
        sum.add(Side::Host, "other-vms", wait.other_vms);
        let (cap, cap_slack) = cap_wait(config, &flows, flow);
        sum.add(Side::Host, "cap", cap);
        let slack = wait.slack.min(cap_slack).max(MIN_SLACK);
        let stall = device.stall(flow.access, flow.exceedance, slack);
        let full = saturated.latency(flow.exceedance) - wait.own_vm - wait.other_vms;
        sum.add(Side::Host, "device", (stall.max(full) - wait.service).max(0.0));
        sum.note_statistic(|| {
            if full > stall {
                "latencies with as many in flight as the floods have".to_owned()
            } else {
                device.stall_statistic(flow.access, flow.exceedance, slack)
            }
        });
        let reach = flow.depth / (flow.service + round_trip(profile, vm)) / flow.rate.max(f64::MIN_POSITIVE);
        let limited = |of: &Wait| Share {
            kept: (of.kept * cpu.kept() * flow.through_cap).min(reach),
            slack: of.slack.min(cap_slack).min(1.0 - 1.0 / reach),
        };
        let (mut kept, mut catch_up) = (1.0, 0.0);
        if flow.declared {
            kept = limited(wait).kept;
            // A task whose cap is below its rate falls behind by that, whatever the neighbours do.
            if let (Some(unchecked), None) = (&unchecked, flow.allowed) {
                let over = resting.as_ref().map_or(HORIZON, |(length, _)| *length);
                (kept, catch_up) = unchecked.lateness(i, over, limited);
            }
            if let Some((length, rest)) = &resting {
                let owed;
                (kept, owed) = recovered(kept, limited(&rest[i]), (*length, *length));
                catch_up += owed;
            }
        }
        sum.add(Side::Host, "catch-up", catch_up);
        sum.add(Side::Host, BACKLOG, (1.0 - kept.min(1.0)) * HORIZON);
        out.push(sum.whole(kept));
    }
    out
}

/// Measured tail of the device while floods fill it.
struct Saturated<'a> {
    device: &'a Device,
    floods: Vec<Kind>,
    /// Results by exceedance: most tasks have the same percentile.
    known: Vec<(f64, f64)>,
}

impl<'a> Saturated<'a> {
    /// No floods while BFQ idles: they then wait for their slices.
    fn from_flows(spec: &Spec, config: &Config, flows: &[Flow], device: &'a Device) -> Self {
        let floods = if idling::acts(spec, config) { Vec::new() } else { kinds(flows) };
        Self { device, floods, known: Vec::new() }
    }

    /// Latency above which a share `exceedance` of requests lies, s; 0 without floods.
    fn latency(&mut self, exceedance: f64) -> f64 {
        if let Some((_, latency)) = self.known.iter().find(|(e, _)| *e == exceedance) {
            return *latency;
        }
        let of = |kind: &Kind| self.device.saturation_tails.latency(kind, exceedance);
        let latency = self.floods.iter().map(of).fold(0.0, f64::max);
        self.known.push((exceedance, latency));
        latency
    }
}

/// Wait by a VM's own cap, s, and the share of the cap that is spare for catching up.
///
/// On average the VM's requests are 1 / cap apart once they come faster, so a request may wait for
/// one of each other task of its VM; with a rate close to the cap a backlog is worked off slowly.
/// Both vanish for a cap far above the rate. Not modelled: blk-throttle counts by slices, and a VM
/// that has used up its allowance may wait for the next one. The planner limits VMs with targets
/// only where it gives these up.
fn cap_wait(config: &Config, flows: &[Flow], flow: &Flow) -> (f64, f64) {
    let Some(cap) = config.vms[flow.vm].cap else { return (0.0, 1.0) };
    let (mut rate, mut ahead) = (0.0, 0.0);
    for f in flows.iter().filter(|f| f.vm == flow.vm) {
        rate += f.rate;
        ahead += f.depth;
    }
    (ahead / cap.0, 1.0 - (rate / cap.0).min(1.0))
}

#[cfg(test)]
mod burst_tests;
#[cfg(test)]
mod statistic_tests;
#[cfg(test)]
mod task_tests;
#[cfg(test)]
mod tests;
