//! Ports for a running I/O domain: their uplinks and sockets, opened by another process and passed
//! on, as [`crate::handover`] does for disks.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::{File, Network, Port};
use crate::domain::DomainError;
use crate::listen::{BoundSocket, SocketListener};
use crate::net::uplink::{Uplink, UplinkError};
use crate::socket_group;

/// Descriptors of each port: its uplink, its socket.
pub const DESCRIPTORS: usize = 2;
/// Largest number of ports of one reload.
pub const MOST_PORTS: usize = 128;

/// Properties of a port that its descriptors do not show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortFacts {
    /// Name of the port.
    pub name: String,
    /// Name of the interface: a tap, or that of the network.
    pub interface: String,
    /// MAC address for which the uplink filters.
    pub mac: String,
    /// Path of the vhost-user socket, as it was bound.
    pub socket: PathBuf,
}

impl PortFacts {
    fn of(network: &Network, port: &Port) -> Self {
        Self {
            name: port.name.clone(),
            interface: Uplink::interface(network, port).to_owned(),
            mac: port.mac.to_string(),
            socket: port.socket.clone(),
        }
    }
}

/// A port that this process has opened for a running I/O domain.
#[derive(Debug)]
pub struct OpenedPort {
    facts: PortFacts,
    uplink: Uplink,
    socket: BoundSocket,
}

/// Opens the ports in `names` of a configuration, with the checks of a start, for an I/O domain of
/// the user `uid`.
///
/// # Errors
/// The first error of a start; nothing stays open then.
pub fn open(file: &File, names: &BTreeSet<String>, uid: u32) -> Result<Vec<OpenedPort>, DomainError> {
    let own = rustix::process::geteuid().as_raw();
    let ports =
        file.networks.iter().flat_map(|network| network.ports.iter().map(move |port| (network, port)));
    let open = |(network, port): (&Network, &Port)| {
        let path = |key: &str, source| DomainError::Path {
            what: format!("`{key}` of port \"{}\"", port.name),
            source,
        };
        let uplink = Uplink::open(network, port)
            .map_err(|source| DomainError::Uplink { port: port.name.clone(), source })?;
        let group = socket_group::resolve(port.socket_group.as_deref())
            .map_err(|source| path("socket_group", source))?;
        let socket = BoundSocket::bind(&port.socket, Some(uid).filter(|uid| *uid != own), group)
            .map_err(|source| path("socket", source))?;
        Ok(OpenedPort { facts: PortFacts::of(network, port), uplink, socket })
    };
    ports.filter(|(_, port)| names.contains(&port.name)).map(open).collect()
}

impl OpenedPort {
    /// Properties for the request.
    #[must_use]
    pub fn facts(&self) -> &PortFacts {
        &self.facts
    }

    /// Descriptors in the order of the request: uplink, socket.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; DESCRIPTORS] {
        [self.uplink.as_fd(), self.socket.fd()]
    }

    /// Keeps the socket, because the I/O domain serves the port now.
    pub fn release(self) {
        self.socket.release();
    }
}

/// A port that another process has opened for this one.
#[derive(Debug)]
pub struct PassedPort {
    facts: PortFacts,
    uplink: OwnedFd,
    socket: OwnedFd,
}

impl PassedPort {
    /// Pairs facts with the next descriptors; `None` where there are too few.
    pub(crate) fn take(facts: PortFacts, descriptors: &mut impl Iterator<Item = OwnedFd>) -> Option<Self> {
        Some(Self { facts, uplink: descriptors.next()?, socket: descriptors.next()? })
    }

    /// Name of the port.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// Checks the port against the configuration, and takes its uplink and socket.
    pub(crate) fn adopt(self, network: &Network, port: &Port) -> Result<AdoptedPort, DomainError> {
        let Self { facts, uplink, socket } = self;
        if facts != PortFacts::of(network, port) {
            // The configuration was changed between the two reads of it.
            let source = UplinkError::Replaced { name: facts.interface };
            return Err(DomainError::Uplink { port: port.name.clone(), source });
        }
        let socket = AdoptedSocket { path: port.socket.clone(), socket };
        Ok(AdoptedPort { uplink: Uplink::adopt(network, port, uplink), socket })
    }
}

/// A passed port in this process.
#[derive(Debug)]
pub(crate) struct AdoptedPort {
    pub(crate) uplink: Uplink,
    pub(crate) socket: AdoptedSocket,
}

/// A bound socket that does not listen yet.
#[derive(Debug)]
pub(crate) struct AdoptedSocket {
    pub(crate) path: PathBuf,
    socket: OwnedFd,
}

impl AdoptedSocket {
    /// Listens on the passed socket.
    pub(crate) fn listen(self) -> io::Result<SocketListener> {
        SocketListener::adopt(&self.path, self.socket)
    }
}
