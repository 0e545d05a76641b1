//! The page under concurrent, interrupted and false writes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use proptest::prelude::*;
use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::{
    BLOCK, Blocks, Host, LEAST_SIZE, MOST_VCPUS, Mode, RawReport, Region, WORDS, flag, header, vcpu,
};
use rtvirtio_urgency::{GuestPolicy, Level};

fn memory(bytes: usize) -> Vec<AtomicU32> {
    (0..bytes / 4).map(|_| AtomicU32::new(0)).collect()
}

#[test]
fn host_and_guest_find_each_other() {
    let words = memory(LEAST_SIZE);
    let region = Region::new(&words).unwrap();
    let host = Host::new(region, LEAST_SIZE).unwrap();
    let mut blocks = Blocks::new(region, BLOCK, 63);
    assert!(!region.is_offered() && host.mode() == Ok((Mode::Off, 0)));
    assert_eq!((region.vcpus(), host.vcpus()), (63, 63));
    host.serve(Some(0x0001_0000)).unwrap();
    assert!(region.is_served() && region.doorbell() == Some(0x0001_0000));
    assert_eq!(words[0].load(Ordering::Relaxed).to_le_bytes(), *b"RTVU");
    let address = 0x1_2345_6789_a000;
    region.set_mode(Mode::GuestMemory { address });
    region.beat();
    assert_eq!(host.mode(), Ok((Mode::GuestMemory { address }, 1)));
    let block = region.block(62).unwrap();
    assert!(region.block(63).is_none());
    let report =
        RawReport { policy: 1, priority: 80, flags: flag::IDLE, written: 1 << 40, deadline: (1 << 40) + 5 };
    block.write(&report);
    assert_eq!((blocks.read(62), blocks.read(63)), (Ok(Some((2, report))), Ok(None)));
    blocks.show(62, Level::fifo(77)).unwrap();
    assert_eq!(block.level(), 77);
    // Another host process takes over, and the guest's half stays.
    host.serve(None).unwrap();
    assert_eq!(region.doorbell(), None);
    assert_eq!((host.mode().unwrap().1, blocks.read(62)), (1, Ok(Some((2, report)))));
    assert_eq!(words[header::GENERATION].load(Ordering::Relaxed), 2);
    host.leave().unwrap();
    assert!(region.is_offered() && !region.is_served());
    assert!(Region::new(&memory(LEAST_SIZE - 4)).is_none());
    assert_eq!(Region::new(&memory(1 << 20)).unwrap().vcpus(), MOST_VCPUS);
}

#[test]
fn a_report_is_whole_or_not_there() {
    let words = memory(LEAST_SIZE);
    let region = Region::new(&words).unwrap();
    let block = region.block(0).unwrap();
    let blocks = Blocks::new(region, BLOCK, 1);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..200_000_u32 {
                let wide = u64::from(i) << 32 | u64::from(i);
                block.write(&RawReport { policy: i, priority: i, flags: i, written: wide, deadline: wide });
            }
            done.store(true, Ordering::Release);
        });
        let mut last = 0;
        while !done.load(Ordering::Acquire) {
            let Ok(Some((sequence, report))) = blocks.read(0) else { continue };
            let wide = u64::from(report.policy) << 32 | u64::from(report.policy);
            assert_eq!((report.written, report.deadline, report.flags), (wide, wide, report.policy));
            assert!(sequence >= last);
            last = sequence;
        }
    });
    // Interrupted within a report: the block is not read, and the next report is.
    words[WORDS].store(400_001, Ordering::Relaxed);
    assert_eq!(blocks.read(0), Ok(None));
    block.write(&RawReport::default());
    assert_eq!(blocks.read(0), Ok(Some((400_002, RawReport::default()))));
}

proptest! {
    /// Any content of a block is a report that the state machine accepts.
    #[test]
    fn nonsense_is_the_least_urgent(words in prop::array::uniform8(any::<u32>())) {
        let mut words = words;
        words[vcpu::SEQUENCE] &= !1;
        let (_, raw) = RawReport::of_copy(words[0], &words, words[0]).unwrap();
        let (report, nonsense) = raw.checked(Some);
        prop_assert!(report.priority <= 99);
        prop_assert_eq!(report.deadline, Some(Nanos(raw.deadline)).filter(|d| d.0 > 0));
        prop_assert!(raw.policy <= 2 || (nonsense && report.policy == GuestPolicy::Other));
        prop_assert!(RawReport::of_copy(words[0], &words, words[0].wrapping_add(2)).is_none());
        prop_assert!(RawReport::of_copy(words[0] | 1, &words, words[0] | 1).is_none());
    }
}
