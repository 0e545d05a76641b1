//! A real guest's network through an I/O domain that is killed while serving it.

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::guest::shell;
use common::{Iod, until};
use rtvirtio_testbed::image;
use rtvirtio_testbed::netns::{self, Namespace};
use rtvirtio_testbed::qemu::{GuestDisk, GuestNic, NicBackend, QemuConfig, QemuGuest};
use rtvirtio_testkit::{HANG, Need, has, site};

const MAC: &str = "52:54:00:00:00:0a";
const HOST: &str = "10.200.0.1";
const GUEST: &str = "10.200.0.2";
/// Bytes that the guest sends and gets by TCP.
const MIB: usize = 8;

fn config(dir: &Path, keys: &str) -> String {
    format!(
        "[[network]]\nname = \"lan\"\n{keys}\n[[network.port]]\nname = \"a\"\nsocket = \"{}\"\nmac = \"{MAC}\"\ntap = \"tap-a\"\n",
        dir.join("a").display()
    )
}

/// Whether the host answers one of a few pings of the guest.
fn is_answered(guest: &mut QemuGuest, count: u32) -> bool {
    let ping = format!("ping -q -A -c {count} -W 2 {HOST}");
    guest.exec(&["sh", "-c", &ping], HANG).unwrap().success()
}

/// `rtvirtio verify` finds the guest's address, starts an echo in it, and runs and judges a flow.
fn a_flow_is_verified(guest: &mut QemuGuest, dir: &Path) {
    let program = std::fs::read(site::program("rtvirtio-guest")).unwrap();
    guest.write_file("/usr/bin/rtvirtio-guest", &program).unwrap();
    shell(guest, "chmod 755 /usr/bin/rtvirtio-guest");
    let spec = dir.join("spec.toml");
    let text = format!(
        "[device]\npath = \"/dev/sda\"\n[[network]]\nlink = \"100Mbit/s\"\n[[vm]]\nname = \"vm\"\npid = {}\nagent = \"{}\"\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n[[vm.nic]]\nmac = \"{MAC}\"\ntap = \"tap-a\"\n\
         [[vm.flow]]\nname = \"sv\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"200/s\"\ndscp = 46\n\
         target = {{ percentile = \"p50\", latency = \"10s\" }}\n",
        guest.handle().process.pid,
        guest.handle().agent_socket().display()
    );
    std::fs::write(&spec, text).unwrap();
    // QEMU serves one client of the agent at a time.
    guest.close_agent();
    let out = Command::new(site::program("rtvirtio"))
        .args(["verify", "--network-only", "--network-peer", "up1", "--for", "1s", "--json"])
        .arg(&spec)
        .env("RTVIRTIO_RUN_DIR", dir.join("run"))
        .env("RTVIRTIO_STATE_DIR", dir.join("state"))
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let result: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let task = &result["runs"][0]["tasks"][0];
    assert_eq!(task["verdict"], "met", "{result:#}");
    assert!(task["n"].as_u64() > Some(150), "{result:#}");
    assert_eq!(task["flow"]["echo"], format!("{GUEST}:7007"));
    // It is ended with the run.
    assert_eq!(shell(guest, "pidof rtvirtio-guest || echo none").trim(), "none");
}

/// Ping, TCP in both directions with checksums and segments left to the host, and the link is back
/// after each crash.
#[test]
fn a_guests_network_is_back_after_each_crash() {
    let test = "a_guests_network_is_back_after_each_crash";
    if !has(test, &[Need::Root, Need::QEMU, Need::Program("ip")]) {
        return;
    }
    let image = image::ensure(&image::default_cache(), &|line| eprintln!("{line}")).unwrap();
    Namespace::new().unwrap().enter().unwrap();
    netns::bridge(&["tap-a"]).unwrap();
    netns::run("ip", &format!("addr add {HOST}/24 dev up1")).unwrap();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let mut iod = Iod::start(dir.path(), &config(dir.path(), ""));
    let backend = NicBackend::VhostUser(dir.path().join("a"));
    let nic = Some(GuestNic { mac: MAC.into(), backend });
    let base = QemuConfig::new("vm", image, GuestDisk::None, &dir.path().join("run"));
    let mut guest = QemuGuest::start(&QemuConfig { nic, ..base }).unwrap();
    shell(&mut guest, &format!("ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up"));
    assert!(is_answered(&mut guest, 50), "{}", iod.status());
    a_flow_is_verified(&mut guest, dir.path());
    // TCP from the guest: what it sends arrives whole.
    let listener = std::net::TcpListener::bind((HOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let receiver = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut received = Vec::new();
        std::io::Read::read_to_end(&mut stream, &mut received).unwrap();
        received
    });
    shell(&mut guest, &format!("head -c {} /dev/zero | nc {HOST} {port}", MIB << 20));
    let received = receiver.join().unwrap();
    assert!(
        received.len() == MIB << 20 && received.iter().all(|byte| *byte == 0),
        "{} bytes",
        received.len()
    );
    // And to it.
    let listening = guest.spawn(&["sh", "-c", "nc -l -p 7777 </dev/null | md5sum"]).unwrap();
    let mut stream = until("a connection", || std::net::TcpStream::connect((GUEST, 7_777)).ok());
    std::io::Write::write_all(&mut stream, &vec![b'x'; MIB << 20]).unwrap();
    drop(stream);
    let output = until("all that was sent", || guest.poll(listening).unwrap());
    let expected = Command::new("sh")
        .args(["-c", &format!("head -c {} /dev/zero | tr '\\0' x | md5sum", MIB << 20)])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&expected.stdout));
    // Crashes under load.
    for round in 0..5 {
        let load = guest.spawn(&["ping", "-q", "-A", "-c", "100000", "-w", "2", HOST]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        iod.kill();
        iod = Iod::start(dir.path(), &config(dir.path(), ""));
        let begin = Instant::now();
        while !is_answered(&mut guest, 1) {
            assert!(begin.elapsed() < HANG, "round {round}: {}", iod.status());
        }
        until("the end of the load", || guest.poll(load).unwrap());
    }
    assert!(is_answered(&mut guest, 20), "{}", iod.status());
    let kernel = shell(&mut guest, "dmesg");
    assert!(!kernel.contains("Unexpected TXQ") && !kernel.contains("BUG"), "{kernel}");
    guest.stop().unwrap();
}
