//! I/O of VMs on which no setting for a spec's devices acts: disks elsewhere, writes through the
//! host's page cache, disks that another process serves.
//!
//! The kernel is asked what a VMM has open now, and how: disks come and go while a VM runs, a
//! snapshot moves its writes to another file, and options of block nodes do not always show whether
//! the file below is open with `O_DIRECT`.

use std::fmt;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_vmm::machines::{self, Machine, OpenDisk};
use serde::{Deserialize, Serialize};

use crate::discover::disks::{FoundDevice, device};
use crate::error::{Error, Result, one_line};
use crate::vmms::{DEEPEST, lies_on};

/// Reason why no setting acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UncoveredKind {
    /// The disk lies on another device.
    Elsewhere,
    /// Writes reach the device in write-back, outside of the VM's cgroup; reads may come from the
    /// host's memory.
    WriteBack,
    /// Reads may come from the host's memory, and writes are limited when they are written back.
    PageCache,
    /// The disk is served by another process, in a cgroup of its own.
    OtherProcess,
    /// Open files of the VM, or their device, cannot be read.
    Unknown,
}

/// A part of a VM's I/O on which no setting acts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Uncovered {
    pub vm: String,
    /// Reason why no setting acts.
    pub kind: UncoveredKind,
    /// The disk's path, as the VMM sees it, or its socket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<PathBuf>,
    /// Consequence and remedy, for the user.
    pub text: String,
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.vm, self.text)
    }
}

/// A VM whose I/O is inspected.
#[derive(Clone, Copy, Debug)]
pub struct Covered<'a> {
    pub vm: &'a str,
    /// Process ids of the VM; those that are no VMM have no disks.
    pub pids: &'a [u32],
    /// Kernel names of the disks for which settings are made.
    pub devices: &'a [String],
    /// Kernel names of further disks that are inspected by themselves.
    pub others: &'a [String],
    /// Whether what the page cache writes back is charged to its cgroup.
    pub charges_write_back: bool,
}

/// Whether any of it lets writes escape the VM's cgroup.
#[must_use]
pub fn writes_escape(all: &[Uncovered]) -> bool {
    all.iter().any(|of| of.kind == UncoveredKind::WriteBack)
}

/// Whether the kernel charges write-back to a cgroup: on v2, with the memory controller
/// (`Documentation/admin-guide/cgroup-v2.rst`, Writeback).
pub fn charges_write_back(root: &Root, cgroups: &Cgroups, cgroup: &Path) -> Result<bool> {
    Ok(cgroups.hierarchy == Hierarchy::V2 && root.exists(cgroups.dir(cgroup)?.join("memory.current"))?)
}

/// Finds I/O on which no setting acts now. Changes nothing and asks no monitor.
#[must_use]
pub fn scan(root: &Root, of: &Covered<'_>) -> Vec<Uncovered> {
    let mut found = Vec::new();
    for &pid in of.pids {
        match machines::of_process(root, pid) {
            Ok(None) => {}
            Ok(Some(machine)) => found.extend(of_machine(root, of, &machine)),
            Err(e) => found.push(Uncovered::unknown(of.vm, &e.into())),
        }
    }
    found.sort_by(|a, b| (a.kind, &a.disk).cmp(&(b.kind, &b.disk)));
    found
}

/// Disks that VMMs among these processes have open on one of the devices.
#[must_use]
pub fn disks_on_device(root: &Root, of: &Covered<'_>) -> Vec<PathBuf> {
    let machines = of.pids.iter().filter_map(|pid| machines::of_process(root, *pid).ok().flatten());
    let is_on = |disk: &OpenDisk| {
        device(root, disk.dev).ok().flatten().is_some_and(|place| lies_on_one(&place, disk, of.devices))
    };
    machines.flat_map(|machine| machine.disks).filter(is_on).map(|disk| disk.path).collect()
}

/// Whether a disk lies on one of these devices, whatever is between.
fn lies_on_one(place: &FoundDevice, disk: &OpenDisk, devices: &[String]) -> bool {
    let number = rustix::fs::makedev(disk.dev.0, disk.dev.1);
    devices.iter().any(|name| place.name == *name || lies_on(number, name, DEEPEST))
}

fn of_machine(root: &Root, of: &Covered<'_>, machine: &Machine) -> Vec<Uncovered> {
    let served = machine.line.vhost_user.iter().map(|socket| {
        let text = format!(
            "another process serves a disk of it, through {}: that process's requests are outside of the VM's cgroup, where no limit or \
             weight of the VM acts",
            socket.display()
        );
        of.uncovered(UncoveredKind::OtherProcess, Some(socket), text)
    });
    machine.disks.iter().filter_map(|disk| of_disk(root, of, disk)).chain(served).collect()
}

fn of_disk(root: &Root, of: &Covered<'_>, disk: &OpenDisk) -> Option<Uncovered> {
    let path = disk.path.display();
    let read_only = if disk.writes { "" } else { "read-only " };
    let place = match device(root, disk.dev) {
        Ok(place) => place,
        Err(e) => {
            let text = format!("on which device its disk {path} lies is not known: {e}");
            return Some(of.uncovered(UncoveredKind::Unknown, Some(&disk.path), text));
        }
    };
    let Some(place) = place else {
        let text = format!(
            "its {read_only}disk {path} lies on no block device that is known here (a network or memory file system): no limit or weight \
             acts there"
        );
        return Some(of.uncovered(UncoveredKind::Elsewhere, Some(&disk.path), text));
    };
    if !lies_on_one(&place, disk, of.devices) {
        if lies_on_one(&place, disk, of.others) {
            return None;
        }
        let text = format!(
            "its {read_only}disk {path} lies on {}, for which nothing is set: no limit or weight acts there, and no prediction knows of it",
            place.name
        );
        return Some(of.uncovered(UncoveredKind::Elsewhere, Some(&disk.path), text));
    }
    if disk.direct {
        return None;
    }
    let cached = format!("its {read_only}disk {path} goes through the host's page cache");
    let remedy = "set cache=none for it";
    let (kind, text) = if !disk.writes || of.charges_write_back {
        let writes =
            if disk.writes { ", and what it writes is limited only when it is written back" } else { "" };
        let text = format!("{cached}: what it reads may come from the host's memory{writes}; {remedy}");
        (UncoveredKind::PageCache, text)
    } else {
        let text = format!(
            "{cached}, and what it writes reaches the device outside of its cgroup, except what the guest flushes: no limit or weight acts \
             on its writes, and what it reads may come from the host's memory; {remedy}"
        );
        (UncoveredKind::WriteBack, text)
    };
    Some(of.uncovered(kind, Some(&disk.path), text))
}

impl Uncovered {
    pub(crate) fn unknown(vm: &str, why: &Error) -> Self {
        let text = format!(
            "which disks it has open is not known, so that some may lie where no limit or weight acts: {}",
            one_line(why)
        );
        Self { vm: vm.to_owned(), kind: UncoveredKind::Unknown, disk: None, text }
    }
}

impl Covered<'_> {
    fn uncovered(&self, kind: UncoveredKind, disk: Option<&PathBuf>, text: String) -> Uncovered {
        Uncovered { vm: self.vm.to_owned(), kind, disk: disk.cloned(), text }
    }
}
