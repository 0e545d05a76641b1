//! The file's values as the scheduler's configuration.

use rtvirtio_sched::{
    Cap, Config, Cost, Direction, Line, Priority, PriorityRule, Reservation, Tspec, VmConfig, WindowConfig,
};

use crate::rate;
use crate::schema::{CapConfig, Device, Disk, LineConfig, ReservationConfig, Window};

impl Device {
    /// Replaces the scheduler's index ("VM 0") by the disk's name.
    pub(crate) fn with_disk_names(&self, text: &str) -> String {
        let Some((before, (number, after))) = text.split_once("VM ").and_then(|(before, rest)| {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            Some((before, (rest[..digits].parse::<usize>().ok()?, &rest[digits..])))
        }) else {
            return text.to_owned();
        };
        let Some(disk) = self.disks.get(number) else { return text.to_owned() };
        format!("{before}disk \"{}\"{after}", disk.name)
    }

    /// The scheduler's configuration of this device.
    #[must_use]
    pub fn sched(&self) -> Config {
        let window = match self.window {
            Window::Fixed(n) => WindowConfig::fixed(n),
            Window::Adaptive { start, least, most, shared } => WindowConfig { start, least, most, shared },
        };
        let cost = self.cost.map_or(Cost::UNIT, |c| {
            let line = |l: LineConfig| Line { base_ns: l.base.0, per_mib_ns: l.per_mib.0 };
            let write = line(c.write);
            Cost {
                read: line(c.read),
                write,
                flush_ns: c.flush.0.max(c.write.base.0),
                discard_ns: c.discard.map_or_else(|| write.time_of(self.quantum.0).max(500_000), |d| d.0),
            }
        });
        let config = Config {
            policy: self.policy,
            quantum: self.quantum.0,
            window,
            cost,
            aging: self.aging,
            discard_share: round_to_u64(self.discard_share.0 * 100.0).clamp(1, 100) as u32,
            ..Config::default()
        };
        let vms = self.disks.iter().map(|d| d.vm_config(&config)).collect();
        Config { vms, ..config }
    }
}

impl Disk {
    fn vm_config(&self, config: &Config) -> VmConfig {
        let rule = self.guest_priority.map_or_else(PriorityRule::default, |p| PriorityRule {
            read: true,
            default: Priority { class: p.default, level: 4 },
            ceiling: p.ceiling,
        });
        let largest = self.urgent_quantum.map_or(0, |b| b.0).max(config.quantum);
        VmConfig {
            depth: self.depth,
            weight: self.weight,
            caps: [
                self.read_cap.cap(config, Direction::Read, largest),
                self.write_cap.cap(config, Direction::Write, largest),
            ],
            urgent: self.urgent.map(ReservationConfig::reservation),
            urgent_quantum: self.urgent_quantum.map(|b| b.0),
            normal: self.reserve.map(ReservationConfig::reservation),
            largest: None,
            priority: rule,
        }
    }
}

impl ReservationConfig {
    fn reservation(self) -> Reservation {
        Reservation { rate: round_to_u64(self.share.0 * 1e9), burst: self.burst.0, deadline: self.deadline }
    }
}

fn round_to_u64(v: f64) -> u64 {
    v.max(0.0).round() as u64
}

impl CapConfig {
    fn requests_burst(&self) -> u64 {
        self.requests_burst.unwrap_or(1)
    }

    /// Whether all rates can be counted exactly.
    pub(crate) fn check(&self) -> Result<(), String> {
        let requests = self.requests.map(|r| rate::check_requests("requests", r.0, self.requests_burst()));
        let bytes = self.bytes.map(|r| rate::check_whole("bytes", r.0, "bytes"));
        let share = self.share.map(|r| rate::check_whole("share", r.0 * 1e9, "ns"));
        [requests, bytes, share].into_iter().flatten().collect()
    }

    fn cap(&self, config: &Config, direction: Direction, largest: u64) -> Cap {
        let peak = |rate: f64| self.peak.map(|times| rate * times.max(1.0));
        let tspec = |rate: f64, burst: u64| Tspec {
            rate: round_to_u64(rate),
            burst,
            peak: peak(rate).map(round_to_u64),
        };
        let dearest = config.cost.max_cost(direction, largest);
        let requests = self.requests.map(|r| rate::requests(r.0, self.requests_burst(), peak(r.0)));
        Cap {
            requests: requests.map(|(tspec, _)| tspec),
            per_request: requests.map_or(1, |(_, per)| per),
            bytes: self.bytes.map(|r| tspec(r.0, self.bytes_burst.map_or(largest, |b| b.0))),
            time: self.share.map(|r| tspec(r.0 * 1e9, self.share_burst.map_or(dearest, |b| b.0))),
        }
    }
}
