//! The I/O domain's caps, and the kernel's throttling of block devices.

use super::disks_only;
use crate::curve::Arrival;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Setting, Worth};
use crate::tspec::{Direction, Tspec, Unit};

/// Longest accounting slice of blk-throttle: `DFL_THROTL_SLICE` of `block/blk-throttle.c`, 100 ms.
/// Some kernels use 20 ms for non-rotational drives.
const SLICE: f64 = 0.1;

/// Keys of a cap in `iod.toml`: `{ bytes = "20000000B/s", bytes_burst = "65536B", peak = 4 }`.
pub(super) fn io_domain(tspec: &Tspec, direction: Direction) -> Result<Compiled, CompileError> {
    let unit = match (tspec.unit, direction.is_disk()) {
        (Unit::Bytes, _) => "bytes",
        (Unit::Requests, true) => "requests",
        (Unit::Requests, false) => "frames",
    };
    let (rate, burst) = match tspec.unit {
        Unit::Bytes => (format!("{}B/s", tspec.rate), format!("\"{}B\"", tspec.burst)),
        Unit::Requests => (format!("{}/s", tspec.rate), tspec.burst.to_string()),
    };
    // The file has the peak as a multiple of the rate: a float prints with as many digits as
    // restore it, and the product is rounded to a whole number.
    let peak = tspec.peak.map(|peak| peak as f64 / tspec.rate as f64);
    let peak = peak.map_or(String::new(), |times| format!(", peak = {times:?}"));
    let line = format!("{}_cap = {{ {unit} = \"{rate}\", {unit}_burst = {burst}{peak} }}", direction.name());
    let kept = Some(tspec.arrival());
    Ok(Compiled::new(Actuator::IoDomain, direction, tspec, kept, Worth::Guarantee)
        .set(Setting::Toml { line })
        .note("exact to the nanosecond in what is let go; a thread that wakes late lets it go later, never more"))
}

/// Rate for the kernel's files; `None` where it exceeds the field.
///
/// Request rates have 32 bits, and all bits set mean no limit (`tg_conf_updated` of
/// `block/blk-throttle.c`).
#[must_use]
pub fn limit_value(tspec: &Tspec) -> Option<u64> {
    let most = match tspec.unit {
        Unit::Bytes => u64::MAX - 1,
        Unit::Requests => u64::from(u32::MAX) - 1,
    };
    Some(tspec.rate).filter(|rate| *rate <= most)
}

/// Arrival curve that blk-throttle enforces: the rate, with the amount of one slice as burst. A
/// request waits until all of it fits.
fn kept(tspec: &Tspec) -> Arrival {
    let rate = tspec.rate as f64;
    Arrival { rate, burst: (rate * SLICE).max(1.0), peak: None }
}

fn checked(actuator: Actuator, tspec: &Tspec, direction: Direction) -> Result<(Compiled, u64), CompileError> {
    disks_only(actuator, direction)?;
    let most = f64::from(u32::MAX - 1);
    let remedy = "limit bytes instead";
    let value = limit_value(tspec).ok_or(CompileError::Range {
        actuator,
        what: "a rate",
        value: tspec.rate as f64,
        least: 1.0,
        most,
        remedy,
    })?;
    let compiled = Compiled::new(actuator, direction, tspec, Some(kept(tspec)), Worth::Cap).note(
        "the kernel counts in slices of up to 100 ms: the burst is what a slice is worth, whatever is asked",
    );
    let compiled = match tspec.unit {
        Unit::Bytes => compiled,
        Unit::Requests => compiled.note(
            "the kernel counts a request larger than the device's `queue/max_sectors_kb` as the several that it becomes: exact up to that size",
        ),
    };
    let compiled = match tspec.peak {
        Some(_) => compiled.note("the peak cannot be set: a slice's worth may go at once"),
        None => compiled,
    };
    Ok((compiled, value))
}

pub(super) fn io_max(
    tspec: &Tspec,
    direction: Direction,
    cgroup: &str,
    dev: &str,
) -> Result<Compiled, CompileError> {
    let (compiled, value) = checked(Actuator::IoMax, tspec, direction)?;
    let key = match (direction, tspec.unit) {
        (Direction::Read, Unit::Bytes) => "rbps",
        (Direction::Read, Unit::Requests) => "riops",
        (_, Unit::Bytes) => "wbps",
        (_, Unit::Requests) => "wiops",
    };
    Ok(compiled.set(Setting::File { path: format!("{cgroup}/io.max"), text: format!("{dev} {key}={value}") }))
}

pub(super) fn throttle_v1(
    tspec: &Tspec,
    direction: Direction,
    cgroup: &str,
    dev: &str,
) -> Result<Compiled, CompileError> {
    let (compiled, value) = checked(Actuator::ThrottleV1, tspec, direction)?;
    let unit = if tspec.unit == Unit::Bytes { "bps" } else { "iops" };
    let path = format!("{cgroup}/blkio.throttle.{}_{unit}_device", direction.name());
    let compiled = compiled.set(Setting::File { path, text: format!("{dev} {value}") });
    Ok(match direction {
        Direction::Write => {
            compiled.note("on cgroup v1 only direct and synchronous writes are limited, not write-back")
        }
        _ => compiled,
    })
}
