//! Disks of running VMs, and the devices of this host on which they lie.

use std::fs;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::mounts::mounts;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_vmm::machines::OpenDisk;
use serde::Serialize;

use super::Activity;
use crate::error::Result;

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FoundDisk {
    /// Path on the host.
    pub path: PathBuf,
    /// libvirt's name of it, such as `vdb`; `None` where libvirt does not manage it.
    pub target: Option<String>,
    /// Whether it is a file, not a block device.
    pub is_file: bool,
    /// Whether the VM may write to it.
    pub writes: bool,
    /// The device on which it lies; `None` where there is none, as for a network file system.
    pub device: Option<FoundDevice>,
    /// Observed I/O; `None` where it was not observed.
    pub activity: Option<Activity>,
}

/// A block device of this host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct FoundDevice {
    /// Kernel name of the whole disk, such as `nvme0n1`.
    pub name: String,
    /// Device number as `MAJ:MIN`.
    pub dev: String,
    /// A path that lasts, below `/dev/disk/by-id`, or else `/dev/NAME`.
    pub path: PathBuf,
}

impl FoundDisk {
    pub(super) fn new(root: &Root, disk: &OpenDisk) -> Result<Self> {
        Ok(Self {
            path: disk.path.clone(),
            target: None,
            is_file: disk.is_file,
            writes: disk.writes,
            device: device(root, disk.dev)?,
            activity: None,
        })
    }
}

/// The whole disk of a device number; `None` for what lies on none, such as a network file system.
pub(crate) fn device(root: &Root, dev: (u32, u32)) -> Result<Option<FoundDevice>> {
    let number = format!("{}:{}", dev.0, dev.1);
    let found = match fs::canonicalize(root.at(Path::new("/sys/dev/block").join(&number))) {
        Ok(dir) => dir.file_name().map(|name| name.to_string_lossy().replace('!', "/")),
        // Btrfs, overlayfs and network file systems have numbers of their own; the mount table
        // names what lies below the first.
        Err(e) if rtvirtio_kernel::is_gone(&e) => {
            let all = mounts(root)?;
            let source = all.into_iter().find(|m| m.dev == number).map(|m| m.source);
            source.and_then(|s| s.strip_prefix("/dev/").map(str::to_owned))
        }
        Err(e) => return Err(e.into()),
    };
    let Some(name) = found else { return Ok(None) };
    match BlockDevice::find(root, Path::new("/dev").join(name)) {
        Ok(device) => {
            let path = lasting(root, &device.name);
            Ok(Some(FoundDevice { name: device.name, dev: device.dev, path }))
        }
        Err(e) if e.is_gone() => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The shortest name below `/dev/disk/by-id` that leads to a disk, or `/dev/NAME` without one.
fn lasting(root: &Root, name: &str) -> PathBuf {
    const DIR: &str = "/dev/disk/by-id";
    let links = root.list(DIR).unwrap_or_default();
    let leads = |link: &String| {
        let target = fs::read_link(root.at(Path::new(DIR).join(link)));
        target.is_ok_and(|t| t.file_name().is_some_and(|n| n.to_string_lossy() == name))
    };
    let shortest = links.into_iter().filter(leads).min_by_key(|link| (link.len(), link.clone()));
    shortest.map_or_else(|| Path::new("/dev").join(name.replace('!', "/")), |link| Path::new(DIR).join(link))
}
