//! QEMU's own throttling of drives: `-drive throttling.iops-total=`, libvirt's `<iotune>`,
//! `block_set_io_throttle` (all shown by `query-block`), and the `throttle` filter of a block graph
//! with its `throttle-group` object.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::json;

use crate::block_node::BlockNode;
use crate::{Qmp, VmmError};

/// Limits of one drive; 0 is none. A burst allowance (`iops-total-max`) is not kept: it lasts for
/// seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ThrottleLimits {
    /// Requests per second, reads and writes together.
    #[serde(default, alias = "iops-total")]
    pub iops: u64,
    /// Reads per second.
    #[serde(default, alias = "iops-read")]
    pub iops_rd: u64,
    /// Writes per second.
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
}

impl ThrottleLimits {
    /// Whether there is none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for ThrottleLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [
            ("iops-total", self.iops),
            ("iops-read", self.iops_rd),
            ("iops-write", self.iops_wr),
            ("bps-total", self.bps),
            ("bps-read", self.bps_rd),
            ("bps-write", self.bps_wr),
        ];
        let set: Vec<String> =
            all.iter().filter(|(_, v)| *v > 0).map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&set.join(" "))
    }
}

/// One of QEMU's drives with its throttling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Name of the drive, else of its device.
    pub name: String,
    /// Path of its image or device as QEMU opened it; `None` for one that has no file, such as a
    /// network disk.
    pub file: Option<PathBuf>,
    /// Whether it can be taken out, as a CD.
    pub removable: bool,
    /// What limits it: its own throttling and that of filters in its graph. Empty without any.
    pub limits: Vec<ThrottleLimits>,
    /// Drives with one group share its limits.
    pub groups: Vec<String>,
}

#[derive(Deserialize)]
struct BlockInfo {
    #[serde(default)]
    device: String,
    #[serde(default)]
    qdev: String,
    #[serde(default)]
    removable: bool,
    inserted: Option<Inserted>,
}

#[derive(Deserialize)]
struct Inserted {
    #[serde(default)]
    file: String,
    group: Option<String>,
    #[serde(flatten)]
    limits: ThrottleLimits,
}

impl Qmp {
    /// The drives that have a medium, with what throttles them.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn query_drives(&mut self) -> Result<Vec<Drive>, VmmError> {
        let blocks: Vec<BlockInfo> = self.typed("query-block")?;
        let mut groups = BTreeMap::new();
        let mut drives = Vec::new();
        for block in blocks {
            let Some(inserted) = block.inserted else { continue };
            let node = BlockNode::of(&inserted.file);
            let mut drive = Drive {
                name: if block.device.is_empty() { device_name(&block.qdev) } else { block.device },
                file: node.file,
                removable: block.removable,
                limits: Vec::new(),
                groups: Vec::new(),
            };
            if !inserted.limits.is_none() {
                drive.limits.push(inserted.limits);
                drive.groups.extend(inserted.group);
            }
            for group in node.groups {
                let limits = match groups.get(&group) {
                    Some(known) => *known,
                    None => *groups.entry(group.clone()).or_insert(self.group_limits(&group)?),
                };
                if !limits.is_none() {
                    drive.limits.push(limits);
                    drive.groups.push(group);
                }
            }
            drives.push(drive);
        }
        Ok(drives)
    }

    /// Limits of a `throttle-group` object.
    fn group_limits(&mut self, group: &str) -> Result<ThrottleLimits, VmmError> {
        let arguments = json!({ "path": format!("/objects/{group}"), "property": "limits" });
        let value = self.execute("qom-get", Some(arguments))?;
        serde_json::from_value(value).map_err(|e| self.link.protocol("qom-get", e.to_string()))
    }
}

/// `disk0` of `/machine/peripheral/disk0/virtio-backend`.
fn device_name(qdev: &str) -> String {
    qdev.split('/').nth(3).unwrap_or(qdev).to_owned()
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
        assert!(ThrottleLimits::default().is_none());
    }
}
