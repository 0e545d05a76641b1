//! Frames to a guest and back: a flow of a spec, run from the host's side of the network.
//!
//! Each frame is a UDP datagram of the declared length, sent at its scheduled time whatever
//! happened to the ones before it (an open loop). The guest echoes it (RFC 862), and its latency is
//! the time from the scheduled time until the echo arrives. A frame without an echo is above every
//! target.
//!
//! The round trip is judged against the flow's target. It consists of the way there, the guest's
//! echo and the way back, so a flow that meets its target in this way meets it in each direction; a
//! flow that misses it may do so in the other direction only. Frames that this host itself sent
//! late show nothing about the network: where a target is missed by those alone, it is unproven.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtvirtio_spec::{Flow, Mark};
use rtvirtio_stats::Latencies;
use rtvirtio_stats::pot::can_carry;
use rtvirtio_units::{Iops, Nanos, Percentile, SHORTEST_FRAME};
use rustix::net::sockopt;

use crate::tail::estimate;
use crate::verdict::{Evidence, Judgement, judge};
use crate::{FlowFacts, MeasureError, TaskResult, Verdict};

/// Time from the start of a run to its first frame: all flows of a run begin at one moment.
const LEAD: Duration = Duration::from_millis(50);
/// Longest sleep or receive of a thread before it checks whether to stop.
const LOOK: Duration = Duration::from_millis(20);
/// Time after the last frame, or the last echo, until missing ones count as lost.
const LATE: Duration = Duration::from_secs(1);
/// Largest number of frames of a flow in a run: 32 bytes each are kept.
pub const MOST_FRAMES: u64 = 20_000_000;
/// Share of the frames that this host must have sent: with less it is not the declared flow.
const SENT: f64 = 0.99;
/// Receive buffer in bytes. Echoes beyond it would be lost in this host, and not in the network.
const ANSWERS: usize = 8 << 20;
/// Bytes of the header of each datagram: number of the run, number of the frame.
const HEAD: usize = 16;

/// Host interface that a flow's frames leave by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Network namespace of the interface, as a file; this process's own when `None`.
    pub namespace: Option<PathBuf>,
    pub interface: String,
}

/// Flow to run, with its addresses.
#[derive(Clone, Debug)]
pub struct FlowLoad {
    pub vm: String,
    /// Declaration of the flow.
    pub flow: Flow,
    /// Interface by which its frames leave this host.
    pub peer: Peer,
    /// Address of the echo service in the guest.
    pub echo: SocketAddr,
    /// Largest payload of a frame of its network, in bytes.
    pub mtu: u32,
}

#[derive(Clone, Debug)]
pub struct FlowMeasurement {
    /// Latency of each frame from its scheduled time; of lost ones the time waited.
    pub latencies: Latencies,
    /// Latency of each frame from when it was sent.
    from_send: Latencies,
    /// Latencies of the answered frames, in their order.
    series: Vec<u64>,
    /// Lateness of this host's sends.
    sent_late: Latencies,
    /// Number of frames with an echo.
    answered: u64,
    /// Number of frames without an echo.
    lost: u64,
    /// Number of frames that this host did not send.
    unsent: u64,
    /// Number of frames above the target, lost ones included.
    exceedances: u64,
    /// Exceedances that this host sent late, and that are within the target counted from then.
    own: u64,
}

/// Scheduled times of a flow's frames.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    begin: Instant,
    rate: f64,
    burst: u64,
    /// Number of frames, including the warm-up.
    count: u64,
    /// Number of the first frame after the warm-up.
    first: u64,
    run: [u8; 8],
}

impl Schedule {
    fn new(flow: &Flow, begin: Instant, warm_up: Duration, length: Duration, run: [u8; 8]) -> Self {
        let (rate, burst) = (flow.rate.0, u64::from(flow.burst.max(1)));
        // 0.3 s at 2000/s are 600 frames.
        let frames = |time: Duration| (time.as_secs_f64() * rate + 1e-6) as u64;
        let first = frames(warm_up).div_ceil(burst) * burst;
        // At least one frame, also for a rate below one per run.
        Self { begin, rate, burst, count: first + frames(length).max(1), first, run }
    }

    /// Scheduled time of a frame, after [`Schedule::begin`]: the same for all frames of a burst.
    fn due(&self, frame: u64) -> Duration {
        LEAD + Duration::from_secs_f64((frame / self.burst * self.burst) as f64 / self.rate)
    }

    fn end(&self) -> Duration {
        self.due(self.count)
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }
}

/// Runs all flows at once, until `length` after the warm-up. Results are in the order of `loads`.
///
/// # Errors
/// [`MeasureError::Flow`] for a flow without any echo, or whose interface does not exist;
/// [`MeasureError::Cancelled`] when `stop` returns true.
pub fn run(
    loads: &[FlowLoad],
    warm_up: Duration,
    length: Duration,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<FlowMeasurement>, MeasureError> {
    let begin = Instant::now();
    let schedules: Vec<Schedule> = loads
        .iter()
        .enumerate()
        .map(|(i, load)| Schedule::new(&load.flow, begin, warm_up, length, run_number(i)))
        .collect();
    let mut pairs = loads.iter().zip(&schedules);
    if let Some((load, schedule)) = pairs.find(|(_, schedule)| schedule.count > MOST_FRAMES) {
        let seconds = MOST_FRAMES as f64 / schedule.rate;
        let why = format!(
            "its {} frames are more than a run keeps: measure for at most {seconds:.0} s",
            schedule.count
        );
        return Err(failed(load, why));
    }
    std::thread::scope(|scope| {
        let start = |(load, schedule)| scope.spawn(move || run_one(load, schedule, stop));
        let threads: Vec<_> = loads.iter().zip(&schedules).map(start).collect();
        let joined = threads.into_iter().zip(loads).map(|(thread, load)| {
            thread.join().unwrap_or_else(|_| Err(failed(load, "its thread ended: a defect".to_owned())))
        });
        joined.collect()
    })
}

fn failed(load: &FlowLoad, reason: String) -> MeasureError {
    MeasureError::Flow { vm: load.vm.clone(), flow: load.flow.name.clone(), reason }
}

/// Random-like number that no recent run of this or another process used.
fn run_number(flow: usize) -> [u8; 8] {
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let process = u64::from(std::process::id()) << 40;
    (time.as_nanos() as u64 ^ process).wrapping_add(flow as u64).to_be_bytes()
}

fn run_one(
    load: &FlowLoad,
    schedule: &Schedule,
    stop: &(dyn Fn() -> bool + Sync),
) -> Result<FlowMeasurement, MeasureError> {
    let socket = open(load).map_err(|(what, e)| failed(load, format!("{what}: {e}")))?;
    let all_sent = AtomicBool::new(false);
    let (sent, received) = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(&socket, schedule, &all_sent));
        let sent = send(&socket, load, schedule, stop);
        all_sent.store(true, Ordering::Release);
        (sent, receiving.join())
    });
    if stop() {
        return Err(MeasureError::Cancelled);
    }
    let received = received.map_err(|_| failed(load, "its receiving thread ended: a defect".to_owned()))?;
    if received.at.iter().all(|at| *at == 0) {
        let why = match (&sent.error, received.refused) {
            (Some(e), _) => format!("no frame could be sent to {}: {e}", load.echo),
            (None, true) => format!(
                "{} answers that nothing listens on this port: start `rtvirtio-guest echo` in the guest, or name another UDP echo with --network-echo",
                load.echo
            ),
            (None, false) => format!(
                "{} answers nothing: is it reached through {}, and does a UDP echo run there (`rtvirtio-guest echo`)?",
                load.echo, load.peer
            ),
        };
        return Err(failed(load, why));
    }
    let limit = load.flow.target.map(|target| target.latency);
    Ok(measurement(schedule, limit, &sent.at, &received.at))
}

/// Opens a socket on the peer's interface, connected to the guest.
fn open(load: &FlowLoad) -> Result<UdpSocket, (String, io::Error)> {
    if let Some(path) = &load.peer.namespace {
        let named = |e: io::Error| (path.display().to_string(), e);
        let namespace = rtvirtio_kernel::trusted::open_config(path).map_err(named)?;
        // Only this thread changes its namespace, and it ends with the run.
        let kind = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).map_err(|e| named(e.into()))?;
    }
    let any: IpAddr = match load.echo {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).map_err(|e| ("a UDP socket".to_owned(), e))?;
    let interface = &load.peer.interface;
    bind_to_device(&socket, interface).map_err(|e| (format!("interface {interface}"), e))?;
    // As large as the limits allow.
    if sockopt::set_socket_recv_buffer_size_force(&socket, ANSWERS).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(&socket, ANSWERS);
    }
    if let (Some(Mark::Dscp(dscp)), SocketAddr::V4(_)) = (load.flow.mark, load.echo) {
        sockopt::set_ip_tos(&socket, dscp << 2).map_err(|e| ("its DSCP".to_owned(), e.into()))?;
    }
    socket.connect(load.echo).map_err(|e| (load.echo.to_string(), e))?;
    socket.set_read_timeout(Some(LOOK)).map_err(|e| ("a UDP socket".to_owned(), e))?;
    Ok(socket)
}

/// Sends by this interface only, and receives only from it.
fn bind_to_device(socket: &UdpSocket, interface: &str) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes as the name has, which outlives the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            interface.as_ptr().cast(),
            interface.len() as libc::socklen_t,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Bytes of the datagram in a frame of the declared length.
fn payload(load: &FlowLoad) -> usize {
    let ip = if load.echo.is_ipv4() { 20 } else { 40 };
    let most = u64::from(load.mtu).saturating_sub(ip + 8);
    let frame = load.flow.frame.0.max(SHORTEST_FRAME);
    (frame.saturating_sub(14 + ip + 8).min(most) as usize).max(HEAD)
}

/// Send time of each frame, in ns after the begin; 0 for frames that were not sent.
struct Sent {
    at: Vec<u64>,
    error: Option<io::Error>,
}

fn send(socket: &UdpSocket, load: &FlowLoad, schedule: &Schedule, stop: &(dyn Fn() -> bool + Sync)) -> Sent {
    let mut sent = Sent { at: vec![0; schedule.count as usize], error: None };
    let mut datagram = vec![0x5a; payload(load)];
    datagram[..8].copy_from_slice(&schedule.run);
    let give_up = schedule.end() + LATE;
    for (number, at) in sent.at.iter_mut().enumerate() {
        let due = schedule.due(number as u64);
        loop {
            let now = schedule.now();
            if stop() || now > give_up {
                return sent;
            }
            match due.checked_sub(now).filter(|left| !left.is_zero()) {
                Some(left) => std::thread::sleep(left.min(LOOK)),
                None => break,
            }
        }
        datagram[8..HEAD].copy_from_slice(&(number as u64).to_be_bytes());
        let now = schedule.now().as_nanos() as u64;
        let mut done = socket.send(&datagram);
        if matches!(&done, Err(e) if e.kind() == ErrorKind::ConnectionRefused) {
            // The error belongs to an earlier frame.
            done = socket.send(&datagram);
        }
        match done {
            Ok(_) => *at = now.max(1),
            // The interface's queue is full, or there is no route to the guest.
            Err(e) => sent.error = Some(e),
        }
    }
    sent
}

/// Arrival of each frame's echo, in ns after the begin; 0 for frames without one.
struct Received {
    at: Vec<u64>,
    /// Whether an ICMP error says that nothing listens on the port.
    refused: bool,
}

fn receive(socket: &UdpSocket, schedule: &Schedule, all_sent: &AtomicBool) -> Received {
    let mut received = Received { at: vec![0; schedule.count as usize], refused: false };
    let mut missing = schedule.count;
    let mut buffer = [0; 65_536];
    let mut last = Instant::now();
    while missing > 0 {
        match socket.recv(&mut buffer) {
            Ok(len) => {
                let at = schedule.now().as_nanos() as u64;
                let number = number(&buffer[..len], schedule);
                let slot = number.and_then(|n| received.at.get_mut(n as usize)).filter(|at| **at == 0);
                if let Some(slot) = slot {
                    (*slot, last) = (at.max(1), Instant::now());
                    missing -= 1;
                }
            }
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => received.refused = true,
            // A time-out, or the interface is gone: nothing to read.
            Err(_) => {
                if !all_sent.load(Ordering::Acquire) {
                    last = Instant::now();
                } else if last.elapsed() > LATE {
                    break;
                }
            }
        }
    }
    received
}

/// Number of a frame of this run; `None` for any other datagram.
fn number(datagram: &[u8], schedule: &Schedule) -> Option<u64> {
    let (head, _) = datagram.split_at_checked(HEAD)?;
    let (run, number) = head.split_at(8);
    (run == schedule.run).then(|| number.iter().fold(0, |n, byte| n << 8 | u64::from(*byte)))
}

fn measurement(schedule: &Schedule, limit: Option<Nanos>, sent: &[u64], received: &[u64]) -> FlowMeasurement {
    let mut m = FlowMeasurement {
        latencies: Latencies::new(),
        from_send: Latencies::new(),
        series: Vec::new(),
        sent_late: Latencies::new(),
        answered: 0,
        lost: 0,
        unsent: 0,
        exceedances: 0,
        own: 0,
    };
    let is_above = |time: u64| limit.is_some_and(|limit| time > limit.0);
    // Lost frames have waited until the end of all.
    let end = (schedule.end() + LATE).as_nanos() as u64;
    let frames = sent.iter().zip(received).enumerate().skip(schedule.first as usize);
    for (number, (sent, received)) in frames {
        let due = schedule.due(number as u64).as_nanos() as u64;
        if *sent == 0 {
            m.unsent += 1;
            continue;
        }
        m.sent_late.record(Nanos(sent.saturating_sub(due)), 1);
        // An echo from before its frame was sent is forged by the guest: none.
        if *received == 0 || received < sent {
            m.lost += 1;
            m.latencies.record(Nanos(end.saturating_sub(due)), 1);
            m.exceedances += u64::from(limit.is_some());
            continue;
        }
        let (latency, own) = (received.saturating_sub(due), received.saturating_sub(*sent));
        m.answered += 1;
        m.latencies.record(Nanos(latency), 1);
        m.from_send.record(Nanos(own), 1);
        m.series.push(latency);
        m.exceedances += u64::from(is_above(latency));
        m.own += u64::from(is_above(latency) && !is_above(own));
    }
    m
}

impl FlowMeasurement {
    /// Result, judged against the flow's target.
    #[must_use]
    pub fn result(&self, load: &FlowLoad) -> TaskResult {
        let flow = &load.flow;
        let all = (self.answered + self.lost + self.unsent).max(1);
        let rate = |frames: u64| Iops(flow.rate.0 * frames as f64 / all as f64);
        let at = |p: f64| self.latencies.at(Percentile(p));
        let judgement = flow.target.map(|_| self.judged(load));
        let (verdict, why) = match judgement {
            Some(Judgement { verdict, why }) => (Some(verdict), why),
            None => (None, "no target".to_owned()),
        };
        let percentile = flow.target.map_or(Percentile::P9999, |target| target.percentile);
        let few = self.lost == 0 && !can_carry(self.series.len(), percentile.0 / 100.0);
        TaskResult {
            vm: load.vm.clone(),
            task: flow.name.clone(),
            percentile,
            target_ns: flow.target.map(|target| target.latency),
            at_target_ns: flow.target.map(|target| at(target.percentile.0)),
            declared_rate: Some(flow.rate),
            achieved_rate: rate(self.answered),
            n: self.answered,
            p50_ns: at(50.0),
            p99_ns: at(99.0),
            p9999_ns: self.latencies.tail(),
            p9999_excl_host_stalls_ns: None,
            p9999_placebo_ns: None,
            max_ns: self.latencies.max(),
            fio_p9999_ns: self.from_send.tail(),
            fio_cpus: 0.0,
            tail: if few { estimate(&self.series, percentile).ok() } else { None },
            predicted_ns: None,
            causes: None,
            causes_unread: Vec::new(),
            exceedances: 0,
            flow: Some(FlowFacts {
                direction: flow.direction,
                peer: load.peer.to_string(),
                echo: load.echo.to_string(),
                lost: self.lost,
                unsent: self.unsent,
                sent_late_p9999_ns: self.sent_late.tail(),
            }),
            verdict,
            why,
        }
    }

    fn judged(&self, load: &FlowLoad) -> Judgement {
        let Some(target) = load.flow.target else {
            return Judgement { verdict: Verdict::Unproven, why: "no target".to_owned() };
        };
        let sent = self.answered + self.lost;
        let all = sent + self.unsent;
        let unproven = |why: String| Judgement { verdict: Verdict::Unproven, why };
        if (sent as f64) < SENT * all as f64 {
            return unproven(format!(
                "this host sent {sent} of {all} frames: it is too slow for {}, or its interface is down",
                load.flow.rate
            ));
        }
        let evidence = Evidence {
            n: sent,
            exceedances: self.exceedances,
            declared: Some(load.flow.rate),
            achieved: Iops(load.flow.rate.0 * self.answered as f64 / sent.max(1) as f64),
        };
        let lost = if self.lost > 0 { format!("; {} lost", self.lost) } else { String::new() };
        let all = judge(target, &evidence);
        let without = judge(target, &Evidence { exceedances: self.exceedances - self.own, ..evidence });
        if all.verdict == Verdict::Missed && without.verdict != Verdict::Missed {
            let late = self.sent_late.max();
            return unproven(format!(
                "{}{lost}; {} of these this host itself sent late, by up to {late}: measure on a quieter host",
                all.why, self.own
            ));
        }
        Judgement { why: format!("{}{lost}", all.why), ..all }
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.namespace {
            Some(path) => write!(f, "{} in {}", self.interface, path.display()),
            None => f.write_str(&self.interface),
        }
    }
}

#[cfg(test)]
mod tests;
