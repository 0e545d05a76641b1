//! The networks of an I/O domain: opened before the process is confined, then served.

use rtvirtio_domain_config::{Network, Port, Power};
use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_domain_resources::{OpenError, socket_group};
use rtvirtio_sched::{Config, IndexVec, VmId};

use crate::confine::Confine;
use crate::error::DomainError;
use crate::feature;
use crate::memory::Trust;
use crate::net::{NetCommand, NetEngine, NetHandle, PortSettings};
use crate::refusal::ReloadError;
use crate::reload::{network_changes, port_changes};
use crate::vhost_user::{DeviceInfo, FrontEnds, VhostUserServer};

/// Queues of a port: receive and transmit.
const QUEUES: u16 = crate::net::QUEUES as u16;

/// The uplinks and sockets of a network, open.
#[derive(Debug)]
pub(crate) struct OpenedNetwork {
    uplinks: Vec<Uplink>,
    sockets: Vec<SocketListener>,
}

impl OpenedNetwork {
    /// Opens the uplinks, then listens.
    pub(crate) fn open(network: &Network) -> Result<Self, OpenError> {
        let uplink = |port: &Port| {
            Uplink::open(network, port)
                .map_err(|source| OpenError::Uplink { port: port.name.clone(), source })
        };
        let uplinks = network.ports.iter().map(uplink).collect::<Result<_, _>>()?;
        let listen = |port: &Port| {
            let group = socket_group::resolve(port.socket_group.as_deref())
                .map_err(|source| OpenError::port_path(port, "socket_group", source))?;
            SocketListener::bind_for_group(&port.socket, group)
                .map_err(|source| OpenError::port_path(port, "socket", source))
        };
        let sockets = network.ports.iter().map(listen).collect::<Result<_, _>>()?;
        Ok(Self { uplinks, sockets })
    }

    /// Starts the engine, then serves.
    pub(crate) fn start(
        self,
        network: &Network,
        power: Power,
        confine: &Confine,
        front_ends: &FrontEnds,
    ) -> Result<RunningNetwork, DomainError> {
        let engine = NetEngine::start(network, self.uplinks, power, confine)
            .map_err(|source| DomainError::Network { network: network.name.clone(), source })?;
        let handle = engine.handle();
        let serve = |(place, (port, socket)): (VmId, (&Port, SocketListener))| {
            let server = serve_port(port, place, socket, &handle, front_ends)?;
            Ok(Some(PortMember { name: port.name.clone(), server }))
        };
        let pairs = network.ports.iter().zip(self.sockets);
        let places = (0..).map(VmId).zip(pairs).map(serve).collect::<Result<_, DomainError>>()?;
        Ok(RunningNetwork { places, engine })
    }
}

pub(crate) fn serve_port(
    port: &Port,
    place: VmId,
    socket: SocketListener,
    handle: &NetHandle,
    front_ends: &FrontEnds,
) -> Result<VhostUserServer<NetCommand>, DomainError> {
    let info = DeviceInfo {
        name: port.name.clone(),
        vm: place,
        features: feature::net::offered(port.offload),
        config: Vec::new().into(),
        queues: QUEUES,
        largest_queue: crate::net::LARGEST_QUEUE,
        trust: Trust::new(port.trust, port.hugepages),
        has_inflight: false,
        use_lock: None,
        first_uses: None,
        pinner: None,
    };
    VhostUserServer::start(info, socket, handle.clone(), front_ends)
        .map_err(|source| DomainError::Socket { device: format!("port \"{}\"", port.name), source })
}

/// A port that is served.
#[derive(Debug)]
pub(crate) struct PortMember {
    pub(crate) name: String,
    pub(crate) server: VhostUserServer<NetCommand>,
}

/// A network that is served. Servers end before the engine that they use.
#[derive(Debug)]
pub(crate) struct RunningNetwork {
    /// Ports by place; a removed one leaves a vacant place.
    pub(crate) places: IndexVec<VmId, Option<PortMember>>,
    pub(crate) engine: NetEngine,
}

impl RunningNetwork {
    /// The ports with their places.
    pub(crate) fn members(&self) -> impl Iterator<Item = (VmId, &PortMember)> {
        self.places.iter_enumerated().filter_map(|(place, member)| Some((place, member.as_ref()?)))
    }

    /// Whether a guest uses a port.
    pub(crate) fn is_in_use(&self, name: &str) -> bool {
        self.members().any(|(_, member)| member.name == name && member.server.is_in_use())
    }

    pub(crate) fn is_connected(&self, name: &str) -> bool {
        self.members().any(|(_, member)| member.name == name && member.server.is_connected())
    }

    /// Ends the connections; dropping the ports waits for that.
    pub(crate) fn close(&self) {
        self.members().for_each(|(_, member)| member.server.close());
    }

    /// Puts the live keys of a network in force, for the ports that stay.
    pub(crate) fn reconfigure(
        &self,
        old: &Network,
        new: &Network,
        changes: &mut Vec<String>,
    ) -> Result<(), ReloadError> {
        let before = changes.len();
        network_changes(old, new, changes);
        let mut changed = Vec::new();
        for old in &old.ports {
            let Some(new) = new.ports.iter().find(|new| new.name == old.name) else { continue };
            let before = changes.len();
            port_changes(old, new, changes);
            if changes.len() > before {
                changed.extend(self.members().find(|(_, m)| m.name == new.name).map(|(place, _)| place));
            }
        }
        if changes.len() == before {
            return Ok(());
        }
        let of_place = |place: &Option<PortMember>| {
            let name = &place.as_ref()?.name;
            new.ports.iter().position(|port| port.name == *name)
        };
        let indices: Vec<Option<usize>> = self.places.iter().map(of_place).collect();
        let by_place = |config: Config| {
            let vm = |index: &Option<usize>| index.and_then(|i| config.vms.get(i)).cloned();
            Box::new(Config { vms: indices.iter().map(|i| vm(i).unwrap_or_default()).collect(), ..config })
        };
        let settings = |index: &Option<usize>| {
            index.map_or_else(PortSettings::default, |i| PortSettings::new(new, &new.ports[i]))
        };
        let settings: Vec<PortSettings> = indices.iter().map(settings).collect();
        let refused = |e: String| ReloadError::Network { network: new.name.clone(), message: e };
        let (tx, rx) = (by_place(new.tx_sched()), by_place(new.rx_sched()));
        let ask = |reply| NetCommand::Reconfigure { tx, rx, ports: changed, settings, reply };
        let done = self.engine.handle().ask(ask).map_err(|e| refused(e.to_string()))?;
        done.map_err(|e| refused(e.to_string()))
    }
}
