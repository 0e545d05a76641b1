//! The memory that host and guest share: blocks of 64 bytes, little-endian 32-bit words.
//!
//! Block 0 is the header: its first half is the host's, its second half the guest's. Block `n + 1`
//! belongs to vCPU `n`: the guest writes words 0 to 7 under a sequence lock, the host words
//! 14 and 15. Each side reads the other's words once, and checks what it has read. The protocol for
//! people who write a guest is `docs/reference/urgency-page.md`.
//!
//! A guest has the region mapped ([`Region`]). The host copies what it needs ([`Host`]): a file
//! that its owner truncates then gives an error, where a mapping would end the process.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use rtvirtio_units::Nanos;

use crate::{GuestPolicy, Report};

mod host;

pub use host::{Blocks, Host, Memory};

/// Bytes of a block: a cache line of the machines that run VMs.
pub const BLOCK: usize = 64;
pub const WORDS: usize = BLOCK / 4;
/// Least size of the region, in bytes: a page, with room for 63 vCPUs.
pub const LEAST_SIZE: usize = 4096;
/// `RTVU`: first word of the header.
pub const MAGIC: u32 = u32::from_le_bytes(*b"RTVU");
/// Version of this layout.
pub const VERSION: u32 = 1;
/// Value of the header's doorbell word without a doorbell.
pub const NO_DOORBELL: u32 = u32::MAX;
/// Most vCPUs that a region can have: the limit of QEMU's q35.
pub const MOST_VCPUS: usize = 288;

/// Words of the header.
pub mod header {
    /// [`super::MAGIC`], written last of all words.
    pub const MAGIC: usize = 0;
    /// [`super::VERSION`] of the layout.
    pub const VERSION: usize = 1;
    /// Number of vCPU blocks that follow.
    pub const VCPUS: usize = 2;
    /// 1 while a host process serves the page.
    pub const SERVED: usize = 3;
    /// Value that the guest writes to the device's doorbell register to notify the host.
    pub const DOORBELL: usize = 4;
    /// Counts the host processes that have served the page, one after the other.
    pub const GENERATION: usize = 5;
    /// Number of the guest's [`super::Mode`].
    pub const MODE: usize = 8;
    /// Changes at least every 300 ms while the guest reports.
    pub const BEAT: usize = 9;
    /// Guest-physical address of vCPU 0's block, low half; in [`super::Mode::GuestMemory`].
    pub const ADDRESS: usize = 10;
}

/// Words of a vCPU's block.
pub mod vcpu {
    /// Odd while the guest writes the block.
    pub const SEQUENCE: usize = 0;
    /// Linux's number of the scheduling policy.
    pub const POLICY: usize = 1;
    /// Priority, 0 to 99.
    pub const PRIORITY: usize = 2;
    /// Combination of [`super::flag`] bits.
    pub const FLAGS: usize = 3;
    /// Time of the report, in nanoseconds of the guest's clock, low half.
    pub const WRITTEN: usize = 4;
    /// Time of the next urgent timer on the same clock, low half; 0 for none.
    pub const DEADLINE: usize = 6;
    /// Number of words under the sequence lock.
    pub const GUESTS: usize = 8;
    /// Written by the host: real-time priority that the vCPU has; 0 for none.
    pub const LEVEL: usize = 14;
    /// Written by the host: counts its changes.
    pub const CHANGES: usize = 15;
}

/// Bits of [`vcpu::FLAGS`] that the protocol defines.
pub mod flag {
    /// An interrupt is pending or handled.
    pub const INTERRUPT: u32 = 1;
    /// A non-maskable interrupt is pending or handled.
    pub const NMI: u32 = 2;
    /// A critical section runs.
    pub const CRITICAL: u32 = 4;
    /// The vCPU is idle.
    pub const IDLE: u32 = 8;
}

/// Place of the guest's reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The guest does not report.
    Off,
    /// Reports in the blocks of this region.
    Region,
    /// Reports in blocks at an address of the guest's memory, which the host only reads.
    GuestMemory {
        /// Guest-physical address of vCPU 0's block.
        address: u64,
    },
}

/// Report as the guest has written it to a block, unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawReport {
    /// Linux's number of the policy.
    pub policy: u32,
    /// Real-time priority, 0 to 99.
    pub priority: u32,
    /// Combination of [`flag`] bits.
    pub flags: u32,
    /// Time of the report, in nanoseconds of the guest's clock.
    pub written: u64,
    /// Time of the next urgent timer, on the same clock; 0 for none.
    pub deadline: u64,
}

fn low(value: u64) -> u32 {
    (value & u64::from(u32::MAX)) as u32
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl RawReport {
    fn of_words(words: &[u32; vcpu::GUESTS]) -> Self {
        Self {
            policy: words[vcpu::POLICY],
            priority: words[vcpu::PRIORITY],
            flags: words[vcpu::FLAGS],
            written: join(words[vcpu::WRITTEN], words[vcpu::WRITTEN + 1]),
            deadline: join(words[vcpu::DEADLINE], words[vcpu::DEADLINE + 1]),
        }
    }

    fn to_words(self) -> [u32; vcpu::GUESTS] {
        let mut words = [0; vcpu::GUESTS];
        words[vcpu::POLICY] = self.policy;
        words[vcpu::PRIORITY] = self.priority;
        words[vcpu::FLAGS] = self.flags;
        for (at, value) in [(vcpu::WRITTEN, self.written), (vcpu::DEADLINE, self.deadline)] {
            words[at] = low(value);
            words[at + 1] = low(value >> 32);
        }
        words
    }

    /// Checked report, with its deadline in the host's time by `to_host`, and whether a value was
    /// outside the protocol. Such values count as the least urgent: an unknown policy as ordinary
    /// work, a priority above 99 as 99 as the paper says, unknown flags as none.
    #[must_use]
    pub fn checked(&self, to_host: impl Fn(Nanos) -> Option<Nanos>) -> (Report, bool) {
        const KNOWN: u32 = flag::INTERRUPT | flag::NMI | flag::CRITICAL | flag::IDLE;
        let policy = GuestPolicy::of_number(self.policy);
        let has = |bit: u32| self.flags & bit != 0;
        let report = Report {
            policy: policy.unwrap_or_default(),
            priority: self.priority.min(99),
            interrupt: has(flag::INTERRUPT),
            nmi: has(flag::NMI),
            critical: has(flag::CRITICAL),
            idle: has(flag::IDLE),
            deadline: (self.deadline != 0).then(|| to_host(Nanos(self.deadline))).flatten(),
        };
        (report, policy.is_none() || self.priority > 99 || self.flags & !KNOWN != 0)
    }

    /// Parses a copy of a block with its sequence number as read before and after it. `None` when
    /// the guest was writing.
    #[must_use]
    pub fn of_copy(before: u32, words: &[u32; vcpu::GUESTS], after: u32) -> Option<(u32, Self)> {
        let quiet = before % 2 == 0 && before == after && words[vcpu::SEQUENCE] == before;
        quiet.then(|| (before, Self::of_words(words)))
    }
}

/// The guest's side: a region that is mapped. The host writes to it at any time.
#[derive(Clone, Copy, Debug)]
pub struct Region<'m> {
    words: &'m [AtomicU32],
}

impl<'m> Region<'m> {
    /// Region over mapped words; `None` for fewer than [`LEAST_SIZE`] bytes.
    #[must_use]
    pub fn new(words: &'m [AtomicU32]) -> Option<Self> {
        (words.len() >= LEAST_SIZE / 4).then_some(Self { words })
    }

    /// Number of vCPUs that have a block.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        (self.words.len() / WORDS - 1).min(MOST_VCPUS)
    }

    fn load(&self, word: usize) -> u32 {
        u32::from_le(self.words[word].load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u32) {
        self.words[word].store(value.to_le(), Ordering::Release);
    }

    /// Block of a vCPU; `None` for one without a block.
    #[must_use]
    pub fn block(&self, vcpu: usize) -> Option<Block<'m>> {
        let at = (vcpu + 1) * WORDS;
        (vcpu < self.vcpus()).then(|| Block { words: &self.words[at..at + WORDS] })
    }

    /// Whether a host has offered the page in a known version.
    #[must_use]
    pub fn is_offered(&self) -> bool {
        self.load(header::MAGIC) == MAGIC && self.load(header::VERSION) == VERSION
    }

    /// Whether a host process serves the page.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.is_offered() && self.load(header::SERVED) == 1
    }

    /// Value of the doorbell register that notifies the host; `None` without a doorbell.
    #[must_use]
    pub fn doorbell(&self) -> Option<u32> {
        Some(self.load(header::DOORBELL)).filter(|d| *d != NO_DOORBELL)
    }

    /// Announces the place of the guest's reports.
    pub fn set_mode(&self, mode: Mode) {
        if let Mode::GuestMemory { address } = mode {
            self.store(header::ADDRESS, low(address));
            self.store(header::ADDRESS + 1, low(address >> 32));
        }
        let number = match mode {
            Mode::Off => 0,
            Mode::Region => 1,
            Mode::GuestMemory { .. } => 2,
        };
        self.store(header::MODE, number);
    }

    /// Increments the beat, which shows that the guest still reports.
    pub fn beat(&self) {
        self.store(header::BEAT, self.load(header::BEAT).wrapping_add(1));
    }
}

/// The block of one vCPU.
#[derive(Clone, Copy, Debug)]
pub struct Block<'m> {
    words: &'m [AtomicU32],
}

impl Block<'_> {
    fn load(&self, word: usize, order: Ordering) -> u32 {
        u32::from_le(self.words[word].load(order))
    }

    /// Writes a report. Only one writer at a time.
    pub fn write(&self, report: &RawReport) {
        let words = report.to_words();
        // An interrupted writer leaves the sequence number odd.
        let odd = self.load(vcpu::SEQUENCE, Ordering::Relaxed) | 1;
        self.words[vcpu::SEQUENCE].store(odd.to_le(), Ordering::Relaxed);
        fence(Ordering::Release);
        for (at, word) in words.iter().enumerate().skip(1) {
            self.words[at].store(word.to_le(), Ordering::Relaxed);
        }
        self.words[vcpu::SEQUENCE].store(odd.wrapping_add(1).to_le(), Ordering::Release);
    }

    /// Leaves the block as being written, as an interrupted writer does.
    pub fn tear(&self) {
        let odd = self.load(vcpu::SEQUENCE, Ordering::Relaxed) | 1;
        self.words[vcpu::SEQUENCE].store(odd.to_le(), Ordering::Release);
    }

    /// Real-time priority of the vCPU; 0 for an ordinary thread.
    #[must_use]
    pub fn level(&self) -> u32 {
        self.load(vcpu::LEVEL, Ordering::Acquire)
    }
}
