//! Stacked devices: the disks below a device on which its requests are scheduled.
//!
//! A device that takes bios and passes them on (LVM, dm-crypt, md, bcache, the head of NVMe
//! multipath) has no I/O scheduler; `elv_support_iosched()` and `blk_register_queue()` in the
//! kernel's `block/`. Its requests are scheduled on the disks below: dm, md and bcache name them in
//! `slaves/` (`Documentation/ABI/stable/sysfs-block`), NVMe in `multipath/` since Linux 6.15 and by
//! the names of the hidden paths before (`nvme_mpath_set_disk_name()`: `nvme0c1n2` is the path of
//! `nvme0n2` through controller 1).

use std::collections::BTreeSet;
use std::path::Path;

use super::BlockDevice;
use crate::{HostError, Root, text};

/// Deepest stack that is followed: partition, RAID, encryption, volume and cache together have five
/// levels.
const MAX_DEPTH: usize = 16;

/// Device with the disks on which its requests are scheduled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// Device that VMs open, or its whole disk where that is a partition. Limits act here:
    /// blk-throttle works on bios where they are submitted (`submit_bio_noacct()`).
    pub device: BlockDevice,
    /// Disks with an I/O scheduler, by name: the device itself, or those below it. Elevator,
    /// tunables and weights act here. Empty where none is visible.
    pub disks: Vec<BlockDevice>,
    /// Limitations of this stack, a sentence each.
    pub notes: Vec<String>,
}

impl Stack {
    /// Follows a device down to the disks that schedule.
    pub fn resolve(root: &Root, device: BlockDevice) -> Result<Self, HostError> {
        let mut walk = Walk { root, seen: BTreeSet::new(), disks: Vec::new(), notes: Vec::new() };
        walk.down(&device, 0)?;
        let Walk { mut disks, mut notes, .. } = walk;
        disks.sort_by(|a, b| a.name.cmp(&b.name));
        if disks.iter().any(BlockDevice::is_hidden) {
            notes.push(format!(
                "the paths of {} have no device number, so no cgroup can have a weight on them; limits act on {} itself",
                device.name, device.name
            ));
        }
        Ok(Self { device, disks, notes })
    }

    /// Finds a device, as [`BlockDevice::find`], and follows it.
    pub fn find(root: &Root, name: impl AsRef<Path>) -> Result<Self, HostError> {
        Self::resolve(root, BlockDevice::find(root, name)?)
    }

    /// Whether the device schedules its requests itself.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.disks.iter().map(|d| &d.name).eq([&self.device.name])
    }

    /// Names of the disks, for a sentence.
    #[must_use]
    pub fn names(&self) -> String {
        self.disks.iter().map(|d| d.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Sentence with the devices on which settings act; `None` for a whole disk that schedules its
    /// requests itself.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        let name = &self.device.name;
        if self.is_plain() {
            let partition = self.device.partition.as_ref()?;
            Some(format!("{partition} is a partition: settings act on the whole disk {name}"))
        } else if self.disks.is_empty() {
            Some(format!(
                "{name} passes requests on, and no disk below it is seen that orders them: only limits can act"
            ))
        } else {
            Some(format!(
                "{name} passes requests on: I/O scheduler and weights act on {} below it, limits on {name} itself",
                self.names()
            ))
        }
    }

    /// Sentences with the devices on which settings act when these are others than the device
    /// itself, and with the limitations of the stack.
    #[must_use]
    pub fn notes_on_settings(&self) -> Vec<String> {
        self.describe().into_iter().chain(self.notes.iter().cloned()).collect()
    }

    /// The elevators that every disk offers; only `none` where no disk is seen.
    pub fn offered(&self, root: &Root) -> Result<Vec<String>, HostError> {
        let mut disks = self.disks.iter();
        let Some(first) = disks.next() else { return Ok(no_choice().available) };
        let mut offered = first.elevators(root)?.available;
        for disk in disks {
            let other = disk.elevators(root)?.available;
            offered.retain(|name| other.contains(name));
        }
        Ok(offered)
    }

    /// Checks that an elevator can be chosen on every disk.
    ///
    /// # Errors
    /// As [`BlockDevice::offers`]; where no disk is seen there is only `none`.
    pub fn offers(&self, root: &Root, wanted: &str) -> Result<(), HostError> {
        if self.disks.is_empty() {
            return self.device.offers(root, wanted);
        }
        self.disks.iter().try_for_each(|disk| disk.offers(root, wanted))
    }
}

/// State of the descent through a stack.
struct Walk<'a> {
    root: &'a Root,
    seen: BTreeSet<String>,
    disks: Vec<BlockDevice>,
    notes: Vec<String>,
}

impl Walk<'_> {
    fn down(&mut self, device: &BlockDevice, depth: usize) -> Result<(), HostError> {
        if depth > MAX_DEPTH || !self.seen.insert(device.name.clone()) {
            return Ok(());
        }
        if device.schedules(self.root)? {
            self.disks.push(device.clone());
            self.notes.extend(behind_a_network(self.root, device));
            return Ok(());
        }
        let below = device.below(self.root)?;
        if below.is_empty() {
            self.notes.push(leaf(&device.name));
        }
        if let Some(note) = workers(self.root, device)? {
            self.notes.push(note);
        }
        below.iter().try_for_each(|one| self.down(one, depth + 1))
    }
}

impl BlockDevice {
    /// Whether the device has an I/O scheduler, `none` included. The kernel prints a bare `none`
    /// for a queue that cannot have one, and since Linux 6.5 has no file for it.
    pub(super) fn schedules(&self, root: &Root) -> Result<bool, HostError> {
        let file = root.read_optional(self.queue("scheduler"))?;
        Ok(file.is_some_and(|text| text.contains('[')))
    }

    /// Devices directly below; empty where there are none, or none is visible.
    pub(super) fn below(&self, root: &Root) -> Result<Vec<Self>, HostError> {
        let mut below = Vec::new();
        for name in names(root, &self.sysfs().join("slaves"))? {
            below.push(Self::find(root, name)?);
        }
        for name in self.paths(root)? {
            below.push(Self { name, dev: String::new(), partition: None });
        }
        Ok(below)
    }

    /// Hidden paths of the head of an NVMe multipath device.
    fn paths(&self, root: &Root) -> Result<Vec<String>, HostError> {
        let Some((subsystem, namespace)) = head(&self.name) else { return Ok(Vec::new()) };
        let linked = names(root, &self.sysfs().join("multipath"))?;
        if !linked.is_empty() {
            return Ok(linked);
        }
        let is_path = |name: &String| {
            let rest = name.strip_prefix(&format!("nvme{subsystem}c"));
            let rest = rest.and_then(|rest| rest.strip_suffix(&format!("n{namespace}")));
            rest.is_some_and(is_number)
        };
        Ok(names(root, Path::new("/sys/block"))?.into_iter().filter(is_path).collect())
    }

    /// Whether it is a hidden path of a multipath device, which has no device number.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.dev.is_empty()
    }
}

/// Numbers of subsystem and namespace: `0` and `1` of `nvme0n1`.
fn head(name: &str) -> Option<(&str, &str)> {
    let (subsystem, namespace) = name.strip_prefix("nvme")?.split_once('n')?;
    (is_number(subsystem) && is_number(namespace)).then_some((subsystem, namespace))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// Names in a directory that need not be there.
fn names(root: &Root, dir: &Path) -> Result<Vec<String>, HostError> {
    match root.list(dir) {
        Err(e) if e.is_gone() => Ok(Vec::new()),
        list => list,
    }
}

/// Note on a device that neither schedules nor names the devices below it.
fn leaf(name: &str) -> String {
    let kind = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    if kind("zd") {
        format!(
            "{name} is a volume of ZFS, which orders requests in its pool by itself: what happens below is not seen"
        )
    } else if kind("zram") {
        format!("{name} is memory: there is no disk below it")
    } else if kind("drbd") {
        format!("{name} is replicated by DRBD, which does not name what is below it")
    } else {
        format!("{name} has no I/O scheduler and does not name what is below it")
    }
}

/// Note on layers that pass requests to kernel threads, where BFQ cannot tell the VMs' processes
/// apart, although it still knows their cgroups: dm-crypt without `no_read_workqueue` and
/// `no_write_workqueue`, RAID with parity.
fn workers(root: &Root, device: &BlockDevice) -> Result<Option<String>, HostError> {
    let uuid = root.read_optional(device.sysfs().join("dm/uuid"))?.unwrap_or_default();
    let level = root.read_optional(device.sysfs().join("md/level"))?.unwrap_or_default();
    let name = &device.name;
    Ok(if uuid.starts_with("CRYPT-") {
        Some(format!(
            "{name} is encrypted: kernel threads submit its requests, unless it was opened with \
             --perf-no_read_workqueue and --perf-no_write_workqueue, so weights below it are weak"
        ))
    } else if ["raid4", "raid5", "raid6"].contains(&level.as_str()) {
        Some(format!(
            "{name} is {level}: a kernel thread submits its writes, which count for no VM, so weights hold for reads only"
        ))
    } else {
        None
    })
}

/// Note on a disk that is reached over a network.
fn behind_a_network(root: &Root, disk: &BlockDevice) -> Option<String> {
    let name = &disk.name;
    let named = ["rbd", "nbd"].iter().any(|kind| name.strip_prefix(kind).is_some_and(is_number));
    // The directory shows the transport: `.../session1/target...` of iSCSI, `.../nvme-fabrics/...`.
    let real = std::fs::canonicalize(root.at(disk.sysfs())).unwrap_or_default();
    let part = |starts: &str| real.iter().any(|part| part.to_string_lossy().starts_with(starts));
    (named || part("session") || part("nvme-fabrics")).then(|| {
        format!("{name} is a disk of another host: what its requests meet there is not seen, and other hosts may use it too")
    })
}

/// UUID of a stacked device: of LVM, dm-crypt and multipath in `dm/uuid`, of RAID in `md/uuid`
/// (recent kernels) or by udev's links.
pub(super) fn uuid(root: &Root, device: &BlockDevice) -> Result<Option<String>, HostError> {
    for (file, kind) in [("dm/uuid", "dm-uuid"), ("md/uuid", "md-uuid")] {
        match root.read_optional(device.sysfs().join(file))? {
            Some(uuid) if !uuid.is_empty() => return Ok(Some(format!("{kind}-{uuid}"))),
            _ => {}
        }
    }
    if !root.exists(device.sysfs().join("md"))? {
        return Ok(None);
    }
    let links = Path::new("/dev/disk/by-id");
    for link in names(root, links)?.into_iter().filter(|name| name.starts_with("md-uuid-")) {
        let found = BlockDevice::find(root, links.join(&link));
        if found.is_ok_and(|found| found.partition.is_none() && found.name == device.name) {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

/// Elevators of a device without an I/O scheduler: only `none`.
pub(super) fn no_choice() -> text::Elevators {
    text::Elevators { current: "none".to_owned(), available: vec!["none".to_owned()] }
}

#[cfg(test)]
mod tests;
