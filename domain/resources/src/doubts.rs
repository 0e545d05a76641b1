//! Settings that are valid and may still surprise a guest: reported by `--check`, at a start and by
//! `rtvirtio apply`.

use std::collections::BTreeMap;
use std::fs::File as OpenFile;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt as _};

use rtvirtio_domain_config::{Disk, File, Network};
use rtvirtio_units::Bytes;
use rustix::net::{AddressFamily, SocketType};

use crate::backing::{SECTOR, block_geometry, direct_alignment};
use crate::partitions;

/// All warnings, as sentences with a remedy. A failed check is one too.
#[must_use]
pub fn warnings(file: &File) -> Vec<String> {
    let mut doubts = Vec::new();
    let mut sparse = BTreeMap::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks) {
        doubts.extend(disk.pin.map(|most| of_pinned(&disk.name, most)));
        if let Err(e) = of_disk(disk, &mut sparse, &mut doubts) {
            doubts.push(format!("disk \"{}\": its block size and space are not known: {e}", disk.name));
        }
    }
    doubts.extend(sparse.into_values().filter_map(FileSystem::doubt));
    file.networks.iter().for_each(|network| of_network(network, &mut doubts));
    doubts
}

/// Warning about a disk whose guest's memory is pinned: QEMU tells no back end that it takes pages
/// from a guest.
fn of_pinned(name: &str, most: Bytes) -> String {
    format!(
        "disk \"{name}\": with `pin` all memory of its VM stays in RAM (up to {most}), and the VM must give none of it back: no \
         virtio-balloon (libvirt: `<memballoon model='none'/>`) and no virtio-mem, or what it reads is lost"
    )
}

/// Sparse files on one file system.
#[derive(Default)]
struct FileSystem {
    disks: Vec<String>,
    /// Inodes that are counted already.
    seen: Vec<u64>,
    /// Bytes that guests may write and that are not allocated yet.
    missing: u64,
    free: u64,
}

impl FileSystem {
    fn doubt(self) -> Option<String> {
        let Self { disks, missing, free, .. } = self;
        let one = disks.len() == 1;
        let (what, whose) =
            if one { ("disk", "is sparse: its guest") } else { ("disks", "are sparse: their guests") };
        (missing > free).then(|| {
            format!(
                "{what} {} {whose} may write {} more than there is room for now, and the file system has {} free: \
                 when it is full, their writes wait, or fail with `on_full = \"error\"`; make room, or allocate with `fallocate`",
                disks.join(", "),
                in_mib(missing),
                in_mib(free)
            )
        })
    }
}

fn in_mib(bytes: u64) -> Bytes {
    if bytes >> 20 > 0 { Bytes(bytes >> 20 << 20) } else { Bytes(bytes) }
}

fn of_disk(disk: &Disk, sparse: &mut BTreeMap<u64, FileSystem>, doubts: &mut Vec<String>) -> io::Result<()> {
    // disk
    let file = OpenFile::options().read(true).custom_flags(libc::O_NONBLOCK).open(&disk.path)?;
    let meta = file.metadata()?;
    let is_device = meta.file_type().is_block_device();
    let block = if is_device { block_geometry(&file)?.1 } else { direct_alignment(&file, !disk.cached) };
    doubts.extend(of_blocks(disk, &file, block)?);
    let missing = meta.len().saturating_sub(meta.blocks() * 512);
    if is_device || disk.read_only || missing == 0 {
        return Ok(());
    }
    let space = rustix::fs::fstatvfs(&file)?;
    let of = sparse.entry(meta.dev()).or_default();
    of.free = space.f_bavail.saturating_mul(space.f_frsize);
    of.disks.push(format!("\"{}\"", disk.name));
    if !of.seen.contains(&meta.ino()) {
        of.seen.push(meta.ino());
        of.missing = of.missing.saturating_add(missing);
    }
    Ok(())
}

/// Warning about a device whose blocks are larger than a sector.
fn of_blocks(disk: &Disk, file: &OpenFile, block: u32) -> io::Result<Option<String>> {
    if u64::from(block) <= SECTOR {
        return Ok(None);
    }
    let (name, guest) = (&disk.name, disk.block_size.map_or(block, |size| size.0 as u32));
    if guest >= block {
        let found = partitions::block_size(file, disk.offset.0)?.filter(|found| *found < block);
        let what = match found {
            Some(found) => {
                format!("its contents were made for {found} bytes: set `block_size = \"{found}B\"`")
            }
            None => "set `block_size = \"512B\"` for an image with blocks of 512 bytes".to_owned(),
        };
        return Ok(Some(format!(
            "disk \"{name}\": its guest sees blocks of {guest} bytes, as the device below has {block}: SeaBIOS starts no \
             guest from it, and the partitions of an image with blocks of 512 bytes are not found; {what}"
        )));
    }
    Ok((!disk.cached && !disk.read_only).then(|| {
        format!(
            "disk \"{name}\": its guest sees blocks of {guest} bytes, and the device below has {block}: a write that is no \
             whole blocks of the device costs a read before it, and others to these blocks wait at places of the \
             device's window. Bounds count neither: no such disk beside disks with reservations whose guest is not trusted"
        )
    }))
}

fn of_network(network: &Network, doubts: &mut Vec<String>) {
    let taps = network.ports.iter().filter_map(|port| port.tap.as_deref());
    for interface in taps.chain(network.interface.as_deref()) {
        match mtu(interface) {
            Ok(mtu) if mtu == i32::from(network.mtu) => {}
            Ok(mtu) => doubts.push(format!(
                "network \"{}\": `mtu` is {}, and {interface} has {mtu}: longer frames than the smaller one are dropped on the way; \
                 give both and the guests the same",
                network.name, network.mtu
            )),
            // An interface that is absent is refused by all callers.
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {}
            Err(e) => doubts.push(format!(
                "network \"{}\": the MTU of {interface} is not known: {e}",
                network.name
            )),
        }
    }
}

/// The MTU of an interface in this network namespace: `/sys` may show another one.
fn mtu(interface: &str) -> io::Result<i32> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    // SAFETY: zeroes are a valid value of this plain structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: the request is valid for the call, which writes its MTU.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above has written this field.
    Ok(unsafe { request.ifr_ifru.ifru_mtu })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_sparse_file_that_outgrows_its_file_system_is_named() {
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let huge = 1 << 42;
        for (name, len) in [("a", huge), ("b", huge), ("c", 1 << 20)] {
            OpenFile::create(dir.path().join(name)).unwrap().set_len(len).unwrap();
        }
        std::fs::write(dir.path().join("d"), vec![1; 1 << 20]).unwrap();
        let of = |names: &[&str], keys: &str| {
            let mut text = String::from("[[device]]\nname = \"x\"\n");
            for name in names {
                let dir = dir.path().display();
                text += &format!(
                    "[[device.disk]]\nname = \"{name}\"\nsocket = \"/s{name}\"\npath = \"{dir}/{name}\"\n{keys}\n"
                );
            }
            warnings(&File::parse(Path::new("x"), &text).unwrap())
        };
        let sparse = |doubts: Vec<String>| {
            doubts.into_iter().filter(|doubt| doubt.contains("sparse")).collect::<Vec<_>>()
        };
        let said = sparse(of(&["a", "b", "c", "d"], ""));
        assert!(said.len() == 1 && said[0].starts_with("disks \"a\", \"b\", \"c\" are sparse"), "{said:?}");
        assert!(
            said[0].contains("8796093022208") || said[0].contains("8TiB") || said[0].contains("8388609MiB"),
            "{said:?}"
        );
        assert!(sparse(of(&["c", "d"], "")).is_empty());
        assert!(sparse(of(&["a"], "read_only = true")).is_empty());
        assert!(of(&["e"], "")[0].contains("not known"), "one that cannot be opened");
    }
}
