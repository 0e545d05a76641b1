//! All names of the same bytes, and the devices above them.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};

use super::Holder;
use crate::error::is_gone;
use crate::mounts::{mounts, unescape};
use crate::{HostError, Root, unless_gone};

/// Object that a descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Node {
    /// A block device, by its number.
    Block(u64),
    /// A regular file: file system and inode.
    File(u64, u64),
}

impl Node {
    pub(super) fn from_metadata(meta: &Metadata) -> Option<Self> {
        let kind = meta.file_type();
        if kind.is_block_device() {
            Some(Self::Block(meta.rdev()))
        } else {
            kind.is_file().then(|| Self::File(meta.dev(), meta.ino()))
        }
    }
}

/// Loop device with a backing file.
struct Loop {
    name: String,
    rdev: u64,
    backing: Node,
    file: String,
    /// Start and length of the part of the backing file, in bytes.
    part: (u64, u64),
}

/// Device or file, with all devices and files that share its bytes.
pub(super) struct Target {
    /// Devices and files, each with its name.
    parts: Vec<(Node, String)>,
    /// Devices that are built on a part.
    above: Vec<Holder>,
}

fn read(path: &Path) -> impl Fn(io::Error) -> HostError + '_ {
    move |source| HostError::Read { path: path.to_owned(), source }
}

fn sysfs(rdev: u64) -> PathBuf {
    Path::new("/sys/dev/block").join(number(rdev))
}

fn number(rdev: u64) -> String {
    format!("{}:{}", major(rdev), minor(rdev))
}

/// Device number of a text such as `8:1`.
fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Name below `/dev` of a sysfs directory's device: the kernel's name, with `/` for `!`.
fn node_name(dir: &Path) -> Result<String, HostError> {
    let real = fs::canonicalize(dir).map_err(read(dir))?;
    let name = real.file_name().map_or_else(String::new, |n| n.to_string_lossy().replace('!', "/"));
    Ok(format!("/dev/{name}"))
}

impl Target {
    pub(super) fn find(path: &Path) -> Result<Self, HostError> {
        let meta = fs::metadata(path).map_err(read(path))?;
        let node = Node::from_metadata(&meta).ok_or_else(|| HostError::NoDevice {
            name: path.display().to_string(),
            why: "it is neither a block device nor a regular file".into(),
        })?;
        let loops = loops()?;
        let mut target = Self { parts: Vec::new(), above: Vec::new() };
        let mut own_loop = None;
        match node {
            Node::Block(rdev) => {
                target.add_disk(rdev)?;
                own_loop = loops.iter().find(|l| target.parts.iter().any(|(n, _)| *n == Node::Block(l.rdev)));
                if let Some(own) = own_loop {
                    target.add(own.backing, own.file.clone());
                    if let Node::Block(below) = own.backing {
                        target.add_disk(below)?;
                    }
                }
            }
            Node::File(..) => {
                target.add(node, path.display().to_string());
            }
        }
        // Upwards until no device is new; the list grows meanwhile.
        let mut at = 0;
        while let Some((node, name)) = target.parts.get(at).cloned() {
            at += 1;
            if let Node::Block(rdev) = node {
                target.add_stacked(rdev, &name)?;
            }
            for other in loops.iter().filter(|l| l.backing == node) {
                // Another part of the same file is a different disk.
                let apart = own_loop.is_some_and(|own| {
                    own.backing == node
                        && (own.part.0 >= other.part.0 + other.part.1
                            || other.part.0 >= own.part.0 + own.part.1)
                });
                if !apart && target.add(Node::Block(other.rdev), other.name.clone()) {
                    target.add_partitions(other.rdev)?;
                    target.above.push(Holder::Loop { file: name.clone(), device: other.name.clone() });
                }
            }
        }
        Ok(target)
    }

    fn add(&mut self, node: Node, name: String) -> bool {
        let new = self.name(node).is_none();
        if new {
            self.parts.push((node, name));
        }
        new
    }

    /// Adds a device with its partitions, or a partition with its disk.
    fn add_disk(&mut self, rdev: u64) -> Result<(), HostError> {
        let dir = sysfs(rdev);
        self.add(Node::Block(rdev), node_name(&dir)?);
        if exists(&dir.join("partition"))? {
            let real = fs::canonicalize(&dir).map_err(read(&dir))?;
            let disk = real.parent().unwrap_or(Path::new("/"));
            let rdev = number_in(disk)?;
            self.add(Node::Block(rdev), node_name(disk)?);
            return Ok(());
        }
        self.add_partitions(rdev)
    }

    fn add_partitions(&mut self, rdev: u64) -> Result<(), HostError> {
        let dir = sysfs(rdev);
        for name in list(&dir)? {
            let part = dir.join(&name);
            if !exists(&part.join("partition"))? {
                continue;
            }
            if let Some(rdev) = unless_gone(number_in(&part))? {
                self.add(Node::Block(rdev), format!("/dev/{}", name.replace('!', "/")));
            }
        }
        Ok(())
    }

    /// Adds devices built on a device (device-mapper, md, bcache), which `holders/` names.
    fn add_stacked(&mut self, rdev: u64, name: &str) -> Result<(), HostError> {
        let holders = sysfs(rdev).join("holders");
        for by in list(&holders)? {
            let Some(above) = unless_gone(number_in(&holders.join(&by)))? else { continue };
            let device = format!("/dev/{}", by.replace('!', "/"));
            self.add(Node::Block(above), device.clone());
            self.above.push(Holder::Stacked { device: name.to_owned(), by: device });
        }
        Ok(())
    }

    /// Name of a part; `None` for anything else.
    pub(super) fn name(&self, node: Node) -> Option<&str> {
        self.parts.iter().find(|(n, _)| *n == node).map(|(_, name)| name.as_str())
    }

    /// Uses by devices above, mounts and swap.
    pub(super) fn kernel_uses(&self) -> Result<Vec<Holder>, HostError> {
        let mut found = self.above.clone();
        found.extend(self.mounts()?);
        found.extend(self.swaps()?);
        Ok(found)
    }

    /// Mounts of file systems on its devices, as far as this process sees them.
    fn mounts(&self) -> Result<Vec<Holder>, HostError> {
        let mut found = Vec::new();
        for mount in mounts(&Root::default())? {
            let by_number = parse_number(&mount.dev).and_then(|rdev| self.name(Node::Block(rdev)));
            // Btrfs has a device number of its own: only the mount source shows the device.
            let device = match by_number {
                Some(name) => Some(name),
                None if mount.source.starts_with("/dev/") => self.named(Path::new(&mount.source))?,
                None => None,
            };
            if let Some(device) = device {
                found.push(Holder::Mount { device: device.to_owned(), point: mount.point });
            }
        }
        Ok(found)
    }

    /// Swap devices and files among its parts.
    fn swaps(&self) -> Result<Vec<Holder>, HostError> {
        let text = Root::default().read_optional("/proc/swaps")?.unwrap_or_default();
        let mut found = Vec::new();
        for path in text.lines().skip(1).filter_map(|line| line.split_whitespace().next()) {
            if let Some(what) = self.named(Path::new(&unescape(path)))? {
                found.push(Holder::Swap { what: what.to_owned() });
            }
        }
        Ok(found)
    }

    /// Part that a path leads to; compared by name if the path leads nowhere here.
    fn named(&self, path: &Path) -> Result<Option<&str>, HostError> {
        match fs::metadata(path) {
            Ok(meta) => Ok(Node::from_metadata(&meta).and_then(|node| self.name(node))),
            Err(e) if is_gone(&e) => {
                Ok(self.parts.iter().find(|(_, name)| Path::new(name) == path).map(|(_, name)| name.as_str()))
            }
            Err(e) => Err(read(path)(e)),
        }
    }
}

fn exists(path: &Path) -> Result<bool, HostError> {
    match path.try_exists() {
        // A path below a file.
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => Ok(false),
        other => other.map_err(read(path)),
    }
}

/// Names in a directory of sysfs; none when it is gone.
fn list(dir: &Path) -> Result<Vec<String>, HostError> {
    match Root::default().list(dir) {
        Err(e) if e.is_gone() => Ok(Vec::new()),
        other => other,
    }
}

fn number_in(dir: &Path) -> Result<u64, HostError> {
    let path = dir.join("dev");
    // kernel file
    let text = fs::read_to_string(&path).map_err(read(&path))?;
    parse_number(&text).ok_or_else(|| HostError::form(path, &text, "a device number MAJ:MIN"))
}

/// All loop devices with a backing file.
fn loops() -> Result<Vec<Loop>, HostError> {
    let mut out = Vec::new();
    for name in list(Path::new("/sys/block"))? {
        let dir = Path::new("/sys/block").join(&name);
        let file = dir.join("loop/backing_file");
        let Some(text) = Root::default().read_optional(&file)? else { continue };
        let device = format!("/dev/{name}");
        let Some(backing) = backing(Path::new(&device), Path::new(&text))? else { continue };
        let number = |file: &str| -> Result<u64, HostError> {
            let text = Root::default().read_optional(dir.join(file))?.unwrap_or_default();
            Ok(text.parse().unwrap_or(0))
        };
        let part = (number("loop/offset")?, number("size")?.saturating_mul(512));
        if let Some(rdev) = unless_gone(number_in(&dir))? {
            out.push(Loop { rdev, name: device, backing, file: text, part });
        }
    }
    Ok(out)
}

/// `struct loop_info64` of `linux/loop.h`, as far as it is read.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    rest: [u64; 26],
}

const LOOP_GET_STATUS64: rustix::ioctl::Opcode = 0x4C05;

/// File or device behind a loop device: as the kernel reports where the device may be opened, or by
/// the path in sysfs. `None` when it was detached meanwhile.
fn backing(device: &Path, path: &Path) -> Result<Option<Node>, HostError> {
    // disk
    let asked = File::open(device).and_then(|file| {
        // SAFETY: the kernel writes a `struct loop_info64` of 232 bytes, the size of `LoopInfo`.
        let info = unsafe {
            rustix::ioctl::ioctl(&file, rustix::ioctl::Getter::<LOOP_GET_STATUS64, LoopInfo>::new())
        }?;
        Ok(info)
    });
    match asked {
        Ok(info) if info.rdevice != 0 => return Ok(Some(Node::Block(decode(info.rdevice)))),
        Ok(info) => return Ok(Some(Node::File(decode(info.device), info.inode))),
        Err(e) if is_gone(&e) => return Ok(None),
        // Opening is not allowed: by its path, then.
        Err(_) => {}
    }
    match fs::metadata(path) {
        Ok(meta) => Ok(Node::from_metadata(&meta)),
        // A path with " (deleted)", or of another mount namespace: leads to no file here.
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(read(path)(e)),
    }
}

/// `huge_encode_dev()` of the kernel.
fn decode(dev: u64) -> u64 {
    makedev(((dev & 0xf_ff00) >> 8) as u32, ((dev & 0xff) | ((dev >> 12) & 0xf_ff00)) as u32)
}

const _: () = assert!(size_of::<LoopInfo>() == 232);
