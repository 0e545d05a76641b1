use std::fs;
use std::process::{Child, Command, Stdio};

use rtvirtio_testkit::{HANG, StuckDisk, has, skip};

use super::*;

#[test]
fn the_kernel_freezes_for_files_of_the_queue_itself() {
    for (path, is) in [
        ("/sys/block/sda/queue/scheduler", true),
        ("/sys/block/sda/queue/nr_requests", true),
        ("/sys/block/sda/queue/iosched/slice_idle", false),
        ("/sys/fs/cgroup/blkio/vms/a/blkio.bfq.weight_device", false),
        ("/proc/7/task/8/sched", false),
    ] {
        assert_eq!(is_queue_file(Path::new(path)), is, "{path}");
    }
}

/// The writer may be killed at any moment: what it has begun is noted before, and what it has not
/// begun is not written.
#[test]
fn a_write_is_noted_before_it_begins() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    let path = Path::new("/sys/block/sda/queue/scheduler");
    for dir in ["/run", "/sys/block/sda/queue"] {
        std::fs::create_dir_all(root.at(dir)).unwrap();
    }
    std::fs::write(root.at(path), "none").unwrap();
    let (pid, go) = spawn(&root.at(path), b"bfq").unwrap();
    drop(go);
    let end = loop {
        if let Some(end) = ended(pid) {
            break end;
        }
        std::thread::sleep(SHORT);
    };
    assert_eq!(end.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    assert_eq!(std::fs::read_to_string(root.at(path)).unwrap(), "none");

    // A FIFO holds its writer until a reader comes, as a disk does until its requests have ended.
    std::fs::remove_file(root.at(path)).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.at(path), rustix::fs::Mode::RWXU).unwrap();
    let at = root.at(path);
    std::thread::scope(|threads| {
        let writer = threads.spawn(|| write_apart(&root, path, "bfq", HANG));
        rtvirtio_testkit::site::wait_for("the note", || root.at("/run/rtvirtio-queue.sda").exists());
        let reader = threads.spawn(move || {
            std::thread::sleep(LOOK / 4);
            std::fs::read_to_string(at)
        });
        may_use(&root, path).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), "bfq");
        writer.join().unwrap().unwrap();
    });
    assert!(!root.at("/run/rtvirtio-queue.sda").exists());
}

#[test]
fn a_slow_write_of_another_process_is_waited_for_and_a_hung_one_once() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    std::fs::create_dir(root.at("/run")).unwrap();
    let path = Path::new("/sys/block/sda/queue/scheduler");
    let noted = |seconds: &str| {
        let child = Command::new("sleep").arg(seconds).spawn().unwrap();
        note(&root, path, libc::pid_t::try_from(child.id()).unwrap());
        assert!(root.at("/run/rtvirtio-queue.sda").exists());
        child
    };
    let mut slow = noted("0.3");
    let waiter = std::thread::spawn(move || slow.wait());
    let begin = Instant::now();
    may_use(&root, path).unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(200));
    assert!(!root.at("/run/rtvirtio-queue.sda").exists());
    waiter.join().unwrap().unwrap();

    let mut hung = noted("600");
    let errors = [(); 2].map(|()| {
        let begin = Instant::now();
        (may_use(&root, path).unwrap_err().kind(), begin.elapsed())
    });
    hung.kill().unwrap();
    hung.wait().unwrap();
    assert_eq!(errors.map(|(kind, _)| kind), [io::ErrorKind::TimedOut; 2]);
    assert!(errors[0].1 >= LOOK && errors[1].1 < errors[0].1, "{errors:?}");
    may_use(&root, path).unwrap();
}

#[test]
fn a_disk_stands_still_that_has_requests_and_completes_none() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (root, path) = (Root::new(dir.path()), Path::new("/sys/block/sdz/queue/scheduler"));
    let disk = root.at("/sys/block/sdz");
    fs::create_dir_all(disk.join("queue")).unwrap();
    assert_eq!(stands_still(&root, path, Duration::ZERO), None, "nothing is counted");
    let counted = |inflight: &str, reads: u64| {
        fs::write(disk.join("stat"), format!("{reads} 0 0 0 9 0 0 0 1 2 3 0 0 0 0 4 5\n")).unwrap();
        fs::write(disk.join("inflight"), inflight).unwrap();
    };
    counted("       0        0\n", 5);
    assert_eq!(stands_still(&root, path, HANG), None, "it is idle");
    counted("       3        1\n", 5);
    let still = stands_still(&root, path, Duration::from_millis(1)).unwrap();
    assert_eq!(still.requests, 4);
    let again = stands_still(&root, path, HANG).unwrap();
    assert!(again.during >= still.during, "known, and not watched again");
    // A single completion is enough. What it stood still with is known for a while.
    counted("       3        1\n", 6);
    std::thread::scope(|scope| {
        let looked = scope.spawn(|| stands_still(&root, path, Duration::from_secs(60)));
        for reads in 7.. {
            if looked.is_finished() {
                break;
            }
            // Replaced atomically: a file that is truncated for a moment is not read as a number.
            fs::write(disk.join("fresh"), format!("{reads} 0 0 0 9 0 0 0 1 2 3 0 0 0 0 4 5\n")).unwrap();
            fs::rename(disk.join("fresh"), disk.join("stat")).unwrap();
            std::thread::sleep(PAUSE);
        }
        assert_eq!(looked.join().unwrap(), None);
    });
}

#[test]
fn the_time_for_disks_that_hang_is_of_all_together_and_comes_back() {
    let now = Instant::now();
    let mut waits = Waits::default();
    assert_eq!(waits.allow(LEAST, LIMIT, now), LIMIT);
    waits.spend(LIMIT, now);
    assert_eq!(waits.allow(LEAST, LIMIT, now), SUM - LIMIT);
    waits.spend(LIMIT, now + WINDOW / 2);
    assert_eq!(waits.allow(LEAST, LOOK, now + WINDOW / 2), LEAST);
    assert_eq!(waits.allow(LOOK, LIMIT, now + WINDOW / 2), LOOK);
    assert_eq!(waits.allow(LEAST, LIMIT, now + WINDOW), LIMIT);
    waits.spend(LOOK, now + WINDOW);
    assert_eq!(waits.allow(LEAST, LIMIT, now + WINDOW), LIMIT.min(SUM - LOOK));
}

#[test]
fn a_wait_for_a_disk_ends_with_those_of_its_call() {
    let waits = Mutex::new(Waits::default());
    assert_eq!((allowed(&waits, LOOK, LIMIT), allowed(&waits, LEAST, LOOK)), (LIMIT, LOOK));
    let _limit = WaitLimit::lasting(Duration::ZERO);
    let short = WaitLimit::wait(LIMIT);
    assert!(short < LOOK, "{short:?}");
    assert_eq!((allowed(&waits, LOOK, LIMIT), allowed(&waits, LEAST, LOOK)), (short, short));
    waits.lock().unwrap().spend(SUM, Instant::now());
    assert_eq!(allowed(&waits, LEAST, LOOK), LEAST);
}

/// With many disks that hang no time is left; each is watched for a moment, and one that does not
/// hang is written.
#[test]
fn many_disks_that_hang_are_left_alone_and_hold_up_no_other() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    fs::create_dir(root.at("/run")).unwrap();
    let disk = |name: &str, inflight: &str| {
        let disk = Path::new("/sys/block").join(name);
        fs::create_dir_all(root.at(disk.join("queue"))).unwrap();
        fs::write(root.at(disk.join("stat")), "5 0 0 0 9 0 0 0 1 2 3 0 0 0 0 4 5\n").unwrap();
        fs::write(root.at(disk.join("inflight")), inflight).unwrap();
        let path = disk.join("queue/scheduler");
        fs::write(root.at(&path), "none").unwrap();
        path
    };
    let waits = Mutex::new(Waits { since: Some(Instant::now()), spent: SUM });
    for i in 0..8 {
        let path = disk(&format!("sdhang{i}"), "3 1\n");
        let refused = write_within(&root, &path, "bfq", &waits).unwrap_err();
        let text = refused.to_string();
        assert!(refused.kind() == io::ErrorKind::TimedOut && text.contains("other disks hang too"), "{text}");
        assert_eq!(fs::read_to_string(root.at(&path)).unwrap(), "none");
    }
    assert!(waits.lock().unwrap().spent > SUM);
    let idle = disk("sdidle", "0 0\n");
    write_within(&root, &idle, "bfq", &waits).unwrap();
    assert_eq!(fs::read_to_string(root.at(&idle)).unwrap(), "bfq");
}

/// Disk that completes nothing, with a write in flight, until it is freed.
struct Stuck {
    writer: Option<Child>,
    disk: StuckDisk,
}

impl Stuck {
    fn new() -> Option<Self> {
        let disk = StuckDisk::new()?;
        if !disk.stick() {
            return None;
        }
        let to = format!("of={}", disk.disk.0.display());
        let args = ["if=/dev/zero", &to, "bs=4k", "count=1", "oflag=direct", "conv=nocreat,notrunc"];
        let writer = Command::new("dd").args(args).stderr(Stdio::null()).spawn().unwrap();
        let one = Self { writer: Some(writer), disk };
        rtvirtio_testkit::site::wait_for("a request in flight", || one.disk.has_requests());
        Some(one)
    }

    fn scheduler(&self) -> PathBuf {
        self.disk.sys().join("queue/scheduler")
    }

    /// An elevator on offer other than the current one.
    fn other(&self) -> Option<String> {
        let text = fs::read_to_string(self.scheduler()).unwrap();
        text.split_whitespace().find(|name| !name.starts_with('[')).map(str::to_owned)
    }

    fn free(&mut self) {
        self.disk.free();
        if let Some(mut writer) = self.writer.take() {
            let _ = writer.wait();
        }
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        self.free();
    }
}

#[test]
fn a_disk_that_completes_nothing_is_left_alone_and_holds_no_writer() {
    const TEST: &str = "a_disk_that_completes_nothing_is_left_alone_and_holds_no_writer";
    if !has(TEST, &StuckDisk::NEEDS) {
        return;
    }
    let Some(mut stuck) = Stuck::new() else { return skip(TEST, "no loop device or no ext4") };
    let Some(other) = stuck.other() else { return skip(TEST, "the kernel has one elevator") };
    let (root, path) = (Root::default(), stuck.scheduler());
    let before = fs::read_to_string(&path).unwrap();
    let refused = write(&root, &path, &other).unwrap_err();
    assert!(
        refused.kind() == io::ErrorKind::TimedOut && refused.to_string().contains("in flight"),
        "{refused}"
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), before, "it was not written");
    may_use(&root, &path).unwrap();
    // An undetected hang: the writing process is abandoned, and the file not used meanwhile.
    let late = write_apart(&root, &path, &other, Duration::from_millis(200)).unwrap_err();
    assert!(late.to_string().contains("has not taken"), "{late}");
    let again = write(&root, &path, &other).unwrap_err();
    assert!(again.to_string().contains("earlier write"), "{again}");
    // Another process has only the note.
    let elsewhere = std::mem::take(&mut *UNDER_WAY.lock().unwrap());
    let other_file = stuck.disk.sys().join("queue/nr_requests");
    assert_eq!(may_use(&root, &other_file).unwrap_err().kind(), io::ErrorKind::TimedOut);
    UNDER_WAY.lock().unwrap().extend(elsewhere);
    stuck.free();
    let begin = Instant::now();
    while may_use(&root, &path).is_err() {
        assert!(begin.elapsed() < HANG, "the writer is not back");
        std::thread::sleep(PAUSE);
    }
    assert!(fs::read_to_string(&path).unwrap().contains(&format!("[{other}]")));
    assert!(!note_of(&path).unwrap().exists(), "the note is gone with it");
    // The kernel's own error is passed on.
    let wrong = write(&root, &path, "nonsense").unwrap_err();
    assert_eq!(wrong.raw_os_error(), Some(libc::EINVAL), "{wrong}");
}
