//! Drives of QEMU with their throttling, from `query-block` and the `throttle-group` objects of
//! their filters.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::json;

use super::Qmp;
use crate::VmmError;
use crate::block_node::BlockNode;
use crate::throttle::{Drive, ThrottleLimits, name_shared};

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
    /// Drives with a medium, and their throttling.
    pub fn query_drives(&mut self) -> Result<Vec<Drive>, VmmError> {
        let blocks: Vec<BlockInfo> = self.drives("query-block")?;
        let mut groups = BTreeMap::new();
        let mut drives = Vec::new();
        for block in blocks {
            let Some(inserted) = block.inserted else { continue };
            let node = BlockNode::parse(&inserted.file);
            let mut drive = Drive {
                name: if block.device.is_empty() { device_name(&block.qdev) } else { block.device.clone() },
                file: node.file,
                removable: block.removable,
                merges: self.merges(&block.qdev)?,
                qdev: block.qdev.clone(),
                ..Drive::default()
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
        name_shared(&mut drives);
        Ok(drives)
    }

    /// Whether a device merges adjacent requests. Only virtio-blk has the property and does; `None`
    /// for a drive without a device.
    fn merges(&mut self, qdev: &str) -> Result<Option<bool>, VmmError> {
        if qdev.is_empty() {
            return Ok(None);
        }
        let path =
            if qdev.starts_with('/') { qdev.to_owned() } else { format!("/machine/peripheral/{qdev}") };
        let arguments = json!({ "path": path, "property": "request-merging" });
        match self.execute("qom-get", Some(arguments)) {
            Ok(value) => Ok(value.as_bool()),
            Err(VmmError::Refused { desc, .. }) if desc.ends_with("request-merging' not found") => {
                Ok(Some(false))
            }
            // Unplugged meanwhile, or under another name.
            Err(VmmError::Refused { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Limits of a `throttle-group` object.
    fn group_limits(&mut self, group: &str) -> Result<ThrottleLimits, VmmError> {
        let arguments = json!({ "path": format!("/objects/{group}"), "property": "limits" });
        let value = self.execute("qom-get", Some(arguments))?;
        serde_json::from_value(value).map_err(|e| self.link.protocol("qom-get", e.to_string()))
    }
}

/// Device id: `disk0` of `/machine/peripheral/disk0/virtio-backend`.
fn device_name(qdev: &str) -> String {
    qdev.split('/').nth(3).unwrap_or(qdev).to_owned()
}
