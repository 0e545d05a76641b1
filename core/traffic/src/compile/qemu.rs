//! QEMU's leaky buckets: `throttle-group`, and libvirt's `<iotune>`, which sets them.
//!
//! Source: `util/throttle.c` of QEMU (`throttle_compute_wait`, `throttle_is_valid`). With `avg`
//! alone a bucket holds a tenth of a second of it. With `max` and a `max-length` of 1 s it holds
//! `max`, at any speed. With a longer `max-length` it holds `max * max-length`, filled no faster
//! than `max`, of which a tenth of a second may come at once. A request passes while its bucket is
//! not full, so one request more.

use rtvirtio_text::shell_argument;

use super::disks_only;
use crate::curve::Arrival;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Setting, Worth};
use crate::tspec::{Direction, Tspec, Unit};

/// Largest value of `bps-total` and the like: `THROTTLE_VALUE_MAX`.
const MOST: u64 = 1_000_000_000_000_000;
/// Longest burst, in seconds, that is asked of QEMU.
const LONGEST: u64 = 1 << 20;

/// Values of one bucket; `None` for those that stay unset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LeakyBucket {
    average: u64,
    max: Option<u64>,
    length: Option<u64>,
}

impl LeakyBucket {
    /// The largest burst that QEMU has and that is not above what is asked, unless the smallest one
    /// is.
    fn of(tspec: &Tspec) -> Self {
        let average = tspec.rate;
        let lasting = tspec.peak.map(|peak| (peak, (tspec.burst / peak).min(LONGEST)));
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
    let bucket = LeakyBucket::of(tspec);
    for value in [Some(bucket.average), bucket.max].into_iter().flatten() {
        if value > MOST {
            let (least, most, remedy) = (1.0, MOST as f64, "leave the limit out");
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
    let mut compiled = Compiled::new(actuator, direction, tspec, Some(kept), Worth::Cap)
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

fn word(tspec: &Tspec, direction: Direction) -> &'static str {
    match (tspec.unit, direction) {
        (Unit::Bytes, Direction::Read) => "bps-read",
        (Unit::Bytes, _) => "bps-write",
        (Unit::Requests, Direction::Read) => "iops-read",
        (Unit::Requests, _) => "iops-write",
    }
}

pub(super) fn throttle_group(
    tspec: &Tspec,
    direction: Direction,
    group: &str,
) -> Result<Compiled, CompileError> {
    let (compiled, bucket) = compiled(Actuator::Qemu, tspec, direction)?;
    let key = word(tspec, direction);
    let mut limits = format!("\"{key}\": {}", bucket.average);
    for (name, value) in [("max", bucket.max), ("max-length", bucket.length)] {
        limits += &value.map_or(String::new(), |value| format!(", \"{key}-{name}\": {value}"));
    }
    let json = format!(
        "{{ \"execute\": \"qom-set\", \"arguments\": {{ \"path\": \"/objects/{group}\", \"property\": \"limits\", \"value\": {{ {limits} }} }} }}"
    );
    Ok(compiled.set(Setting::Qmp { json }))
}

pub(super) fn iotune(
    tspec: &Tspec,
    direction: Direction,
    domain: &str,
    disk: &str,
) -> Result<Compiled, CompileError> {
    let (compiled, bucket) = compiled(Actuator::Libvirt, tspec, direction)?;
    let key =
        format!("{}_{}_sec", direction.name(), if tspec.unit == Unit::Bytes { "bytes" } else { "iops" });
    let all = [("", Some(bucket.average)), ("_max", bucket.max), ("_max_length", bucket.length)];
    let set = all.iter().filter_map(|(suffix, value)| Some((*suffix, (*value)?)));
    let (name, target) = (shell_argument("--domain", domain), shell_argument("--device", disk));
    let (mut xml, mut line) = (String::from("<iotune>"), format!("virsh blkdeviotune {name} {target}"));
    for (suffix, value) in set {
        xml += &format!("<{key}{suffix}>{value}</{key}{suffix}>");
        line += &format!(" --{} {value}", format!("{key}{suffix}").replace('_', "-"));
    }
    Ok(compiled
        .set(Setting::Command { line: line + " --live" })
        .set(Setting::Xml { text: xml + "</iotune>" }))
}
