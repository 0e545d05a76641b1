//! CPU time that requests of guests take, against what the host has free for them.

use rtvirtio_model::{CpuLoad, Profile, is_guest};
use rtvirtio_spec::{Spec, Vm};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// CPU time that the requests of a host's guests need at their declared rates, against what other
/// programs leave of it. Both are in CPUs: 1.0 is all time of one.
///
/// A VM with a CPU contract has its time reserved and is not in the sums.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuRoom {
    /// CPUs of the host that the guests may use.
    pub cpus: u32,
    /// CPUs that the requests need.
    pub needed: f64,
    /// CPUs that were free when it was measured; what these VMs used then counts as free.
    pub free: f64,
    /// Requests of all these guests, 1/s.
    pub rate: f64,
    /// CPU time of one request, as measured in a VM, mean over the guests.
    pub each_ns: Nanos,
    /// Factor by which the requests may need more than that.
    #[serde(default = "of_one")]
    pub margin: f64,
}

/// [`CpuRoom::margin`] of one guest's requests, as their CPU time differs between loads.
const OF_ONE: f64 = 1.2;
/// Margin of several guests' requests, measured in one alone: on a host of two CPUs three emulated
/// guests took 1.9 to 2.3 times as much for each.
const OF_SEVERAL: f64 = 2.2;
/// Margin of requests whose own run was seen.
const SEEN: f64 = 1.05;

fn of_one() -> f64 {
    OF_ONE
}

impl CpuRoom {
    /// Sum over the guests' tasks with a rate, each at the price that the profile of its device
    /// has, without those of [`CpuRoom::unpriced`]; `None` where no task is left.
    pub fn sum<'a>(
        parts: impl Iterator<Item = (&'a Spec, &'a Profile)>,
        cpus: u32,
        free: f64,
    ) -> Option<Self> {
        Self::sum_of(parts, cpus, free, &|_| true)
    }

    /// Like [`CpuRoom::sum`], over the guests whose names are of these.
    pub fn sum_of<'a>(
        parts: impl Iterator<Item = (&'a Spec, &'a Profile)>,
        cpus: u32,
        free: f64,
        is_of: &dyn Fn(&str) -> bool,
    ) -> Option<Self> {
        let (mut rate, mut needed, mut guests) = (0.0, 0.0, 0);
        for (spec, profile) in parts {
            let Some(price) = price(profile) else { continue };
            for vm in spec.vms.iter().filter(|vm| is_counted(vm) && is_of(&vm.name)) {
                rate += rate_of(vm);
                needed += rate_of(vm) * price;
                guests += u32::from(rate_of(vm) > 0.0);
            }
        }
        let each_ns = Nanos::from_secs_f64(needed / rate);
        let margin = if guests > 1 { OF_SEVERAL } else { OF_ONE };
        (rate > 0.0).then_some(Self { cpus, needed, free: free.max(0.0), rate, each_ns, margin })
    }

    /// Names of the guests whose requests have no price: their device was not measured in a VM, or
    /// no CPU time was seen there.
    pub fn unpriced<'a>(parts: impl Iterator<Item = (&'a Spec, &'a Profile)>) -> Vec<String> {
        let without = parts.filter(|(_, profile)| price(profile).is_none());
        let vms = without.flat_map(|(spec, _)| &spec.vms);
        vms.filter(|vm| is_counted(vm) && rate_of(vm) > 0.0).map(|vm| vm.name.clone()).collect()
    }

    /// Whether requests wait for CPUs that others use, as long as these do.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.needed > self.free
    }

    /// Whether requests would wait without end even with all CPUs of the host free.
    #[must_use]
    pub fn is_too_much(&self) -> bool {
        self.needed > f64::from(self.cpus)
    }

    /// Room by what a run of the same requests showed: its VMs used so many CPUs, so many were free
    /// or theirs, and it kept this part of the rates. What the requests lacked counts as needed.
    #[must_use]
    pub fn as_seen(self, used: f64, free: f64, kept: f64) -> Self {
        let needed = used / kept.clamp(0.01, 1.0);
        Self { needed, free, each_ns: Nanos::from_secs_f64(needed / self.rate), margin: SEEN, ..self }
    }

    /// Use of the CPUs for the estimate of waits, where a turn of others takes so long.
    #[must_use]
    pub fn load(&self, turn: Nanos) -> CpuLoad {
        let Self { cpus, needed, free, each_ns, margin, .. } = *self;
        CpuLoad { cpus, needed, free, each: each_ns, margin, turn }
    }

    /// Largest sum of rates that fits, 1/s.
    #[must_use]
    pub fn most(&self) -> f64 {
        if self.needed > 0.0 { self.rate * self.free / self.needed } else { self.rate }
    }
}

/// CPU time of one request, in seconds, as measured in a VM on the device; `None` without one.
fn price(profile: &Profile) -> Option<f64> {
    let guest = profile.guest.as_ref().filter(|guest| guest.is_of_guest())?;
    Some(guest.cpu_per_request).filter(|price| *price > 0.0)
}

/// Sum of the rates that a VM's tasks declare, 1/s.
fn rate_of(vm: &Vm) -> f64 {
    vm.tasks.iter().filter_map(|task| task.rate).map(|rate| rate.0).sum()
}

/// Whether a VM's requests compete for the CPUs with other programs.
pub(crate) fn is_counted(vm: &Vm) -> bool {
    is_guest(vm) && vm.cpu.need.is_none()
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::GuestPoint;
    use rtvirtio_spec::{CpuNeed, LabKind};

    use super::*;
    use crate::tests::{self, task};

    #[test]
    fn guests_at_their_rates_are_summed_and_a_contract_is_not() {
        let tasks = || vec![task("control", 600.0, Some(20))];
        let mut spec = tests::spec(LabKind::Qemu, &[tasks(), tasks(), tasks()]);
        let mut profile = Profile { guest: None, ..tests::profile() };
        let sum = |spec: &Spec, profile: &Profile| CpuRoom::sum([(spec, profile)].into_iter(), 2, 0.4);
        assert_eq!(sum(&spec, &profile), None, "not measured in a VM");
        let point = profile.read[0].clone();
        profile.guest = Some(GuestPoint { kind: "qemu-tcg".to_owned(), point, cpu_per_request: 500e-6 });
        let room = sum(&spec, &profile).unwrap();
        assert!((room.needed - 0.9).abs() < 1e-9 && room.each_ns == Nanos(500_000), "{room:?}");
        assert!(room.is_short() && !room.is_too_much());
        let first = spec.vms[0].name.clone();
        let alone = CpuRoom::sum_of([(&spec, &profile)].into_iter(), 1, 0.4, &|vm| vm == first).unwrap();
        assert!((alone.rate - 600.0).abs() < 1e-9 && (alone.margin - OF_ONE).abs() < 1e-9, "{alone:?}");
        assert!(CpuRoom { needed: 2.1, ..room }.is_too_much());
        assert!((room.margin - OF_SEVERAL).abs() < 1e-9);
        // A run that kept four fifths of the rates on CPUs that were used up.
        let seen = room.as_seen(1.2, 1.21, 0.8);
        assert!((seen.needed - 1.5).abs() < 1e-9 && seen.is_short() && seen.margin < OF_ONE, "{seen:?}");
        assert!(!room.as_seen(1.2, 1.6, 1.0).is_short());
        assert!((room.most() - 800.0).abs() < 1e-6, "{room:?}");
        spec.vms[0].cpu.need =
            Some(CpuNeed::Contract { budget: Nanos::from_millis(10), period: Nanos::from_millis(20) });
        let left = sum(&spec, &profile).unwrap();
        assert!((left.rate - 1200.0).abs() < 1e-9, "{left:?}");
        // Another device was not measured in a VM, or no CPU time was seen there.
        let unmeasured = Profile { guest: None, ..profile.clone() };
        let mut unseen = profile.clone();
        unseen.guest = profile.guest.clone().map(|guest| GuestPoint { cpu_per_request: 0.0, ..guest });
        let names: Vec<String> = spec.vms[1..].iter().map(|vm| vm.name.clone()).collect();
        for other in [&unmeasured, &unseen] {
            let parts = [(&spec, &profile), (&spec, other)];
            assert_eq!(CpuRoom::unpriced(parts.into_iter()), names, "what those need is not in the sum");
            assert_eq!(sum(&spec, other), None);
        }
        assert!(CpuRoom::unpriced([(&spec, &profile)].into_iter()).is_empty());
        let processes = tests::spec(LabKind::Process, &[tasks()]);
        assert_eq!(sum(&processes, &profile), None);
    }
}
