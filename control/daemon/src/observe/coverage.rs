//! Whether the requests of running VMs reach their devices in their own cgroups, past the host's
//! page cache. Open files are scanned in the thread of [`super::uncovered`], because a file system
//! may not answer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use rtvirtio_kernel::{BlockDevice, ProcessId, Root};
use rtvirtio_workflow::uncovered::{Covered, Uncovered, UncoveredKind, scan};

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
            let found = scan(root, &of);
            Some((name, VmCoverage { processes: vm.processes.clone(), found }))
        };
        Self { until: Some(until), vms: vms.iter().filter_map(one).collect() }
    }

    /// Whether all requests of a VM for a disk, by the file that its monitor names, are counted at
    /// its device and in its cgroup; false where that is not known.
    pub fn covers(&self, vm: &RunningVm, file: Option<&str>, now: Instant) -> bool {
        let of = self.vms.get(&vm.contract.vm.name).filter(|of| of.processes == vm.processes);
        let is_this = |disk: &PathBuf| file.is_none_or(|file| disk.to_str() == Some(file));
        let counts = |one: &Uncovered| match one.kind {
            // Another disk may be elsewhere, such as one with settings for the guest's start.
            UncoveredKind::Elsewhere => one.disk.as_ref().is_some_and(|disk| !is_this(disk)),
            UncoveredKind::WriteBack
            | UncoveredKind::PageCache
            | UncoveredKind::OtherProcess
            | UncoveredKind::Unknown => false,
        };
        self.until.is_some_and(|until| now <= until) && of.is_some_and(|of| of.found.iter().all(counts))
    }
}
