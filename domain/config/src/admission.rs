//! Admission of a device's reservations, and latency bounds of its disks.

use rtvirtio_sched::bound::{self, Deallocations, Flow};
use rtvirtio_sched::{Config, Policy};
use rtvirtio_units::Nanos;

use crate::error::FileError;
use crate::id::DiskId;
use crate::schema::Device;

impl Device {
    /// The demand of its VMs. A guest may exceed its reservations, so each VM has a flow without a
    /// deadline too.
    fn demand(&self, sched: &Config) -> Vec<Flow> {
        let piece = |quantum: u64| sched.cost.max_transfer(quantum) as f64;
        let mut flows = Vec::new();
        for (vm, config) in sched.vms.iter().enumerate() {
            let free = Flow {
                vm,
                rate: 0.0,
                burst: 0.0,
                piece: piece(sched.quantum),
                outstanding: None,
                deadline: None,
                weight: config.weight,
            };
            flows.push(free);
            let promised = [(config.urgent, sched.max_piece(config)), (config.normal, sched.quantum)];
            flows.extend(promised.into_iter().filter_map(|(r, quantum)| r.map(|r| (r, quantum))).map(
                |(r, quantum)| Flow {
                    rate: r.rate as f64 / 1e9,
                    burst: r.burst as f64,
                    deadline: Some(r.deadline),
                    piece: piece(quantum),
                    ..free
                },
            ));
        }
        flows
    }

    /// An adaptive window may be as small as its least, and then fewer pieces are served at once.
    fn bound_device(&self, sched: &Config, latency: Nanos) -> bound::Device {
        let window = sched.window.most.max(sched.window.start);
        // Read-only disks offer no discards.
        let discards = self.disks.iter().any(|disk| disk.discard && !disk.read_only);
        let deallocations = Deallocations {
            piece: Nanos(sched.cost.discard_ns),
            share: f64::from(sched.discard_share) / 100.0,
        };
        let deallocations = if discards { deallocations } else { Deallocations::default() };
        let parallel = self.parallel.min(sched.window.least);
        bound::Device { parallel, window, latency, stretch: 1.0, deallocations }
    }

    /// Admission: whether the scheduler keeps every reservation's deadline in the worst case.
    pub(crate) fn admit(&self) -> Result<(), FileError> {
        let sched = self.sched();
        if sched.policy != Policy::Edf {
            return Ok(());
        }
        bound::admit(&self.bound_device(&sched, self.stall), &self.demand(&sched)).map_err(|source| {
            let message = self.with_disk_names(&source.to_string());
            FileError::Refused { device: self.name.clone(), message, source }
        })
    }

    /// Worst-case latency of requests of this disk within its reservation, on a device with stalls
    /// of `latency` at most. `None` without a reservation or a bound: only [`Policy::Edf`] serves
    /// requests within reservations before those beyond.
    #[must_use]
    pub fn bound(&self, disk: DiskId, latency: Nanos) -> Option<Nanos> {
        let sched = self.sched();
        if sched.policy != Policy::Edf {
            return None;
        }
        let flows = self.demand(&sched);
        let flow = flows.iter().rposition(|f| f.vm == disk.0 && f.deadline.is_some())?;
        bound::bounds(sched.policy, &self.bound_device(&sched, latency), &flows)[flow]
    }
}
