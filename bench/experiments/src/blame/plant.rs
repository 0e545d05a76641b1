//! Causes as they are drawn: kinds, strengths from a seed, and the order of the runs.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rtvirtio_blame::CauseKind;
use rtvirtio_spec::LabKind;
use rtvirtio_stats::Random;
use serde::{Deserialize, Serialize};

use super::paging::Squeeze;

/// Block sizes of floods, in KiB.
const BLOCKS: [u64; 4] = [32, 64, 128, 256];
/// Factor of the twin's service times while it is slow: with 15 ms for a read the eMMC serves
/// fewer than the VM reads.
pub const SLOW_BY: u32 = 60;

/// Time for which a memory limit is in force: much longer than the target.
const HOLD: Duration = Duration::from_millis(600);

/// Kind of what is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// No cause: the control.
    Nothing,
    /// Threads of the host that never sleep.
    CpuOthers,
    /// Quota of CPU time of the VM's own cgroup.
    CpuQuota,
    /// Flood by a neighbour on the same device.
    Neighbour,
    /// Device that stands still again and again.
    DiskStall,
    /// Limit of the VM's cgroup below its rate.
    KernelLimit,
    /// Limit of QEMU below the VM's rate.
    QemuThrottle,
    /// Program in the VM that reads more than the VM declares.
    Load,
    /// Slow device.
    Device,
    /// Limit below the VM's rate inside the guest.
    GuestLimit,
    /// Memory of the VM that is swapped out and read back.
    Paging,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 11] = [
        Self::Nothing,
        Self::CpuOthers,
        Self::CpuQuota,
        Self::Neighbour,
        Self::DiskStall,
        Self::KernelLimit,
        Self::QemuThrottle,
        Self::Load,
        Self::Device,
        Self::GuestLimit,
        Self::Paging,
    ];

    /// Name, as in results and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::CpuOthers => "cpu_others",
            Self::CpuQuota => "cpu_quota",
            Self::Neighbour => "neighbour",
            Self::DiskStall => "disk_stall",
            Self::KernelLimit => "kernel_limit",
            Self::QemuThrottle => "qemu_throttle",
            Self::Load => "load",
            Self::Device => "device",
            Self::GuestLimit => "guest_limit",
            Self::Paging => "paging",
        }
    }

    /// The answer that is right; `None` for the control.
    #[must_use]
    pub fn cause(self) -> Option<CauseKind> {
        Some(match self {
            Self::Nothing => return None,
            Self::CpuOthers => CauseKind::CpuOthers,
            Self::CpuQuota => CauseKind::CpuQuota,
            Self::Neighbour => CauseKind::Neighbour,
            Self::DiskStall => CauseKind::DiskStall,
            Self::KernelLimit => CauseKind::KernelLimit,
            Self::QemuThrottle => CauseKind::QemuThrottle,
            Self::Load => CauseKind::Load,
            Self::Device => CauseKind::Device,
            Self::GuestLimit => CauseKind::Guest,
            Self::Paging => CauseKind::Paging,
        })
    }

    /// Whether it can be planted in such a VM.
    #[must_use]
    pub fn fits(self, vm: LabKind) -> bool {
        !matches!(self, Self::QemuThrottle | Self::GuestLimit | Self::Paging) || vm == LabKind::Qemu
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("there are {}", known()))
    }
}

/// A cause with its strength.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlantedCause {
    pub kind: Kind,
    /// Strength, 0 for the weakest to 1.
    pub strength: f64,
    /// Form, 0 to 1: the block size of a flood, the pause between stops of the device or memory
    /// limits.
    pub form: f64,
}

impl PlantedCause {
    fn draw(kind: Kind, random: &mut Random) -> Self {
        Self { kind, strength: random.unit(), form: random.unit() }
    }

    /// Value between two ends by the strength, evenly in its logarithm.
    fn between(&self, weakest: f64, strongest: f64) -> f64 {
        weakest * (strongest / weakest).powf(self.strength)
    }

    /// Threads on each CPU that never sleep.
    #[must_use]
    pub fn threads_per_cpu(&self) -> usize {
        self.between(2.0, 8.0).round() as usize
    }

    /// Weight of these threads together, of which a VM has 1024: with twice as much, fio in an
    /// emulated guest may not end in time.
    #[must_use]
    pub fn weight(&self) -> u64 {
        self.between(8_192.0, 16_384.0) as u64
    }

    /// Quota in us of each 100 ms. fio alone needs little CPU time, an emulated guest much.
    #[must_use]
    pub fn quota_us(&self, vm: LabKind) -> u64 {
        let ms = if vm == LabKind::Qemu { self.between(40.0, 8.0) } else { self.between(3.0, 1.0) };
        (ms * 1e3) as u64
    }

    /// Block size in KiB and requests in flight of a flood.
    #[must_use]
    pub fn flood(&self) -> (u64, u32) {
        let block = BLOCKS[((self.form * BLOCKS.len() as f64) as usize).min(BLOCKS.len() - 1)];
        (block, self.between(8.0, 64.0).round() as u32)
    }

    /// Length of each stop of the device, and of the pause after it, in ms.
    #[must_use]
    pub fn stops(&self) -> (u64, u64) {
        let stop = self.between(100.0, 1_000.0);
        (stop as u64, (stop * (1.0 + 3.0 * self.form)) as u64)
    }

    /// Limit of requests per second for a VM of this rate.
    #[must_use]
    pub fn limit(&self, rate: f64) -> u64 {
        (rate * self.between(0.9, 0.4)).max(1.0) as u64
    }

    /// Limit of the memory of the VM's processes. An emulated guest that reads uses more all the
    /// time, so that it waits for memory while the limit is in force, and after it.
    #[must_use]
    pub(super) fn squeeze(&self) -> Squeeze {
        let limit_mib = self.between(24.0, 10.0).round() as u64;
        let pause = Duration::from_millis((800.0 + 800.0 * self.form) as u64);
        Squeeze { limit_mib, hold: HOLD, pause }
    }

    /// Settings in words, as results have them.
    #[must_use]
    pub fn describe(&self, vm: LabKind, rate: f64) -> String {
        match self.kind {
            Kind::Nothing => "nothing".to_owned(),
            Kind::CpuOthers => {
                format!("{} busy threads per CPU, weight {}", self.threads_per_cpu(), self.weight())
            }
            Kind::CpuQuota => format!("{} us of each 100 ms", self.quota_us(vm)),
            Kind::Neighbour | Kind::Load => {
                let (block, depth) = self.flood();
                format!("reads of {block} KiB, {depth} in flight")
            }
            Kind::DiskStall => {
                let (stop, pause) = self.stops();
                format!("stops of {stop} ms, {pause} ms between them")
            }
            Kind::KernelLimit | Kind::QemuThrottle | Kind::GuestLimit => {
                format!("{} reads/s", self.limit(rate))
            }
            Kind::Device => format!("{SLOW_BY} times as slow"),
            Kind::Paging => {
                let Squeeze { limit_mib, hold, pause } = self.squeeze();
                let (hold, pause) = (hold.as_millis(), pause.as_millis());
                format!("a memory limit of {limit_mib} MiB for {hold} ms, again after {pause} ms")
            }
        }
    }
}

impl fmt::Display for PlantedCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())
    }
}

/// Draws the runs of so many rounds. A round has each kind alone, and random pairs of different
/// causes, half as many; its order is random as well.
#[must_use]
pub fn draw(kinds: &[Kind], rounds: usize, seed: u64) -> Vec<Vec<PlantedCause>> {
    let mut random = Random::new(seed);
    let mut all = Vec::new();
    for _ in 0..rounds {
        let mut round: Vec<Vec<PlantedCause>> =
            kinds.iter().map(|kind| vec![PlantedCause::draw(*kind, &mut random)]).collect();
        let mut causes: Vec<Kind> = kinds.iter().copied().filter(|kind| *kind != Kind::Nothing).collect();
        random.shuffle(&mut causes);
        for pair in causes.chunks_exact(2) {
            let mut pair = pair.to_vec();
            pair.sort();
            round.push(pair.into_iter().map(|kind| PlantedCause::draw(kind, &mut random)).collect());
        }
        random.shuffle(&mut round);
        all.extend(round);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_runs_and_another_one_others() {
        let runs = draw(&Kind::ALL, 3, 7);
        assert_eq!(runs, draw(&Kind::ALL, 3, 7));
        assert_ne!(runs, draw(&Kind::ALL, 3, 8));
        assert_eq!(runs.len(), 3 * (11 + 5));
        for kind in Kind::ALL {
            let alone = runs.iter().filter(|run| run.len() == 1 && run[0].kind == kind);
            assert_eq!(alone.count(), 3, "{}", kind.name());
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        for pair in runs.iter().filter(|run| run.len() == 2) {
            assert!(pair[0].kind != pair[1].kind && pair.iter().all(|one| one.kind.cause().is_some()));
        }
        assert_eq!(draw(&[Kind::Load], 2, 1).len(), 2, "one kind has no pair");
        assert!("cpu".parse::<Kind>().unwrap_err().contains("cpu_quota"));
    }

    #[test]
    fn strengths_reach_from_weak_to_strong() {
        let at = |strength| PlantedCause { kind: Kind::DiskStall, strength, form: 1.0 };
        let (weak, strong) = (at(0.0), at(1.0));
        assert_eq!((weak.limit(100.0), strong.limit(100.0)), (90, 40));
        assert_eq!((weak.stops(), strong.stops()), ((100, 400), (1_000, 4_000)));
        assert_eq!((weak.flood(), strong.flood()), ((256, 8), (256, 64)));
        assert_eq!((weak.quota_us(LabKind::Qemu), strong.quota_us(LabKind::Qemu)), (40_000, 8_000));
        assert_eq!((weak.threads_per_cpu(), strong.threads_per_cpu()), (2, 8));
        assert_eq!((weak.weight(), strong.weight()), (8_192, 16_384));
        assert_eq!((weak.squeeze().limit_mib, strong.squeeze().limit_mib), (24, 10));
        assert_eq!(weak.squeeze().pause, Duration::from_millis(1_600));
    }

    #[test]
    fn memory_is_paged_in_a_guest_only_and_its_settings_are_said() {
        assert!(Kind::Paging.fits(LabKind::Qemu) && !Kind::Paging.fits(LabKind::Process));
        let one = PlantedCause { kind: Kind::Paging, strength: 1.0, form: 0.5 };
        let said = one.describe(LabKind::Qemu, 100.0);
        assert_eq!(said, "a memory limit of 10 MiB for 600 ms, again after 1200 ms");
        assert_eq!(Kind::Paging.cause(), Some(CauseKind::Paging));
    }
}
