//! Traces of frames.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use common::{Iod, until};
use rtvirtio_domain_client::NetClient;
use rtvirtio_testbed::netns::{self, Namespace, RawSocket};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{HANG, Need, has};
use serde_json::Value;

const A: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0xa];
const PEER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0xee];

fn frame(to: [u8; 6], from: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from[..], &[0x88, 0xb5]].concat();
    frame.resize(len, 0x5a);
    frame
}

/// What is passed on has its times, what is not has its reason, and a tagged frame its class.
#[test]
fn every_frame_is_traced() {
    let test = "every_frame_is_traced";
    if !has(test, &[Need::Root, Need::Program("ip"), Need::Path("/dev/net/tun", "no taps")]) {
        return;
    }
    Namespace::new().unwrap().enter().unwrap();
    netns::bridge(&["tap-a"]).unwrap();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let socket = dir.path().join("a");
    let text = format!(
        "[[network]]\nname = \"lan\"\nlink = \"100Mbit/s\"\n[[network.port]]\nname = \"a\"\nsocket = \"{}\"\ntap = \"tap-a\"\n\
         mac = \"52:54:00:00:00:0a\"\nurgent_pcp = [4]\nurgent = {{ rate = \"10Mbit/s\", burst = \"1kB\", deadline = \"5ms\" }}\n\
         broadcast = \"1/min\"\n",
        socket.display()
    );
    let iod = Iod::start(dir.path(), &text);
    let peer = RawSocket::open("up1").unwrap();
    let mut a = NetClient::connect(&socket).unwrap();
    let stream = UnixStream::connect(dir.path().join("ctl")).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    writeln!(&stream, "{{\"command\": \"trace\"}}").unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap());
    let mut line = || -> Value {
        let mut text = String::new();
        lines.read_line(&mut text).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"))
    };
    let head = line();
    assert_eq!((&head["trace"]["devices"], &head["trace"]["networks"]), (&0.into(), &1.into()), "{head}");
    // Out: a plain one, an urgent one, one with another's address, and one that is too short.
    let mut urgent = frame(PEER, A, 200);
    urgent.splice(12..12, [0x81, 0, 4 << 5, 0]);
    for sent in [&frame(PEER, A, 300), &urgent, &frame(PEER, PEER, 90), &vec![0; 10]] {
        assert!(a.send(sent).unwrap());
    }
    for _ in 0..2 {
        assert!(peer.receive(HANG).unwrap().is_some());
    }
    // In: one for it, and two for all, of which the second is beyond its limit.
    for to in [A, [0xff; 6], [0xff; 6]] {
        peer.send(&frame(to, PEER, 120)).unwrap();
    }
    for _ in 0..2 {
        until("a frame", || a.receive());
    }
    wait_for("a frame beyond the limit", || iod.status().contains("\"broadcast\":1"));
    stream.shutdown(Shutdown::Write).unwrap();
    let mut events = Vec::new();
    let end = loop {
        let line = line();
        if line.get("end").is_some() {
            break line["end"].clone();
        }
        events.push(line);
    };
    // What is dropped is dropped when it comes; what is passed on has its turn.
    let of = |op: &str| -> Vec<(String, u64)> {
        let events = events.iter().filter(|e| e["op"] == op);
        let of = events.map(|e| (e["fate"].as_str().unwrap().to_owned(), e["len"].as_u64().unwrap()));
        let mut all: Vec<(String, u64)> = of.collect();
        all.sort();
        all
    };
    let named = |list: &[(&str, u64)]| -> Vec<(String, u64)> {
        list.iter().map(|(fate, len)| ((*fate).to_owned(), *len)).collect()
    };
    let sent = of("send");
    let expected = [("malformed", 10), ("passed", 204), ("passed", 300), ("spoofed", 90)];
    assert_eq!(sent, named(&expected), "{events:#?}");
    assert_eq!(of("receive"), named(&[("broadcast", 120), ("passed", 120), ("passed", 120)]), "{events:#?}");
    for event in &events {
        assert_eq!((&event["network"], &event["vm"]), (&"lan".into(), &"a".into()), "{event}");
        let ns = |key: &str| event[key].as_u64().unwrap();
        assert_eq!(ns("wait_ns") + ns("device_ns"), ns("total_ns"), "{event}");
    }
    let urgent = events.iter().find(|e| e["len"] == 204).unwrap();
    assert_eq!((&urgent["class"], &urgent["reserved"]), (&"real-time".into(), &true.into()), "{urgent}");
    let plain = events.iter().find(|e| e["len"] == 300).unwrap();
    assert_eq!((&plain["class"], &plain["reserved"]), (&"best-effort".into(), &false.into()), "{plain}");
    assert_eq!((&end["events"], &end["dropped"]), (&events.len().into(), &0.into()), "{end}");
}
