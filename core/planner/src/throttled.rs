//! Rate that VMs lose to a plan's limits.

use std::collections::BTreeMap;
use std::fmt;

use rtvirtio_model::{Config, Profile, spare_rates};
use rtvirtio_spec::Spec;
use rtvirtio_units::{Iops, Ratio, blk_throttle};

use crate::{Knob, LimitKind, PlanError, Setting};

/// A VM that a plan limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Throttled {
    pub vm: String,
    /// Requests per second that pass under the limit.
    pub limit: Iops,
    /// Declared rate plus the VM's part of the rate that all declared rates leave.
    pub of: Iops,
}

/// Share of its rate below which a VM is reported as all but stopped.
const ALL_BUT_STOPPED: f64 = 0.01;

impl Throttled {
    /// Whether the VM loses 99 % or more of its rate.
    #[must_use]
    pub fn is_all_but_stopped(&self) -> bool {
        self.limit.0 <= self.of.0 * ALL_BUT_STOPPED
    }
}

impl fmt::Display for Throttled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limit, of) = (self.limit, Iops(self.of.0.round()));
        write!(f, "{limit} of about {of} that it could have")?;
        if self.is_all_but_stopped() {
            let lost = Ratio(1.0 - self.limit.0 / self.of.0);
            write!(f, ", so it loses {lost}")?;
        }
        Ok(())
    }
}

/// VMs that settings limit to a rate below [`Throttled::of`], in spec order. `start` is the
/// configuration before the settings.
pub fn throttled(
    spec: &Spec,
    profile: &Profile,
    start: &Config,
    settings: &[Setting],
) -> Result<Vec<Throttled>, PlanError> {
    let mut limits: BTreeMap<&str, f64> = BTreeMap::new();
    for setting in settings {
        if let Knob::VmLimit { vm, limit: LimitKind::ReadIops | LimitKind::WriteIops } = &setting.knob {
            if let Ok(limit) = setting.value.parse::<f64>() {
                *limits.entry(vm).or_default() += blk_throttle::let_through(limit);
            }
        }
    }
    if limits.is_empty() {
        return Ok(Vec::new());
    }
    let spare = spare_rates(profile, spec, start)?;
    let of_vms = spec.vms.iter().zip(spare).filter_map(|(vm, spare)| {
        let limit = Iops(*limits.get(vm.name.as_str())?);
        let of = Iops(vm.declared_rate().0 + spare.map_or(0.0, |spare| spare.0));
        (limit.0 < of.0).then(|| Throttled { vm: vm.name.clone(), limit, of })
    });
    Ok(of_vms.collect())
}
