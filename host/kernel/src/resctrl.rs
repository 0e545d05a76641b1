//! Memory bandwidth and cache of groups of threads: resctrl
//! (`Documentation/filesystems/resctrl.rst`), for RDT of Intel, QoS extensions of AMD, MPAM of Arm.
//!
//! CPU accesses are counted and limited; DMA of devices is in no group. [`MemoryLook`] gives the
//! bandwidth of a VM.

mod groups;
mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::mounts::mounts;
use crate::{HostError, Root, text};

pub use groups::{ControlGroup, line_values, task_group};
pub use watch::{MemoryLook, absent, uncounted};

/// Usual mount point of resctrl.
pub const USUAL_MOUNT: &str = "/sys/fs/resctrl";

/// Vendor of the CPU, which decides the unit of memory bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Maker {
    /// Intel RDT: percent, enforced by delays.
    Intel,
    /// AMD QoS extensions: multiples of 1/8 GB per second.
    Amd,
    /// Arm MPAM: percent of the bandwidth.
    Arm,
    /// Unknown vendor, and so an unknown unit.
    Other,
}

/// Availability of resctrl on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offer {
    /// No resctrl in this kernel, or a CPU without.
    Absent,
    /// Supported but not mounted.
    NotMounted,
    /// Mounted, with its controls.
    Mounted(Resctrl),
}

/// Controls and counters of a mounted resctrl.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Resctrl {
    /// Mount point of the file system.
    pub mount: PathBuf,
    /// Vendor of the CPU.
    pub maker: Maker,
    /// Control of memory bandwidth (`MB`).
    pub memory: Option<MemoryBandwidth>,
    /// Control of the bandwidth of slow memory, such as CXL's (`SMBA`, AMD).
    pub slow_memory: Option<MemoryBandwidth>,
    /// Control of the L3 cache.
    pub cache: Option<CacheWays>,
    /// Largest number of control groups, the default one included (`num_closids`); `None` where no
    /// control shows it.
    pub classes: Option<u64>,
    /// Events that can be counted per group (`info/L3_MON/mon_features`); empty without monitoring.
    pub features: Vec<String>,
}

/// Control of memory bandwidth (`info/MB`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryBandwidth {
    /// Smallest value of a group (`min_bandwidth`).
    pub least: u32,
    /// Step between values (`bandwidth_gran`).
    pub step: u32,
    /// Value without a limit, from the root group's schemata.
    pub most: u32,
    /// Whether values are MiB per second (`mba_MBps`).
    pub in_mib: bool,
    /// Ids of the resctrl domains, such as L3 caches.
    pub domains: Vec<u32>,
}

/// Control of the L3 cache (`info/L3`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheWays {
    /// Bit mask of all ways (`cbm_mask`).
    pub all: u64,
    /// Fewest ways of a group (`min_cbm_bits`).
    pub least: u32,
    /// Bit mask of the ways into which devices write too (`shareable_bits`).
    pub shareable: u64,
    /// Ids of the L3 caches.
    pub domains: Vec<u32>,
    /// Whether a mask may have gaps (`sparse_masks`; no where the kernel has no such file).
    pub sparse: bool,
    /// Whether code and data have masks of their own (mount option `cdp`).
    pub cdp: bool,
    /// Whether devices have ways of their own now (`io_alloc`); `None` where they cannot.
    pub devices: Option<bool>,
}

impl CacheWays {
    /// Names of the lines in a schemata file.
    #[must_use]
    pub fn resources(&self) -> &'static [&'static str] {
        if self.cdp { &["L3CODE", "L3DATA"] } else { &["L3"] }
    }
}

/// Counter of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Counter {
    /// Number of bytes, over all domains.
    Bytes(u64),
    /// Text that the kernel shows instead: `Unavailable`, `Error`, `Unassigned`.
    No(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupCounters {
    /// Path of the group below the mount point; empty for the root group.
    pub group: String,
    /// Bytes moved to and from memory (`mbm_total_bytes`).
    pub total: Option<Counter>,
    /// Part of these bytes with memory of the same node (`mbm_local_bytes`).
    pub local: Option<Counter>,
}

/// Looks for resctrl.
pub fn find(root: &Root) -> Result<Offer, HostError> {
    let all = mounts(root)?;
    let Some(mount) = all.into_iter().find(|mount| mount.fs == "resctrl") else {
        // `nodev<TAB>resctrl`; the line exists only where the CPU supports a part of it.
        let known = root.read_optional("/proc/filesystems")?.unwrap_or_default();
        return Ok(if text::has_word(&known, "resctrl") { Offer::NotMounted } else { Offer::Absent });
    };
    let schemata = root.read(mount.point.join("schemata"))?;
    let info = mount.point.join("info");
    let in_mib = mount.options.iter().any(|option| option == "mba_MBps");
    let features = root.read_optional(info.join("L3_MON/mon_features"))?.unwrap_or_default();
    Ok(Offer::Mounted(Resctrl {
        maker: maker(&root.read_optional("/proc/cpuinfo")?.unwrap_or_default()),
        memory: memory(root, &info, &schemata, ("MB", in_mib))?,
        slow_memory: memory(root, &info, &schemata, ("SMBA", false))?,
        cache: cache(root, &info, &schemata)?,
        classes: classes(root, &info)?,
        features: features.lines().map(|line| line.trim().to_owned()).filter(|f| !f.is_empty()).collect(),
        mount: mount.point,
    }))
}

/// Vendor of the CPU, from `/proc/cpuinfo`.
fn maker(cpuinfo: &str) -> Maker {
    let value = |key: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().map(str::trim) == Some(key))?;
        line.split_once(':').map(|(_, value)| value.trim())
    };
    match (value("vendor_id"), value("CPU implementer")) {
        (Some("GenuineIntel"), _) => Maker::Intel,
        (Some("AuthenticAMD" | "HygonGenuine"), _) => Maker::Amd,
        (None, Some(_)) => Maker::Arm,
        _ => Maker::Other,
    }
}

/// Whether this host is itself a virtual machine, by the `hypervisor` flag of its CPU.
#[must_use]
pub fn is_virtual(cpuinfo: &str) -> bool {
    cpuinfo.lines().any(|line| line.starts_with("flags") && text::has_word(line, "hypervisor"))
}

/// Domains and values of a resource in a schemata file: `    MB:0=100;1=100`.
///
/// `None` for a line that is not understood; an empty list without a line.
#[must_use]
pub fn schema(text: &str, resource: &str, radix: u32) -> Option<Vec<(u32, u64)>> {
    let line = text.lines().find_map(|line| line.trim().strip_prefix(resource)?.strip_prefix(':'));
    let Some(line) = line else { return Some(Vec::new()) };
    line.split(';')
        .map(|part| {
            let (domain, value) = part.split_once('=')?;
            Some((domain.trim().parse().ok()?, u64::from_str_radix(value.trim(), radix).ok()?))
        })
        .collect()
}

fn number(root: &Root, path: PathBuf, radix: u32) -> Result<u64, HostError> {
    let text = root.read(&path)?;
    let wrong = HostError::Form { path, text: text.clone(), expected: "a number" };
    u64::from_str_radix(text.trim().trim_start_matches("0x"), radix).map_err(|_| wrong)
}

fn memory(
    root: &Root,
    info: &Path,
    schemata: &str,
    (resource, in_mib): (&str, bool),
) -> Result<Option<MemoryBandwidth>, HostError> {
    let dir = info.join(resource);
    if !root.exists(&dir)? {
        return Ok(None);
    }
    let small = |file: &str| -> Result<u32, HostError> {
        Ok(u32::try_from(number(root, dir.join(file), 10)?).unwrap_or(u32::MAX))
    };
    let values = schema(schemata, resource, 10).ok_or_else(|| bad(schemata))?;
    Ok(Some(MemoryBandwidth {
        least: small("min_bandwidth")?,
        step: small("bandwidth_gran")?,
        most: values.iter().map(|(_, value)| u32::try_from(*value).unwrap_or(u32::MAX)).max().unwrap_or(0),
        in_mib,
        domains: values.into_iter().map(|(domain, _)| domain).collect(),
    }))
}

fn cache(root: &Root, info: &Path, schemata: &str) -> Result<Option<CacheWays>, HostError> {
    let cdp = root.exists(info.join("L3CODE"))?;
    let resource = if cdp { "L3CODE" } else { "L3" };
    let dir = info.join(resource);
    if !root.exists(&dir)? {
        return Ok(None);
    }
    let values = schema(schemata, resource, 16).ok_or_else(|| bad(schemata))?;
    let sparse = dir.join("sparse_masks");
    let devices = root.read_optional(info.join("L3/io_alloc"))?;
    Ok(Some(CacheWays {
        all: number(root, dir.join("cbm_mask"), 16)?,
        least: u32::try_from(number(root, dir.join("min_cbm_bits"), 10)?).unwrap_or(u32::MAX),
        shareable: number(root, dir.join("shareable_bits"), 16)?,
        domains: values.into_iter().map(|(domain, _)| domain).collect(),
        sparse: root.exists(&sparse)? && number(root, sparse, 10)? == 1,
        cdp,
        devices: match devices.as_deref().map(str::trim) {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            _ => None,
        },
    }))
}

/// Smallest `num_closids` of all controls: a group has a class of each.
fn classes(root: &Root, info: &Path) -> Result<Option<u64>, HostError> {
    let mut least = None;
    if !root.exists(info)? {
        return Ok(None);
    }
    for control in root.list(info)? {
        let file = info.join(control).join("num_closids");
        if root.exists(&file)? {
            let number = number(root, file, 10)?;
            least = Some(least.map_or(number, |least: u64| least.min(number)));
        }
    }
    Ok(least)
}

fn bad(schemata: &str) -> HostError {
    let text = schemata.to_owned();
    HostError::Form { path: "schemata".into(), text, expected: "lines such as MB:0=100;1=100" }
}

impl Resctrl {
    /// Whether the kernel counts the bytes that groups move.
    #[must_use]
    pub fn counts_bandwidth(&self) -> bool {
        self.features.iter().any(|feature| feature.starts_with("mbm_"))
    }

    /// Counters of every group: control groups and, below them, monitoring groups. A group that
    /// vanishes meanwhile is left out.
    pub fn counters(&self, root: &Root) -> Result<Vec<GroupCounters>, HostError> {
        let mut groups = vec![self.mount.clone()];
        groups.extend(children(root, &self.mount)?);
        let mut monitored = Vec::new();
        for group in &groups {
            let dir = group.join("mon_groups");
            if root.exists(&dir)? {
                monitored.extend(children(root, &dir)?);
            }
        }
        groups.extend(monitored);
        let mut all = Vec::new();
        for group in groups {
            match self.counters_of(root, &group) {
                Ok(counters) => all.push(counters),
                Err(e) if e.is_gone() && group != self.mount => {}
                Err(e) => return Err(e),
            }
        }
        Ok(all)
    }

    fn counters_of(&self, root: &Root, group: &Path) -> Result<GroupCounters, HostError> {
        let name = group.strip_prefix(&self.mount).unwrap_or(group).display().to_string();
        let has = |feature: &str| self.features.iter().any(|f| f == feature);
        let data = group.join("mon_data");
        let of = |feature: &str| -> Result<Option<Counter>, HostError> {
            if !has(feature) {
                return Ok(None);
            }
            let mut sum = Counter::Bytes(0);
            for domain in root.list(&data)?.iter().filter(|name| name.starts_with("mon_L3_")) {
                let found = root.read(data.join(domain).join(feature))?;
                sum = match (sum, found.trim().parse::<u64>()) {
                    (Counter::Bytes(sum), Ok(more)) => Counter::Bytes(sum.saturating_add(more)),
                    (Counter::Bytes(_), Err(_)) => Counter::No(found.trim().to_owned()),
                    (no, _) => no,
                };
            }
            Ok(Some(sum))
        };
        Ok(GroupCounters { group: name, total: of("mbm_total_bytes")?, local: of("mbm_local_bytes")? })
    }
}

/// Groups directly below a directory.
fn children(root: &Root, dir: &Path) -> Result<Vec<PathBuf>, HostError> {
    let not_groups = ["info", "mon_data", "mon_groups"];
    let all = root.list(dir)?.into_iter().filter(|name| !not_groups.contains(&name.as_str()));
    Ok(all.map(|name| dir.join(name)).filter(|path| root.at(path).is_dir()).collect())
}

/// Bytes per second of a counter between two reads; `None` where one of them shows no number, or
/// the counter was reset.
#[must_use]
pub fn rate(before: Option<&Counter>, after: Option<&Counter>, time: Duration) -> Option<f64> {
    let (Some(Counter::Bytes(before)), Some(Counter::Bytes(after))) = (before, after) else { return None };
    let seconds = time.as_secs_f64();
    (seconds > 0.0).then_some(after.checked_sub(*before)? as f64 / seconds)
}

#[cfg(test)]
mod tests;
