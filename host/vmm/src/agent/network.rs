//! Addresses of the guest's network cards.

use std::net::IpAddr;

use serde::Deserialize;

use super::GuestAgent;
use crate::VmmError;

/// Largest list of interfaces, in bytes: 600 for each, with its counters.
const INTERFACES_REPLY: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Interface {
    hardware_address: Option<String>,
    #[serde(default)]
    ip_addresses: Vec<Address>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Address {
    ip_address: String,
}

impl GuestAgent {
    /// IP addresses of the guest's interface with this Ethernet address: IPv4 first, without
    /// link-local ones. Empty where there is no such interface.
    ///
    /// # Errors
    /// [`VmmError::Disabled`] where the agent forbids the command; an error of the connection.
    pub fn addresses(&mut self, mac: &str) -> Result<Vec<IpAddr>, VmmError> {
        let all: Vec<Interface> = self.call("guest-network-get-interfaces", None, INTERFACES_REPLY)?;
        Ok(addresses_of(&all, mac))
    }
}

fn addresses_of(all: &[Interface], mac: &str) -> Vec<IpAddr> {
    let own = |i: &&Interface| i.hardware_address.as_deref().is_some_and(|a| a.eq_ignore_ascii_case(mac));
    let texts = all.iter().filter(own).flat_map(|i| &i.ip_addresses);
    let link_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let mut found: Vec<IpAddr> =
        texts.filter_map(|a| a.ip_address.parse().ok()).filter(|a| !link_local(a)).collect();
    // A stable sort: the guest's own order within each kind.
    found.sort_by_key(IpAddr::is_ipv6);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answer of QEMU's agent 7.2, shortened.
    #[test]
    fn the_addresses_of_a_card_are_those_of_its_mac() {
        let text = r#"[{"name": "lo", "ip-addresses": [{"ip-address-type": "ipv4", "ip-address": "127.0.0.1", "prefix": 8}], "hardware-address": "00:00:00:00:00:00"},
            {"name": "eth0", "statistics": {"tx-packets": 4}, "hardware-address": "52:54:00:00:00:0A",
             "ip-addresses": [{"ip-address-type": "ipv6", "ip-address": "fe80::1", "prefix": 64}, {"ip-address-type": "ipv6", "ip-address": "fd00::5", "prefix": 64},
              {"ip-address-type": "ipv4", "ip-address": "10.0.0.5", "prefix": 24}]}, {"name": "tunl0"}]"#;
        let all: Vec<Interface> = serde_json::from_str(text).unwrap();
        let found: Vec<String> =
            addresses_of(&all, "52:54:00:00:00:0a").iter().map(ToString::to_string).collect();
        assert_eq!(found, ["10.0.0.5", "fd00::5"]);
        assert!(addresses_of(&all, "52:54:00:00:00:0b").is_empty());
    }
}
