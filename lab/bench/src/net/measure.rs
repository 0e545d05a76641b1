//! The rounds.

use std::time::{Duration, Instant};

use rtvirtio_spec::Kernel;
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_workflow::{Progress, generated};

use super::bed::{GUESTS, HOST, LINK, NAMES, NetBed, NetThread, System, Uplink};
use super::host_only::{Attacker, frames_per_second};
use super::probe::{Flood, RoundTrips, round_trips};
use super::simulated::simulate;
use super::{CrashData, NetData, PathData, Situation, UplinkData};
use crate::guest::facts;
use crate::interleave::{Counter, interleaved};
use crate::saved::Saved as _;

/// Period of requests of the fast probe, and of the one on the slow link.
const FAST: Duration = Duration::from_micros(250);
const SLOW: Duration = Duration::from_millis(1);
/// Bits per second of a declared link that no guest here fills.
const FAST_LINK: f64 = 10e9;
/// Bytes of a TCP transfer.
const TCP_BYTES: u64 = 64 << 20;
/// From the start of a load to the first request.
const SETTLE: Duration = Duration::from_millis(500);
/// Longest time until a link is back.
const BACK: Duration = Duration::from_secs(20);

/// Options of the experiment.
#[derive(Clone, Copy, Debug)]
pub struct NetOptions {
    /// Rounds; each measures every system in a random order.
    pub rounds: usize,
    /// Requests of the fast probe in a round.
    pub requests: u32,
    /// Cases of the simulation.
    pub cases: usize,
    /// Crashes in a round.
    pub crashes: usize,
    /// Frames per second that the flooded neighbour gets at most, on the domain.
    pub cap: u32,
    /// The thread of the domain's network.
    pub thread: NetThread,
}

/// The systems and uplinks that are compared on a slow link.
const SLOW_LINKS: [(System, Uplink); 3] =
    [(System::Tap, Uplink::Fifo), (System::Tap, Uplink::Htb), (System::Domain, Uplink::Fifo)];

struct Beds {
    tap: NetBed,
    domain: NetBed,
}

impl Beds {
    fn of(&mut self, system: System) -> &mut NetBed {
        match system {
            System::Tap => &mut self.tap,
            System::Domain => &mut self.domain,
        }
    }
}

fn probe(bed: &NetBed, count: u32, period: Duration) -> anyhow::Result<RoundTrips> {
    round_trips(&bed.namespace, HOST, GUESTS[0], count, period)
}

/// Measures all of it.
///
/// # Errors
/// A namespace, a guest or a domain that cannot be made, and cancellation.
pub fn measure(options: &NetOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<NetData> {
    progress.step("playing contracts in virtual time");
    let simulated = simulate(options.cases)?;
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    progress.step("booting two guests on taps and two on the I/O domain");
    let mut beds = Beds {
        tap: NetBed::new(System::Tap, &image, accel, options.cap, options.thread, None)?,
        domain: NetBed::new(System::Domain, &image, accel, options.cap, options.thread, None)?,
    };
    let host = facts(&mut beds.tap.guests[0], accel, format!("veth, {} Mbit/s by tbf", LINK / 1e6))?;
    let mut data = NetData {
        schema: NetData::SCHEMA.to_owned(),
        host,
        command: format!(
            "rtvirtio-lab bench net --rounds {} --requests {} --cases {} --crashes {} --cap {}{}",
            options.rounds,
            options.requests,
            options.cases,
            options.crashes,
            options.cap,
            options.thread.options()
        ),
        generated: generated(),
        paths: Vec::new(),
        uplinks: Vec::new(),
        crashes: CrashData::default(),
        frames_one_port: Vec::new(),
        frames_of_many: Vec::new(),
        tcp: Vec::new(),
        tcp_cut: Vec::new(),
        promises: Vec::new(),
        simulated,
    };
    let mut counter = Counter::new(progress, "rounds", options.rounds * (4 + 2 * SLOW_LINKS.len() + 3));
    for round in 0..options.rounds {
        let paths: Vec<(System, Situation)> = [System::Tap, System::Domain]
            .into_iter()
            .flat_map(|system| [Situation::Idle, Situation::Flood].map(|situation| (system, situation)))
            .collect();
        let measured = interleaved(&paths, round, &mut counter, progress, |(system, situation)| {
            path(beds.of(*system), *situation, options.requests)
        })?;
        data.paths.extend(measured);
        let links: Vec<(System, Uplink, bool)> = SLOW_LINKS
            .into_iter()
            .flat_map(|(system, link)| [true, false].map(|udp| (system, link, udp)))
            .collect();
        let measured = interleaved(&links, round, &mut counter, progress, |(system, link, udp)| {
            slow_link(beds.of(*system), *link, *udp, options.requests / 4)
        })?;
        data.uplinks.extend(measured);
        progress.check_cancelled()?;
        data.promises.push(promise(&beds.domain)?);
        data.paths.push(path(&mut beds.domain, Situation::Attack, options.requests)?);
        counter.step();
        crashes(&mut beds.domain, options.crashes, &mut data.crashes, progress)?;
        counter.step();
        data.frames_one_port.push(frames_per_second(1)?);
        data.frames_of_many.push(frames_per_second(64)?);
        let tap = beds.tap.tcp_seconds(TCP_BYTES)?;
        data.tcp.push([tap, tcp_through(&mut beds.domain, None)?]);
        data.tcp_cut.push(tcp_through(&mut beds.domain, Some(FAST_LINK))?);
        counter.step();
    }
    Ok(data)
}

/// Round trips to the victim in one situation.
fn path(bed: &mut NetBed, situation: Situation, requests: u32) -> anyhow::Result<PathData> {
    let flood = match situation {
        Situation::Flood => Some(Flood::start(&bed.namespace, HOST, GUESTS[1])?),
        Situation::Idle | Situation::Attack => None,
    };
    let attacker = (situation == Situation::Attack)
        .then(|| Attacker::start(&bed.dir().join("c"), [0x52, 0x54, 0, 0, 0, 0xc], GUESTS[0].mac));
    std::thread::sleep(SETTLE);
    let (cpu, begin) = (bed.cpu_time()?, Instant::now());
    let trips = probe(bed, requests, FAST);
    let cpu = (bed.cpu_time()?.0 - cpu.0) as f64 / begin.elapsed().as_nanos() as f64;
    let frames_per_second = flood.map(Flood::end);
    let connections = attacker.map(Attacker::end);
    let trips = trips?;
    Ok(PathData::new(bed.system, situation, &trips, frames_per_second, connections, cpu))
}

/// Round trips while the neighbour sends as fast as it can through a slow link.
fn slow_link(bed: &mut NetBed, link: Uplink, udp: bool, requests: u32) -> anyhow::Result<UplinkData> {
    bed.set_uplink(link)?;
    let sink = bed.sink()?;
    let load = bed.start_neighbour(udp)?;
    std::thread::sleep(SETTLE * 2);
    let (bytes, begin) = (bed.sent_bytes()?, Instant::now());
    let trips = probe(bed, requests, SLOW);
    let rate = (bed.sent_bytes()? - bytes) as f64 * 8.0 / begin.elapsed().as_secs_f64();
    let stopped = bed.stop_neighbour(load);
    drop(sink);
    bed.set_uplink(Uplink::Free)?;
    stopped?;
    Ok(UplinkData::new(bed.system, link == Uplink::Htb, udp, &trips?, rate))
}

/// The domain's own view: bound and worst of the victim's reservation, in ns.
fn promise(bed: &NetBed) -> anyhow::Result<[u64; 3]> {
    let status = rtvirtio_workflow::domain::client::ask(&bed.dir().join("control"))?;
    let ports = status["ports"].as_array().cloned().unwrap_or_default();
    let port = ports.into_iter().find(|port| port["name"] == NAMES[0]).unwrap_or_default();
    let promise = &port["promises"][0];
    Ok(["bound_ns", "worst_ns", "missed"].map(|key| promise[key].as_u64().unwrap_or(0)))
}

/// Kills the domain again and again while the victim is probed.
fn crashes(bed: &mut NetBed, n: usize, data: &mut CrashData, progress: &dyn Progress) -> anyhow::Result<()> {
    for _ in 0..n {
        progress.check_cancelled()?;
        let killed = bed.crash(Some(LINK))?;
        let back = loop {
            if probe_once(bed)? {
                break Some(killed.elapsed());
            }
            if killed.elapsed() > BACK {
                break None;
            }
        };
        match back {
            Some(time) => data.back_s.push(time.as_secs_f64()),
            None => data.broken += 1,
        }
        progress.pause(Duration::from_millis(300))?;
    }
    Ok(())
}

/// Whether the victim answers one of a few requests.
fn probe_once(bed: &NetBed) -> anyhow::Result<bool> {
    use rtvirtio_testbed::netns::RawSocket;
    bed.namespace.enter()?;
    let socket = RawSocket::open(super::probe::PEER)?;
    socket.send(&super::probe::request(HOST, GUESTS[0], 0))?;
    let begin = Instant::now();
    let mut buffer = vec![0u8; 2_048];
    while let Some(left) = Duration::from_millis(20).checked_sub(begin.elapsed()) {
        let Some(len) = socket.receive_into(&mut buffer, left)? else { return Ok(false) };
        if super::probe::answer(&buffer[..len], GUESTS[0]).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Seconds of a TCP transfer through the domain, with a declared link of this rate.
fn tcp_through(bed: &mut NetBed, link: Option<f64>) -> anyhow::Result<f64> {
    bed.crash(link)?;
    wait_for_link(bed)?;
    let seconds = bed.tcp_seconds(TCP_BYTES);
    bed.crash(Some(LINK))?;
    wait_for_link(bed)?;
    seconds
}

fn wait_for_link(bed: &NetBed) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !probe_once(bed)? {
        if begin.elapsed() > BACK {
            let status = rtvirtio_workflow::domain::client::ask(&bed.dir().join("control"))?;
            anyhow::bail!("the guest's link is not back after {} s: {status}", BACK.as_secs());
        }
    }
    // The neighbour's too.
    std::thread::sleep(SETTLE * 2);
    Ok(())
}
