//! Looking for VMs in threads of their own: a monitor that does not answer holds only its own VM.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rtvirtio_kernel::ProcessId;
use rtvirtio_spec::Vm;
use rtvirtio_vmm::VmHandle;
use rtvirtio_workflow::{Dirs, Kind, find};

use super::Quiet;
use crate::observed::Presence;

/// Called when something was found, from any thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

type Found = Result<(VmHandle, Vec<ProcessId>), Presence>;

/// Lookups under way, at most one for each VM.
pub(super) struct Lookups {
    dirs: Dirs,
    waker: Waker,
    sender: Sender<(String, Found)>,
    results: Receiver<(String, Found)>,
    under_way: BTreeSet<String>,
    arrived: BTreeMap<String, Vec<Found>>,
}

impl Lookups {
    pub fn new(dirs: Dirs, waker: Waker) -> Self {
        let (sender, results) = channel();
        let (under_way, arrived) = (BTreeSet::new(), BTreeMap::new());
        Self { dirs, waker, sender, results, under_way, arrived }
    }

    /// Begins to look for a VM, unless that is under way.
    pub fn start(&mut self, vm: &Vm) {
        if !self.under_way.insert(vm.name.clone()) {
            return;
        }
        let (vm, dirs) = (vm.clone(), self.dirs.clone());
        let (sender, waker) = (self.sender.clone(), Arc::clone(&self.waker));
        let name = vm.name.clone();
        let spawned = std::thread::Builder::new().name("lookup".to_owned()).spawn(move || {
            // The service may be gone: then nobody waits for it.
            let _ = sender.send((vm.name.clone(), look_up(&vm, &dirs)));
            waker();
        });
        if spawned.is_err() {
            self.under_way.remove(&name);
        }
    }

    /// Whether an answer is waited for.
    pub fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// What arrived for a VM.
    pub fn take(&mut self, name: &str) -> Vec<Found> {
        while let Ok((vm, result)) = self.results.try_recv() {
            self.under_way.remove(&vm);
            self.arrived.entry(vm).or_default().push(result);
        }
        self.arrived.remove(name).unwrap_or_default()
    }
}

fn look_up(vm: &Vm, dirs: &Dirs) -> Found {
    let found = find::one_of_host(std::slice::from_ref(vm), &vm.name, dirs)
        .and_then(|host_vm| host_vm.handle(&Quiet::default()));
    match found {
        Ok(handle) => {
            let processes: Result<Vec<Option<ProcessId>>, std::io::Error> =
                handle.pids.iter().map(|pid| ProcessId::of(*pid)).collect();
            // One that cannot be read is there all the same.
            let processes: Vec<ProcessId> = match processes {
                Ok(processes) => processes.into_iter().flatten().collect(),
                Err(e) => return Err(Presence::Unknown(format!("its processes cannot be read: {e}"))),
            };
            if processes.is_empty() {
                return Err(Presence::Off("it has no process".to_owned()));
            }
            Ok((handle, processes))
        }
        Err(e) if e.kind() == Kind::NotRunning || nothing_listens(&e) => Err(Presence::Off(format!("{e:#}"))),
        Err(e) => Err(Presence::Unknown(format!("{e:#}"))),
    }
}

/// QEMU listens on its socket as long as it runs, and the kernel refuses a connection where nothing
/// does.
fn nothing_listens(error: &rtvirtio_workflow::Error) -> bool {
    let kind = error.cause::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused))
}
