//! A planned network without the I/O domain: the kernel's HTB on the interface behind the bridge.
//!
//! tc-htb(8): a class gets its rate, and what is left goes to the classes with the lowest `prio`
//! first. HTB knows no deadlines and no admission: what it keeps is a rate over milliseconds.

use std::fmt::Write as _;

use rtvirtio_capacity::LinkReserve;
use rtvirtio_domain_config::LINK_SHARE;

use crate::network::NetworkPlan;
use crate::toml_text::one_line;

/// The class of frames that match no filter.
const DEFAULT_CLASS: u32 = 0xfff;
/// Rate of a class without a reservation, in bits per second: the class borrows the rest.
const LEAST_RATE: f64 = 64_000.0;
/// HTB's `quantum` for borrowed rate, in bytes: one large frame.
const QUANTUM: u32 = 1_600;

/// Commands that make a network's reservations HTB classes of `interface`, the bridge's uplink, as
/// a shell script. It replaces the interface's root qdisc; its last lines say how to go back.
#[must_use]
pub fn tc_script(plan: &NetworkPlan, interface: &str) -> String {
    let link = plan.link.0 * 8.0 * LINK_SHARE;
    let mut s = format!(
        "#!/bin/sh\n\
         # Network {}: HTB on {interface}, for frames from the VMs. It keeps rates, not deadlines: a hint for\n\
         # targets. `rtvirtio plan SPEC --domain` keeps them. Frames of one VM are known by its MAC address.\n\
         # Back to the interface's own queue: tc qdisc del dev {interface} root\n\
         # It needs the kernel's sch_htb and cls_u32, and for marks in VLAN tags cls_flower. Where a command fails, nothing of it stays.\n",
        plan.network
    );
    // Writing to a String cannot fail.
    for (name, why) in plan.unpromised() {
        let _ = writeln!(s, "# {name}: NO RATE OF ITS OWN: {}", one_line(why));
    }
    let _ = write!(
        s,
        "set -e\n\
         trap 'code=$?; [ $code -eq 0 ] || tc qdisc del dev {interface} root; exit $code' EXIT\n\
         tc qdisc del dev {interface} root 2>/dev/null || true\n\
         tc qdisc add dev {interface} root handle 1: htb default {DEFAULT_CLASS:x}\n"
    );
    let mut class = |parent: &str, id: u32, rate: f64, prio: u32, burst: u64| {
        let _ = writeln!(
            s,
            "tc class add dev {interface} parent {parent} classid 1:{id:x} htb rate {rate:.0}bit ceil {link:.0}bit burst {burst}b cburst {burst}b prio {prio} quantum {QUANTUM}",
        );
    };
    let largest = plan.config.largest_frame();
    class("1:", 1, link, 0, largest);
    let mut filters = String::new();
    for (i, (port, config)) in plan.ports.iter().zip(&plan.config.ports).enumerate() {
        // Two classes for each port; 256 VMs with 8 ports each fit into 16 bits.
        let id = 0x10 + 2 * i as u32;
        let mut reserved = |id: u32, reserve: Option<LinkReserve>, prio: u32| match reserve {
            Some(r) => class("1:1", id, r.rate.0 * 8.0, prio, r.burst.0),
            None => class("1:1", id, LEAST_RATE, prio, largest),
        };
        let (mac, urgent) = (config.mac, id + 1);
        if port.urgent.is_some() {
            reserved(urgent, port.urgent, 0);
            let mut mark = |protocol: &str, pref: u32, of: String| {
                let _ = writeln!(
                    filters,
                    "tc filter add dev {interface} parent 1: protocol {protocol} pref {pref} {of} classid 1:{urgent:x}"
                );
            };
            for pcp in &config.urgent_pcp {
                mark("802.1Q", 1, format!("flower src_mac {mac} vlan_prio {pcp}"));
            }
            for dscp in &config.urgent_dscp {
                let of = format!("u32 match ether src {mac} match ip dsfield {:#04x} 0xfc", dscp << 2);
                mark("ip", 2, of);
            }
        }
        reserved(id, port.reserve, if port.reserve.is_some() { 1 } else { 2 });
        let _ = writeln!(
            filters,
            "tc filter add dev {interface} parent 1: protocol all pref 9 u32 match ether src {mac} classid 1:{id:x}"
        );
    }
    class("1:1", DEFAULT_CLASS, LEAST_RATE, 2, largest);
    s + &filters
}
