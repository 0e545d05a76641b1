//! One device under one shape: admission of reservations and the share of the device each takes.

use rtvirtio_sched::bound::{self, EdfRoom, Flow, Refusal};
use rtvirtio_spec::Vm;
use rtvirtio_units::Nanos;

use crate::{DeviceModel, Options, Reserve, Shape, missed_turn, reserve, tightest};

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
    /// A device with this shape.
    #[must_use]
    pub fn new(device: &DeviceModel, options: &Options, shape: Shape) -> Self {
        let device = shape.device(device);
        let bound = device.with_window(shape.window);
        let piece = device.max_piece_cost(shape.quantum);
        Self { shape, room: bound.edf_room(piece), bound, piece, device, options: options.clone() }
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
    #[must_use]
    pub fn part(&self, r: &Reserve) -> Option<f64> {
        part_of(self.room, std::slice::from_ref(r))
    }

    /// Tasks of these VMs, as `VM/TASK`, that make one request at a time and miss their rates in
    /// the worst case where the VMs have all their reservations.
    pub(crate) fn missed_rates(&self, vms: &[&Vm]) -> Vec<String> {
        let reserves = vms.iter().filter_map(|vm| self.reserve(vm).ok().flatten());
        let reserved: f64 = reserves.map(|r| r.share.0).sum();
        let missed = |vm: &Vm| -> Vec<String> {
            let tasks = vm.tasks.iter();
            let tasks = tasks.filter(|t| missed_turn(t, &self.device, self.shape, reserved).is_some());
            tasks.map(|task| format!("{}/{}", vm.name, task.name)).collect()
        };
        vms.iter().flat_map(|vm| missed(vm)).collect()
    }

    /// The scheduler's own admission of these reservations together.
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
        bound::admit(&self.bound, &flows)
    }
}

/// Share of a room that the reservations of one VM take together: the least w with which their
/// demand stays within `w A(t)` for every t. The demand is linear between two deadlines, so w is
/// the largest ratio of demand to room at any deadline, or of the rates. For one reservation see
/// [`DiskCapacity::part`].
pub(crate) fn part_of(room: EdfRoom, all: &[Reserve]) -> Option<f64> {
    let demand = |t: Nanos| -> f64 {
        let earlier = all.iter().filter(|r| r.deadline <= t);
        earlier.map(|r| r.burst.0 as f64 + r.share.0 * (t.0 - r.deadline.0) as f64).sum()
    };
    let mut part = all.iter().map(|r| r.share.0).sum::<f64>() / room.speed;
    for r in all {
        let at = room.at(r.deadline.0 as f64);
        if at <= 0.0 {
            return None;
        }
        part = part.max(demand(r.deadline) / at);
    }
    (part.is_finite() && part <= 1.0).then_some(part)
}
