//! Frames of a port under a cap, in a network namespace of their own.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use rtvirtio_domain_client::NetClient;
use rtvirtio_testbed::netns::{self, Namespace, RawSocket};
use rtvirtio_traffic::Direction;
use rustix::time::{ClockId, clock_gettime};

use super::measure::{ENGINE, WARM_UP, cap, raise};
use crate::backend::Backend;
use crate::net::probe::{self, EXPERIMENT, PEER};

/// Addresses of the VM and of the host's end.
const VM: [u8; 6] = [0x52, 0x54, 0, 0, 1, 0];
const FAR: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
/// Length of a frame without FCS.
const LENGTH: usize = 1_514;
/// Interval of filling a sender's queue, which holds more than the largest rate moves meanwhile.
const REFILL: Duration = Duration::from_millis(1);
/// Frames that the host's end sends at each refill: more than the largest rate.
const SENT: usize = 48;

fn frame(to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
    probe::frame(to, from, EXPERIMENT, LENGTH, 0x5a)
}

fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Times of arrivals at the receiver, ns of CLOCK_MONOTONIC.
pub(super) fn run(
    flow: Direction,
    rate: Option<u64>,
    time: Duration,
    dir: &Path,
) -> anyhow::Result<Vec<u64>> {
    let namespace = Namespace::new()?;
    namespace.enter()?;
    netns::bridge(&["tap0"])?;
    let socket = dir.join("port.sock");
    let config = format!(
        "control = {:?}\n[[network]]\nname = \"bench\"\nfifo = {ENGINE}\n[[network.port]]\nname = \"vm0\"\n\
         socket = {:?}\ntap = \"tap0\"\nmac = \"52:54:00:00:01:00\"\n{}",
        dir.join("control").display().to_string(),
        socket.display().to_string(),
        cap(flow, rate)?
    );
    let _domain = Backend::start_domain(dir, &config)?;
    let client = NetClient::connect(&socket)?;
    // The bridge learns the ports of both ends.
    RawSocket::sender(PEER)?.send(&frame(VM, FAR))?;
    if flow == Direction::Tx { sent(client, time) } else { received(client, time) }
}

/// The VM sends without a pause, the host's end records the arrivals.
fn sent(mut client: NetClient, time: Duration) -> anyhow::Result<Vec<u64>> {
    let receiver = RawSocket::open(PEER)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let frame = frame(FAR, VM);
        while !stopped.load(Ordering::Relaxed) {
            while client.queue(&frame) {}
            client.tx.notify()?;
            std::thread::sleep(REFILL);
        }
        Ok(())
    });
    raise()?;
    let (begin, mut at) = (Instant::now(), Vec::new());
    let mut buffer = vec![0u8; 2 * LENGTH];
    while begin.elapsed() < WARM_UP + time {
        let got = receiver.receive_into(&mut buffer, Duration::from_millis(100))?;
        if got == Some(LENGTH) && buffer[6..12] == VM && begin.elapsed() >= WARM_UP {
            at.push(now());
        }
    }
    stop.store(true, Ordering::Relaxed);
    ensure!(sender.join().is_ok_and(|done| done.is_ok()), "the sender failed");
    Ok(at)
}

/// The host's end sends more than the cap admits, the VM records the arrivals.
fn received(mut client: NetClient, time: Duration) -> anyhow::Result<Vec<u64>> {
    let far = RawSocket::sender(PEER)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let sender = std::thread::spawn(move || {
        let frame = frame(VM, FAR);
        while !stopped.load(Ordering::Relaxed) {
            // Frames that do not fit the queue of the tap are dropped, as on any link.
            for _ in 0..SENT {
                let _ = far.send(&frame);
            }
            std::thread::sleep(REFILL);
        }
    });
    raise()?;
    let (begin, mut at) = (Instant::now(), Vec::new());
    while begin.elapsed() < WARM_UP + time {
        while let Some(frame) = client.receive() {
            if frame.len() == LENGTH && begin.elapsed() >= WARM_UP {
                at.push(now());
            }
        }
        probe::wait_for_frame(&mut client.rx, Duration::from_millis(100))?;
    }
    stop.store(true, Ordering::Relaxed);
    ensure!(sender.join().is_ok(), "the sender failed");
    Ok(at)
}
