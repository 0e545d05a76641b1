//! The networks of an I/O domain: opened before the process is confined, then served.

use rtvirtio_domain_config::{File, Network, Port, Power};
use rtvirtio_sched::Config;

use crate::confine::{Confine, StartThread};
use crate::domain::DomainError;
use crate::feature;
use crate::listen::SocketListener;
use crate::net::uplink::Uplink;
use crate::net::{NetCommand, NetEngine, NetHandle, PortSettings};
use crate::reload::{ReloadError, push_differences, same_names};
use crate::socket_group;
use crate::vhost_user::{DeviceInfo, VhostUserServer};

/// Queues of a port: receive and transmit.
const QUEUES: u16 = crate::net::QUEUES;

/// The uplinks and sockets of a network, open.
#[derive(Debug)]
pub(crate) struct OpenedNetwork {
    uplinks: Vec<Uplink>,
    sockets: Vec<SocketListener>,
}

impl OpenedNetwork {
    /// Opens the uplinks, then listens.
    pub(crate) fn open(network: &Network) -> Result<Self, DomainError> {
        let uplink = |port: &Port| {
            Uplink::open(network, port)
                .map_err(|source| DomainError::Uplink { port: port.name.clone(), source })
        };
        let uplinks = network.ports.iter().map(uplink).collect::<Result<_, _>>()?;
        let path_error = |port: &Port, key: &str, source| DomainError::Path {
            what: format!("`{key}` of port \"{}\"", port.name),
            source,
        };
        let listen = |port: &Port| {
            let group = socket_group::resolve(port.socket_group.as_deref())
                .map_err(|source| path_error(port, "socket_group", source))?;
            SocketListener::bind_for_group(&port.socket, group)
                .map_err(|source| path_error(port, "socket", source))
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
    ) -> Result<RunningNetwork, DomainError> {
        let engine = NetEngine::start(network, self.uplinks, power, confine)
            .map_err(|source| DomainError::Network { network: network.name.clone(), source })?;
        let handle = engine.handle();
        let serve = |(place, (port, socket)): (usize, (&Port, SocketListener))| {
            let server = serve_port(port, place, socket, &handle, confine)?;
            Ok(Some(PortMember { name: port.name.clone(), server }))
        };
        let pairs = network.ports.iter().zip(self.sockets);
        let places = pairs.enumerate().map(serve).collect::<Result<_, DomainError>>()?;
        Ok(RunningNetwork { places, engine })
    }
}

/// Serves a port's socket.
pub(crate) fn serve_port(
    port: &Port,
    place: usize,
    socket: SocketListener,
    handle: &NetHandle,
    threads: &dyn StartThread,
) -> Result<VhostUserServer<NetCommand>, DomainError> {
    let info = DeviceInfo {
        name: port.name.clone(),
        vm: place,
        features: feature::net::offered(port.offload),
        config: Vec::new(),
        queues: QUEUES,
        largest_queue: crate::net::LARGEST_QUEUE,
        hugepages: port.hugepages,
        has_inflight: false,
    };
    VhostUserServer::start(info, socket, handle.clone(), threads)
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
    pub(crate) places: Vec<Option<PortMember>>,
    pub(crate) engine: NetEngine,
}

impl RunningNetwork {
    /// The ports with their places.
    pub(crate) fn members(&self) -> impl Iterator<Item = (usize, &PortMember)> {
        self.places.iter().enumerate().filter_map(|(place, member)| Some((place, member.as_ref()?)))
    }

    /// Whether a QEMU is connected to a port.
    pub(crate) fn is_connected(&self, name: &str) -> bool {
        self.members().any(|(_, member)| member.name == name && member.server.is_connected())
    }

    /// Ends the connections; dropping the ports joins the threads.
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

fn network_changes(old: &Network, new: &Network, list: &mut Vec<String>) {
    let place = format!("network \"{}\": ", new.name);
    push_differences!(list, place, old, new, policy, stall);
}

fn port_changes(old: &Port, new: &Port, list: &mut Vec<String>) {
    let place = format!("port \"{}\": ", new.name);
    push_differences!(list, place, old, new, weight, reserve, urgent, tx_cap, rx_cap, rx_coalesce);
}

/// The changes that need a restart, each with its place: of a network against the start, of a port
/// against the configuration in force.
pub(crate) fn networks_need_restart(old: &File, current: &File, new: &File) -> Vec<String> {
    let mut list = Vec::new();
    if !same_names(&old.networks, &new.networks, |network| &network.name) {
        list.push("another list of networks".into());
        return list;
    }
    for (old, new) in old.networks.iter().zip(&new.networks) {
        let place = format!("network \"{}\": ", new.name);
        // All fields by name: a new one must be classified.
        let Network {
            name: _,
            uplink: _,
            interface: _,
            link: _,
            mtu: _,
            cpus: _,
            fifo: _,
            cpu_budget: _,
            cpu_period: _,
            poll: _,
            ports: _,
            // Live.
            policy: _,
            stall: _,
        } = new;
        push_differences!(list, place, old, new, uplink, interface, link, mtu, cpus, fifo, poll);
        push_differences!(list, place, old, new, cpu_budget, cpu_period);
        let current = current.networks.iter().find(|network| network.name == new.name);
        for new in &new.ports {
            let old = current.and_then(|network| network.ports.iter().find(|old| old.name == new.name));
            if let Some(old) = old {
                port_needs_restart(old, new, &mut list);
            }
        }
    }
    list
}

fn port_needs_restart(old: &Port, new: &Port, list: &mut Vec<String>) {
    let place = format!("port \"{}\": ", new.name);
    let Port {
        name: _,
        socket: _,
        socket_group: _,
        tap: _,
        mac: _,
        vlans: _,
        link_local: _,
        multicast: _,
        broadcast: _,
        offload: _,
        hugepages: _,
        depth: _,
        urgent_pcp: _,
        urgent_dscp: _,
        // Live.
        weight: _,
        reserve: _,
        urgent: _,
        tx_cap: _,
        rx_cap: _,
        rx_coalesce: _,
    } = new;
    push_differences!(list, place, old, new, socket, socket_group, tap, mac, vlans, link_local, multicast);
    push_differences!(list, place, old, new, broadcast, offload, hugepages, depth, urgent_pcp, urgent_dscp);
}
