//! VMs that come and go while others run.
//!
//! A VM keeps its index for life, because tokens of requests at the device contain it. A VM that
//! leaves makes its place vacant for a later one.

use oxc_index::Idx;

use super::Scheduler;
use super::vm::Vm;
use crate::config::{Config, ConfigError, Policy};
use crate::id::VmId;
use crate::split::Splitter;

/// A VM's state, allocated before it is added: the thread that schedules allocates nothing large.
#[derive(Debug)]
pub struct PreparedVm(Vm);

/// Errors of adding or removing a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The place has a VM, or there is a gap before it.
    #[error("place {0} is not free")]
    Taken(VmId),
    /// The place has no VM.
    #[error("no VM {0}")]
    Vacant(VmId),
    /// The VM has requests outstanding.
    #[error("VM {0} has requests outstanding")]
    Busy(VmId),
}

impl Scheduler {
    /// Allocates the state of a VM of a configuration.
    ///
    /// # Errors
    /// An invalid configuration, or one without this VM.
    pub fn prepare(config: &Config, vm: VmId) -> Result<PreparedVm, MembershipError> {
        config.check()?;
        let splitter = Splitter { cost: config.cost, quantum: config.quantum };
        let vm = config.vms.get(vm.index()).ok_or(MembershipError::Vacant(vm))?;
        Ok(PreparedVm(Vm::new(vm, &splitter)))
    }

    /// Adds a VM in a vacant place, or behind the last one. Others keep their requests, buckets and
    /// turns; under [`Policy::Drr`] turns get longer where the new weight is the least of all.
    ///
    /// # Errors
    /// [`MembershipError::Taken`]; nothing is changed then.
    pub fn attach(&mut self, vm: VmId, prepared: PreparedVm) -> Result<(), MembershipError> {
        let next = self.vms.next_idx();
        match self.vms.get_mut(vm) {
            Some(place) if place.is_vacant => *place = prepared.0,
            None if vm == next => {
                self.vms.push(prepared.0);
            }
            _ => return Err(MembershipError::Taken(vm)),
        }
        self.active.reserve(self.vms.len());
        self.findings.reserve(self.vms.len());
        if let Some(waiting) = &mut self.waiting {
            waiting.attach(vm);
        }
        self.pacer.replace(vm);
        self.drr.replace(vm);
        self.update_weights();
        Ok(())
    }

    /// Removes a VM without outstanding requests. Its state is returned, so that another thread
    /// frees it.
    ///
    /// # Errors
    /// [`MembershipError::Busy`] or [`MembershipError::Vacant`]; nothing is changed then.
    pub fn detach(&mut self, vm: VmId) -> Result<PreparedVm, MembershipError> {
        let place = self.vms.get_mut(vm).filter(|place| !place.is_vacant);
        let place = place.ok_or(MembershipError::Vacant(vm))?;
        if place.queue.outstanding() > 0 {
            return Err(MembershipError::Busy(vm));
        }
        let left = std::mem::replace(place, Vm::vacant(&self.splitter));
        self.update_weights();
        Ok(PreparedVm(left))
    }

    /// Number of places, vacant ones included.
    #[must_use]
    pub fn places(&self) -> usize {
        self.vms.len()
    }

    pub(super) fn update_weights(&mut self) {
        if self.policy != Policy::RoundRobin {
            let weights: Vec<u32> = self.vms.iter().map(|v| v.weight).collect();
            self.drr.set_weights(&weights, self.splitter.max_piece_ns());
        }
    }
}
