//! The disks and ports of a running I/O domain: changed by reloads, described by the status.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rtvirtio_domain_config::{Device, Disk, DiskId, File, Poll};
use rtvirtio_domain_protocol::{Leaving, Preview};
use rtvirtio_domain_resources::OpenError;
use rtvirtio_domain_resources::disk_lock::DiskLock;
use rtvirtio_domain_resources::handover::{AdoptedDisk, Passed, PassedDisk, is_below, socket_directories};
use rtvirtio_domain_resources::listen::AdoptedSocket;
use rtvirtio_sched::{Config, IndexVec, VmConfig, VmId};

use crate::closed::Closed;
use crate::disk::{Member, Part, disk_info, engine_disk, serve_disk};
use crate::engine::{Capacity, Command, EngineGone, EngineHandle, PreparedDisk, ReconfigureError};
use crate::error::DomainError;
use crate::growth::{self, Growth};
use crate::liveness::Liveness;
use crate::log::{line, write_line};
use crate::net::NetHandle;
use crate::network::RunningNetwork;
use crate::network_membership;
use crate::refusal::{ReloadError, named};
use crate::reload::{Membership, device_changes, disk_changes, needs_restart};
pub(crate) use crate::running_state::State;
use crate::vhost_user::FrontEnds;

/// Longest time for a removed disk's requests at the device.
const DRAIN: Duration = Duration::from_secs(10);
/// Interval of checks whether they have ended.
const LOOK: Duration = Duration::from_millis(1);

struct Shared {
    /// The configuration of the start, which determines table sizes.
    started: File,
    /// Directories in which the I/O domain may remove sockets at its end.
    directories: BTreeSet<PathBuf>,
    state: Mutex<State>,
    engines: Vec<(String, EngineHandle)>,
    front_ends: FrontEnds,
    /// Disks and ports that end, with the process.
    closed: Mutex<Closed>,
}

/// The disks and ports of a running I/O domain; shared by several threads.
#[derive(Clone)]
pub struct Running(Arc<Shared>);

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("engines", &self.0.engines.len()).finish_non_exhaustive()
    }
}

/// A disk that is ready to be served.
struct Ready {
    device: usize,
    place: VmId,
    part: Part,
    info: crate::vhost_user::DeviceInfo,
    prepared: Box<PreparedDisk>,
    lock: Option<DiskLock>,
    socket: AdoptedSocket,
}

impl Running {
    pub(crate) fn new(state: State, engines: Vec<(String, EngineHandle)>, front_ends: FrontEnds) -> Self {
        let (started, directories) = (state.file.clone(), socket_directories(&state.file));
        let (state, closed) = (Mutex::new(state), Mutex::default());
        Self(Arc::new(Shared { started, directories, state, engines, front_ends, closed }))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves disks that are served.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn engines(&self) -> &[(String, EngineHandle)] {
        &self.0.engines
    }

    /// The engines of the networks, with their names.
    #[must_use]
    pub fn networks(&self) -> Vec<(String, NetHandle)> {
        let state = self.state();
        let names = state.file.networks.iter().map(|network| network.name.clone());
        names.zip(state.networks.iter().map(|network| network.engine.handle())).collect()
    }

    /// Handles of all engines, to ask whether they answer.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        let devices = self.0.engines.iter().map(|(_, engine)| engine.clone());
        Liveness::new(devices.collect(), self.networks().into_iter().map(|(_, engine)| engine).collect())
    }

    /// Names of the disks and ports to which a QEMU is connected, each once.
    #[must_use]
    pub fn connected(&self) -> Vec<String> {
        let state = self.state();
        let members = state.places.iter().flatten().flatten();
        let mut all: Vec<String> =
            members.filter(|m| m.server.is_connected()).map(|m| m.part.name.clone()).collect();
        let ports = state.networks.iter().flat_map(RunningNetwork::members);
        for (_, port) in ports.filter(|(_, port)| port.server.is_connected()) {
            if !all.contains(&port.name) {
                all.push(port.name.clone());
            }
        }
        all
    }

    /// Ends all servers. Engines may end after that.
    pub(crate) fn end(&self) {
        self.0.front_ends.first_uses().close();
        // Held to the end: nothing is attached meanwhile.
        let mut state = self.state();
        // All end at the same time; then each is waited for.
        state.places.iter().flatten().flatten().for_each(|m| m.server.close());
        state.networks.iter().for_each(RunningNetwork::close);
        let State { file, places, networks, .. } = &mut *state;
        let devices = file.devices.iter().map(|device| device.name.clone());
        let of_networks = file.networks.iter().map(|network| network.name.clone());
        *self.closed() = Closed {
            devices: devices.zip(places.iter_mut().map(std::mem::take)).collect(),
            networks: of_networks.zip(std::mem::take(networks)).collect(),
        };
        while !self.unended().is_empty() {
            std::thread::sleep(LOOK);
        }
        let closed = std::mem::take(&mut *self.closed());
        drop(closed);
    }

    fn closed(&self) -> MutexGuard<'_, Closed> {
        self.0.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the size of each disk that moves when a front end begins to use it, until the end:
    /// it may have grown where its guest comes from.
    pub(crate) fn watch_first_uses(&self) {
        let stays = |name: &str, why: &dyn std::fmt::Display| {
            let remedy = "`rtvirtio iod reload` looks again";
            line(name, format_args!("its guest keeps the size that it has: {why}; {remedy}"));
        };
        while let Some(name) = self.0.front_ends.first_uses().next() {
            let part = self.state().member(&name).map(|member| member.part.clone());
            // Without the lock at first: a file system may hang.
            match part.map(|part| part.room().map(|room| room > part.size())) {
                Some(Ok(true)) => {}
                Some(Err(e)) => {
                    stays(&name, &e);
                    continue;
                }
                Some(Ok(false)) | None => continue,
            }
            match growth::look_again(&mut self.state(), &name, &self.0.engines) {
                Ok(changes) => changes.iter().for_each(write_line),
                Err(e) => stays(&name, &e),
            }
        }
    }

    /// Devices and networks that do not end, with their disks and ports.
    pub(crate) fn unended(&self) -> Vec<String> {
        self.closed().unended()
    }

    /// Reads the file, validates it including admission, and compares its disks and ports with
    /// those that run. Changes nothing.
    pub fn preview(&self, path: &Path) -> Result<Preview, ReloadError> {
        let state = self.state();
        let (_, membership) = self.load(path, &state)?;
        let disk = |(_, name): (usize, String)| Leaving { connected: state.is_connected(&name), name };
        let port = |(network, name): (usize, String)| {
            let connected = state.networks[network].is_connected(&name);
            Leaving { connected, name }
        };
        let names = |list: Vec<(usize, String)>| list.into_iter().map(|(_, name)| name).collect();
        Ok(Preview {
            config: path.to_owned(),
            detach: membership.detach.into_iter().map(disk).collect(),
            attach: names(membership.attach),
            detach_ports: membership.detach_ports.into_iter().map(port).collect(),
            attach_ports: names(membership.attach_ports),
        })
    }

    fn load(&self, path: &Path, state: &State) -> Result<(File, Membership), ReloadError> {
        let new = File::load(path)?;
        let list = needs_restart(&self.0.started, &state.file, &new);
        if !list.is_empty() {
            return Err(ReloadError::Restart { list });
        }
        let membership = Membership::between(&state.file, &new);
        Ok((new, membership))
    }

    /// Reads the file again, validates it including admission, and puts it in force. Returns the
    /// changes, each with its place.
    ///
    /// Live: disks and ports to attach (which `passed` has) and detach; disks that grow; of a
    /// device `policy`, `window` (up to the largest of the start), `aging`, `poll`, `parallel`,
    /// `stall`, `discard_share`; of a disk `weight`, `reserve`, `urgent`, `read_cap`, `write_cap`,
    /// `guest_priority`; of networks and ports the same where they have it. The buckets of a
    /// changed one start full; all others continue. With `force`, disks and ports in use by a guest
    /// are detached too.
    pub fn reload(&self, path: &Path, passed: Passed, force: bool) -> Result<Vec<String>, ReloadError> {
        // Read under the lock: the later reload has the later file.
        let mut state = self.state();
        let (new, membership) = self.load(path, &state)?;
        let disks = membership.detach.iter().filter(|(_, name)| state.is_in_use(name));
        let mut attached: Vec<String> = disks.map(|(_, name)| named("disk", name)).collect();
        let ports =
            membership.detach_ports.iter().filter(|(network, name)| state.networks[*network].is_in_use(name));
        attached.extend(ports.map(|(_, name)| named("port", name)));
        if !force && !attached.is_empty() {
            return Err(ReloadError::Attached { names: attached });
        }
        let growths = growth::find(&state, &new, &membership, None)?;
        let ready = self.prepare(&state, &new, &membership, &growths, passed.disks)?;
        let ready_ports = network_membership::adopt(&new, &membership, passed.ports)?;
        if let Some(port) = ready_ports.iter().find(|port| !is_below(&self.0.directories, port.socket())) {
            let (what, directories) = (named("port", &port.name), self.0.directories.clone());
            return Err(ReloadError::Directory { what, directories });
        }
        growth::lock(&state, &growths)?;
        let mut changes = Vec::new();
        for (device, name) in &membership.detach {
            self.detach(&mut state, *device, name).map_err(|e| e.after(&changes))?;
            changes.push(format!("disk \"{name}\": detached"));
        }
        for (network, name) in &membership.detach_ports {
            let of = state.file.networks[*network].name.clone();
            state.networks[*network].detach(&of, name).map_err(|e| e.after(&changes))?;
            state.file.networks[*network].ports.retain(|port| port.name != *name);
            changes.push(format!("port \"{name}\": detached"));
        }
        self.reconfigure(&mut state, &new, &mut changes)?;
        for disk in growths {
            changes.extend(disk.carry_out(&mut state, &self.0.engines)?);
        }
        // In force from here on, except for the disks and ports to attach.
        state.file = new.clone();
        for (device, name) in &membership.attach {
            state.file.devices[*device].disks.retain(|disk| disk.name != *name);
        }
        for (network, name) in &membership.attach_ports {
            state.file.networks[*network].ports.retain(|port| port.name != *name);
        }
        for disk in ready {
            let (device, name) = (disk.device, disk.part.name.clone());
            self.attach(&mut state, disk).map_err(|e| e.after(&changes))?;
            let table = new.devices[device].disks.iter().find(|d| d.name == name);
            state.file.devices[device].disks.extend(table.cloned());
            changes.push(format!("disk \"{name}\": attached"));
        }
        for port in ready_ports {
            let (network, name) = (port.network, port.name.clone());
            state.networks[network].attach(&new, port, &self.0.front_ends).map_err(|e| e.after(&changes))?;
            let table = new.networks[network].ports.iter().find(|port| port.name == name);
            state.file.networks[network].ports.extend(table.cloned());
            changes.push(format!("port \"{name}\": attached"));
        }
        state.file = new;
        Ok(changes)
    }

    /// Checks and allocates all that the new disks need; changes nothing.
    fn prepare<'a>(
        &self,
        state: &'a State,
        new: &File,
        membership: &Membership,
        growths: &'a [Growth],
        passed: Vec<PassedDisk>,
    ) -> Result<Vec<Ready>, ReloadError> {
        let mut passed = passed;
        let mut take = |name: &str| {
            let at = passed.iter().position(|disk| disk.name() == name)?;
            Some(passed.swap_remove(at))
        };
        let goes = |name: &str| membership.detach.iter().any(|(_, gone)| gone == name);
        // With the sizes that they will have.
        let grown =
            |part: &'a Part| growths.iter().map(|g| &g.part).find(|g| g.name == part.name).unwrap_or(part);
        let stays: Vec<&Part> = state.parts().filter(|part| !goes(&part.name)).map(grown).collect();
        let (mut adopted, mut missing) = (Vec::new(), Vec::new());
        for (device, name) in &membership.attach {
            let disk = new.devices[*device].disks.iter().find(|disk| disk.name == *name);
            match (disk, take(name)) {
                (Some(disk), Some(passed)) => adopted.push((*device, disk, passed.adopt(disk)?)),
                _ => missing.push(named("disk", name)),
            }
        }
        if !missing.is_empty() {
            return Err(ReloadError::NotPassed { names: missing });
        }
        let mut ready: Vec<Ready> = Vec::new();
        for (device, disk, adopted) in adopted {
            if !is_below(&self.0.directories, &disk.socket) {
                let directories = self.0.directories.clone();
                return Err(ReloadError::Directory { what: named("disk", &disk.name), directories });
            }
            let part = Part::new(disk, &adopted.backing)?;
            let others = stays.iter().copied().chain(ready.iter().map(|r| &r.part));
            if let Some(other) = others.clone().find(|other| other.overlaps(&part)) {
                let first = other.name.clone();
                return Err(OpenError::Overlap { first, second: disk.name.clone() }.into());
            }
            let on_file: Vec<&Part> = others.chain([&part]).filter(|p| p.identity == part.identity).collect();
            let locks = ready.iter().filter_map(|r: &Ready| r.lock.as_ref());
            state.require_lock(disk, &on_file, adopted.lock.as_ref(), locks)?;
            let taken: Vec<VmId> = ready.iter().filter(|r| r.device == device).map(|r| r.place).collect();
            let free = |place: &VmId| state.is_free(device, *place, membership) && !taken.contains(place);
            let place = (0..).map(VmId).find(free).unwrap_or(VmId(0));
            ready.push(self.allocate(state, new, (device, place), disk, adopted)?);
        }
        Ok(ready)
    }

    fn allocate(
        &self,
        state: &State,
        new: &File,
        (device, place): (usize, VmId),
        disk: &Disk,
        adopted: AdoptedDisk,
    ) -> Result<Ready, ReloadError> {
        let AdoptedDisk { backing, lock, socket } = adopted;
        let part = Part::new(disk, &backing)?;
        let info = disk_info(disk, &backing, place, &part);
        if disk.pin.is_some() {
            let name = &disk.name;
            write_line(format_args!("{name}: `pin` acts from the next start of this process on"));
        }
        let sched = new.devices[device].sched();
        let at = new.devices[device].disks.iter().position(|d| d.name == disk.name);
        let disk_id = DiskId(at.unwrap_or_default());
        let started = self.0.started.devices[device].sched();
        let largest = started.vms.iter().map(|vm| started.max_piece(vm)).max().unwrap_or(started.quantum);
        // A place beyond those of this device is new, also where other disks come before this one.
        let capacity = Capacity { places: state.places[device].len(), largest };
        let prepared = PreparedDisk::new(engine_disk(disk, backing), &sched, disk_id, place, capacity)
            .map_err(|source| ReloadError::Attach { disk: disk.name.clone(), source })?;
        Ok(Ready { device, place, part, info, prepared: Box::new(prepared), lock, socket })
    }

    fn detach(&self, state: &mut State, device: usize, name: &str) -> Result<(), ReloadError> {
        let place = state.places[device].position(|m| m.as_ref().is_some_and(|m| m.part.name == name));
        let Some(place) = place else { return Ok(()) };
        if let Some(member) = &state.places[device][place] {
            member.server.close();
            let begin = Instant::now();
            while !member.server.has_ended() {
                if begin.elapsed() > DRAIN {
                    let what = named("disk", name);
                    return Err(ReloadError::Draining { what, seconds: DRAIN.as_secs() });
                }
                std::thread::sleep(LOOK);
            }
        }
        let Some(member) = state.places[device][place].take() else { return Ok(()) };
        let part = member.part.clone();
        // Removes the socket.
        drop(member);
        let handle = &self.0.engines[device].1;
        let left = handle.ask(|reply| Command::Detach { vm: place, reply });
        let refused = |e: String| ReloadError::Engine {
            device: self.0.engines[device].0.clone(),
            source: ReconfigureError::Refused(format!("disk \"{name}\" is not removed: {e}")),
        };
        // Its files close here.
        drop(left.map_err(|e| refused(e.to_string()))?.map_err(|e| refused(e.to_string()))?);
        if !state.parts().any(|other| other.identity == part.identity) {
            state.locks.retain(|lock| lock.identity != part.identity);
        }
        state.file.devices[device].disks.retain(|disk| disk.name != name);
        Ok(())
    }

    /// The configuration of a device by place.
    fn by_place(device: &Device, members: &IndexVec<VmId, Option<Member>>) -> Config {
        let config = device.sched();
        let vm = |member: &Option<Member>| {
            let name = member.as_ref().map(|m| m.part.name.as_str());
            let at = device.disks.iter().position(|d| Some(d.name.as_str()) == name);
            at.and_then(|at| config.vms.get(at).cloned()).unwrap_or_else(VmConfig::default)
        };
        let vms = members.iter().map(vm).collect();
        Config { vms, ..config }
    }

    fn reconfigure(
        &self,
        state: &mut State,
        new: &File,
        changes: &mut Vec<String>,
    ) -> Result<(), ReloadError> {
        for (i, network) in new.networks.iter().enumerate() {
            state.networks[i].reconfigure(&state.file.networks[i], network, changes)?;
        }
        let power = new.power;
        for (i, (name, handle)) in self.0.engines.iter().enumerate() {
            let (old, new) = (&state.file.devices[i], &new.devices[i]);
            let before = changes.len();
            device_changes(old, new, changes);
            let mut vms = Vec::new();
            for old in &old.disks {
                let Some(new) = new.disks.iter().find(|new| new.name == old.name) else { continue };
                let before = changes.len();
                disk_changes(old, new, changes);
                if changes.len() > before {
                    let named = |m: &Option<Member>| m.as_ref().is_some_and(|m| m.part.name == new.name);
                    vms.extend(state.places[i].position(named));
                }
            }
            if changes.len() == before {
                continue;
            }
            let config = Box::new(Self::by_place(new, &state.places[i]));
            let poll = Poll::new(power, new.poll, new.fifo);
            let reconfigured = handle
                .ask(|reply| Command::Reconfigure { config, vms, poll, reply })
                .map_err(ReconfigureError::from)
                .and_then(|done| done);
            reconfigured.map_err(|source| ReloadError::Engine { device: name.clone(), source })?;
        }
        Ok(())
    }

    fn attach(&self, state: &mut State, disk: Ready) -> Result<(), ReloadError> {
        let Ready { device, place, part, info, prepared, lock, socket } = disk;
        let (name, handle) = &self.0.engines[device];
        let gone = |_: EngineGone| ReloadError::Engine {
            device: name.clone(),
            source: ReconfigureError::Gone(EngineGone),
        };
        let attached =
            handle.ask(|reply| Command::Attach { vm: place, disk: prepared, reply }).map_err(gone)?;
        attached.map_err(|refused| ReloadError::Attach { disk: part.name.clone(), source: refused.error })?;
        let served = socket
            .listen()
            .map_err(|source| DomainError::Socket { device: format!("disk \"{}\"", part.name), source })
            .and_then(|listener| serve_disk(info, listener, handle, &self.0.front_ends));
        let server = match served {
            Ok(server) => server,
            Err(e) => {
                // The disk is removed again.
                drop(handle.ask(|reply| Command::Detach { vm: place, reply }));
                if state.places[device].next_idx() == place {
                    state.places[device].push(None);
                }
                return Err(e.into());
            }
        };
        let identity = part.identity;
        if !state.locks.iter().any(|lock| lock.identity == identity) {
            state.locks.extend(lock);
        }
        let member = Some(Member { part, server });
        match state.places[device].get_mut(place) {
            Some(free) => *free = member,
            None => {
                state.places[device].push(member);
            }
        }
        Ok(())
    }
}
