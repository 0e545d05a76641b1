//! Trace of frames: what became of each, and when.

use rtvirtio_sched::Priority;
use rtvirtio_units::Nanos;

use super::command::NetCommand;
use crate::engine::{TraceCommand, TraceReply, TraceWriter};

/// A frame that was passed on, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameEvent {
    /// Place of the port on its network.
    pub port: usize,
    /// Tells apart the ports that had this place; see [`NetCommand::Member`].
    pub member: u32,
    /// From the VM; to it otherwise.
    pub sent: bool,
    /// What became of it.
    pub fate: Fate,
    /// Its length in bytes, without FCS; 0 where it could not be read.
    pub len: u64,
    /// Its class.
    pub priority: Priority,
    /// It was sent under a reservation.
    pub reserved: bool,
    /// When it was fetched from the VM, or read from the uplink, on CLOCK_MONOTONIC.
    pub arrival: Nanos,
    /// From there until it was handed over: caps, policy, and those before it.
    pub wait: Nanos,
    /// From there until it is through the declared link, or in the VM's memory.
    pub passing: Nanos,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was passed on.
    Passed,
    /// The counter of [`super::Drops`] with this name went up.
    Spoofed,
    /// As above.
    LinkLocal,
    /// As above.
    Malformed,
    /// As above.
    TooLong,
    /// As above.
    Refused,
    /// As above.
    Broadcast,
    /// As above.
    Filtered,
    /// As above.
    NoBuffer,
    /// As above.
    Segmented,
}

impl Fate {
    /// The name of its counter in the status.
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
    /// A frame that was dropped at the moment at which it came.
    pub(super) fn dropped(port: usize, sent: bool, fate: Fate, len: usize, time: Nanos) -> Self {
        let len = len as u64;
        Self { port, sent, fate, len, arrival: time, ..NetCommand::EMPTY }
    }
}

impl TraceCommand for NetCommand {
    type Event = FrameEvent;
    const EMPTY: FrameEvent = FrameEvent {
        port: 0,
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

    fn start_trace(writer: Box<TraceWriter<FrameEvent>>, reply: TraceReply<FrameEvent>) -> Self {
        Self::StartTrace { writer, reply }
    }

    fn stop_trace(reply: TraceReply<FrameEvent>) -> Self {
        Self::StopTrace { reply }
    }
}
