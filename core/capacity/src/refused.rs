//! Why a host refuses a contract.

use rtvirtio_sched::bound::discard_clause;
use rtvirtio_units::{Bytes, Nanos};
use serde::Serialize;

/// Reason of a refusal.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "reason")]
#[non_exhaustive]
pub enum Refused {
    /// The host has no such disk.
    #[error("the host has no disk {device}: it has {known}")]
    NoDisk {
        /// Name in the spec.
        device: String,
        /// Names of the host's disks.
        known: String,
    },
    /// Latency within the guest uses up the whole target.
    #[error("the guest's own part takes {guest} of the target of {target} already")]
    NoTimeLeft {
        /// Shortest target of the VM.
        target: Nanos,
        /// Latency within the guest.
        guest: Nanos,
    },
    /// More device time is asked for than there is.
    #[error("{disk}: contracts would take {asked:.1} % of its time, and it can give {available:.1} %")]
    DeviceTime {
        disk: String,
        /// Sum of the rates, in percent of one server.
        asked: f64,
        /// Capacity, in percent of one server.
        available: f64,
    },
    /// A worst case that is longer than the deadline.
    #[error(
        "{disk}: {vm} cannot be promised {deadline}: {needed} may pass in the worst case, {blocking} of it behind pieces that the device holds already and {latency} for \
         its own stalls{}",
        discard_clause(*.discard)
    )]
    Deadline {
        disk: String,
        /// The VM whose promise would break: the candidate, or one in force.
        vm: String,
        /// Deadline to be promised for the device's part.
        deadline: Nanos,
        /// Shortest deadline that holds.
        needed: Nanos,
        /// Behind pieces at the device, a part of it.
        blocking: Nanos,
        /// The device's own stalls, a part of it.
        latency: Nanos,
        /// Behind a piece of a discard, a part of it.
        discard: Nanos,
    },
    /// A task that makes one request at a time would miss its rate behind a full device.
    #[error(
        "{disk}: a task of {vm} makes one request at a time, and each may wait for what the device holds already: beside all reservations that takes {asked:.1} % of its \
         time, and it can give {available:.1} %; lower its rate, or write loop = \"open\""
    )]
    OneAtATime {
        disk: String,
        /// The VM whose task would miss its rate: the candidate, or one in force.
        vm: String,
        /// Reservations and what its task needs free, in percent of one server.
        asked: f64,
        /// Capacity, in percent of one server.
        available: f64,
    },
    /// The host has no such network.
    #[error("the host has no network {network}: it has {known}")]
    NoNetwork {
        /// Name in the spec.
        network: String,
        /// Names of the host's networks.
        known: String,
    },
    /// More of a link is asked for than it has.
    #[error(
        "{network}: contracts would take {asked:.1} % of the link's time, and it can give {available:.1} %"
    )]
    LinkRate {
        network: String,
        /// Sum of the rates, in percent of what is used of the link.
        asked: f64,
        /// Capacity, in percent of the same.
        available: f64,
    },
    /// A worst case on a link that is longer than the deadline.
    #[error(
        "{network}: frames of {vm} cannot be promised {deadline}: {needed} may pass in the worst case, {blocking} of it behind frames that the link has already and \
         {latency} while the host does not run the thread"
    )]
    LinkDeadline {
        network: String,
        /// The VM whose promise would break: the candidate, or one in force.
        vm: String,
        /// Deadline to be promised for the link's part.
        deadline: Nanos,
        /// Shortest deadline that holds.
        needed: Nanos,
        /// Behind frames at the interface, a part of it.
        blocking: Nanos,
        /// Stalls of the I/O domain's thread, a part of it.
        latency: Nanos,
    },
    /// The VM's own traffic limit uses up the whole target.
    #[error(
        "{network}: the traffic limit of {vm} {}: raise the limit or its burst",
        held_words(*.held, *.target)
    )]
    HeldBack {
        network: String,
        vm: String,
        /// Shortest target of the class.
        target: Nanos,
        /// Longest delay of a frame by the limit; `None` where nothing bounds that.
        held: Option<Nanos>,
    },
    /// Frames that are longer than the network's.
    #[error("{network}: {vm} sends frames of {frame}, and the longest there has {largest}")]
    Frame {
        network: String,
        vm: String,
        /// Length of the flow's frames.
        frame: Bytes,
        /// Longest frame of the network.
        largest: Bytes,
    },
    /// Any further refusal by the scheduler's admission.
    #[error("{disk}: {why}")]
    Other {
        /// The disk or network.
        disk: String,
        /// Text of the refusal.
        why: String,
    },
    /// More of each CPU than there is.
    #[error("contracts would take {:.1} % of each CPU, and {:.1} % are there for them", 100.0 * .asked, 100.0 * .available)]
    Cpu {
        /// Sum of the shares, the candidate's included.
        asked: f64,
        /// Share that contracts may have.
        available: f64,
    },
}

impl Refused {
    /// Ratio of what is asked for to what is there: 1 is just admitted, infinity not comparable.
    pub(crate) fn distance(&self) -> f64 {
        match self {
            Self::DeviceTime { asked, available, .. } | Self::OneAtATime { asked, available, .. } => {
                asked / available.max(1e-9)
            }
            Self::Deadline { deadline, needed, .. } => needed.0 as f64 / deadline.0.max(1) as f64,
            Self::Cpu { asked, available } => asked / available.max(1e-9),
            _ => f64::INFINITY,
        }
    }
}

fn held_words(held: Option<Nanos>, target: Nanos) -> String {
    held.map_or_else(
        || "is below what its flows send, so nothing bounds how long it holds a frame back".to_owned(),
        |held| format!("may hold a frame back for {held}, of a target of {target}"),
    )
}
