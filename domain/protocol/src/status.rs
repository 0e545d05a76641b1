//! The status of a domain: what every disk and port gets, since it is served.
//!
//! A number is `None` where the process that answers does not have it, and is shown as unknown.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the status: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// All devices, disks, networks and ports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`VERSION`].
    pub version: u32,
    /// The devices.
    pub devices: Vec<DeviceStatus>,
    /// The disks.
    pub vms: Vec<DiskStatus>,
    /// The networks.
    pub networks: Vec<NetworkStatus>,
    /// The ports.
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
    /// Delays by regulators.
    #[serde(flatten)]
    pub regulators: Regulators,
    /// Pieces of discards and zeroing.
    pub discard_pieces: Option<u64>,
    /// The longest of them, in ns.
    pub discard_longest_ns: Option<u64>,
    /// Those that took longer than declared: bounds do not cover them.
    pub discard_overruns: Option<u64>,
}

/// What the regulators of a device or network delayed.
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

/// One direction of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DirectionStatus {
    /// Requests completed.
    pub requests: Option<u64>,
    /// Latency and service.
    #[serde(flatten)]
    pub service: Service,
}

/// One direction of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowStatus {
    /// Frames passed on.
    pub frames: Option<u64>,
    /// Latency and service.
    #[serde(flatten)]
    pub service: Service,
}

/// A reservation of a device, and what came of it.
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
    /// Those that took longer than the deadline.
    pub missed: Option<u64>,
}

/// A reservation of a link, and what came of it.
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
    /// Those that took longer than the deadline.
    pub missed: Option<u64>,
}

/// For whom requests of a VM have waited in its queue, since it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Time in which it had requests that were not wholly submitted, in ns.
    pub queued_ns: u64,
    /// Of it, time in which nothing was at the device, in ns: caps and pacing.
    pub idle_ns: u64,
    /// Of it, time in which pieces of its own were at the device, in ns.
    pub own_ns: u64,
    /// The same of each VM that it has waited for.
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
    /// Seconds since.
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
    /// Its size in bytes, as its guest is told.
    pub size: Option<u64>,
    /// A QEMU is connected.
    pub connected: bool,
    /// The process of that QEMU; `null` where it is not known.
    pub peer: Option<u32>,
    /// Its guest uses the disk: a queue is served.
    pub attached: bool,
    /// Outstanding requests.
    pub outstanding: Option<u64>,
    /// Reads.
    pub read: DirectionStatus,
    /// Writes, flushes, discards.
    pub write: DirectionStatus,
    /// Its reservations; none for a VM without.
    pub promises: Vec<PromiseStatus>,
    /// Signals of completed real-time requests to what follows the VM's urgency; `null` while none
    /// asks for them.
    pub urgent_signals: Option<u64>,
    /// For whom it has waited; `null` where that is not told apart.
    pub waits: Option<Waits>,
    /// What was refused last; `null` without any.
    #[serde(deserialize_with = "Option::deserialize")]
    pub refused: Option<Refusal>,
    /// Pieces under a reservation.
    pub reserved: Option<u64>,
    /// Pieces as a share of the rest.
    pub shared: Option<u64>,
    /// Requests that the device failed.
    pub errors: Option<u64>,
    /// Why the last of them failed; `null` without any.
    pub last_error: Option<String>,
    /// Requests that were answered with an error and did not reach the device, by reason.
    pub refused_requests: BTreeMap<String, u64>,
    /// Chains that are no valid requests.
    pub malformed: Option<u64>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: Option<u64>,
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
    /// Its address.
    pub mac: String,
    /// A QEMU is connected.
    pub connected: bool,
    /// The process of that QEMU; `null` where it is not known.
    pub peer: Option<u32>,
    /// Its guest uses the port: a queue is served.
    pub attached: bool,
    /// Frames from the VM.
    pub tx: FlowStatus,
    /// Frames to the VM.
    pub rx: FlowStatus,
    /// Its reservations; none for a port without.
    pub promises: Vec<LinkPromiseStatus>,
    /// Frames under a reservation.
    pub reserved: Option<u64>,
    /// Frames as a share of the rest.
    pub shared: Option<u64>,
    /// Frames that were not passed on, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Times that it was not looked at for up to a millisecond because its kicks brought nothing,
    /// or its frames were refused.
    pub backoffs: Option<u64>,
    /// Times that a program was told of urgent frames before the guest; `null` while none asks.
    pub urgent_signals: Option<u64>,
    /// CPU time that the network's thread has spent for it, in ns; `null` without `cpu_budget`, as
    /// the next two.
    pub cpu_ns: Option<u64>,
    /// Times that it had used up its part of `cpu_budget`.
    #[serde(deserialize_with = "Option::deserialize")]
    pub throttled: Option<u64>,
    /// How long it waited for the next period, in ns.
    pub throttled_ns: Option<u64>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: Option<u64>,
    /// What was refused last; `null` without any.
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
    /// Delays by regulators.
    #[serde(flatten)]
    pub regulators: Regulators,
}

#[cfg(test)]
mod tests;
