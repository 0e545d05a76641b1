//! Round trips to a guest, and floods, as raw frames on the host's end of the uplink.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtvirtio_domain_client::ClientQueue;
use rtvirtio_testbed::netns::{Namespace, RawSocket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::worker::Worker;
use rtvirtio_harness::cores::{bind_this_thread, core_and_others};

/// Interface of the host's end of the uplink.
pub const PEER: &str = "up1";
/// Longest time from the last request until its answer counts as lost.
const LATE: Duration = Duration::from_millis(1_000);
/// Ethernet, IPv4 and ICMP headers.
const HEADERS: usize = 14 + 20 + 8;
/// Length of a request without FCS, in bytes.
const LENGTH: usize = 98;

/// An end of a path: its Ethernet and IPv4 addresses.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// Ethernet address.
    pub mac: [u8; 6],
    /// IPv4 address.
    pub ip: [u8; 4],
}

/// EtherType of frames without a protocol (IEEE 802, for local experiments).
pub const EXPERIMENT: u16 = 0x88b5;

/// A frame of this type and length without FCS.
pub fn frame(to: [u8; 6], from: [u8; 6], kind: u16, len: usize, fill: u8) -> Vec<u8> {
    let mut frame = [&to[..], &from, &kind.to_be_bytes()].concat();
    frame.resize(len, fill);
    frame
}

/// Sleeps until a queue has a received frame, at most for this time.
pub fn wait_for_frame(queue: &mut ClientQueue, longest: Duration) -> anyhow::Result<()> {
    queue.enable_call();
    if queue.has_used() {
        return Ok(());
    }
    let longest = Timespec { tv_sec: 0, tv_nsec: longest.as_nanos() as i64 };
    let mut fds = [PollFd::from_borrowed_fd(queue.call_fd(), PollFlags::IN)];
    match poll(&mut fds, Some(&longest)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    if fds[0].revents().contains(PollFlags::IN) {
        let _ = queue.call.read();
    }
    Ok(())
}

/// Answers to requests at a rate.
#[derive(Clone, Debug, Default)]
pub struct RoundTrips {
    /// Round trips of answered requests, ns.
    pub ns: Vec<u64>,
    /// Send times of answered requests, from the first one on, ns.
    pub sent: Vec<u64>,
    /// Requests without an answer.
    pub lost: u64,
}

/// Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// An ICMP echo request (RFC 792) with a 32-bit number.
pub fn request(from: Address, to: Address, number: u32) -> Vec<u8> {
    let mut frame = [&to.mac[..], &from.mac[..], &[8, 0]].concat();
    let mut ip = vec![0x45, 0, 0, (LENGTH - 14) as u8, 0, 0, 0x40, 0, 64, 1, 0, 0];
    ip.extend(from.ip);
    ip.extend(to.ip);
    let sum = checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let mut icmp = vec![8, 0, 0, 0];
    icmp.extend(number.to_be_bytes());
    icmp.resize(LENGTH - 14 - 20, 0x5a);
    let sum = checksum(&icmp).to_be_bytes();
    icmp[2..4].copy_from_slice(&sum);
    frame.extend(ip);
    frame.extend(icmp);
    frame
}

/// Number of an echo reply; `None` for another frame.
pub fn answer(frame: &[u8], from: Address) -> Option<u32> {
    let is_answer = frame.len() >= HEADERS
        && frame[6..12] == from.mac
        && frame[12..14] == [8, 0]
        && frame[23] == 1
        && frame[34] == 0;
    is_answer.then(|| u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]]))
}

/// An ARP announcement of this address.
fn announcement(of: Address) -> Vec<u8> {
    let mut frame = [&[0xff; 6][..], &of.mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    frame.extend(of.mac);
    frame.extend(of.ip);
    frame.extend([0; 6]);
    frame.extend(of.ip);
    frame.resize(60, 0);
    frame
}

/// Sends `count` requests, one each `period`, and measures their round trips, each from its own
/// send.
pub fn round_trips(
    namespace: &Namespace,
    from: Address,
    to: Address,
    count: u32,
    period: Duration,
) -> anyhow::Result<RoundTrips> {
    namespace.enter()?;
    let (receiver, sender) = (RawSocket::open(PEER)?, RawSocket::sender(PEER)?);
    sender.send(&announcement(from))?;
    let begin = Instant::now();
    let done = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&done);
    let (_, others) = core_and_others()?;
    let load_core = others[0];
    let receiving = std::thread::spawn(move || -> anyhow::Result<Vec<u64>> {
        bind_this_thread(load_core)?;
        let mut received = vec![0u64; count as usize];
        let mut buffer = vec![0u8; 2_048];
        let mut missing = count;
        let mut quiet_since = Instant::now();
        while missing > 0 && !(ended.load(Ordering::Acquire) && quiet_since.elapsed() > LATE) {
            let Some(len) = receiver.receive_into(&mut buffer, Duration::from_millis(50))? else { continue };
            let at = begin.elapsed().as_nanos() as u64;
            let number = answer(&buffer[..len], to);
            if let Some(slot) = number.and_then(|n| received.get_mut(n as usize)).filter(|at| **at == 0) {
                *slot = at;
                missing -= 1;
                quiet_since = Instant::now();
            }
        }
        Ok(received)
    });
    let mut sent = Vec::with_capacity(count as usize);
    for number in 0..count {
        let due = period * number;
        let now = begin.elapsed();
        if due > now {
            std::thread::sleep(due - now);
        }
        sent.push(begin.elapsed().as_nanos() as u64);
        sender.send(&request(from, to, number))?;
    }
    done.store(true, Ordering::Release);
    let received = receiving.join().map_err(|_| anyhow::anyhow!("the receiving thread: a defect"))??;
    let mut trips = RoundTrips::default();
    for (sent, received) in sent.into_iter().zip(received) {
        match received {
            0 => trips.lost += 1,
            at => {
                trips.ns.push(at.saturating_sub(sent));
                trips.sent.push(sent);
            }
        }
    }
    Ok(trips)
}

/// Frames of 60 bytes to one address, as fast as one thread can send; ended when dropped.
#[derive(Debug)]
pub struct Flood {
    worker: Worker,
    begin: Instant,
}

impl Flood {
    /// Starts the flood in the namespace.
    pub fn start(namespace: &Namespace, from: Address, to: Address) -> anyhow::Result<Self> {
        namespace.enter()?;
        let sender = RawSocket::sender(PEER)?;
        let frame = frame(to.mac, from.mac, EXPERIMENT, 60, 0x5a);
        let mut core = Some(core_and_others()?.1[0]);
        let worker = Worker::start(move || {
            // On another core the flood would be part of the load that it disturbs.
            let _ = core.take().map(bind_this_thread);
            (0..64).filter(|_| sender.send(&frame).is_ok()).count() as u64
        });
        Ok(Self { worker, begin: Instant::now() })
    }

    /// Ends the flood; returns frames per second.
    #[must_use]
    pub fn end(mut self) -> f64 {
        self.worker.end() as f64 / self.begin.elapsed().as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Address = Address { mac: [2, 0, 0, 0, 0, 1], ip: [10, 0, 0, 1] };
    const B: Address = Address { mac: [2, 0, 0, 0, 0, 2], ip: [10, 0, 0, 2] };

    #[test]
    fn a_request_is_valid_and_its_answer_is_known() {
        let mut frame = request(A, B, 77);
        assert_eq!(frame.len(), LENGTH);
        assert_eq!(checksum(&frame[14..34]), 0, "the header's sum over itself");
        assert_eq!(checksum(&frame[34..]), 0);
        assert_eq!(answer(&frame, A), None, "a request is no answer");
        frame[34] = 0;
        assert_eq!(answer(&frame, A), Some(77));
        assert_eq!(answer(&frame, B), None, "of another");
        assert_eq!(answer(&frame[..40], A), None);
    }
}
