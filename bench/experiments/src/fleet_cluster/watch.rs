//! CPU time of a guest before its contract is in force.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rtvirtio_testbed::cluster::{Cluster, domain_group};

/// Interval of checks of the cgroups.
const EVERY: Duration = Duration::from_millis(2);

/// Watches the cgroups that libvirt makes for a domain on these nodes.
pub(super) struct Watch {
    end: Arc<AtomicBool>,
    thread: JoinHandle<Option<f64>>,
}

impl Watch {
    pub(super) fn start(cluster: &Cluster, nodes: &[usize], vm: &str) -> Self {
        let groups: Vec<(PathBuf, PathBuf)> =
            nodes.iter().map(|n| (cluster.group(*n, "cpu"), cluster.group(*n, "cpuacct"))).collect();
        let (end, vm) = (Arc::new(AtomicBool::new(false)), vm.to_owned());
        let ended = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                for (cpu, cpuacct) in &groups {
                    let Some(domain) = domain_group(cpu, &vm) else { continue };
                    if number(&domain.join("cpu.rt_runtime_us")).is_some_and(|us| us > 0) {
                        // The vCPU's thread stays in libvirt's group of this controller.
                        let used = number(&domain_group(cpuacct, &vm)?.join("vcpu0/cpuacct.usage"))?;
                        return Some(used as f64 / 1e6);
                    }
                }
                std::thread::sleep(EVERY);
            }
            None
        });
        Self { end, thread }
    }

    /// CPU time of the guest's vCPU when the contract was first seen in force, ms.
    pub(super) fn before_contract_ms(self) -> Option<f64> {
        self.end.store(true, Ordering::Relaxed);
        self.thread.join().ok().flatten()
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
