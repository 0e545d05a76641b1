//! Planned networks as part of the I/O domain's configuration file.

use std::fmt::Write as _;

use rtvirtio_domain_config::{RateConfig, UplinkKind};

use crate::network::{NetworkPlan, PortPlan};
use crate::toml_text::{format_exact, one_line, toml_string};

/// `[[network]]` with its ports, and reasons as comments.
#[must_use]
pub fn network_text(plan: &NetworkPlan) -> String {
    let (mut s, config) = (String::new(), &plan.config);
    // Writing to a String cannot fail.
    let _ = writeln!(s, "\n[[network]]\nname = {}", toml_string(&config.name));
    if let (UplinkKind::Packet, Some(interface)) = (config.uplink, &config.interface) {
        let _ = writeln!(s, "uplink = \"packet\"\ninterface = {}", toml_string(interface));
    }
    let _ = writeln!(
        s,
        "# {} of the link are reserved.\nlink = \"{}B/s\"\nmtu = {}\npolicy = \"edf\"\nstall = \"{}\"",
        plan.reserved,
        plan.link.0,
        config.mtu,
        format_exact(config.stall.0)
    );
    for (planned, port) in plan.ports.iter().zip(&config.ports) {
        s.push('\n');
        comments(&mut s, plan, planned);
        let _ = writeln!(
            s,
            "[[network.port]]\nname = {}\nsocket = {}\nmac = \"{}\"",
            toml_string(&port.name),
            toml_string(&port.socket.display().to_string()),
            port.mac
        );
        if let Some(group) = &port.socket_group {
            let _ = writeln!(s, "socket_group = {}", toml_string(group));
        }
        if let Some(tap) = &port.tap {
            let _ = writeln!(s, "tap = {}", toml_string(tap));
        }
        for (key, marks) in [("urgent_pcp", &port.urgent_pcp), ("urgent_dscp", &port.urgent_dscp)] {
            if !marks.is_empty() {
                let _ = writeln!(s, "{key} = {marks:?}");
            }
        }
        for line in &planned.caps {
            let _ = writeln!(s, "{line}");
        }
        for (key, reserve) in [("urgent", port.urgent), ("reserve", port.reserve)] {
            if let Some(RateConfig { rate, burst, deadline }) = reserve {
                let _ = writeln!(
                    s,
                    "{key} = {{ rate = \"{}B/s\", burst = \"{}B\", deadline = \"{}\" }}",
                    rate.0,
                    burst.0,
                    format_exact(deadline.0)
                );
            }
        }
    }
    s
}

fn comments(s: &mut String, plan: &NetworkPlan, port: &PortPlan) {
    for flow in plan.flows.iter().filter(|flow| flow.vm == port.vm) {
        let Some(target) = flow.target else { continue };
        let _ = match (&flow.bound, &flow.unpromised) {
            (Some(bound), _) => writeln!(
                s,
                "# {}: no frame within rate and burst leaves later than {bound}; the target is {}.",
                flow.flow, target.latency
            ),
            (None, Some(why)) => writeln!(s, "# {}: NO PROMISE: {}.", flow.flow, one_line(why)),
            (None, None) => writeln!(s, "# {}: NO PROMISE.", flow.flow),
        };
    }
    for why in &port.refused_caps {
        let _ = writeln!(s, "# NO CAP: {}.", one_line(why));
    }
    if let Some(why) = &port.refused {
        let of = if port.urgent.is_some() { "unmarked frames" } else { "its frames" };
        let _ = writeln!(s, "# NO RESERVATION of {of}: {}.", one_line(why));
    }
    if port.reserve.is_some() {
        s.push_str(
            "# What the spec does not name, such as ARP, uses the reservation of unmarked frames too.\n",
        );
    }
}
