//! QEMU's throttling of drives: `-drive throttling.iops-total=`, libvirt's `<iotune>`,
//! `block_set_io_throttle` (all shown by `query-block`), and the `throttle` filter of a block graph
//! with its `throttle-group` object.

use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;

/// Limits of one drive; 0 is none. A burst up to `max` may last `max-length` seconds
/// (`util/throttle.c`): with a length of 1, which 0 means too, that many may pass at any speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ThrottleLimits {
    /// Requests per second, reads and writes together.
    #[serde(default, alias = "iops-total")]
    pub iops: u64,
    /// Read requests per second.
    #[serde(default, alias = "iops-read")]
    pub iops_rd: u64,
    /// Write requests per second.
    #[serde(default, alias = "iops-write")]
    pub iops_wr: u64,
    /// Bytes per second, reads and writes together.
    #[serde(default, alias = "bps-total")]
    pub bps: u64,
    /// Bytes read per second.
    #[serde(default, alias = "bps-read")]
    pub bps_rd: u64,
    /// Bytes written per second.
    #[serde(default, alias = "bps-write")]
    pub bps_wr: u64,
    /// Burst limit of `iops`.
    #[serde(default, alias = "iops-total-max")]
    pub iops_max: u64,
    /// Burst limit of `iops_rd`.
    #[serde(default, alias = "iops-read-max")]
    pub iops_rd_max: u64,
    /// Burst limit of `iops_wr`.
    #[serde(default, alias = "iops-write-max")]
    pub iops_wr_max: u64,
    /// Burst limit of `bps`.
    #[serde(default, alias = "bps-total-max")]
    pub bps_max: u64,
    /// Burst limit of `bps_rd`.
    #[serde(default, alias = "bps-read-max")]
    pub bps_rd_max: u64,
    /// Burst limit of `bps_wr`.
    #[serde(default, alias = "bps-write-max")]
    pub bps_wr_max: u64,
    /// Length of a burst of `iops`, in seconds.
    #[serde(default, alias = "iops-total-max-length")]
    pub iops_max_length: u64,
    /// Length of a burst of `iops_rd`, in seconds.
    #[serde(default, alias = "iops-read-max-length")]
    pub iops_rd_max_length: u64,
    /// Length of a burst of `iops_wr`, in seconds.
    #[serde(default, alias = "iops-write-max-length")]
    pub iops_wr_max_length: u64,
    /// Length of a burst of `bps`, in seconds.
    #[serde(default, alias = "bps-total-max-length")]
    pub bps_max_length: u64,
    /// Length of a burst of `bps_rd`, in seconds.
    #[serde(default, alias = "bps-read-max-length")]
    pub bps_rd_max_length: u64,
    /// Length of a burst of `bps_wr`, in seconds.
    #[serde(default, alias = "bps-write-max-length")]
    pub bps_wr_max_length: u64,
    /// Bytes up to which a request counts as one, and a larger one as its part of them more; 0
    /// where each counts as one.
    #[serde(default, alias = "iops-size")]
    pub iops_size: u64,
}

/// Limit of [`ThrottleLimits`] with its burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleLimit {
    /// Name in QEMU, such as `iops-read`.
    pub name: &'static str,
    /// Maximum per second in the long run; 0 is none.
    pub average: u64,
    /// Maximum per second, or with a length of 1 at once, in a burst; 0 where none is allowed.
    pub max: u64,
    /// Longest burst, in seconds.
    pub max_length: u64,
}

impl ThrottleLimit {
    /// Maximum that passes in one second.
    #[must_use]
    pub fn passes(&self) -> u64 {
        match (self.max, self.max_length) {
            (0, _) => self.average,
            // The bucket leaks while it is being filled.
            (max, 0 | 1) => max.saturating_add(self.average),
            (max, _) => max,
        }
    }
}

impl ThrottleLimits {
    /// Whether no limit is set. Burst lengths alone limit nothing.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.set().next().is_none()
    }

    /// All six limits, also those that are not set.
    #[must_use]
    pub fn each(&self) -> [ThrottleLimit; 6] {
        let of = |name, average, max, max_length| ThrottleLimit { name, average, max, max_length };
        [
            of("iops-total", self.iops, self.iops_max, self.iops_max_length),
            of("iops-read", self.iops_rd, self.iops_rd_max, self.iops_rd_max_length),
            of("iops-write", self.iops_wr, self.iops_wr_max, self.iops_wr_max_length),
            of("bps-total", self.bps, self.bps_max, self.bps_max_length),
            of("bps-read", self.bps_rd, self.bps_rd_max, self.bps_rd_max_length),
            of("bps-write", self.bps_wr, self.bps_wr_max, self.bps_wr_max_length),
        ]
    }

    /// Whether the limit of this name counts a request by its size: what it lets through is no
    /// number of requests.
    #[must_use]
    pub fn is_by_size(&self, name: &str) -> bool {
        self.iops_size > 0 && name.starts_with("iops")
    }

    pub fn set(&self) -> impl Iterator<Item = ThrottleLimit> + use<> {
        self.each().into_iter().filter(|limit| limit.average > 0)
    }
}

impl fmt::Display for ThrottleLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.average)?;
        if self.max > 0 {
            write!(f, " {}-max={}", self.name, self.max)?;
        }
        if self.max > 0 && self.max_length > 1 {
            write!(f, " {}-max-length={}", self.name, self.max_length)?;
        }
        Ok(())
    }
}

impl fmt::Display for ThrottleLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set: Vec<String> = self.set().map(|limit| limit.to_string()).collect();
        f.write_str(&set.join(" "))
    }
}

/// Drive of QEMU with its throttling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drive {
    /// Name of the drive, or else of its device.
    pub name: String,
    /// Path of its device in QEMU, such as `/machine/peripheral/disk0/virtio-backend`, which
    /// commands take; empty for a drive without a device, and through libvirt.
    pub qdev: String,
    /// Path of its image or device as QEMU opened it; `None` for a drive without a file, such as a
    /// network disk.
    pub file: Option<PathBuf>,
    /// Whether the medium can be removed, as a CD.
    pub removable: bool,
    /// Limits that act on it: its own throttling and that of filters in its graph.
    pub limits: Vec<ThrottleLimits>,
    /// Throttle groups of the drive: drives in one group share its limits.
    pub groups: Vec<String>,
    /// Names of the other drives of these groups.
    pub shared_with: Vec<String>,
    /// Whether QEMU merges adjacent requests before its limits count them (`request-merging` of
    /// virtio-blk): a limit on requests then does not bound the guest's requests. `None` where
    /// unknown.
    pub merges: Option<bool>,
    /// Limits recorded by a management tool, where they differ from the active ones: they come into
    /// force at the next change or start.
    pub recorded: Option<ThrottleLimits>,
}

/// Fills in the drives that share a group.
pub(crate) fn name_shared(drives: &mut [Drive]) {
    let all: Vec<(String, Vec<String>)> = drives.iter().map(|d| (d.name.clone(), d.groups.clone())).collect();
    for (at, drive) in drives.iter_mut().enumerate() {
        let others = all.iter().enumerate().filter(|(other, _)| *other != at);
        let shares = |(_, (_, groups)): &(usize, &(String, Vec<String>))| {
            groups.iter().any(|group| drive.groups.contains(group))
        };
        drive.shared_with = others.filter(shares).map(|(_, (name, _))| name.clone()).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_in_both_forms() {
        let block: ThrottleLimits =
            serde_json::from_str(r#"{"iops": 50, "bps_rd": 7, "drv": "raw"}"#).unwrap();
        assert_eq!(block.to_string(), "iops-total=50 bps-read=7");
        let group: ThrottleLimits =
            serde_json::from_str(r#"{"iops-total": 70, "bps-write": 9, "iops-total-max": 3}"#).unwrap();
        assert_eq!((group.iops, group.bps_wr, group.is_none()), (70, 9, false));
        assert_eq!(group.to_string(), "iops-total=70 iops-total-max=3 bps-write=9");
        for text in [r#"{"iops": 50, "iops_size": 4096}"#, r#"{"iops-total": 50, "iops-size": 4096}"#] {
            let sized: ThrottleLimits = serde_json::from_str(text).unwrap();
            assert!(sized.is_by_size("iops-total") && !sized.is_by_size("bps-total"), "{text}");
        }
        assert!(!block.is_by_size("iops-total") && ThrottleLimits::default().is_none());
        let lengths: ThrottleLimits = serde_json::from_str(r#"{"iops-read-max-length": 1}"#).unwrap();
        assert!(lengths.is_none(), "a throttle-group without limits has lengths of 1");
    }

    #[test]
    fn a_burst_is_what_passes() {
        let of = |average, max, max_length| ThrottleLimit { name: "iops-read", average, max, max_length };
        assert_eq!(of(50, 0, 0).passes(), 50);
        assert_eq!(of(50, 2000, 60).passes(), 2000);
        assert_eq!(of(50, 2000, 1).passes(), 2050);
        assert_eq!(of(50, 2000, 60).to_string(), "iops-read=50 iops-read-max=2000 iops-read-max-length=60");
    }
}
