//! False reports of urgency by a guest, for tests of the host.

use std::time::{Duration, Instant};

use rtvirtio_reporter::{Device, Reporter};
use rtvirtio_urgency::page::{Mode, RawReport, flag};

use crate::{Done, compute};

/// Xorshift generator of invalid field values.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Computes for so long, with reports of the given kind. `urgent` is also what an honest guest
/// reports whose urgent task uses all the CPU time it gets.
pub fn lie(kind: &str, length: Duration) -> Done {
    let urgent = RawReport { policy: 1, priority: 99, ..RawReport::default() };
    let idle = RawReport { flags: flag::IDLE, ..RawReport::default() };
    let reporter = Reporter::begin(Device::find()?, Mode::Region)?;
    let region = reporter.device().region();
    let start = Instant::now();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut round = 0_u64;
    reporter.report(0, &urgent)?;
    while start.elapsed() < length {
        round += 1;
        match kind {
            "urgent" => reporter.report(0, &urgent)?,
            // Reports idle, and computes.
            "idle" => reporter.report(0, &idle)?,
            // An interrupt that never ends.
            "interrupt" => reporter.report(0, &RawReport { flags: flag::INTERRUPT, ..urgent })?,
            "storm" => {
                reporter.report(0, &urgent)?;
                (0..200).for_each(|_| reporter.device().ring());
            }
            "nonsense" => {
                let word = |r: &mut Random| (r.next() & 0xffff_ffff) as u32;
                let report = RawReport {
                    policy: word(&mut random) % 4,
                    priority: word(&mut random),
                    flags: word(&mut random),
                    written: random.next(),
                    deadline: random.next(),
                };
                reporter.report((random.next() % 64).min(62) as usize, &report)?;
                reporter.report(0, &report)?;
            }
            // Half of the reports are torn (an odd sequence number), for a while.
            "torn" => {
                let block = region.block(0).ok_or("no block for vCPU 0")?;
                if round % 2 == 0 {
                    block.tear();
                } else {
                    reporter.report(0, &urgent)?;
                }
            }
            // Gives a wrong address of the blocks, another one each time.
            "address" => {
                let address = if round % 3 == 0 { 0xffff_ffff_ffff_f000 } else { random.next() };
                region.set_mode(Mode::GuestMemory { address });
            }
            other => return Err(format!("no lie is called {other}").into()),
        }
        (0..4).for_each(|_| compute());
    }
    Ok(())
}
