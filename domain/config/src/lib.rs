//! The domain's configuration file: TOML, with units in the text. Unknown keys are errors, with their line.

mod admission;
mod paths;

pub use paths::{NamedPath, PathKind};

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rtvirtio_sched::bound::Refusal;
use rtvirtio_sched::{
    Cap, Class, Config, ConfigError, Cost, Line, Policy, Priority, PriorityRule, Reservation, Tspec,
    VmConfig, WindowConfig,
};
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
    /// System calls that `on` would end the process for are done, and written to the kernel's log; no landlock, which cannot do that. To find out what a new libc needs.
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
    #[serde(default = "quantum", deserialize_with = "text")]
    pub quantum: Bytes,
    /// Pieces at the device.
    #[serde(default)]
    pub window: Window,
    /// What pieces cost; all the same when it is not known.
    pub cost: Option<CostText>,
    /// Pieces that the device serves at once, for the check of deadlines.
    #[serde(default = "one")]
    pub parallel: u32,
    /// Longest time in which it does nothing: garbage collection, a sleeping CPU. For the check of deadlines.
    #[serde(default, deserialize_with = "text")]
    pub stall: Nanos,
    /// CPUs of its thread.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// `SCHED_FIFO` priority of its thread.
    pub fifo: Option<u8>,
    /// How long it looks for more before it sleeps.
    #[serde(default, deserialize_with = "text")]
    pub poll: Nanos,
    /// The guest's class goes on to the host's I/O scheduler, which must be `mq-deadline` to act on it.
    #[serde(default)]
    pub pass_priority: bool,
    /// Most of the device's time that discards and zeroing take while other VMs use it.
    #[serde(default = "discard_share", deserialize_with = "text")]
    pub discard_share: Ratio,
    /// Less important requests of a VM go first when they waited for so long.
    #[serde(default = "aging", deserialize_with = "text")]
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
pub struct CostText {
    /// Reads.
    pub read: LineText,
    /// Writes.
    pub write: LineText,
    /// A flush.
    #[serde(default, deserialize_with = "text")]
    pub flush: Nanos,
    /// Longest time of one piece of a discard or zeroing: pieces are sized to take no longer. 500
    /// us, or as a write of one
    /// quantum where that is longer, when not said.
    #[serde(default, deserialize_with = "maybe")]
    pub discard: Option<Nanos>,
}

/// `base + MiB * per_mib`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LineText {
    /// Before the first byte.
    #[serde(deserialize_with = "text")]
    pub base: Nanos,
    /// For each MiB.
    #[serde(deserialize_with = "text")]
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
    /// socket has mode 0660
    /// then, 0600 without.
    pub socket_group: Option<String>,
    /// File or block device.
    pub path: PathBuf,
    /// Serves it raw without a look at what is on it. Without, a file that looks like a container
    /// of another format is
    /// refused.
    pub format: Option<Format>,
    /// Where the disk begins in it.
    #[serde(default, deserialize_with = "text")]
    pub offset: Bytes,
    /// How much of it is the disk; the rest when not said.
    #[serde(default, deserialize_with = "maybe")]
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
    pub reserve: Option<ReserveText>,
    /// What its real-time requests are promised.
    pub urgent: Option<ReserveText>,
    /// Largest piece of those that go by that promise; the device's quantum when not said.
    #[serde(default, deserialize_with = "maybe")]
    pub urgent_quantum: Option<Bytes>,
    /// Limit for reads.
    #[serde(default)]
    pub read_cap: CapText,
    /// Limit for writes.
    #[serde(default)]
    pub write_cap: CapText,
    /// Whether, and how far, the guest's word about priorities counts.
    pub guest_priority: Option<PriorityText>,
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
pub struct ReserveText {
    /// Share of the device's time, "15%".
    #[serde(deserialize_with = "text")]
    pub share: Ratio,
    /// Device time at once.
    #[serde(deserialize_with = "text")]
    pub burst: Nanos,
    /// From a request to its answer.
    #[serde(deserialize_with = "text")]
    pub deadline: Nanos,
}

/// Limits, each of them optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CapText {
    /// Requests per second.
    #[serde(default, deserialize_with = "maybe")]
    pub requests: Option<Iops>,
    /// Requests at once; 1 when not said.
    pub requests_burst: Option<u64>,
    /// Bytes per second.
    #[serde(default, deserialize_with = "maybe")]
    pub bytes: Option<BytesPerSec>,
    /// Bytes at once; the largest piece when not said.
    #[serde(default, deserialize_with = "maybe")]
    pub bytes_burst: Option<Bytes>,
    /// Share of the device's time.
    #[serde(default, deserialize_with = "maybe")]
    pub share: Option<Ratio>,
    /// Device time at once; the dearest piece when not said.
    #[serde(default, deserialize_with = "maybe")]
    pub share_burst: Option<Nanos>,
    /// How much faster than its rate a burst may come; without a limit when not said.
    pub peak: Option<f64>,
}

/// The guest is Linux and writes its priorities into its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriorityText {
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
fn text<'de, T, D>(d: D) -> Result<T, D::Error>
where
    T: FromStr,
    T::Err: Display,
    D: Deserializer<'de>,
{
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

fn maybe<'de, T, D>(d: D) -> Result<Option<T>, D::Error>
where
    T: FromStr,
    T::Err: Display,
    D: Deserializer<'de>,
{
    text(d).map(Some)
}

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not such a file.
    #[error("{}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the line.
        message: String,
    },
    /// Numbers that do not go together.
    #[error("device \"{device}\": {message}")]
    Sched {
        /// The device.
        device: String,
        /// What, with the disk's name.
        message: String,
        /// What.
        source: ConfigError,
    },
    /// Two settings that hurt each other.
    #[error(
        "device \"{device}\": `poll` and `fifo` together: the kernel stops a real-time thread that never sleeps for 50 ms in every second (sched_rt_runtime_us); leave one of them out"
    )]
    Conflict {
        /// The device.
        device: String,
    },
    /// A reservation's deadline that cannot be kept.
    #[error("device \"{device}\": {message}")]
    Refused {
        /// The device.
        device: String,
        /// Why, with the disk's name where a single one is at fault.
        message: String,
        /// Why, with the number.
        source: Refusal,
    },
    /// Two paths that would be the same file.
    #[error("{first} and {second} are the same path, {}; give each its own", path.display())]
    Collision {
        /// One.
        first: String,
        /// The other.
        second: String,
        /// The path, absolute.
        path: PathBuf,
    },
    /// A name or socket twice.
    #[error("{what} \"{name}\" is there twice")]
    Twice {
        /// What kind of thing.
        what: &'static str,
        /// Which.
        name: String,
    },
}

impl File {
    /// Reads a file.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &text)
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, FileError> {
        let file: Self = toml::from_str(text)
            .map_err(|e| FileError::Parse { path: path.to_owned(), message: e.to_string() })?;
        let mut seen = std::collections::BTreeSet::new();
        for device in &file.devices {
            once(&mut seen, "device", &device.name)?;
            if device.fifo.is_some() && device.poll.0 > 0 {
                return Err(FileError::Conflict { device: device.name.clone() });
            }
            for disk in &device.disks {
                once(&mut seen, "disk", &disk.name)?;
                once(&mut seen, "socket", &disk.socket.to_string_lossy())?;
            }
            device.sched().check().map_err(|source| FileError::Sched {
                device: device.name.clone(),
                message: device.with_disk_names(&source.to_string()),
                source,
            })?;
            device.admit()?;
        }
        file.refuse_collisions(path)?;
        Ok(file)
    }
}

fn once(
    seen: &mut std::collections::BTreeSet<(&'static str, String)>,
    what: &'static str,
    name: &str,
) -> Result<(), FileError> {
    if seen.insert((what, name.to_owned())) {
        return Ok(());
    }
    Err(FileError::Twice { what, name: name.to_owned() })
}

impl Device {
    /// The scheduler knows disks by their numbers ("VM 0"); people know them by their names.
    fn with_disk_names(&self, text: &str) -> String {
        let Some((before, (number, after))) = text.split_once("VM ").and_then(|(before, rest)| {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            Some((before, (rest[..digits].parse::<usize>().ok()?, &rest[digits..])))
        }) else {
            return text.to_owned();
        };
        let Some(disk) = self.disks.get(number) else { return text.to_owned() };
        format!("{before}disk \"{}\"{after}", disk.name)
    }

    /// As the scheduler wants it.
    #[must_use]
    pub fn sched(&self) -> Config {
        let window = match self.window {
            Window::Fixed(n) => WindowConfig::fixed(n),
            Window::Adaptive { start, least, most, shared } => WindowConfig { start, least, most, shared },
        };
        let cost = self.cost.map_or(Cost::UNIT, |c| {
            let line = |l: LineText| Line { base_ns: l.base.0, per_mib_ns: l.per_mib.0 };
            let write = line(c.write);
            Cost {
                read: line(c.read),
                write,
                flush_ns: c.flush.0.max(c.write.base.0),
                discard_ns: c.discard.map_or_else(|| write.of(self.quantum.0).max(500_000), |d| d.0),
            }
        });
        let config = Config {
            policy: self.policy,
            quantum: self.quantum.0,
            window,
            cost,
            aging: self.aging,
            discard_share: whole(self.discard_share.0 * 100.0).clamp(1, 100) as u32,
            ..Config::default()
        };
        let vms = self.disks.iter().map(|d| d.vm(&config)).collect();
        Config { vms, ..config }
    }
}

impl Disk {
    fn vm(&self, config: &Config) -> VmConfig {
        let rule = self.guest_priority.map_or_else(PriorityRule::default, |p| PriorityRule {
            read: true,
            default: Priority { class: p.default, level: 4 },
            ceiling: p.ceiling,
        });
        let largest = self.urgent_quantum.map_or(0, |b| b.0).max(config.quantum);
        VmConfig {
            depth: self.depth,
            weight: self.weight,
            caps: [
                self.read_cap.cap(config, rtvirtio_sched::Direction::Read, largest),
                self.write_cap.cap(config, rtvirtio_sched::Direction::Write, largest),
            ],
            urgent: self.urgent.map(ReserveText::reservation),
            urgent_quantum: self.urgent_quantum.map(|b| b.0),
            normal: self.reserve.map(ReserveText::reservation),
            priority: rule,
            promised: [0; 2],
        }
    }
}

impl ReserveText {
    fn reservation(self) -> Reservation {
        Reservation { rate: whole(self.share.0 * 1e9), burst: self.burst.0, deadline: self.deadline }
    }
}

fn whole(v: f64) -> u64 {
    v.max(0.0).round() as u64
}

impl CapText {
    fn cap(&self, config: &Config, direction: rtvirtio_sched::Direction, largest: u64) -> Cap {
        let tspec = |rate: f64, burst: u64| Tspec {
            rate: whole(rate).max(1),
            burst,
            peak: self.peak.map(|times| whole(rate * times.max(1.0)).max(1)),
        };
        let dearest = config.cost.most(direction, largest);
        Cap {
            requests: self.requests.map(|r| tspec(r.0, self.requests_burst.unwrap_or(1))),
            bytes: self.bytes.map(|r| tspec(r.0, self.bytes_burst.map_or(largest, |b| b.0))),
            time: self.share.map(|r| tspec(r.0 * 1e9, self.share_burst.map_or(dearest, |b| b.0))),
        }
    }
}

#[cfg(test)]
mod tests;
