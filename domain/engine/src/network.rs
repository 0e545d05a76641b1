//! The networks of a domain: opened before the process is confined, then served.

use rtvirtio_domain_config::{File, Network, Port, Power};
use rtvirtio_units::Nanos;

use crate::confine::{Confine, StartThread};
use crate::domain::DomainError;
use crate::feature;
use crate::listen::SocketListener;
use crate::net::uplink::Uplink;
use crate::net::{NetCommand, NetEngine, NetHandle};
use crate::reload::{ReloadError, push_differences, same_names};
use crate::socket_group;
use crate::vhost_user::{DeviceInfo, VhostUserServer};

/// Receive and transmit.
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
        let serve = |(index, (port, socket)): (usize, (&Port, SocketListener))| {
            serve_port(network, port, index, socket, &handle, confine)
        };
        let pairs = network.ports.iter().zip(self.sockets);
        let servers = pairs.enumerate().map(serve).collect::<Result<_, _>>()?;
        Ok(RunningNetwork { servers, engine })
    }
}

fn serve_port(
    network: &Network,
    port: &Port,
    index: usize,
    socket: SocketListener,
    handle: &NetHandle,
    threads: &dyn StartThread,
) -> Result<VhostUserServer<NetCommand>, DomainError> {
    let info = DeviceInfo {
        name: port.name.clone(),
        vm: index,
        features: feature::net::offered(network.offers_segmentation()),
        config: Vec::new(),
        queues: QUEUES,
        hugepages: port.hugepages,
        has_inflight: false,
    };
    VhostUserServer::start(info, socket, handle.clone(), threads)
        .map_err(|source| DomainError::Socket { device: format!("port \"{}\"", port.name), source })
}

/// A network that is served. Servers end before the engine that they use.
#[derive(Debug)]
pub(crate) struct RunningNetwork {
    /// In the order of the ports.
    pub(crate) servers: Vec<VhostUserServer<NetCommand>>,
    pub(crate) engine: NetEngine,
}

impl RunningNetwork {
    /// Ends the connections; dropping it joins the threads.
    pub(crate) fn close(&self) {
        self.servers.iter().for_each(VhostUserServer::close);
    }

    /// Puts the live keys of a network in force.
    pub(crate) fn reconfigure(
        &self,
        old: &Network,
        new: &Network,
        changes: &mut Vec<String>,
    ) -> Result<(), ReloadError> {
        let before = changes.len();
        network_changes(old, new, changes);
        let mut ports = Vec::new();
        for (i, (old, new)) in old.ports.iter().zip(&new.ports).enumerate() {
            let before = changes.len();
            port_changes(old, new, changes);
            if changes.len() > before {
                ports.push(i);
            }
        }
        if changes.len() == before {
            return Ok(());
        }
        let coalesce: Vec<Nanos> = new.ports.iter().map(|port| port.rx_cap.coalesce()).collect();
        let refused = |e: String| ReloadError::Network { network: new.name.clone(), message: e };
        let (tx, rx) = (Box::new(new.tx_sched()), Box::new(new.rx_sched()));
        let ask = |reply| NetCommand::Reconfigure { tx, rx, ports, coalesce, reply };
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
    push_differences!(list, place, old, new, weight, reserve, urgent, tx_cap, rx_cap);
}

/// The changes that need a restart, each with its place.
pub(crate) fn networks_need_restart(old: &File, new: &File) -> Vec<String> {
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
            poll: _,
            ports: _,
            // Live.
            policy: _,
            stall: _,
        } = new;
        push_differences!(list, place, old, new, uplink, interface, link, mtu, cpus, fifo, poll);
        if !same_names(&old.ports, &new.ports, |port| &port.name) {
            list.push(format!("{place}another list of ports"));
            continue;
        }
        for (old, new) in old.ports.iter().zip(&new.ports) {
            port_needs_restart(old, new, &mut list);
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
        multicast: _,
        broadcast: _,
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
    } = new;
    push_differences!(list, place, old, new, socket, socket_group, tap, mac, vlans, multicast);
    push_differences!(list, place, old, new, broadcast, hugepages, depth, urgent_pcp, urgent_dscp);
}
