//! Coefficients of io.cost's linear model, from a measured profile.

use rtvirtio_units::io_cost::LinearModel;

use crate::device::{Service, ServiceLine, service};
use crate::{ModelError, Profile};

/// Unit in which io.cost counts sizes, bytes (`IOC_PAGE_SIZE` in `block/blk-iocost.c`).
const PAGE: f64 = 4096.0;
/// Shortest time of a byte, s: no device moves more than 1 TB/s.
const LEAST_PER_BYTE: f64 = 1e-12;

/// Cost model of a measured device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredCost {
    /// Rates of the device. A profile has random requests only, and each stands for a sequential
    /// one too.
    pub model: LinearModel,
    /// Whether writes were measured; else each costs what a read does.
    pub has_writes: bool,
}

/// Linear cost model of a device without an elevator.
///
/// The kernel takes rates and computes times: `1 / bps` for a byte, and `1 / iops` for a request of
/// one page, that page included (`calc_lcoefs()`). Both are the [`ServiceLine`] of the profile,
/// which begins at its block size: `occupancy` less or plus the bytes between that and a page.
pub fn io_cost(profile: &Profile) -> Result<MeasuredCost, ModelError> {
    let Service { read, write, block, .. } = service(profile)?;
    let rates = |line: &ServiceLine| {
        let per_byte = line.per_byte.max(LEAST_PER_BYTE);
        let of_page = line.occupancy + per_byte * (PAGE - block.0 as f64);
        // The kernel takes no request of a page for cheaper than its bytes.
        (whole(1.0 / per_byte), whole(1.0 / of_page.max(per_byte * PAGE)))
    };
    let (rbps, rrandiops) = rates(&read);
    let (wbps, wrandiops) = rates(write.as_ref().unwrap_or(&read));
    let model = LinearModel { rbps, rseqiops: rrandiops, rrandiops, wbps, wseqiops: wrandiops, wrandiops };
    Ok(MeasuredCost { model, has_writes: write.is_some() })
}

/// Nearest whole rate, at least 1: 0 stands for no cost.
fn whole(rate: f64) -> u64 {
    (rate.round() as u64).max(1)
}

#[cfg(test)]
mod tests;
