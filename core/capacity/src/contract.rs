//! What one VM is promised, wherever it runs.

use rtvirtio_spec::{CpuNeed, Direction, HostSpec, Vm};
use rtvirtio_units::Ratio;
use serde::Serialize;

use crate::network::OnNetwork;

/// The contract of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Contract {
    /// Name in the spec.
    pub vm: String,
    /// Tasks by disk, for each device of the spec that has this VM.
    pub disks: Vec<OnDisk>,
    /// Flows by network, for each on which the VM sends one with a target.
    pub networks: Vec<OnNetwork>,
    /// Names of received flows with a target: no admission covers what a link delivers.
    pub received: Vec<String>,
    /// CPU budget over its period, of each CPU; `None` without a CPU contract.
    pub cpu: Option<Ratio>,
}

/// The part of a contract on one disk.
#[derive(Clone, Debug, PartialEq)]
pub struct OnDisk {
    /// The device's name in the spec; `None` for the only one.
    pub device: Option<String>,
    /// The VM with its tasks on this disk only.
    pub vm: Vm,
}

/// A task or flow whose target no admission covers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unpromised {
    pub vm: String,
    /// Name of the task or flow.
    pub task: String,
}

impl Contract {
    /// The contracts of all VMs of a spec. `budget` finds the share of each CPU for a VM that
    /// declares requests and a deadline instead of a budget, which takes a CPU profile.
    pub fn all_of<E>(
        host: &HostSpec,
        mut budget: impl FnMut(&Vm) -> Result<Ratio, E>,
    ) -> Result<Vec<Self>, E> {
        let on_disks = |name: &str| {
            let parts = host.parts().iter();
            let here = parts.filter_map(|p| Some((p.name.clone(), p.spec.vm(name)?.clone())));
            here.map(|(device, vm)| OnDisk { device, vm }).collect()
        };
        host.vms()
            .iter()
            .map(|vm| {
                let cpu = match vm.cpu.need {
                    None => None,
                    Some(CpuNeed::Contract { budget, period }) => {
                        Some(Ratio(budget.0 as f64 / period.0.max(1) as f64))
                    }
                    Some(CpuNeed::Demand { .. }) => Some(budget(vm)?),
                };
                let received = vm.flows.iter().filter(|f| f.direction == Direction::Rx && f.target.is_some());
                Ok(Self {
                    vm: vm.name.clone(),
                    disks: on_disks(&vm.name),
                    networks: on_networks(host, vm),
                    received: received.map(|f| f.name.clone()).collect(),
                    cpu,
                })
            })
            .collect()
    }

    /// Tasks and flows whose targets are not covered: no schedule bounds a flush, which takes as
    /// long as the drive needs for what all VMs have in its cache, and no reservation covers the
    /// frames that a link delivers.
    #[must_use]
    pub fn unpromised(&self) -> Vec<Unpromised> {
        let tasks = self.disks.iter().flat_map(|d| &d.vm.tasks);
        let synced = tasks.filter(|t| t.sync.is_some() && !t.targets.is_empty()).map(|t| &t.name);
        let of = |name: &String| Unpromised { vm: self.vm.clone(), task: name.clone() };
        synced.chain(&self.received).map(of).collect()
    }
}

fn on_networks(host: &HostSpec, vm: &Vm) -> Vec<OnNetwork> {
    let on = |(i, nic): (usize, &rtvirtio_spec::Nic)| {
        let network = host.networks().get(nic.network)?;
        let flows = vm.flows.iter().filter(|f| f.nic == i).cloned().collect();
        OnNetwork::from_flows(network.name.clone(), flows, vm.traffic)
    };
    vm.nics.iter().enumerate().filter_map(on).collect()
}
