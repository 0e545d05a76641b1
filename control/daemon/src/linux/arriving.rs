//! Admission of VMs that are about to arrive by live migration.

use std::time::Duration;

use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::detached::Hung;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::machines;
use rtvirtio_workflow::one_line;

use super::found::{FoundVm, start_lives};
use super::{LinuxHost, Tracked, admission};
use crate::arrivals::{
    Arrival, ArrivalAnswer, ArrivalError, ArrivalSnapshot, ArrivingVm, BootTime, counted, is_of,
};
use crate::desired::{Contract, Desired, Origin};
use crate::observed::Admission;

/// Longest look for the virtual machines of this host.
const LOOK: Duration = Duration::from_secs(1);
/// Look that has not come back: a process may hold its own up.
static LOOKS: Hung<()> = Hung::none();

/// VM whose reservation has ended or was renewed, with the reason.
pub(crate) type EndedArrival = (String, String);

impl LinuxHost {
    /// Whether a VM may come: its contract is admitted next to those of this host and to earlier
    /// reservations, none of which gives way, and is reserved for `hold`. Returns the reservations
    /// from before too, for [`Self::undo_arrival`], where one was taken.
    ///
    /// # Errors
    /// Reason why it may not come, or why that is not known; then nothing is reserved.
    pub(crate) fn arrive(
        &mut self,
        vm: &ArrivingVm,
        hold: Nanos,
        desired: &Desired,
    ) -> Result<(ArrivalAnswer, Option<Vec<Arrival>>), ArrivalError> {
        if self.only_observes {
            return Ok((ArrivalAnswer::Observed, None));
        }
        let unknown = |why: String| ArrivalError::Unknown { vm: vm.name.clone(), why };
        let boot = BootTime::read(&self.root);
        let now = boot.clone().map_err(unknown)?;
        self.arrivals.know(&self.places.dirs.state, &boot).map_err(unknown)?;
        let uri = self.contracts.uri_or_default().to_owned();
        let new = Arrival::new(vm, &uri, hold, &now)?;
        if desired.is_incomplete {
            return Err(unknown("not all contracts of this host are known yet".to_owned()));
        }
        if let Some(answer) = self.counts_already(vm, &uri, desired)? {
            return Ok((answer, None));
        }
        let Some(new) = new else { return Ok((ArrivalAnswer::NoContract, None)) };
        self.refuse_name(&new, desired)?;
        if vm.uuid.is_some() && !self.contracts.asks_libvirt() {
            return Err(ArrivalError::NotKept { vm: new.vm().to_owned() });
        }
        self.refuse_unfit(&new, desired)?;
        let (vm, until) = (new.vm().to_owned(), new.until().to_owned());
        let before = self.arrivals.take(new, &self.places.dirs.state, &now)?;
        self.admission = None;
        Ok((ArrivalAnswer::Reserved { vm, until }, Some(before)))
    }

    /// Puts the reservations from before the last [`Self::arrive`] back. Returns why they were not
    /// stored.
    pub(crate) fn undo_arrival(&mut self, before: Vec<Arrival>) -> Option<String> {
        self.admission = None;
        let now = BootTime::read(&self.root);
        self.arrivals.put_back(before, &self.places.dirs.state, &now)
    }

    /// Answer for a VM whose contract on this host counts: it has a file here, or runs here.
    fn counts_already(
        &self,
        vm: &ArrivingVm,
        uri: &str,
        desired: &Desired,
    ) -> Result<Option<ArrivalAnswer>, ArrivalError> {
        let counts = |c: &&Contract| {
            is_of(vm, uri, c) && (matches!(c.origin, Origin::File(_)) || self.runs(&c.vm.name))
        };
        let Some(own) = desired.contracts.iter().find(counts) else { return Ok(None) };
        let admitted = self.admit(desired).map_err(|e| unknown(vm, &e))?;
        let admitted = admission(&admitted);
        let name = own.vm.name.clone();
        match reason(&admitted, &name) {
            Some(why) => Err(ArrivalError::DoesNotFit { vm: name, why }),
            None => Ok(Some(ArrivalAnswer::Counted { vm: name, contract: own.origin.to_string() })),
        }
    }

    /// Refuses a VM whose contract has the name of another VM: both contracts would be void.
    fn refuse_name(&self, new: &Arrival, desired: &Desired) -> Result<(), ArrivalError> {
        let vm = new.vm().to_owned();
        let of_file = new.namesake(desired).map(|c| c.origin.to_string());
        let arriving = || self.arrivals.all().iter().find(|of| of.vm() == vm && !of.is_same_vm(new));
        let of_scope = || {
            let is_other = desired.contract_of(&vm).is_none() && self.runs(&vm);
            is_other.then(|| "settings are in force for it".to_owned())
        };
        let place =
            of_file.or_else(|| arriving().map(|_| "about to arrive too".to_owned())).or_else(of_scope);
        if let Some(place) = place {
            return Err(ArrivalError::NameInUse { vm, place });
        }
        // Settings of an ended VM are put back soon: a VM that moves back has left them behind.
        let left = self.tracked.get(&vm).and_then(|t| t.scope.as_ref());
        let is_kept = |start: &[ProcessId]| start.is_empty() || desired.holds(&vm);
        if desired.contract_of(&vm).is_none() && left.is_some_and(|scope| is_kept(&scope.start)) {
            let why = "settings of an earlier VM of this name are in force still".to_owned();
            return Err(ArrivalError::Unknown { vm, why });
        }
        Ok(())
    }

    /// Refuses a contract that does not fit, or for which another one would give way.
    fn refuse_unfit(&self, new: &Arrival, desired: &Desired) -> Result<(), ArrivalError> {
        let vm = new.vm().to_owned();
        let mut all: Vec<Arrival> =
            self.arrivals.all().iter().filter(|of| !of.is_same_vm(new)).cloned().collect();
        let admit = |arrivals: &[Arrival]| {
            let admitted = self.admit_with(desired, arrivals);
            let admitted =
                admitted.map_err(|e| ArrivalError::Unknown { vm: vm.clone(), why: one_line(&e) })?;
            Ok(admission(&admitted))
        };
        let before = admit(&all)?;
        all.push(new.clone());
        let after = admit(&all)?;
        if let Some(why) = reason(&after, &vm) {
            return Err(ArrivalError::DoesNotFit { vm, why });
        }
        let had = before.admitted.keys().filter(|other| **other != vm && before.takes(other));
        let loser = had.into_iter().find_map(|other| Some((other.clone(), reason(&after, other)?)));
        loser.map_or(Ok(()), |(other, why)| Err(ArrivalError::GivesWay { vm: vm.clone(), other, why }))
    }

    /// Whether a VM runs here. Settings that it has left behind do not count: a VM that moves back
    /// finds those of its earlier stay.
    pub(super) fn runs(&self, vm: &str) -> bool {
        let start = |t: &Tracked| t.scope.as_ref().is_some_and(|s| start_lives(&self.root, &s.start));
        self.tracked.get(vm).is_some_and(|t| is_found(t) || start(t))
    }

    /// Ends the reservations of a VM that is given by its name or UUID. Returns those that ended,
    /// and why the rest was not stored.
    pub(crate) fn give_arrival_back(&mut self, name: &str) -> (Vec<EndedArrival>, Option<String>) {
        let now = BootTime::read(&self.root);
        let ended = self.arrivals.give_back(name, &self.places.dirs.state, &now);
        self.count_anew(&ended.0);
        ended
    }

    /// Renews reservations whose time is over where the VM is here and has no contract in force
    /// yet, as one that is still being moved, or where that is not known. Returns these VMs with
    /// their reasons, and why they were not stored.
    pub(crate) fn renew_arrivals(&mut self) -> (Vec<EndedArrival>, Option<String>) {
        let Ok(now) = BootTime::read(&self.root) else { return (Vec::new(), None) };
        if !self.arrivals.is_due(&now) {
            return (Vec::new(), None);
        }
        let root = self.root.clone();
        let look = LOOKS.call("arrivals", (), LOOK, move || machines::find(&root).map_err(|e| e.to_string()));
        let look = look.map_err(|e| e.to_string()).and_then(|found| found);
        let is_here = |arrival: &Arrival| match &look {
            Ok((found, unreadable)) => {
                let own = found.iter().find(|machine| arrival.is_machine(&machine.line));
                own.map(|machine| format!("its QEMU (process {}) is here already", machine.pid)).or_else(
                    || {
                        let of = unreadable.first()?;
                        Some(format!("whether process {} is its QEMU is not known: {}", of.pid, of.why))
                    },
                )
            }
            Err(why) => Some(format!("whether its QEMU is here is not known: {why}")),
        };
        self.arrivals.renew(&self.places.dirs.state, &now, is_here)
    }

    /// Ends reservations whose time is over, and those of VMs that run here with a contract.
    pub(crate) fn end_arrivals(&mut self, desired: &Desired) -> (Vec<EndedArrival>, Option<String>) {
        if self.arrivals.all().is_empty() {
            return (Vec::new(), None);
        }
        let boot = BootTime::read(&self.root);
        let now = match boot.clone() {
            Ok(now) => now,
            Err(why) => {
                self.problem(format!("no reservation for an arriving VM ends: {why}"));
                return (Vec::new(), None);
            }
        };
        let state = self.places.dirs.state.clone();
        let tracked = &self.tracked;
        let runs = |vm: &str| tracked.get(vm).is_some_and(is_found);
        let (mut ended, came) = self.arrivals.end(&state, &boot, |arrival| {
            let own = desired.contracts.iter().find(|c| arrival.is_of(c) && runs(&c.vm.name))?;
            Some(format!("the VM has come, and the contract in {} counts", own.origin))
        });
        if !ended.is_empty() {
            // An earlier start here may have had another contract.
            self.contracts.ask_now();
        }
        let (expired, late) = self.arrivals.expire(&state, &now);
        ended.extend(expired);
        self.count_anew(&ended);
        (ended, came.or(late))
    }

    fn count_anew(&mut self, ended: &[EndedArrival]) {
        if !ended.is_empty() {
            self.admission = None;
        }
    }

    /// Whether VMs are about to arrive.
    pub(crate) fn has_arrivals(&self) -> bool {
        !self.arrivals.all().is_empty()
    }

    /// Reservations for clients, as of the last admission.
    pub(crate) fn arrivals(&self, admitted: &Admission) -> Vec<ArrivalSnapshot> {
        self.arrivals.snapshots(admitted)
    }

    /// Reason why earlier reservations are not known.
    pub(crate) fn arrivals_problem(&self) -> Option<String> {
        self.arrivals.problem()
    }

    /// Reservations that are counted with the contracts of this host.
    pub(super) fn counted_arrivals<'a>(
        &self,
        desired: &Desired,
        arrivals: &'a [Arrival],
    ) -> Vec<&'a Arrival> {
        counted(desired, arrivals, |vm| self.runs(vm))
    }
}

/// Whether a process of a VM that was found runs still: it may have ended since the last look.
fn is_found(tracked: &Tracked) -> bool {
    tracked.found.as_ref().is_some_and(FoundVm::runs)
}

fn unknown(vm: &ArrivingVm, e: &rtvirtio_workflow::Error) -> ArrivalError {
    ArrivalError::Unknown { vm: vm.name.clone(), why: one_line(e) }
}

/// Reason why a VM's contract is not admitted; `None` if it is.
fn reason(admitted: &Admission, vm: &str) -> Option<String> {
    admitted.refused.get(vm).or_else(|| admitted.kept.get(vm)).cloned()
}
