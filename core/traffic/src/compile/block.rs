//! The I/O domain's caps, and the kernel's throttling of block devices.

use rtvirtio_units::{Enforcement, blk_throttle};

use super::disks_only;
use crate::curve::Arrival;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Setting};
use crate::tspec::{Direction, Tspec, Unit};

/// Keys of a cap in `iod.toml`: `{ bytes = "20000000B/s", bytes_burst = "65536B", peak = 4 }`.
/// `pair` is the limit of the same direction that counts the other unit.
pub(super) fn io_domain(
    tspec: &Tspec,
    pair: Option<&Tspec>,
    direction: Direction,
) -> Result<Compiled, CompileError> {
    let keys = |of: &Tspec| match (of.unit, direction.is_disk()) {
        (Unit::Bytes, _) => format!("bytes = \"{}B/s\", bytes_burst = \"{}B\"", of.rate, of.burst),
        (Unit::Requests, true) => format!("requests = \"{}/s\", requests_burst = {}", of.rate, of.burst),
        (Unit::Requests, false) => format!("frames = \"{}/s\", frames_burst = {}", of.rate, of.burst),
    };
    let mut both: Vec<&Tspec> = [Some(tspec), pair].into_iter().flatten().collect();
    both.sort_by_key(|of| of.unit == Unit::Requests);
    // The file has the peak as a multiple of the rate: a float prints with as many digits as
    // restore it, and the product is rounded to a whole number.
    let peak = both.iter().find_map(|of| Some(of.peak? as f64 / of.rate as f64));
    let keys: Vec<String> = both.iter().map(|of| keys(of)).collect();
    let peak_key = peak.map_or(String::new(), |times| format!(", peak = {times:?}"));
    let line = format!("{}_cap = {{ {}{peak_key} }}", direction.name(), keys.join(", "));
    let mut kept = tspec.arrival();
    let mut peak_note = None;
    if let (Some(times), None, true) = (peak, tspec.peak, tspec.burst > tspec.largest) {
        kept.peak = Some(((tspec.rate as f64 * times).round(), tspec.largest as f64));
        peak_note = Some("a cap has one `peak`, a multiple of both of its rates: requests have it too");
    }
    let mut compiled = Compiled::new(
        Actuator::IoDomain,
        direction,
        tspec,
        Some(kept),
        Enforcement::Guarantee,
    )
    .set(Setting::Toml { line })
    .note("exact to the nanosecond in what is let go; a thread that wakes late lets it go later, never more");
    if pair.is_some() {
        compiled = compiled.note("one key holds bytes and requests of a direction");
    }
    Ok(match peak_note {
        Some(note) => compiled.note(note),
        None => compiled,
    })
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

/// Arrival curve that blk-throttle enforces: the rate, with the amount of several slices and one
/// request as burst. A request waits until all of it fits.
fn kept(tspec: &Tspec) -> Arrival {
    let rate = match tspec.unit {
        Unit::Bytes => tspec.rate as f64,
        Unit::Requests => blk_throttle::let_through(tspec.rate as f64),
    };
    let slices = rate * blk_throttle::SLICE * blk_throttle::SLICES_AT_ONCE;
    Arrival { rate, burst: slices + tspec.largest as f64, peak: None }
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
    let is_less_than_a_slice_has = tspec.unit == Unit::Requests && (tspec.rate as f64) < blk_throttle::STEP;
    let (curve, worth) = match is_less_than_a_slice_has {
        true => (None, Enforcement::Hint),
        false => (Some(kept(tspec)), Enforcement::Cap),
    };
    let compiled = Compiled::new(actuator, direction, tspec, curve, worth).note(
        "the kernel counts in slices of up to 100 ms: after a pause up to three slices' worth may go at once, whatever is asked",
    );
    let compiled = match tspec.unit {
        Unit::Bytes => compiled,
        Unit::Requests => compiled.note(
            "the kernel counts a request larger than the device's `queue/max_sectors_kb` as the several that it becomes: exact up to that size",
        ),
    };
    let compiled = match tspec.unit {
        Unit::Requests if is_less_than_a_slice_has => compiled.note(
            "below 10 requests a second, one in a slice, the kernel errs either way: 9/s let 15.6/s through on Linux 6.18",
        ),
        Unit::Requests if blk_throttle::let_through(tspec.rate as f64) < tspec.rate as f64 => compiled.note(
            "the kernel lets whole requests of a slice through: the next lower multiple of 10 a second",
        ),
        _ => compiled,
    };
    let compiled = match tspec.peak {
        Some(_) => compiled.note("the peak cannot be set: three slices' worth may go at once"),
        None => compiled,
    };
    Ok((compiled, value))
}

pub(super) fn io_max(
    tspec: &Tspec,
    pair: Option<&Tspec>,
    direction: Direction,
    cgroup: &str,
    dev: &str,
) -> Result<Compiled, CompileError> {
    let (compiled, value) = checked(Actuator::IoMax, tspec, direction)?;
    let key = |unit: Unit| match (direction, unit) {
        (Direction::Read, Unit::Bytes) => "rbps",
        (Direction::Read, Unit::Requests) => "riops",
        (_, Unit::Bytes) => "wbps",
        (_, Unit::Requests) => "wiops",
    };
    let mut line = vec![(key(tspec.unit), value)];
    if let Some(pair) = pair {
        let (_, value) = checked(Actuator::IoMax, pair, direction)?;
        line.push((key(pair.unit), value));
        line.sort_by_key(|(key, _)| key.ends_with("iops"));
    }
    let line: Vec<String> = line.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    let text = format!("{dev} {}", line.join(" "));
    Ok(compiled.set(Setting::File { path: format!("{cgroup}/io.max"), text }))
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Accounting of requests by `block/blk-throttle.c` from Linux 6.15 on; times in ms.
    struct BlkThrottle {
        per_slice: u64,
        start: u64,
        end: u64,
        done: u64,
    }

    impl BlkThrottle {
        const SLICE: u64 = 100;

        /// `tg_may_dispatch`, `throtl_charge_bio` and `throtl_trim_slice`.
        fn passes(&mut self, now: u64) -> bool {
            let rounded_end = (now + Self::SLICE).next_multiple_of(Self::SLICE);
            if now > self.end {
                (self.start, self.end, self.done) = (now, now + Self::SLICE, 0);
            } else if self.end < now + Self::SLICE {
                self.end = rounded_end;
            }
            let slices = (now - self.start).max(1).div_ceil(Self::SLICE);
            if self.done >= self.per_slice * slices {
                return false;
            }
            (self.done, self.end) = (self.done + 1, rounded_end);
            let elapsed = (now - self.start) / Self::SLICE;
            if elapsed >= 2 {
                self.done = self.done.saturating_sub((elapsed - 1) * self.per_slice);
                self.start += (elapsed - 1) * Self::SLICE;
            }
            true
        }

        /// Largest excess over the curve of the limit in any interval, where so many requests are
        /// tried at these times.
        fn largest_excess(per_slice: u64, tries: &[(u64, u64)]) -> f64 {
            let mut throttle = Self { per_slice, start: 0, end: Self::SLICE, done: 0 };
            let mut passed: Vec<(u64, usize)> = Vec::new();
            for &(at, count) in tries {
                passed.push((at, (0..count).filter(|_| throttle.passes(at)).count()));
            }
            let rate = 10 * per_slice;
            let kept = kept(&Tspec { unit: Unit::Requests, rate, burst: 1, peak: None, largest: 1 });
            let mut most = f64::NEG_INFINITY;
            for (i, (from, _)) in passed.iter().enumerate() {
                let mut sum = 0usize;
                for (to, count) in &passed[i..] {
                    sum += *count;
                    most = most.max(sum as f64 - kept.at((to - from) as f64 / 1e3));
                }
            }
            most
        }
    }

    #[test]
    fn after_a_pause_the_kernel_lets_three_slices_go_at_once() {
        // 21 at 299 ms and 10 two ms later, of a limit of 10 in 100 ms.
        let excess = BlkThrottle::largest_excess(10, &[(0, 1), (99, 1), (199, 1), (299, 100), (301, 100)]);
        assert!((-0.5..=0.0).contains(&excess), "{excess}");
    }

    proptest! {
        /// No pattern of requests exceeds what is said to be kept.
        #[test]
        fn the_kernels_slices_are_within_the_curve(
            per_slice in 1u64..20, tries in prop::collection::vec((0u64..120, 1u64..80), 1..60),
        ) {
            let mut now = 0;
            let at = |(pause, count): (u64, u64)| {
                now += pause;
                (now, if count < 60 { 1 } else { count })
            };
            let tries: Vec<(u64, u64)> = tries.into_iter().map(at).collect();
            prop_assert!(BlkThrottle::largest_excess(per_slice, &tries) <= 1e-9);
        }
    }
}
