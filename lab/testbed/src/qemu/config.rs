//! Configuration of a lab guest.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_units::Bytes;
use rtvirtio_vmm::spawn::Lifetime;
use serde::{Deserialize, Serialize};

use super::BOOT_TIMEOUT;
use crate::image::GuestImage;

/// Accelerator of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// Hardware virtualization by Linux.
    Kvm,
    /// Translation by QEMU: slow, works everywhere.
    Tcg,
}

impl Accel {
    /// QEMU's name of the accelerator.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }
}

/// A part of a block device or file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskRegion {
    /// Path of the device or file.
    pub path: PathBuf,
    /// First byte of the part, a multiple of 4 KiB.
    pub offset: Bytes,
    /// Length of the part, a multiple of 4 KiB.
    pub size: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestDisk {
    /// No disk: the initramfs holds the whole system.
    None,
    /// QEMU's own backend on a part of a device or file. Opened with `O_DIRECT`, Linux AIO and
    /// without QEMU's image lock: several guests share one device.
    Region(DiskRegion),
    /// A vhost-user-blk backend, such as the I/O domain.
    VhostUser {
        /// Path of the socket. QEMU reconnects within a second when the back end is restarted.
        socket: PathBuf,
        /// Number of virtqueues; as many as vCPUs when not given.
        queues: Option<u16>,
    },
}

/// PCI device with the page for urgency reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UrgencyDevice {
    /// Anonymous shared memory, in an `ivshmem-plain` device.
    Memory,
    /// Memory and doorbell of an ivshmem server, in an `ivshmem-doorbell` device.
    Doorbell {
        /// Path of the server's socket. It must listen before QEMU starts.
        socket: PathBuf,
    },
}

impl From<DiskRegion> for GuestDisk {
    fn from(region: DiskRegion) -> Self {
        Self::Region(region)
    }
}

/// A guest's network card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNic {
    /// MAC address of the card.
    pub mac: String,
    /// Connection to the host.
    pub backend: NicBackend,
}

/// Connection of a network card to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicBackend {
    /// QEMU's own back end on an existing tap.
    Tap(String),
    /// A vhost-user-net back end at this socket, such as the I/O domain. QEMU reconnects within a
    /// second when the back end is restarted.
    VhostUser(PathBuf),
    /// A vhost-user-net back end that connects: QEMU makes the socket, and waits for it. For a
    /// `dpdkvhostuserclient` port of Open vSwitch, for example.
    VhostUserServer(PathBuf),
}

/// Configuration of one guest.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// Name of the guest: letters, digits, `-`, `_`, `.`; at most 40.
    pub name: String,
    /// Kernel and initramfs that the guest boots.
    pub image: GuestImage,
    /// Accelerator of its vCPUs.
    pub accel: Accel,
    /// Memory of the guest; [`GuestImage::memory`] is enough.
    pub memory: Bytes,
    /// Only disk of the guest.
    pub disk: GuestDisk,
    /// Whether QEMU's AIO worker threads do the requests of a [`GuestDisk::Region`], QEMU's default
    /// without Linux AIO.
    pub workers: bool,
    /// Whether all memory of QEMU and its guest is locked into RAM: no page fault adds to a
    /// latency.
    pub lock_memory: bool,
    /// Number of vCPUs.
    pub vcpus: u16,
    /// A port of the host's loopback interface that is forwarded to
    /// [`GUEST_PORT`](super::GUEST_PORT) of the guest, by QEMU's user-mode network: without
    /// privileges and without access to other networks. All of it is work of QEMU's threads.
    pub port: Option<u16>,
    /// Memory shared with the host, for the guest's reports of urgency.
    pub urgency: Option<UrgencyDevice>,
    /// Whether there is a virtio-serial port on which the guest reports application starts.
    pub start_port: bool,
    /// Network card; none when `None`.
    pub nic: Option<GuestNic>,
    /// Whether it boots nothing, and waits for a guest of the same configuration that is migrated
    /// to it: [`QemuGuest::migrate`](super::QemuGuest::migrate).
    pub incoming: bool,
    /// Directory of sockets and logs. Made if missing; shared by the guests of one lab. Keep the
    /// path short: a socket's path has at most 107 bytes.
    pub run_dir: PathBuf,
    /// The `cgroup.procs` files to join before QEMU runs: on cgroup v1 one for each hierarchy.
    pub cgroup_procs: Vec<PathBuf>,
    /// [`Lifetime::WithParent`] for a run, [`Lifetime::Detached`] for a lab that stays up.
    pub lifetime: Lifetime,
    /// Timeout of the agent's first answer.
    pub boot_timeout: Duration,
}

impl QemuConfig {
    /// Adds 8 KiB of memory, for a guest that migrates. Where memory is whole 256 KiB, QEMU before
    /// 9.0 watches an emulated CPU's writes to a page no more once it has seen one, and
    /// leaves later ones out (QEMU's commit 03bfc2188f06). Other memory goes page by page.
    #[must_use]
    pub fn migrating(self) -> Self {
        Self { memory: Bytes(self.memory.0 + (8 << 10)), ..self }
    }

    /// TCG, as much memory as the image needs, no cgroup, ends with this process.
    #[must_use]
    pub fn new(name: &str, image: GuestImage, disk: impl Into<GuestDisk>, run_dir: &Path) -> QemuConfig {
        QemuConfig {
            name: name.to_owned(),
            memory: image.memory(),
            image,
            accel: Accel::Tcg,
            disk: disk.into(),
            workers: false,
            lock_memory: false,
            vcpus: 1,
            port: None,
            urgency: None,
            start_port: false,
            nic: None,
            incoming: false,
            run_dir: run_dir.to_path_buf(),
            cgroup_procs: Vec::new(),
            lifetime: Lifetime::WithParent,
            boot_timeout: BOOT_TIMEOUT,
        }
    }
}
