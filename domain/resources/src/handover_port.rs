//! Ports for a running I/O domain: their uplinks and sockets, opened by another process and passed
//! on, as [`crate::handover`] does for disks.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rtvirtio_domain_config::{File, Network, Port};
use rtvirtio_domain_protocol::handover::{PORT_DESCRIPTORS, PortFacts};

use crate::error::OpenError;
use crate::listen::{AdoptedSocket, BoundSocket};
use crate::socket_group;
use crate::uplink::{Uplink, UplinkError};

fn facts_of(network: &Network, port: &Port) -> PortFacts {
    PortFacts {
        name: port.name.clone(),
        interface: Uplink::interface(network, port).to_owned(),
        mac: port.mac.to_string(),
        socket: port.socket.clone(),
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
pub fn open(file: &File, names: &BTreeSet<String>, uid: u32) -> Result<Vec<OpenedPort>, OpenError> {
    let own = rustix::process::geteuid().as_raw();
    let ports =
        file.networks.iter().flat_map(|network| network.ports.iter().map(move |port| (network, port)));
    let open = |(network, port): (&Network, &Port)| {
        let uplink = Uplink::open(network, port)
            .map_err(|source| OpenError::Uplink { port: port.name.clone(), source })?;
        let group = socket_group::resolve(port.socket_group.as_deref())
            .map_err(|source| OpenError::port_path(port, "socket_group", source))?;
        let socket = BoundSocket::bind(&port.socket, Some(uid).filter(|uid| *uid != own), group)
            .map_err(|source| OpenError::port_path(port, "socket", source))?;
        Ok(OpenedPort { facts: facts_of(network, port), uplink, socket })
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
    pub fn descriptors(&self) -> [BorrowedFd<'_>; PORT_DESCRIPTORS] {
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

    #[must_use]
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// Takes the port into this process, as the configuration has it.
    ///
    /// # Errors
    /// [`OpenError::Uplink`] where the configuration has it otherwise by now.
    pub fn adopt(self, network: &Network, port: &Port) -> Result<AdoptedPort, OpenError> {
        let Self { facts, uplink, socket } = self;
        if facts != facts_of(network, port) {
            // The configuration was changed between the two reads of it.
            let source = UplinkError::Replaced { name: facts.interface };
            return Err(OpenError::Uplink { port: port.name.clone(), source });
        }
        let socket = AdoptedSocket { path: port.socket.clone(), socket };
        Ok(AdoptedPort { uplink: Uplink::adopt(network, port, uplink), socket })
    }
}

/// A passed port in this process.
#[derive(Debug)]
pub struct AdoptedPort {
    /// Open uplink of the port.
    pub uplink: Uplink,
    /// Bound socket that does not listen yet.
    pub socket: AdoptedSocket,
}
