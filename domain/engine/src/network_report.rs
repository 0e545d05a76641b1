//! The status of the networks.

use std::collections::BTreeMap;

use rtvirtio_domain_config::{Port, PortId, RateConfig};
use rtvirtio_domain_protocol::status::{FlowStatus, LinkPromiseStatus, NetworkStatus, PortStatus};
use rtvirtio_units::Nanos;

use crate::engine::PromiseCounters;
use crate::net::{self, Drops, Flow, NetCommand, NetHandle};
use crate::running::Running;
use crate::service_report::{last_refusal, regulators, service};

fn by_reason(drops: Drops) -> BTreeMap<String, u64> {
    let Drops {
        spoofed,
        link_local,
        malformed,
        too_long,
        refused,
        broadcast,
        filtered,
        no_buffer,
        segmented,
    } = drops;
    [
        ("spoofed", spoofed),
        ("link_local", link_local),
        ("malformed", malformed),
        ("too_long", too_long),
        ("refused", refused),
        ("broadcast", broadcast),
        ("filtered", filtered),
        ("no_buffer", no_buffer),
        ("segmented", segmented),
    ]
    .map(|(reason, frames)| (reason.to_owned(), frames))
    .into()
}

fn flow_status(flow: &Flow, cap_hits: u64) -> FlowStatus {
    FlowStatus {
        frames: Some(flow.frames),
        service: service(&flow.latencies, flow.contract, flow.bytes, cap_hits),
    }
}

fn promises(port: &Port, bounds: [Option<Nanos>; 2], status: &net::PortStatus) -> Vec<LinkPromiseStatus> {
    let promise = |key: &str, config: Option<RateConfig>, bound: Option<Nanos>, seen: &PromiseCounters| {
        config.map(|c| LinkPromiseStatus {
            key: key.to_owned(),
            bytes_per_second: Some(c.rate.0),
            burst: Some(c.burst.0),
            deadline_ns: Some(c.deadline.0),
            bound_ns: bound.map(|b| b.0),
            frames: Some(seen.requests),
            worst_ns: Some(seen.worst.0),
            missed: Some(seen.missed),
        })
    };
    let [urgent, normal] = &status.promises;
    let [urgent_bound, bound] = bounds;
    [promise("reserve", port.reserve, bound, normal), promise("urgent", port.urgent, urgent_bound, urgent)]
        .into_iter()
        .flatten()
        .collect()
}

/// Reports all networks and ports but those whose engine has ended.
pub(crate) fn networks(running: &Running) -> (Vec<NetworkStatus>, Vec<PortStatus>) {
    let (mut networks, mut ports) = (Vec::new(), Vec::new());
    let state = running.state();
    for (config, running) in state.file.networks.iter().zip(&state.networks) {
        let handle: NetHandle = running.engine.handle();
        let Ok(status) = handle.ask(|reply| NetCommand::Status { reply }) else { continue };
        networks.push(NetworkStatus {
            name: config.name.clone(),
            policy: config.policy.name().to_owned(),
            link_bytes_per_second: config.link.map(|link| link.0),
            regulators: regulators(&status.regulator_lateness),
        });
        for (place, member) in running.members() {
            let Some(i) = config.ports.iter().position(|port| port.name == member.name) else { continue };
            let (port, server) = (&config.ports[i], &member.server);
            let asked = handle.ask(|reply| NetCommand::PortStatus { port: place, reply });
            let Ok(Some(status)) = asked else { continue };
            ports.push(PortStatus {
                network: config.name.clone(),
                name: port.name.clone(),
                socket: port.socket.display().to_string(),
                mac: port.mac.to_string(),
                connected: server.is_connected(),
                peer: server.peer(),
                attached: status.queues > 0,
                trusted: Some(port.trust),
                tx: flow_status(&status.tx, status.tx_counters.cap_hits[1]),
                rx: flow_status(&status.rx, status.rx_counters.cap_hits[0]),
                promises: promises(port, config.bounds(PortId(i)), &status),
                reserved: Some(status.tx_counters.reserved),
                shared: Some(status.tx_counters.shared),
                drops: by_reason(status.drops),
                backoffs: Some(status.backoffs),
                urgent_signals: status.urgent_signals,
                cpu_ns: status.cpu.map(|cpu| cpu.used.0),
                throttled: status.cpu.map(|cpu| cpu.throttled),
                throttled_ns: status.cpu.map(|cpu| cpu.throttled_time.0),
                broken: Some(status.broken_queues),
                refused: last_refusal(server.refusals()),
            });
        }
    }
    (networks, ports)
}
