//! One device under one shape: admission of reservations and the share of the device each takes.

use rtvirtio_sched::bound::{self, EdfRoom, Flow, Refusal};
use rtvirtio_spec::Vm;
use rtvirtio_units::Nanos;

use crate::{DeviceModel, Options, Reserve, Shape, reserve, tightest};

/// Reservations and admission of a device under one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskCapacity {
    /// Scheduler parameters of all VMs.
    pub shape: Shape,
    device: DeviceModel,
    bound: bound::Device,
    /// Device time of the largest piece of any VM, ns.
    piece: f64,
    room: EdfRoom,
    options: Options,
    /// S: share of one server that the parts of all contracts leave free, see
    /// [`DiskCapacity::part`].
    kept: f64,
}

/// Latency within the guest uses up the whole target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTimeLeft {
    /// Shortest target of the VM.
    pub target: Nanos,
    /// Latency within the guest.
    pub guest: Nanos,
}

impl DiskCapacity {
    #[must_use]
    pub fn new(device: &DeviceModel, options: &Options, shape: Shape) -> Self {
        let device = shape.device(device);
        let bound = device.with_window(shape.window);
        let piece = device.max_piece_cost(shape.quantum);
        let room = bound.edf_room(piece);
        Self { shape, room, bound, piece, device, options: options.clone(), kept: 0.0 }
    }

    /// Reservation for a VM's targets; `None` for a VM without a target that can be promised.
    ///
    /// # Errors
    /// When the latency within the guest leaves no time for the device.
    pub fn reserve(&self, vm: &Vm) -> Result<Option<Reserve>, NoTimeLeft> {
        let Some(target) = tightest(vm) else { return Ok(None) };
        let guest = self.options.guest;
        match target.0.checked_sub(guest.0).filter(|left| *left > 0) {
            Some(left) => Ok(Some(reserve(vm, &self.device, &self.options, self.shape, Nanos(left)))),
            None => Err(NoTimeLeft { target, guest }),
        }
    }

    /// Name in messages, from the profile or the twin.
    #[must_use]
    pub(crate) fn device_name(&self) -> &str {
        &self.device.name
    }

    /// Lets the parts of all contracts leave this share of one server free.
    pub(crate) fn keep(&mut self, kept: f64) {
        self.kept = kept;
    }

    /// Service curve that is left for reservations.
    #[must_use]
    pub fn room(&self) -> EdfRoom {
        self.room
    }

    /// Share of the device that a reservation takes: contracts whose shares sum to 1 at most are
    /// admitted together. `None` for one that is refused even alone.
    ///
    /// With the room `A(t) = k t - L`, which is a line, admission asks that at each deadline t the
    /// demands `b_j + r_j (t - D_j)` of those with `D_j <= t` sum to `A(t)` at most, and the rates
    /// to k. Take `w_j = max(b_j / A(D_j), r_j / k)`. Then
    ///
    /// ```text
    /// b_j + r_j (t - D_j)  <=  w_j A(D_j) + w_j k (t - D_j)  =  w_j A(t),
    /// ```
    ///
    /// so the demands sum to no more than `A(t)` times the sum of the shares. No smaller number has
    /// that property for every set: at `t = D_j` and for t without end, w_j is what the reservation
    /// takes of the room.
    ///
    /// Admission also asks that the rates and the largest spare s sum to k at most
    /// ([`Reserve::spare`]). With S free of all rates, `r_j / k` above is
    /// `(r_j + max(s_j - S, 0)) / (k - S)`, which is no less: where these sum to 1, the rates and
    /// `s_j - S` of any one sum to `k - S`.
    #[must_use]
    pub fn part(&self, r: &Reserve) -> Option<f64> {
        part_of(self.room, self.kept, std::slice::from_ref(r))
    }

    /// The scheduler's own admission of these reservations together, and whether tasks that make
    /// one request at a time keep their rates.
    ///
    /// # Errors
    /// The first that is refused, by its position.
    pub fn admit(&self, all: &[Reserve]) -> Result<(), Refusal> {
        let flow = |(vm, r): (usize, &Reserve)| Flow {
            vm,
            rate: r.share.0,
            burst: r.burst.0 as f64,
            piece: self.piece,
            outstanding: None,
            deadline: Some(r.deadline),
            weight: 100,
        };
        let flows: Vec<Flow> = all.iter().enumerate().map(flow).collect();
        bound::admit(&self.bound, &flows)?;
        let reserved: f64 = all.iter().map(|r| r.share.0).sum();
        let missed = all.iter().position(|r| reserved + r.spare.0 > self.room.speed && r.spare.0 > 0.0);
        missed.map_or(Ok(()), |vm| {
            let needed = 100.0 * (reserved + all[vm].spare.0);
            Err(Refusal::OneAtATime { vm, needed, available: 100.0 * self.room.speed })
        })
    }
}

/// Share of a room that the reservations of one VM take together: the least w with which their
/// demand stays within `w A(t)` for every t. The demand is linear between two deadlines, so w is
/// the largest ratio of demand to room at any deadline, or of the rates. For one reservation see
/// [`DiskCapacity::part`], also for `kept`.
pub(crate) fn part_of(room: EdfRoom, kept: f64, all: &[Reserve]) -> Option<f64> {
    let demand = |t: Nanos| -> f64 {
        let earlier = all.iter().filter(|r| r.deadline <= t);
        earlier.map(|r| r.burst.0 as f64 + r.share.0 * (t.0 - r.deadline.0) as f64).sum()
    };
    let spare = all.iter().map(|r| r.spare.0).fold(0.0, f64::max);
    let rate = all.iter().map(|r| r.share.0).sum::<f64>();
    let mut part = (rate + (spare - kept).max(0.0)) / (room.speed - kept);
    for r in all {
        let at = room.at(r.deadline.0 as f64);
        if at <= 0.0 {
            return None;
        }
        part = part.max(demand(r.deadline) / at);
    }
    (part.is_finite() && part <= 1.0).then_some(part)
}
