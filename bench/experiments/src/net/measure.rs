//! Measurement of the rounds.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::image::GuestImage;
use rtvirtio_testbed::qemu::Accel;
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Progress, generated};

use super::host_only::{attacker, flood_per_second, frames_per_second};
use super::polling::measure_polling;
use super::probe::{Flood, RoundTrips, round_trips};
use super::simulated::simulate;
use super::sv::measure_sv;
use super::test_bed::{BedOptions, GUESTS, HOST, LINK, NAMES, NetTestBed, NetThread, System, Uplink};
use super::web::measure_web;
use super::{CrashData, NetData, Part, PathData, Situation, Tails, UplinkData};
use crate::experiment::{from_one, host_facts};
use crate::guest::facts;
use crate::interleave::{Counter, interleaved};

/// Period of requests of the fast probe, and of the probe on the slow link.
pub(super) const FAST: Duration = Duration::from_micros(250);
const SLOW: Duration = Duration::from_millis(1);
/// Pings as in the paper: their number in a round, and their period.
const PINGS: u32 = 1_000;
const PING_PERIOD: Duration = Duration::from_millis(2);
/// Description of the uplink for the result file.
const DEVICE: &str = "veth, 100 Mbit/s by tbf";
/// Bits per second of a declared link that no guest here fills.
const FAST_LINK: f64 = 10e9;
/// Bytes of a TCP transfer.
const TCP_BYTES: u64 = 64 << 20;
/// From the start of a load to the first request.
const SETTLE: Duration = Duration::from_millis(500);
/// Longest time until a link is back.
const BACK: Duration = Duration::from_secs(20);

/// Options of the experiment.
#[derive(Args, Clone, Copy, Debug)]
pub struct NetOptions {
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = from_one())]
    pub rounds: usize,
    /// Round trips and sampled values of a round and situation; a quarter on the slow link, a
    /// fortieth to the web server.
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(400..))]
    pub requests: u32,
    /// Sampled values per second.
    #[arg(long, value_name = "N", default_value_t = 4_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: u32,
    /// Limit for 99.9 % of the sampled values, over the network, to the disk and back.
    #[arg(long, value_name = "TIME", default_value = "20ms")]
    pub target: Nanos,
    /// Cases of the simulation.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub cases: usize,
    /// Number of kills of the domain per round.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub crashes: usize,
    /// Frames per second that the flooded neighbour gets at most, on the I/O domain.
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub cap: u32,
    /// Least time between two notifications of that neighbour, such as 1ms (`rx_coalesce`).
    #[arg(long, value_name = "TIME")]
    pub coalesce: Option<Nanos>,
    /// Settings of the thread of the I/O domain's network.
    #[command(flatten)]
    pub thread: NetThread,
}

impl NetOptions {
    /// Settings of the I/O domain's file.
    pub(super) fn bed(&self) -> BedOptions {
        BedOptions { cap: self.cap, coalesce: self.coalesce, thread: self.thread }
    }

    /// The command that measures these parts.
    fn command(&self, parts: &BTreeSet<Part>) -> String {
        let only = if parts.len() == Part::ALL.len() {
            String::new()
        } else {
            format!(" --only {}", parts.iter().map(|part| part.name()).collect::<Vec<_>>().join(","))
        };
        let coalesce = self.coalesce.map(|time| format!(" --coalesce {time}")).unwrap_or_default();
        format!(
            "rtvirtio-bench net{only} --rounds {} --requests {} --cases {} --crashes {} --rate {} --target {} --cap {}{coalesce}{}",
            self.rounds,
            self.requests,
            self.cases,
            self.crashes,
            self.rate,
            self.target,
            self.cap,
            self.thread.options()
        )
    }
}

/// Systems and uplinks that are compared on a slow link.
const SLOW_LINKS: [(System, Uplink); 3] =
    [(System::Tap, Uplink::Fifo), (System::Tap, Uplink::Htb), (System::Domain, Uplink::Fifo)];

struct Beds {
    tap: NetTestBed,
    domain: NetTestBed,
}

impl Beds {
    fn for_system(&mut self, system: System) -> &mut NetTestBed {
        if system == System::Tap { &mut self.tap } else { &mut self.domain }
    }
}

fn probe(bed: &NetTestBed, count: u32, period: Duration) -> anyhow::Result<RoundTrips> {
    round_trips(&bed.namespace, HOST, GUESTS[0], count, period)
}

/// Measures these parts. The result holds no others.
pub fn measure(
    options: &NetOptions,
    parts: &BTreeSet<Part>,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<NetData> {
    let command = options.command(parts);
    let facts = host_facts(("none", "none"), DEVICE);
    let mut data = NetData::new(facts, command, generated());
    if parts.contains(&Part::Simulated) {
        progress.step("playing contracts in virtual time");
        data.simulated = simulate(options.cases)?;
    }
    if parts.contains(&Part::Frames) {
        let mut counter = Counter::new(progress, "rounds without guests", options.rounds);
        for _ in 0..options.rounds {
            progress.check_cancelled()?;
            data.frames_one_port.push(frames_per_second(1)?);
            data.frames_of_many.push(frames_per_second(64)?);
            data.floods.push(flood_per_second()?);
            counter.step();
        }
    }
    if parts.contains(&Part::Web) {
        data.web = Some(measure_web(options, progress)?);
    }
    data.note_facts(parts.iter().filter(|part| !part.has_guests()));
    if parts.iter().any(|part| part.has_guests()) {
        let image = labs.guest_image(Kernel::Standard, progress)?;
        let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
        if parts.iter().any(|part| part.is_of_pair()) {
            pair_of_beds(options, parts, (&image, accel), &mut data, progress)?;
            data.note_facts(parts.iter().filter(|part| part.is_of_pair()));
        }
        if parts.contains(&Part::Sv) {
            let (sv, host) = measure_sv(options, labs, (&image, accel), progress)?;
            (data.sv, data.host) = (Some(sv), host);
            data.note_facts([&Part::Sv]);
        }
        if parts.contains(&Part::Polling) {
            let (polling, host) = measure_polling(options, &image, accel, progress)?;
            data.polling = Some(polling);
            data.host = host.unwrap_or(data.host);
            data.note_facts([&Part::Polling]);
        }
    }
    Ok(data)
}

/// Measures the rounds of the parts that compare guests on taps with guests on the I/O domain.
fn pair_of_beds(
    options: &NetOptions,
    parts: &BTreeSet<Part>,
    (image, accel): (&GuestImage, Accel),
    data: &mut NetData,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    progress.step("booting two guests on taps and two on the I/O domain");
    let bed = |system| NetTestBed::new(system, (image, accel), options.bed(), None, progress);
    let mut beds = Beds { tap: bed(System::Tap)?, domain: bed(System::Domain)? };
    data.host = facts(&mut beds.tap.guests[0], accel, DEVICE.to_owned())?;
    let paths: Vec<(System, Situation)> = [System::Tap, System::Domain]
        .into_iter()
        .flat_map(|system| [Situation::Idle, Situation::Flood].map(|situation| (system, situation)))
        .collect();
    let links: Vec<(System, Uplink, bool)> = SLOW_LINKS
        .into_iter()
        .flat_map(|(system, link)| [true, false].map(|udp| (system, link, udp)))
        .collect();
    let steps = |part: Part| match part {
        Part::Flood | Part::Ping => paths.len(),
        Part::Uplink => links.len(),
        _ => usize::from(part.is_of_pair()),
    };
    let steps: usize = parts.iter().map(|part| steps(*part)).sum();
    let mut counter = Counter::new(progress, "rounds", options.rounds * steps);
    for round in 0..options.rounds {
        for part in parts {
            progress.check_cancelled()?;
            match part {
                Part::Flood | Part::Ping => {
                    let (requests, period) = match part {
                        Part::Ping => (PINGS, PING_PERIOD),
                        _ => (options.requests, FAST),
                    };
                    let measured =
                        interleaved(&paths, round, &mut counter, progress, |(system, situation)| {
                            Ok(path(beds.for_system(*system), *situation, requests, period)?.0)
                        })?;
                    if *part == Part::Ping { &mut data.pings } else { &mut data.paths }.extend(measured);
                }
                Part::Uplink => {
                    let measured =
                        interleaved(&links, round, &mut counter, progress, |(system, link, udp)| {
                            slow_link(beds.for_system(*system), *link, *udp, options.requests / 4)
                        })?;
                    data.uplinks.extend(measured);
                    data.promises.push(promise(&beds.domain)?);
                }
                Part::Hostile => {
                    let (attacked, _) = path(&mut beds.domain, Situation::Attack, options.requests, FAST)?;
                    data.paths.push(attacked);
                    counter.step();
                }
                Part::Crash => {
                    crashes(&mut beds.domain, options.crashes, &mut data.crashes, progress)?;
                    counter.step();
                }
                Part::Tcp => {
                    let tap = beds.tap.tcp_seconds(TCP_BYTES)?;
                    data.tcp.push([tap, tcp_through(&mut beds.domain, None)?]);
                    data.tcp_cut.push(tcp_through(&mut beds.domain, Some(FAST_LINK))?);
                    counter.step();
                }
                Part::Simulated | Part::Frames | Part::Sv | Part::Polling | Part::Web => {}
            }
        }
    }
    Ok(())
}

/// Round trips to the victim in one situation, and the CPUs of the I/O domain or the switch.
pub(super) fn path(
    bed: &mut NetTestBed,
    situation: Situation,
    requests: u32,
    period: Duration,
) -> anyhow::Result<(PathData, f64)> {
    let flood = match situation {
        Situation::Flood => Some(Flood::start(&bed.namespace, HOST, GUESTS[1])?),
        Situation::Idle | Situation::Attack => None,
    };
    let attacker = (situation == Situation::Attack)
        .then(|| attacker(&bed.dir().join("c"), [0x52, 0x54, 0, 0, 0, 0xc], GUESTS[0].mac));
    std::thread::sleep(SETTLE);
    let times = || anyhow::Ok([bed.cpu_time()?, bed.switch_time()?]);
    let (before, begin) = (times()?, Instant::now());
    let trips = probe(bed, requests, period);
    let (after, length) = (times()?, begin.elapsed().as_nanos() as f64);
    let cpus = [0, 1].map(|i| (after[i].0 - before[i].0) as f64 / length);
    let (flood, attacks) = (flood.map(Flood::end), attacker.map(|mut attacker| attacker.end()));
    let (domain, tails) = (bed.system == System::Domain, Tails::from_trips(&trips?));
    Ok((PathData { domain, situation, tails, flood, attacks, cpus: cpus[0] }, cpus[1]))
}

/// Round trips while the neighbour sends at full speed through a slow link.
fn slow_link(bed: &mut NetTestBed, link: Uplink, udp: bool, requests: u32) -> anyhow::Result<UplinkData> {
    bed.set_uplink(link)?;
    let sink = bed.sink()?;
    let load = bed.start_neighbour(udp)?;
    std::thread::sleep(SETTLE * 2);
    let (bytes, begin) = (bed.sent_bytes()?, Instant::now());
    let trips = probe(bed, requests, SLOW);
    let bits_per_second = (bed.sent_bytes()? - bytes) as f64 * 8.0 / begin.elapsed().as_secs_f64();
    let stopped = bed.stop_neighbour(load);
    drop(sink);
    bed.set_uplink(Uplink::Free)?;
    stopped?;
    let (domain, htb) = (bed.system == System::Domain, link == Uplink::Htb);
    Ok(UplinkData { domain, htb, udp, tails: Tails::from_trips(&trips?), bits_per_second })
}

/// Victim's reservation by the I/O domain: bound and worst, ns, and frames over the deadline.
fn promise(bed: &NetTestBed) -> anyhow::Result<[u64; 3]> {
    let status = rtvirtio_workflow::domain::client::ask(&bed.dir().join("control"))?;
    let port =
        status.ports.iter().find(|port| port.name == NAMES[0]).context("the domain has no such port")?;
    let promise = port.promises.first().context("the victim has no reservation")?;
    let [Some(bound), Some(worst), Some(missed)] = [promise.bound_ns, promise.worst_ns, promise.missed]
    else {
        bail!("the domain does not count the victim's reservation");
    };
    Ok([bound, worst, missed])
}

/// Kills the I/O domain repeatedly while the victim is probed.
fn crashes(
    bed: &mut NetTestBed,
    n: usize,
    data: &mut CrashData,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
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

/// Whether the victim answers one request within 20 ms.
fn probe_once(bed: &NetTestBed) -> anyhow::Result<bool> {
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

/// Seconds of a TCP transfer through the I/O domain, with a declared link of this rate.
fn tcp_through(bed: &mut NetTestBed, link: Option<f64>) -> anyhow::Result<f64> {
    bed.crash(link)?;
    wait_for_link(bed)?;
    let seconds = bed.tcp_seconds(TCP_BYTES);
    bed.crash(Some(LINK))?;
    wait_for_link(bed)?;
    seconds
}

fn wait_for_link(bed: &NetTestBed) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !probe_once(bed)? {
        if begin.elapsed() > BACK {
            let status = rtvirtio_workflow::domain::client::ask(&bed.dir().join("control"))?;
            anyhow::bail!("the guest's link is not back after {} s: {status:?}", BACK.as_secs());
        }
    }
    // The neighbour's too.
    std::thread::sleep(SETTLE * 2);
    Ok(())
}
