//! The analytical model of the RT-VirtIO paper: equations (1) to (5) with the coefficients of its
//! Table III.
//!
//! Units here: sizes in KiB (the paper's "KB": its 8192 KB are BFQ's 16 * 1024 sectors of 512 B),
//! throughput in KiB/s, time in s. The paper's A is the total of one second, so A / T is a time.
//! Every choice that the paper leaves open is explained in `docs/explanation/models.md`.

use rtvirtio_spec::{Spec, Task, Vm};
use rtvirtio_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::flow::Flow;
use crate::guest::{CpuLoad, overhead, overhead_statistic};
use crate::load::{flows, is_guest};
use crate::tail_model::{check_bursts, check_config, check_syncs};
use crate::terms::{Sum, Terms};
use crate::types::{Bfq, Config, Elevator, Forecast, Profile, Side};
use crate::{ModelError, TailModel};

/// Two readings of E(SI), the effect of `slice_idle` on throughput.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SliceIdleEffect {
    /// `1 - lambda * SI / SI_default`: less idling, more throughput, as the paper's text says.
    /// Equal to the printed form at SI = default and without effect for lambda towards 0, as its
    /// Table III has for the guest.
    #[default]
    Corrected,
    /// `(1 - lambda) * SI / SI_default` as printed: less idling gives *less* throughput, none at
    /// all for SI = 0, and a lambda of 1e-6 gives the guest's `slice_idle` its largest effect. Kept
    /// to show the contradiction; not for planning.
    AsPrinted,
}

/// Influence coefficients lambda, dimensionless, one for each knob of the equations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// Lambda of the weight, eqs. (3) and (5).
    pub weight: f64,
    /// Lambda of the guest's `timeout_sync`.
    pub guest_timeout: f64,
    /// Lambda of the guest's `slice_idle`.
    pub guest_idle: f64,
    /// Lambda of the host's `timeout_sync`.
    pub host_timeout: f64,
    /// Lambda of the host's `slice_idle`.
    pub host_idle: f64,
}

impl Coefficients {
    /// Table III of the paper.
    pub const TABLE_III: Self =
        Self { weight: 0.36, guest_timeout: 1e-6, guest_idle: 1e-6, host_timeout: 0.7, host_idle: 0.5 };
}

/// The paper's model, equations (1) to (5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Analytical {
    /// Lambda of each knob.
    pub coefficients: Coefficients,
    /// Form of E(SI) that is computed.
    pub slice_idle_effect: SliceIdleEffect,
}

impl Default for Analytical {
    fn default() -> Self {
        Self { coefficients: Coefficients::TABLE_III, slice_idle_effect: SliceIdleEffect::Corrected }
    }
}

/// SI_default of the paper and of block/bfq-iosched.c (`bfq_slice_idle`), s.
const SLICE_IDLE_DEFAULT: f64 = 0.008;

/// B_max of Table I, KiB: `bfq_default_max_budget` = 16 * 1024 sectors in block/bfq-iosched.c.
const BUDGET_MAX_KIB: f64 = 8192.0;

/// Least cost of a switch between queues, s: BFQ's own time per request (1.9 us,
/// Documentation/block/bfq-iosched.rst).
const SWITCH_FLOOR: f64 = 1.9e-6;

/// E(SI) never falls to zero: a slice idle beyond default / lambda would stop the device for good.
/// Bounds each term at 1000 times its value without idling.
const IDLE_EFFECT_FLOOR: f64 = 1e-3;

impl Analytical {
    /// E(SI), dimensionless: the share of the throughput that idling leaves.
    #[must_use]
    pub fn idle_effect(&self, lambda: f64, bfq: &Bfq) -> f64 {
        let ratio = bfq.slice_idle.as_secs_f64() / SLICE_IDLE_DEFAULT;
        let effect = match self.slice_idle_effect {
            SliceIdleEffect::Corrected => 1.0 - lambda * ratio,
            SliceIdleEffect::AsPrinted => (1.0 - lambda) * ratio,
        };
        effect.max(IDLE_EFFECT_FLOOR)
    }

    /// E(TS) in s: `lambda * TS`, the paper's TS being in ms and divided by 1000.
    #[must_use]
    pub fn timeout_effect(lambda: f64, bfq: &Bfq) -> f64 {
        lambda * bfq.timeout_sync.as_secs_f64()
    }
}

/// A tier of the system: the same four terms stand in eq. (2) for the host and in eq. (4) for the
/// guest.
struct Tier<'a> {
    side: Side,
    others: &'static str,
    /// Members that share the tier: VMs on the host, tasks in a guest.
    members: usize,
    switch: f64,
    /// A, B_max and L_min of the member itself, KiB.
    own: f64,
    budget: f64,
    least: f64,
    /// Sum of the others' A, KiB.
    other: f64,
    idle_effect: f64,
    /// Throughput of the member and of the whole tier, KiB/s.
    share: f64,
    whole: f64,
    timeout_effect: f64,
    sum: &'a mut Sum,
}

impl Tier<'_> {
    fn add_terms(self) {
        let Self { side, sum, .. } = self;
        // SW(n) = n * switch
        sum.add(side, "switch", self.members as f64 * self.switch);
        // (A_own + B_max - L_min) / (E(SI) * T_own)
        sum.add(side, "own-service", (self.own + self.budget - self.least) / (self.idle_effect * self.share));
        // (sum of A_other + B_max) / (E(SI) * T_tier)
        sum.add(side, self.others, (self.other + self.budget) / (self.idle_effect * self.whole));
        // E(TS)
        sum.add(side, "timeout-sync", self.timeout_effect);
    }
}

impl TailModel for Analytical {
    fn forecast_tasks(
        &self,
        profile: &Profile,
        spec: &Spec,
        config: &Config,
    ) -> Result<Vec<Forecast>, ModelError> {
        check_config(spec, config)?;
        check_syncs(profile, spec)?;
        check_bursts("analytical", spec)?;
        if config.elevator != Elevator::Bfq {
            return Err(ModelError::NotCovered {
                model: "analytical",
                what: "a host elevator other than bfq".to_owned(),
                remedy: "choose bfq or use the slice model",
            });
        }
        // T_agg^H is the device's throughput; BFQ's own cost is in SW.
        let device = Device::new(profile, false)?;
        let switch =
            Device::new(profile, true).map(|bfq| bfq.read.base - device.read.base)?.max(SWITCH_FLOOR);
        let flows = flows(spec, config, &device);
        let cpu = CpuLoad::new(profile, spec, config, &flows);

        // A of every VM, KiB in one second.
        let mut demand = vec![0.0; spec.vms.len()];
        for f in &flows {
            demand[f.vm] += kib(f);
        }
        let total: f64 = demand.iter().sum();
        let host = host_throughput(profile, &device, &flows);
        let weights: f64 = config.vms.iter().map(|v| f64::from(v.weight)).sum();
        let host_budget = budget(&config.bfq);
        // The paper has no model of lost rates; a demand beyond the device cannot be carried in any
        // order.
        let kept = (host / total.max(f64::MIN_POSITIVE)).min(1.0) * cpu.kept();

        let mut out = Vec::with_capacity(flows.len());
        for ((vm, task), flow) in spec.tasks().zip(&flows) {
            let vm_config = &config.vms[flow.vm];
            let mut sum = Sum::default();
            // Eq. (3): T_agg^G = lambda_phi * phi_G * T_agg^H
            let phi = f64::from(vm_config.weight) / weights;
            let guest = self.coefficients.weight * phi * host;
            if is_guest(vm) && vm_config.guest_elevator == Elevator::Bfq {
                // Eq. (5) with equal task weights: phi_tau = 1 / n. The paper sets none inside a
                // guest.
                let tasks = vm.tasks.len();
                Tier {
                    side: Side::Guest,
                    others: "other-tasks",
                    members: tasks,
                    switch,
                    own: kib(flow),
                    budget: budget(&vm_config.guest_bfq),
                    least: task.block.as_kib_f64(),
                    other: demand[flow.vm] - kib(flow),
                    idle_effect: self.idle_effect(self.coefficients.guest_idle, &vm_config.guest_bfq),
                    share: self.coefficients.weight / tasks as f64 * guest,
                    whole: guest,
                    timeout_effect: Self::timeout_effect(
                        self.coefficients.guest_timeout,
                        &vm_config.guest_bfq,
                    ),
                    sum: &mut sum,
                }
                .add_terms();
            } else if is_guest(vm) {
                // Without BFQ in the guest there is no budget and no share; the measured overhead
                // remains.
                sum.add(Side::Guest, "virtualization", overhead(profile, vm, &cpu, flow.exceedance));
                sum.note_statistic(|| overhead_statistic(profile, flow.exceedance));
            }
            Tier {
                side: Side::Host,
                others: "other-vms",
                members: spec.vms.len(),
                switch,
                own: demand[flow.vm],
                budget: host_budget,
                least: least_request(vm),
                other: total - demand[flow.vm],
                idle_effect: self.idle_effect(self.coefficients.host_idle, &config.bfq),
                share: guest,
                whole: host,
                timeout_effect: Self::timeout_effect(self.coefficients.host_timeout, &config.bfq),
                sum: &mut sum,
            }
            .add_terms();
            out.push(sum.whole(if flow.declared { kept * flow.through_cap } else { 1.0 }));
        }
        Ok(out)
    }
}

/// A of one task: KiB in one second, as offered.
fn kib(flow: &Flow) -> f64 {
    flow.rate * flow.block / 1024.0
}

/// B_max in KiB: the `max_budget` knob, else BFQ's initial default.
fn budget(bfq: &Bfq) -> f64 {
    bfq.max_budget.map_or(BUDGET_MAX_KIB, Bytes::as_kib_f64)
}

/// L_min of a VM, KiB: its smallest request.
fn least_request(vm: &Vm) -> f64 {
    vm.tasks.iter().map(|t: &Task| t.block.as_kib_f64()).fold(f64::INFINITY, f64::min)
}

/// T_agg^H in KiB/s: best throughput over depth, reads and writes mixed by the bytes that the spec
/// offers.
///
/// Moving w bytes of writes and 1 - w of reads takes w / T_w + (1 - w) / T_r, so the mix is the
/// harmonic mean.
fn host_throughput(profile: &Profile, device: &Device, flows: &[Flow]) -> f64 {
    let all: f64 = flows.iter().map(kib).sum();
    let writes: f64 = flows.iter().map(|f| kib(f) * f.op.write_share()).sum();
    let w = if all > 0.0 { writes / all } else { 0.0 };
    let block = profile.block.as_kib_f64();
    1.0 / (w / (device.write.capacity * block) + (1.0 - w) / (device.read.capacity * block))
}

#[cfg(test)]
mod tests;
