//! Settings in cgroups of systemd's units are given to systemd too, as runtime properties: it
//! rewrites these files by itself, and removes values that it does not know.
//!
//! Seen with systemd 252: `systemctl daemon-reload` puts `cpu.max` of running units back to `max`,
//! removes the lines of devices from `io.bfq.weight`, and takes the I/O controller, with all
//! limits, from groups in which no unit asks for it. `set-property` of a unit does so too, also
//! with systemd 257. So a cap is its `CPUQuota=`, a weight its `IODeviceWeight=`, and next to a
//! limit, a latency target or a weight of io.cost stands `IOAccounting=yes`, which keeps the
//! controller; `io.max` is not rewritten then.
//!
//! The file has the exact value, written after the property and read back.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::{HostError, Root, text, unless_gone};

use crate::error::ApplyError;
use crate::journal::Entry;
use crate::machine::Machine;
use crate::resolve::Write;
use crate::systemd::{INFINITY, PERCENT, SECOND, Unit, time_us};
use crate::target::{Form, Place, Target};

/// Directory that exists where systemd is the init (`sd_booted(3)`).
const BOOTED: &str = "/run/systemd/system";
/// The period of a quota where none is set (`systemd.resource-control(5)`), in us.
const PERIOD: u64 = 100_000;
/// The kernel's smallest quota and period, and its longest period, in us.
const SHORTEST: u64 = 1_000;

/// Whether systemd is the init.
pub fn has_systemd(root: &Root) -> Result<bool, HostError> {
    root.exists(BOOTED)
}

/// A setting that systemd removes, or changes, when it rewrites the files of its units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unkept {
    /// Name of the file in the cgroup's directory.
    pub file: String,
    /// The unit whose cgroup it is in.
    pub unit: String,
    /// Reason why systemd does not keep it.
    pub why: Why,
}

/// Reason why systemd does not keep a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Not given to systemd, and why.
    NotGiven(String),
    /// Rounded by systemd to this value.
    Rounded(String),
}

impl fmt::Display for Unkept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.why {
            Why::NotGiven(why) => write!(f, "{} of {} is lost ({why})", self.file, self.unit),
            Why::Rounded(value) => write!(f, "{} of {} becomes `{value}`", self.file, self.unit),
        }
    }
}

/// Writes, and properties of systemd's units to set before them.
pub(crate) struct Given {
    /// In order: the properties, then the files.
    pub writes: Vec<Write>,
    pub unkept: Vec<Unkept>,
}

/// Whether a property is the one by which systemd writes a file of its unit.
pub(crate) fn gives(property: &Entry, file: &Entry) -> bool {
    let is_same = match (&property.target.form, &file.target.form) {
        (Form::UnitQuota { .. }, Form::Plain) => file.target.path.ends_with("cpu.max"),
        (Form::UnitDeviceWeight { dev, .. }, Form::DeviceWeight { dev: of }) => dev == of,
        _ => false,
    };
    is_same && property.target.path.parent() == file.target.path.parent()
}

/// The unit whose own cgroup a file is in, by its name.
fn unit_of(file: &Path) -> Option<&str> {
    let dir = file.parent()?;
    let kinds = ["scope", "service", "slice"];
    let is_unit = dir.extension().is_some_and(|e| kinds.iter().any(|kind| e == OsStr::new(kind)));
    dir.file_name().filter(|_| is_unit)?.to_str()
}

/// Inserts before the writes the properties that give them to systemd. All properties come before
/// all files: a property that is set makes systemd rewrite the unit's files.
///
/// # Errors
/// When it is not known whether systemd runs here, or what it would change along.
pub(crate) fn given(all: &[Write], machine: &Machine<'_>) -> Result<Given, ApplyError> {
    let mut given = Given { writes: Vec::new(), unkept: Vec::new() };
    let mut files = all.to_vec();
    if !has_systemd(machine.root())? {
        given.writes = files;
        return Ok(given);
    }
    let mut shown: BTreeMap<String, Result<String, String>> = BTreeMap::new();
    for write in &mut files {
        let (Place::Host, Some(unit)) = (&write.target.place, unit_of(&write.target.path)) else { continue };
        let unit = unit.to_owned();
        let file = write.target.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_ours = |w: &Write| {
            matches!(
                w.target.form,
                Form::IoMax { .. }
                    | Form::DeviceWeight { .. }
                    | Form::IoWeight { .. }
                    | Form::IoLatency { .. }
            )
        };
        // Files of cgroup v1 have other names, and systemd writes them by rules of their own.
        const FILES: [&str; 5] = ["cpu.max", "io.max", "io.bfq.weight", "io.weight", "io.latency"];
        if !FILES.contains(&&*file) || (file != "cpu.max" && !is_ours(write)) {
            continue;
        }
        let text = shown.entry(unit.clone()).or_insert_with(|| shown_of(&unit, &write.target.path, machine));
        let property = match text {
            Ok(text) => property(&unit, write, &Unit::new(text), machine),
            Err(why) => Err(why.clone()),
        };
        match property {
            Ok((property, kept)) => {
                if kept != write.value && file == "cpu.max" {
                    given.unkept.push(Unkept { file, unit, why: Why::Rounded(kept.clone()) });
                }
                // On the way, and after a reload, the file has what systemd makes of it.
                write.also_ours.extend([kept, write.value.clone(), emptied(&write.target.form)]);
                if !given.writes.iter().any(|w| w.target == property.target) {
                    given.writes.push(property);
                }
            }
            Err(why) => {
                let lost = Unkept { file, unit, why: Why::NotGiven(why) };
                if !given.unkept.contains(&lost) {
                    given.unkept.push(lost);
                }
            }
        }
    }
    if !given.writes.is_empty() {
        for write in files.iter_mut().filter(|w| w.target.form == Form::IoEnabled) {
            write.also_ours.push("+io".to_owned());
        }
        side_effects(&mut given.writes, &files, &shown, machine)?;
    }
    crate::resolve::append(&mut given.writes, files);
    Ok(given)
}

/// Value of a file after systemd has removed ours.
fn emptied(form: &Form) -> String {
    form.unset().map_or_else(|| format!("max {PERIOD}"), str::to_owned)
}

/// Properties of a unit, if the file's directory is its cgroup.
fn shown_of(unit: &str, file: &Path, machine: &Machine<'_>) -> Result<String, String> {
    let text = machine.unit(unit).map_err(|fault| fault.into_io().to_string())?;
    let group = Unit::new(&text).first("ControlGroup").unwrap_or_default().trim_start_matches('/');
    let dir = file.parent().unwrap_or(file);
    if group.is_empty() || !dir.ends_with(group) {
        return Err(format!("the unit of that name has another cgroup, `/{group}`"));
    }
    Ok(text)
}

/// The property for a write, and the value that systemd gives to the file by it.
fn property(
    unit: &str,
    write: &Write,
    now: &Unit<'_>,
    machine: &Machine<'_>,
) -> Result<(Write, String), String> {
    let named = |name: &str, form: Form, value: String| {
        let target = Target::host(write.target.path.with_file_name(name), form);
        Write { takes: write.takes, ..Write::new(format!("{name} of {unit}"), target, value) }
    };
    let unit = unit.to_owned();
    match &write.target.form {
        Form::DeviceWeight { dev } => {
            let weight = write.value.parse().map_err(|_| format!("`{}` is no weight", write.value))?;
            let path = path_of(dev, now, machine)?;
            let form = Form::UnitDeviceWeight { unit, dev: dev.clone(), path };
            Ok((named("IODeviceWeight", form, systemd_weight(weight).to_string()), write.value.clone()))
        }
        Form::IoWeight { dev } if weighed_as(dev, now, machine)?.is_some() => {
            Err("the unit has its own `IODeviceWeight=` of the device, which systemd writes there".to_owned())
        }
        Form::IoLatency { .. } if now.has_latency_target() => {
            Err("the unit has `IODeviceLatencyTargetSec=`, which systemd writes there".to_owned())
        }
        // systemd erases no device's line of `io.weight`: writing its default leaves them. Of
        // `io.latency` it writes the lines of devices that the unit names.
        Form::IoMax { .. } | Form::IoWeight { .. } | Form::IoLatency { .. } => {
            Ok((named("IOAccounting", Form::UnitIo { unit }, "yes".to_owned()), write.value.clone()))
        }
        _ => {
            let period_now = now.first("CPUQuotaPeriodUSec").and_then(time_us).unwrap_or_default();
            let (value, kept) = quota(&write.value, &period_now)
                .ok_or_else(|| format!("`{}` is no cap of a group", write.value))?;
            Ok((named("CPUQuota", Form::UnitQuota { unit }, value), kept))
        }
    }
}

/// The properties for a value of `cpu.max`, and what systemd makes of them: a whole percent,
/// rounded up, because that is what its drop-in files keep, and the VM is to have no less than its
/// contract (`cgroup_cpu_adjust_period()`: quota and period have at least 1 ms).
fn quota(cpu_max: &str, period_now: &str) -> Option<(String, String)> {
    let (quota, period) = cpu_max.split_once(' ')?;
    let period: u64 = period.parse().ok()?;
    let unset = period == PERIOD && period_now == INFINITY;
    let shown = if unset { INFINITY.to_owned() } else { period.to_string() };
    if quota == "max" {
        return Some((format!("{INFINITY} {shown}"), format!("max {period}")));
    }
    let quota: u64 = quota.parse().ok()?;
    // In 128 bits: any product of two times fits.
    let exact = (u128::from(quota) * u128::from(SECOND)).div_ceil(u128::from(period.max(1)));
    let per_second = u64::try_from(exact).ok()?.div_ceil(PERCENT).max(1).checked_mul(PERCENT)?;
    let stretched = (SHORTEST * SECOND).div_ceil(per_second);
    let taken = period.max(stretched).clamp(SHORTEST, SECOND);
    let kept = u128::from(per_second) * u128::from(taken) / u128::from(SECOND);
    Some((format!("{per_second} {shown}"), format!("{kept} {taken}")))
}

/// systemd's weight from 1 to 10000 of which it makes this BFQ weight from 1 to 1000: both have 100
/// as default, and are mapped by a line on each side of it (`BFQ_WEIGHT()`).
#[must_use]
pub fn systemd_weight(bfq: u64) -> u64 {
    if bfq <= 100 { bfq } else { 100 + 11 * (bfq - 100) }
}

/// Name of a device in a unit's properties: the path that is set there already, or
/// `/dev/block/MAJ:MIN`, which needs no file.
fn path_of(dev: &str, now: &Unit<'_>, machine: &Machine<'_>) -> Result<String, String> {
    Ok(weighed_as(dev, now, machine)?.unwrap_or_else(|| format!("/dev/block/{dev}")))
}

/// Name by which a unit has a weight for a device.
fn weighed_as(dev: &str, now: &Unit<'_>, machine: &Machine<'_>) -> Result<Option<String>, String> {
    let number = format!("/dev/block/{dev}");
    let weights = now.device_weights().ok_or("its weights of devices are not understood")?;
    for (path, _) in weights {
        if path == number {
            return Ok(Some(number));
        }
        let found = machine.host().device(Path::new(path)).map_err(|e| format!("{path}: {e}"))?;
        if found == dev {
            return Ok(Some(path.to_owned()));
        }
    }
    Ok(None)
}

/// Adds what systemd changes along with a property: what was written by hand into the unit's files,
/// and the I/O controller above it.
fn side_effects(
    properties: &mut [Write],
    files: &[Write],
    shown: &BTreeMap<String, Result<String, String>>,
    machine: &Machine<'_>,
) -> Result<(), ApplyError> {
    let read = |path: PathBuf| {
        let text = unless_gone(machine.host().read(&path));
        text.map_err(|source| HostError::Read { path, source })
    };
    let is_free = |target: &Target| !files.iter().any(|w| w.target == *target);
    for property in properties {
        let Some(dir) = property.target.path.parent() else { continue };
        let Some(Ok(text)) = unit_of(&property.target.path).and_then(|unit| shown.get(unit)) else {
            continue;
        };
        let unit = Unit::new(text);
        let mut found = Vec::new();
        let by_hand = |name: &str, unset: &str| {
            Ok::<_, HostError>(read(dir.join(name))?.is_some_and(|value| !value.starts_with(unset)))
        };
        if unit.first("CPUQuotaPerSecUSec") == Some(INFINITY) && by_hand("cpu.max", "max 100000")? {
            found.push(Target::host(dir.join("cpu.max"), Form::Plain));
        }
        if unit.first("CPUWeight") == Some("[not set]") && by_hand("cpu.weight", "100\n")? {
            found.push(Target::host(dir.join("cpu.weight"), Form::Plain));
        }
        if unit.device_weights().is_some_and(|w| w.is_empty()) {
            let weights = read(dir.join("io.bfq.weight"))?.and_then(|file| text::weights(&file));
            for dev in weights.into_iter().flat_map(|w| w.devices.into_keys()) {
                found.push(Target::host(dir.join("io.bfq.weight"), Form::DeviceWeight { dev }));
            }
        }
        for above in dir.ancestors().skip(1) {
            let file = above.join("cgroup.subtree_control");
            match read(file.clone())? {
                Some(controllers) if text::has_word(&controllers, "io") => {
                    found.push(Target::host(file, Form::IoEnabled));
                }
                Some(_) => {}
                None => break,
            }
        }
        property.side_effects.extend(found.into_iter().filter(is_free));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
