//! Measurement of one condition on the I/O domain.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rtvirtio_domain_client::NetClient;
use rtvirtio_domain_config::WIRE_OVERHEAD;
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_testbed::netns::{self, Namespace, RawSocket};
use rtvirtio_workflow::Progress;

use super::{Condition, DEADLINE, FRAME_BYTES, FRAMES, WebRun, config, tap};
use crate::backend::Backend;
use crate::net::probe::{self, Address, PEER, RoundTrips};
use crate::net::test_bed::{GUESTS, HOST, NAMES};
use rtvirtio_harness::cores::{bind, bind_this_thread, core_and_others};

/// EtherTypes of requests and answers, and of the neighbour's frames (IEEE 802, for local
/// experiments).
const WEB: u16 = 0x88b5;
const LOAD: u16 = 0x88b6;
/// Bytes of a request: the shortest frame.
const REQUEST_BYTES: usize = 60;
/// Offsets in a frame: number of its request, and its index among the frames of the answer.
const NUMBER: usize = 14;
const PART: usize = NUMBER + 4;
/// Mask of received frames when the answer is complete.
const WHOLE: u128 = (1u128 << FRAMES) - 1;
/// From the start of the neighbour to the first request.
const SETTLE: Duration = Duration::from_millis(500);
/// Silence after the last request after which missing frames count as lost.
const LATE: Duration = Duration::from_secs(1);
/// Interval at which a waiting thread checks whether it is to end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Pause of a sender whose buffers are in use: its 341 frames last 42 ms on the link.
const FULL: Duration = Duration::from_millis(2);

/// A frame whose number and part are 0.
fn frame(to: Address, from: Address, kind: u16, len: usize) -> Vec<u8> {
    probe::frame(to.mac, from.mac, kind, len, 0)
}

fn set_number(frame: &mut [u8], number: u32, part: u16) {
    frame[NUMBER..PART].copy_from_slice(&number.to_be_bytes());
    frame[PART..PART + 2].copy_from_slice(&part.to_be_bytes());
}

/// Number and part of a frame from this end; `None` for any other frame.
fn number(frame: &[u8], from: Address) -> Option<(u32, u16)> {
    let (head, rest) = frame.split_at_checked(NUMBER)?;
    let (number, rest) = rest.split_first_chunk::<4>()?;
    let part = rest.first_chunk::<2>()?;
    let is_of = head[6..12] == from.mac && head[12..] == WEB.to_be_bytes();
    is_of.then(|| (u32::from_be_bytes(*number), u16::from_be_bytes(*part)))
}

/// Sends this many requests.
pub(super) fn run(condition: Condition, requests: u32, progress: &dyn Progress) -> anyhow::Result<WebRun> {
    let (order, loaded) = condition;
    let namespace = Namespace::new()?;
    namespace.enter()?;
    netns::bridge(&NAMES.map(tap))?;
    let dir = tempfile::Builder::new().prefix("rtvirtio-net-").tempdir()?;
    let domain = Backend::start_domain(dir.path(), &config(order, dir.path()))?;
    let (core, _) = core_and_others()?;
    // Server, neighbour and I/O domain share a CPU, as guests and I/O domain do elsewhere.
    bind(domain.pid(), &[core])?;
    // The bridge learns the port of the host's end: otherwise it copies each frame to all taps.
    RawSocket::sender(PEER)?.send(&frame(GUESTS[1], HOST, LOAD, REQUEST_BYTES))?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            bind_this_thread(core)?;
            serve(&dir.path().join(NAMES[0]), &stop)
        });
        let sending = loaded.then(|| {
            scope.spawn(|| {
                bind_this_thread(core)?;
                send_without_end(&dir.path().join(NAMES[1]), &stop)
            })
        });
        let asked = progress.pause(SETTLE).map_err(anyhow::Error::from).and_then(|()| {
            let probe = NoiseProbe::start();
            let answers = ask(requests, progress);
            Ok((answers?, probe.finish().0.max_ns))
        });
        stop.store(true, Ordering::Relaxed);
        // Without a server there is no answer: its error comes first.
        let defect = |_| anyhow!("a thread ended: a defect");
        serving.join().map_err(defect)??;
        let neighbour = sending.map(|sending| sending.join().map_err(defect)).transpose()?.transpose()?;
        let (answers, stalled) = asked?;
        Ok(WebRun::new(condition, &answers, neighbour.unwrap_or(0.0), stalled))
    })
}

/// Answers each request with the frames of the file until it is stopped.
fn serve(socket: &Path, stop: &AtomicBool) -> anyhow::Result<()> {
    let mut client = NetClient::connect(socket)?;
    let mut answer = frame(HOST, GUESTS[0], WEB, FRAME_BYTES);
    // The bridge learns the server's port.
    client.send(&frame(HOST, GUESTS[0], LOAD, REQUEST_BYTES))?;
    let mut backlog: VecDeque<(u32, u16)> = VecDeque::new();
    while !stop.load(Ordering::Relaxed) {
        while let Some(request) = client.receive() {
            if let Some((number, _)) = number(&request, HOST) {
                backlog.extend((0..FRAMES).map(|part| (number, part)));
            }
        }
        let before = backlog.len();
        while let Some((number, part)) = backlog.front() {
            set_number(&mut answer, *number, *part);
            if !client.queue(&answer) {
                break;
            }
            backlog.pop_front();
        }
        if backlog.len() < before {
            client.tx.notify()?;
        }
        if backlog.is_empty() {
            probe::wait_for_frame(&mut client.rx, POLL_INTERVAL)?;
        } else {
            std::thread::sleep(FULL);
        }
    }
    Ok(())
}

/// Keeps all buffers full of frames to the host's end until it is stopped; returns the rate at
/// which they were taken, bit/s.
fn send_without_end(socket: &Path, stop: &AtomicBool) -> anyhow::Result<f64> {
    let mut client = NetClient::connect(socket)?;
    let frame = frame(HOST, GUESTS[1], LOAD, FRAME_BYTES);
    let (begin, mut queued) = (Instant::now(), 0u64);
    while !stop.load(Ordering::Relaxed) {
        while client.queue(&frame) {
            queued += 1;
        }
        client.tx.notify()?;
        std::thread::sleep(FULL);
    }
    let bits = (queued - client.unfetched() as u64) * (FRAME_BYTES as u64 + WIRE_OVERHEAD) * 8;
    Ok(bits as f64 / begin.elapsed().as_secs_f64())
}

/// Sends requests from the host's end, one each period, also when earlier ones are not answered
/// yet. Times count from the moment at which a request was due.
fn ask(requests: u32, progress: &dyn Progress) -> anyhow::Result<RoundTrips> {
    // Frames of the neighbour would fill the socket.
    let (sender, receiver) = (RawSocket::sender(PEER)?, RawSocket::of_type(PEER, WEB)?);
    let (_, others) = core_and_others()?;
    let (begin, done) = (Instant::now() + DEADLINE, AtomicBool::new(false));
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            bind_this_thread(others[0])?;
            receive(&receiver, requests, begin, &done)
        });
        let mut request = frame(GUESTS[0], HOST, WEB, REQUEST_BYTES);
        let sent = (0..requests).try_for_each(|number| -> anyhow::Result<()> {
            progress.check_cancelled()?;
            std::thread::sleep((begin + DEADLINE * number).saturating_duration_since(Instant::now()));
            set_number(&mut request, number, 0);
            Ok(sender.send(&request)?)
        });
        done.store(true, Ordering::Release);
        let answers = receiving.join().map_err(|_| anyhow!("the receiving thread: a defect"))?;
        sent.and(answers)
    })
}

/// Receives answers until all are complete, or no more arrive after the last request.
fn receive(
    socket: &RawSocket,
    requests: u32,
    begin: Instant,
    done: &AtomicBool,
) -> anyhow::Result<RoundTrips> {
    let mut parts = vec![0u128; requests as usize];
    let mut answers = RoundTrips { lost: requests.into(), ..RoundTrips::default() };
    let mut buffer = vec![0u8; 2_048];
    let mut last = Instant::now();
    while answers.lost > 0 && !(done.load(Ordering::Acquire) && last.elapsed() > LATE) {
        let Some(len) = socket.receive_into(&mut buffer, POLL_INTERVAL)? else { continue };
        last = Instant::now();
        let Some((number, part)) = number(&buffer[..len], GUESTS[0]) else { continue };
        let Some(parts) = parts.get_mut(number as usize) else { continue };
        let with = *parts | 1u128.checked_shl(part.into()).unwrap_or(0);
        if with == WHOLE && *parts != WHOLE {
            let due = begin + DEADLINE * number;
            answers.ns.push(last.saturating_duration_since(due).as_nanos() as u64);
            answers.lost -= 1;
        }
        *parts = with;
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_other_ends_and_types_are_no_answers() {
        let mut answer = frame(HOST, GUESTS[0], WEB, FRAME_BYTES);
        set_number(&mut answer, 7, FRAMES - 1);
        assert_eq!(number(&answer, GUESTS[0]), Some((7, FRAMES - 1)));
        assert_eq!(number(&answer, GUESTS[1]), None);
        assert_eq!(number(&frame(HOST, GUESTS[0], LOAD, FRAME_BYTES), GUESTS[0]), None);
        assert_eq!(number(&answer[..PART + 1], GUESTS[0]), None, "too short");
        assert_eq!(WHOLE.count_ones(), u32::from(FRAMES));
    }
}
