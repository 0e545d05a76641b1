//! Status of an I/O domain: counters of every disk and port, since it is served.
//!
//! A number is `None` where the process that answers does not have it, and is shown as unknown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the status: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// All devices, disks, networks and ports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the status, [`VERSION`].
    pub version: u32,
    /// Status of each device.
    pub devices: Vec<DeviceStatus>,
    /// Status of each disk.
    pub vms: Vec<DiskStatus>,
    /// Status of each network.
    pub networks: Vec<NetworkStatus>,
    /// Status of each port.
    pub ports: Vec<PortStatus>,
}

/// Status of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Name of the device.
    pub name: String,
    /// The policy. Deadlines are kept under `"edf"` only.
    pub policy: String,
    /// The current window, in pieces.
    pub window: Option<u32>,
    /// Pieces that caps and pacing delayed.
    #[serde(flatten)]
    pub regulators: Regulators,
    /// Pieces of discards and zeroing.
    pub discard_pieces: Option<u64>,
    /// The longest of them, in ns.
    pub discard_longest_ns: Option<u64>,
    /// Pieces of these that took longer than declared: bounds do not cover them.
    pub discard_overruns: Option<u64>,
}

/// Delays by the regulators of a device or network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Regulators {
    /// Pieces, or frames to the link, that a regulator delayed.
    pub held: Option<u64>,
    /// Median delay of these beyond their exact moment, in ns.
    pub late_p50_ns: Option<u64>,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub late_p9999_ns: Option<u64>,
}

/// Latency and service of one direction of a disk or port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// Bytes moved; of frames without FCS.
    pub bytes: Option<u64>,
    /// Median latency in ns. Of a request from fetch to completion; of a frame from the VM until
    /// its hand-over, to the VM from the read of the uplink to its memory.
    pub p50_ns: Option<u64>,
    /// 99th percentile, in ns.
    pub p99_ns: Option<u64>,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub p9999_ns: Option<u64>,
    /// The longest, in ns.
    pub max_ns: Option<u64>,
    /// alpha: bytes per second while backlogged.
    pub alpha_bytes_per_second: Option<f64>,
    /// Delta: longest time between two pieces or frames while backlogged, in ns.
    pub delta_ns: Option<u64>,
    /// Pieces or frames that waited for a cap.
    pub cap_hits: Option<u64>,
}

/// Status of one direction of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DirectionStatus {
    /// Number of completed requests.
    pub requests: Option<u64>,
    /// Latency and service of these requests.
    #[serde(flatten)]
    pub service: Service,
}

/// Status of one direction of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowStatus {
    /// Frames that were passed on.
    pub frames: Option<u64>,
    /// Latency and service of these frames.
    #[serde(flatten)]
    pub service: Service,
}

/// A reservation of a device, and how it was kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromiseStatus {
    /// `"reserve"` or `"urgent"`, the key of the file.
    pub key: String,
    /// Promised share of the device's time, 0 to 1.
    pub share: Option<f64>,
    /// Promised burst of device time, in ns.
    pub burst_ns: Option<u64>,
    /// Promised longest time of a request within share and burst, in ns.
    pub deadline_ns: Option<u64>,
    /// Requests that were within share and burst, completed.
    pub requests: Option<u64>,
    /// The longest of them, from when the reservation covered it, in ns.
    pub worst_ns: Option<u64>,
    /// Requests of these that took longer than the deadline.
    pub missed: Option<u64>,
}

/// A reservation of a link, and how it was kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkPromiseStatus {
    /// `"reserve"` or `"urgent"`, the key of the file.
    pub key: String,
    /// Promised bytes per second on the wire.
    pub bytes_per_second: Option<f64>,
    /// Promised burst on the wire, in bytes.
    pub burst: Option<u64>,
    /// Promised longest time of a frame within rate and burst, in ns.
    pub deadline_ns: Option<u64>,
    /// The computed worst case of that time, in ns; `null` where there is no bound.
    #[serde(deserialize_with = "Option::deserialize")]
    pub bound_ns: Option<u64>,
    /// Frames that were within rate and burst.
    pub frames: Option<u64>,
    /// The longest of them, from when the reservation covered it, in ns.
    pub worst_ns: Option<u64>,
    /// Frames of these that took longer than the deadline.
    pub missed: Option<u64>,
}

/// Wait times of a VM's queue by cause, since it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Time in which it had requests that were not wholly submitted, in ns.
    pub queued_ns: u64,
    /// Of it, time in which nothing was at the device, in ns: caps and pacing.
    pub idle_ns: u64,
    /// Of it, time in which pieces of its own were at the device, in ns.
    pub own_ns: u64,
    /// Time behind pieces of each other VM.
    pub neighbours: Vec<Neighbour>,
}

/// Time in which a VM had requests queued while pieces of another were at the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// The other VM; `"others"` for those of a device with more than 64 that are not told apart.
    pub name: String,
    /// The time, in ns. With pieces of several at the device it counts for each.
    pub ns: u64,
}

/// The last message or connection of a QEMU that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The cause, as in the log.
    pub why: String,
    /// Seconds since the last refusal.
    pub seconds_ago: u64,
    /// Refusals since the disk is served.
    pub count: u64,
}

/// Status of a disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Name of the device.
    pub device: String,
    /// Name of the disk.
    pub name: String,
    /// Path of its socket.
    pub socket: String,
    /// Size in bytes, as its guest is told.
    pub size: Option<u64>,
    /// A QEMU is connected.
    pub connected: bool,
    /// The process of that QEMU; `null` where it is not known.
    pub peer: Option<u32>,
    /// A queue is served: its guest uses the disk.
    pub attached: bool,
    /// Whether the front end is trusted with its memory (`trust = true`).
    pub trusted: Option<bool>,
    /// Number of outstanding requests.
    pub outstanding: Option<u64>,
    /// Status of reads.
    pub read: DirectionStatus,
    /// Status of writes, flushes and discards.
    pub write: DirectionStatus,
    /// Reservations of the disk; empty without any.
    pub promises: Vec<PromiseStatus>,
    /// Signals of completed real-time requests to the program that follows the VM's urgency; `null`
    /// while none asks for them.
    pub urgent_signals: Option<u64>,
    /// Wait times by cause; `null` where these are not counted.
    pub waits: Option<Waits>,
    /// Last refusal; `null` without any.
    #[serde(deserialize_with = "Option::deserialize")]
    pub refused: Option<Refusal>,
    /// Pieces under a reservation.
    pub reserved: Option<u64>,
    /// Pieces as a share of the rest.
    pub shared: Option<u64>,
    /// Requests that the device failed.
    pub errors: Option<u64>,
    /// Error of the last of these; `null` without any.
    pub last_error: Option<String>,
    /// Requests that were answered with an error and did not reach the device, by reason.
    pub refused_requests: BTreeMap<String, u64>,
    /// Chains that are no valid requests.
    pub malformed: Option<u64>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: Option<u64>,
    /// Writes that wait for room on the host's file system.
    pub waiting_for_room: Option<u64>,
    /// Writes that had to wait for it.
    pub waited_for_room: Option<u64>,
}

/// Status of a port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortStatus {
    /// Name of the network.
    pub network: String,
    /// Name of the port.
    pub name: String,
    /// Path of its socket.
    pub socket: String,
    /// MAC address of the port.
    pub mac: String,
    /// A QEMU is connected.
    pub connected: bool,
    /// The process of that QEMU; `null` where it is not known.
    pub peer: Option<u32>,
    /// A queue is served: its guest uses the port.
    pub attached: bool,
    /// Whether the front end is trusted with its memory (`trust = true`).
    pub trusted: Option<bool>,
    /// Frames from the VM.
    pub tx: FlowStatus,
    /// Frames to the VM.
    pub rx: FlowStatus,
    /// Reservations of the port; empty without any.
    pub promises: Vec<LinkPromiseStatus>,
    /// Frames under a reservation.
    pub reserved: Option<u64>,
    /// Frames as a share of the rest.
    pub shared: Option<u64>,
    /// Frames that were not passed on, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Polls of the port that were suspended, for up to a millisecond each, because its kicks
    /// brought nothing or its frames were refused.
    pub backoffs: Option<u64>,
    /// Signals to a program that urgent frames are about to reach the guest; `null` while none
    /// asks.
    pub urgent_signals: Option<u64>,
    /// CPU time that the network's thread has spent for it, in ns; `null` without `cpu_budget`, as
    /// the next two.
    pub cpu_ns: Option<u64>,
    /// Times that it had used up its part of `cpu_budget`.
    #[serde(deserialize_with = "Option::deserialize")]
    pub throttled: Option<u64>,
    /// Time in which it waited for the next period, in ns.
    pub throttled_ns: Option<u64>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: Option<u64>,
    /// Last refusal; `null` without any.
    #[serde(deserialize_with = "Option::deserialize")]
    pub refused: Option<Refusal>,
}

/// Status of a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkStatus {
    /// Name of the network.
    pub name: String,
    /// The policy toward the link.
    pub policy: String,
    /// The declared rate of the link in bytes per second; `null` without one.
    #[serde(deserialize_with = "Option::deserialize")]
    pub link_bytes_per_second: Option<f64>,
    /// Frames that caps and pacing delayed.
    #[serde(flatten)]
    pub regulators: Regulators,
}

#[cfg(test)]
mod tests;
