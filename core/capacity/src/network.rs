//! One network of a host: what its link can promise, and what a VM's flows take of it.

use rtvirtio_sched::bound::{self, EdfRoom, Refusal};
use rtvirtio_sched::{LINK_STALL, Link, MAX_BURST, Reservation};
use rtvirtio_spec::{Direction, Flow, Traffic};
use rtvirtio_traffic::{Direction as Way, Stream, Tspec, Unit, held_back};
use rtvirtio_units::{Bytes, BytesPerSec, Nanos, Ratio};
use serde::Serialize;

use crate::Reserve;
use crate::disk::part_of;

/// Reserved rate over the rate that the spec declares.
pub const LINK_HEADROOM: f64 = 1.1;

/// A part of a link, counted on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkReserve {
    /// Rate on the wire, bytes per second.
    pub rate: BytesPerSec,
    /// Bytes on the wire that may come at once.
    pub burst: Bytes,
    /// Longest time until a frame within rate and burst has left.
    pub deadline: Nanos,
}

/// Reservation for all these flows: those without a target use it too. Frames that accumulate in a
/// stall, of the I/O domain's thread or of a vCPU, come at once.
pub fn link_reserve<'f>(flows: impl Iterator<Item = &'f Flow>, deadline: Nanos, stall: Nanos) -> LinkReserve {
    let (mut rate, mut burst) = (0.0, 0.0);
    for flow in flows {
        let wire = flow.on_the_wire().0 as f64;
        rate += flow.rate.0 * wire;
        burst += (f64::from(flow.burst) + (flow.rate.0 * stall.as_secs_f64()).ceil()) * wire;
    }
    LinkReserve {
        rate: BytesPerSec((rate * LINK_HEADROOM).ceil()),
        burst: Bytes(burst.ceil() as u64),
        deadline,
    }
}

/// Frame limits of a VM as its port applies them: a byte bucket smaller than the network's largest
/// frame would block that frame forever, so a smaller burst becomes one frame.
pub fn frame_limits(traffic: &Traffic, largest_frame: u64) -> impl Iterator<Item = (Way, Tspec)> {
    Tspec::all(traffic).filter(|(way, _)| !way.is_disk()).map(move |(way, asked)| {
        let largest = if asked.unit == Unit::Bytes { largest_frame } else { 1 };
        (way, Tspec { burst: asked.burst.max(largest), largest, ..asked })
    })
}

/// Longest time for which the limits on what a VM sends hold one of its frames back, when its vCPU
/// stands still for `stall` and then makes up for it; `None` when nothing bounds that.
pub fn frames_held_back<'f>(
    limits: &[Tspec],
    flows: impl Iterator<Item = &'f Flow>,
    stall: Nanos,
) -> Option<Nanos> {
    let stream = |flow: &Flow| Stream {
        bytes: [flow.frame.0 as f64; 2],
        rate: flow.rate.0,
        at_once: f64::from(flow.burst) + (flow.rate.0 * stall.as_secs_f64()).ceil(),
    };
    let streams: Vec<Stream> = flows.map(stream).collect();
    held_back(limits, &streams).map(Nanos::from_secs_f64)
}

/// The part of a contract on one network.
#[derive(Clone, Debug, PartialEq)]
pub struct OnNetwork {
    /// The network's name in the spec; `None` for the only one.
    pub network: Option<String>,
    /// Flows that the VM sends there, at least one of them with a target.
    pub flows: Vec<Flow>,
    /// Traffic limits of the VM, from the spec.
    pub traffic: Traffic,
}

impl OnNetwork {
    /// Sent flows among `flows` on the network of this port; `None` when no sent flow has a target.
    pub(crate) fn from_flows(network: Option<String>, flows: Vec<Flow>, traffic: Traffic) -> Option<Self> {
        let flows: Vec<Flow> = flows.into_iter().filter(|f| f.direction == Direction::Tx).collect();
        let is_promised = flows.iter().any(|f| f.target.is_some());
        is_promised.then_some(Self { network, flows, traffic })
    }
}

/// Link of one network of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// The name by which specs mean it; `None` for the only one, which every spec means.
    pub name: Option<String>,
    link: Link,
    /// Time of the largest frame, ns.
    piece: f64,
    room: EdfRoom,
}

/// Flows that can be promised nothing on a network, even when nothing else uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPromise {
    /// A frame is longer than those of the network.
    Frame {
        /// Length of the flow's frames.
        frame: Bytes,
        /// Longest frame of the network.
        largest: Bytes,
    },
    /// The VM's own limit delays a frame for as long as its target, or without a bound.
    HeldBack {
        /// Shortest target of the class.
        target: Nanos,
        /// Longest delay; `None` without a bound.
        held: Option<Nanos>,
    },
    /// More frames at once than the scheduler's buckets hold.
    Burst {
        /// Burst as time on the link.
        burst: Nanos,
    },
}

impl Network {
    /// A link of this rate with this MTU. `stall` is the longest time in which the host does not
    /// run the I/O domain's thread; [`LINK_STALL`] where it is not known, as in a plan.
    #[must_use]
    pub fn new(name: Option<String>, rate: BytesPerSec, mtu: u32, stall: Option<Nanos>) -> Self {
        // Ethernet's header and two VLAN tags.
        let largest_frame = u64::from(mtu) + 22;
        let link = Link { rate, stall: stall.unwrap_or(LINK_STALL), largest_frame };
        let piece = link.line().time_of(largest_frame) as f64;
        Self { name, room: Link::device(link.stall).edf_room(piece), link, piece }
    }

    /// A network as a spec declares it.
    #[must_use]
    pub fn of_spec(network: &rtvirtio_spec::Network) -> Self {
        Self::new(network.name.clone(), network.link, network.mtu, None)
    }

    /// Declared rate of the link.
    #[must_use]
    pub fn rate(&self) -> BytesPerSec {
        self.link.rate
    }

    /// Service curve left for reservations; the link gives 1 second per second at
    /// [`LINK_SHARE`](rtvirtio_sched::LINK_SHARE) of its rate.
    #[must_use]
    pub fn room(&self) -> EdfRoom {
        self.room
    }

    /// Reservations for a VM's targets, as a plan of the I/O domain makes them: of marked frames,
    /// and of the others.
    pub fn reserves(&self, of: &OnNetwork) -> Result<[Option<Reserve>; 2], NoPromise> {
        let (link, largest) = (&self.link, Bytes(self.link.largest_frame));
        if let Some(frame) = of.flows.iter().map(|f| f.frame).find(|frame| *frame > largest) {
            return Err(NoPromise::Frame { frame, largest });
        }
        let limits = frame_limits(&of.traffic, link.largest_frame).filter(|(way, _)| *way == Way::Tx);
        let limits: Vec<Tspec> = limits.map(|(_, tspec)| tspec).collect();
        let held = frames_held_back(&limits, of.flows.iter(), link.stall);
        let mut reserves = [None; 2];
        for (reserve, is_urgent) in reserves.iter_mut().zip([true, false]) {
            let class = || of.flows.iter().filter(move |f| f.mark.is_some() == is_urgent);
            let Some(target) = class().filter_map(|f| f.target).map(|t| t.latency).min() else { continue };
            let left = held.and_then(|held| target.0.checked_sub(held.0)).filter(|left| *left > 0);
            let Some(left) = left else { return Err(NoPromise::HeldBack { target, held }) };
            let asked = link_reserve(class(), Nanos(left), link.stall);
            let r = link.reservation(asked.rate, asked.burst, asked.deadline);
            if r.burst > MAX_BURST {
                return Err(NoPromise::Burst { burst: Nanos(r.burst) });
            }
            let share = Ratio(r.rate as f64 / 1e9);
            let (burst, deadline) = (Nanos(r.burst), r.deadline);
            *reserve = Some(Reserve { share, burst, deadline, spare: Ratio(0.0) });
        }
        Ok(reserves)
    }

    /// Share of the link that the reservations of one VM take, with the property of a disk's
    /// ([`DiskCapacity::part`](crate::DiskCapacity::part)): the room is a line here too. `None` for
    /// those that are refused even alone.
    #[must_use]
    pub fn part(&self, all: &[Reserve]) -> Option<f64> {
        part_of(self.room, 0.0, all)
    }

    /// The scheduler's own admission of these ports together, each with its reservations of marked
    /// frames and of the others.
    ///
    /// # Errors
    /// The first that is refused, by the position of its port.
    pub fn admit(&self, ports: &[[Option<Reserve>; 2]]) -> Result<(), Refusal> {
        let reservation = |r: Reserve| {
            // The rate was an integer before it became a share.
            let rate = (r.share.0 * 1e9).round() as u64;
            Reservation { rate, burst: r.burst.0, deadline: r.deadline }
        };
        let demand = |(port, of): (usize, &[Option<Reserve>; 2])| {
            Link::demand(self.piece, port, 100, of.map(|r| r.map(reservation)))
        };
        let flows: Vec<bound::Flow> = ports.iter().enumerate().flat_map(demand).collect();
        bound::admit(&Link::device(self.link.stall), &flows)
    }
}
