//! Worst-case latency of a request, computed before anything runs, and admission: which
//! reservations must be refused.
//!
//! Network calculus (Le Boudec and Thiran, *Network Calculus*, 2001) in units of device time. Flow
//! i demands at most `b_i + r_i t` in any interval t. The device, while backlogged, serves at least
//! `k (t - T)` in any interval: k pieces at once ([`Device::parallel`], no more than the window),
//! after a latency T for its stalls, its wake-ups and everything between guest and device. Where
//! VMs may discard, [`Deallocations`] reduce this to `k (t (1 - s) - T - C)`. Two terms come from
//! sharing:
//!
//! - *blocking* `B = W C`: the pieces in the window that were submitted earlier and cannot be
//!   recalled, each of at most C;
//! - of k servers, the last piece starts when the work ahead of it is done and then takes its own
//!   time c: `work / k + c (1 - 1/k)`.
//!
//! The bound for flow i:
//!
//! - `fifo`: `T + ((k - 1) C + sum_j a_j) / k + c`, with `a_j` the burst, or what may be
//!   outstanding if that is less. With fewer than k pieces at the device it is slower than k, and
//!   bursts may be replenished meanwhile: up to k - 1 pieces count beside them.
//! - `round-robin`: each own piece waits for one piece of each VM:
//!   `T + (B + m_i sum_j C_j) / k + c`, with `m_i` own pieces in the burst.
//! - `drr`: a latency-rate server with share `q_i / F` and the latency of Lenzini, Mingozzi and
//!   Stea (IEEE/ACM ToN 12(4), 2004): `((F - q_i)(1 + C_i/q_i) + sum_j C_j) / k`.
//! - `edf`: demand bound with blocking. All deadlines are met if at every deadline t
//!   `T + (B + sum_j dbf_j(t)) / k + c <= t`, with `dbf_j(t) = b_j + r_j (t - D_j)` from `D_j` on
//!   (Baruah, Mok and Rosier, RTSS 1990, for bursts as in Liebeherr, Wrege and Ferrari, IEEE/ACM
//!   ToN 4(6), 1996).
//!
//! Under `edf` a request whose deadline is t after the start of the busy period completes by
//! `T + (B + sum_j dbf_j(t)) / k + c`, so it takes no longer than `D_i - min over t of (t - that)`,
//! over the deadlines t not before `D_i`: the sum of rates is at most k, so between two deadlines
//! the slack only grows. Flows without a reservation share the rest by weight.
//!
//! The bounds hold for requests of one priority level in a flow (a level is served before the
//! next), on devices that serve their queue in order of arrival, or reorder it by a bounded amount,
//! and as long as the device is no slower than [`Device`] declares. Those of a round robin take
//! every VM of the scheduler to have a flow, the largest piece of all flows to be as large as the
//! quantum allows, and no lower limit on pieces without a deadline; `round-robin` by pieces also
//! takes those of a flow to be of one size. Those of flows without a reservation, under any policy,
//! do not cover discards of the flow's own VM, which are paced only for the sake of other VMs and
//! of reservations.

use rtvirtio_units::Nanos;

use crate::config::Policy;

/// Service that a device guarantees.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// k: pieces served at once.
    pub parallel: u32,
    /// W: pieces in the window.
    pub window: u32,
    /// T: longest time without progress, including everything between guest and device.
    pub latency: Nanos,
    /// Longest service time over the charged cost, at least 1.
    pub stretch: f64,
    /// Discards and zeroing of all VMs.
    pub deallocations: Deallocations,
}

/// Upper bound on the device time of discards and zeroing: `piece + share t` in any interval t,
/// during which the device serves nothing else (see the scheduler's pacing). The default is a
/// device without them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Deallocations {
    /// Longest time of one piece.
    pub piece: Nanos,
    /// Share of the time, 0 to 1.
    pub share: f64,
}

/// Upper bound on the demand of one flow, in ns of device time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Flow {
    /// Index of the VM: flows of one VM share its turn.
    pub vm: usize,
    /// r: device time per time; 1 is all of one server.
    pub rate: f64,
    /// b: burst of device time.
    pub burst: f64,
    /// c: device time of the largest piece.
    pub piece: f64,
    /// Device time that can be outstanding, for closed loops, which wait for completions.
    pub outstanding: Option<f64>,
    /// Deadline of the flow's reservation; `None` without one.
    pub deadline: Option<Nanos>,
    /// Weight of the flow's VM.
    pub weight: u32,
}

impl Flow {
    /// Work of this flow ahead of a request that arrives now, including that request.
    ///
    /// This is the flow's burst as long as the total demand `fits` the server; otherwise a closed
    /// loop falls behind by everything that it may have outstanding.
    fn backlog_ahead(&self, fits: bool) -> f64 {
        match self.outstanding {
            Some(outstanding) if !fits => outstanding,
            Some(outstanding) => self.burst.min(outstanding),
            None => self.burst,
        }
        .max(self.piece)
    }
}

/// A reservation that is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// More is reserved than the device can serve.
    #[error(
        "{reserved:.1} % of the device are reserved, and it can give {available:.1} %; lower rates, or serve fewer VMs"
    )]
    Rate {
        /// Sum of the rates, in percent of one server.
        reserved: f64,
        /// Percent of one server that the device can serve.
        available: f64,
    },
    /// A deadline that cannot be met in the worst case.
    #[error(
        "VM {vm} cannot be promised {deadline}: {needed} may pass in the worst case, {blocking} of it behind pieces that the device holds already and {latency} for its own stalls{}; \
         allow more, reserve less, or lower the window or the quantum", discard_clause(*.discard)
    )]
    Deadline {
        /// Index of the VM.
        vm: usize,
        /// Declared deadline of the reservation.
        deadline: Nanos,
        /// The smallest deadline that would be admitted.
        needed: Nanos,
        /// `B / k`, a part of it.
        blocking: Nanos,
        /// T, a part of it.
        latency: Nanos,
        /// Time of a piece of a discard or zeroing, a part of it; 0 where no VM may discard.
        discard: Nanos,
    },
    /// A closed loop of one request at a time that would miss its rate behind a full window.
    #[error(
        "a task of VM {vm} makes one request at a time, and each may wait for a full window: beside all reservations that takes {needed:.1} % of the device, and it can give \
         {available:.1} %; lower its rate, or let its requests overlap"
    )]
    OneAtATime {
        /// Index of the VM.
        vm: usize,
        /// Reservations and what the loop needs free, in percent of one server.
        needed: f64,
        /// Percent of one server that the device can serve.
        available: f64,
    },
}

/// The clause of a refusal about the time behind a discard; empty without discards.
#[must_use]
pub fn discard_clause(piece: Nanos) -> String {
    if piece == Nanos(0) { String::new() } else { format!(", {piece} behind a discard") }
}

/// Worst-case latency of each flow's requests, from arrival to completion; `None` where there is no
/// bound.
#[must_use]
pub fn bounds(policy: Policy, device: &Device, flows: &[Flow]) -> Vec<Option<Nanos>> {
    match policy {
        Policy::Fifo => fifo(device, flows),
        Policy::RoundRobin => round_robin(device, flows),
        Policy::Drr => drr(device, flows, &ResidualService::whole_device(device, flows)),
        Policy::Edf => edf(device, flows),
    }
}

/// Admission: whether every reservation's deadline is met in the worst case.
///
/// # Errors
/// The first reservation that is refused, with the numbers.
pub fn admit(device: &Device, flows: &[Flow]) -> Result<(), Refusal> {
    let reserved: f64 = flows.iter().filter(|f| f.deadline.is_some()).map(|f| f.rate).sum();
    if reserved > device.speed() {
        return Err(Refusal::Rate { reserved: 100.0 * reserved, available: 100.0 * device.speed() });
    }
    for (flow, bound) in flows.iter().zip(edf(device, flows)) {
        let (Some(deadline), Some(needed)) = (flow.deadline, bound) else { continue };
        if needed > deadline {
            return Err(Refusal::Deadline {
                vm: flow.vm,
                deadline,
                needed,
                blocking: ns(device.blocking(flows) / device.speed()),
                latency: device.latency,
                discard: device.deallocations.piece,
            });
        }
    }
    Ok(())
}

/// Work that reservations may demand under `edf` by a time t after the start of a busy period:
/// `k (t - T - c (1 - 1/k)) - W C`, where every piece takes C at most. Reservations are admitted
/// exactly if their demand stays within it at each of their deadlines, and the sum of their rates
/// within `k`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EdfRoom {
    /// k: device time served per time.
    pub speed: f64,
    /// Loss by latency, blocking and the last piece, in ns of device time.
    pub lost: f64,
}

impl EdfRoom {
    /// Room at a time in ns; negative where nothing can be promised so early.
    #[must_use]
    pub fn at(self, t: f64) -> f64 {
        self.speed * t - self.lost
    }
}

fn ns(v: f64) -> Nanos {
    Nanos(v.max(0.0).ceil() as u64)
}

impl Device {
    /// The room for reservations while the largest piece of any VM takes `piece` ns.
    #[must_use]
    pub fn edf_room(&self, piece: f64) -> EdfRoom {
        let blocking = f64::from(self.window.max(1)) * piece;
        let speed = self.speed();
        EdfRoom { speed, lost: blocking + speed * (self.latency() + self.last_piece(piece)) }
    }

    fn servers(&self) -> f64 {
        f64::from(self.parallel.min(self.window).max(1))
    }

    /// Charged device time served per time.
    fn speed(&self) -> f64 {
        self.servers() * self.transfer_share() / self.stretch.max(1.0)
    }

    /// Share of the time left for transfers.
    fn transfer_share(&self) -> f64 {
        (1.0 - self.deallocations.share).clamp(0.01, 1.0)
    }

    /// T and one piece of a deallocation, in ns. The remaining service is `k (t (1 - s) - T - C)`,
    /// which starts at `(T + C) / (1 - s)`.
    fn latency(&self) -> f64 {
        (self.latency.0 as f64 + self.deallocations.piece.0 as f64) / self.transfer_share()
    }

    /// Work in the window that cannot be recalled, in charged time.
    fn blocking(&self, flows: &[Flow]) -> f64 {
        f64::from(self.window.max(1)) * largest_piece(flows)
    }

    /// Time of the last piece beyond its share of the servers.
    fn last_piece(&self, piece: f64) -> f64 {
        piece * self.stretch.max(1.0) * (1.0 - 1.0 / self.servers())
    }
}

fn largest_piece(flows: &[Flow]) -> f64 {
    flows.iter().map(|f| f.piece).fold(0.0, f64::max)
}

fn fifo(device: &Device, flows: &[Flow]) -> Vec<Option<Nanos>> {
    let rate: f64 = flows.iter().filter(|f| f.outstanding.is_none()).map(|f| f.rate).sum();
    let fits = flows.iter().map(|f| f.rate).sum::<f64>() <= device.speed();
    let at_device = (device.servers() - 1.0) * largest_piece(flows);
    let ahead = at_device + flows.iter().map(|f| f.backlog_ahead(fits)).sum::<f64>();
    let bound = |f: &Flow| {
        let t = device.latency() + ahead / device.speed() + device.last_piece(f.piece);
        (rate <= device.speed() && t.is_finite()).then(|| ns(t))
    };
    flows.iter().map(bound).collect()
}

/// Largest piece and weight of each VM.
fn largest_pieces(flows: &[Flow]) -> Vec<(usize, f64, u32)> {
    let mut vms: Vec<(usize, f64, u32)> = Vec::new();
    for f in flows {
        match vms.iter_mut().find(|(vm, ..)| *vm == f.vm) {
            Some((_, piece, _)) => *piece = piece.max(f.piece),
            None => vms.push((f.vm, f.piece, f.weight.max(1))),
        }
    }
    vms
}

/// Rate and backlog of one VM's flows, on a server of this speed.
fn vm_demand(flows: &[Flow], vm: usize, speed: f64) -> (f64, f64) {
    let own = || flows.iter().filter(|f| f.vm == vm);
    let fits = own().map(|f| f.rate).sum::<f64>() <= speed;
    own().fold((0.0, 0.0), |(rate, ahead), f| {
        (rate + if f.outstanding.is_none() { f.rate } else { 0.0 }, ahead + f.backlog_ahead(fits))
    })
}

fn round_robin(device: &Device, flows: &[Flow]) -> Vec<Option<Nanos>> {
    let vms = largest_pieces(flows);
    let round: f64 = vms.iter().map(|(_, piece, _)| piece).sum();
    let bound = |f: &Flow| {
        let least = flows.iter().filter(|g| g.vm == f.vm).map(|g| g.piece).fold(f64::INFINITY, f64::min);
        // Service of the VM's own pieces when each VM gets one piece in every round.
        let (rate, ahead) = vm_demand(flows, f.vm, least / round * device.speed());
        // Round robin shares pieces, not time: a small piece counts as a whole turn.
        let pieces = (ahead / least).ceil();
        let sustained = rate / least * round <= device.speed();
        let t = device.latency()
            + (device.blocking(flows) + pieces * round) / device.speed()
            + device.last_piece(f.piece);
        (sustained && t.is_finite()).then(|| ns(t))
    };
    flows.iter().map(bound).collect()
}

/// The residual service of the round robin: its speed, and the work ahead of it.
struct ResidualService {
    speed: f64,
    ahead: f64,
}

impl ResidualService {
    fn whole_device(device: &Device, flows: &[Flow]) -> Self {
        Self { speed: device.speed(), ahead: device.blocking(flows) }
    }
}

fn drr(device: &Device, flows: &[Flow], residual: &ResidualService) -> Vec<Option<Nanos>> {
    let vms = largest_pieces(flows);
    let most = vms.iter().map(|v| v.1).fold(0.0, f64::max);
    let lightest = vms.iter().map(|v| v.2).min().unwrap_or(1);
    let quantum = |weight: u32| most * f64::from(weight) / f64::from(lightest);
    let frame: f64 = vms.iter().map(|v| quantum(v.2)).sum();
    let largest: f64 = vms.iter().map(|v| v.1).sum();
    let bound = |f: &Flow| {
        let &(vm, piece, weight) = vms.iter().find(|v| v.0 == f.vm)?;
        let q = quantum(weight);
        let share = q / frame * residual.speed;
        let (rate, ahead) = vm_demand(flows, vm, share);
        let latency = ((frame - q) * (1.0 + piece / q) + largest) / residual.speed;
        let t = device.latency() * device.speed() / residual.speed
            + residual.ahead / residual.speed
            + latency
            + ahead / share
            + device.last_piece(f.piece);
        (residual.speed > 0.0 && rate <= share && t.is_finite()).then(|| ns(t))
    };
    flows.iter().map(bound).collect()
}

fn edf(device: &Device, flows: &[Flow]) -> Vec<Option<Nanos>> {
    let promised: Vec<(&Flow, f64)> = flows.iter().filter_map(|f| Some((f, f.deadline?.0 as f64))).collect();
    let rate: f64 = promised.iter().map(|(f, _)| f.rate).sum();
    let burst: f64 = promised.iter().map(|(f, _)| f.burst).sum();
    let own = promised.iter().map(|(f, _)| device.last_piece(f.piece)).fold(0.0, f64::max);
    let blocking = device.blocking(flows);
    let slack = |t: f64| {
        let demand: f64 =
            promised.iter().filter(|(_, d)| *d <= t).map(|(f, d)| f.burst + f.rate * (t - d)).sum();
        t - (device.latency() + (blocking + demand) / device.speed() + own)
    };
    // The unreserved residual, for flows without a reservation or beyond theirs.
    let residual = ResidualService { speed: device.speed() - rate, ahead: blocking + burst };
    let shared: Vec<Flow> = flows.iter().filter(|f| f.deadline.is_none()).copied().collect();
    let mut shared = drr(device, &shared, &residual).into_iter();
    flows
        .iter()
        .map(|f| {
            let Some(deadline) = f.deadline else { return shared.next().flatten() };
            if rate > device.speed() {
                return None;
            }
            let deadline = deadline.0 as f64;
            let least = promised
                .iter()
                .filter(|(_, d)| *d >= deadline)
                .map(|(_, d)| slack(*d))
                .fold(f64::INFINITY, f64::min);
            Some(ns(deadline - least))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: f64 = 1_000.0;

    fn flow(vm: usize, rate: f64, burst: f64, deadline_us: Option<u64>) -> Flow {
        Flow {
            vm,
            rate,
            burst,
            piece: 100.0 * US,
            outstanding: None,
            deadline: deadline_us.map(Nanos::from_micros),
            weight: 100,
        }
    }

    const DISK: Device = Device {
        parallel: 1,
        window: 1,
        latency: Nanos(0),
        stretch: 1.0,
        deallocations: Deallocations { piece: Nanos(0), share: 0.0 },
    };

    #[test]
    fn by_hand_for_two_flows() {
        let flows = [flow(0, 0.3, 100.0 * US, Some(500)), flow(1, 0.3, 200.0 * US, Some(1_000))];
        // FIFO: both bursts. EDF: at 500 us the blocking piece and the own burst; at 1000 us also
        // 0.3 of the last 500 us and the burst of the other flow.
        assert_eq!(bounds(Policy::Fifo, &DISK, &flows), [Some(Nanos::from_micros(300)); 2]);
        assert_eq!(
            bounds(Policy::Edf, &DISK, &flows),
            [Some(Nanos::from_micros(200)), Some(Nanos::from_micros(550))]
        );
        assert_eq!(admit(&DISK, &flows), Ok(()));
        // Round robin: the blocking piece, then one piece of each VM for each own piece.
        assert_eq!(
            bounds(Policy::RoundRobin, &DISK, &flows),
            [Some(Nanos::from_micros(300)), Some(Nanos::from_micros(500))]
        );
    }

    /// A piece of a discard first, and then the discards' share of the time.
    #[test]
    fn discards_are_part_of_every_bound() {
        let deallocations = Deallocations { piece: Nanos::from_micros(90), share: 0.1 };
        let device = Device { deallocations, ..DISK };
        let flows = [flow(0, 0.3, 100.0 * US, Some(500))];
        // (90 + 100 + 100) / 0.9.
        let expected = Nanos(322_223);
        for policy in [Policy::Fifo, Policy::Edf] {
            let without = bounds(policy, &DISK, &flows)[0].unwrap();
            let with = bounds(policy, &device, &flows)[0].unwrap();
            assert!(with.0 >= without.0 * 10 / 9 + 100_000, "{with} {without}");
        }
        assert_eq!(bounds(Policy::Edf, &device, &flows), [Some(expected)]);
        let all = [flow(0, 0.95, 100.0 * US, Some(500_000))];
        assert_eq!(admit(&DISK, &all), Ok(()));
        assert!(matches!(admit(&device, &all), Err(Refusal::Rate { available, .. }) if available == 90.0));
    }

    #[test]
    fn a_flood_takes_every_bound_but_those_of_reservations() {
        let flood = Flow { rate: f64::INFINITY, burst: f64::INFINITY, ..flow(1, 0.0, 0.0, None) };
        let flows = [flow(0, 0.3, 100.0 * US, Some(500)), flood];
        assert_eq!(bounds(Policy::Fifo, &DISK, &flows), [None, None]);
        assert_eq!(bounds(Policy::Edf, &DISK, &flows), [Some(Nanos::from_micros(200)), None]);
        // Each of the two flows fits alone, but not both: the closed loop falls behind by all that
        // it may have outstanding.
        let wide = Flow { rate: 0.9, outstanding: Some(3_200.0 * US), ..flow(1, 0.9, 100.0 * US, None) };
        assert_eq!(bounds(Policy::Fifo, &DISK, &[flows[0], wide])[0], Some(Nanos::from_micros(3_300)));
        // A closed loop of depth 32 has at most these 32 requests ahead.
        let closed_loop = Flow { outstanding: Some(3_200.0 * US), ..flood };
        assert_eq!(
            bounds(Policy::Fifo, &DISK, &[flows[0], closed_loop]),
            [Some(Nanos::from_micros(3_300)); 2]
        );
        assert!(bounds(Policy::Edf, &DISK, &[flows[0], closed_loop])[1].is_some());
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_the_number() {
        let flows = [flow(0, 0.3, 100.0 * US, Some(150)), flow(1, 0.3, 100.0 * US, None)];
        let refusal = admit(&DISK, &flows).unwrap_err();
        assert!(
            matches!(refusal, Refusal::Deadline { vm: 0, needed, .. } if needed == Nanos::from_micros(200)),
            "{refusal}"
        );
        assert!(refusal.to_string().contains("VM 0 cannot be promised 150us: 200us may pass"), "{refusal}");
        let flows = [flow(0, 0.7, 100.0 * US, Some(5_000)), flow(1, 0.4, 100.0 * US, Some(5_000))];
        assert!(matches!(admit(&DISK, &flows), Err(Refusal::Rate { .. })));
        let two = Device { parallel: 2, window: 2, ..DISK };
        assert_eq!(admit(&two, &flows), Ok(()));
    }

    #[test]
    fn a_slower_device_and_a_longer_latency_cost_what_they_are() {
        let flows = [flow(0, 0.3, 100.0 * US, Some(5_000))];
        let plain = bounds(Policy::Edf, &DISK, &flows)[0].unwrap();
        let late = Device { latency: Nanos::from_micros(70), ..DISK };
        assert_eq!(bounds(Policy::Edf, &late, &flows)[0].unwrap().0, plain.0 + 70_000);
        let slow = Device { stretch: 2.0, ..DISK };
        assert_eq!(bounds(Policy::Edf, &slow, &flows)[0].unwrap().0, 2 * plain.0);
    }
}
