//! Parts without guests: frames per second of an engine over the number of ports, and a neighbour
//! that attacks.

use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_domain_client::{NET_HEADER, NetClient};
use rtvirtio_testbed::netns::{self, Namespace, RawSocket};

use super::probe::{EXPERIMENT, Flood, PEER, frame};
use super::test_bed::{GUESTS, HOST};
use super::worker::Worker;
use crate::backend::Backend;

/// Time in which frames are counted.
const LENGTH: Duration = Duration::from_secs(3);
/// Length of the flood without a guest.
const FLOOD_LENGTH: Duration = Duration::from_secs(1);

/// Frames per second of one port out of `ports`, sent as fast as the engine takes them, with the
/// frames that left the engine counted.
pub fn frames_per_second(ports: usize) -> anyhow::Result<f64> {
    let namespace = Namespace::new()?;
    namespace.enter()?;
    let taps: Vec<String> = (0..ports).map(|i| format!("tap{i}")).collect();
    netns::bridge(&taps)?;
    let dir = tempfile::Builder::new().prefix("rtvirtio-net-").tempdir()?;
    let mut config = format!("control = {:?}\n[[network]]\nname = \"bench\"\n", dir.path().join("control"));
    for i in 0..ports {
        config.push_str(&format!(
            "[[network.port]]\nname = \"p{i}\"\nsocket = {:?}\ntap = \"tap{i}\"\nmac = \"52:54:00:00:01:{i:02x}\"\n",
            dir.path().join(format!("p{i}"))
        ));
    }
    let _domain = Backend::start_domain(dir.path(), &config)?;
    // All ports are attached; one is busy.
    let connect = |i: usize| NetClient::connect(&dir.path().join(format!("p{i}")));
    let mut clients = (0..ports).map(connect).collect::<Result<Vec<_>, _>>()?;
    let (far, port) = ([0x52, 0x54, 0, 0, 0, 1], [0x52, 0x54, 0, 0, 1, 0]);
    let frame = |to, from| frame(to, from, EXPERIMENT, 60, 0x5a);
    // The bridge learns the port of the host's end: otherwise it copies each frame to all taps.
    RawSocket::sender(PEER)?.send(&frame(port, far))?;
    let frame = frame(far, port);
    let client = &mut clients[0];
    let (begin, mut sent) = (Instant::now(), 0u64);
    while begin.elapsed() < LENGTH {
        let mut any = false;
        for _ in 0..32 {
            if !client.queue(&frame) {
                break;
            }
            sent += 1;
            any = true;
        }
        client.tx.notify()?;
        if !any {
            std::thread::yield_now();
        }
    }
    Ok((sent - client.unfetched() as u64) as f64 / begin.elapsed().as_secs_f64())
}

/// Frames per second of the flood itself, without a guest: into a link without a receiver, and
/// through the bridge.
pub fn flood_per_second() -> anyhow::Result<[f64; 2]> {
    let namespace = Namespace::new()?;
    namespace.enter()?;
    netns::bridge(&["tap0"])?;
    let rate = || -> anyhow::Result<f64> {
        let flood = Flood::start(&namespace, HOST, GUESTS[1])?;
        std::thread::sleep(FLOOD_LENGTH);
        Ok(flood.end())
    };
    let bridged = rate()?;
    netns::run("ip", "link set up0 nomaster")?;
    Ok([rate()?, bridged])
}

/// A malicious guest on a port; the sum is that of its connections.
pub(super) fn attacker(socket: &Path, own: [u8; 6], victim: [u8; 6]) -> Worker {
    let socket = socket.to_owned();
    Worker::start(move || {
        let connected = NetClient::connect(&socket).map(|mut client| attack(&mut client, own, victim));
        connected.is_ok().into()
    })
}

/// Attacks: frames of the victim's address, invalid headers, a storm of groups and kicks, and
/// invalid chains.
fn attack(client: &mut NetClient, own: [u8; 6], victim: [u8; 6]) {
    let frame = |to, from| frame(to, from, EXPERIMENT, 60, 0);
    for i in 0..200u8 {
        let _ = client.send(&frame([0xff; 6], victim));
        let mut header = [0; NET_HEADER];
        header[usize::from(i) % NET_HEADER] = i | 1;
        client.queue_with_header(&header, &frame(victim, own));
        let _ = client.send(&frame([1, 0, 0x5e, 0, 0, i], own));
        let _ = client.tx.kick.write(1);
        let _ = client.rx.kick.write(1);
    }
    client.tx.write_descriptor_raw(900, 1 << 20, 64, 1, 900);
    client.rx.write_descriptor_raw(900, u64::MAX - 8, 4_096, 2, 0);
    for _ in 0..100 {
        client.tx.add_avail(900);
        client.rx.add_avail(900);
    }
    let _ = client.tx.kick.write(1);
    let _ = client.rx.kick.write(1);
    client.tx.set_avail_index(30_000);
    let _ = client.tx.kick.write(1);
}
