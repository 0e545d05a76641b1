//! The configuration file: any text is a valid configuration, or an error with a message.

use std::path::Path;

use rtvirtio_domain_config::File;
use rtvirtio_sched::{Idx, Next, Op, Priority, Request, Scheduler, VmId};
use rtvirtio_units::Nanos;

/// Most requests of the schedulers of one input.
const ROOM: u64 = 20_000;

/// Parses a file and runs its schedulers.
///
/// # Panics
/// An accepted file makes no scheduler, or one that never completes a request.
pub fn play(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let file = match File::parse(Path::new("iod.toml"), text) {
        Ok(file) => file,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    for device in &file.devices {
        let config = device.sched();
        // Disks of a device may come later.
        let room = config.vms.iter().map(|vm| u64::from(vm.depth)).sum::<u64>();
        if config.vms.is_empty() || room > ROOM {
            continue;
        }
        let mut scheduler = Scheduler::new(&config).expect("a file that was checked");
        let mut now = Nanos(1);
        for (i, op) in [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes].into_iter().enumerate()
        {
            let vm = VmId::from_usize(i % config.vms.len());
            let len = if op == Op::Flush { 0 } else { 4_096 << (2 * i) };
            let request = Request { tag: i as u64, op, len, priority: Priority::NORMAL, arrival: now };
            let _ = scheduler.submit(vm, request);
        }
        for _ in 0..200 {
            match scheduler.next(now) {
                Next::Piece(piece) => {
                    now = Nanos(now.0.saturating_add(1_000));
                    scheduler.complete(now, &piece).expect("a piece that was given");
                }
                Next::Wait(at) => {
                    assert!(at > now && at.0 < u64::MAX, "something waits for ever");
                    now = at;
                }
                Next::Full => panic!("nothing is at the device"),
                Next::Idle => break,
            }
        }
        let all: Vec<VmId> = (0..config.vms.len()).map(VmId::from_usize).collect();
        scheduler.reconfigure(&config, &all).expect("its own configuration");
    }
}
