//! VMs that are about to arrive by live migration: their contracts are reserved before they leave
//! their host, for a limited time, and count in every admission until the VM runs here.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_kernel::{Root, trusted};
use rtvirtio_spec::{HostHandle, Reach};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::machines::CommandLine;
use rtvirtio_workflow::write_state;
use serde::{Deserialize, Serialize};

use crate::desired::{Contract, Desired, Origin};
use crate::observed::Admission;

mod error;
mod request;
#[cfg(test)]
mod tests;

pub use error::ArrivalError;
pub use request::ArrivingVm;
pub(crate) use request::names_domain;

/// File of the reservations, in the state directory.
pub const FILE: &str = "arrivals.json";
/// Most reservations at a time.
pub const MOST_ARRIVALS: usize = 32;
/// Time of a reservation where the request gives none.
pub const USUAL_HOLD: Nanos = Nanos::from_millis(600_000);
/// Longest time of a reservation.
pub const LONGEST_HOLD: Nanos = Nanos::from_millis(3_600_000);
/// Largest number of renewals, a day in all: a process that only looks like the VM's must not keep
/// its room for ever.
const MOST_RENEWALS: u32 = 143;
const SCHEMA: &str = "rtvirtio.arrivals.v1";
/// Largest file: every reservation with the longest contract, each byte of it escaped.
const FILE_LIMIT: u64 = 16 << 20;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const UPTIME: &str = "/proc/uptime";

/// Answer to the question whether a VM may come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum ArrivalAnswer {
    /// The VM has no contract, so nothing is reserved.
    NoContract,
    /// The CPU time of its contract is reserved.
    Reserved {
        /// Name of the VM in its contract.
        vm: String,
        /// End of the reservation, RFC 3339.
        until: String,
    },
    /// A contract of this host counts for the VM, and is admitted.
    Counted {
        /// Name of the VM in that contract.
        vm: String,
        /// Place of that contract.
        contract: String,
    },
    /// The service only observes: nothing is reserved and nothing refused.
    Observed,
}

/// State of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArrivalState {
    /// The contract is counted.
    Reserved,
    /// The contract has given way to a more critical one.
    Refused,
}

/// Reservation, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrivalSnapshot {
    /// Name of the VM in its contract.
    pub vm: String,
    /// Name of the VM in libvirt; `None` for a contract that was given as a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// UUID of the VM in libvirt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// State of the reservation.
    pub state: ArrivalState,
    /// Reason for the state `refused`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// End of the reservation, RFC 3339.
    pub until: String,
}

/// Time since the kernel was started, which no change of the clock moves, and the kernel's run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BootTime {
    id: String,
    ms: u64,
}

impl BootTime {
    /// Time and run of the kernel, as it reports them now.
    ///
    /// # Errors
    /// Reason why it is not known, in words.
    pub fn read(root: &Root) -> Result<Self, String> {
        let id = root.read(BOOT_ID).map_err(|e| e.to_string())?.trim().to_owned();
        let uptime = root.read(UPTIME).map_err(|e| e.to_string())?;
        let seconds = uptime.split_ascii_whitespace().next().and_then(|text| text.parse::<f64>().ok());
        match seconds {
            Some(seconds) if !id.is_empty() => Ok(Self { id, ms: (seconds * 1e3) as u64 }),
            _ => Err(format!("{UPTIME} or {BOOT_ID} has another form than expected")),
        }
    }
}

/// Reservation as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredArrival {
    #[serde(flatten)]
    vm: ArrivingVm,
    /// libvirt daemon of this host to which the VM comes.
    uri: String,
    /// End, in milliseconds since the kernel's start.
    until_ms: u64,
    /// End on the clock when it was reserved, for people.
    until: String,
    #[serde(default)]
    renewals: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct StoredArrivals {
    schema: String,
    boot_id: String,
    arrivals: Vec<StoredArrival>,
}

/// Reservation for a VM that is about to arrive.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrival {
    stored: StoredArrival,
    /// Contract that counts.
    pub contract: Contract,
}

impl Arrival {
    /// Reservation that ends after `hold`; `None` for a VM without a contract.
    ///
    /// # Errors
    /// [`ArrivalError::Contract`].
    pub fn new(
        vm: &ArrivingVm,
        uri: &str,
        hold: Nanos,
        now: &BootTime,
    ) -> Result<Option<Self>, ArrivalError> {
        let (until_ms, until) = end_after(hold, now);
        let stored = StoredArrival { vm: vm.clone(), uri: uri.to_owned(), until_ms, until, renewals: 0 };
        Self::of_stored(stored)
    }

    fn of_stored(stored: StoredArrival) -> Result<Option<Self>, ArrivalError> {
        let contract = stored.vm.contract(&stored.uri);
        let contract = contract.map_err(|why| ArrivalError::Contract { vm: stored.vm.name.clone(), why })?;
        Ok(contract.map(|contract| Self { stored, contract }))
    }

    /// Name of the VM in its contract.
    pub fn vm(&self) -> &str {
        &self.contract.vm.name
    }

    /// Clock time of its end.
    pub fn until(&self) -> &str {
        &self.stored.until
    }

    /// Whether a virtual machine of this host is the VM: by its UUID, or as its contract names it.
    pub fn is_machine(&self, machine: &CommandLine) -> bool {
        if let Some(uuid) = &self.stored.vm.uuid {
            return machine.uuid.as_ref().is_some_and(|of| of.eq_ignore_ascii_case(uuid));
        }
        let Reach::Existing { host, .. } = &self.contract.vm.reach else { return false };
        match host {
            HostHandle::Domain(of) => {
                let [name, uuid] = [&machine.name, &machine.uuid].map(|of| of.as_deref().unwrap_or_default());
                machine.libvirt && names_domain(&of.domain, name, uuid)
            }
            HostHandle::Proxmox(id) => machine.proxmox == Some(*id),
            HostHandle::Qmp(socket) => machine.qmp.as_ref() == Some(socket),
            HostHandle::Cgroup(_) | HostHandle::Pid(_) => false,
        }
    }

    /// Whether a contract of this host is of the VM that arrives.
    pub fn is_of(&self, contract: &Contract) -> bool {
        is_of(&self.stored.vm, &self.stored.uri, contract)
    }

    /// Contract of another VM of this host with its name: such a reservation does not count.
    pub fn namesake<'d>(&self, desired: &'d Desired) -> Option<&'d Contract> {
        desired.contract_of(self.vm()).filter(|contract| !self.is_of(contract))
    }

    /// Whether it is of this VM: of libvirt by its name there or UUID, else by its name in the
    /// contract, which is another VM's name in libvirt perhaps.
    fn is_named(&self, name: &str) -> bool {
        let vm = &self.stored.vm;
        match &vm.uuid {
            Some(uuid) => names_domain(name, &vm.name, uuid),
            None => self.vm() == name,
        }
    }

    /// Whether both are for one VM.
    pub fn is_same_vm(&self, other: &Self) -> bool {
        let uuid = |of: &Self| of.stored.vm.uuid.as_ref().map(|uuid| uuid.to_ascii_lowercase());
        match (uuid(self), uuid(other)) {
            (Some(one), Some(two)) => one == two,
            (None, None) => self.vm() == other.vm(),
            _ => false,
        }
    }

    /// Reservation for clients; `refused` is the reason where it was refused since.
    fn snapshot(&self, refused: Option<&String>) -> ArrivalSnapshot {
        let vm = &self.stored.vm;
        ArrivalSnapshot {
            vm: self.vm().to_owned(),
            domain: vm.uuid.is_some().then(|| vm.name.clone()),
            uuid: vm.uuid.clone(),
            state: if refused.is_some() { ArrivalState::Refused } else { ArrivalState::Reserved },
            why: refused.cloned(),
            until: self.stored.until.clone(),
        }
    }
}

/// End of a reservation, in milliseconds since the kernel's start and on the clock.
fn end_after(hold: Nanos, now: &BootTime) -> (u64, String) {
    let ms = hold.min(LONGEST_HOLD).0 / 1_000_000;
    let now_on_clock = jiff::Timestamp::now();
    let until = now_on_clock.checked_add(std::time::Duration::from_millis(ms)).unwrap_or(now_on_clock);
    let until = until.round(jiff::Unit::Second).unwrap_or(until).to_string();
    (now.ms.saturating_add(ms), until)
}

/// Whether a contract of this host is of a VM that arrives at the libvirt daemon `uri`: a domain by
/// its name or UUID there, another VM by its name in the contract.
pub(crate) fn is_of(vm: &ArrivingVm, uri: &str, contract: &Contract) -> bool {
    let host = match &contract.vm.reach {
        Reach::Existing { host, .. } => Some(host),
        Reach::Lab(_) => None,
    };
    match (&vm.uuid, vm.proxmox) {
        (Some(uuid), _) => match host {
            Some(HostHandle::Domain(of)) => of.uri() == uri && names_domain(&of.domain, &vm.name, uuid),
            _ => false,
        },
        (None, Some(id)) => matches!(host, Some(HostHandle::Proxmox(of)) if *of == id),
        (None, None) => contract.vm.name == vm.name,
    }
}

/// Reservations that are counted with the contracts of this host. A file of the VM counts in
/// place of its reservation, and so does any contract of it once it runs; metadata of an earlier
/// start here do not. A name that another VM's contract has cannot be admitted twice: that contract
/// counts alone.
pub(crate) fn counted<'a>(
    desired: &Desired,
    arrivals: &'a [Arrival],
    runs: impl Fn(&str) -> bool,
) -> Vec<&'a Arrival> {
    let own = |arrival: &Arrival| {
        let counts = |c: &&Contract| matches!(c.origin, Origin::File(_)) || runs(&c.vm.name);
        desired.contracts.iter().filter(|c| arrival.is_of(c)).any(|c| counts(&c))
    };
    arrivals.iter().filter(|arrival| !own(arrival) && arrival.namesake(desired).is_none()).collect()
}

/// Reservations of this host.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    all: Vec<Arrival>,
    /// Reason why stored reservations are not known; `None` while they are.
    unread: Option<String>,
    /// Reasons why reservations do not count, by the names in their contracts.
    void: BTreeMap<String, String>,
}

impl Arrivals {
    /// Reads what an earlier process has stored. After a restart of the host nothing arrives any
    /// more.
    pub fn load(state: &Path, now: &Result<BootTime, String>) -> Self {
        match read(state, now) {
            Ok(all) => Self { all, ..Self::default() },
            Err(why) => Self { unread: Some(why), ..Self::default() },
        }
    }

    /// Reservations, in the order of their requests.
    pub fn all(&self) -> &[Arrival] {
        &self.all
    }

    /// Reason why earlier reservations are not known.
    pub fn problem(&self) -> Option<String> {
        let why = self.unread.as_ref()?;
        Some(format!("reservations for arriving VMs are not known, and no VM is let in: {why}"))
    }

    /// Reads earlier reservations again where they are not known.
    ///
    /// # Errors
    /// Reason why they are still not known.
    pub fn know(&mut self, state: &Path, now: &Result<BootTime, String>) -> Result<(), String> {
        if self.unread.is_some() {
            *self = Self::load(state, now);
        }
        self.unread.clone().map_or(Ok(()), Err)
    }

    /// Finds reservations with names that contracts of other VMs have since.
    pub fn find_namesakes(&mut self, desired: &Desired) {
        let void = |of: &Arrival| {
            let (vm, place) = (of.vm().to_owned(), of.namesake(desired)?.origin.to_string());
            Some((vm.clone(), ArrivalError::NameInUse { vm, place }.to_string()))
        };
        self.void = self.all.iter().filter_map(void).collect();
    }

    /// Reservations for clients, as of this admission.
    pub fn snapshots(&self, admitted: &Admission) -> Vec<ArrivalSnapshot> {
        let refused = |vm: &str| self.void.get(vm).or_else(|| admitted.refused.get(vm));
        self.all.iter().map(|of| of.snapshot(refused(of.vm()))).collect()
    }

    /// Takes a reservation, in place of an earlier one of the same VM, and stores it. Returns the
    /// reservations before, for [`Arrivals::put_back`].
    ///
    /// # Errors
    /// [`ArrivalError::TooMany`], [`ArrivalError::NotStored`]; then all is as before.
    pub fn take(&mut self, new: Arrival, state: &Path, now: &BootTime) -> Result<Vec<Arrival>, ArrivalError> {
        let mut all: Vec<Arrival> = self.all.iter().filter(|of| !of.is_same_vm(&new)).cloned().collect();
        if all.len() >= MOST_ARRIVALS {
            return Err(ArrivalError::TooMany);
        }
        let vm = new.vm().to_owned();
        all.push(new);
        store(&all, state, now).map_err(|why| ArrivalError::NotStored { vm, why })?;
        Ok(std::mem::replace(&mut self.all, all))
    }

    /// Puts the reservations from before [`Arrivals::take`] back. Returns why they were not stored.
    pub fn put_back(
        &mut self,
        before: Vec<Arrival>,
        state: &Path,
        now: &Result<BootTime, String>,
    ) -> Option<String> {
        self.all = before;
        self.store(state, now)
    }

    fn store(&self, state: &Path, now: &Result<BootTime, String>) -> Option<String> {
        now.as_ref().map_err(Clone::clone).and_then(|now| store(&self.all, state, now)).err()
    }

    /// Ends reservations for which `why` gives a reason. Returns these VMs with their reasons, and
    /// why the rest was not stored.
    pub fn end(
        &mut self,
        state: &Path,
        now: &Result<BootTime, String>,
        why: impl Fn(&Arrival) -> Option<String>,
    ) -> (Vec<(String, String)>, Option<String>) {
        let (mut ended, mut left) = (Vec::new(), Vec::new());
        for arrival in std::mem::take(&mut self.all) {
            match why(&arrival) {
                Some(why) => ended.push((arrival.vm().to_owned(), why)),
                None => left.push(arrival),
            }
        }
        self.all = left;
        let unstored = if ended.is_empty() { None } else { self.store(state, now) };
        (ended, unstored)
    }

    /// Ends the reservations of a VM that is given by its name or UUID, also where the time is not
    /// known: then they are not stored.
    pub fn give_back(
        &mut self,
        name: &str,
        state: &Path,
        now: &Result<BootTime, String>,
    ) -> (Vec<(String, String)>, Option<String>) {
        self.end(state, now, |of| of.is_named(name).then(|| "it was given back".to_owned()))
    }

    /// Whether the time of a reservation is over.
    pub fn is_due(&self, now: &BootTime) -> bool {
        self.all.iter().any(|of| of.stored.until_ms <= now.ms)
    }

    /// Renews reservations whose time is over for [`USUAL_HOLD`] where `why` gives a reason, up to
    /// [`MOST_RENEWALS`] times.
    /// Returns these VMs with their reasons, and why the rest was not stored.
    pub fn renew(
        &mut self,
        state: &Path,
        now: &BootTime,
        why: impl Fn(&Arrival) -> Option<String>,
    ) -> (Vec<(String, String)>, Option<String>) {
        let mut renewed = Vec::new();
        let is_due = |of: &&mut Arrival| of.stored.until_ms <= now.ms && of.stored.renewals < MOST_RENEWALS;
        for arrival in self.all.iter_mut().filter(is_due) {
            if let Some(why) = why(arrival) {
                arrival.stored.renewals += 1;
                (arrival.stored.until_ms, arrival.stored.until) = end_after(USUAL_HOLD, now);
                renewed.push((arrival.vm().to_owned(), why));
            }
        }
        let unstored = if renewed.is_empty() { None } else { self.store(state, &Ok(now.clone())) };
        (renewed, unstored)
    }

    /// Ends the reservations whose time is over.
    pub fn expire(&mut self, state: &Path, now: &BootTime) -> (Vec<(String, String)>, Option<String>) {
        self.end(state, &Ok(now.clone()), |of| {
            (of.stored.until_ms <= now.ms)
                .then(|| "the VM has not come in time, and its room may be another's".to_owned())
        })
    }
}

fn store(all: &[Arrival], state: &Path, now: &BootTime) -> Result<(), String> {
    let arrivals = all.iter().map(|of| of.stored.clone()).collect();
    let stored = StoredArrivals { schema: SCHEMA.to_owned(), boot_id: now.id.clone(), arrivals };
    let text = serde_json::to_vec(&stored).map_err(|e| e.to_string())?;
    write_state(state, FILE, &text).map_err(|e| format!("{e:#}"))
}

fn read(state: &Path, now: &Result<BootTime, String>) -> Result<Vec<Arrival>, String> {
    let path = state.join(FILE);
    let unread = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let text = match trusted::read_config(&path, FILE_LIMIT) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(unread(&e)),
    };
    let stored: StoredArrivals = serde_json::from_slice(&text).map_err(|e| unread(&e))?;
    if stored.schema != SCHEMA {
        return Err(unread(&format!("its schema is not {SCHEMA}")));
    }
    let now = now.as_ref().map_err(|why| unread(why))?;
    if stored.boot_id != now.id {
        return Ok(Vec::new());
    }
    let limit = now.ms.saturating_add(LONGEST_HOLD.0 / 1_000_000);
    let mut all = Vec::new();
    // Those whose time is over too: the VM may be here, and else it is said that they end.
    for mut of in stored.arrivals.into_iter().take(MOST_ARRIVALS) {
        of.until_ms = of.until_ms.min(limit);
        all.extend(Arrival::of_stored(of).map_err(|e| unread(&e))?);
    }
    Ok(all)
}
