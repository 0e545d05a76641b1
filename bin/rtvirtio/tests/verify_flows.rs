//! Flows are run through a bridge and the I/O domain to a guest that answers, and judged.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rtvirtio_domain_client::NetClient;
use rtvirtio_testbed::netns::{self, Namespace};
use rtvirtio_testkit::site::{Site, text};
use rtvirtio_testkit::{Need, has};
use serde_json::Value;

const GUEST: &str = "52:54:00:00:00:0a";
const ADDRESS: &str = "10.200.0.10";

fn spec(flows: &str) -> String {
    format!(
        "[device]\ntwin = \"qlc-nvme\"\n[[network]]\nname = \"station\"\nlink = \"100Mbit/s\"\n\
         [[vm]]\nname = \"relay\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
         [[vm.nic]]\nmac = \"{GUEST}\"\ntap = \"tap-relay\"\n{flows}"
    )
}

fn flow(name: &str, latency: &str, more: &str) -> String {
    format!(
        "[[vm.flow]]\nname = \"{name}\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"500/s\"\n{more}\n\
         target = {{ percentile = \"p90\", latency = \"{latency}\" }}\n"
    )
}

/// Answers UDP as a guest does, until told to stop; returns length and DSCP of each datagram.
fn echo(socket: &Path, stop: &AtomicBool) -> Vec<(usize, u8)> {
    let mut client = NetClient::connect(socket).unwrap();
    let mut seen = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Some(mut frame) = client.receive() else {
            std::thread::sleep(Duration::from_micros(200));
            continue;
        };
        let is_udp = frame.len() >= 42 && frame[12..14] == [8, 0] && frame[23] == 17;
        if !is_udp {
            continue;
        }
        seen.push((frame.len(), frame[15] >> 2));
        // Addresses and ports in turn: sums over them stay the same.
        for (a, b, len) in [(0, 6, 6), (26, 30, 4), (34, 36, 2)] {
            let (low, high) = frame.split_at_mut(b);
            low[a..a + len].swap_with_slice(&mut high[..len]);
        }
        while !client.send(&frame).unwrap() {
            std::thread::yield_now();
        }
    }
    seen
}

#[test]
fn flows_are_run_and_judged_through_the_domain() {
    let test = "flows_are_run_and_judged_through_the_domain";
    if !has(test, &[Need::Root, Need::Program("ip"), Need::Path("/dev/net/tun", "no taps")]) {
        return;
    }
    let site = Site::new();
    let socket = site.run_dir().join("ports/relay.sock");
    let body = format!(
        "control = \"{}\"\n[[network]]\nname = \"station\"\nlink = \"100Mbit/s\"\n[[network.port]]\nname = \"relay\"\n\
         socket = \"{}\"\ntap = \"tap-relay\"\nmac = \"{GUEST}\"\n",
        site.run_dir().join("iod.sock").display(),
        socket.display()
    );
    let mut apply = site.command(&["apply", &site.write("iod.toml", &body)]);
    let namespace = Namespace::new().unwrap();
    std::thread::scope(|s| {
        let inside = || {
            namespace.enter().unwrap();
            netns::bridge(&["tap-relay"]).unwrap();
            netns::run("ip", "addr add 10.200.0.1/24 dev up1").unwrap();
            let known = format!("neigh replace {ADDRESS} lladdr {GUEST} dev up1 nud permanent");
            netns::run("ip", &known).unwrap();
            let applied = apply.output().unwrap();
            assert!(applied.status.success(), "{}", text(&applied.stderr));
        };
        s.spawn(inside).join().unwrap();
    });
    let (_, status) = site.json(&["status"]);
    let pid = status["domain"]["pids"][0].as_u64().unwrap();
    let both = flow("sv", "1h", "dscp = 46") + &flow("trip", "1us", "");
    let path = site.write("station.toml", &spec(&both));
    // The domain's namespace is the one that was made above.
    let peer = format!("/proc/{pid}/ns/net/up1");
    let ends = ["--network-peer", &peer, "--network-echo", "relay=10.200.0.10:7007"];
    let verify = [&["verify", &path, "--for", "400ms", "--network-only"], &ends[..]].concat();
    // Nothing answers yet.
    let said = site.refused(&verify);
    assert!(said.contains("flow relay/sv: 10.200.0.10:7007 answers nothing"), "{said}");
    let stop = AtomicBool::new(false);
    let (judged, seen) = std::thread::scope(|s| {
        let guest = s.spawn(|| echo(&socket, &stop));
        let judged = site.json(&verify);
        stop.store(true, Ordering::Relaxed);
        (judged, guest.join().unwrap())
    });
    let (code, result) = judged;
    let of = |name: &str| -> Value {
        let tasks = result["runs"][0]["tasks"].as_array().unwrap_or_else(|| panic!("{result:#}"));
        tasks.iter().find(|t| t["task"] == name).unwrap().clone()
    };
    let (sv, trip) = (of("sv"), of("trip"));
    assert_eq!((code, &sv["verdict"], &trip["verdict"]), (2, &"met".into(), &"missed".into()), "{result:#}");
    for one in [&sv, &trip] {
        // All are accounted for; on a busy machine the last ones may be given up.
        let of_flow = |key: &str| one["flow"][key].as_u64().unwrap();
        let n = one["n"].as_u64().unwrap();
        assert!(n > 150 && n + of_flow("lost") + of_flow("unsent") == 200, "{one:#}");
    }
    assert_eq!(sv["flow"]["echo"], "10.200.0.10:7007");
    // Frames of the declared length, marked as declared.
    assert!(seen.iter().all(|(len, _)| *len == 200), "{seen:?}");
    let marked = seen.iter().filter(|(_, dscp)| *dscp == 46).count();
    assert!(marked > 150 && marked < seen.len(), "{marked} of {}", seen.len());
    let (_, iod) = site.json(&["iod", "status"]);
    assert!(iod["ports"][0]["tx"]["frames"].as_u64() > Some(300), "{iod:#}");
    site.ok(&["revert"]);
    site.assert_clean();
}

/// Without the interface behind the network no flow is run, and that is said.
#[test]
fn what_a_flow_needs_is_named() {
    if !has("what_a_flow_needs_is_named", &[Need::Root]) {
        return;
    }
    let site = Site::new();
    let path = site.write("station.toml", &spec(&flow("sv", "1ms", "")));
    let refused = |more: &[&str]| site.refused(&[&["verify", &path, "--network-only"], more].concat());
    assert!(refused(&[]).contains("--network-peer"));
    let said = refused(&["--network-peer", "lo"]);
    assert!(said.contains("--network-echo relay=ADDRESS"), "{said}");
    let said = refused(&["--network-peer", "no-such-if", "--network-echo", "relay=127.0.0.1"]);
    assert!(said.contains("flow relay/sv: interface no-such-if"), "{said}");
    let said = refused(&["--network-peer", "other=lo"]);
    assert!(said.contains("no network \"other\"; it has station"), "{said}");
}
