//! How a guest is set up.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_units::Bytes;
use rtvirtio_vmm::spawn::Lifetime;
use serde::{Deserialize, Serialize};

use super::BOOT_TIMEOUT;
use crate::image::GuestImage;

/// The accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The processor, through Linux.
    Kvm,
    /// QEMU's translator: slow, works everywhere.
    Tcg,
}

impl Accel {
    /// QEMU's name of it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }
}

/// A slice of a block device or file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskRegion {
    /// The device or file.
    pub path: PathBuf,
    /// Where the slice starts, a multiple of 4 KiB.
    pub offset: Bytes,
    /// Its length, a multiple of 4 KiB.
    pub size: Bytes,
}

/// A guest's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestDisk {
    /// It has none: the initramfs holds all that it needs.
    None,
    /// QEMU's own backend on a slice of a device or file. Opened with `O_DIRECT`, Linux AIO and
    /// without QEMU's image lock: several guests share one device.
    Region(DiskRegion),
    /// A vhost-user-blk backend, such as the I/O domain.
    VhostUser {
        /// Its socket. QEMU connects again within a second when the backend is started anew.
        socket: PathBuf,
        /// Queues to use.
        queues: u16,
    },
}

/// A device with the urgency page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UrgencyDevice {
    /// Memory without a name, in an `ivshmem-plain` device.
    Memory,
    /// Memory and doorbell of a server, in an `ivshmem-doorbell` device.
    Doorbell {
        /// The server's socket. It must listen before QEMU starts.
        socket: PathBuf,
    },
}

impl From<DiskRegion> for GuestDisk {
    fn from(region: DiskRegion) -> Self {
        Self::Region(region)
    }
}

/// A guest's network card, on an interface of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestNic {
    /// Its Ethernet address.
    pub mac: String,
    /// What is behind it.
    pub backend: NicBackend,
}

/// What is behind a network card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicBackend {
    /// QEMU's own: a tap that exists.
    Tap(String),
    /// A vhost-user-net back end at this socket, such as the I/O domain. QEMU connects again within
    /// a second when the back end is started anew.
    VhostUser(PathBuf),
    /// The same the other way round: QEMU makes the socket, and waits until the back end connects,
    /// such as a `dpdkvhostuserclient` port of Open vSwitch.
    VhostUserServer(PathBuf),
}

/// How to start one guest.
#[derive(Debug, Clone)]
pub struct QemuConfig {
    /// Its name: letters, digits, `-`, `_`, `.`; at most 40.
    pub name: String,
    /// The image that it boots.
    pub image: GuestImage,
    /// The accelerator.
    pub accel: Accel,
    /// Its memory; [`GuestImage::memory`] is enough.
    pub memory: Bytes,
    /// Its disk.
    pub disk: GuestDisk,
    /// Whether QEMU's AIO workers do the requests of a [`GuestDisk::Region`], QEMU's default
    /// without Linux AIO.
    pub workers: bool,
    /// Whether all memory of QEMU, the guest's too, is locked into RAM: no page fault joins a
    /// latency.
    pub lock_memory: bool,
    /// Its vCPUs.
    pub vcpus: u16,
    /// A port of the host's loopback interface that leads to [`GUEST_PORT`](super::GUEST_PORT) of
    /// the guest, whose network is QEMU's own: without rights, and with no way out. All of it is
    /// work of QEMU's threads.
    pub port: Option<u16>,
    /// Memory that it shares with the host, for what its guest says about urgency.
    pub urgency: Option<UrgencyDevice>,
    /// Whether it has the port on which its guest says that something starts.
    pub start_port: bool,
    /// A network card; none when `None`.
    pub nic: Option<GuestNic>,
    /// Directory of its sockets and logs. Made if missing; shared by the guests of one lab. Keep
    /// the path short: a socket's path has at most 107 bytes.
    pub run_dir: PathBuf,
    /// The `cgroup.procs` files to join before QEMU runs: one on cgroup v2, one a hierarchy on v1.
    pub cgroup_procs: Vec<PathBuf>,
    /// [`Lifetime::WithParent`] for a run, [`Lifetime::Detached`] for a lab that stays up.
    pub lifetime: Lifetime,
    /// How long its agent may take to answer.
    pub boot_timeout: Duration,
}

impl QemuConfig {
    /// TCG, as much memory as the image needs, no cgroup, dies with this process.
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
            run_dir: run_dir.to_path_buf(),
            cgroup_procs: Vec::new(),
            lifetime: Lifetime::WithParent,
            boot_timeout: BOOT_TIMEOUT,
        }
    }
}
