//! Reservations of a network's link with which the targets of flows hold in the worst case.

use std::path::Path;

use rtvirtio_capacity::{LinkReserve, link_reserve};
use rtvirtio_domain_config::{Network, Port, PortId, RateConfig, UplinkKind};
use rtvirtio_spec::{Direction, Flow, HostSpec, Mark, Uplink, Vm};
use rtvirtio_units::{BytesPerSec, Nanos, Ratio};
use serde::Serialize;

use crate::caps::{PortCaps, port_caps};
use crate::flow::{Class, FlowPromise};
use crate::network_refusal::{RefusedClass, refusals};

const HELD_BACK: &str = "its VM's own traffic limit is below what its flows send, so nothing bounds how long it holds a frame back: raise the limit, \
     or lower the rates of the flows";
const UNPROMISED_RX: &str = "frames to a VM have no reservation: those that the link brings are delivered in turn, and a cap on the others' \
     (`rx_cap`) keeps the thread free";

/// A VM's port, its reservations and caps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PortPlan {
    pub vm: String,
    /// Name of the port in the I/O domain's file.
    pub port: String,
    /// Reservation of frames that are not marked.
    pub reserve: Option<LinkReserve>,
    /// Reservation of marked frames.
    pub urgent: Option<LinkReserve>,
    /// Reason for no reservation, where a flow has a target.
    pub refused: Option<String>,
    /// Caps of its VM's traffic, as keys of the port.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caps: Vec<String>,
    /// Reasons for limits of its VM's traffic that are no caps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused_caps: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NetworkPlan {
    pub network: String,
    /// Rate of the link.
    pub link: BytesPerSec,
    /// Reserved share of it.
    pub reserved: Ratio,
    /// Ports in the order of the spec's VMs.
    pub ports: Vec<PortPlan>,
    /// Flows in the spec's order.
    pub flows: Vec<FlowPromise>,
    /// Whether every target holds in the worst case.
    pub feasible: bool,
    /// The network as the I/O domain's file has it.
    #[serde(skip)]
    pub config: Network,
}

impl NetworkPlan {
    /// Flows that have a target and no promise, as `VM/flow`, with the reason.
    pub fn unpromised(&self) -> impl Iterator<Item = (String, &str)> {
        let flows = self.flows.iter();
        flows.filter_map(|f| Some((format!("{}/{}", f.vm, f.flow), f.unpromised.as_deref()?)))
    }
}

/// Plans every network of a spec. `sockets` is the directory of the ports' vhost-user sockets.
#[must_use]
pub fn plan_networks(host: &HostSpec, sockets: &Path) -> Vec<NetworkPlan> {
    (0..host.networks().len()).map(|i| plan(host, i, sockets)).collect()
}

/// The most urgent class is admitted first; one that is not admitted with the more urgent ones gets
/// no reservation, and a reason.
fn plan(host: &HostSpec, network: usize, sockets: &Path) -> NetworkPlan {
    let vms: Vec<(&Vm, usize)> = host
        .vms()
        .iter()
        .filter_map(|vm| Some((vm, vm.nics.iter().position(|nic| nic.network == network)?)))
        .collect();
    let mut config = config(host, network, &vms, sockets);
    let caps: Vec<PortCaps> = vms.iter().map(|(vm, _)| port_caps(vm, config.largest_frame())).collect();
    let mut ports: Vec<PortPlan> = vms
        .iter()
        .zip(&config.ports)
        .zip(&caps)
        .map(|(((vm, _), port), caps)| unplanned(vm, port, caps))
        .collect();
    for (port, caps) in config.ports.iter_mut().zip(&caps) {
        (port.rx_cap, port.tx_cap) = (caps.rx, caps.tx);
    }
    let stall = config.stall;
    let held = |port: usize| {
        let (vm, nic) = vms[port];
        caps[port].holds_back(sent(vm, nic), stall)
    };
    let mut wanted: Vec<(Nanos, usize, Class)> = Vec::new();
    for (port, (vm, nic)) in vms.iter().enumerate() {
        for class in [Class::Urgent, Class::Normal] {
            let sent = sent(vm, *nic).filter(|flow| Class::from_flow(flow) == class);
            let tightest = sent.filter_map(|flow| flow.target).map(|target| target.latency).min();
            // The delay in the VM's own cap is not left for the link.
            let left = tightest.and_then(|target| held(port).and_then(|held| target.0.checked_sub(held.0)));
            wanted.extend(left.filter(|left| *left > 0).map(|deadline| (Nanos(deadline), port, class)));
        }
    }
    wanted.sort_by_key(|(deadline, ..)| *deadline);
    let mut refused = Vec::new();
    for (deadline, port, class) in wanted {
        let (vm, nic) = vms[port];
        let of_class = sent(vm, nic).filter(|flow| Class::from_flow(flow) == class);
        let LinkReserve { rate, burst, .. } = link_reserve(of_class, deadline, stall);
        let reserve = Some(LinkReserve { rate, burst, deadline });
        let rate = RateConfig { rate, burst, deadline };
        *class.reserve(&mut config.ports[port]) = Some(rate);
        match (config.check(), class) {
            (Ok(()), Class::Urgent) => ports[port].urgent = reserve,
            (Ok(()), Class::Normal) => ports[port].reserve = reserve,
            (Err(why), _) => {
                let class = RefusedClass::new(&config, (port, class), rate, &why);
                class.class.reserve(&mut config.ports[port]).take();
                ports[port].refused.get_or_insert(class.reason.clone());
                refused.push(class);
            }
        }
    }
    let name = host.networks()[network].name().to_owned();
    let mut flows = Vec::new();
    for (port, (vm, nic)) in vms.iter().enumerate() {
        let bounds = config.bounds(PortId(port));
        let of_port = vm.flows.iter().filter(|flow| flow.nic == *nic);
        flows.extend(of_port.map(|flow| promise(&vm.name, flow, (&name, port), (bounds, held(port)))));
    }
    refusals(&config, &refused, &mut flows);
    let reserves = ports.iter().flat_map(|port| [port.reserve, port.urgent]).flatten();
    let reserved: f64 = reserves.map(|r| r.rate.0).fold(0.0, |a, b| a + b);
    let link = host.networks()[network].link;
    NetworkPlan {
        network: name,
        link,
        reserved: Ratio(reserved / link.0),
        feasible: flows.iter().all(|flow| flow.met != Some(false)),
        ports,
        flows,
        config,
    }
}

fn unplanned(vm: &Vm, port: &Port, caps: &PortCaps) -> PortPlan {
    PortPlan {
        vm: vm.name.clone(),
        port: port.name.clone(),
        reserve: None,
        urgent: None,
        refused: None,
        caps: caps.caps.lines.clone(),
        refused_caps: caps.caps.refused.clone(),
    }
}

/// Flows that a VM sends through a port.
fn sent(vm: &Vm, nic: usize) -> impl Iterator<Item = &Flow> {
    vm.flows.iter().filter(move |flow| flow.nic == nic && flow.direction == Direction::Tx)
}

fn promise(
    vm: &str,
    flow: &Flow,
    (network, port): (&str, usize),
    ([urgent, normal], held): ([Option<Nanos>; 2], Option<Nanos>),
) -> FlowPromise {
    let of_class = match (flow.direction, Class::from_flow(flow)) {
        (Direction::Rx, _) => None,
        (Direction::Tx, Class::Urgent) => urgent,
        (Direction::Tx, Class::Normal) => normal,
    };
    let bound = flow.target.and(of_class).and_then(|bound| Some(Nanos(bound.0 + held?.0)));
    let unpromised = flow.target.and_then(|target| match (flow.direction, held) {
        (Direction::Rx, _) => Some(UNPROMISED_RX.to_owned()),
        (Direction::Tx, None) => Some(HELD_BACK.to_owned()),
        (Direction::Tx, Some(held)) if held >= target.latency => Some(format!(
            "its VM's own traffic limit may hold a frame back for {held}: raise the limit or its burst"
        )),
        (Direction::Tx, Some(_)) => None,
    });
    FlowPromise {
        vm: vm.to_owned(),
        flow: flow.name.clone(),
        network: network.to_owned(),
        direction: flow.direction,
        frame: flow.frame,
        rate: flow.rate,
        burst: flow.burst,
        is_urgent: flow.mark.is_some(),
        target: flow.target,
        bound,
        met: flow.target.map(|target| bound.is_some_and(|bound| bound <= target.latency)),
        unpromised,
        least_target: None,
        port,
    }
}

/// The network without reservations.
fn config(host: &HostSpec, network: usize, vms: &[(&Vm, usize)], sockets: &Path) -> Network {
    let of = &host.networks()[network];
    let port = |(vm, nic): &(&Vm, usize)| {
        let marks = sent(vm, *nic).filter_map(|flow| flow.mark);
        let (mut urgent_pcp, mut urgent_dscp) = (Vec::new(), Vec::new());
        for mark in marks {
            let (list, value) = match mark {
                Mark::Pcp(value) => (&mut urgent_pcp, value),
                Mark::Dscp(value) => (&mut urgent_dscp, value),
            };
            if !list.contains(&value) {
                list.push(value);
            }
        }
        // Names of ports are unique in a file.
        let name = if vm.nics.len() == 1 { vm.name.clone() } else { format!("{}.{}", vm.name, of.name()) };
        let nic = &vm.nics[*nic];
        let socket = sockets.join(format!("{name}.sock"));
        Port { tap: nic.tap.clone(), urgent_pcp, urgent_dscp, ..Port::new(name, socket, nic.mac) }
    };
    let (uplink, interface) = match &of.uplink {
        Uplink::Tap => (UplinkKind::Tap, None),
        Uplink::Packet { interface } => (UplinkKind::Packet, Some(interface.clone())),
    };
    Network {
        uplink,
        interface,
        link: Some(of.link),
        // The spec's limit of the MTU is that of the I/O domain's file.
        mtu: u16::try_from(of.mtu).unwrap_or(u16::MAX),
        ports: vms.iter().map(port).collect(),
        ..Network::new(of.name().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtvirtio_domain_config::File;
    use rtvirtio_units::Bytes;

    use crate::network_text::network_text;

    const HEAD: &str = "[device]\ntwin = \"qlc-nvme\"\n[[network]]\nlink = \"100Mbit/s\"\n";

    fn host(flows: &[&str]) -> HostSpec {
        let mut text = HEAD.to_owned();
        for (i, flow) in flows.iter().enumerate() {
            text += &format!(
                "[[vm]]\nname = \"v{i}\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
                 [[vm.nic]]\nmac = \"52:54:00:00:00:0{i}\"\ntap = \"tap{i}\"\n{flow}\n"
            );
        }
        HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"))
    }

    fn flow(name: &str, more: &str) -> String {
        format!("[[vm.flow]]\nname = \"{name}\"\ndirection = \"tx\"\nframe = \"200B\"\n{more}\n")
    }

    fn planned(flows: &[&str]) -> NetworkPlan {
        plan_networks(&host(flows), Path::new("/run/ports")).remove(0)
    }

    #[test]
    fn declared_frames_are_reserved_on_the_wire() {
        let plan = planned(&[&flow("a", "rate = \"1000/s\"\ntarget = { latency = \"2ms\" }"), ""]);
        assert!(plan.feasible, "{plan:?}");
        let reserve = plan.ports[0].reserve.unwrap();
        // 1000 frames of 224 bytes on the wire, plus 10 %.
        assert!((reserve.rate.0 - 246_400.0).abs() < 2.0, "{reserve:?}");
        // A burst of two: one frame, and another that waits for a stalled thread.
        assert_eq!((reserve.burst, reserve.deadline), (Bytes(448), Nanos::from_millis(2)));
        let flow = &plan.flows[0];
        assert!(flow.bound.unwrap() <= Nanos::from_millis(2), "{flow:?}");
        // Two frames of the neighbour, and the thread's stall.
        assert!(flow.bound.unwrap() > Nanos::from_micros(600), "{flow:?}");
        assert_eq!((flow.met, plan.ports[1].reserve), (Some(true), None));
        let text = network_text(&plan);
        let file = File::parse(Path::new("iod.toml"), &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(file.networks[0].bounds(PortId(0)), plan.config.bounds(PortId(0)));
    }

    #[test]
    fn marked_flows_are_apart_and_what_the_link_cannot_carry_is_refused() {
        let urgent = flow("sv", "rate = \"4000/s\"\npcp = 4\ntarget = { latency = \"2ms\" }");
        let bulk = flow("bulk", "rate = \"60000/s\"\ntarget = { latency = \"5ms\" }");
        let plan = planned(&[&(urgent + &bulk)]);
        let port = &plan.ports[0];
        assert!(port.urgent.is_some() && port.reserve.is_none(), "{port:?}");
        assert!(port.refused.as_deref().unwrap().contains("% of the link are reserved"), "{port:?}");
        let why = plan.flows[1].unpromised.as_deref().unwrap();
        assert!(why.contains("no target is admitted") && why.contains("lower its rate to"), "{why}");
        assert_eq!((plan.flows[1].least_target, plan.flows[0].unpromised.as_ref()), (None, None));
        let met: Vec<Option<bool>> = plan.flows.iter().map(|flow| flow.met).collect();
        assert_eq!((met, plan.feasible), (vec![Some(true), Some(false)], false));
        assert_eq!(plan.config.ports[0].urgent_pcp, [4]);
        let text = network_text(&plan);
        assert!(text.contains("# NO RESERVATION of unmarked frames"), "{text}");
    }

    /// The target that the message names is admitted, and nothing much shorter is.
    #[test]
    fn a_refused_flow_has_the_smallest_target_that_is_admitted() {
        let with =
            |target: &str| flow("trip", &format!("rate = \"1000/s\"\ntarget = {{ latency = \"{target}\" }}"));
        let other = flow("sv", "rate = \"4000/s\"\ntarget = { latency = \"1500us\" }");
        let refused = planned(&[&with("900us"), &other]);
        let trip = &refused.flows[0];
        let least = trip.least_target.unwrap();
        let why = trip.unpromised.as_deref().unwrap();
        assert!(
            why.ends_with(&format!("the smallest target that is admitted next to all others is {least}")),
            "{why}"
        );
        assert_eq!((trip.met, refused.flows[1].met, refused.feasible), (Some(false), Some(true), false));
        assert_eq!(refused.unpromised().map(|(name, _)| name).collect::<Vec<_>>(), ["v0/trip"]);
        // With the target from the message it holds, and the other flow keeps its promise.
        let enough = planned(&[&with(&least.to_string()), &other]);
        assert!(enough.feasible, "{least}: {enough:?}");
        let less = planned(&[&with(&format!("{}ns", least.0 - least.0 / 50)), &other]);
        assert!(!less.feasible, "{least}: {less:?}");
        let text = network_text(&refused);
        assert!(text.contains("# trip: NO PROMISE: ") && text.contains(&least.to_string()), "{text}");
    }

    /// The flow whose target is too short is named to those that share its reservation.
    #[test]
    fn a_flow_that_is_refused_with_another_names_it() {
        let short = flow("trip", "rate = \"100/s\"\ntarget = { latency = \"500us\" }");
        let long = flow("log", "rate = \"100/s\"\ntarget = { latency = \"1s\" }");
        let plan = planned(&[&(short + &long)]);
        let why = plan.flows[1].unpromised.as_deref().unwrap();
        assert!(why.contains("shares a reservation with \"trip\""), "{why}");
        assert_eq!(plan.flows[0].least_target, plan.flows[1].least_target);
    }

    /// The limits of the spec are exactly the caps of the file.
    #[test]
    fn traffic_becomes_caps_of_the_port() {
        let sends = flow("a", "rate = \"1000/s\"\ntarget = { latency = \"9ms\" }");
        let with = |traffic: &str| {
            let text = HEAD.to_owned()
                + &format!(
                    "[[vm]]\nname = \"v\"\nlab = \"qemu\"\n{traffic}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
                     [[vm.nic]]\nmac = \"52:54:00:00:00:01\"\ntap = \"tap0\"\n{sends}\n"
                );
            let host = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
            plan_networks(&host, Path::new("/run/ports")).remove(0)
        };
        let free = with("");
        let plan = with(
            "traffic.rx = { rate = \"20000/s\", burst = 40 }\ntraffic.tx = { rate = \"1MB/s\", burst = \"3kB\", peak = \"7MB/s\" }",
        );
        let text = network_text(&plan);
        let file = File::parse(Path::new("iod.toml"), &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let port = &file.networks[0].ports[0];
        assert_eq!((port.rx_cap, port.tx_cap), (plan.config.ports[0].rx_cap, plan.config.ports[0].tx_cap));
        let [sched, planned] = [file.networks[0].tx_sched(), plan.config.tx_sched()];
        let caps = sched.vms[0].caps[1].bytes.unwrap();
        assert_eq!((caps.rate, caps.burst, caps.peak), (1_000_000, 3_000, Some(7_000_000)));
        assert_eq!(planned.vms[0].caps, sched.vms[0].caps);
        let frames = file.networks[0].rx_sched().vms[0].caps[0].requests.unwrap();
        assert_eq!((frames.rate, frames.burst, frames.peak), (20_000, 40, None));
        // 2 frames of 200 bytes fit the burst, and the peak does not delay the second.
        assert_eq!((plan.feasible, plan.flows[0].bound), (true, free.flows[0].bound));
        // One of two frames waits for 1/1100 s more.
        let tight = with("traffic.tx = { rate = \"1100/s\" }");
        let held = tight.flows[0].bound.unwrap().0 - free.flows[0].bound.unwrap().0;
        assert!(tight.feasible && held.abs_diff(909_091) <= 1, "{held}");
        let below = with("traffic.tx = { rate = \"999/s\" }");
        assert_eq!((below.flows[0].bound, below.feasible, below.ports[0].reserve), (None, false, None));
        assert!(below.flows[0].unpromised.as_deref().unwrap().contains("traffic limit"), "{below:?}");
        // A burst below a frame would let none go.
        let small = with("traffic.tx = { rate = \"1MB/s\", burst = \"600B\" }");
        let burst = small.config.tx_sched().vms[0].caps[1].bytes.unwrap().burst;
        assert_eq!(burst, small.config.largest_frame());
    }

    #[test]
    fn what_goes_to_a_vm_is_not_promised() {
        let rx = flow("cmd", "rate = \"10/s\"\ntarget = { latency = \"5ms\" }").replace("\"tx\"", "\"rx\"");
        let plan = planned(&[&rx]);
        assert_eq!((plan.flows[0].met, plan.flows[0].bound), (Some(false), None));
        assert!(plan.flows[0].unpromised.is_some());
        let free = planned(&[&flow("a", "rate = \"10/s\"")]);
        assert_eq!((free.flows[0].met, free.feasible, free.ports[0].reserve), (None, true, None));
    }
}
