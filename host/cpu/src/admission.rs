//! Admission test of several contracts. Pure arithmetic over the kernel's grant.
//!
//! Every backend counts in shares of each CPU. The kernel makes the same test for its own
//! mechanisms (`tg_rt_schedulable()` in `kernel/sched/rt.c`, `__dl_overflow()` in
//! `kernel/sched/deadline.c`), but reports only `EINVAL` or `EBUSY`, and makes none for `cpu.max`.

use rtvirtio_units::Ratio;

use crate::{Contract, CpuError, Grant};

/// Admits all contracts, in this order; returns the share of each CPU that stays free.
///
/// # Errors
/// [`CpuError::TooMuch`] for the first that does not fit, with the excess and the largest budget
/// that would fit.
pub fn admit(grant: &Grant, contracts: &[(String, Contract)]) -> Result<Ratio, CpuError> {
    let mut free = grant.free();
    for (i, (vm, contract)) in contracts.iter().enumerate() {
        let share = contract.share().0;
        if !rtvirtio_capacity::fits(share, free) {
            // Plus a millionth of a microsecond, so that 3999.999... from binary fractions counts
            // as 4000.
            let most = (free * contract.period_us() as f64 + 1e-6).floor();
            let remedy = if most >= 1000.0 {
                format!("write budget = \"{}us\" at most", most as u64)
            } else {
                "take some from the others, or move the VM to another host".to_owned()
            };
            return Err(CpuError::TooMuch {
                vm: vm.clone(),
                contract: *contract,
                by: (share - free) * 100.0,
                grant: grant.describe(&contracts[..i]),
                remedy,
            });
        }
        free = (free - share).max(0.0);
    }
    Ok(Ratio(free))
}
