//! Whether a contract that is to be written fits together with the existing ones.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rtvirtio_apply::{Machine, NoGuests};
use rtvirtio_kernel::Root;
use rtvirtio_spec::HostSpec;
use rtvirtio_workflow::scope_files;

use super::admitted::admission;
use super::{FoundVm, LinuxHost, Places, Tracked, Waker, lookup};
use crate::config::{Config, Mode};
use crate::desired::{Contract, Desired};
use crate::host::Host as _;
use crate::observed::{LOOKED_FOR, Presence};

/// Timeout of reading contracts from libvirt.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait between two looks for its answer.
const PAUSE: Duration = Duration::from_millis(100);

/// Result of admitting a contract together with the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Reason why it does not fit; `None` if it fits.
    pub refused: Option<String>,
    /// VMs whose contracts give way to it, each with the reason.
    pub gives_way: Vec<(String, String)>,
    /// For a contract with `cores`, what was not counted of the CPUs, each VM with the reason;
    /// `None` if all were.
    pub uncounted: Option<String>,
}

/// Whether the contract of a VM of a spec fits, by what the service counts: the contracts of files
/// and domains, and those in force. Nothing is set.
///
/// # Errors
/// When that cannot be told, with the reason.
pub fn fit(places: &Places, config: &Config, vm: &str, spec: &HostSpec) -> Result<Fit, String> {
    let new = Contract::of_spec(spec, std::path::Path::new("the new contract"));
    let new = new.into_iter().find(|c| c.vm.name == vm).ok_or_else(|| format!("there is no VM {vm}"))?;
    if !new.sets_something() {
        return Ok(Fit { refused: None, gives_way: Vec::new(), uncounted: None });
    }
    let config = Config { mode: Mode::Observe, plan: None, placement: None, ..config.clone() };
    let (sender, woken) = channel();
    let waker: Waker = Arc::new(move || {
        // The look may have ended.
        let _ = sender.send(());
    });
    let mut host = LinuxHost::new(places.clone(), &config, waker);
    // The service's own files stay as they are.
    host.read_only();
    let end = Instant::now() + READ_TIMEOUT;
    let mut desired = Desired::default();
    loop {
        desired = host.desired().unwrap_or(desired);
        if !desired.is_incomplete || Instant::now() >= end {
            break;
        }
        // A libvirt that does not answer wakes nothing.
        let _ = woken.recv_timeout(PAUSE);
    }
    host.arrivals_problem().map_or(Ok(()), Err)?;
    // What is in force without a contract here may have one elsewhere.
    desired.is_incomplete = true;
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    for name in scope_files::vms(&places.dirs).map_err(|e| format!("{e:#}"))? {
        host.tracked.entry(name.clone()).or_default();
        host.read_scope(&name, &machine);
    }
    let arriving = host.counted_arrivals(&desired, host.arrivals.all());
    if let Some(of) = arriving.iter().find(|of| of.vm() == vm && !of.is_of(&new)) {
        let until = of.until();
        let why = format!(
            "{vm} is the name of a VM that is about to arrive, until {until}: give one of them another `name`"
        );
        return Ok(Fit { refused: Some(why), gives_way: Vec::new(), uncounted: None });
    }
    let has_cores = new.vm.cpu.cores.is_some();
    let mut uncounted = Vec::new();
    if has_cores {
        uncounted.extend(host.find_now(&new.vm));
        uncounted.extend(host.find_others(&desired, vm, &woken));
    }
    let of = |desired: &Desired| host.admit(desired).map_err(|e| format!("{e:#}"));
    let before = admission(&of(&desired)?);
    match desired.contracts.iter_mut().find(|c| c.vm.name == vm) {
        Some(old) => *old = new,
        None => desired.contracts.push(new),
    }
    let admitted = of(&desired)?;
    if has_cores {
        uncounted.extend(admitted.uncounted.iter().map(|(vm, e)| not_counted(vm, &format!("{e:#}"))));
    }
    let after = admission(&admitted);
    let why = |vm: &str| after.refused.get(vm).or_else(|| after.kept.get(vm)).cloned();
    let others = before.admitted.keys().filter(|other| *other != vm && before.takes(other));
    Ok(Fit {
        refused: why(vm),
        gives_way: others.filter_map(|other| Some((other.clone(), why(other)?))).collect(),
        uncounted: (!uncounted.is_empty()).then(|| uncounted.join("; ")),
    })
}

fn not_counted(vm: &str, why: &str) -> String {
    format!("the CPUs of {vm} could not be counted: {why}")
}

impl LinuxHost {
    /// Looks a VM up, so that its CPUs are counted; returns why they are not.
    fn find_now(&mut self, vm: &rtvirtio_spec::Vm) -> Option<String> {
        let found = lookup::look_up(vm, &self.places.dirs);
        let tracked: &mut Tracked = self.tracked.entry(vm.name.clone()).or_default();
        match found {
            Ok((handle, processes)) => {
                tracked.found = Some(FoundVm::new(&self.root, handle, processes));
                None
            }
            Err(Presence::Off(why)) => {
                Some(format!("whether CPUs are left for {} is decided when it runs: {why}", vm.name))
            }
            Err(Presence::Unknown(why)) => Some(not_counted(&vm.name, &why)),
            Err(Presence::Running(_)) => None,
        }
    }

    /// Looks up the VMs whose contracts have `cores` and none in force, so that their CPUs are
    /// counted; returns why those of some are not.
    fn find_others(&mut self, desired: &Desired, new: &str, woken: &Receiver<()>) -> Vec<String> {
        let has_some =
            |vm: &str| self.tracked.get(vm).and_then(|t| t.saved.as_ref()?.cpu.as_ref()?.cores.as_ref());
        let others = desired.contracts.iter().map(|c| &c.vm).filter(|vm| vm.name != new);
        let mut sought: Vec<_> =
            others.filter(|vm| vm.cpu.cores.is_some() && has_some(&vm.name).is_none()).collect();
        sought.iter().for_each(|vm| self.lookups.start(vm));
        let (end, mut uncounted) = (Instant::now() + READ_TIMEOUT, Vec::new());
        loop {
            sought.retain(|vm| {
                let Some(result) = self.lookups.take(&vm.name, &[]).pop() else { return true };
                match result {
                    Ok((handle, processes)) => {
                        let tracked = self.tracked.entry(vm.name.clone()).or_default();
                        tracked.found = Some(FoundVm::new(&self.root, handle, processes));
                    }
                    Err(Presence::Unknown(why)) => uncounted.push(not_counted(&vm.name, &why)),
                    // One that does not run has none.
                    Err(Presence::Off(_) | Presence::Running(_)) => {}
                }
                false
            });
            if sought.is_empty() || Instant::now() >= end {
                break;
            }
            let _ = woken.recv_timeout(PAUSE);
        }
        uncounted.extend(sought.iter().map(|vm| not_counted(&vm.name, LOOKED_FOR)));
        uncounted
    }
}
