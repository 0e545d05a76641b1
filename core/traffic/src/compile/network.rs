//! Qdiscs of tc, and libvirt's `<bandwidth>`, which sets them.
//!
//! Sources: `net/sched/sch_tbf.c`, `net/sched/sch_htb.c`; libvirt's formatdomain, "Quality of
//! service", and its `virnetdevbandwidth.c`.

use rtvirtio_text::shell_argument;
use rtvirtio_units::Enforcement;
use serde::Serialize;

use super::{bytes_only, networks_only};
use crate::curve::Arrival;
use crate::error::CompileError;
use crate::settings::{Actuator, Compiled, Setting};
use crate::tspec::{Direction, Tspec};

const FRAMES: &str = "use io-domain, which counts frames";
/// Unit of time in which `tc` passes bursts to the kernel, in s. Older versions round down to 1 us.
const TICK: f64 = 64e-9;
/// Longest time for which frames wait in a tbf before they are dropped, in ms.
const QUEUE_MS: u64 = 50;
/// Units of libvirt's `average` and `burst`, which are tc's `kbps` and `kb`: 1000 bytes per second,
/// and 1024 bytes.
const KB: u64 = 1000;
const KIB: u64 = 1024;
/// Default of tc for an htb class's burst at its ceiling, in bytes: its `mtu`.
const CBURST: f64 = 1600.0;

/// Values of libvirt's `<bandwidth>`: kB per second, and KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bandwidth {
    /// Rate, in kB per second.
    pub average: u64,
    /// Peak, in kB per second.
    pub peak: Option<u64>,
    /// Burst, in KiB.
    pub burst: u64,
}

/// Interface to shape, with the commands that prepare it. What the guest receives leaves the host
/// at its tap; what the guest sends enters there, and is shaped on an ifb.
fn at(interface: &str, direction: Direction) -> (String, Option<[String; 3]>) {
    if direction == Direction::Rx {
        return (interface.to_owned(), None);
    }
    let ifb = format!("ifb-{interface}").chars().take(15).collect::<String>();
    let lines = [
        format!("ip link add {ifb} type ifb && ip link set {ifb} up"),
        format!("tc qdisc add dev {interface} handle ffff: ingress"),
        format!(
            "tc filter add dev {interface} parent ffff: protocol all matchall action mirred egress redirect dev {ifb}"
        ),
    ];
    (ifb, Some(lines))
}

/// Largest burst that `tc` sets for `bytes` at a rate: a time in ticks, rounded up.
fn ticked(bytes: f64, rate: f64) -> f64 {
    (bytes / rate / TICK).ceil() * TICK * rate
}

fn begin(
    actuator: Actuator,
    tspec: &Tspec,
    direction: Direction,
    interface: &str,
    kept: Arrival,
) -> (Compiled, String) {
    let mut compiled = Compiled::new(actuator, direction, tspec, Some(kept), Enforcement::Cap)
        .note("frames count with their Ethernet header, without FCS; what does not fit the queue is dropped");
    let (dev, first) = at(interface, direction);
    if let Some(lines) = first {
        for line in lines {
            compiled = compiled.set(Setting::Command { line });
        }
        compiled = compiled
            .note("what a guest sends arrives at its tap: it is shaped on an ifb, which needs CONFIG_IFB");
    }
    (compiled, dev)
}

pub(super) fn tbf(tspec: &Tspec, direction: Direction, interface: &str) -> Result<Compiled, CompileError> {
    networks_only(Actuator::TcTbf, direction)?;
    bytes_only(Actuator::TcTbf, tspec, FRAMES)?;
    let rate = tspec.rate as f64;
    // A peak equal to the rate leaves no burst but one frame, and tbf refuses it.
    let flat = tspec.peak == Some(tspec.rate);
    let peak = tspec.peak.filter(|_| !flat);
    let burst = if flat { tspec.largest } else { tspec.burst };
    let kept = Arrival {
        rate,
        burst: ticked(burst as f64, rate),
        peak: peak.map(|peak| (peak as f64, ticked(tspec.largest as f64, peak as f64))),
    };
    let (mut compiled, dev) = begin(Actuator::TcTbf, tspec, direction, interface, kept);
    // `bps` means bytes per second in tc.
    let peak = peak.map_or(String::new(), |peak| format!(" peakrate {peak}bps mtu {}", tspec.largest));
    if flat {
        compiled = compiled.note("tbf refuses a peak that is the rate: a burst of one frame says the same");
    }
    let line = format!(
        "tc qdisc replace dev {dev} root tbf rate {}bps burst {burst}b{peak} latency {QUEUE_MS}ms",
        tspec.rate
    );
    Ok(compiled.set(Setting::Command { line }))
}

pub(super) fn htb(tspec: &Tspec, direction: Direction, interface: &str) -> Result<Compiled, CompileError> {
    networks_only(Actuator::TcHtb, direction)?;
    bytes_only(Actuator::TcHtb, tspec, FRAMES)?;
    let (rate, burst, one) = (tspec.rate as f64, tspec.burst as f64, tspec.largest as f64);
    // A class may send while its tokens are not negative, and is charged afterwards: one frame
    // more.
    // Without a peak the ceiling is the rate, and its burst the smaller of the two.
    let peak = tspec.peak.unwrap_or(tspec.rate);
    let cburst = if tspec.peak.is_some() { tspec.largest } else { tspec.burst };
    let kept = Arrival {
        rate,
        burst: ticked(burst, rate) + one,
        peak: tspec.peak.map(|peak| (peak as f64, ticked(one, peak as f64) + one)),
    };
    let (compiled, dev) = begin(Actuator::TcHtb, tspec, direction, interface, kept);
    let class = format!(
        "tc class replace dev {dev} parent 1: classid 1:1 htb rate {}bps burst {}b ceil {peak}bps cburst {cburst}b",
        tspec.rate, tspec.burst
    );
    Ok(compiled
        .set(Setting::Command { line: format!("tc qdisc replace dev {dev} root handle 1: htb default 1") })
        .set(Setting::Command { line: class })
        .note("the class has no parent to borrow from, so its ceiling is a peak; one frame more than rate and peak allow passes"))
}

impl Bandwidth {
    fn from_tspec(tspec: &Tspec, direction: Direction) -> Option<Self> {
        let average = tspec.rate / KB;
        // `peak` is ignored for frames that the guest sends.
        let peak = tspec.peak.filter(|_| direction == Direction::Rx).map(|peak| (peak / KB).max(average));
        // A burst below one frame would pass nothing.
        let burst = (tspec.burst / KIB).max(tspec.largest.div_ceil(KIB));
        (average > 0).then_some(Self { average, peak, burst })
    }

    /// Average, peak and burst as `virsh domiftune` takes them.
    fn triple(self) -> String {
        format!("{},{},{}", self.average, self.peak.unwrap_or(0), self.burst)
    }
}

pub(super) fn bandwidth(
    tspec: &Tspec,
    direction: Direction,
    domain: &str,
    interface: &str,
) -> Result<Compiled, CompileError> {
    let actuator = Actuator::Libvirt;
    networks_only(actuator, direction)?;
    bytes_only(actuator, tspec, FRAMES)?;
    let small = || CompileError::Range {
        actuator,
        what: "a rate in bytes",
        value: tspec.rate as f64,
        least: KB as f64,
        most: u32::MAX.into(),
        remedy: "libvirt counts in kB per second; use tc-tbf",
    };
    let b = Bandwidth::from_tspec(tspec, direction).ok_or_else(small)?;
    if b.average > u32::MAX.into() {
        return Err(small());
    }
    let one = tspec.largest as f64;
    let kept = Arrival {
        rate: (b.average * KB) as f64,
        burst: (b.burst * KIB) as f64 + one,
        peak: b.peak.map(|peak| ((peak * KB) as f64, CBURST + one)),
    };
    let name = if direction == Direction::Rx { "inbound" } else { "outbound" };
    let peak = b.peak.map_or(String::new(), |peak| format!(" peak='{peak}'"));
    let text = format!("<bandwidth><{name} average='{}'{peak} burst='{}'/></bandwidth>", b.average, b.burst);
    let (domain, card) = (shell_argument("--domain", domain), shell_argument("--interface", interface));
    let line = format!("virsh domiftune {domain} {card} --{name} {} --live", b.triple());
    let mut compiled = Compiled::new(actuator, direction, tspec, Some(kept), Enforcement::Cap)
        .set(Setting::Command { line })
        .set(Setting::Xml { text })
        .note("libvirt counts in kB per second and KiB: both are rounded down");
    compiled = match (direction, tspec.peak) {
        (Direction::Tx, Some(_)) => {
            compiled.note("libvirt ignores the peak of what a guest sends, and drops what is beyond the rate")
        }
        (Direction::Tx, None) => {
            compiled.note("libvirt drops what a guest sends beyond the rate: it does not wait")
        }
        _ => compiled,
    };
    Ok(compiled)
}
