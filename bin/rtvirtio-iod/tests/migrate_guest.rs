//! Live migration of a real guest between two I/O domains that share its disk.

mod common;

use std::path::Path;

use common::guest::shell;
use common::{Iod, configure, connect, disk, read, request, until, write};
use rtvirtio_testbed::image::{self, GuestImage};
use rtvirtio_testbed::qemu::{GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::wait_for;

/// Migrations of one run: `RTVIRTIO_MIGRATIONS`, or five.
fn migrations() -> usize {
    std::env::var("RTVIRTIO_MIGRATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(5)
}

/// An I/O domain in a directory of its own, on a disk in another.
fn domain(dir: &Path, image: &Path, more: &str) -> Iod {
    std::fs::create_dir_all(dir).unwrap();
    Iod::start(dir, &configuration(dir, image, more))
}

fn configuration(dir: &Path, image: &Path, more: &str) -> String {
    let (dir, image) = (dir.display(), image.display());
    format!(
        "[[device]]\nname = \"d\"\nwindow = 4\n[[device.disk]]\nname = \"a\"\nserial = \"moves\"\n\
         socket = \"{dir}/a\"\npath = \"{image}\"\n{more}"
    )
}

fn guest(name: &str, image: &GuestImage, dir: &Path, incoming: bool) -> QemuGuest {
    let socket = GuestDisk::VhostUser { socket: dir.join("a"), queues: Some(1) };
    let config = QemuConfig::new(name, image.clone(), socket, &dir.join("run"));
    QemuGuest::start(&QemuConfig { incoming, ..config }.migrating()).unwrap()
}

#[test]
fn a_guest_moves_while_it_writes_and_verifies() {
    let test = "a_guest_moves_while_it_writes_and_verifies";
    if !rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::QEMU]) {
        return;
    }
    let image = image::ensure(&image::default_cache(), &|line| eprintln!("{line}")).unwrap();
    let dir = disk(64);
    let disk = dir.path().join("disk");
    let sides = [dir.path().join("0"), dir.path().join("1")];
    let mut iods = sides.each_ref().map(|side| domain(side, &disk, "migrate = true\n"));
    let mut here = guest("vm0", &image, &sides[0], false);
    // Parts with contents of their own. The device reads them into the page cache, where they are
    // summed a while later. Each page that the device writes is in the log: tests/migrate_log.rs.
    shell(&mut here, "dd if=/dev/urandom of=/dev/vda bs=1M seek=32 count=32 oflag=direct 2>/dev/null");
    let part = "dd if=/dev/vda bs=4M skip=$i count=1 2>/dev/null";
    let sums =
        shell(&mut here, &format!("for i in 8 9 10 11 12 13 14 15; do {part} | md5sum | cut -c 1-32; done"));
    let expected: Vec<&str> = sums.lines().collect();
    assert_eq!(expected.len(), 8);
    let [up, down] = ["8 9 10 11 12 13 14 15", "15 14 13 12 11 10 9 8"].map(|order| {
        format!(
            "echo 1 > /proc/sys/vm/drop_caches; for i in {order}; do {part} > /dev/null; done; sleep 1; \
             for i in {order}; do echo $i $({part} | md5sum | cut -c 1-32) >> /tmp/sums; done"
        )
    });
    let again = format!("while :; do {up}; {down}; done");
    let _reader = here.spawn(&["sh", "-c", &again]).unwrap();
    let seconds = (2 * migrations() + 2).to_string();
    let fio = "exec fio --name=v --filename=/dev/vda --rw=randrw --bssplit=4k/60:64k/40 --size=24M \
               --io_size=64G --time_based --direct=1 --ioengine=libaio --iodepth=16 --verify=crc32c \
               --verify_fatal=1 --verify_backlog=64 --rate_iops=50 --runtime=";
    let verify = here.spawn(&["sh", "-c", &format!("{fio}{seconds}")]).unwrap();
    for i in 1..=migrations() {
        let side = &sides[i % 2];
        let mut there = guest(&format!("vm{i}"), &image, side, true);
        let took = here.migrate(&there, HANG).unwrap_or_else(|e| panic!("migration {i}: {e}"));
        eprintln!("migration {i}: {took:?}");
        assert!(there.agent().is_ok(), "migration {i}");
        here.stop().unwrap();
        here = there;
    }
    let output = until("the end of fio", || here.poll(verify).unwrap());
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.success() && text.contains("err= 0"), "{text}");
    let seen = shell(&mut here, "cat /tmp/sums");
    let is_right = |line: &str| {
        let (part, sum) = line.split_once(' ').expect("a part and its sum");
        sum == expected[part.parse::<usize>().expect("a number") - 8]
    };
    let wrong: Vec<&str> = seen.lines().filter(|line| !is_right(line)).collect();
    eprintln!("{} sums", seen.lines().count());
    assert!(seen.lines().count() > migrations() && wrong.is_empty(), "{wrong:?}");
    let kernel = shell(&mut here, "dmesg");
    assert!(!kernel.contains("I/O error") && !kernel.contains("BUG:"), "{kernel}");
    here.stop().unwrap();
    assert!(iods.iter_mut().all(Iod::is_alive));
}

/// Two I/O domains never serve a disk that moves at once, whatever their front ends do.
#[test]
fn a_disk_that_moves_is_served_by_one_domain_at_a_time() {
    let dir = disk(64);
    let disk = dir.path().join("disk");
    let (one, two) = (dir.path().join("0"), dir.path().join("1"));
    let first = domain(&one, &disk, "migrate = true\n");
    let second = domain(&two, &disk, "migrate = true\n");
    let mut source = connect(&one.join("a"));
    assert_eq!(request(&mut source, &write(0, 4_096), Some(&[7; 4_096])).0, 0);
    // Both are ready, and the other one does not begin.
    let refused = rtvirtio_domain_client::Client::connect(&two.join("a"), Default::default());
    assert!(refused.is_err());
    source.stop_queue(0).unwrap();
    let mut target = connect(&two.join("a"));
    let (status, data) = request(&mut target, &read(0, 4_096), None);
    assert!(status == 0 && data == [7; 4_096]);
    // A killed one gives it back.
    second.kill();
    drop(source);
    assert_eq!(request(&mut connect(&one.join("a")), &read(0, 4_096), None).0, 0);
    // Nor does one that does not move it.
    let alone = dir.path().join("2");
    std::fs::create_dir_all(&alone).unwrap();
    let refused =
        Iod::try_start(&alone, &configuration(&alone, &disk, "")).err().expect("the disk is in use");
    assert!(refused.contains("in use"), "{refused}");
    first.end_well();
}

/// A disk that may move does not grow into one that a guest of another I/O domain uses.
#[test]
fn a_disk_that_moves_grows_into_no_other() {
    let dir = disk(64);
    let disk = dir.path().join("disk");
    let (one, two) = (dir.path().join("0"), dir.path().join("1"));
    let first = domain(&one, &disk, "migrate = true\nsize = \"4MiB\"\n");
    let second = domain(&two, &disk, "migrate = true\noffset = \"4MiB\"\nsize = \"4MiB\"\n");
    let mut grows = connect(&one.join("a"));
    let next = connect(&two.join("a"));
    configure(&one, &configuration(&one, &disk, "migrate = true\nsize = \"8MiB\"\n"));
    let refused = first.reload(false);
    let text = refused["error"].as_str().unwrap_or_default();
    assert!(text.starts_with("nothing is changed") && text.contains("another I/O domain"), "{refused}");
    assert_eq!(request(&mut grows, &read(4 << 11, 4_096), None).0, 1, "beyond the end");
    drop(next);
    let grown = serde_json::json!(["disk \"a\": size 4MiB -> 8MiB"]);
    wait_for("the end of the other guest", || first.reload(false)["changed"] == grown);
    assert_eq!(request(&mut grows, &read(4 << 11, 4_096), None).0, 0);
    assert!(rtvirtio_domain_client::Client::connect(&two.join("a"), Default::default()).is_err());
    drop(grows);
    for iod in [first, second] {
        iod.end_well();
    }
}
