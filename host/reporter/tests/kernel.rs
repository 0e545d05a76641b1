//! Both programs in this machine's own kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rtvirtio_reporter::bpf::Watch;
use rtvirtio_reporter::now;
use rtvirtio_testkit::{HANG, Need, has};
use rtvirtio_urgency::page::{BLOCK, Blocks, RawReport, Region, flag};
use rustix::thread::{ClockId, CpuSet, Timespec, clock_nanosleep_absolute, sched_setaffinity};

/// Last report of a CPU, read while it is not being written.
fn report(words: &[AtomicU32], cpu: usize) -> RawReport {
    let blocks = Blocks::new(Region::new(words).unwrap(), cpu * BLOCK, 1);
    loop {
        if let Ok(Some((_, report))) = blocks.read(0) {
            return report;
        }
    }
}

fn set_fifo(priority: i32) -> std::io::Result<()> {
    // SAFETY: the parameter lives for the call, which affects this thread only.
    let done = unsafe {
        let mut parameter: libc::sched_param = std::mem::zeroed();
        parameter.sched_priority = priority;
        let policy = if priority > 0 { libc::SCHED_FIFO } else { libc::SCHED_OTHER };
        libc::sched_setscheduler(0, policy, &raw const parameter)
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn bind(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).unwrap();
}

#[test]
fn this_kernels_scheduler_is_reported() {
    let test = "this_kernels_scheduler_is_reported";
    let needs = [
        Need::Root,
        Need::Path("/sys/kernel/btf/vmlinux", "no type information of the kernel"),
        Need::Cpus(2),
    ];
    if !has(test, &needs) {
        return;
    }
    let watch = Watch::start().unwrap();
    assert_eq!(watch.lacks_timers(), None);
    let address = watch.address().unwrap();
    assert!(address > 0 && address % 4096 == 0, "{address:#x}");
    let words = watch.as_words();

    // This thread watches from CPU 0 another one on CPU 1, which computes until its report was
    // seen, and then sleeps.
    bind(0);
    let seen = Arc::new(AtomicBool::new(false));
    let was_seen = seen.clone();
    let urgent = std::thread::spawn(move || {
        bind(1);
        set_fifo(40).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        let patience = now().0 + HANG.as_nanos() as u64 / 10;
        while !was_seen.load(Ordering::Relaxed) && now().0 < patience {}
        let deadline = now().0 + 300_000_000;
        let until = Timespec {
            tv_sec: (deadline / 1_000_000_000) as i64,
            tv_nsec: (deadline % 1_000_000_000) as i64,
        };
        clock_nanosleep_absolute(ClockId::Monotonic, &until).unwrap();
        deadline
    });
    let mut announced = Vec::new();
    while !urgent.is_finished() {
        let found = report(words, 1);
        if (found.policy, found.priority) == (1, 40) {
            seen.store(true, Ordering::Relaxed);
        }
        if found.deadline != 0 && announced.last() != Some(&found.deadline) {
            announced.push(found.deadline);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let deadline = urgent.join().unwrap();
    assert!(seen.load(Ordering::Relaxed), "its policy and priority");
    // The kernel adds no slack to a real-time thread's timer.
    assert!(announced.contains(&deadline), "{deadline} in {announced:?}");
    // Afterwards the CPU runs ordinary tasks, or idles.
    let mut last = report(words, 1);
    for _ in 0..1000 {
        if last.policy == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
        last = report(words, 1);
    }
    assert_eq!((last.policy, last.priority, last.flags & !flag::IDLE), (0, 0, 0));
    assert!(last.written <= now().0);
    let sequences = [0, 1].map(|cpu| words[cpu * BLOCK / 4].load(Ordering::Relaxed));
    assert!(sequences[1] > 0, "{sequences:?}");
}
