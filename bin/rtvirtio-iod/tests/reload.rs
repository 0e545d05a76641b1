//! Reload under live guests.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Iod, configure, disk, read, request, two_disks, with_keys, write};
use rtvirtio_domain_client::load::{Plan, Stream, run};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_testkit::site::wait_for;
use rustix::process::Signal;

/// Two VMs; the first one with a cap on reads.
fn capped(dir: &Path, cap: u32) -> String {
    with_keys(&two_disks(dir, 8, ""), "a", &format!("read_cap = {{ requests = \"{cap}/s\" }}\n"))
}

/// A closed loop of reads, 32 at a time, until `stop`.
fn flood(client: &mut [Client; 1], stop: &AtomicBool) {
    let stream = [Stream::reads("flood", 32, 4 << 20)];
    let plan = Plan { warm_up: Duration::ZERO, length: Duration::from_millis(500), seed: 1, spin: false };
    while !stop.load(Ordering::Relaxed) {
        let got = run(client, &stream, &plan).unwrap().remove(0);
        assert_eq!(got.errors, 0);
        // Those outstanding at the end.
        assert!(got.unanswered <= 32, "{}", got.unanswered);
    }
}

/// Completed reads of VM a since the start.
fn completed_reads(iod: &Iod) -> u64 {
    iod.disk("a")["read"]["requests"].as_u64().unwrap()
}

/// A cap is raised by a signal and lowered by a command under load; no request fails, and the rate
/// follows.
#[test]
fn a_cap_changes_under_load() {
    let dir = disk(8);
    let iod = Iod::start(dir.path(), &capped(dir.path(), 100));
    let mut client = [Client::connect(&dir.path().join("a"), Options::default()).unwrap()];
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let load = std::thread::spawn(move || flood(&mut client, &stopped));
    let count = |seconds: f64| {
        // The longer of both times, so that the host may stall anywhere.
        let begin = Instant::now();
        let before = completed_reads(&iod);
        std::thread::sleep(Duration::from_secs_f64(seconds));
        (completed_reads(&iod) - before, begin.elapsed().as_secs_f64())
    };
    wait_for("a read", || completed_reads(&iod) > 0);
    let (slow, seconds) = count(1.5);
    // At most the burst of one and the pieces in flight.
    assert!(slow as f64 <= 100.0 * seconds + 8.0, "{slow} in {seconds} s");
    configure(dir.path(), &capped(dir.path(), 1_000));
    iod.signal(Signal::HUP);
    wait_for("more than the old cap lets go", || {
        let (fast, seconds) = count(1.5);
        assert!(fast as f64 <= 1_000.0 * seconds + 8.0, "{fast} in {seconds} s");
        fast as f64 > 100.0 * seconds + 8.0
    });
    configure(dir.path(), &capped(dir.path(), 100));
    assert_eq!(iod.command("reload"), "{\"changed\":[\"disk \\\"a\\\": read_cap\"]}\n");
    let (slow, seconds) = count(1.5);
    assert!(slow as f64 <= 100.0 * seconds + 8.0, "{slow} in {seconds} s");
    stop.store(true, Ordering::Relaxed);
    load.join().unwrap();
    assert_eq!(iod.command("reload"), "{\"changed\":[]}\n");
    let stderr = iod.end_well();
    assert!(stderr.contains("reload: in force: disk \"a\": read_cap"), "{stderr}");
}

/// An invalid configuration changes nothing and names the reason; the live guest is served on.
#[test]
fn an_invalid_reload_is_refused_as_a_whole() {
    let dir = disk(8);
    let good = capped(dir.path(), 500);
    let mut iod = Iod::start(dir.path(), &good);
    let mut client = Client::connect(&dir.path().join("b"), Options::default()).unwrap();
    let reserve = "reserve = { share = \"10%\", burst = \"1ms\", deadline = \"900ns\" }";
    let costs = "cost = { read = { base = \"60us\", per_mib = \"1ms\" }, write = { base = \"25us\", per_mib = \"1ms\" } }";
    let cap = "requests = \"500/s\"";
    assert!(good.contains(cap));
    let other = good.replace(cap, "requests = \"50/s\"");
    let bad = [
        (other.replace("window = 4", "windw = 4"), "line 4"),
        (other.replace("name = \"b\"\n", &format!("name = \"b\"\n{reserve}\n")), "cannot be promised 900ns"),
        (other.replace("name = \"b\"\n", "name = \"b\"\nweight = 0\n"), "weight is 0"),
        // Changes that need a restart are all listed, and block the others.
        (
            other.replace("offset = \"4MiB\"", "offset = \"2MiB\"\ndepth = 9"),
            "disk \"b\": offset, disk \"b\": depth needs a restart",
        ),
        (other.replace("window = 4", &format!("window = 4\n{costs}")), "device \"d\": cost needs a restart"),
        (other.replace("window = 4", "window = 5"), "a window of more than 4 needs a restart"),
        (format!("sandbox = \"off\"\n{other}"), "sandbox needs a restart"),
    ];
    for (text, why) in bad {
        configure(dir.path(), &text);
        let stderr = iod.command("reload").replace("\\\"", "\"");
        assert!(stderr.contains("\"error\":\"nothing is changed") && stderr.contains(why), "{why}: {stderr}");
        assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    }
    std::fs::remove_file(dir.path().join("iod.toml")).unwrap();
    assert!(iod.command("reload").contains("No such file"));
    // The old cap is in force: reloading the old file changes nothing, the other one does.
    configure(dir.path(), &good);
    assert_eq!(iod.command("reload"), "{\"changed\":[]}\n");
    configure(dir.path(), &other.replace("window = 4", "window = 2\npolicy = \"drr\"\naging = \"2s\""));
    let stderr = iod.command("reload").replace("\\\"", "\"");
    for change in
        ["device \"d\": policy", "device \"d\": window", "device \"d\": aging", "disk \"a\": read_cap"]
    {
        assert!(stderr.contains(change), "{stderr}");
    }
    assert!(iod.status().contains("\"window\":2"), "{}", iod.status());
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    // After a signal, the error is in the log only. It comes last: when the I/O domain gets to it
    // is not seen here.
    std::fs::remove_file(dir.path().join("iod.toml")).unwrap();
    iod.signal(Signal::HUP);
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    assert!(iod.is_alive());
}

/// A disk grows under a guest that is connected: it is notified, and uses the new end at once. No
/// disk shrinks, or grows into another or beyond its file.
#[test]
fn a_disk_grows_under_its_guest() {
    let dir = disk(8);
    let (socket, config) = (dir.path().join("b"), two_disks(dir.path(), 8, ""));
    let iod = Iod::start(dir.path(), &config);
    let mut b = Client::connect(&socket, Options::default()).unwrap();
    assert_eq!(b.capacity, 4 << 20);
    let end = 4 << 11;
    assert_eq!(request(&mut b, &read(end, 4_096), None).0, 1, "beyond the end");
    let sized = |a: &str, b: &str| {
        let text = config.replacen("size = \"4MiB\"", &format!("size = \"{a}\""), 1);
        let (first, last) = text.rsplit_once("size = \"4MiB\"").unwrap();
        format!("{first}size = \"{b}\"{last}")
    };
    for (a, b, why) in [
        ("2MiB", "4MiB", "disk \"a\": size needs a restart"),
        ("5MiB", "4MiB", "lie on the same part of one file"),
        ("4MiB", "12MiB", "the disk would end at byte 16777216, and the file has 8388608"),
    ] {
        configure(dir.path(), &sized(a, b));
        let refused = iod.reload(false);
        let text = refused["error"].as_str().unwrap_or_default();
        assert!(text.starts_with("nothing is changed") && text.contains(why), "{a}, {b}: {refused}");
    }
    let file = std::fs::File::options().write(true).open(dir.path().join("disk")).unwrap();
    file.set_len(16 << 20).unwrap();
    configure(dir.path(), &sized("4MiB", "12MiB"));
    let changed = iod.reload(false);
    assert_eq!(changed["changed"], serde_json::json!(["disk \"b\": size 4MiB -> 12MiB"]), "{changed}");
    assert_eq!(b.changed_capacity(rtvirtio_testkit::HANG).unwrap(), 12 << 20);
    let data = [7; 4_096];
    assert_eq!(request(&mut b, &write((12 << 11) - 8, 4_096), Some(&data)).0, 0);
    assert_eq!(request(&mut b, &read((12 << 11) - 8, 4_096), None), (0, data.to_vec()));
    assert_eq!(request(&mut b, &read(12 << 11, 4_096), None).0, 1);
    assert_eq!(iod.disk("b")["size"], 12 << 20);
    assert_eq!(iod.reload(false)["changed"], serde_json::json!([]));
    // The next connection has the size too.
    drop(b);
    assert_eq!(Client::connect(&socket, Options::default()).unwrap().capacity, 12 << 20);
}

/// A disk that may move was longer where its guest comes from: the guest sees that here too,
/// without a reload. One that was cut keeps its size.
#[test]
fn a_guest_that_arrives_sees_a_disk_that_has_grown_elsewhere() {
    let dir = disk(8);
    let d = dir.path().display();
    let config = format!(
        "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{d}/disk\"\nmigrate = true\n"
    );
    let iod = Iod::start(dir.path(), &config);
    let file = std::fs::File::options().write(true).open(dir.path().join("disk")).unwrap();
    let size = || iod.disk("a")["size"].as_u64().unwrap();
    assert_eq!(size(), 8 << 20);
    file.set_len(16 << 20).unwrap();
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    wait_for("the new size", || size() == 16 << 20);
    if a.capacity == 8 << 20 {
        assert_eq!(a.changed_capacity(rtvirtio_testkit::HANG).unwrap(), 16 << 20);
    }
    assert_eq!(request(&mut a, &read((16 << 11) - 8, 4_096), None).0, 0);
    drop(a);
    file.set_len(4 << 20).unwrap();
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    assert_eq!(request(&mut a, &read(0, 4_096), None).0, 0);
    assert_eq!((a.capacity, size()), (16 << 20, 16 << 20));
}
