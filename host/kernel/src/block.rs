//! Block devices through sysfs (`Documentation/ABI/stable/sysfs-block`).

mod model;
mod stack;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::text::{self, Elevators};
use crate::{HostError, Root, is_gone};

pub use model::DriveModel;
pub use stack::Stack;

/// Files below `queue/` that a change of the elevator resets, in the order in which they are put
/// back. A kernel that lacks one has nothing to lose there.
///
/// Measured on Linux 6.18: `none` -> `bfq` -> `none` loses a tuned `nr_requests`; BFQ switches
/// writeback throttling off while in use (`wbt_disable_default()` in `block/bfq-iosched.c`).
/// Measured on Linux 7.2: an elevator sets `async_depth` to its own share of `nr_requests`, a write
/// of `nr_requests` scales it, so that it comes after; `none` shows `nr_requests` there, and
/// refuses writes.
pub const RESET_BY_ELEVATOR: [&str; 3] = ["nr_requests", "async_depth", "wbt_lat_usec"];

/// Whole disk, by its kernel name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// Kernel name, such as `loop3` or `nvme0n1`.
    pub name: String,
    /// Device number `MAJ:MIN`; empty for a hidden path of an NVMe multipath device.
    pub dev: String,
    /// Partition that was named, if any; settings are always the disk's.
    pub partition: Option<String>,
}

impl BlockDevice {
    /// Finds the disk for `loop3`, `/dev/loop3`, a partition of it, or a symlink such as
    /// `/dev/disk/by-id/...`.
    ///
    /// # Errors
    /// [`HostError::NoDevice`] when there is no such device or it is not a block device.
    pub fn find(root: &Root, name: impl AsRef<Path>) -> Result<Self, HostError> {
        let given = name.as_ref();
        let no = |why: String| HostError::NoDevice { name: given.display().to_string(), why };
        let path = if given.is_absolute() { given.to_owned() } else { Path::new("/dev").join(given) };
        let target = resolve_links(root, &path)?;
        let Ok(below) = target.strip_prefix("/dev") else {
            return Err(no(format!("{} does not lie below /dev", target.display())));
        };
        // sysfs writes the slash of a name such as `cciss/c0d0` as `!`.
        let mut kernel = below.to_string_lossy().replace('/', "!");
        if kernel.is_empty() {
            return Err(no("no name is given".into()));
        }
        let mut class = Path::new("/sys/class/block").join(&kernel);
        if !root.exists(&class)? {
            // A device node of another name, as of dmsetup(8) below /dev/mapper without udev.
            let Some(name) = name_of_node(root, &target)? else {
                return Err(no(format!("{} does not exist", class.display())));
            };
            class = Path::new("/sys/class/block").join(&name);
            kernel = name;
        }
        let (disk, partition) = if root.exists(class.join("partition"))? {
            let real = fs::canonicalize(root.at(&class))
                .map_err(|source| HostError::Read { path: class.clone(), source })?;
            let parent = real.parent().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
            (parent.ok_or_else(|| no("its disk is not found in sysfs".into()))?, Some(kernel))
        } else {
            (kernel, None)
        };
        let dev_path = Path::new("/sys/block").join(&disk).join("dev");
        let dev = root.read(&dev_path)?.trim().to_owned();
        if !text::is_dev(&dev) {
            return Err(HostError::Form { path: dev_path, text: dev, expected: "a device number MAJ:MIN" });
        }
        Ok(Self { name: disk, dev, partition })
    }

    /// All disks with storage: no `ram`, no `zram`, no loop device without a backing file.
    pub fn all(root: &Root) -> Result<Vec<Self>, HostError> {
        let mut out = Vec::new();
        for name in root.list("/sys/block")? {
            let idle_loop =
                name.starts_with("loop") && !root.exists(format!("/sys/block/{name}/loop/backing_file"))?;
            if !idle_loop && !name.starts_with("ram") && !name.starts_with("zram") {
                match Self::find(root, &name) {
                    Ok(device) => out.push(device),
                    // A hidden path of a multipath device has no number, and a device may vanish:
                    // neither may fail the whole list.
                    Err(e) if e.is_gone() => {}
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(out)
    }

    /// Directory of the disk in sysfs.
    #[must_use]
    pub fn sysfs(&self) -> PathBuf {
        Path::new("/sys/block").join(&self.name)
    }

    /// Path of a file in its `queue/` directory.
    #[must_use]
    pub fn queue(&self, file: &str) -> PathBuf {
        self.sysfs().join("queue").join(file)
    }

    /// Path of a tunable of its elevator.
    #[must_use]
    pub fn tunable(&self, file: &str) -> PathBuf {
        self.queue("iosched").join(file)
    }

    /// Elevator in use and those on offer: only `none` for a bio-based device, see [`Stack`].
    ///
    /// # Errors
    /// When `queue/scheduler` cannot be read or has another form; when the device is gone.
    pub fn elevators(&self, root: &Root) -> Result<Elevators, HostError> {
        let path = self.queue("scheduler");
        let line = match root.read(&path) {
            Err(e) if e.is_gone() && root.exists(self.sysfs())? => return Ok(stack::no_choice()),
            line => line?,
        };
        text::elevators(&line).ok_or(HostError::form(
            path,
            &line,
            "a list of schedulers with one in brackets",
        ))
    }

    /// Checks that an elevator is on offer, without choosing it.
    ///
    /// # Errors
    /// [`HostError::NoElevator`] with the remedy.
    pub fn offers(&self, root: &Root, wanted: &str) -> Result<(), HostError> {
        let have = self.elevators(root)?;
        if have.available.iter().any(|e| e == wanted) {
            return Ok(());
        }
        let remedy = if !self.schedules(root)? {
            "it passes requests on, and no disk below it is seen that orders them: use limits".to_owned()
        } else if ["bfq", "kyber"].contains(&wanted) {
            let module = if wanted == "bfq" { "bfq" } else { "kyber-iosched" };
            format!("load it with `modprobe {module}`, or use a kernel that has it")
        } else {
            "choose one that it offers".to_owned()
        };
        Err(HostError::NoElevator {
            device: self.name.clone(),
            wanted: wanted.to_owned(),
            offered: have.available.join(", "),
            remedy,
        })
    }

    /// Replaces the elevator by a new instance of it: with the kernel's defaults, and without BFQ's
    /// state of its groups.
    pub fn renew_elevator(&self, root: &Root, elevator: &str) -> Result<(), HostError> {
        self.set_elevator(root, "none")?;
        self.set_elevator(root, elevator)
    }

    /// Chooses an elevator. All tunables of the old one are lost.
    ///
    /// # Errors
    /// When it is not on offer or the kernel refuses it.
    pub fn set_elevator(&self, root: &Root, elevator: &str) -> Result<(), HostError> {
        let offered = self.offers(root, elevator);
        if offered.is_err() && !root.is_real() {
            return offered;
        }
        // The write makes the kernel load the module of an elevator that is not on offer yet. Linux
        // 6.18 accepts an unknown name without an error while the elevator is `none`, so the
        // read-back decides.
        let written = root.write(self.queue("scheduler"), elevator);
        if offered.is_ok() || self.elevators(root)?.current == elevator { written } else { offered }
    }

    /// Tunables of the elevator in use, name to text; empty for `none`.
    pub fn tunables(&self, root: &Root) -> Result<BTreeMap<String, String>, HostError> {
        let dir = self.queue("iosched");
        let names = match root.list(&dir) {
            Ok(names) => names,
            Err(e) if e.is_gone() => return Ok(BTreeMap::new()),
            Err(e) => return Err(e),
        };
        names
            .into_iter()
            .map(|name| {
                let value = root.read(dir.join(&name))?.trim().to_owned();
                Ok((name, value))
            })
            .collect()
    }

    /// Size in bytes.
    pub fn size(&self, root: &Root) -> Result<u64, HostError> {
        self.size_in(root, &self.sysfs())
    }

    /// Size in bytes of the named device: of the partition where it was one.
    pub fn named_size(&self, root: &Root) -> Result<u64, HostError> {
        match &self.partition {
            Some(partition) => self.size_in(root, &Path::new("/sys/class/block").join(partition)),
            None => self.size(root),
        }
    }

    fn size_in(&self, root: &Root, dir: &Path) -> Result<u64, HostError> {
        // The unit of this file is 512 B whatever the block size of the device.
        root.number(dir.join("size")).map(|sectors: u64| sectors.saturating_mul(512))
    }

    /// Identifier that distinguishes this drive from another one of the same name: its WWID or
    /// serial number, of a stacked device its UUID. `None` where there is none, as of a loop
    /// device.
    pub fn identity(&self, root: &Root) -> Result<Option<String>, HostError> {
        for file in ["wwid", "device/wwid", "device/serial", "serial"] {
            match root.read_optional(self.sysfs().join(file)) {
                Ok(Some(id)) if !id.is_empty() => return Ok(Some(id)),
                Ok(_) => {}
                // A SCSI disk without an identifier in its pages (`sdev_show_wwid()` in
                // drivers/scsi/scsi_sysfs.c).
                Err(e) if e.is_errno(Errno::NXIO) || e.is_errno(Errno::INVAL) => {}
                Err(e) => return Err(e),
            }
        }
        stack::uuid(root, self)
    }
}

/// Kernel name of the block device of a device node; `None` when the path is no such node.
fn name_of_node(root: &Root, node: &Path) -> Result<Option<String>, HostError> {
    let read = |source| HostError::Read { path: node.to_owned(), source };
    let meta = match fs::metadata(root.at(node)) {
        Ok(meta) if meta.file_type().is_block_device() => meta,
        Ok(_) => return Ok(None),
        Err(e) if is_gone(&e) || e.kind() == io::ErrorKind::NotADirectory => return Ok(None),
        Err(e) => return Err(read(e)),
    };
    let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    match fs::read_link(root.at(format!("/sys/dev/block/{major}:{minor}"))) {
        Ok(link) => Ok(link.file_name().map(|name| name.to_string_lossy().into_owned())),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(read(e)),
    }
}

/// Follows at most eight symlinks below the root: absolute targets are host paths, not paths of the
/// test's machine.
fn resolve_links(root: &Root, path: &Path) -> Result<PathBuf, HostError> {
    let mut path = path.to_owned();
    for _ in 0..8 {
        let link = match fs::read_link(root.at(&path)) {
            Ok(link) => link,
            // Not a link, or nothing at all.
            Err(e)
                if is_gone(&e)
                    || [io::ErrorKind::InvalidInput, io::ErrorKind::NotADirectory].contains(&e.kind()) =>
            {
                break;
            }
            Err(source) => return Err(HostError::Read { path, source }),
        };
        let base = path.parent().unwrap_or(Path::new("/"));
        path = path_clean::clean(base.join(link));
    }
    Ok(path)
}

#[cfg(test)]
mod tests;
