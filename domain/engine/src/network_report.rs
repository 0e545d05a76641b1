//! Networks and ports of the status report.

use rtvirtio_domain_config::{Port, RateConfig};
use rtvirtio_units::{Nanos, Percentile};
use serde::Serialize;

use crate::engine::PromiseCounters;
use crate::net::{Drops, Flow, NetCommand, NetHandle, PortStatus};
use crate::running::Running;

/// Counters and latencies of one direction of a port.
#[derive(Clone, Debug, Serialize)]
pub struct FlowReport {
    /// Frames that were passed on.
    pub frames: u64,
    /// Bytes of these frames, without FCS.
    pub bytes: u64,
    /// Median latency in ns. From the VM: from fetch to the uplink. To the VM: from the read of the
    /// uplink to the VM's memory.
    pub p50_ns: u64,
    /// 99th percentile, in ns.
    pub p99_ns: u64,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub p9999_ns: u64,
    /// Longest latency, in ns.
    pub max_ns: u64,
    /// alpha: bytes per second while backlogged.
    pub alpha_bytes_per_second: f64,
    /// Delta: longest time between two frames while backlogged, in ns.
    pub delta_ns: u64,
    /// Frames that waited for a cap.
    pub cap_hits: u64,
}

/// A reservation of the link, with the frames that it covered.
#[derive(Clone, Debug, Serialize)]
pub struct LinkPromiseReport {
    /// `"reserve"` or `"urgent"`, the key of the file.
    pub key: &'static str,
    /// Promised bytes per second on the wire.
    pub bytes_per_second: f64,
    /// Promised burst on the wire, in bytes.
    pub burst: u64,
    /// Promised longest time of a frame within rate and burst, in ns.
    pub deadline_ns: u64,
    /// Computed worst case of that time, in ns; `null` where there is no bound.
    pub bound_ns: Option<u64>,
    /// Number of frames within rate and burst.
    pub frames: u64,
    /// Longest time of such a frame from when the reservation covered it, in ns.
    pub worst_ns: u64,
    /// Frames that took longer than the deadline.
    pub missed: u64,
}

/// Frames that were not passed on, by reason.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DropReport {
    /// From the VM: another source address or VLAN.
    pub spoofed: u64,
    /// From the VM: of the link's own protocols, without `link_local`.
    pub link_local: u64,
    /// From the VM: no valid frame.
    pub malformed: u64,
    /// From the VM: longer than `mtu` of the network, or than the MTU of the uplink.
    pub too_long: u64,
    /// From the VM: refused by the uplink.
    pub refused: u64,
    /// To the VM: beyond its limit on broadcasts.
    pub broadcast: u64,
    /// To the VM: for another address or VLAN.
    pub filtered: u64,
    /// To the VM: without buffers.
    pub no_buffer: u64,
    /// To the VM: a large segment that the VM cannot receive.
    pub segmented: u64,
}

impl From<Drops> for DropReport {
    fn from(drops: Drops) -> Self {
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
        Self { spoofed, link_local, malformed, too_long, refused, broadcast, filtered, no_buffer, segmented }
    }
}

/// State and counters of a port.
#[derive(Clone, Debug, Serialize)]
pub struct PortReport {
    /// Name of the network.
    pub network: String,
    /// Name of the port.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: String,
    /// MAC address of the port.
    pub mac: String,
    /// Whether a QEMU is connected.
    pub connected: bool,
    /// Process id of that QEMU; `null` without one.
    pub peer: Option<u32>,
    /// Whether the guest uses the port: a queue is served.
    pub attached: bool,
    /// Counters of frames from the VM.
    pub tx: FlowReport,
    /// Counters of frames to the VM.
    pub rx: FlowReport,
    /// Reservations of the port; empty without any.
    pub promises: Vec<LinkPromiseReport>,
    /// Frames sent under a reservation.
    pub reserved: u64,
    /// Frames sent without one, as a share of the rest.
    pub shared: u64,
    /// Frames that were not passed on.
    pub drops: DropReport,
    /// Times that the port was held for up to a millisecond because its kicks brought no frames, or
    /// its frames were refused.
    pub backoffs: u64,
    /// Signals of urgent frames before the guest's notification; `null` without an eventfd.
    pub urgent_signals: Option<u64>,
    /// CPU time of the network's thread for this port, in ns; `null` without `cpu_budget`, as the
    /// next two.
    pub cpu_ns: Option<u64>,
    /// Times that the port had used up its part of `cpu_budget`.
    pub throttled: Option<u64>,
    /// Time of waiting for the next period then, in ns.
    pub throttled_ns: Option<u64>,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: u64,
    /// Last refused message; `null` without any.
    pub refused: Option<crate::report::RefusalReport>,
}

/// State of a network.
#[derive(Clone, Debug, Serialize)]
pub struct NetworkReport {
    /// Name of the network.
    pub name: String,
    /// Scheduling policy toward the link.
    pub policy: &'static str,
    /// Declared rate of the link in bytes per second; `null` without one.
    pub link_bytes_per_second: Option<f64>,
    /// Frames to the link that a regulator delayed.
    pub held: u64,
    /// Median delay of these frames beyond their exact moment, in ns.
    pub late_p50_ns: u64,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub late_p9999_ns: u64,
}

fn flow_report(flow: &Flow, cap_hits: u64) -> FlowReport {
    FlowReport {
        frames: flow.frames,
        bytes: flow.bytes,
        p50_ns: flow.latencies.at(Percentile(50.0)).0,
        p99_ns: flow.latencies.at(Percentile(99.0)).0,
        p9999_ns: flow.latencies.tail().0,
        max_ns: flow.latencies.max().0,
        alpha_bytes_per_second: flow.contract.bytes_per_second,
        delta_ns: flow.contract.longest_gap_ns,
        cap_hits,
    }
}

fn promises(port: &Port, bounds: [Option<Nanos>; 2], status: &PortStatus) -> Vec<LinkPromiseReport> {
    let promise = |key, config: Option<RateConfig>, bound: Option<Nanos>, seen: &PromiseCounters| {
        config.map(|c| LinkPromiseReport {
            key,
            bytes_per_second: c.rate.0,
            burst: c.burst.0,
            deadline_ns: c.deadline.0,
            bound_ns: bound.map(|b| b.0),
            frames: seen.requests,
            worst_ns: seen.worst.0,
            missed: seen.missed,
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
pub(crate) fn networks(running: &Running) -> (Vec<NetworkReport>, Vec<PortReport>) {
    let (mut networks, mut ports) = (Vec::new(), Vec::new());
    let state = running.state();
    for (config, running) in state.file.networks.iter().zip(&state.networks) {
        let handle: NetHandle = running.engine.handle();
        let Ok(status) = handle.ask(|reply| NetCommand::Status { reply }) else { continue };
        networks.push(NetworkReport {
            name: config.name.clone(),
            policy: config.policy.name(),
            link_bytes_per_second: config.link.map(|link| link.0),
            held: status.regulator_lateness.n(),
            late_p50_ns: status.regulator_lateness.at(Percentile(50.0)).0,
            late_p9999_ns: status.regulator_lateness.tail().0,
        });
        for (place, member) in running.members() {
            let Some(i) = config.ports.iter().position(|port| port.name == member.name) else { continue };
            let (port, server) = (&config.ports[i], &member.server);
            let asked = handle.ask(|reply| NetCommand::PortStatus { port: place, reply });
            let Ok(Some(status)) = asked else { continue };
            ports.push(PortReport {
                network: config.name.clone(),
                name: port.name.clone(),
                socket: port.socket.display().to_string(),
                mac: port.mac.to_string(),
                connected: server.is_connected(),
                peer: server.peer(),
                attached: status.queues > 0,
                tx: flow_report(&status.tx, status.tx_counters.cap_hits[1]),
                rx: flow_report(&status.rx, status.rx_counters.cap_hits[0]),
                promises: promises(port, config.bounds(i), &status),
                reserved: status.tx_counters.reserved,
                shared: status.tx_counters.shared,
                drops: status.drops.into(),
                backoffs: status.backoffs,
                urgent_signals: status.urgent_signals,
                cpu_ns: status.cpu.map(|cpu| cpu.used.0),
                throttled: status.cpu.map(|cpu| cpu.throttled),
                throttled_ns: status.cpu.map(|cpu| cpu.throttled_time.0),
                broken: status.broken_queues,
                refused: crate::report::last_refusal(server.refusals()),
            });
        }
    }
    (networks, ports)
}
