//! Configuration of a scheduler.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::bucket::{Cap, MAX_BURST, Reservation, Tspec};
use crate::cost::Cost;
use crate::priority::PriorityRule;
use crate::request::Direction;
use crate::window::WindowConfig;

/// Largest quantum, in bytes.
const MAX_QUANTUM: u64 = 16 << 20;
/// Largest number of VMs of one device.
const MAX_VMS: u64 = 4_096;

/// The policy that chooses the next VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The oldest request of all VMs.
    Fifo,
    /// A piece of each VM in turn: the I/O-domain paper's round robin by data quantum.
    RoundRobin,
    /// Device time in proportion to the VMs' weights.
    Drr,
    /// The earliest deadline among requests within their reservations; all others share the rest by
    /// weight.
    Edf,
}

impl Policy {
    /// All policies, in the order of declaration.
    pub const ALL: [Self; 4] = [Self::Fifo, Self::RoundRobin, Self::Drr, Self::Edf];

    /// Name in configuration files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::RoundRobin => "round-robin",
            Self::Drr => "drr",
            Self::Edf => "edf",
        }
    }
}

/// Configuration of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmConfig {
    /// Largest number of outstanding requests, 1 to 65 536.
    pub depth: u32,
    /// Share of the unreserved device time, 1 to 1000.
    pub weight: u32,
    /// Caps for reads and writes.
    pub caps: [Cap; 2],
    /// Reservation of the VM's real-time requests.
    pub urgent: Option<Reservation>,
    /// Largest piece of real-time requests within their reservation, in bytes, from the device's
    /// quantum to 16 MiB; `None` for the device's quantum. Splitting keeps a request from blocking
    /// others for long; the most urgent requests need not be preemptible, and each further piece
    /// costs the base time of a request again.
    pub urgent_quantum: Option<u64>,
    /// Reservation of all other requests, idle class excepted.
    pub normal: Option<Reservation>,
    /// Largest request in bytes, where all are smaller than the quantum: bursts of caps need not be
    /// larger, and peaks are those of pieces of this size.
    pub largest: Option<u64>,
    /// Interpretation of the guest's priorities.
    pub priority: PriorityRule,
}

impl Default for VmConfig {
    fn default() -> Self {
        Self {
            depth: 256,
            weight: 100,
            caps: [Cap::default(); 2],
            urgent: None,
            urgent_quantum: None,
            normal: None,
            largest: None,
            priority: PriorityRule::default(),
        }
    }
}

/// Configuration of the scheduler of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Policy that chooses the next VM.
    pub policy: Policy,
    /// Largest piece of a read, write or zeroing in bytes: a multiple of 4 KiB, up to 16 MiB.
    pub quantum: u64,
    /// Largest piece of a discard in bytes.
    pub discard_quantum: u64,
    /// Smallest piece of a discard in bytes: no smaller than the unit of deallocation of the device
    /// or file system.
    pub discard_least: u64,
    /// Share of the device's time in percent, 1 to 100, that discards and zeroing take while other
    /// VMs use the device.
    pub discard_share: u32,
    /// Limits on the number of pieces at the device.
    pub window: WindowConfig,
    /// Device time of pieces.
    pub cost: Cost,
    /// Wait after which a request goes before more important ones of its VM.
    pub aging: Nanos,
    /// VMs in the order of their indices.
    pub vms: Vec<VmConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: Policy::Edf,
            quantum: 64 << 10,
            discard_quantum: 1 << 20,
            discard_least: 64 << 10,
            discard_share: 5,
            window: WindowConfig::fixed(4),
            cost: Cost::UNIT,
            aging: Nanos::from_millis(1_000),
            vms: Vec::new(),
        }
    }
}

/// Errors of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A number outside its range.
    #[error("{what} is {value}; it must be {least} to {most}")]
    Range {
        /// Name of the number.
        what: String,
        /// Value as given.
        value: u64,
        /// Smallest allowed value.
        least: u64,
        /// Largest allowed value.
        most: u64,
    },
    /// A quantum that would split a block.
    #[error("the quantum is {quantum} bytes; it must be a multiple of 4096")]
    Multiple {
        /// Quantum as given, in bytes.
        quantum: u64,
    },
    /// A burst smaller than one piece.
    #[error(
        "{what}: a burst of {burst} can never let a piece of {piece} go; raise the burst to {piece} or lower the quantum"
    )]
    Burst {
        /// Name of the limit or reservation.
        what: String,
        /// Burst as given, in tokens.
        burst: u64,
        /// Tokens of one piece.
        piece: u64,
    },
}

fn range(what: impl Into<String>, value: u64, least: u64, most: u64) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(ConfigError::Range { what: what.into(), value, least, most })
}

impl Config {
    /// Checks all numbers.
    ///
    /// # Errors
    /// The first number out of range, or a burst that is too small, with its place.
    pub fn check(&self) -> Result<(), ConfigError> {
        range("quantum", self.quantum, 4 << 10, MAX_QUANTUM)?;
        if self.quantum % 4_096 != 0 {
            return Err(ConfigError::Multiple { quantum: self.quantum });
        }
        range("discard quantum", self.discard_quantum, 4 << 10, 1 << 40)?;
        range("smallest piece of a discard", self.discard_least, 512, 1 << 40)?;
        range("share of discards in percent", self.discard_share.into(), 1, 100)?;
        range("window.start", self.window.start.into(), 1, 65_536)?;
        range("window.least", self.window.least.into(), 1, self.window.most.into())?;
        range("window.most", self.window.most.into(), 1, 65_536)?;
        if let Some(shared) = self.window.shared {
            range("window.shared", shared.into(), 1, 65_536)?;
        }
        range("number of VMs", self.vms.len() as u64, 0, MAX_VMS)?;
        for (i, vm) in self.vms.iter().enumerate() {
            self.check_vm(i, vm)?;
        }
        Ok(())
    }

    /// Largest piece of a VM's requests, in bytes.
    #[must_use]
    pub fn max_piece(&self, vm: &VmConfig) -> u64 {
        let piece = vm.urgent_quantum.unwrap_or(0).max(self.quantum);
        vm.largest.map_or(piece, |largest| largest.min(piece))
    }

    /// Checks one VM's part.
    fn check_vm(&self, i: usize, vm: &VmConfig) -> Result<(), ConfigError> {
        range(format!("VM {i}: depth"), vm.depth.into(), 1, 65_536)?;
        range(format!("VM {i}: weight"), vm.weight.into(), 1, 1_000)?;
        if let Some(quantum) = vm.urgent_quantum {
            range(format!("VM {i}: urgent quantum"), quantum, self.quantum, MAX_QUANTUM)?;
            if quantum % 4_096 != 0 {
                return Err(ConfigError::Multiple { quantum });
            }
        }
        let largest = self.max_piece(vm);
        for direction in Direction::ALL {
            let cap = &vm.caps[direction.index()];
            let most = self.cost.max_cost(direction, largest);
            for (what, spec, piece) in [
                ("requests", cap.requests, cap.per_request.max(1)),
                ("bytes", cap.bytes, largest),
                ("time", cap.time, most),
            ] {
                if let Some(spec) = spec {
                    check_tspec(&format!("VM {i}: {direction:?} {what}"), &spec, piece)?;
                }
            }
        }
        for (what, reservation) in [("urgent", vm.urgent), ("normal", vm.normal)] {
            let Some(r) = reservation else { continue };
            let urgent = what == "urgent";
            let what = format!("VM {i}: {what} reservation");
            range(format!("{what}'s rate"), r.rate, 1, 65_536_000_000_000)?;
            // A reservation may cover small requests only; one that covers no request is a mistake.
            let least = match (urgent, vm.urgent_quantum) {
                // Pieces larger than the burst would never be eligible under the reservation, and
                // would block those that are.
                (true, Some(quantum)) => {
                    self.cost.read.time_of(quantum).max(self.cost.write.time_of(quantum))
                }
                _ => self.cost.read.time_of(0).min(self.cost.write.time_of(0)),
            };
            if r.burst < least {
                return Err(ConfigError::Burst { what, burst: r.burst, piece: least });
            }
            range(format!("{what}'s burst"), r.burst, 1, MAX_BURST)?;
        }
        Ok(())
    }
}

fn check_tspec(what: &str, spec: &Tspec, piece: u64) -> Result<(), ConfigError> {
    range(format!("{what}: rate"), spec.rate, 1, 1 << 50)?;
    if let Some(peak) = spec.peak {
        range(format!("{what}: peak"), peak, spec.rate, 1 << 50)?;
    }
    if spec.burst < piece {
        return Err(ConfigError::Burst { what: what.to_owned(), burst: spec.burst, piece });
    }
    range(format!("{what}: burst"), spec.burst, 1, MAX_BURST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(vm: VmConfig) -> Config {
        Config { vms: vec![vm], ..Config::default() }
    }

    #[test]
    fn invalid_values_are_refused_with_their_place() {
        assert_eq!(one(VmConfig::default()).check(), Ok(()));
        let spec = Tspec { rate: 1 << 20, burst: 4096, peak: None };
        let cap = Cap { bytes: Some(spec), ..Cap::default() };
        let e = one(VmConfig { caps: [cap, Cap::default()], ..VmConfig::default() }).check().unwrap_err();
        let what = "VM 0: Read bytes".to_owned();
        assert_eq!(e, ConfigError::Burst { what, burst: 4_096, piece: 65_536 });
        let e = one(VmConfig { weight: 0, ..VmConfig::default() }).check().unwrap_err();
        let what = "VM 0: weight".to_owned();
        assert_eq!(e, ConfigError::Range { what, value: 0, least: 1, most: 1_000 });
        assert_eq!(Config::default().check(), Ok(()), "VMs may come later");
        let most = vec![VmConfig::default(); 4_097];
        assert!(Config { vms: most, ..Config::default() }.check().is_err());
        let peak = Tspec { rate: 100, burst: 1, peak: Some(99) };
        let cap = Cap { requests: Some(peak), ..Cap::default() };
        assert!(one(VmConfig { caps: [cap, Cap::default()], ..VmConfig::default() }).check().is_err());
        let empty = Reservation { rate: 1, burst: 999, deadline: Nanos(1) };
        assert!(one(VmConfig { normal: Some(empty), ..VmConfig::default() }).check().is_err());
    }
}
