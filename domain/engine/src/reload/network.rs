//! Keys of networks and ports that are live, and keys that need a restart.

use rtvirtio_domain_config::{File, Network, Port};

use super::{push_differences, same_names};

pub(crate) fn network_changes(old: &Network, new: &Network, list: &mut Vec<String>) {
    let place = format!("network \"{}\": ", new.name);
    push_differences!(list, place, old, new, policy, stall);
}

pub(crate) fn port_changes(old: &Port, new: &Port, list: &mut Vec<String>) {
    let place = format!("port \"{}\": ", new.name);
    push_differences!(list, place, old, new, weight, reserve, urgent, tx_cap, rx_cap, rx_coalesce);
}

/// The changes that need a restart, each with its place: of a network against the start, of a port
/// against the configuration in force.
pub(super) fn networks_need_restart(old: &File, current: &File, new: &File) -> Vec<String> {
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
        trust: _,
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
    push_differences!(
        list,
        place,
        old,
        new,
        broadcast,
        offload,
        hugepages,
        trust,
        depth,
        urgent_pcp,
        urgent_dscp
    );
}
