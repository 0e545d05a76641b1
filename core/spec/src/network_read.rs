//! Reading `[[network]]`, and `[[vm.nic]]` and `[[vm.flow]]` of a VM.

use std::collections::HashMap;

use rtvirtio_units::{Bytes, BytesPerSec, Iops, MAX_INTERFACE_NAME, Mac};
use toml::de::DeTable;

use crate::error::Report;
use crate::field::{Field, Section, any_of, each, quoted, tables};
use crate::limits::{MAX_FLOWS_PER_VM, MAX_NETWORKS, MAX_NICS_PER_VM};
use crate::network::{Direction, Flow, Mark, Network, Nic, Uplink};
use crate::quantity::FrameLength;
use crate::source::Span;
use crate::target;

const KEYS: &[&str] = &["name", "link", "uplink", "interface", "mtu"];
const ALIASES: &[(&str, &str)] = &[
    ("rate", "link"),
    ("bandwidth", "link"),
    ("speed", "link"),
    ("dev", "interface"),
    ("nic", "interface"),
    ("bridge", "tap below each [[vm.nic]]: a tap on your bridge"),
    ("port", "[[vm.nic]] below each [[vm]]"),
];
const NIC_KEYS: &[&str] = &["network", "mac", "tap"];
const NIC_ALIASES: &[(&str, &str)] =
    &[("address", "mac"), ("hwaddr", "mac"), ("interface", "tap"), ("dev", "tap"), ("net", "network")];
const FLOW_KEYS: &[&str] =
    &["name", "network", "direction", "frame", "rate", "burst", "pcp", "dscp", "target"];
const FLOW_ALIASES: &[(&str, &str)] = &[
    ("size", "frame"),
    ("block", "frame"),
    ("length", "frame"),
    ("dir", "direction"),
    ("op", "direction"),
    ("deadline", "target = { latency = ... }"),
    ("latency", "target = { latency = ... }"),
    ("priority", "pcp"),
    ("urgent", "pcp or dscp, which mark urgent frames"),
    ("net", "network"),
    ("nic", "network"),
];
const UPLINKS: &[(&str, bool)] = &[("tap", false), ("packet", true)];
const UPLINK_ALIASES: &[(&str, &str)] = &[
    ("bridge", "uplink = \"tap\", with a tap on your bridge for each VM"),
    ("nic", "uplink = \"packet\" with its interface"),
];
const DIRECTIONS: &[(&str, Direction)] = &[("tx", Direction::Tx), ("rx", Direction::Rx)];
const DIRECTION_ALIASES: &[(&str, &str)] = &[
    ("out", "direction = \"tx\""),
    ("send", "direction = \"tx\""),
    ("in", "direction = \"rx\""),
    ("receive", "direction = \"rx\""),
];
const LINKS: [BytesPerSec; 2] = [BytesPerSec(1e3), BytesPerSec(50e9)];
const MIN_MTU: u32 = 68;
const MAX_MTU: u32 = 9_216;
const DEFAULT_MTU: u32 = 1_500;
/// Length of an Ethernet header.
const MIN_FRAME: Bytes = Bytes(14);
const RATES: [Iops; 2] = [Iops(1.0 / 60.0), Iops(1e8)];
const MAX_BURST: u32 = 65_536;

/// Networks of a file.
pub(crate) struct Networks {
    /// Valid networks, in the file's order.
    pub(crate) all: Vec<Network>,
    /// Whether an invalid one was reported, so that references to it cannot be judged.
    pub(crate) bad: bool,
}

impl Networks {
    fn names(&self) -> String {
        any_of(self.all.iter().filter_map(|n| n.name.as_deref()))
    }
}

/// Addresses and taps of the ports read so far, each with its line.
#[derive(Default)]
pub(crate) struct TakenPorts {
    macs: HashMap<(usize, Mac), usize>,
    taps: HashMap<String, usize>,
}

/// Reads all `[[network]]` tables.
pub(crate) fn read_all(report: &mut Report<'_>, file: &Section<'_, '_>) -> Networks {
    let mut networks = Networks { all: Vec::new(), bad: false };
    let Some(tables) = optional_tables(report, file, "network", "[[network]]") else {
        return Networks { bad: true, ..networks };
    };
    let many = tables.len();
    let (mut names, mut interfaces) = (HashMap::new(), HashMap::new());
    for (i, (table, span)) in tables.into_iter().enumerate() {
        if i >= MAX_NETWORKS {
            report.add(span, format!("a spec has at most {MAX_NETWORKS} networks"), "write two specs");
            return Networks { bad: true, ..networks };
        }
        let section = Section::open(report, "[[network]]", table, span, KEYS, ALIASES);
        let network = network(report, &section, many);
        let distinct = unique(report, &section, "name", &mut names, "a network")
            & unique(report, &section, "interface", &mut interfaces, "a network");
        match network {
            Some(network) if distinct => networks.all.push(network),
            _ => networks.bad = true,
        }
    }
    networks
}

/// Tables under `key`, possibly none; `None` when an error was reported.
pub(crate) fn optional_tables<'t, 'i>(
    report: &mut Report<'_>,
    section: &Section<'t, 'i>,
    key: &str,
    header: &str,
) -> Option<Vec<(&'t DeTable<'i>, Span)>> {
    if section.place(key).is_none() {
        return (!section.meant(key) && !section.meant(header)).then(Vec::new);
    }
    tables(report, section, key, header)
}

/// Whether no earlier table has this text under `key`; otherwise reported.
pub(crate) fn unique(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    key: &str,
    lines: &mut HashMap<String, usize>,
    what: &str,
) -> bool {
    let Some(text) = section.get(key).and_then(|(_, value)| value.as_str()) else { return true };
    let message = format!("there is already {what} with {key} {}", quoted(text));
    section.first_use(report, key, (lines, text.to_owned()), message, "")
}

fn network(report: &mut Report<'_>, section: &Section<'_, '_>, many: usize) -> Option<Network> {
    let name = match section.place("name") {
        None if many == 1 => Some(None),
        _ => section.name(report, "\"field\"").into_value().map(|name| Some(name.to_owned())),
    };
    let link = section.ranged(report, "link", LINKS, "write a value from 8kbit/s to 400Gbit/s");
    let link = section.required(report, "link", "\"100Mbit/s\", the rate that the VMs share", link);
    let packet = section.word(report, "uplink", UPLINKS, UPLINK_ALIASES).or(false);
    let interface = interface(report, section, "interface", "\"eth1\"");
    let mtu = section.integer(report, "mtu", MIN_MTU, MAX_MTU).or(DEFAULT_MTU);
    let uplink = match (packet?, interface) {
        (false, Field::Absent) => Uplink::Tap,
        (true, Field::Given(interface)) => Uplink::Packet { interface },
        (false, Field::Given(_)) => {
            let help = "add uplink = \"packet\", or name a `tap` in each [[vm.nic]] instead";
            report.add(section.value_span("interface"), "`interface` belongs to uplink \"packet\"", help);
            return None;
        }
        (true, Field::Absent) => {
            let help = "add interface = \"eth1\", one that nothing else uses";
            report.add(section.value_span("uplink"), "uplink \"packet\" has no `interface`", help);
            return None;
        }
        (_, Field::Bad) => return None,
    };
    Some(Network { name: name?, uplink, link: link.into_value()?, mtu: mtu? })
}

/// Reads the name of a network interface.
fn interface(report: &mut Report<'_>, section: &Section<'_, '_>, key: &str, example: &str) -> Field<String> {
    section.string(report, key, example).and_then(|text| {
        // Same characters as refused by the kernel's `dev_valid_name`.
        let odd = |c: char| c.is_whitespace() || c.is_control() || c == '/' || c == ':';
        if text.is_empty()
            || text.len() > MAX_INTERFACE_NAME
            || text.contains(odd)
            || text == "."
            || text == ".."
        {
            let message = format!("`{key}` is {}, no name of an interface", quoted(text));
            let help = format!(
                "write 1 to {MAX_INTERFACE_NAME} characters as `ip link` shows them, such as {example}"
            );
            report.add(section.value_span(key), message, help);
            return Field::Bad;
        }
        Field::Given(text.to_owned())
    })
}

/// Reads `[[vm.nic]]` and `[[vm.flow]]` of a VM; `None` when an error was reported.
pub(crate) fn of_vm(
    report: &mut Report<'_>,
    vm: &Section<'_, '_>,
    networks: &Networks,
    taken: &mut TakenPorts,
) -> Option<(Vec<Nic>, Vec<Flow>)> {
    let nics = nics(report, vm, networks, taken);
    let tables = optional_tables(report, vm, "flow", "[[vm.flow]]")?;
    let mut names = task_names(vm, report);
    let of = ("a VM", "flows", "merge flows of one kind, or spread them over VMs");
    let flows = each(report, tables, MAX_FLOWS_PER_VM, of, |report, table, span| {
        let section = Section::open(report, "[[vm.flow]]", table, span, FLOW_KEYS, FLOW_ALIASES);
        let distinct = unique(report, &section, "name", &mut names, "a task or flow of this VM");
        flow(report, &section, nics.as_deref(), networks).filter(|_| distinct)
    });
    nics.zip(flows)
}

/// Names of a VM's tasks, with their lines: plans and results list flows together with tasks.
fn task_names(vm: &Section<'_, '_>, report: &Report<'_>) -> HashMap<String, usize> {
    let tasks = vm.get("task").and_then(|(_, value)| value.as_array());
    let tables =
        tasks.into_iter().flat_map(|tasks| tasks.iter()).filter_map(|task| task.get_ref().as_table());
    let named = tables.filter_map(|task| {
        let name = task.get("name")?;
        Some((name.get_ref().as_str()?.to_owned(), report.line(name.span().start)))
    });
    named.collect()
}

fn nics(
    report: &mut Report<'_>,
    vm: &Section<'_, '_>,
    networks: &Networks,
    taken: &mut TakenPorts,
) -> Option<Vec<Nic>> {
    let mut nics: Vec<Nic> = Vec::new();
    let mut good = true;
    for (i, (table, span)) in optional_tables(report, vm, "nic", "[[vm.nic]]")?.into_iter().enumerate() {
        if i >= MAX_NICS_PER_VM {
            report.add(
                span,
                format!("a VM has at most {MAX_NICS_PER_VM} ports"),
                "name those that flows use",
            );
            return None;
        }
        let section = Section::open(report, "[[vm.nic]]", table, span, NIC_KEYS, NIC_ALIASES);
        match nic(report, &section, networks, taken) {
            Some(nic) if nics.iter().any(|other| other.network == nic.network) => {
                let message = "this VM already has a port on this network";
                report.add(section.span.clone(), message, "a VM has one port on a network; remove this one");
                good = false;
            }
            Some(nic) => nics.push(nic),
            None => good = false,
        }
    }
    good.then_some(nics)
}

fn nic(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    networks: &Networks,
    taken: &mut TakenPorts,
) -> Option<Nic> {
    let network = network_of(report, section, networks, None);
    let mac = mac(report, section);
    let tap = interface(report, section, "tap", "\"plc0\"");
    let (network, mac) = (network?, mac?);
    let message = format!("another port has the address {mac} too");
    if !section.first_use(report, "mac", (&mut taken.macs, (network, mac)), message, "") {
        return None;
    }
    let on_tap = networks.all.get(network).is_some_and(|n| n.uplink == Uplink::Tap);
    match (on_tap, tap) {
        (true, Field::Absent) => {
            let message = "this port has no `tap`, and its network has one for each port";
            let help = "add tap = \"plc0\": `ip tuntap add plc0 mode tap`, and put it on your bridge";
            report.add(section.span.clone(), message, help);
            None
        }
        (false, Field::Given(_)) => {
            let message = "`tap` belongs to uplink \"tap\", and this network has an interface";
            report.add(section.value_span("tap"), message, "remove this line");
            None
        }
        (_, Field::Bad) => None,
        (false, Field::Absent) => Some(Nic { network, mac, tap: None }),
        (true, Field::Given(tap)) => {
            let message = format!("another port has the tap {} too", quoted(&tap));
            let unique = section.first_use(report, "tap", (&mut taken.taps, tap.clone()), message, "");
            unique.then_some(Nic { network, mac, tap: Some(tap) })
        }
    }
}

fn mac(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Mac> {
    const EXAMPLE: &str = "\"52:54:00:12:34:56\"";
    let text = section.string(report, "mac", EXAMPLE);
    let text = section.required(report, "mac", EXAMPLE, text).into_value()?;
    let problem = match text.parse::<Mac>() {
        Ok(mac) if mac.is_group() => "is the address of a group",
        Ok(mac) => return Some(mac),
        Err(_) => "is no Ethernet address",
    };
    let message = format!("`mac`: {} {problem}", quoted(text));
    report.add(section.value_span("mac"), message, format!("write the VM's own, such as {EXAMPLE}"));
    None
}

/// Index of the network named by `network`, or of the only one; `nics` limits the choice to
/// networks of a VM.
fn network_of(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    networks: &Networks,
    nics: Option<&[Nic]>,
) -> Option<usize> {
    let names = networks.names();
    let example = if names.is_empty() { "\"field\"" } else { &names };
    match section.string(report, "network", example) {
        Field::Bad => None,
        Field::Absent => {
            let of_vm = nics.map(|nics| nics.iter().map(|n| n.network).collect::<Vec<_>>());
            let choice = of_vm.unwrap_or_else(|| (0..networks.all.len()).collect());
            let (message, help) = match choice.as_slice() {
                [one] => return Some(*one),
                _ if networks.bad => return None,
                [] if nics.is_some() => (
                    "this VM has no port, so nothing flows",
                    "add below the VM: [[vm.nic]] with mac = \"52:54:00:12:34:56\", and its tap".to_owned(),
                ),
                [] => ("the spec has no [[network]]", "add [[network]] with link = \"100Mbit/s\"".to_owned()),
                _ => ("there are several networks, and this names none", format!("add network = {names}")),
            };
            report.add(section.span.clone(), message, help);
            None
        }
        Field::Given(name) => {
            let found = networks.all.iter().position(|n| n.name.as_deref() == Some(name));
            if found.is_none() && !networks.bad {
                let help = if names.is_empty() {
                    format!("add [[network]] with name = {}", quoted(name))
                } else {
                    format!("write {names}")
                };
                let message = format!("there is no network {}", quoted(name));
                report.add(section.value_span("network"), message, help);
            }
            found
        }
    }
}

/// `nics` is `None` where an error in them was reported: the other keys are checked even so.
fn flow(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    nics: Option<&[Nic]>,
    networks: &Networks,
) -> Option<Flow> {
    let name = section.name(report, "\"control\"");
    let network = nics.and_then(|nics| network_of(report, section, networks, Some(nics)));
    let nic = network.zip(nics).and_then(|(network, nics)| {
        let found = nics.iter().position(|nic| nic.network == network);
        if found.is_none() {
            let help = "add [[vm.nic]] with this network, and the VM's mac on it";
            report.add(section.value_span("network"), "this VM has no port on this network", help);
        }
        found
    });
    let direction = section.word(report, "direction", DIRECTIONS, DIRECTION_ALIASES);
    let example = "\"tx\" for what the VM sends, \"rx\" for what it gets";
    let direction = section.required(report, "direction", example, direction);
    let largest = network.and_then(|n| networks.all.get(n)).map_or(Bytes(u64::MAX), Network::largest_frame);
    let help = format!("write a value from {MIN_FRAME} to {}B, the network's largest frame", largest.0);
    let frame = section.ranged(report, "frame", [FrameLength(MIN_FRAME), FrameLength(largest)], help);
    let frame = section.required(report, "frame", "\"200B\"", frame);
    let rate = section.ranged(report, "rate", RATES, "write a value from 1/min to 100000000/s");
    let rate = section.required(report, "rate", "\"1000/s\"", rate);
    let burst = section.integer(report, "burst", 1, MAX_BURST).or(1);
    let mark = mark(report, section, direction.given());
    let targets = target::read_all(report, section);
    Some(Flow {
        name: name.into_value()?.to_owned(),
        nic: nic?,
        direction: direction.into_value()?,
        frame: frame.into_value()?.0,
        rate: rate.into_value()?,
        burst: burst?,
        mark: mark?,
        target: targets?.first().copied(),
    })
}

/// Reads `pcp` or `dscp`; `None` when an error was reported.
fn mark(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    direction: Option<&Direction>,
) -> Option<Option<Mark>> {
    let pcp = section.integer(report, "pcp", 0, 7).optional();
    let dscp = section.integer(report, "dscp", 0, 63).optional();
    let (pcp, dscp) = (pcp?, dscp?);
    let (message, help) = match (pcp, dscp, direction) {
        (None, None, _) => return Some(None),
        (Some(_), Some(_), _) => ("`pcp` and `dscp` both mark the frames", "keep one of them"),
        (_, _, Some(Direction::Rx)) => {
            ("marks order what a VM sends, and this flow goes to it", "remove this line")
        }
        _ => {
            // Both values are below 64.
            let small = |n: u32| u8::try_from(n).unwrap_or(u8::MAX);
            return Some(pcp.map(|n| Mark::Pcp(small(n))).or(dscp.map(|n| Mark::Dscp(small(n)))));
        }
    };
    let key = if dscp.is_some() { "dscp" } else { "pcp" };
    report.add(section.value_span(key), message, help);
    None
}
