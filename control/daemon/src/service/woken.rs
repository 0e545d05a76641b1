//! Access of the event thread to the service.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Duration;

use rtvirtio_spec::{HostHandle, Reach};

use super::ServiceOptions;
use crate::events::{self, Ask, Running, Sources, Woken};
use crate::lock::lock;
use crate::shared::{Command, Shared};

/// Starts the thread that wakes the loop upon events; `None` where the kernel gives no
/// notifications.
pub(super) fn start(options: &ServiceOptions, shared: Arc<Shared>) -> Option<Sender<()>> {
    let sources = Sources {
        contracts: options.places.contracts.clone(),
        specs: [options.places.specs.as_slice(), &options.config.specs].concat(),
        scan: Duration::from_nanos(options.config.scan.0),
        libvirt: options.config.libvirt.clone(),
    };
    events::start(sources, Service(shared)).ok()
}

/// Shared state, as the event thread uses it.
struct Service(Arc<Shared>);

impl Woken for Service {
    fn running(&self) -> Running {
        let mut running = Running::default();
        for vm in lock(&self.0.running).iter() {
            running.vms.push(vm.processes.clone());
            if let Reach::Existing { host: HostHandle::Domain(domain), .. } = &vm.contract.vm.reach {
                running.libvirt.insert(domain.uri().to_owned());
            }
        }
        running
    }

    fn ask(&self, ask: Ask) {
        let counters = &self.0.counters;
        counters.wakes.fetch_add(1, Ordering::Relaxed);
        let command = match ask {
            Ask::ScanDepth => Command::Wake,
            Ask::Compare { contracts } => {
                counters.report_compares.fetch_add(1, Ordering::Relaxed);
                Command::Reported { contracts }
            }
        };
        // The loop may have ended: then nothing waits for it.
        let _ = self.0.send(command);
    }

    fn reported(&self, events: u64) {
        self.0.counters.reports.fetch_add(events, Ordering::Relaxed);
    }

    fn heard(&self, reporters: usize, problems: Vec<String>) {
        self.0.counters.reporters.store(reporters as u64, Ordering::Relaxed);
        *lock(&self.0.unheard) = problems;
    }
}
