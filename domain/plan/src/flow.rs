//! The promise of one flow of a network, and the class of its frames.

use rtvirtio_domain_config::{Port, RateConfig};
use rtvirtio_spec::{Direction, Flow, Target};
use rtvirtio_units::{Bytes, Iops, Nanos};
use serde::Serialize;

/// The bound of a flow, against its target.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlowPromise {
    /// VM that sends or receives the flow.
    pub vm: String,
    /// Name of the flow in its VM.
    pub flow: String,
    pub network: String,
    /// Direction as the VM sees it.
    pub direction: Direction,
    /// Length of each frame without its FCS.
    pub frame: Bytes,
    /// Declared frames per second.
    pub rate: Iops,
    /// Frames that may come at once.
    pub burst: u32,
    /// Whether its frames are marked as urgent.
    pub is_urgent: bool,
    /// Latency and percentile that the spec asks for.
    pub target: Option<Target>,
    /// Longest time from the VM's queue until a frame has left for the link; `None` without a
    /// reservation.
    pub bound: Option<Nanos>,
    /// Whether the target is met in the worst case; `None` without a target.
    pub met: Option<bool>,
    /// Reason for no promise, where there is a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unpromised: Option<String>,
    /// The smallest target that would be admitted, all other reservations as they are; `None` for a
    /// promise, and where no target would be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_target: Option<Nanos>,
    /// Position of its port in [`NetworkPlan::ports`](crate::NetworkPlan::ports).
    #[serde(skip)]
    pub(crate) port: usize,
}

impl FlowPromise {
    /// Whether the VM sends the flow, among the frames of this class.
    pub(crate) fn is_sent_in(&self, class: Class) -> bool {
        self.direction == Direction::Tx && self.is_urgent == (class == Class::Urgent)
    }
}

/// A class of a port's frames: the I/O domain schedules urgent ones apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Urgent,
    Normal,
}

impl Class {
    pub(crate) fn from_flow(flow: &Flow) -> Self {
        if flow.mark.is_some() { Self::Urgent } else { Self::Normal }
    }

    pub(crate) fn reserve(self, port: &mut Port) -> &mut Option<RateConfig> {
        match self {
            Self::Urgent => &mut port.urgent,
            Self::Normal => &mut port.reserve,
        }
    }
}
