//! Networks, with a front end without a VM: what passes, what is dropped, and what waits.

mod common;

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Iod, check, named, wait_for_links};
use rtvirtio_domain_client::{ClientQueue, DirtyPages, NET_HEADER, NetClient};
use rtvirtio_testbed::netns::{self, Namespace, RawSocket};
use rtvirtio_testkit::{HANG, Need, has};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;

const A: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0xa];
const B: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0xb];
const PEER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0xee];
const SAMPLED_VALUES: [u8; 6] = [1, 0x0c, 0xcd, 4, 0, 1];
const OTHER_GROUP: [u8; 6] = [1, 0x0c, 0xcd, 4, 0, 2];
/// When a frame that does not come is taken for dropped.
const QUIET: Duration = Duration::from_millis(300);

fn frame(to: [u8; 6], from: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &[0x88, 0xb5], &number.to_be_bytes()[..]].concat();
    frame.resize(len.max(60), 0x5a);
    frame
}

/// A network with the ports `a` and `b`, and further keys of each.
fn config(dir: &Path, network: &str, a: &str, b: &str) -> String {
    let port = |name: &str, mac: [u8; 6], keys: &str| {
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        let tap = if network.contains("packet") { String::new() } else { format!("tap = \"tap-{name}\"\n") };
        let socket = dir.join(name);
        format!(
            "[[network.port]]\nname = \"{name}\"\nsocket = \"{}\"\nmac = \"{mac}\"\n{tap}{keys}\n",
            socket.display()
        )
    };
    format!("[[network]]\nname = \"lan\"\n{network}\n{}{}", port("a", A, a), port("b", B, b))
}

struct Bed {
    dir: tempfile::TempDir,
    iod: Iod,
    peer: RawSocket,
}

impl Bed {
    /// A bridge with two taps and a peer, and an I/O domain; `None` where that cannot be had.
    fn new(test: &str, network: &str, a: &str, b: &str) -> Option<Self> {
        if !has(test, &[Need::Root, Need::Program("ip"), Need::Path("/dev/net/tun", "no taps")]) {
            return None;
        }
        Namespace::new().unwrap().enter().unwrap();
        netns::bridge(&["tap-a", "tap-b"]).unwrap();
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let iod = Iod::start(dir.path(), &config(dir.path(), network, a, b));
        wait_for_links(&["tap-a", "tap-b", "up0", "up1"]);
        Some(Self { dir, iod, peer: RawSocket::open("up1").unwrap() })
    }

    /// An interface of the network's own, whose other end is the peer.
    fn packet(test: &str, network: &str) -> Option<Self> {
        Self::packet_with(test, network, "")
    }

    /// The same with keys of port `b`.
    fn packet_with(test: &str, network: &str, b: &str) -> Option<Self> {
        if !has(test, &[Need::Root, Need::Program("ip")]) {
            return None;
        }
        Namespace::new().unwrap().enter().unwrap();
        netns::bridge::<&str>(&[]).unwrap();
        netns::run("ip", "link set up0 nomaster").unwrap();
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let network = format!("uplink = \"packet\"\ninterface = \"up0\"\n{network}");
        let iod = Iod::start(dir.path(), &config(dir.path(), &network, "", b));
        Some(Self { dir, iod, peer: RawSocket::open("up1").unwrap() })
    }

    fn connect(&self, name: &str) -> NetClient {
        NetClient::connect(&self.dir.path().join(name)).unwrap()
    }

    fn port(&self, name: &str) -> Value {
        named(&self.iod.status_json()["ports"], name)
    }

    /// Waits until a counter of a port has a value.
    fn wait_for(&self, port: &str, pointer: &str, value: u64) {
        let begin = Instant::now();
        loop {
            let port = self.port(port);
            if port.pointer(pointer).and_then(Value::as_u64) == Some(value) {
                return;
            }
            assert!(begin.elapsed() < HANG, "{pointer} is not {value}: {port}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn receive(client: &mut NetClient, patience: Duration) -> Option<Vec<u8>> {
    let begin = Instant::now();
    loop {
        if let Some(frame) = client.receive() {
            return Some(frame);
        }
        if begin.elapsed() > patience {
            return None;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Frames of all sizes pass in order in both directions, more than there are buffers.
#[test]
fn frames_pass_in_order() {
    let Some(bed) = Bed::new("frames_pass_in_order", "", "", "") else { return };
    let mut a = bed.connect("a");
    let sizes = [60usize, 61, 128, 1_000, 1_513, 1_514];
    for number in 0..1_500u32 {
        let sent = frame(PEER, A, number, sizes[number as usize % sizes.len()]);
        while !a.send(&sent).unwrap() {
            std::thread::yield_now();
        }
        assert_eq!(bed.peer.receive(HANG).unwrap(), Some(sent), "frame {number}");
    }
    for number in 0..1_500u32 {
        let sent = frame(A, PEER, number, sizes[number as usize % sizes.len()]);
        bed.peer.send(&sent).unwrap();
        assert_eq!(receive(&mut a, HANG), Some(sent), "frame {number}");
    }
    let port = bed.port("a");
    assert_eq!((&port["tx"]["frames"], &port["rx"]["frames"]), (&1_500.into(), &1_500.into()), "{port}");
    assert_eq!(port["connected"], true);
    let drops = port["drops"].as_object().unwrap();
    assert!(drops.values().all(|count| *count == 0), "{port}");
}

/// What raises a VM's vCPUs is signalled for urgent frames to the ports that were asked for.
#[test]
fn urgent_frames_to_a_vm_are_signalled() {
    let keys = "urgent_dscp = [46]";
    let Some(bed) = Bed::new("urgent_frames_to_a_vm_are_signalled", "", keys, keys) else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    assert_eq!(bed.port("a")["peer"], std::process::id());
    assert!(bed.port("a")["urgent_signals"].is_null(), "nobody has asked");
    let eventfd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let signals = || {
        let mut count = [0; 8];
        rustix::io::read(&eventfd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    let line = r#"{"command": "signal_urgent", "ports": ["a"]}"#;
    let unknown = bed.iod.ask(&line.replace("\"a\"", "\"a\", \"c\""), &[eventfd.as_fd()]);
    assert!(unknown.contains("there is no port \\\"c\\\""), "{unknown}");
    assert!(bed.port("a")["urgent_signals"].is_null(), "all or none");
    assert!(bed.iod.ask(line, &[eventfd.as_fd()]).contains("signalled"));
    // A whole IPv4 packet, which the bridge may look at, of a protocol for experiments (RFC
    // 3692), with this code point.
    let ip = |to: [u8; 6], dscp: u8| {
        let mut header = [0x45, dscp << 2, 0, 46, 0, 0, 0, 0, 64, 253, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let words = header.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
        let sum: u32 = words.sum();
        header[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
        let mut frame = [&to[..], &PEER[..], &[8, 0], &header[..]].concat();
        frame.resize(60, 0);
        frame
    };
    let pass = |to: &mut NetClient, frame: Vec<u8>| {
        bed.peer.send(&frame).unwrap();
        assert_eq!(receive(to, HANG), Some(frame));
    };
    pass(&mut a, ip(A, 0));
    pass(&mut b, ip(B, 46));
    assert_eq!(signals(), 0, "not urgent, and not to this port");
    pass(&mut a, ip(A, 46));
    // The frame is in the guest's memory before the eventfd is signalled, and its interrupt after.
    bed.wait_for("a", "/urgent_signals", 1);
    assert_eq!(signals(), 1);
    assert!(bed.iod.ask(line, &[]).contains("signalled"), "no more of them");
    pass(&mut a, ip(A, 46));
    assert!(bed.port("a")["urgent_signals"].is_null() && signals() == 0);
}

/// Two VMs reach each other over the administrator's bridge, and by their own addresses only.
#[test]
fn ports_reach_each_other_and_spoofed_frames_are_dropped() {
    let name = "ports_reach_each_other_and_spoofed_frames_are_dropped";
    let Some(bed) = Bed::new(name, "", "", "") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    a.send(&frame(B, A, 1, 60)).unwrap();
    assert_eq!(receive(&mut b, HANG), Some(frame(B, A, 1, 60)));
    b.send(&frame(A, B, 2, 1_514)).unwrap();
    assert_eq!(receive(&mut a, HANG), Some(frame(A, B, 2, 1_514)));
    // B with A's address: the frame is dropped.
    b.send(&frame(PEER, A, 3, 60)).unwrap();
    bed.wait_for("b", "/drops/spoofed", 1);
    b.send(&frame(PEER, B, 4, 60)).unwrap();
    // The bridge did not know B when A sent to it, so the peer got that frame too.
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(B, A, 1, 60)));
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, B, 4, 60)));
    // For another address: the kernel's filter drops it before it is read.
    bed.peer.send(&frame([0x52, 0x54, 0, 0, 0, 0xcc], PEER, 5, 60)).unwrap();
    bed.peer.send(&frame(A, PEER, 6, 60)).unwrap();
    assert_eq!(receive(&mut a, HANG), Some(frame(A, PEER, 6, 60)));
    assert_eq!(bed.port("a")["drops"]["filtered"], 0);
}

/// What the next switch would obey leaves a port only where its file says so.
#[test]
fn the_links_own_protocols_leave_only_where_they_may() {
    let name = "the_links_own_protocols_leave_only_where_they_may";
    let Some(bed) = Bed::packet_with(name, "", "link_local = true\nvlans = [0]") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    let group = |last: u8| [1, 0x80, 0xc2, 0, 0, last];
    let pause = |from: [u8; 6]| {
        let mut frame = [&group(1)[..], &from[..], &[0x88, 8, 0, 1, 0xff, 0xff]].concat();
        frame.resize(60, 0);
        frame
    };
    for last in [0, 2, 0xe, 0xf] {
        assert!(a.send(&frame(group(last), A, 1, 60)).unwrap());
    }
    assert!(a.send(&pause(A)).unwrap());
    bed.wait_for("a", "/drops/link_local", 5);
    // The first one that is not of these is the first that arrives.
    a.send(&frame(group(0x10), A, 2, 60)).unwrap();
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(group(0x10), A, 2, 60)));
    b.send(&pause(B)).unwrap();
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(pause(B)));
    // A tag of an old type is no way around `vlans`.
    let plain = frame(PEER, B, 3, 60);
    for kind in [0x91, 0x92] {
        b.send(&[&plain[..12], &[kind, 0, 0, 200][..], &plain[12..]].concat()).unwrap();
    }
    bed.wait_for("b", "/drops/spoofed", 2);
    b.send(&plain).unwrap();
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(plain));
    // A frame that is longer than the MTU says so.
    a.send(&frame(PEER, A, 4, 1_600)).unwrap();
    bed.wait_for("a", "/drops/too_long", 1);
    assert_eq!(bed.port("a")["drops"]["malformed"], 0);
}

/// Rings are as large as virtio's largest: DPDK's front end may ask for that.
#[test]
fn the_largest_rings_are_served() {
    let Some(bed) = Bed::new("the_largest_rings_are_served", "", "", "") else { return };
    let mut a = NetClient::connect_sized(&bed.dir.path().join("a"), 0, 1 << 15).unwrap();
    // More than a smaller ring holds, before the first kick.
    let frames = 3_000;
    for number in 0..frames {
        assert!(a.queue(&frame(PEER, A, number, 60)));
    }
    a.tx.notify().unwrap();
    bed.wait_for("a", "/tx/frames", u64::from(frames));
    // The peer's socket may hold fewer.
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, 0, 60)));
    while bed.peer.receive(QUIET).unwrap().is_some() {}
    a.send(&frame(PEER, A, frames, 60)).unwrap();
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, frames, 60)));
    for number in 0..frames {
        bed.peer.send(&frame(A, PEER, number, 60)).unwrap();
        assert_eq!(receive(&mut a, HANG), Some(frame(A, PEER, number, 60)), "frame {number}");
    }
    let port = bed.port("a");
    assert_eq!((&port["broken"], &port["refused"]), (&0.into(), &Value::Null), "{port}");
}

/// Listed groups pass a storm of others, which is stopped after the burst.
#[test]
fn a_storm_of_broadcasts_is_limited() {
    let a = "multicast = [\"01:0c:cd:04:00:01\"]\nbroadcast = \"20/min\"";
    let Some(bed) = Bed::new("a_storm_of_broadcasts_is_limited", "", a, "") else { return };
    let mut a = bed.connect("a");
    let storm = 2_000u32;
    let mut listed = 0;
    for number in 0..storm {
        let to = if number % 2 == 0 { [0xff; 6] } else { OTHER_GROUP };
        bed.peer.send(&frame(to, PEER, number, 60)).unwrap();
        if number % 100 == 99 {
            let sent = frame(SAMPLED_VALUES, PEER, number, 100);
            bed.peer.send(&sent).unwrap();
            // Those of the storm that are within the burst come before it.
            let begin = Instant::now();
            while receive(&mut a, HANG).unwrap() != sent {
                assert!(begin.elapsed() < HANG);
            }
            listed += 1;
        }
    }
    let port = bed.port("a");
    let passed = port["rx"]["frames"].as_u64().unwrap() - listed;
    // The burst is that of half a second, at least 1; a minute brings 20 more.
    assert!(passed < 60, "{passed} of {storm}: {port}");
    let dropped = port["drops"]["broadcast"].as_u64().unwrap();
    assert!(dropped > 0 && passed + dropped < u64::from(storm), "the others in the kernel: {port}");
}

/// A cap toward the link holds frames in the VM's queue and drops none.
#[test]
fn a_cap_holds_and_drops_nothing() {
    let cap = "depth = 4\ntx_cap = { frames = \"1000/s\", frames_burst = 5 }";
    let Some(bed) = Bed::new("a_cap_holds_and_drops_nothing", "", cap, "") else { return };
    let mut a = bed.connect("a");
    let begin = Instant::now();
    for number in 0..200 {
        assert!(a.queue(&frame(PEER, A, number, 60)));
    }
    a.tx.notify().unwrap();
    for number in 0..200 {
        if number % 50 == 10 {
            pause(&bed.iod);
        }
        assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, number, 60)), "frame {number}");
    }
    // Never early: 5 at once, and one each millisecond.
    assert!(begin.elapsed() >= Duration::from_millis(195), "{:?}", begin.elapsed());
    assert!(bed.port("a")["tx"]["cap_hits"].as_u64().unwrap() > 0);
    assert_eq!(a.unfetched(), 0);
}

/// The host does not run the I/O domain for a while: all that it holds may go by then.
fn pause(iod: &Iod) {
    iod.signal(rustix::process::Signal::STOP);
    std::thread::sleep(Duration::from_millis(30));
    iod.signal(rustix::process::Signal::CONT);
}

/// The same toward the VM, where frames wait in the kernel.
#[test]
fn a_cap_toward_the_vm_holds_what_the_kernel_has() {
    let cap = "depth = 4\nrx_cap = { frames = \"1000/s\", frames_burst = 5 }";
    let Some(bed) = Bed::new("a_cap_toward_the_vm_holds_what_the_kernel_has", "", cap, "") else { return };
    let mut a = bed.connect("a");
    for number in 0..200 {
        bed.peer.send(&frame(A, PEER, number, 60)).unwrap();
    }
    for number in 0..200 {
        if number % 50 == 10 {
            pause(&bed.iod);
        }
        assert_eq!(receive(&mut a, HANG), Some(frame(A, PEER, number, 60)), "frame {number}");
    }
}

/// Frames that follow each other soon are announced together, and the last one is announced too.
#[test]
fn frames_to_a_vm_are_announced_together() {
    let keys = "rx_coalesce = \"10ms\"";
    let Some(bed) = Bed::new("frames_to_a_vm_are_announced_together", "", keys, "") else { return };
    let mut a = bed.connect("a");
    let (begin, mut announced) = (Instant::now(), 0);
    for number in 0..200 {
        a.rx.enable_call();
        let sent = frame(A, PEER, number, 60);
        bed.peer.send(&sent).unwrap();
        assert_eq!(receive(&mut a, HANG), Some(sent), "frame {number}");
        announced += a.rx.call.read().unwrap_or(0);
    }
    a.rx.enable_call();
    bed.peer.send(&frame(A, PEER, 200, 60)).unwrap();
    let last = Instant::now();
    while !a.rx.has_used() || a.rx.call.read().is_err() {
        assert!(last.elapsed() < HANG, "the last frame is not announced");
        std::thread::sleep(Duration::from_millis(1));
    }
    // One at the start besides, and the one whose interval has begun.
    let most = begin.elapsed().as_millis() as u64 / 10 + 2;
    assert!(announced <= most, "{announced} of at most {most}");
}

/// A cap toward the VM: what a flood has beyond it is dropped by the kernel, and a neighbour gets
/// all of its own.
#[test]
fn a_flood_costs_its_receiver_only() {
    let cap = "rx_cap = { frames = \"100/s\", frames_burst = 10 }";
    let Some(bed) = Bed::new("a_flood_costs_its_receiver_only", "", "", cap) else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    let begin = Instant::now();
    let mut received = 0;
    for number in 0..20_000u32 {
        bed.peer.send(&frame(B, PEER, number, 60)).unwrap();
        if number % 100 == 0 {
            let sent = frame(A, PEER, number, 60);
            bed.peer.send(&sent).unwrap();
            assert_eq!(receive(&mut a, HANG), Some(sent), "frame {number}");
        }
        received += u32::from(b.receive().is_some());
    }
    let most = 10.0 + begin.elapsed().as_secs_f64() * 100.0 + 1.0;
    assert!(f64::from(received) <= most, "{received} of at most {most}");
    assert!(received >= 1, "it gets what its cap allows");
}

/// A port without a guest delays no other port; its guest gets frames once it is attached.
#[test]
fn a_port_without_a_guest_delays_no_other() {
    let Some(bed) = Bed::new("a_port_without_a_guest_delays_no_other", "", "", "") else { return };
    let mut a = bed.connect("a");
    for number in 0..5_000u32 {
        // No guest is attached to B.
        bed.peer.send(&frame(B, PEER, number, 60)).unwrap();
        if number % 50 == 0 {
            bed.peer.send(&frame(A, PEER, number, 60)).unwrap();
            assert_eq!(receive(&mut a, HANG), Some(frame(A, PEER, number, 60)));
        }
    }
    // The I/O domain does not stop under a guest that only has a port.
    let refused = bed.iod.command("stop");
    assert_eq!(serde_json::from_str::<Value>(&refused).unwrap()["guests"][0], "a", "{refused}");
    let mut b = bed.connect("b");
    bed.peer.send(&frame(B, PEER, 9_999, 60)).unwrap();
    let begin = Instant::now();
    // Those that the kernel kept come first.
    while receive(&mut b, HANG).unwrap() != frame(B, PEER, 9_999, 60) {
        assert!(begin.elapsed() < HANG);
    }
}

/// A tap that is removed concerns its own VM only, and keeps no CPU busy.
#[test]
fn a_removed_tap_concerns_its_own_vm_only() {
    let Some(mut bed) = Bed::new("a_removed_tap_concerns_its_own_vm_only", "", "", "") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    netns::run("ip", "link del tap-b").unwrap();
    b.send(&frame(PEER, B, 1, 60)).unwrap();
    bed.wait_for("b", "/drops/refused", 1);
    let cpu =
        || rtvirtio_kernel::process::cpu_time(&rtvirtio_kernel::Root::default(), bed.iod.pid()).unwrap();
    let before = cpu();
    std::thread::sleep(Duration::from_secs(1));
    let used = cpu() - before;
    assert!(used < Duration::from_millis(500), "{used:?} of CPU time in a second without frames");
    for number in 0..50 {
        a.send(&frame(PEER, A, number, 60)).unwrap();
        assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, number, 60)));
    }
    assert!(bed.iod.is_alive());
}

/// After a crash the port is back at the next connection: no broken ring, nothing twice.
#[test]
fn a_killed_domain_serves_again() {
    let Some(mut bed) = Bed::new("a_killed_domain_serves_again", "", "", "") else { return };
    for round in 0..5u32 {
        let mut a = bed.connect("a");
        for number in 0..20 {
            a.send(&frame(PEER, A, round * 100 + number, 60)).unwrap();
            assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, round * 100 + number, 60)));
        }
        // Under load.
        for number in 20..60 {
            a.send(&frame(PEER, A, round * 100 + number, 60)).unwrap();
        }
        let text = config(bed.dir.path(), "", "", "");
        bed.iod.kill();
        bed.iod = Iod::start(bed.dir.path(), &text);
        let mut last = round * 100 + 19;
        while let Some(frame) = bed.peer.receive(QUIET).unwrap() {
            let number = u32::from_be_bytes(frame[14..18].try_into().unwrap());
            assert!(number > last, "{number} after {last}");
            last = number;
        }
    }
}

/// Live keys: a cap comes and goes while the guest sends.
#[test]
fn caps_change_while_a_guest_sends() {
    let Some(bed) = Bed::new("caps_change_while_a_guest_sends", "", "", "") else { return };
    let mut a = bed.connect("a");
    a.send(&frame(PEER, A, 0, 60)).unwrap();
    assert!(bed.peer.receive(HANG).unwrap().is_some());
    let capped = config(bed.dir.path(), "", "tx_cap = { frames = \"1/min\", frames_burst = 2 }", "");
    common::configure(bed.dir.path(), &capped);
    let reply = bed.iod.command("reload");
    assert!(reply.contains("port \\\"a\\\": tx_cap"), "{reply}");
    for number in 1..=3 {
        a.send(&frame(PEER, A, number, 60)).unwrap();
    }
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, 1, 60)));
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, 2, 60)));
    assert_eq!(bed.peer.receive(QUIET).unwrap(), None, "the third waits for a minute");
    common::configure(bed.dir.path(), &config(bed.dir.path(), "", "", ""));
    let reply = bed.iod.command("reload");
    assert!(reply.contains("tx_cap"), "{reply}");
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, 3, 60)));
    let other = config(bed.dir.path(), "mtu = 9000", "", "");
    common::configure(bed.dir.path(), &other);
    assert!(bed.iod.command("reload").contains("network \\\"lan\\\": mtu needs a restart"));
}

/// An interface of the network's own: the same rules, and frames between VMs stay inside.
#[test]
fn a_packet_uplink_switches_between_its_ports() {
    let name = "a_packet_uplink_switches_between_its_ports";
    let Some(bed) = Bed::packet(name, "link = \"1Gbit/s\"") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    a.send(&frame(PEER, A, 1, 1_514)).unwrap();
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, 1, 1_514)));
    bed.peer.send(&frame(A, PEER, 2, 1_514)).unwrap();
    assert_eq!(receive(&mut a, HANG), Some(frame(A, PEER, 2, 1_514)));
    a.send(&frame(B, A, 3, 60)).unwrap();
    assert_eq!(receive(&mut b, HANG), Some(frame(B, A, 3, 60)));
    assert_eq!(bed.peer.receive(QUIET).unwrap(), None, "it stays inside");
    b.send(&frame([0xff; 6], B, 4, 60)).unwrap();
    assert_eq!(receive(&mut a, HANG), Some(frame([0xff; 6], B, 4, 60)));
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame([0xff; 6], B, 4, 60)));
}

/// The kernel takes the tag out of a frame before a packet socket gets it.
#[test]
fn a_frame_from_a_packet_uplink_has_its_vlan() {
    let name = "a_frame_from_a_packet_uplink_has_its_vlan";
    let Some(bed) = Bed::packet_with(name, "", "vlans = [5]") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    let tagged = |to: [u8; 6], vlan: u8, number: u32| {
        let frame = frame(to, PEER, number, 60);
        [&frame[..12], &[0x81, 0, 0x80, vlan][..], &frame[12..]].concat()
    };
    // Of another VLAN and of none: neither is B's.
    bed.peer.send(&tagged(B, 6, 1)).unwrap();
    bed.peer.send(&frame(B, PEER, 2, 60)).unwrap();
    bed.peer.send(&tagged(B, 5, 3)).unwrap();
    assert_eq!(receive(&mut b, HANG), Some(tagged(B, 5, 3)));
    bed.wait_for("b", "/drops/filtered", 2);
    // A may be of any, and sees which.
    bed.peer.send(&tagged(A, 6, 4)).unwrap();
    assert_eq!(receive(&mut a, HANG), Some(tagged(A, 6, 4)));
    bed.peer.send(&frame(A, PEER, 5, 60)).unwrap();
    assert_eq!(receive(&mut a, HANG), Some(frame(A, PEER, 5, 60)));
}

/// The largest chain that a network without a link accepts, to another of its ports.
#[test]
fn the_largest_frame_is_copied_between_ports() {
    let name = "the_largest_frame_is_copied_between_ports";
    let Some(mut bed) = Bed::packet(name, "") else { return };
    let mut b = bed.connect("b");
    let largest = rtvirtio_domain_config::OFFLOADED_FRAME as usize;
    let (mut passed, mut refused) = (0, 0);
    for len in [largest - 1, largest, largest + 1, largest + 64] {
        // All of it is one frame to B, read from the same buffer again and again.
        let part = 4_096;
        let mut a = bed.connect("a");
        let at = a.tx.data(0);
        a.queue(&frame(B, A, 0, part - NET_HEADER));
        let total = NET_HEADER + len;
        let parts: Vec<usize> = (0..total).step_by(part).map(|from| part.min(total - from)).collect();
        for (i, part) in parts.iter().enumerate() {
            let next = u16::from(i + 1 < parts.len());
            let address = rtvirtio_domain_client::SharedMemory::BASE + at as u64;
            a.tx.write_descriptor_raw(900 + i as u16, address, *part as u32, next, 901 + i as u16);
        }
        a.tx.add_avail(900);
        a.tx.notify().unwrap();
        (passed, refused) = (passed + 1 + u64::from(len <= largest), refused + u64::from(len > largest));
        bed.wait_for("a", "/tx/frames", passed);
        bed.wait_for("a", "/drops/too_long", refused);
        assert!(bed.iod.is_alive(), "{len} bytes");
    }
    bed.wait_for("b", "/rx/frames", passed);
    assert!(b.rx.pop_used_raw().is_some());
}

/// `VIRTIO_NET_F_CSUM`, `_GUEST_CSUM`, `_GUEST_TSO4`, `_HOST_TSO4`.
const CSUM: u64 = 1;
const GUEST_TSO: u64 = 1 << 1 | 1 << 7;
const HOST_TSO: u64 = 1 << 11;

/// A TCP segment over IPv4 and its header of virtio-net: frames of `size` bytes of payload.
fn tcp_segment(to: [u8; 6], from: [u8; 6], payload: usize, size: u16) -> ([u8; NET_HEADER], Vec<u8>) {
    let mut frame = [&to[..], &from[..], &[8, 0, 0x45, 0]].concat();
    frame.extend(((40 + payload) as u16).to_be_bytes());
    frame.extend([0, 7, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend([0x12, 0x34, 0, 80, 0, 0, 0, 9, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|i| (i % 251) as u8));
    let mut header = [0; NET_HEADER];
    (header[0], header[1]) = (1, 1);
    for (at, v) in [(2, 54), (4, size), (6, 34), (8, 16)] {
        header[at..at + 2].copy_from_slice(&u16::to_le_bytes(v));
    }
    (header, frame)
}

/// Sequence number and payload of a TCP frame, whose IP length is checked.
fn tcp_part(frame: &[u8]) -> (u32, &[u8]) {
    let length = usize::from(u16::from_be_bytes([frame[16], frame[17]]));
    assert_eq!(length, frame.len() - 14, "the length of IP");
    (u32::from_be_bytes(frame[38..42].try_into().unwrap()), &frame[54..])
}

/// On a link with a rate a large segment leaves as frames, each counted; one that describes itself
/// wrongly is refused.
#[test]
fn a_large_segment_leaves_as_frames() {
    let Some(bed) = Bed::new("a_large_segment_leaves_as_frames", "link = \"1Gbit/s\"", "", "offload = false")
    else {
        return;
    };
    let mut a = NetClient::connect_with(&bed.dir.path().join("a"), CSUM | HOST_TSO).unwrap();
    assert_eq!(a.features & (CSUM | HOST_TSO), CSUM | HOST_TSO, "offered");
    let (header, segment) = tcp_segment(PEER, A, 3_500, 1_448);
    assert!(a.queue_with_header(&header, &segment));
    a.tx.notify().unwrap();
    let mut payload = Vec::new();
    for len in [1_448, 1_448, 604] {
        let got = bed.peer.receive(HANG).unwrap().unwrap();
        let (sequence, part) = tcp_part(&got);
        assert_eq!((sequence, part.len()), (9 + payload.len() as u32, len));
        payload.extend_from_slice(part);
    }
    assert_eq!(payload, segment[54..]);
    bed.wait_for("a", "/tx/frames", 3);
    // Frames that are longer than the network's; of next to nothing; TCP elsewhere.
    for (at, v) in [(4, 1_500u16), (4, 8), (6, 40), (8, 20)] {
        let mut wrong = header;
        wrong[at..at + 2].copy_from_slice(&v.to_le_bytes());
        assert!(a.queue_with_header(&wrong, &segment));
    }
    a.tx.notify().unwrap();
    bed.wait_for("a", "/drops/malformed", 3);
    bed.wait_for("a", "/drops/too_long", 1);
    let b = NetClient::connect_with(&bed.dir.path().join("b"), CSUM | GUEST_TSO | HOST_TSO).unwrap();
    assert_eq!(b.features & (CSUM | GUEST_TSO | HOST_TSO), 0, "switched off");
}

/// Between ports a segment passes whole to a guest that takes it, and as frames to one that does
/// not, or that has a cap.
#[test]
fn a_large_segment_reaches_every_port() {
    let name = "a_large_segment_reaches_every_port";
    for (features, cap, parts) in [
        (GUEST_TSO, "", vec![3_500]),
        (0, "", vec![1_448, 1_448, 604]),
        (GUEST_TSO, "rx_cap = { frames = \"100000/s\" }", vec![1_448, 1_448, 604]),
    ] {
        let Some(bed) = Bed::packet_with(name, "", cap) else { return };
        let mut a = NetClient::connect_with(&bed.dir.path().join("a"), CSUM | HOST_TSO).unwrap();
        let mut b = NetClient::connect_with(&bed.dir.path().join("b"), features).unwrap();
        let (header, segment) = tcp_segment(B, A, 3_500, 1_448);
        assert!(a.queue_with_header(&header, &segment));
        a.tx.notify().unwrap();
        let mut payload = Vec::new();
        for len in parts {
            let got = receive(&mut b, HANG).unwrap();
            assert_eq!(got.len(), 54 + len, "{features:#x} {cap}");
            payload.extend_from_slice(&got[54..]);
        }
        assert_eq!(payload, segment[54..]);
    }
}

/// Kicks that bring nothing, and refused frames, hold up the port that causes them.
#[test]
fn work_that_leads_nowhere_waits() {
    let Some(bed) = Bed::new("work_that_leads_nowhere_waits", "", "", "") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    let backoffs = |bed: &Bed, name: &str| bed.port(name)["backoffs"].as_u64().unwrap();
    let begin = Instant::now();
    while backoffs(&bed, "b") == 0 {
        for _ in 0..2_000 {
            b.tx.kick.write(1).unwrap();
        }
        assert!(begin.elapsed() < HANG, "{}", bed.port("b"));
    }
    let kicked = backoffs(&bed, "b");
    while backoffs(&bed, "b") < kicked + 3 {
        // As another machine.
        let _ = b.send(&frame(PEER, A, 0, 60)).unwrap();
        assert!(begin.elapsed() < 2 * HANG, "{}", bed.port("b"));
    }
    for number in 1..200 {
        a.send(&frame(PEER, A, number, 60)).unwrap();
        assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, A, number, 60)));
    }
    assert_eq!(backoffs(&bed, "a"), 0, "it works");
    // It is served again.
    while b.unfetched() > 0 {
        std::thread::sleep(Duration::from_millis(1));
        assert!(begin.elapsed() < 3 * HANG, "{}", bed.port("b"));
    }
    b.send(&frame(PEER, B, 9, 60)).unwrap();
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(frame(PEER, B, 9, 60)));
}

/// A port that uses up its part of the thread's budget waits; its neighbour does not.
#[test]
fn a_flood_uses_up_its_own_part_of_the_budget() {
    let name = "a_flood_uses_up_its_own_part_of_the_budget";
    let Some(bed) = Bed::new(name, "cpu_budget = \"2%\"", "", "") else { return };
    let (mut a, mut b) = (bed.connect("a"), bed.connect("b"));
    let begin = Instant::now();
    let mut number = 0;
    while bed.port("b")["throttled"].as_u64().unwrap() < 5 {
        for _ in 0..2_000 {
            let _ = b.send(&frame([0x52, 0x54, 0, 0, 0, 0xcc], B, 0, 1_514)).unwrap();
        }
        number += 1;
        a.send(&frame(PEER, A, number, 60)).unwrap();
        while bed.peer.receive(HANG).unwrap().unwrap() != frame(PEER, A, number, 60) {}
        assert!(begin.elapsed() < HANG, "{}", bed.port("b"));
    }
    let b = bed.port("b");
    assert!(b["cpu_ns"].as_u64() > Some(0) && b["throttled_ns"].as_u64() > Some(0), "{b}");
}

/// Whatever one guest writes into its queues, its neighbour loses nothing.
#[test]
fn a_hostile_guest_harms_itself_only() {
    let Some(mut bed) = Bed::new("a_hostile_guest_harms_itself_only", "link = \"1Gbit/s\"", "", "") else {
        return;
    };
    let mut a = bed.connect("a");
    let mut sent = 0;
    let mut check = |bed: &mut Bed| {
        for _ in 0..20 {
            sent += 1;
            a.send(&frame(PEER, A, sent, 60)).unwrap();
            while bed.peer.receive(HANG).unwrap().unwrap() != frame(PEER, A, sent, 60) {}
            bed.peer.send(&frame(A, PEER, sent, 60)).unwrap();
            while receive(&mut a, HANG).unwrap() != frame(A, PEER, sent, 60) {}
        }
        assert!(bed.iod.is_alive());
    };
    // Headers that promise what the frame does not have.
    let mut b = bed.connect("b");
    for (i, byte) in (0..NET_HEADER).flat_map(|i| [1u8, 4, 0x7f, 0x80, 0xff].map(|byte| (i, byte))) {
        let mut header = [0; NET_HEADER];
        header[i] = byte;
        b.queue_with_header(&header, &frame(PEER, B, 0, 60));
        b.tx.notify().unwrap();
    }
    check(&mut bed);
    // Chains: empty, too long, in a circle, writable, outside of the memory; an index far ahead.
    let attacks: [fn(&mut NetClient); 6] = [
        |b| b.tx.write_descriptor_raw(900, 1 << 20, 0, 0, 0),
        |b| b.tx.write_descriptor_raw(900, 1 << 20, u32::MAX, 0, 0),
        |b| b.tx.write_descriptor_raw(900, 1 << 20, 64, 1, 900),
        |b| b.tx.write_descriptor_raw(900, 1 << 20, 64, 2, 0),
        |b| b.tx.write_descriptor_raw(900, u64::MAX - 8, 64, 0, 0),
        |b| b.tx.write_descriptor_raw(900, 1 << 20, 24, 4, 0),
    ];
    for attack in attacks {
        attack(&mut b);
        for _ in 0..200 {
            b.tx.add_avail(900);
        }
        b.tx.kick.write(1).unwrap();
        check(&mut bed);
    }
    b.tx.set_avail_index(30_000);
    b.tx.kick.write(1).unwrap();
    check(&mut bed);
    drop(b);
    // Buffers for received frames: read-only, outside, in a circle.
    for (address, len, flags, next) in [
        (1u64 << 20, 64u32, 0u16, 0u16),
        (u64::MAX - 8, 4_096, 2, 0),
        (1 << 20, 8, 3, 900),
        (1 << 20, 0, 2, 0),
    ] {
        let mut b = bed.connect("b");
        b.rx.write_descriptor_raw(900, address, len, flags, next);
        // All of its good buffers are used up first.
        for number in 0..700 {
            b.rx.add_avail(900);
            bed.peer.send(&frame(B, PEER, number, 60)).unwrap();
        }
        b.rx.kick.write(1).unwrap();
        check(&mut bed);
    }
    // Connections that come and go.
    for _ in 0..60 {
        drop(bed.connect("b"));
    }
    check(&mut bed);
    // Kicks without frames.
    let b = bed.connect("b");
    for _ in 0..10_000 {
        b.tx.kick.write(1).unwrap();
        b.rx.kick.write(1).unwrap();
    }
    check(&mut bed);
}

/// What frames meet beyond the file is said before they do.
#[test]
fn another_mtu_of_the_uplink_is_said() {
    let Some(bed) = Bed::new("another_mtu_of_the_uplink_is_said", "link = \"1Gbit/s\"", "", "") else {
        return;
    };
    let check = || {
        let out = check(bed.dir.path());
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    let said = check();
    let summary = format!("{}/iod.toml: 1 networks, 2 ports\n", bed.dir.path().display());
    assert!(said.starts_with(&summary), "{said}");
    assert!(!said.contains("mtu"), "{said}");
    netns::run("ip", "link set tap-a mtu 9000").unwrap();
    let said = check();
    assert!(said.contains("network \"lan\": `mtu` is 1500, and tap-a has 9000"), "{said}");
    assert!(!said.contains("tap-b"), "{said}");
    let mut a = bed.connect("a");
    a.send(&frame(PEER, A, 1, 4_000)).unwrap();
    bed.wait_for("a", "/drops/too_long", 1);
    assert_eq!(bed.port("a")["drops"]["malformed"], 0);
}

/// What is wrong is said with its remedy, before anything runs.
#[test]
fn mistakes_are_named_with_the_remedy() {
    if !has("mistakes_are_named_with_the_remedy", &[Need::Root, Need::Program("ip")]) {
        return;
    }
    Namespace::new().unwrap().enter().unwrap();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let reserve = "reserve = { rate = \"60Mbit/s\", burst = \"3kB\", deadline = \"2ms\" }";
    let short = reserve.replace("2ms", "900us").replace("60", "10");
    let (link, packet) = ("link = \"100Mbit/s\"", "uplink = \"packet\"\ninterface = \"none\"");
    for (network, a, b, why) in [
        ("", "", "", "port \"a\": there is no tap tap-a; make it"),
        (packet, "", "", "there is no interface none"),
        ("", reserve, "", "a reservation needs `link`"),
        (link, reserve, reserve, "121.2 % of the link are reserved, and it can give 100.0 %"),
        (link, short.as_str(), "", "port \"a\" cannot be promised 900us"),
    ] {
        let error = Iod::try_start(dir.path(), &config(dir.path(), network, a, b)).err().expect("refused");
        assert!(error.contains(why), "{why}: {error}");
        let checked = check(dir.path());
        assert!(String::from_utf8_lossy(&checked.stderr).contains(why), "{why}: {checked:?}");
    }
}

/// While a guest is migrated, its frames and rings are in the log, and nothing else.
#[test]
fn frames_and_rings_are_logged() {
    let Some(bed) = Bed::new("frames_and_rings_are_logged", "", "", "") else { return };
    let mut a = bed.connect("a");
    let log = DirtyPages::covering(&a.mem).unwrap();
    a.begin_log(&log).unwrap();
    let rings = |queue: &ClientQueue| {
        let (_, _, used) = queue.ring_offsets();
        // 1024 elements, behind and before two words each.
        [used, used + 4_096, used + 8_192]
    };
    let (to_vm, from_vm) = (rings(&a.rx), rings(&a.tx));
    let data = |client: &NetClient, slot| client.rx.data(slot);
    let (first, last) = (data(&a, 0), data(&a, NetClient::BUFFERS - 1));
    for number in 0..20u32 {
        let sent = frame(A, PEER, number, 1_000);
        bed.peer.send(&sent).unwrap();
        assert_eq!(receive(&mut a, HANG), Some(sent), "frame {number}");
        let marked = log.take();
        let buffers: Vec<usize> = marked.iter().copied().filter(|at| (first..=last).contains(at)).collect();
        assert_eq!(buffers, [data(&a, number as u16)], "frame {number}");
        assert!(marked.contains(&to_vm[0]), "its index: {marked:?}");
        let known = |at: &usize| buffers.contains(at) || to_vm.contains(at) || from_vm.contains(at);
        assert!(marked.iter().all(known), "{marked:?}");
    }
    assert!(a.send(&frame(PEER, A, 1, 60)).unwrap());
    assert!(bed.peer.receive(HANG).unwrap().is_some());
    let begin = Instant::now();
    while a.unfetched() > 0 && begin.elapsed() < HANG {
        std::thread::yield_now();
    }
    let marked = log.take();
    assert!(marked.contains(&from_vm[0]), "{marked:?}");
    assert!(!marked.iter().any(|at| (first..=last).contains(at)), "{marked:?}");
}

/// The frame of a guest that has arrived: of the port's own address, in its VLANs.
#[test]
fn a_guest_that_has_arrived_is_announced() {
    let name = "a_guest_that_has_arrived_is_announced";
    let Some(bed) = Bed::packet_with(name, "", "vlans = [0, 5]") else { return };
    let announce = |port: &str, mac: [u8; 6]| {
        let mut qemu = std::os::unix::net::UnixStream::connect(bed.dir.path().join(port)).unwrap();
        qemu.set_read_timeout(Some(HANG)).unwrap();
        let header = [19u32, 1 | 1 << 3, 8].map(u32::to_ne_bytes).concat();
        qemu.write_all(&[&header[..], &mac[..], &[0, 0]].concat()).unwrap();
        let mut reply = [0; 20];
        qemu.read_exact(&mut reply).unwrap();
        u64::from_ne_bytes(reply[12..].try_into().unwrap()) == 0
    };
    let request = |mac: [u8; 6]| {
        let body = [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3];
        let mut frame = [&[0xff; 6][..], &mac, &body, &mac, &[0; 4], &mac].concat();
        frame.resize(60, 0);
        frame
    };
    assert!(announce("a", A));
    assert_eq!(bed.peer.receive(HANG).unwrap(), Some(request(A)));
    assert!(!announce("a", B), "another port's address");
    assert!(announce("b", B));
    let both = [(); 2].map(|()| bed.peer.receive(HANG).unwrap().unwrap());
    // The peer's kernel takes the second one's tag off.
    assert_eq!(both, [request(B), request(B)]);
    assert_eq!(bed.peer.receive(QUIET).unwrap(), None);
    let (_, log) = bed.iod.end();
    assert!(log.contains("52:54:00:00:00:0b is not its address"), "{log}");
}
