//! Ports come and go while others run.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use common::resources::Resources;
use common::{Iod, changed, configure, wait_for_links};
use rtvirtio_domain_client::NetClient;
use rtvirtio_testbed::netns::{self, Namespace, RawSocket};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{HANG, Need, has};

const PEER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0xee];

fn address(name: char) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, name as u8]
}

fn frame(to: [u8; 6], from: [u8; 6], number: u32) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &[0x88, 0xb5], &number.to_be_bytes()[..]].concat();
    frame.resize(60 + number as usize % 1_000, 0x5a);
    frame
}

/// The table of a port, on a tap of its name where its network has taps.
fn port(dir: &Path, name: char, has_tap: bool, keys: &str) -> String {
    let mac = address(name).map(|byte| format!("{byte:02x}")).join(":");
    let tap = if has_tap { format!("tap = \"tap-{name}\"\n") } else { String::new() };
    let socket = dir.join(name.to_string());
    format!(
        "[[network.port]]\nname = \"{name}\"\nsocket = \"{}\"\nmac = \"{mac}\"\n{tap}{keys}\n",
        socket.display()
    )
}

/// A thread that runs until it is ended.
struct Running<T> {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Running<T> {
    fn start(run: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        Self { stop, thread: std::thread::spawn(move || run(&stopped)) }
    }

    fn end(self) -> T {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("it ends well")
    }
}

/// The far end: sends every frame back to where it came from.
fn far_end(peer: RawSocket) -> Running<u64> {
    Running::start(move |stop| {
        let mut n = 0;
        while !stop.load(Ordering::Relaxed) {
            let Some(mut frame) = peer.receive(Duration::from_millis(20)).unwrap() else { continue };
            let (to, from) = frame.split_at_mut(6);
            to.swap_with_slice(&mut from[..6]);
            peer.send(&frame).unwrap();
            n += 1;
        }
        n
    })
}

fn round_trip(client: &mut NetClient, name: char, number: u32) {
    let sent = frame(PEER, address(name), number);
    assert!(client.send(&sent).unwrap());
    let begin = Instant::now();
    let back = loop {
        if let Some(back) = client.receive() {
            break back;
        }
        assert!(begin.elapsed() < HANG, "frame {number} of {name} is lost");
        std::thread::sleep(Duration::from_micros(100));
    };
    assert_eq!(back, frame(address(name), PEER, number), "frame {number} of {name}");
}

/// The same of a port that has just come. A bridge passes frames of a tap from a moment after its
/// link is up (linkwatch of the kernel), so a frame is sent again until it is answered.
fn until_answered(client: &mut NetClient, name: char, number: u32) {
    let (sent, back) = (frame(PEER, address(name), number), frame(address(name), PEER, number));
    let begin = Instant::now();
    loop {
        assert!(client.send(&sent).unwrap());
        let round = Instant::now();
        while round.elapsed() < Duration::from_millis(50) {
            if client.receive().is_some_and(|frame| frame == back) {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        assert!(begin.elapsed() < HANG, "frame {number} of {name} is lost");
    }
}

/// A VM that counts its frames to the far end and back, one after the other.
fn neighbour(socket: &Path) -> Running<u32> {
    let socket = socket.to_owned();
    Running::start(move |stop| {
        let mut client = NetClient::connect(&socket).unwrap();
        let mut number = 0;
        while !stop.load(Ordering::Relaxed) {
            round_trip(&mut client, 'a', number);
            number += 1;
        }
        assert_eq!(client.receive(), None, "no frame comes twice");
        number
    })
}

/// Ports come and go in turn, each used by a guest of its own, next to a guest that counts its
/// frames: none is lost or comes twice, and nothing stays behind.
fn come_and_go(rounds: u32, network: &str, has_tap: bool) {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let base = format!("[[network]]\nname = \"lan\"\n{network}\n{}", port(dir.path(), 'a', has_tap, ""));
    let mut iod = Iod::start(dir.path(), &base);
    let far = far_end(RawSocket::open("up1").unwrap());
    // Each frame of the neighbour is sent once and counted: the bridge has to pass them.
    if has_tap {
        wait_for_links(&["tap-a"]);
    }
    let counted = neighbour(&dir.path().join("a"));
    let turn = |iod: &Iod, i: u32| {
        let name = ['x', 'y'][i as usize % 2];
        configure(dir.path(), &(base.clone() + &port(dir.path(), name, has_tap, "weight = 300")));
        assert_eq!(changed(&iod.reload(false)), [format!("port \"{name}\": attached")]);
        let mut client = NetClient::connect(&dir.path().join(name.to_string())).unwrap();
        (0..3).for_each(|number| until_answered(&mut client, name, number));
        let status = iod.status_json();
        assert!(status["ports"][1]["tx"]["frames"].as_u64() >= Some(3), "{status}");
        drop(client);
        configure(dir.path(), &base);
        wait_for("the guest is gone", || {
            iod.reload(false)["changed"].as_array().is_some_and(|list| !list.is_empty())
        });
        assert!(!dir.path().join(name.to_string()).exists(), "its socket goes");
    };
    (0..4).for_each(|i| turn(&iod, i));
    let before = Resources::of(iod.pid());
    (4..rounds).for_each(|i| turn(&iod, i));
    let n = counted.end();
    assert!(n > 0 && iod.is_alive());
    let status = iod.status_json();
    let ports = status["ports"].as_array().unwrap();
    assert_eq!((ports.len(), ports[0]["name"].as_str()), (1, Some("a")), "{status}");
    for direction in ["tx", "rx"] {
        assert_eq!(ports[0][direction]["frames"], u64::from(n), "{status}");
    }
    assert!(ports[0]["drops"].as_object().unwrap().values().all(|count| *count == 0), "{status}");
    assert!(far.end() >= u64::from(n + 3 * rounds));
    wait_for("descriptors and threads as before", || {
        let after = Resources::of(iod.pid());
        after.descriptors <= before.descriptors && after.threads <= before.threads
    });
    iod.end_well();
}

#[test]
fn ports_on_taps_come_and_go() {
    let test = "ports_on_taps_come_and_go";
    if !has(test, &[Need::Root, Need::Program("ip"), Need::Path("/dev/net/tun", "no taps")]) {
        return;
    }
    Namespace::new().unwrap().enter().unwrap();
    netns::bridge(&["tap-a", "tap-x", "tap-y"]).unwrap();
    come_and_go(20, "", true);
    // On a link with a rate, frames wait in the scheduler.
    come_and_go(6, "link = \"1Gbit/s\"", true);
}

#[test]
fn ports_of_one_interface_come_and_go() {
    if !has("ports_of_one_interface_come_and_go", &[Need::Root, Need::Program("ip")]) {
        return;
    }
    Namespace::new().unwrap().enter().unwrap();
    netns::bridge::<&str>(&[]).unwrap();
    netns::run("ip", "link set up0 nomaster").unwrap();
    come_and_go(6, "uplink = \"packet\"\ninterface = \"up0\"", false);
}

/// What a start refuses is refused and changes nothing; a port in use goes by force only.
#[test]
fn an_attach_refuses_what_a_start_refuses() {
    let test = "an_attach_refuses_what_a_start_refuses";
    if !has(test, &[Need::Root, Need::Program("ip"), Need::Path("/dev/net/tun", "no taps")]) {
        return;
    }
    Namespace::new().unwrap().enter().unwrap();
    netns::bridge(&["tap-a", "tap-x"]).unwrap();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let reserve = "reserve = { rate = \"60Mbit/s\", burst = \"3kB\", deadline = \"2ms\" }";
    let head = "[[network]]\nname = \"lan\"\nlink = \"100Mbit/s\"\n";
    let base = head.to_owned() + &port(dir.path(), 'a', true, reserve);
    let iod = Iod::start(dir.path(), &base);
    let far = far_end(RawSocket::open("up1").unwrap());
    wait_for_links(&["tap-a"]);
    let counted = neighbour(&dir.path().join("a"));
    let x = port(dir.path(), 'x', true, "");
    wait_for("the neighbour", || iod.status_json()["ports"][0]["rx"]["frames"].as_u64() > Some(0));
    let descriptors = Resources::of(iod.pid()).descriptors;
    std::fs::write(dir.path().join("taken"), "a file").unwrap();
    let socket = dir.path().join("x").display().to_string();
    for (text, why) in [
        (port(dir.path(), 'x', true, reserve), "% of the link are reserved"),
        (
            port(dir.path(), 'x', true, &reserve.replace("60M", "10M").replace("2ms", "900us")),
            "port \"x\" cannot be promised 900us",
        ),
        (port(dir.path(), 'z', true, ""), "port \"z\": there is no tap tap-z; make it"),
        (x.replace("tap-x", "tap-a"), "`tap` tap-a is there twice"),
        (x.replace("00:78", "00:61"), "is there twice"),
        (x.replace(&socket, &dir.path().join("taken").display().to_string()), "which is not removed"),
        (x.replace(&socket, "/tmp/rtvirtio-no-such-dir/x"), "`socket` of port \"x\""),
    ] {
        configure(dir.path(), &(base.clone() + &text));
        let reply = iod.reload(false);
        let error = reply["error"].as_str().unwrap_or_else(|| panic!("{why}: {reply}"));
        assert!(error.contains(why), "{why}: {error}");
        assert!(!dir.path().join("x").exists(), "{why}: no socket stays");
    }
    wait_for("refused ports are closed", || Resources::of(iod.pid()).descriptors <= descriptors);
    configure(dir.path(), &(base.clone() + &x));
    assert!(
        iod.command("reload")
            .contains("port \\\"x\\\" would be added, and the I/O domain's process opens no files")
    );
    assert_eq!(changed(&iod.reload(false)), ["port \"x\": attached"]);
    let mut client = NetClient::connect(&dir.path().join("x")).unwrap();
    until_answered(&mut client, 'x', 0);
    configure(dir.path(), &base);
    let reply = iod.reload(false);
    let error = reply["error"].as_str().unwrap();
    assert!(
        error.contains("port \"x\" would be removed, and a guest is attached") && error.contains("--force"),
        "{error}"
    );
    until_answered(&mut client, 'x', 1);
    assert_eq!(changed(&iod.reload(true)), ["port \"x\": detached"]);
    // The tap is free for another program, and a live key of the one that stays is in force.
    drop(another_domain(dir.path()));
    configure(dir.path(), &base.replace("60M", "50M"));
    assert_eq!(changed(&iod.reload(false)), ["port \"a\": reserve"]);
    assert!(counted.end() > 0);
    far.end();
}

/// Attaches to `tap-x` as an I/O domain of its own does.
fn another_domain(dir: &Path) -> Iod {
    let other = dir.join("other");
    std::fs::create_dir(&other).unwrap();
    let text = format!("[[network]]\nname = \"lan\"\n{}", port(&other, 'x', true, ""));
    Iod::start(&other, &text)
}
