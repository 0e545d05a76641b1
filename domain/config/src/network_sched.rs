//! A network's values as configurations of its two schedulers, and admission.
//!
//! Toward the link the cost of a frame is its time on the wire. Toward the VMs it is the time of
//! the copy, of which every frame has the same estimate.

use rtvirtio_sched::bound::{self, Flow, Refusal};
use rtvirtio_sched::{
    Bucket, Cap, Config, Cost, CpuLimit, CpuLimitError, LINK_SHARE, LINK_WINDOW, Line, Link, Policy,
    PriorityRule, Reservation, Tspec, VmConfig, WindowConfig,
};
use rtvirtio_units::{BytesPerSec, Iops, Nanos, Ratio, SHORTEST_FRAME, WIRE_OVERHEAD};

use crate::error::FileError;
use crate::id::PortId;
use crate::network::{FrameCap, Network, Port, RateConfig};
use crate::rate;

/// Largest frame with segmentation offload, in bytes.
pub const OFFLOADED_FRAME: u64 = 68 << 10;
/// Longest time of the thread for one port in a round: fetching, sending, reading and delivering.
pub const TURN: Nanos = Nanos::from_micros(100);
/// Default bursts of caps last this long, so that one wake-up serves several frames.
const CAP_BURST_S: f64 = 0.002;
/// Longest time for which the delivery of a frame beyond a cap is put off to be batched with later
/// ones, where `rx_coalesce` is shorter.
const SLACK: Nanos = Nanos::from_micros(250);
/// Estimate of a copy: fixed time, and per MiB.
const COPY: Line = Line { base_ns: 1_000, per_mib_ns: 300_000 };

impl Network {
    /// Largest frame without its FCS, in bytes: Ethernet's header, two VLAN tags and the payload.
    #[must_use]
    pub fn largest_frame(&self) -> u64 {
        u64::from(self.mtu) + 22
    }

    /// The link as its scheduler counts it; `None` without a rate.
    fn wire(&self) -> Option<Link> {
        self.link.map(|rate| Link { rate, stall: self.stall, largest_frame: self.largest_frame() })
    }

    /// Time of a frame on the link.
    #[must_use]
    pub fn line(&self) -> Line {
        self.wire().map_or(COPY, |link| link.line())
    }

    /// Whether large TCP segments pass a port unsegmented: to its VM, and from it. Not where frames
    /// are ordered or capped: 64 KiB at once would block all other ports, and count as one frame.
    /// The thread segments them there.
    #[must_use]
    pub fn passes_whole(&self, port: &Port) -> [bool; 2] {
        [port.rx_cap.is_none(), self.link.is_none() && port.tx_cap.is_none()]
    }

    /// Largest frame or segment from a VM that is sent at once, in bytes.
    #[must_use]
    pub fn largest_sent(&self) -> u64 {
        if self.link.is_none() { OFFLOADED_FRAME } else { self.largest_frame() }
    }

    /// The scheduler of frames from the VMs.
    #[must_use]
    pub fn tx_sched(&self) -> Config {
        let vms = self.ports.iter().map(|port| VmConfig {
            depth: port.depth + LINK_WINDOW,
            weight: port.weight,
            caps: [Cap::default(), port.tx_cap.cap(self.largest_frame())],
            // No segment of a capped port passes whole.
            largest: Some(self.largest_frame()),
            urgent: port.urgent.and_then(|r| self.reservation(r)),
            normal: port.reserve.and_then(|r| self.reservation(r)),
            urgent_quantum: None,
            priority: PriorityRule::default(),
        });
        let quantum = self.largest_sent().next_multiple_of(4_096);
        config(self.line(), quantum, vms.collect(), self.policy, LINK_WINDOW)
    }

    /// The scheduler of frames to the VMs.
    #[must_use]
    pub fn rx_sched(&self) -> Config {
        let vms = self.ports.iter().map(|port| VmConfig {
            depth: port.depth,
            weight: port.weight,
            caps: [port.rx_cap.cap(self.largest_frame()), Cap::default()],
            largest: Some(self.largest_frame()),
            ..VmConfig::default()
        });
        config(COPY, OFFLOADED_FRAME, vms.collect(), Policy::Drr, 1)
    }

    fn reservation(&self, config: RateConfig) -> Option<Reservation> {
        Some(self.wire()?.reservation(config.rate, config.burst, config.deadline))
    }

    /// Demand of the ports on the link. Each may send more than it reserves.
    fn demand(&self, sched: &Config) -> Vec<Flow> {
        let largest = self.line().time_of(self.largest_frame()) as f64;
        let of = |(port, c): (usize, &VmConfig)| Link::demand(largest, port, c.weight, [c.urgent, c.normal]);
        sched.vms.iter().enumerate().flat_map(of).collect()
    }

    fn bound_device(&self) -> bound::Device {
        Link::device(self.stall)
    }

    /// Admission: whether every reservation's deadline is kept in the worst case.
    pub(crate) fn admit(&self) -> Result<(), FileError> {
        let (tx, rx) = (self.tx_sched(), self.rx_sched());
        let named = |text: &str| self.with_port_names(text);
        let wrong =
            |message: String| FileError::Network { network: self.name.clone(), what: named(&message) };
        tx.check().map_err(|e| wrong(e.to_string()))?;
        rx.check().map_err(|e| wrong(e.to_string()))?;
        for port in &self.ports {
            port.check_bursts(self)?;
        }
        self.admission().map_err(|refusal| wrong(refusal_text(&refusal)))
    }

    /// Whether every reservation's deadline is kept in the worst case.
    ///
    /// # Errors
    /// The first reservation that is refused; its VM is the index of the port.
    pub fn admission(&self) -> Result<(), Refusal> {
        if self.policy != Policy::Edf {
            return Ok(());
        }
        bound::admit(&self.bound_device(), &self.demand(&self.tx_sched()))
    }

    /// Bytes per second of the link that are not reserved, counted on the wire; 0 without a rate.
    #[must_use]
    pub fn unreserved(&self) -> f64 {
        let reserved: f64 = self.ports.iter().map(Port::reserved).sum();
        self.link.map_or(0.0, |link| (link.0 * LINK_SHARE - reserved).max(0.0))
    }

    /// The limit of the thread's CPU time, where there is one.
    #[must_use]
    pub fn cpu_limit(&self) -> Option<CpuLimit> {
        let budget = |share: Ratio| Nanos((self.cpu_period.0 as f64 * share.0).round() as u64);
        self.cpu_budget.map(|share| CpuLimit { budget: budget(share), period: self.cpu_period, turn: TURN })
    }

    /// Error of `cpu_budget`, with values that would be accepted.
    pub(crate) fn cpu_remedy(&self, error: &CpuLimitError) -> String {
        let least = TURN.0 * self.ports.len() as u64;
        let share = (least as f64 * 100.0 / self.cpu_period.0 as f64).ceil();
        match error {
            CpuLimitError::TooSmall { .. } if share <= 100.0 => {
                format!("{error} ports; allow {share:.0}%, or a longer `cpu_period`")
            }
            CpuLimitError::TooSmall { .. } => {
                format!("{error} ports; `cpu_period` must be {} at least", Nanos(least))
            }
            _ => format!("{error}; such as \"30%\""),
        }
    }

    /// Worst-case time of a frame of this port within a reservation, from when the reservation
    /// covers it until it is sent: of urgent frames, and of the others. `None` without a
    /// reservation or a bound: only [`Policy::Edf`] sends frames within reservations before those
    /// beyond.
    #[must_use]
    pub fn bounds(&self, port: PortId) -> [Option<Nanos>; 2] {
        let sched = self.tx_sched();
        if sched.policy != Policy::Edf {
            return [None, None];
        }
        let flows = self.demand(&sched);
        let bounds = bound::bounds(sched.policy, &self.bound_device(), &flows);
        let mut own = flows.iter().zip(bounds).filter(|(f, _)| f.vm == port.0 && f.deadline.is_some());
        let Some(config) = sched.vms.get(port.0) else { return [None, None] };
        // In the order of `demand`.
        [config.urgent, config.normal].map(|r| r.and_then(|_| own.next()).and_then(|(_, bound)| bound))
    }

    /// Replaces the scheduler's index ("VM 0") by the port's name.
    fn with_port_names(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (i, port) in self.ports.iter().enumerate().rev() {
            text = text.replace(&format!("VM {i}"), &format!("port \"{}\"", port.name));
        }
        text
    }
}

/// A refusal in terms of networks: window and quantum are not settings there.
fn refusal_text(refusal: &Refusal) -> String {
    match refusal {
        Refusal::Deadline { vm, deadline, needed, blocking, latency, .. } => format!(
            "VM {vm} cannot be promised {deadline}: {needed} may pass in the worst case, {blocking} of it behind frames that the link has already and {latency} while the \
             thread does not run; allow more, reserve less, or lower `mtu` or `stall`"
        ),
        other => other.to_string().replace("the device", "the link"),
    }
}

fn config(line: Line, quantum: u64, vms: Vec<VmConfig>, policy: Policy, window: u32) -> Config {
    let cost = Cost { read: line, write: line, ..Cost::UNIT };
    Config { policy, quantum, window: WindowConfig::fixed(window), cost, vms, ..Config::default() }
}

impl Port {
    /// Reserved bytes per second of the link, counted on the wire.
    #[must_use]
    pub fn reserved(&self) -> f64 {
        [self.reserve, self.urgent].into_iter().flatten().map(|reserve| reserve.rate.0).sum()
    }

    /// Bucket of broadcasts and of unlisted multicast, and the tokens of a frame.
    #[must_use]
    pub fn broadcast_bucket(&self) -> (Bucket, u64) {
        rate::bucket(self.broadcast)
    }

    /// Least time between two receive notifications of the VM.
    #[must_use]
    pub fn notify_interval(&self) -> Nanos {
        self.rx_coalesce.unwrap_or(Nanos(0))
    }

    /// Delay beyond the moment at which the next frame to the VM is admitted that costs no rate:
    /// half of the shortest burst of its cap, at most 250 us or `rx_coalesce`. Zero without a cap.
    #[must_use]
    pub fn delivery_slack(&self) -> Nanos {
        let most = self.rx_coalesce.unwrap_or(Nanos(0)).max(SLACK);
        self.rx_cap.half_burst().unwrap_or(Nanos(0)).min(most)
    }

    /// Whether all rates can be counted exactly.
    pub(crate) fn check_rates(&self, network: &Network) -> Result<(), String> {
        if self.broadcast.0 > 0.0 {
            rate::check_requests("broadcast", self.broadcast.0, 1)?;
        }
        for (key, cap) in [("tx_cap", self.tx_cap), ("rx_cap", self.rx_cap)] {
            cap.check(network.largest_frame()).map_err(|why| format!("`{key}`: {why}"))?;
        }
        for (key, config) in [("reserve", self.reserve), ("urgent", self.urgent)] {
            if config.is_some_and(|config| config.rate.0 < 1.0) {
                return Err(format!("`{key}`: a rate of less than 1 byte per second; give 1B/s at least"));
            }
        }
        Ok(())
    }

    /// A reservation whose burst is less than one frame covers none.
    fn check_bursts(&self, network: &Network) -> Result<(), FileError> {
        let least = SHORTEST_FRAME + WIRE_OVERHEAD;
        for (key, config) in [("reserve", self.reserve), ("urgent", self.urgent)] {
            if let Some(burst) = config.map(|c| c.burst.0).filter(|burst| *burst < least) {
                let what = format!(
                    "port \"{}\": `{key}`: a burst of {burst} bytes covers no frame; the shortest has {least} on the wire",
                    self.name
                );
                return Err(FileError::Network { network: network.name.clone(), what });
            }
        }
        Ok(())
    }
}

impl FrameCap {
    fn cap(&self, largest: u64) -> Cap {
        let peak = |rate: f64| self.peak.map(|times| rate * times.max(1.0));
        let frames = self.frames.map(|r| rate::requests(r.0, self.frames_burst(r), peak(r.0)));
        let bytes = self.bytes.map(|r| Tspec {
            rate: r.0.round() as u64,
            burst: self.bytes_burst(r, largest),
            peak: peak(r.0).map(|peak| peak.round() as u64),
        });
        let per_request = frames.map_or(1, |(_, per)| per);
        Cap { requests: frames.map(|(tspec, _)| tspec), per_request, bytes, time: None }
    }

    fn frames_burst(&self, rate: Iops) -> u64 {
        self.frames_burst.unwrap_or(((rate.0 * CAP_BURST_S) as u64).max(1))
    }

    fn bytes_burst(&self, rate: BytesPerSec, largest: u64) -> u64 {
        self.bytes_burst.map_or(((rate.0 * CAP_BURST_S) as u64).max(largest), |burst| burst.0)
    }

    /// Whether all rates can be counted exactly, and the bursts hold a frame.
    fn check(&self, largest: u64) -> Result<(), String> {
        if let Some(rate) = self.frames {
            rate::check_requests("frames", rate.0, self.frames_burst(rate))?;
        }
        let Some(rate) = self.bytes else { return Ok(()) };
        rate::check_whole("bytes", rate.0, "bytes")?;
        let burst = self.bytes_burst(rate, largest);
        if burst < largest {
            return Err(format!(
                "`bytes_burst`: a frame of {largest} bytes (`mtu` with headers) would never pass a burst of {burst}; raise it, or lower `mtu`"
            ));
        }
        Ok(())
    }

    /// Time in which half of the shortest burst accumulates; `None` without a cap.
    fn half_burst(&self) -> Option<Nanos> {
        let (frames, bytes) = (self.frames, self.bytes);
        let spare = |burst: u64, rate: f64| ((burst.saturating_sub(1)) as f64 * 5e8 / rate) as u64;
        let frames = frames.map(|rate| spare(self.frames_burst(rate), rate.0));
        let bytes = bytes.map(|rate| spare(self.bytes_burst(rate, 0), rate.0));
        frames.into_iter().chain(bytes).min().map(Nanos)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::File;

    fn parse(network: &str, port: &str) -> Result<File, FileError> {
        let text = format!(
            "[[network]]\nname = \"n\"\n{network}\n[[network.port]]\nname = \"p\"\nsocket = \"/s\"\ntap = \"t\"\nmac = \"52:54:00:00:00:01\"\n{port}\n"
        );
        File::parse(Path::new("x"), &text)
    }

    const BOTH: &str = "reserve = { rate = \"10Mbit/s\", burst = \"3kB\", deadline = \"2ms\" }\nurgent_pcp = [4]\nurgent = { rate = \"5Mbit/s\", burst = \"1kB\", deadline = \"1500us\" }";

    #[test]
    fn each_reservation_has_its_own_bound() {
        let file = parse("link = \"100Mbit/s\"", BOTH).unwrap();
        let [urgent, normal] = file.networks[0].bounds(PortId(0)).map(Option::unwrap);
        assert!(urgent <= Nanos::from_micros(1_500), "{urgent}");
        assert!(normal <= Nanos::from_millis(2) && normal >= urgent, "{normal}");
        let only = parse("link = \"100Mbit/s\"", BOTH.split('\n').next().unwrap()).unwrap();
        assert_eq!(only.networks[0].bounds(PortId(0))[0], None);
        assert!(only.networks[0].bounds(PortId(0))[1].is_some());
        assert_eq!(only.networks[0].bounds(PortId(7)), [None, None]);
        // Any neighbour's flood goes before a reserved frame.
        for policy in ["fifo", "round-robin", "drr"] {
            let other = parse(&format!("link = \"100Mbit/s\"\npolicy = \"{policy}\""), BOTH).unwrap();
            assert_eq!(other.networks[0].bounds(PortId(0)), [None, None], "{policy}");
        }
    }

    #[test]
    fn a_frame_costs_its_time_on_the_wire() {
        let file = parse("link = \"100Mbit/s\"", "").unwrap();
        // 1514 bytes and 24 more at 99 % of 100 Mbit/s.
        let exact = 1_538.0 * 80.0 / LINK_SHARE;
        let cost = file.networks[0].line().time_of(1_514) as f64;
        assert!(cost >= exact && cost < exact + 3.0, "{cost} of {exact}");
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (network, port, why) in [
            ("", "reserve = { rate = \"1Mbit/s\", burst = \"1kB\", deadline = \"1s\" }", "needs `link`"),
            (
                "link = \"100Mbit/s\"",
                "urgent = { rate = \"1Mbit/s\", burst = \"1kB\", deadline = \"1s\" }",
                "which frames are urgent",
            ),
            (
                "link = \"100Mbit/s\"",
                "reserve = { rate = \"1Mbit/s\", burst = \"80B\", deadline = \"1s\" }",
                "covers no frame",
            ),
            ("uplink = \"packet\"", "", "needs `interface`"),
            ("mtu = 20", "", "it must be 68 to 9216"),
            ("", "vlans = [4095]", "is no VLAN"),
            ("", "multicast = [\"52:54:00:00:00:02\"]", "is no group address"),
            ("", "urgent_pcp = [8]", "is no priority code point"),
            ("", "depth = 1", "it must be 2 to 4096"),
            ("", "tx_cap = { frames = \"0/s\" }", "give a whole number per second"),
            ("", "rx_cap = { bytes = \"0.4B/s\" }", "give one, 1 at least"),
            (
                "",
                "rx_cap = { bytes = \"1MB/s\", bytes_burst = \"1514B\" }",
                "would never pass a burst of 1514",
            ),
            ("cpu_budget = \"0%\"", "", "no more than the period; such as \"30%\""),
            ("cpu_budget = \"5%\"\ncpu_period = \"1ms\"", "", "of each of 1 ports; allow 10%"),
            ("cpu_budget = \"50%\"\ncpu_period = \"10us\"", "", "`cpu_period` must be 500us to 1s"),
        ] {
            let error = parse(network, port).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(parse("", "mac_ = 1").is_err(), "an unknown key");
    }

    /// A wake-up serves several frames without a loss of rate.
    #[test]
    fn sleeping_longer_costs_no_rate() {
        let port = |cap: &str, more: &str| {
            let text = format!("rx_cap = {{ {cap} }}\n{more}");
            parse("link = \"100Mbit/s\"", &text).unwrap().networks[0].ports[0].clone()
        };
        let slack = |cap: &str| port(cap, "").delivery_slack();
        assert_eq!(slack(""), Nanos(0));
        assert_eq!(slack("frames = \"20000/s\""), Nanos(250_000));
        assert_eq!(slack("frames = \"100/s\""), Nanos(0), "a burst of one");
        assert_eq!(slack("frames = \"1000/s\", frames_burst = 1"), Nanos(0));
        let longer = port("frames = \"20000/s\"", "rx_coalesce = \"1ms\"");
        assert_eq!((longer.delivery_slack(), longer.notify_interval()), (Nanos(975_000), Nanos(1_000_000)));
    }

    /// Notifications are coalesced where `rx_coalesce` is given.
    #[test]
    fn notifications_are_put_off_on_demand() {
        let interval = |keys: &str| parse("", keys).unwrap().networks[0].ports[0].notify_interval();
        assert_eq!(interval("rx_cap = { frames = \"20000/s\" }\n"), Nanos(0));
        assert_eq!(interval("rx_coalesce = \"500us\""), Nanos(500_000));
        let error = parse("", "rx_coalesce = \"11ms\"").unwrap_err().to_string();
        assert!(error.contains("`rx_coalesce` is 11ms; it must be 10ms at most"), "{error}");
    }
}
