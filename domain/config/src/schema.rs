//! The keys of the file.

use std::path::PathBuf;

use rtvirtio_sched::{Class, Policy};
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos, Ratio};
use serde::Deserialize;

use crate::network::Network;
use crate::text::{default_policy, default_true, default_weight, parse_optional_text, parse_text};

/// The configuration of one I/O domain's process.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// The control socket, for `rtvirtio iod status`.
    #[serde(default = "default_control")]
    pub control: PathBuf,
    /// Group whose members may connect to `control`, by name or number: mode 0660, otherwise 0600.
    pub control_group: Option<String>,
    /// Confinement of the process while it serves.
    #[serde(default)]
    pub sandbox: Sandbox,
    /// Energy policy of the host.
    #[serde(default)]
    pub power: Power,
    /// Devices; each has a thread and a scheduler of its own.
    #[serde(default, rename = "device")]
    pub devices: Vec<Device>,
    /// Networks; each has a thread and two schedulers of its own.
    #[serde(default, rename = "network")]
    pub networks: Vec<Network>,
}

fn default_control() -> PathBuf {
    "/run/rtvirtio/iod.sock".into()
}

/// Confinement of the process (`docs/explanation/threat-model.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// No confinement at all.
    Off,
    /// Forbidden system calls are logged by the kernel instead of ending the process; no landlock,
    /// which cannot log. For testing a new libc.
    Log,
    /// All layers that the kernel supports.
    #[default]
    On,
}

/// Energy policy: under `Save` no thread polls, unless its table has `poll`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Power {
    /// Threads poll adaptively, as long as that pays.
    #[default]
    Normal,
    /// Threads sleep, and wake up for each notification.
    Save,
}

/// Polling of a thread before it sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Poll {
    /// Polls for this long; 0 sleeps at once.
    Fixed(Nanos),
    /// Polls as long as that pays.
    #[default]
    Adaptive,
}

impl Poll {
    /// Resolves a table's `poll` and `fifo`. A real-time thread that polls would keep its CPU from
    /// all others.
    #[must_use]
    pub fn new(power: Power, poll: Option<Nanos>, fifo: Option<u8>) -> Self {
        match poll {
            Some(poll) => Self::Fixed(poll),
            None if power == Power::Save || fifo.is_some() => Self::Fixed(Nanos(0)),
            None => Self::Adaptive,
        }
    }
}

/// A device or file system, with the disks on it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name of its thread, and in the status.
    pub name: String,
    /// Scheduling policy between the disks.
    #[serde(default = "default_policy")]
    pub policy: Policy,
    /// Largest piece into which requests are split, in bytes.
    #[serde(default = "default_quantum", deserialize_with = "parse_text")]
    pub quantum: Bytes,
    /// Largest number of pieces that are submitted to the device and not completed.
    #[serde(default)]
    pub window: Window,
    /// Device time of pieces; equal for all when not given.
    pub cost: Option<CostConfig>,
    /// Pieces that the device serves at once, for admission.
    #[serde(default = "default_one")]
    pub parallel: u32,
    /// Longest stall: garbage collection, a sleeping CPU. For admission.
    #[serde(default, deserialize_with = "parse_text")]
    pub stall: Nanos,
    /// CPUs of its thread; any when empty.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// `SCHED_FIFO` priority of its thread.
    pub fifo: Option<u8>,
    /// Time of polling before the thread sleeps; adapts when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub poll: Option<Nanos>,
    /// Passes the guest's class on to the host's I/O scheduler; `mq-deadline` acts on it.
    #[serde(default)]
    pub pass_priority: bool,
    /// Largest share of the device's time for discards and zeroing while other VMs use it.
    #[serde(default = "default_discard_share", deserialize_with = "parse_text")]
    pub discard_share: Ratio,
    /// A request that waited longer than this goes before those of higher priority of its VM.
    #[serde(default = "default_aging", deserialize_with = "parse_text")]
    pub aging: Nanos,
    /// Disks of VMs, `[[device.disk]]`; they may come later.
    #[serde(default, rename = "disk")]
    pub disks: Vec<Disk>,
}

fn default_quantum() -> Bytes {
    Bytes::from_kib(64)
}

fn default_discard_share() -> Ratio {
    Ratio(0.05)
}

fn default_aging() -> Nanos {
    Nanos::from_millis(1_000)
}

/// A constant window, or limits of an adaptive one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Window {
    /// Pieces of a constant window.
    Fixed(u32),
    /// A window that adapts to the device.
    Adaptive {
        /// Initial window, in pieces.
        start: u32,
        /// Smallest window, in pieces.
        #[serde(default = "default_one")]
        least: u32,
        /// Largest window, in pieces.
        most: u32,
        /// Most pieces without a reservation's deadline.
        shared: Option<u32>,
    },
}

fn default_one() -> u32 {
    1
}

impl Default for Window {
    fn default() -> Self {
        Self::Adaptive { start: 8, least: 1, most: 64, shared: None }
    }
}

/// Device time of reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostConfig {
    /// Time of a read.
    pub read: LineConfig,
    /// Time of a write.
    pub write: LineConfig,
    /// Time of a flush; a write's `base` at least.
    #[serde(default, deserialize_with = "parse_text")]
    pub flush: Nanos,
    /// Longest time of one piece of a discard or zeroing: pieces are sized to stay below it.
    /// Default: 500 us, or a write of one quantum where that is longer.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub discard: Option<Nanos>,
}

/// `base + MiB * per_mib`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LineConfig {
    /// Fixed time of a request.
    #[serde(deserialize_with = "parse_text")]
    pub base: Nanos,
    /// Time of each MiB.
    #[serde(deserialize_with = "parse_text")]
    pub per_mib: Nanos,
}

/// A VM's disk over vhost-user.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// Name of the VM.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Group whose members may connect, by name or number, such as `kvm` for libvirt's QEMU: mode
    /// 0660, otherwise 0600.
    pub socket_group: Option<String>,
    /// File or block device.
    pub path: PathBuf,
    /// `raw` disables the check for image formats. Without it, a file with the signature of an
    /// image format is refused.
    pub format: Option<Format>,
    /// Offset of the disk in its backing, in bytes.
    #[serde(default, deserialize_with = "parse_text")]
    pub offset: Bytes,
    /// Size of the disk; the rest of the backing when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub size: Option<Bytes>,
    /// Opened for reading only.
    #[serde(default)]
    pub read_only: bool,
    /// Uses the host's page cache.
    #[serde(default)]
    pub cached: bool,
    /// Expects other writers: the backing is not locked exclusively.
    #[serde(default)]
    pub shared: bool,
    /// May move to another I/O domain while its guest runs: locked only while a guest uses it.
    #[serde(default)]
    pub migrate: bool,
    /// Offers discard and zeroing, where the backing supports them. Without, bounds exclude them.
    #[serde(default = "default_true")]
    pub discard: bool,
    /// Accepts huge pages; its QEMU is trusted not to punch holes into them.
    #[serde(default)]
    pub hugepages: bool,
    /// Trusts the front end with its memory and descriptors: memory that can be truncated, regions
    /// of no whole pages, sockets and pipes as kick and call.
    #[serde(default)]
    pub trust: bool,
    /// Pins the guest's memory in RAM, as long as it has no more than this: requests then cost
    /// less. For VMs that give none of it back.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub pin: Option<Bytes>,
    /// Block size that the guest sees; the device's when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub block_size: Option<Bytes>,
    /// Treatment of writes that find no room on the host's file system; those to a file wait when
    /// not given, and those to a device fail.
    pub on_full: Option<OnFull>,
    /// Serial number; the name when not given.
    pub serial: Option<String>,
    /// Virtqueues that the guest may use, at most: its VMM asks for as many as it wants.
    #[serde(default = "default_queues")]
    pub queues: u16,
    /// Largest number of outstanding requests.
    #[serde(default = "default_depth")]
    pub depth: u32,
    /// Weight in the sharing of unreserved device time.
    #[serde(default = "default_weight")]
    pub weight: u32,
    /// Reservation of all requests but the real-time ones.
    pub reserve: Option<ReservationConfig>,
    /// Reservation of real-time requests.
    pub urgent: Option<ReservationConfig>,
    /// Largest piece under the real-time reservation; the device's quantum when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub urgent_quantum: Option<Bytes>,
    /// Cap on the guest's reads.
    #[serde(default)]
    pub read_cap: CapConfig,
    /// Cap on the guest's writes.
    #[serde(default)]
    pub write_cap: CapConfig,
    /// Treatment of I/O priorities in the guest's requests; they are ignored when not given.
    pub guest_priority: Option<GuestPriorityConfig>,
}

impl Disk {
    /// Whether other processes may have the backing open for writing meanwhile.
    #[must_use]
    pub fn allows_other_writers(&self) -> bool {
        self.shared || self.migrate
    }
}

/// Format of a disk's backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The guest's bytes, without a container.
    Raw,
}

/// Answer to writes that find no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// Writes wait until there is room.
    Wait,
    /// Writes fail with an I/O error.
    Error,
}

/// Most virtqueues of a disk that does not say how many. QEMU asks for one per vCPU.
pub const DEFAULT_QUEUES: u16 = 16;

fn default_queues() -> u16 {
    DEFAULT_QUEUES
}

fn default_depth() -> u32 {
    256
}

/// A reservation of device time.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReservationConfig {
    /// Share of the device's time, "15%".
    #[serde(deserialize_with = "parse_text")]
    pub share: Ratio,
    /// Burst of device time.
    #[serde(deserialize_with = "parse_text")]
    pub burst: Nanos,
    /// Longest time from a request to its completion.
    #[serde(deserialize_with = "parse_text")]
    pub deadline: Nanos,
}

/// Token-bucket caps; each is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CapConfig {
    /// Sustained rate of requests; no cap when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub requests: Option<Iops>,
    /// Burst of requests; 1 when not given.
    pub requests_burst: Option<u64>,
    /// Sustained rate of bytes; no cap when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub bytes: Option<BytesPerSec>,
    /// Burst of bytes; the largest piece when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub bytes_burst: Option<Bytes>,
    /// Share of the device's time.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub share: Option<Ratio>,
    /// Burst of device time; the most expensive piece when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub share_burst: Option<Nanos>,
    /// Peak rate over the sustained rate; unlimited when not given.
    pub peak: Option<f64>,
}

/// Treatment of the I/O priorities that a Linux guest writes into its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestPriorityConfig {
    /// The highest class that it may use.
    pub ceiling: Class,
    /// The class of requests without a priority.
    #[serde(default = "default_class")]
    pub default: Class,
}

fn default_class() -> Class {
    Class::BestEffort
}
