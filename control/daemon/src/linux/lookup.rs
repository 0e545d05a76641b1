//! Lookups of VMs in threads of their own: a monitor that does not answer delays only its own VM.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::detached::Detached;
use rtvirtio_spec::{Reach, Vm};
use rtvirtio_vmm::VmHandle;
use rtvirtio_workflow::{Dirs, Kind, find};

use super::Quiet;
use super::numbers::{Numbers, number};
use crate::desired::Desired;
use crate::observed::Presence;

/// Callback that wakes the loop, called from any thread.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

type LookupResult = Result<(VmHandle, Vec<ProcessId>), Presence>;

/// Lookups under way, at most one for each VM.
pub(super) struct Lookups {
    dirs: Dirs,
    waker: Waker,
    under_way: BTreeMap<String, Detached<LookupResult>>,
    arrived: BTreeMap<String, Vec<LookupResult>>,
    /// Address (libvirt name, socket, PID) of each VM at its last lookup.
    reach: BTreeMap<String, Reach>,
    numbers: Numbers,
}

impl Lookups {
    pub fn new(dirs: Dirs, waker: Waker) -> Self {
        let (under_way, arrived, reach) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let numbers = Numbers::load(&dirs.state);
        Self { dirs, waker, under_way, arrived, reach, numbers }
    }

    /// Stops saving which process each `pid` means.
    pub fn read_only(&mut self) {
        self.numbers.read_only();
    }

    /// Saves which processes were seen for the first time.
    pub fn save(&mut self) {
        self.numbers.save();
    }

    /// Problem of saving them, for clients.
    pub fn problem(&self) -> Option<&str> {
        self.numbers.problem()
    }

    /// Takes the new contracts. Returns the VMs that they reach in another way than before: what
    /// was found for these may be another VM.
    pub fn keep_only(&mut self, desired: &Desired) -> Vec<String> {
        self.numbers.keep_only(desired);
        let is_other = |(name, reach): &(&String, &Reach)| {
            desired.contract_of(name).is_some_and(|contract| contract.vm.reach != **reach)
        };
        let others: Vec<String> = self.reach.iter().filter(is_other).map(|(name, _)| name.clone()).collect();
        others.iter().for_each(|name| self.forget(name));
        others
    }

    /// Forgets a VM; the result of a lookup under way, which may be of another VM, is dropped.
    fn forget(&mut self, name: &str) {
        self.reach.remove(name);
        self.under_way.remove(name);
        self.arrived.remove(name);
    }

    /// Starts a lookup of a VM, unless one is under way.
    pub fn start(&mut self, vm: &Vm) {
        if self.reach.get(&vm.name) != Some(&vm.reach) {
            self.forget(&vm.name);
            self.reach.insert(vm.name.clone(), vm.reach.clone());
        }
        if self.under_way.contains_key(&vm.name) {
            return;
        }
        let (of, dirs, waker) = (vm.clone(), self.dirs.clone(), Arc::clone(&self.waker));
        let started = Detached::start("lookup", move |results| {
            // The service, and with it the receiver, may be gone.
            let _ = results.send(look_up(&of, &dirs));
            waker();
        });
        // Without a thread the next call tries again.
        self.under_way.extend(started.ok().map(|thread| (vm.name.clone(), thread)));
    }

    pub fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Takes the results for a VM; `in_force` are the processes for which something is in force.
    pub fn take(&mut self, name: &str, in_force: &[ProcessId]) -> Vec<LookupResult> {
        self.under_way.retain(|vm, thread| {
            let Some(result) = thread.wait(Duration::ZERO) else { return true };
            let result = result.unwrap_or_else(|e| Err(Presence::Unknown(format!("its lookup: {e}"))));
            self.arrived.entry(vm.clone()).or_default().push(result);
            false
        });
        let mut arrived = self.arrived.remove(name).unwrap_or_default();
        if let Some(pid) = self.reach.get(name).and_then(number) {
            for result in &mut arrived {
                let Ok((_, processes)) = &*result else { continue };
                if let Err(lack) = self.numbers.check(name, pid, processes, in_force) {
                    *result = Err(lack);
                }
            }
        }
        arrived
    }
}

/// Looks a VM up; that may take as long as its monitor does.
pub(super) fn look_up(vm: &Vm, dirs: &Dirs) -> LookupResult {
    let found = find::one_of_host(std::slice::from_ref(vm), &vm.name, dirs)
        .and_then(|host_vm| host_vm.handle(&Quiet::default()));
    match found {
        Ok(handle) => {
            let processes: Result<Vec<Option<ProcessId>>, std::io::Error> =
                handle.pids.iter().map(|pid| ProcessId::find(*pid)).collect();
            // A process that cannot be read is there all the same.
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

/// Whether nothing listens on a socket, where the kernel refuses a connection: QEMU listens as long
/// as it runs.
fn nothing_listens(error: &rtvirtio_workflow::Error) -> bool {
    let kind = error.cause::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_that_panics_is_not_taken_for_one_under_way() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        let mut lookups = Lookups::new(dirs, Arc::new(|| {}));
        let panics = Detached::call("test", || -> LookupResult { panic!("as a lookup might") });
        lookups.under_way.insert("plc".to_owned(), panics.unwrap());
        rtvirtio_testkit::site::wait_for("its end", || {
            let taken = lookups.take("plc", &[]);
            matches!(taken.as_slice(), [Err(Presence::Unknown(_))]) && !lookups.are_under_way()
        });
    }
}
