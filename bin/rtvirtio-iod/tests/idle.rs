//! What idle disks take: threads, memory, and time to start.

mod common;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use common::resources::Resources;
use common::{Iod, connect, read, request};
use rtvirtio_domain_client::Client;
use rtvirtio_testkit::{HANG, skip};
use rustix::process::{Resource, getrlimit};
use vhost::vhost_user::VhostUserFrontend as _;

/// Largest growth of the resident memory for each further idle disk, in bytes. About 20 000 are
/// measured.
const IDLE_DISK: i64 = 48 << 10;
/// The same for a disk whose guest has made a request. The guest's own memory is not counted.
const USED_DISK: i64 = 128 << 10;

/// An I/O domain with `n` disks, each a sparse file.
fn start(dir: &Path, n: usize) -> Iod {
    let mut config = "[[device]]\nname = \"d\"\n".to_owned();
    for i in 0..n {
        let at = |what: &str| dir.join(format!("{what}{i}"));
        std::fs::File::create(at("disk")).unwrap().set_len(1 << 20).unwrap();
        let (disk, socket) = (at("disk"), at("socket"));
        let (disk, socket) = (disk.display(), socket.display());
        config += &format!(
            "[[device.disk]]\nname = \"v{i}\"\nformat = \"raw\"\nsocket = \"{socket}\"\npath = \"{disk}\"\n"
        );
    }
    Iod::start(dir, &config)
}

/// Resources as soon as there are no more than `threads`; the last ones after a time that no test
/// needs.
fn settled(iod: &Iod, threads: i64) -> Resources {
    let begin = Instant::now();
    loop {
        let now = Resources::of(iod.pid());
        if now.threads <= threads || begin.elapsed() > HANG {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn bytes_per_disk(before: i64, after: i64, disks: usize) -> i64 {
    (after - before) * 1_024 / disks as i64
}

#[test]
fn a_thousand_disks() {
    let dir = rtvirtio_testkit::disk_dir().unwrap();
    let (few, many) = (8, 1_000);
    let descriptors = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if descriptors < 8_000 {
        return skip("a_thousand_disks", "a process may open too few files here (`ulimit -Hn` of 8000)");
    }
    let before = Resources::of(start(dir.path(), few).pid());
    let begin = Instant::now();
    let iod = start(dir.path(), many);
    let took = begin.elapsed();
    let after = Resources::of(iod.pid());
    let each = bytes_per_disk(before.resident_kib, after.resident_kib, many - few);
    eprintln!(
        "{many} idle disks: {} KiB, {each} bytes for each, {} threads, {took:?} to start",
        after.resident_kib, after.threads
    );
    assert_eq!(after.threads, before.threads, "threads grow with disks");
    assert!(each < IDLE_DISK, "an idle disk takes {each} bytes");
}

#[test]
fn connected_disks_take_no_threads_while_their_guests_are_silent() {
    let dir = rtvirtio_testkit::disk_dir().unwrap();
    let n = 64;
    let iod = start(dir.path(), n);
    let before = Resources::of(iod.pid());
    let ask = |client: &mut Client| assert_eq!(request(client, &read(0, 4_096), None).0, 0);
    let mut clients: Vec<Client> = (0..n).map(|i| connect(&dir.path().join(format!("socket{i}")))).collect();
    clients.iter_mut().for_each(ask);
    let after = settled(&iod, before.threads);
    let each = bytes_per_disk(before.anonymous_kib, after.anonymous_kib, n);
    eprintln!("{n} disks in use: {each} bytes more for each, {} threads", after.threads);
    assert_eq!(after.threads, before.threads, "threads grow with connections");
    assert!(each < USED_DISK, "a disk in use takes {each} bytes");
    // All are served still, by messages too.
    for client in &mut clients {
        client.raw().set_vring_enable(0, false).unwrap();
        client.raw().set_vring_enable(0, true).unwrap();
        ask(client);
    }
}

/// Front ends that begin a message and do not end it hold their own thread only.
#[test]
fn unfinished_messages_hold_up_no_other_front_end() {
    let dir = rtvirtio_testkit::disk_dir().unwrap();
    let n = 24;
    let iod = start(dir.path(), n);
    let before = Resources::of(iod.pid());
    let socket = |i: usize| dir.path().join(format!("socket{i}"));
    let silent: Vec<UnixStream> = (1..n)
        .map(|i| {
            let mut stream = UnixStream::connect(socket(i)).unwrap();
            // None, or half, of a header.
            stream.write_all(&[1; 6][..i % 2 * 6]).unwrap();
            stream
        })
        .collect();
    for _ in 0..3 {
        let mut client = connect(&socket(0));
        assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    }
    let held = settled(&iod, before.threads + n as i64 / 2);
    assert!(held.threads <= before.threads + n as i64 / 2, "{} threads, {}", held.threads, before.threads);
    drop(silent);
    assert_eq!(settled(&iod, before.threads).threads, before.threads);
    // The places of those are free again.
    (1..n).for_each(|i| assert_eq!(request(&mut connect(&socket(i)), &read(0, 4_096), None).0, 0));
    iod.end_well();
}
