//! QEMU's own throttling of drives: `-drive throttling.iops-total=`, libvirt's `<iotune>`,
//! `block_set_io_throttle` (all shown by `query-block`), and the `throttle` filter of a block graph
//! with its `throttle-group` object.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Qmp, VmmError};

/// Nodes that a filename in JSON form may nest.
const MOST_NODES: usize = 64;

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
            let graph = Graph::of(&inserted.file);
            let mut drive = Drive {
                name: if block.device.is_empty() { device_name(&block.qdev) } else { block.device },
                file: graph.file,
                removable: block.removable,
                limits: Vec::new(),
                groups: Vec::new(),
            };
            if !inserted.limits.is_none() {
                drive.limits.push(inserted.limits);
                drive.groups.extend(inserted.group);
            }
            for group in graph.groups {
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
        serde_json::from_value(value).map_err(|e| self.protocol("qom-get", e.to_string()))
    }
}

/// `disk0` of `/machine/peripheral/disk0/virtio-backend`.
fn device_name(qdev: &str) -> String {
    qdev.split('/').nth(3).unwrap_or(qdev).to_owned()
}

/// What a filename shows of a drive's graph.
#[derive(Debug, Default, PartialEq, Eq)]
struct Graph {
    file: Option<PathBuf>,
    groups: Vec<String>,
}

impl Graph {
    /// A plain path, or QEMU's `json:{...}` where filters lie between.
    fn of(filename: &str) -> Self {
        let Some(text) = filename.strip_prefix("json:") else {
            let file = (!filename.is_empty() && !filename.contains("://")).then(|| PathBuf::from(filename));
            return Self { file, groups: Vec::new() };
        };
        let mut graph = Self::default();
        let whole: Value = serde_json::from_str(text).unwrap_or_default();
        let mut node = &whole;
        for _ in 0..MOST_NODES {
            let text = |key: &str| node.get(key).and_then(Value::as_str);
            graph.groups.extend(text("throttle-group").map(str::to_owned));
            if let Some(file) = text("filename") {
                graph.file = Some(Path::new(file).to_owned());
            }
            // Both forms are QEMU's: an object, or dotted keys of a flattened one.
            if let Some(file) = text("file.filename").or_else(|| text("file.file.filename")) {
                graph.file = Some(Path::new(file).to_owned());
            }
            match node.get("file") {
                Some(below) => node = below,
                None => break,
            }
        }
        graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filename_shows_the_file_and_the_groups() {
        let of = |text: &str| Graph::of(text);
        assert_eq!(of("/vm/a.img"), Graph { file: Some("/vm/a.img".into()), groups: vec![] });
        assert_eq!(of(""), Graph::default());
        assert_eq!(of("nbd://host/x"), Graph::default());
        assert_eq!(of("json:{\"driver\": [1"), Graph::default());
        let nested = r#"json:{"throttle-group": "tg0", "driver": "throttle", "file": {"driver": "raw", "file": {"driver": "file", "filename": "/b.img"}}}"#;
        assert_eq!(of(nested), Graph { file: Some("/b.img".into()), groups: vec!["tg0".to_owned()] });
        let deep = format!("json:{}{{}}{}", r#"{"file":"#.repeat(100), "}".repeat(100));
        assert_eq!(of(&deep), Graph::default());
    }

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
