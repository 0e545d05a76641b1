//! The watch over a disk, on a loop device whose file really stalls.

mod common;

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{
    LoopDevice, StallingFile, disk_dir, loop_device, no_fio, no_fuse, no_loop, set_elevator, skip, sysfs,
};
use rtvirtio_measure::standstill::{DiskWatch, Standstills};
use rtvirtio_units::Nanos;

/// Held by the test that runs: one that watches a disk needs the CPUs that the other one uses.
static RUNS: Mutex<()> = Mutex::new(());

/// A block that direct I/O takes.
#[repr(align(4096))]
struct Block([u8; 4096]);

/// Reads one block after the other for the given time, and returns the standstills.
fn read_for(device: &LoopDevice, length: Duration) -> Standstills {
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&device.0).unwrap();
    let watch = DiskWatch::start(&sysfs(device), true).expect("a loop device has counters");
    let (start, mut block) = (Instant::now(), Block([0; 4096]));
    while start.elapsed() < length {
        file.read_exact_at(&mut block.0, 0).unwrap();
    }
    watch.finish(None)
}

#[test]
fn a_stalling_disk_is_seen_and_an_idle_one_is_not() {
    let name = "a_stalling_disk_is_seen_and_an_idle_one_is_not";
    if let Some(reason) = no_fuse().or(no_loop()) {
        return skip(name, reason);
    }
    let _runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
    let ms = Duration::from_millis;
    // Times count from the first read, which the kernel makes itself when the device appears (it
    // looks for partitions).
    let file = StallingFile::new(&[(ms(1_500), ms(2_500)), (ms(3_000), ms(3_400))]);
    let device = loop_device(&file.path());
    let seen = read_for(&device, ms(4_000));
    eprintln!("{seen:?}");
    // At least as long as simulated, less a few readings; a busy machine adds to both.
    assert!(seen.longest_ns > Nanos::from_millis(900), "{seen:?}");
    assert!(seen.count >= 2 && seen.total_ns > Nanos::from_millis(1_250), "{seen:?}");

    let watch = DiskWatch::start(&sysfs(&device), false).unwrap();
    std::thread::sleep(ms(500));
    let idle = watch.finish(None);
    assert!(idle.n > 0 && idle.count == 0, "no request was made: {idle:?}");
}

/// BFQ idles for a reader of higher priority that thinks, while another one waits.
#[test]
fn what_bfq_holds_back_is_seen_where_the_kernel_counts_it() {
    let name = "what_bfq_holds_back_is_seen_where_the_kernel_counts_it";
    if let Some(reason) = no_fio().or(no_loop()) {
        return skip(name, reason);
    }
    let _runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = disk_dir();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(256 << 20).unwrap();
    let device = loop_device(&path);
    let counts = |elevator: &str, seconds: u32| {
        set_elevator(&device, elevator).ok()?;
        let watch = DiskWatch::start(&sysfs(&device), true).expect("a loop device has counters");
        let common = "--direct=1 --bs=4k --ioengine=psync --time_based --prioclass=2";
        let jobs = "--name=thinks --rw=read --thinktime=1000 --prio=0 --name=busy --rw=randread --prio=7";
        let ran = Command::new("fio")
            .arg(format!("--filename={}", device.0.display()))
            .arg(format!("--runtime={seconds}"))
            .args(common.split(' ').chain(jobs.split(' ')))
            .output();
        assert!(ran.unwrap().status.success());
        Some(watch.finish(None))
    };
    let Some(idling) = counts("bfq", 6) else { return skip(name, "no BFQ") };
    let other = counts("none", 2).unwrap();
    eprintln!("{idling:?} {other:?}");
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or_default());
    if (parts.next(), parts.next()) >= (Some(6), Some(16)) {
        assert!(idling.held * 50 > idling.n, "{idling:?}");
        // Without an elevator a request is with the driver soon.
        assert!(other.held * idling.n < idling.held * other.n, "{idling:?} {other:?}");
    } else {
        assert_eq!((idling.held, other.held), (0, 0));
    }
}
