//! QEMU's leaky buckets: `block_set_io_throttle`, and libvirt's `<iotune>`, which sets them.
//!
//! Source: `util/throttle.c` of QEMU (`throttle_compute_wait`, `throttle_is_valid`). With `avg`
//! alone a bucket holds a tenth of a second of it. With `max` and a `max-length` of 1 s it holds
//! `max`, at any speed. With a longer `max-length` it holds `max * max-length`, filled no faster
//! than `max`, of which a tenth of a second may come at once. A request passes while its bucket is
//! not full, so one request more. virtio-blk merges adjacent requests that are submitted together
//! before they reach the bucket (`virtio_blk_submit_multireq` in `hw/block/virtio-blk.c`): a limit
//! on requests bounds none of the guest's requests, and a device with `request-merging=off` is not
//! detected here.

use rtvirtio_text::shell_argument;
use rtvirtio_units::Enforcement;

use super::disks_only;
use crate::curve::Arrival;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Setting};
use crate::tspec::{Direction, Tspec, Unit};

/// Largest value of `bps-total` and the like: `THROTTLE_VALUE_MAX`.
const MAX_VALUE: u64 = 1_000_000_000_000_000;
/// Longest `max-length` used, in seconds.
const MAX_LENGTH: u64 = 1 << 20;

/// Values of one bucket; `None` for those that stay unset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeakyBucket {
    average: u64,
    max: Option<u64>,
    length: Option<u64>,
}

impl LeakyBucket {
    /// Largest burst that QEMU supports and that does not exceed the specification; the smallest
    /// one where all exceed it.
    fn from_tspec(tspec: &Tspec) -> Self {
        let average = tspec.rate;
        let lasting = tspec.peak.map(|peak| (peak, (tspec.burst / peak).min(MAX_LENGTH)));
        match lasting {
            Some((peak, seconds)) if seconds >= 2 => Self { average, max: Some(peak), length: Some(seconds) },
            // A `max` below the average is refused.
            _ if tspec.burst >= average => Self { average, max: Some(tspec.burst), length: Some(1) },
            _ => Self { average, max: None, length: None },
        }
    }

    fn kept(self, largest: u64) -> Arrival {
        let (rate, one) = (self.average as f64, largest as f64);
        let (burst, peak) = match (self.max, self.length) {
            (Some(max), Some(length)) if length > 1 => {
                (max as f64 * length as f64, Some((max as f64, max as f64 / 10.0 + one)))
            }
            (Some(max), _) => (max as f64, None),
            (None, _) => (rate / 10.0, None),
        };
        Arrival { rate, burst: burst + one, peak }
    }
}

fn compiled(
    actuator: Actuator,
    tspec: &Tspec,
    direction: Direction,
) -> Result<(Compiled, LeakyBucket), CompileError> {
    disks_only(actuator, direction)?;
    let bucket = LeakyBucket::from_tspec(tspec);
    for value in [Some(bucket.average), bucket.max].into_iter().flatten() {
        if value > MAX_VALUE {
            let (least, most, remedy) = (1.0, MAX_VALUE as f64, "leave the limit out");
            return Err(CompileError::Range {
                actuator,
                what: "a value",
                value: value as f64,
                least,
                most,
                remedy,
            });
        }
    }
    let kept = bucket.kept(tspec.largest);
    let mut compiled = match tspec.unit {
        Unit::Bytes => Compiled::new(actuator, direction, tspec, Some(kept), Enforcement::Cap),
        Unit::Requests => Compiled::new(actuator, direction, tspec, None, Enforcement::Hint).note(
            "QEMU joins neighbouring requests before it counts them: up to 32 of the guest's are one. Limit bytes, or give the disk \
             request-merging=off; then it is a cap",
        ),
    }
    .note("QEMU lets a request pass while its bucket is not full: one request more than its size");
    if bucket.max.is_none() {
        compiled = compiled.note(
            "QEMU's bursts are a tenth of a second of the rate, or a second of it and more: the tenth is taken",
        );
    }
    if tspec.peak.is_some() && kept.peak.is_none() {
        compiled = compiled
            .note("QEMU holds a peak only for bursts of 2 s and more at the peak; this burst may go at once");
    }
    Ok((compiled, bucket))
}

/// Name of a limit in `block_set_io_throttle`.
fn word(unit: Unit, direction: Direction) -> &'static str {
    match (unit, direction) {
        (Unit::Bytes, Direction::Read) => "bps_rd",
        (Unit::Bytes, _) => "bps_wr",
        (Unit::Requests, Direction::Read) => "iops_rd",
        (Unit::Requests, _) => "iops_wr",
    }
}

/// A drive's limits with their buckets: this one, and the others of its disk.
fn all_of_drive(
    (direction, unit, bucket): (Direction, Unit, LeakyBucket),
    others: &[(Direction, Tspec)],
) -> Vec<(Direction, Unit, LeakyBucket)> {
    let others = others.iter().filter(|(direction, _)| direction.is_disk());
    let others = others.map(|(direction, of)| (*direction, of.unit, LeakyBucket::from_tspec(of)));
    std::iter::once((direction, unit, bucket)).chain(others).collect()
}

/// Adds the note that one command sets all limits of a drive.
fn note_of_several(compiled: Compiled, count: usize) -> Compiled {
    compiled.note(match count {
        1 => "the command puts aside all limits that the drive had",
        _ => "one command sets all limits of the disk, and puts aside all that the drive had",
    })
}

/// The command takes all six limits; those not given are removed.
pub(super) fn io_throttle(
    tspec: &Tspec,
    direction: Direction,
    drive: &str,
    others: &[(Direction, Tspec)],
) -> Result<Compiled, CompileError> {
    let (compiled, bucket) = compiled(Actuator::Qemu, tspec, direction)?;
    let set = all_of_drive((direction, tspec.unit, bucket), others);
    let compiled = note_of_several(compiled, set.len());
    let set: Vec<_> = set.into_iter().map(|(way, unit, bucket)| (word(unit, way), bucket)).collect();
    let mut limits = String::new();
    for name in ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"] {
        let bucket = set.iter().find(|(key, _)| *key == name).map(|(_, bucket)| bucket);
        limits += &format!(", \"{name}\": {}", bucket.map_or(0, |bucket| bucket.average));
        let burst = bucket.map(|bucket| [("max", bucket.max), ("max_length", bucket.length)]);
        for (suffix, value) in burst.into_iter().flatten() {
            limits += &value.map_or(String::new(), |value| format!(", \"{name}_{suffix}\": {value}"));
        }
    }
    // Escaped, because a device path of QEMU contains ids chosen by the user.
    let id = serde_json::Value::from(drive);
    let json =
        format!("{{ \"execute\": \"block_set_io_throttle\", \"arguments\": {{ \"id\": {id}{limits} }} }}");
    Ok(compiled.set(Setting::Qmp { json }))
}

/// libvirt keeps what a command does not name only where none of its kind (bytes, requests) is
/// named (`qemuDomainSetBlockIoTuneDefaults`), so that one command names all.
pub(super) fn iotune(
    tspec: &Tspec,
    direction: Direction,
    domain: &str,
    disk: &str,
    others: &[(Direction, Tspec)],
) -> Result<Compiled, CompileError> {
    let (compiled, bucket) = compiled(Actuator::Libvirt, tspec, direction)?;
    let mut all = all_of_drive((direction, tspec.unit, bucket), others);
    let compiled = note_of_several(compiled, all.len());
    all.sort_by_key(|(way, unit, _)| (*unit == Unit::Requests, *way));
    let (name, target) = (shell_argument("--domain", domain), shell_argument("--device", disk));
    let (mut xml, mut line) = (String::from("<iotune>"), format!("virsh blkdeviotune {name} {target}"));
    for (way, unit, bucket) in all {
        let key = format!("{}_{}_sec", way.name(), if unit == Unit::Bytes { "bytes" } else { "iops" });
        let values = [("", Some(bucket.average)), ("_max", bucket.max), ("_max_length", bucket.length)];
        for (suffix, value) in values.into_iter().filter_map(|(suffix, value)| Some((suffix, value?))) {
            xml += &format!("<{key}{suffix}>{value}</{key}{suffix}>");
            line += &format!(" --{} {value}", format!("{key}{suffix}").replace('_', "-"));
        }
    }
    Ok(compiled
        .set(Setting::Command { line: line + " --live" })
        .set(Setting::Xml { text: xml + "</iotune>" }))
}
