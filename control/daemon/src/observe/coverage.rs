//! Whether the requests of running VMs reach their devices in their own cgroups, past the host's
//! page cache. Open files are scanned in the thread of [`super::uncovered`], because a file system
//! may not answer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rtvirtio_kernel::{BlockDevice, ProcessId, Root};
use rtvirtio_workflow::uncovered::{Covered, Uncovered, UncoveredKind, disks_on_device, scan};

use super::facts::only_device;
use crate::linux::RunningVm;

/// Result of the last scan.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Time up to which it counts; `None` before the first scan.
    until: Option<Instant>,
    vms: BTreeMap<String, VmCoverage>,
}

#[derive(Debug)]
struct VmCoverage {
    processes: Vec<ProcessId>,
    found: Vec<Uncovered>,
    /// Disks that it has open on its device.
    on_device: Vec<PathBuf>,
}

impl Coverage {
    /// Scans the disks of all VMs with one device.
    pub fn scan(vms: &[Arc<RunningVm>], root: &Root, until: Instant) -> Self {
        let one = |vm: &Arc<RunningVm>| {
            let device = BlockDevice::find(root, only_device(vm)?).ok()?;
            let pids: Vec<u32> = vm.processes.iter().map(|process| process.pid).collect();
            let name = vm.contract.vm.name.clone();
            let of = Covered {
                vm: &name,
                pids: &pids,
                devices: &[device.name],
                others: &[],
                charges_write_back: false,
            };
            let (found, on_device) = (scan(root, &of), disks_on_device(root, &of));
            Some((name, VmCoverage { processes: vm.processes.clone(), found, on_device }))
        };
        Self { until: Some(until), vms: vms.iter().filter_map(one).collect() }
    }

    /// Whether all requests of a VM for a disk, by the file that its monitor names, are counted at
    /// its device and in its cgroup; false where that is not known.
    pub fn covers(&self, vm: &RunningVm, file: Option<&str>, now: Instant) -> bool {
        let of = self.vms.get(&vm.contract.vm.name).filter(|of| of.processes == vm.processes);
        // A disk that is open nowhere, such as one over the network, is not on the device.
        let Some(of) = of.filter(|of| !of.on_device.is_empty()) else { return false };
        let is_here = file.is_some_and(|file| of.on_device.iter().any(|disk| disk.to_str() == Some(file)));
        let counts = |one: &Uncovered| match one.kind {
            // Another disk may be elsewhere, such as one with settings for the guest's start.
            UncoveredKind::Elsewhere => is_here,
            UncoveredKind::WriteBack
            | UncoveredKind::PageCache
            | UncoveredKind::OtherProcess
            | UncoveredKind::Unknown => false,
        };
        self.until.is_some_and(|until| now <= until) && of.found.iter().all(counts)
    }
}
