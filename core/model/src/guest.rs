//! The part of the latency that arises in the guest and its VMM, from the profile's measurement of
//! one VM alone.

use rtvirtio_spec::{Spec, Vm};

use crate::flow::Flow;
use crate::load::{JIFFY, is_guest};
use crate::tail_curve::{RARE, TailCurve};
use crate::types::{Config, Elevator, GuestPoint, Profile};

/// Tail of guest and VMM when no VM was measured, s: a vCPU or VMM thread that loses its CPU may
/// wait one scheduler tick. An assumption, replaced by measuring a VM.
const UNMEASURED_TAIL: f64 = JIFFY;

/// CPU load beyond which the queueing factor stops growing: 1 / (1 - 0.95) = 20. Above it a run is
/// unstable anyway and [`CpuLoad::kept`] falls below one.
const MAX_LOAD: f64 = 0.95;

/// CPU that a request costs with BFQ in a TCG guest against `none`: measured 7.7 k against 3.8 k
/// sync 4 KiB requests/s on one guest.
const GUEST_BFQ_CPU: f64 = 2.0;

/// Load that the VMs put on the host's CPUs.
pub(crate) struct CpuLoad {
    /// Busy share of all CPUs, 0 and up.
    rho: f64,
}

impl CpuLoad {
    /// `sum over guest tasks of rate * cpu_per_request / cpus`.
    pub(crate) fn new(profile: &Profile, spec: &Spec, config: &Config, flows: &[Flow]) -> Self {
        let Some(guest) = measured_guest(profile) else { return Self { rho: 0.0 } };
        let busy: f64 = flows
            .iter()
            .filter(|f| is_guest(&spec.vms[f.vm]))
            .map(|f| {
                let bfq = guest.kind == "qemu-tcg" && config.vms[f.vm].guest_elevator == Elevator::Bfq;
                f.rate * guest.cpu_per_request.max(0.0) * if bfq { GUEST_BFQ_CPU } else { 1.0 }
            })
            .sum();
        Self { rho: busy / f64::from(profile.cpus.max(1)) }
    }

    /// Share of the offered requests that the CPUs can carry.
    pub(crate) fn kept(&self) -> f64 {
        if self.rho > 1.0 { 1.0 / self.rho } else { 1.0 }
    }

    /// Factor by which waits for the CPU grow with the load: 1 / (1 - rho), the mean sojourn of
    /// M/M/1 over its service time.
    fn stretch(&self) -> f64 {
        1.0 / (1.0 - self.rho.min(MAX_LOAD))
    }
}

/// Tail that guest and VMM add for a VM, s.
///
/// The profile's VM ran alone and at depth 1, so its tail above the device's typical time is the
/// part of guest and VMM on otherwise idle CPUs; waits for a CPU then grow with 1 / (1 - rho). Zero
/// for a process VM. `exceedance` is the share of requests that may take longer: the tail is that
/// of the target's percentile, at most p99.99.
pub(crate) fn overhead(profile: &Profile, vm: &Vm, load: &CpuLoad, exceedance: f64) -> f64 {
    if !is_guest(vm) {
        return 0.0;
    }
    let Some(guest) = measured_guest(profile) else { return UNMEASURED_TAIL };
    // Two tails do not subtract: the guest's slowest request rarely coincides with the device's. So
    // all but a typical device time counts as the guest's, on the safe side.
    let of_guest = match TailCurve::new(&guest.point, guest.point.p50.as_secs_f64()) {
        curve if exceedance > RARE => curve.quantile(exceedance.ln()),
        _ => guest.point.p9999.as_secs_f64(),
    };
    let tail = (of_guest - typical(profile)).max(above_device(profile, guest));
    tail * load.stretch()
}

/// The statistic that [`overhead`] is computed from, for the user.
pub(crate) fn overhead_statistic(profile: &Profile, exceedance: f64) -> String {
    match measured_guest(profile) {
        None => "assumed: no VM was measured".to_owned(),
        Some(guest) => {
            let curve = TailCurve::new(&guest.point, guest.point.p50.as_secs_f64());
            let ln_e = exceedance.max(RARE).ln();
            format!("{} in a VM alone", curve.named(curve.around(ln_e)))
        }
    }
}

/// Time that guest and VMM add to a typical request of a VM, s: it bounds the rate of a closed
/// loop.
pub(crate) fn round_trip(profile: &Profile, vm: &Vm) -> f64 {
    match measured_guest(profile) {
        Some(guest) if is_guest(vm) => above_device(profile, guest),
        _ => 0.0,
    }
}

/// Median of the guest point minus that of the device, s, at least zero.
fn above_device(profile: &Profile, guest: &GuestPoint) -> f64 {
    (guest.point.p50.as_secs_f64() - typical(profile)).max(0.0)
}

/// Median of the device at its smallest depth, s.
fn typical(profile: &Profile) -> f64 {
    profile.read.iter().min_by_key(|p| p.depth).map_or(0.0, |p| p.p50.as_secs_f64())
}

/// The guest measurement, if it is one of a real guest and not of a process VM.
pub(crate) fn measured_guest(profile: &Profile) -> Option<&GuestPoint> {
    profile.guest.as_ref().filter(|g| g.is_of_guest())
}
