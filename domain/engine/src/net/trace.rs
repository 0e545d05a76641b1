//! Trace of frames: the outcome and the times of each.

use rtvirtio_sched::{Priority, VmId};
use rtvirtio_units::Nanos;

/// A frame that was passed on or dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameEvent {
    /// Place of the port on its network.
    pub port: VmId,
    /// Number that no other port of this network has or had; see `NetCommand::Member`.
    pub member: u32,
    /// Whether the frame is from the VM; to the VM otherwise.
    pub sent: bool,
    /// Outcome, with the reason of a drop.
    pub fate: Fate,
    /// Length in bytes, without FCS; 0 where it could not be read.
    pub len: u64,
    /// Priority of the frame's class.
    pub priority: Priority,
    /// Whether the frame was sent under a reservation.
    pub reserved: bool,
    /// Time of the fetch from the VM, or of the read from the uplink, on CLOCK_MONOTONIC.
    pub arrival: Nanos,
    /// Time from `arrival` to the hand-over by the scheduler: caps, policy, and earlier frames.
    pub wait: Nanos,
    /// Time from there through the declared link, or into the VM's memory.
    pub passing: Nanos,
}

/// Outcome of a frame; a drop is counted in the field of [`super::Drops`] with this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Sent to the uplink, or delivered to the VM.
    Passed,
    /// From the VM: another source address or VLAN.
    Spoofed,
    /// From the VM: of the link's own protocols.
    LinkLocal,
    /// From the VM: no valid chain, header or frame.
    Malformed,
    /// From the VM: longer than the MTU.
    TooLong,
    /// From the VM: refused by the uplink.
    Refused,
    /// To the VM: beyond the limit on broadcasts.
    Broadcast,
    /// To the VM: for another VLAN or address.
    Filtered,
    /// To the VM: without buffers, or with a full queue.
    NoBuffer,
    /// To the VM: a large segment that the VM cannot receive.
    Segmented,
}

impl Fate {
    /// Name of the counter in the status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Spoofed => "spoofed",
            Self::LinkLocal => "link_local",
            Self::Malformed => "malformed",
            Self::TooLong => "too_long",
            Self::Refused => "refused",
            Self::Broadcast => "broadcast",
            Self::Filtered => "filtered",
            Self::NoBuffer => "no_buffer",
            Self::Segmented => "segmented",
        }
    }
}

impl FrameEvent {
    /// No frame: fills the buffer of a trace.
    pub(super) const EMPTY: Self = Self {
        port: VmId(0),
        member: 0,
        sent: false,
        fate: Fate::Passed,
        len: 0,
        priority: Priority::NORMAL,
        reserved: false,
        arrival: Nanos(0),
        wait: Nanos(0),
        passing: Nanos(0),
    };

    /// A frame that was dropped at the moment at which it came.
    pub(super) fn dropped(port: VmId, sent: bool, fate: Fate, len: usize, time: Nanos) -> Self {
        let len = len as u64;
        Self { port, sent, fate, len, arrival: time, ..Self::EMPTY }
    }
}
