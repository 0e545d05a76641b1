//! The keys of the file.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use rtvirtio_sched::{Class, Policy};
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos, Ratio};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// The whole file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Where `rtvirtio iod status` asks.
    #[serde(default = "control")]
    pub control: PathBuf,
    /// Group whose members may connect to it too, by name or number; its socket has mode 0660 then,
    /// 0600 without.
    pub control_group: Option<String>,
    /// What the process may still do once it serves.
    #[serde(default)]
    pub sandbox: Sandbox,
    /// Devices; each has a thread and a scheduler of its own.
    #[serde(rename = "device")]
    pub devices: Vec<Device>,
}

fn control() -> PathBuf {
    "/run/rtvirtio/iod.sock".into()
}

/// How far the process shuts itself in before it serves anybody (`docs/threat-model.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sandbox {
    /// Not at all.
    Off,
    /// System calls that `on` would end the process for are done, and written to the kernel's log;
    /// no landlock, which cannot do that. To find out what a new libc needs.
    Log,
    /// All that the kernel can do.
    #[default]
    On,
}

/// One device and its disks.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// For its thread and in the status.
    pub name: String,
    /// How VMs are chosen.
    #[serde(default = "edf")]
    pub policy: Policy,
    /// Largest piece.
    #[serde(default = "quantum", deserialize_with = "parse_text")]
    pub quantum: Bytes,
    /// Pieces at the device.
    #[serde(default)]
    pub window: Window,
    /// What pieces cost; all the same when it is not known.
    pub cost: Option<CostConfig>,
    /// Pieces that the device serves at once, for the check of deadlines.
    #[serde(default = "one")]
    pub parallel: u32,
    /// Longest time in which it does nothing: garbage collection, a sleeping CPU. For the check of
    /// deadlines.
    #[serde(default, deserialize_with = "parse_text")]
    pub stall: Nanos,
    /// CPUs of its thread.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// `SCHED_FIFO` priority of its thread.
    pub fifo: Option<u8>,
    /// How long it looks for more before it sleeps.
    #[serde(default, deserialize_with = "parse_text")]
    pub poll: Nanos,
    /// The guest's class goes on to the host's I/O scheduler, which must be `mq-deadline` to act on
    /// it.
    #[serde(default)]
    pub pass_priority: bool,
    /// Most of the device's time that discards and zeroing take while other VMs use it.
    #[serde(default = "discard_share", deserialize_with = "parse_text")]
    pub discard_share: Ratio,
    /// Less important requests of a VM go first when they waited for so long.
    #[serde(default = "aging", deserialize_with = "parse_text")]
    pub aging: Nanos,
    /// The disks.
    #[serde(rename = "disk")]
    pub disks: Vec<Disk>,
}

fn edf() -> Policy {
    Policy::Edf
}

fn quantum() -> Bytes {
    Bytes::from_kib(64)
}

fn discard_share() -> Ratio {
    Ratio(0.05)
}

fn aging() -> Nanos {
    Nanos::from_millis(1_000)
}

/// A number, or where to begin and how far to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum Window {
    /// Always so many.
    Fixed(u32),
    /// As many as the device needs.
    Adaptive {
        /// To begin with.
        start: u32,
        /// Fewest.
        #[serde(default = "one")]
        least: u32,
        /// Most.
        most: u32,
        /// Most without a reservation's deadline.
        shared: Option<u32>,
    },
}

fn one() -> u32 {
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
    /// Reads.
    pub read: LineConfig,
    /// Writes.
    pub write: LineConfig,
    /// A flush.
    #[serde(default, deserialize_with = "parse_text")]
    pub flush: Nanos,
    /// Longest time of one piece of a discard or zeroing: pieces are sized to take no longer. 500
    /// us, or as a write of one quantum where that is longer, when not said.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub discard: Option<Nanos>,
}

/// `base + MiB * per_mib`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LineConfig {
    /// Before the first byte.
    #[serde(deserialize_with = "parse_text")]
    pub base: Nanos,
    /// For each MiB.
    #[serde(deserialize_with = "parse_text")]
    pub per_mib: Nanos,
}

/// One VM's disk.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The VM's name.
    pub name: String,
    /// Where its QEMU connects.
    pub socket: PathBuf,
    /// Group whose members may connect, by name or number, such as the `kvm` of libvirt's QEMU; its
    /// socket has mode 0660 then, 0600 without.
    pub socket_group: Option<String>,
    /// File or block device.
    pub path: PathBuf,
    /// Serves it raw without a look at what is on it. Without, a file that looks like a container
    /// of another format is refused.
    pub format: Option<Format>,
    /// Where the disk begins in it.
    #[serde(default, deserialize_with = "parse_text")]
    pub offset: Bytes,
    /// How much of it is the disk; the rest when not said.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub size: Option<Bytes>,
    /// Nobody writes it.
    #[serde(default)]
    pub read_only: bool,
    /// Through the host's page cache.
    #[serde(default)]
    pub cached: bool,
    /// Others write it too, and that is meant.
    #[serde(default)]
    pub shared: bool,
    /// The guest may discard and zero ranges, where the backing can. Without, bounds need not cover
    /// it.
    #[serde(default = "yes")]
    pub discard: bool,
    /// Its QEMU brings huge pages, and is trusted not to give them back.
    #[serde(default)]
    pub hugepages: bool,
    /// What the guest reads as the serial number; the name when not said.
    pub serial: Option<String>,
    /// Queues offered.
    #[serde(default = "queues")]
    pub queues: u16,
    /// Requests outstanding at most.
    #[serde(default = "depth")]
    pub depth: u32,
    /// Share of what nobody reserved.
    #[serde(default = "weight")]
    pub weight: u32,
    /// What all its requests, but the real-time ones, are promised.
    pub reserve: Option<ReservationConfig>,
    /// What its real-time requests are promised.
    pub urgent: Option<ReservationConfig>,
    /// Largest piece of those that go by that promise; the device's quantum when not said.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub urgent_quantum: Option<Bytes>,
    /// Limit for reads.
    #[serde(default)]
    pub read_cap: CapConfig,
    /// Limit for writes.
    #[serde(default)]
    pub write_cap: CapConfig,
    /// Whether, and how far, the guest's word about priorities counts.
    pub guest_priority: Option<GuestPriorityConfig>,
}

fn yes() -> bool {
    true
}

/// A disk's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Its bytes are the guest's.
    Raw,
}

fn queues() -> u16 {
    1
}

fn depth() -> u32 {
    256
}

fn weight() -> u32 {
    100
}

/// Device time that is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReservationConfig {
    /// Share of the device's time, "15%".
    #[serde(deserialize_with = "parse_text")]
    pub share: Ratio,
    /// Device time at once.
    #[serde(deserialize_with = "parse_text")]
    pub burst: Nanos,
    /// From a request to its answer.
    #[serde(deserialize_with = "parse_text")]
    pub deadline: Nanos,
}

/// Limits, each of them optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CapConfig {
    /// Requests per second.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub requests: Option<Iops>,
    /// Requests at once; 1 when not said.
    pub requests_burst: Option<u64>,
    /// Bytes per second.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub bytes: Option<BytesPerSec>,
    /// Bytes at once; the largest piece when not said.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub bytes_burst: Option<Bytes>,
    /// Share of the device's time.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub share: Option<Ratio>,
    /// Device time at once; the dearest piece when not said.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub share_burst: Option<Nanos>,
    /// How much faster than its rate a burst may come; without a limit when not said.
    pub peak: Option<f64>,
}

/// The guest is Linux and writes its priorities into its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestPriorityConfig {
    /// The best class that it may claim.
    pub ceiling: Class,
    /// The class of what says nothing.
    #[serde(default = "best_effort")]
    pub default: Class,
}

fn best_effort() -> Class {
    Class::BestEffort
}

/// A value with its unit in the text.
fn parse_text<'de, T, D>(d: D) -> Result<T, D::Error>
where
    T: FromStr,
    T::Err: Display,
    D: Deserializer<'de>,
{
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

fn parse_optional_text<'de, T, D>(d: D) -> Result<Option<T>, D::Error>
where
    T: FromStr,
    T::Err: Display,
    D: Deserializer<'de>,
{
    parse_text(d).map(Some)
}
