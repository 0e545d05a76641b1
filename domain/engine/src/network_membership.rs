//! Attach and detach of ports of a running network.

use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_domain_config::{File, PortId};
use rtvirtio_domain_resources::handover_port::{AdoptedPort, PassedPort};
use rtvirtio_sched::VmId;

use crate::error::DomainError;
use crate::net::prepared::{PreparedPort, VacantPort};
use crate::net::{NetCommand, NetHandle};
use crate::network::{PortMember, RunningNetwork, serve_port};
use crate::refusal::{ReloadError, named};
use crate::reload::Membership;
use crate::vhost_user::FrontEnds;

/// Longest time for a removed port's frames on the link.
const DRAIN: Duration = Duration::from_secs(10);
/// Interval of checks whether they have ended.
const LOOK: Duration = Duration::from_millis(1);

/// A port that is ready to be served.
pub(crate) struct ReadyPort {
    pub(crate) network: usize,
    pub(crate) name: String,
    adopted: AdoptedPort,
}

impl ReadyPort {
    pub(crate) fn socket(&self) -> &Path {
        &self.adopted.socket.path
    }
}

/// Adopts the ports to attach; changes nothing.
///
/// # Errors
/// [`ReloadError::NotPassed`] for one that no process has opened, [`ReloadError::Open`] for one
/// that the file has otherwise by now.
pub(crate) fn adopt(
    new: &File,
    membership: &Membership,
    mut passed: Vec<PassedPort>,
) -> Result<Vec<ReadyPort>, ReloadError> {
    let (mut ready, mut missing) = (Vec::new(), Vec::new());
    for (network, name) in &membership.attach_ports {
        let at = passed.iter().position(|port| port.name() == name);
        let of = &new.networks[*network];
        let port = of.ports.iter().find(|port| port.name == *name);
        match (at.map(|at| passed.swap_remove(at)), port) {
            (Some(passed), Some(port)) => {
                let adopted = passed.adopt(of, port)?;
                ready.push(ReadyPort { network: *network, name: name.clone(), adopted });
            }
            _ => missing.push(named("port", name)),
        }
    }
    if missing.is_empty() { Ok(ready) } else { Err(ReloadError::NotPassed { names: missing }) }
}

impl RunningNetwork {
    /// Attaches a port and serves it.
    pub(crate) fn attach(
        &mut self,
        file: &File,
        ready: ReadyPort,
        front_ends: &FrontEnds,
    ) -> Result<(), ReloadError> {
        let ReadyPort { network, name, adopted } = ready;
        let network = &file.networks[network];
        let refused = |e: String| ReloadError::Network {
            network: network.name.clone(),
            message: format!("port \"{name}\" is not added: {e}"),
        };
        let index = network.ports.iter().position(|port| port.name == name).unwrap_or_default();
        let AdoptedPort { uplink, socket } = adopted;
        let prepared =
            PreparedPort::new(network, PortId(index), uplink).map_err(|e| refused(e.to_string()))?;
        let place = self.places.position(Option::is_none).unwrap_or(self.places.next_idx());
        let (handle, prepared) = (self.engine.handle(), Box::new(prepared));
        let attached = handle.ask(|reply| NetCommand::Attach { port: place, prepared, reply });
        attached.map_err(|e| refused(e.to_string()))?.map_err(|e| refused(e.to_string()))?;
        let device = format!("port \"{name}\"");
        let served = socket
            .listen()
            .map_err(|source| DomainError::Socket { device, source })
            .and_then(|socket| serve_port(&network.ports[index], place, socket, &handle, front_ends));
        let member = served.map(|server| PortMember { name: name.clone(), server });
        // Where it cannot be served, the port is removed again.
        let failed = member.as_ref().is_err();
        if failed {
            let vacant = Box::new(VacantPort::new());
            drop(handle.ask(|reply| NetCommand::Detach { port: place, vacant, reply }));
        }
        let (member, error) = match member {
            Ok(member) => (Some(member), None),
            Err(e) => (None, Some(e)),
        };
        match self.places.get_mut(place) {
            Some(free) => *free = member,
            None => {
                self.places.push(member);
            }
        }
        error.map_or(Ok(()), |e| Err(e.into()))
    }

    /// Detaches a port. All others stay in service.
    pub(crate) fn detach(&mut self, network: &str, name: &str) -> Result<(), ReloadError> {
        let place = self.members().find(|(_, member)| member.name == name).map(|(place, _)| place);
        let Some(place) = place else { return Ok(()) };
        let handle = self.engine.handle();
        let draining = || ReloadError::Draining { what: named("port", name), seconds: DRAIN.as_secs() };
        let begin = Instant::now();
        if let Some(member) = &self.places[place] {
            member.server.close();
            while !member.server.has_ended() {
                if begin.elapsed() > DRAIN {
                    return Err(draining());
                }
                std::thread::sleep(LOOK);
            }
        }
        let refused = |e: String| ReloadError::Network {
            network: network.to_owned(),
            message: format!("port \"{name}\" is not removed: {e}"),
        };
        while !is_drained(&handle, place).map_err(&refused)? {
            if begin.elapsed() > DRAIN {
                return Err(draining());
            }
            std::thread::sleep(LOOK);
        }
        // Removes the socket.
        self.places[place] = None;
        let vacant = Box::new(VacantPort::new());
        let left = handle.ask(|reply| NetCommand::Detach { port: place, vacant, reply });
        // Its uplink closes here.
        drop(left.map_err(|e| refused(e.to_string()))?.map_err(|e| refused(e.to_string()))?);
        Ok(())
    }
}

fn is_drained(handle: &NetHandle, port: VmId) -> Result<bool, String> {
    handle.ask(|reply| NetCommand::Drain { port, reply }).map_err(|e| e.to_string())
}
