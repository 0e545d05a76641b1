//! `rtvirtio iod status` as a table.

use std::fmt::{Display, Write as _};

use rtvirtio_domain_protocol::status::{
    DeviceStatus, DiskStatus, NetworkStatus, PortStatus, Refusal, Regulators, Service, Status,
};
use rtvirtio_report::terminal;
use rtvirtio_units::{Bytes, Nanos};

/// Meaning of the columns of disks.
const LEGEND: &str = "\
promised: longest time of a request within share and burst of its reservation, if device and host are as the
  configuration declares them; worst and missed: the longest such request, and those that took longer
p50 ... longest: from the guest's queue to the answer, of all requests, also beyond a reservation
alpha: rate while the VM had something to ask; Delta: longest time between two pieces meanwhile (bounded delay)
waited: time in which a VM had requests in its queue; for: of it, that in which pieces of the other VM were at the
  device, of several at once each. The rest was for its own pieces, a cap or pacing
capped: pieces that waited for a cap of the VM; held by regulators: the same for all VMs of a device, and how much
  later than their exact moment they went
";

/// Meaning of the columns of ports.
const PORT_LEGEND: &str = "\
promised: longest time from when rate and burst of its reservation cover a frame until it is sent; bound: what
  is computed for the worst case; worst and missed: the longest such frame, and those that took longer
p50 ... longest: out, from the guest's queue to the uplink; in, from the uplink to the guest's memory
capped: frames that waited for a cap of the VM. Of a flood to a VM the kernel drops the rest, which is not seen here
";

/// Indentation of a line about a disk or port.
const INDENT: &str = "                 ";

/// Status as a table, with its legend.
pub fn status(status: &Status) -> String {
    let mut s = String::new();
    if status.networks.is_empty() || !status.devices.is_empty() {
        disks(status, &mut s);
    }
    if !status.networks.is_empty() {
        networks(status, &mut s);
    }
    s
}

/// A number of the status; one that the domain's process does not have is unknown, not 0.
pub fn known(value: Option<impl Display>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

fn time(ns: Option<u64>) -> String {
    known(ns.map(Nanos))
}

fn name(name: &str) -> String {
    terminal(name, false)
}

/// A line about a counter that is 0 where all is well.
fn unless_zero(count: Option<u64>, line: impl FnOnce(&str) -> String, s: &mut String) {
    if count != Some(0) {
        let _ = writeln!(s, "{INDENT}{}", line(&known(count)));
    }
}

fn disks(status: &Status, s: &mut String) {
    status.devices.iter().for_each(|d| device(d, s));
    promises(status, s);
    let _ = writeln!(
        s,
        "{:<16} {:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
        "VM", "", "requests", "moved", "p50", "p99", "p99.99", "longest", "alpha", "Delta", "capped"
    );
    status.vms.iter().for_each(|v| disk(v, s));
    waits(status, s);
    s.push_str(LEGEND);
}

fn bit_rate(bytes_per_second: f64) -> String {
    format!("{:.1}Mbit/s", bytes_per_second * 8.0 / 1e6)
}

/// Counts of requests or frames that regulators delayed, behind the line of a device or network.
fn held(regulators: &Regulators, what: &str, s: &mut String) {
    if regulators.held != Some(0) {
        let (held, late) = (known(regulators.held), time(regulators.late_p9999_ns));
        let _ = write!(s, ", {held} {what} held by regulators, p99.99 {late} late");
    }
}

fn network(n: &NetworkStatus, s: &mut String) {
    let link = n.link_bytes_per_second;
    let link = link.map_or_else(|| "no rate declared: frames go at once".to_owned(), bit_rate);
    let _ = write!(s, "network {}: {link}", name(&n.name));
    held(&n.regulators, "frames", s);
    s.push('\n');
}

fn networks(status: &Status, s: &mut String) {
    status.networks.iter().for_each(|n| network(n, s));
    if status.ports.iter().any(|port| !port.promises.is_empty()) {
        let _ = writeln!(
            s,
            "{:<16} {:<7} {:>12} {:>9} {:>9} {:>9} {:>9} {:>7} {:>10}",
            "VM", "", "rate", "burst", "promised", "bound", "worst", "missed", "frames"
        );
        status.ports.iter().for_each(|port| link_promises(port, s));
    }
    let _ = writeln!(
        s,
        "{:<16} {:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
        "VM", "", "frames", "moved", "p50", "p99", "p99.99", "longest", "alpha", "Delta", "capped"
    );
    status.ports.iter().for_each(|p| port(p, s));
    s.push_str(PORT_LEGEND);
}

/// The longest request or frame and those that were late. Where none was seen, none was kept and
/// none missed.
fn outcome(seen: Option<u64>, worst_ns: Option<u64>, missed: Option<u64>) -> [String; 2] {
    if seen == Some(0) { ["-", "-"].map(str::to_owned) } else { [time(worst_ns), known(missed)] }
}

fn link_promises(port: &PortStatus, s: &mut String) {
    for p in &port.promises {
        let [worst, missed] = outcome(p.frames, p.worst_ns, p.missed);
        let bound = p.bound_ns.map_or_else(|| "none".to_owned(), |ns| Nanos(ns).to_string());
        let _ = writeln!(
            s,
            "{:<16} {:<7} {:>12} {:>9} {:>9} {bound:>9} {worst:>9} {missed:>7} {:>10}",
            name(&port.name),
            p.key,
            known(p.bytes_per_second.map(bit_rate)),
            known(p.burst.map(|burst| format!("{burst}B"))),
            time(p.deadline_ns),
            known(p.frames),
        );
    }
}

fn port(port: &PortStatus, s: &mut String) {
    let directions = [("out", port.tx.frames, &port.tx.service), ("in", port.rx.frames, &port.rx.service)];
    service(&port.name, directions, s);
    let drops = port.drops.iter().filter(|(_, count)| **count > 0);
    let drops: Vec<String> =
        drops.map(|(reason, count)| format!("{} {count}", name(&reason.replace('_', " ")))).collect();
    if !drops.is_empty() {
        let _ = writeln!(s, "{INDENT}dropped: {}", drops.join(", "));
    }
    if let Some(throttled @ 1..) = port.throttled {
        let waited = time(port.throttled_ns);
        let _ = writeln!(
            s,
            "{INDENT}used up its part of cpu_budget {throttled} times, and waited for {waited} in all"
        );
    }
    let backoffs = |n: &str| {
        format!("waited {n} times for up to 1ms: its kicks announced no frames, or its frames were refused")
    };
    unless_zero(port.backoffs, backoffs, s);
    let notes = Notes {
        attached: port.attached,
        trusted: port.trusted,
        connected: port.connected,
        refused: port.refused.as_ref(),
        broken: port.broken,
    };
    notes.write("the network", s);
}

fn device(d: &DeviceStatus, s: &mut String) {
    // Writing to a String cannot fail.
    let _ = write!(s, "device {}: window {}", name(&d.name), known(d.window));
    held(&d.regulators, "pieces", s);
    if d.policy != "edf" {
        let _ = write!(s, "; policy {}: reservations have no effect", name(&d.policy));
    }
    s.push('\n');
    if d.discard_pieces != Some(0) {
        let _ = writeln!(
            s,
            "  discards: {} pieces, the longest took {}; {} took longer than `cost.discard`",
            known(d.discard_pieces),
            time(d.discard_longest_ns),
            known(d.discard_overruns),
        );
    }
}

/// Table of promises, printed first.
fn promises(status: &Status, s: &mut String) {
    if status.vms.iter().all(|vm| vm.promises.is_empty()) {
        return;
    }
    let _ = writeln!(
        s,
        "{:<16} {:<7} {:>6} {:>9} {:>9} {:>9} {:>7} {:>10}",
        "VM", "", "share", "burst", "promised", "worst", "missed", "requests"
    );
    for vm in &status.vms {
        for p in &vm.promises {
            let [worst, missed] = outcome(p.requests, p.worst_ns, p.missed);
            let _ = writeln!(
                s,
                "{:<16} {:<7} {:>6} {:>9} {:>9} {worst:>9} {missed:>7} {:>10}",
                name(&vm.name),
                p.key,
                known(p.share.map(percent)),
                time(p.burst_ns),
                time(p.deadline_ns),
                known(p.requests),
            );
        }
    }
}

/// Table of the VMs that each VM has waited for, the longest wait first.
fn waits(status: &Status, s: &mut String) {
    let waited = status.vms.iter().filter_map(|vm| Some((&vm.name, vm.waits.as_ref()?)));
    let waited: Vec<_> = waited.filter(|(_, waits)| waits.queued_ns > 0).collect();
    if waited.is_empty() {
        return;
    }
    let _ = writeln!(s, "{:<16} {:>9} for", "VM", "waited");
    for (vm, waits) in waited {
        let mut all: Vec<_> = waits.neighbours.iter().collect();
        all.sort_by_key(|n| std::cmp::Reverse(n.ns));
        let all: Vec<String> = all.iter().map(|n| format!("{} {}", name(&n.name), Nanos(n.ns))).collect();
        let all = if all.is_empty() { "no other VM".to_owned() } else { all.join(", ") };
        let _ = writeln!(s, "{:<16} {:>9} {all}", name(vm), Nanos(waits.queued_ns).to_string());
    }
}

fn disk(vm: &DiskStatus, s: &mut String) {
    let (read, write) = (&vm.read, &vm.write);
    let directions = [("read", read.requests, &read.service), ("write", write.requests, &write.service)];
    service(&vm.name, directions, s);
    let notes = Notes {
        attached: vm.attached,
        trusted: vm.trusted,
        connected: vm.connected,
        refused: vm.refused.as_ref(),
        broken: vm.broken,
    };
    notes.write("the disk", s);
    let why = vm.last_error.as_ref().map(|why| format!(" (last: {})", terminal(why, false)));
    unless_zero(vm.errors, |n| format!("errors: {n}{}", why.unwrap_or_default()), s);
    unless_zero(
        vm.waiting_for_room,
        |n| format!("{n} writes wait for room on the host's file system: make some, and they go on"),
        s,
    );
    unless_zero(vm.malformed, |n| format!("malformed: {n}"), s);
    for (reason, n) in vm.refused_requests.iter().filter(|(_, n)| **n > 0) {
        let known = REFUSED.iter().find(|(key, _)| key == reason).map(|(_, what)| (*what).to_owned());
        let what = known.unwrap_or_else(|| format!("({})", name(&reason.replace('_', " "))));
        let _ = writeln!(s, "{INDENT}refused: {n} requests {what}");
    }
}

/// Reasons for which a disk refuses requests, with remedies.
const REFUSED: [(&str, &str); 5] = [
    (
        "outside_memory",
        "outside of the memory that QEMU has shared: memory-backend-memfd with share=on for all of its memory, also what is added later",
    ),
    ("outside_disk", "beyond the end of the disk"),
    ("read_only", "that write to a disk that is read-only"),
    ("unsupported", "of a kind that the disk does not offer"),
    ("invalid", "that contradict themselves"),
];

/// Size in whole MiB, or in KiB where it is smaller.
fn moved(bytes: u64) -> Bytes {
    let unit = [20, 10].into_iter().find(|unit| bytes >> unit > 0).unwrap_or(0);
    Bytes(bytes >> unit << unit)
}

/// Both directions of a disk or port: the title of each, and its requests or frames.
fn service(vm: &str, directions: [(&str, Option<u64>, &Service); 2], s: &mut String) {
    for (i, (title, counted, f)) in directions.into_iter().enumerate() {
        let vm = if i == 0 { name(vm) } else { String::new() };
        let _ = writeln!(
            s,
            "{vm:<16} {title:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
            known(counted),
            known(f.bytes.map(moved)),
            time(f.p50_ns),
            time(f.p99_ns),
            time(f.p9999_ns),
            time(f.max_ns),
            known(f.alpha_bytes_per_second.map(|alpha| format!("{:.1}MB/s", alpha / 1e6))),
            time(f.delta_ns),
            known(f.cap_hits),
        );
    }
}

/// Whether a guest is there, and what was refused.
struct Notes<'a> {
    attached: bool,
    trusted: Option<bool>,
    connected: bool,
    refused: Option<&'a Refusal>,
    broken: Option<u64>,
}

impl Notes<'_> {
    fn write(&self, device: &str, s: &mut String) {
        if !self.attached {
            let state = if self.connected {
                format!("a QEMU is connected, and its guest does not use {device} (yet)")
            } else {
                "no guest is attached".to_owned()
            };
            let _ = writeln!(s, "{INDENT}{state}");
        }
        if self.trusted == Some(true) {
            let _ = writeln!(s, "{INDENT}its front end is trusted with its memory (trust = true)");
        }
        if let Some(Refusal { why, seconds_ago, count }) = self.refused {
            let ago = Nanos(seconds_ago.saturating_mul(1_000_000_000));
            let why = terminal(why, false);
            let _ = writeln!(s, "{INDENT}the last refusal, {ago} ago ({count} in all): {why}");
        }
        unless_zero(self.broken, |n| format!("broken: {n}"), s);
    }
}

/// Percent of a share; small ones with as many digits as show that they are not 0.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        p if p >= 9.95 || p == 0.0 => format!("{p:.0}%"),
        p if p >= 0.095 => format!("{p:.1}%"),
        p if p >= 0.01 => format!("{p:.2}%"),
        _ => "<0.01%".to_owned(),
    }
}

#[cfg(test)]
mod tests;
