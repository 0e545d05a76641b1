//! Whether a VM runs on two nodes at once.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_testbed::cluster::{ContractCluster, runs_in};

/// Interval of checks of the nodes' processes.
const EVERY: Duration = Duration::from_millis(10);

/// Observations of an [`Overlap`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OverlapCounts {
    /// VMs seen running on two nodes, over all checks.
    pub(super) on_two_nodes: usize,
    /// Time at which the VM of the lost node was first seen on another.
    pub(super) elsewhere: Option<Instant>,
}

/// Polls the processes of all nodes.
pub(super) struct Overlap {
    end: Arc<AtomicBool>,
    thread: JoinHandle<OverlapCounts>,
}

impl Overlap {
    /// `lost` is the node that is about to be lost, with the first of these VMs.
    pub(super) fn start(
        site: &ContractCluster,
        nodes: usize,
        lost: usize,
        vms: &'static [&'static str],
    ) -> Self {
        let groups: Vec<PathBuf> = (0..nodes).map(|n| site.cluster.group(n, "cpu")).collect();
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let thread = std::thread::spawn(move || {
            let mut seen = OverlapCounts::default();
            while !ended.load(Ordering::Relaxed) {
                for (i, vm) in vms.iter().enumerate() {
                    let on: Vec<usize> = (0..nodes).filter(|n| runs_in(&groups[*n], vm)).collect();
                    seen.on_two_nodes += usize::from(on.len() > 1);
                    if i == 0 && on.iter().any(|n| *n != lost) {
                        seen.elsewhere.get_or_insert_with(Instant::now);
                    }
                }
                std::thread::sleep(EVERY);
            }
            seen
        });
        Self { end, thread }
    }

    pub(super) fn seen(self) -> OverlapCounts {
        self.end.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}
