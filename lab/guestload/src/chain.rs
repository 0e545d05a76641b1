//! A timed task that reads its disk and completes: each cycle from its timer to its completion.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_reporter::now;
use rustix::thread::clock_nanosleep_absolute;
use rustix::time::{ClockId, Timespec};

use crate::Done;
use crate::sampled::Block;

/// Priority under `SCHED_FIFO`.
const PRIORITY: u32 = 80;
/// Bytes of the disk that are read, over and over.
const SPAN: u64 = 32 << 20;
/// Distance of consecutive reads, in blocks: not sequential, so that nothing reads ahead.
const STRIDE: u64 = 1_021;

/// Moments of a cycle, in nanoseconds of the guest's monotonic clock.
#[derive(Clone, Copy, Default)]
struct Cycle {
    due: u64,
    woke: u64,
    /// Just before the read of the disk.
    asked: u64,
    answered: u64,
}

/// Wakes `cycles` times, each `period_us` microseconds, and reads a block with direct I/O. Prints a
/// line for each cycle: the times at which it was due, woke, submitted its read, and had its data.
pub fn chain(path: &str, cycles: u64, period_us: u64) -> Done {
    let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits())?;
    let disk = OpenOptions::new().read(true).custom_flags(direct).open(path)?;
    let mut block = Block::boxed();
    sched::set(0, &Attr::fifo(PRIORITY))?;
    // Nothing is allocated during the measurement.
    let mut all = vec![Cycle::default(); usize::try_from(cycles)?];
    let begin = now().0 + 10 * period_us * 1_000;
    for (number, cycle) in (0_u64..).zip(&mut all) {
        cycle.due = begin + number * period_us * 1_000;
        sleep_until(cycle.due)?;
        cycle.woke = now().0;
        let at = number * STRIDE * Block::BYTES as u64 % SPAN;
        cycle.asked = now().0;
        disk.read_exact_at(block.bytes(), at)?;
        cycle.answered = now().0;
    }
    for Cycle { due, woke, asked, answered } in all {
        println!("{due} {woke} {asked} {answered}");
    }
    Ok(())
}

fn sleep_until(at: u64) -> Done {
    let second = 1_000_000_000;
    let at = Timespec { tv_sec: i64::try_from(at / second)?, tv_nsec: i64::try_from(at % second)? };
    loop {
        match clock_nanosleep_absolute(ClockId::Monotonic, &at) {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}
