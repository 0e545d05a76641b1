//! Differences of a new configuration from the running one: disks and ports that are attached and
//! detached, keys that are live, and keys that need a restart.

mod network;

use rtvirtio_domain_config::{Device, Disk, File};

use self::network::networks_need_restart;
pub(crate) use self::network::{network_changes, port_changes};

/// Disks and ports to attach and detach: index of the device or network, and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// Disks to open, serve and lock.
    pub attach: Vec<(usize, String)>,
    /// Disks whose service ends.
    pub detach: Vec<(usize, String)>,
    /// Ports to open and serve.
    pub attach_ports: Vec<(usize, String)>,
    /// Ports whose service ends.
    pub detach_ports: Vec<(usize, String)>,
}

impl Membership {
    /// The difference of two configurations with the same devices and networks.
    #[must_use]
    pub fn between(old: &File, new: &File) -> Self {
        let disks = |file: &File| -> Vec<Vec<String>> {
            file.devices.iter().map(|d| d.disks.iter().map(|disk| disk.name.clone()).collect()).collect()
        };
        let ports = |file: &File| -> Vec<Vec<String>> {
            file.networks.iter().map(|n| n.ports.iter().map(|port| port.name.clone()).collect()).collect()
        };
        Self {
            attach: missing(&disks(old), &disks(new)),
            detach: missing(&disks(new), &disks(old)),
            attach_ports: missing(&ports(old), &ports(new)),
            detach_ports: missing(&ports(new), &ports(old)),
        }
    }
}

/// Names that `of` has and `from` has not, list by list.
fn missing(from: &[Vec<String>], of: &[Vec<String>]) -> Vec<(usize, String)> {
    let lists = of.iter().zip(from).enumerate();
    let new = lists.flat_map(|(i, (of, from))| {
        of.iter().filter(|name| !from.contains(name)).map(move |name| (i, name.clone()))
    });
    new.collect()
}

/// Names the fields in which two values differ.
macro_rules! push_differences {
    ($list:expr, $place:expr, $old:expr, $new:expr, $($field:ident),+ $(,)?) => {
        $(if $old.$field != $new.$field { $list.push(format!("{}{}", $place, stringify!($field))); })+
    };
}
use push_differences;

pub(crate) fn device_changes(old: &Device, new: &Device, list: &mut Vec<String>) {
    let place = format!("device \"{}\": ", new.name);
    push_differences!(list, place, old, new, policy, window, aging, poll, parallel, stall, discard_share);
}

pub(crate) fn disk_changes(old: &Disk, new: &Disk, list: &mut Vec<String>) {
    let place = format!("disk \"{}\": ", new.name);
    push_differences!(list, place, old, new, weight, reserve, urgent, read_cap, write_cap, guest_priority);
}

/// The changes that need a restart, each with its place. A device is compared with the start, which
/// determines table sizes, a disk with the configuration in force.
pub(crate) fn needs_restart(started: &File, current: &File, new: &File) -> Vec<String> {
    let old = started;
    let mut list = Vec::new();
    let File { control: _, control_group: _, sandbox: _, power: _, devices: _, networks: _ } = new;
    push_differences!(list, "", old, new, control, control_group, sandbox, power);
    list.extend(networks_need_restart(old, current, new));
    if !same_names(&old.devices, &new.devices, |d| &d.name) {
        list.push("another list of devices".into());
        return list;
    }
    for (old, new) in old.devices.iter().zip(&new.devices) {
        let place = format!("device \"{}\": ", new.name);
        // All fields by name: a new one must be classified.
        let Device {
            name: _,
            quantum: _,
            cost: _,
            cpus: _,
            fifo: _,
            pass_priority: _,
            disks: _,
            // Live.
            policy: _,
            window: _,
            aging: _,
            poll: _,
            parallel: _,
            stall: _,
            discard_share: _,
        } = new;
        push_differences!(list, place, old, new, quantum, cost, cpus, fifo, pass_priority);
        let most = |d: &Device| d.sched().window.most.max(d.sched().window.start);
        if most(new) > most(old) {
            list.push(format!("{place}a window of more than {}", most(old)));
        }
        let current = current.devices.iter().find(|d| d.name == new.name);
        for disk in &new.disks {
            let old = current.and_then(|d| d.disks.iter().find(|old| old.name == disk.name));
            if let Some(old) = old {
                disk_needs_restart(old, disk, &mut list);
            }
        }
    }
    list
}

fn disk_needs_restart(old: &Disk, new: &Disk, list: &mut Vec<String>) {
    let place = format!("disk \"{}\": ", new.name);
    let Disk {
        name: _,
        socket: _,
        socket_group: _,
        path: _,
        format: _,
        offset: _,
        // Live, where it grows.
        size: _,
        read_only: _,
        cached: _,
        shared: _,
        migrate: _,
        hugepages: _,
        trust: _,
        pin: _,
        block_size: _,
        discard: _,
        on_full: _,
        serial: _,
        queues: _,
        depth: _,
        urgent_quantum: _,
        // Live.
        weight: _,
        reserve: _,
        urgent: _,
        read_cap: _,
        write_cap: _,
        guest_priority: _,
    } = new;
    push_differences!(
        list, place, old, new, socket, path, offset, read_only, cached, shared, migrate, hugepages, trust,
        pin, block_size
    );
    push_differences!(
        list,
        place,
        old,
        new,
        socket_group,
        format,
        serial,
        queues,
        depth,
        urgent_quantum,
        discard,
        on_full
    );
}

/// Whether two lists have the same names in the same order.
fn same_names<T>(old: &[T], new: &[T], name: impl Fn(&T) -> &String) -> bool {
    old.len() == new.len() && old.iter().zip(new).all(|(a, b)| name(a) == name(b))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const TEXT: &str = r#"
[[device]]
name = "d"
window = 2
[[device.disk]]
name = "a"
socket = "/run/a"
path = "/dev/a"
[[device.disk]]
name = "b"
socket = "/run/b"
path = "/dev/b"
weight = 200
"#;

    fn file(from: &str, to: &str) -> File {
        assert!(TEXT.contains(from));
        File::parse(Path::new("x"), &TEXT.replace(from, to)).unwrap()
    }

    #[test]
    fn changes_that_need_a_restart_are_all_named() {
        let old = file("\"d\"", "\"d\"");
        let of = |from, to| needs_restart(&old, &old, &file(from, to));
        assert_eq!(of("/dev/b\"", "/dev/c\"\ndepth = 7"), ["disk \"b\": path", "disk \"b\": depth"]);
        assert_eq!(of("window = 2", "window = 2\nquantum = \"4KiB\""), ["device \"d\": quantum"]);
        assert_eq!(of("window = 2", "window = 3"), ["device \"d\": a window of more than 2"]);
        // A disk to detach, and one to attach.
        assert!(of("\"a\"\nsocket", "\"c\"\nsocket").is_empty());
        assert_eq!(of("\"d\"", "\"e\""), ["another list of devices"]);
        assert_eq!(of("[[device]]", "sandbox = \"off\"\n[[device]]"), ["sandbox"]);
        assert!(of("weight = 200", "weight = 300\nread_cap = { requests = \"5/s\" }").is_empty());
        assert!(of("window = 2", "window = 1\npolicy = \"drr\"\naging = \"2s\"").is_empty());
    }

    #[test]
    fn disks_come_and_go_by_name() {
        let old = file("\"d\"", "\"d\"");
        let new = file("\"a\"\nsocket", "\"c\"\nsocket");
        let found = Membership::between(&old, &new);
        assert_eq!(found.attach, [(0, "c".to_owned())]);
        assert_eq!(found.detach, [(0, "a".to_owned())]);
        assert_eq!(Membership::between(&old, &old), Membership::default());
    }

    #[test]
    fn ports_come_and_go_by_name() {
        let network = |ports: &[(&str, u32)], link: &str| {
            let mut text = format!("[[network]]\nname = \"n\"\nlink = \"{link}\"\n");
            for (name, weight) in ports {
                text += &format!(
                    "[[network.port]]\nname = \"{name}\"\nsocket = \"/run/{name}\"\ntap = \"t{name}\"\nmac = \"52:54:00:00:00:0{name}\"\nweight = {weight}\n"
                );
            }
            File::parse(Path::new("x"), &text).unwrap()
        };
        let old = network(&[("a", 100), ("b", 100)], "1Gbit/s");
        // A changed order in the list is no change, and a weight is live.
        let new = network(&[("c", 100), ("b", 300)], "1Gbit/s");
        assert!(needs_restart(&old, &old, &new).is_empty());
        let found = Membership::between(&old, &new);
        assert_eq!(found.attach_ports, [(0, "c".to_owned())]);
        assert_eq!(found.detach_ports, [(0, "a".to_owned())]);
        let link = network(&[("a", 100), ("b", 100)], "2Gbit/s");
        assert_eq!(needs_restart(&old, &old, &link), ["network \"n\": link"]);
        let mut moved = old.clone();
        moved.networks[0].ports[1].depth = 99;
        assert_eq!(needs_restart(&old, &old, &moved), ["port \"b\": depth"]);
    }

    /// Every field is either live or needs a restart; live changes are reported.
    #[test]
    fn live_changes_are_reported() {
        let (old, new) = (
            file("\"d\"", "\"d\""),
            file("weight = 200", "urgent = { share = \"1%\", burst = \"1ms\", deadline = \"1s\" }"),
        );
        let mut list = Vec::new();
        disk_changes(&old.devices[0].disks[1], &new.devices[0].disks[1], &mut list);
        assert_eq!(list, ["disk \"b\": weight", "disk \"b\": urgent"]);
        let mut list = Vec::new();
        device_changes(
            &old.devices[0],
            &file("window = 2", "window = 1\nstall = \"1ms\"").devices[0],
            &mut list,
        );
        assert_eq!(list, ["device \"d\": window", "device \"d\": stall"]);
    }
}
