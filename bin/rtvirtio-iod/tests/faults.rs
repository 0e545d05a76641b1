//! Devices and directories that disappear under live guests.

mod common;

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{
    FLUSH, Iod, Neighbour, accept_all, begin_log, completion, deallocate, disk, range, read, request,
    start_at, two_disks, write,
};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{LoopDevice, StuckDisk, has, skip};
use rustix::process::Signal;
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;
use vhost::vhost_user::message::VhostUserInflight;

fn works(command: &mut Command) -> Option<String> {
    let out = command.output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// A small tmpfs, unmounted when dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(at: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(at).ok()?;
        let options = format!("size={size}");
        works(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "rtvirtio-test"]).arg(at))?;
        Some(Self(at.to_owned()))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = works(Command::new("umount").arg("--lazy").arg(&self.0));
    }
}

/// Failed requests of both VMs.
fn errors(iod: &Iod) -> [u64; 2] {
    ["a", "b"].map(|disk| iod.disk(disk)["errors"].as_u64().unwrap())
}

/// Two disks on one engine: `a` with a backing of its own and these keys, `b` on the file `disk`.
fn pair(dir: &Path, a: &Path, keys: &str) -> String {
    let (d, a) = (dir.display(), a.display());
    format!(
        "[[device]]\nname = \"d\"\nwindow = 4\n\
         [[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{a}\"\n{keys}\
         [[device.disk]]\nname = \"b\"\nsocket = \"{d}/b\"\npath = \"{d}/disk\"\n"
    )
}

/// Writes that find no room fail.
const FAILS: &str = "cached = true\non_full = \"error\"\n";

/// A device shrinks to nothing under a guest that reads and writes: its requests fail one by one,
/// its neighbour on the same engine is not affected, and when the device is back, so are the
/// guest's data.
#[test]
fn a_device_that_goes_away_fails_its_own_guest_only() {
    let test = "a_device_that_goes_away_fails_its_own_guest_only";
    let dir = disk(8);
    let file = dir.path().join("unplugged");
    let set_size = |size: u64| {
        std::fs::File::options().create(true).append(true).open(&file).unwrap().set_len(size).unwrap();
    };
    set_size(8 << 20);
    let Some(device) = LoopDevice::attach(&file) else {
        return skip(test, "no loop device can be made here");
    };
    let iod = Iod::start(dir.path(), &pair(dir.path(), &device.0, ""));
    let neighbour = Neighbour::start(dir.path().join("b"));
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    let (first, last) = (0, (8 << 20) / 512 - 8);
    for sector in [first, last] {
        assert_eq!(request(&mut a, &write(sector, 4_096), Some(&[9; 4_096])).0, 0);
    }
    set_size(4 << 20);
    device.update_size();
    assert_eq!(request(&mut a, &read(last, 4_096), None).0, 1, "what is cut off");
    assert_eq!(request(&mut a, &read(first, 4_096), None), (0, vec![9; 4_096]), "what is left");
    // A device of size 0, as if unplugged.
    set_size(0);
    device.update_size();
    for i in 0..200 {
        assert_eq!(request(&mut a, &read(i * 8, 4_096), None).0, 1);
        assert_eq!(request(&mut a, &write(i * 8, 4_096), Some(&[1; 4_096])).0, 1);
    }
    set_size(8 << 20);
    device.update_size();
    assert_eq!(request(&mut a, &write(first, 4_096), Some(&[5; 4_096])).0, 0);
    assert_eq!(request(&mut a, &read(first, 4_096), None), (0, vec![5; 4_096]));
    let (n, longest) = neighbour.end();
    eprintln!(
        "a device that goes away: the neighbour did {n} writes and reads, the longest pair took {longest:?}"
    );
    assert!(n > 0);
    assert_eq!(errors(&iod), [401, 0], "counted for the guest, and not for its neighbour");
}

/// Thaws a disk before whatever waits for it is dropped.
struct Thaw<'a>(&'a StuckDisk);

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        self.0.free();
    }
}

/// A device that completes nothing any more: the process ends all the same, and says why.
#[test]
fn a_device_that_hangs_does_not_hold_the_end_up() {
    let test = "a_device_that_hangs_does_not_hold_the_end_up";
    if !has(test, &StuckDisk::NEEDS) {
        return;
    }
    let Some(device) = StuckDisk::new() else { return skip(test, "no loop device or no ext4") };
    let dir = disk(8);
    let config = pair(dir.path(), &device.disk.0, "");
    let log = dir.path().join("log");
    let stderr = Stdio::from(std::fs::File::create(&log).unwrap());
    let mut iod = Iod::with_log(dir.path(), &config, stderr).unwrap();
    let _thaw = Thaw(&device);
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    let mut b = Client::connect(&dir.path().join("b"), Options::default()).unwrap();
    assert_eq!(request(&mut a, &write(0, 4_096), Some(&[1; 4_096])).0, 0);
    if !device.stick() {
        return skip(test, "the file system cannot be frozen");
    }
    let queue = &mut a.queues[0];
    queue.push_with(&write(8, 4_096), &[2; 4_096]).unwrap();
    queue.notify().unwrap();
    wait_for("the write at the device", || device.has_requests());
    assert_eq!(request(&mut b, &write(0, 4_096), Some(&[3; 4_096])).0, 0, "its neighbour is served");
    iod.signal(Signal::TERM);
    wait_for("the end", || !iod.is_alive());
    let said = std::fs::read_to_string(&log).unwrap();
    let line = said.lines().find(|line| line.contains("have not ended")).unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("device d (disks: a)") && line.contains("is not known"), "{line}");
}

/// A sparse disk on a full file system: writes that need space fail, all others succeed, and freed
/// space is used.
#[test]
fn a_full_file_system_fails_writes_that_need_room() {
    let test = "a_full_file_system_fails_writes_that_need_room";
    let dir = disk(8);
    let Some(full) = Tmpfs::mount(&dir.path().join("full"), "1m") else {
        return skip(test, "no file system can be mounted here");
    };
    let file = full.0.join("sparse");
    std::fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
    let iod = Iod::start(dir.path(), &pair(dir.path(), &file, FAILS));
    let neighbour = Neighbour::start(dir.path().join("b"));
    let mut a =
        Client::connect(&dir.path().join("a"), Options { buffer: 65_536, ..Options::default() }).unwrap();
    let data = vec![3; 65_536];
    let fit = (0..64).take_while(|i| request(&mut a, &write(i * 128, 65_536), Some(&data)).0 == 0).count();
    assert!((8..=16).contains(&fit), "{fit} of 64 KiB each in 1 MiB");
    assert_eq!(request(&mut a, &write(20_000, 65_536), Some(&data)).0, 1, "no room");
    assert_eq!(request(&mut a, &write(0, 65_536), Some(&data)).0, 0, "over what is there already");
    assert_eq!(request(&mut a, &read(0, 65_536), None), (0, data.clone()));
    assert_eq!(request(&mut a, &read(24_000, 4_096), None), (0, vec![0; 4_096]), "holes are zeroes");
    assert_eq!(request(&mut a, &FLUSH, None).0, 0, "a flush");
    // Discarding the first 256 KiB frees space.
    assert_eq!(request(&mut a, &deallocate(11), Some(&range(0, 512, 0))).0, 0);
    assert_eq!(request(&mut a, &write(20_000, 65_536), Some(&data)).0, 0, "room that was given back");
    assert!(neighbour.end().0 > 0);
    assert_eq!(errors(&iod), [2, 0]);
    drop(a);
    // The I/O domain ends before the file system is unmounted.
    assert!(iod.end().0.success());
}

/// The directory of all sockets is removed under a live guest, which is served on; the I/O domain
/// ends normally.
#[test]
fn the_sockets_directory_goes_away() {
    let dir = disk(8);
    let run = dir.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let at = |name: &str| format!("socket = \"{}/{name}\"", dir.path().display());
    let config = two_disks(dir.path(), 8, "").replace(&at("a"), &format!("socket = \"{}/a\"", run.display()));
    let config = config.replace(&at("b"), &format!("socket = \"{}/b\"", run.display()));
    // A missing directory is named in the error.
    let stderr =
        Iod::try_start(dir.path(), &config.replace("/run/a", "/nowhere/a")).err().expect("no socket");
    assert!(stderr.contains("disk \"a\"") && stderr.contains("/nowhere/a"), "{stderr}");
    let iod = Iod::start(dir.path(), &config);
    let mut a = Client::connect(&run.join("a"), Options::default()).unwrap();
    std::fs::remove_dir_all(&run).unwrap();
    std::fs::remove_file(dir.path().join("ctl")).unwrap();
    assert_eq!(request(&mut a, &write(0, 4_096), Some(&[1; 4_096])).0, 0);
    assert_eq!(request(&mut a, &read(0, 4_096), None), (0, vec![1; 4_096]));
    iod.end_well();
}

/// A sparse image on a full file system: said before, and the reason is in the status.
#[test]
fn a_full_file_system_is_said_before_and_after() {
    let dir = disk(8);
    let (image, mount) = (dir.path().join("small/image"), dir.path().join("small"));
    let Some(_small) = Tmpfs::mount(&mount, "2m") else {
        skip("a_full_file_system_is_said_before_and_after", "no tmpfs can be mounted");
        return;
    };
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let iod = Iod::start(dir.path(), &pair(dir.path(), &image, FAILS));
    let said = String::from_utf8(common::check(dir.path()).stdout).unwrap();
    assert!(said.contains("disk \"a\" is sparse: its guest may write 8MiB more"), "{said}");
    let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    let failed = (0..2_048).filter(|i| request(&mut client, &write(i * 8, 4_096), Some(&[1; 4_096])).0 != 0);
    let failed = failed.count() as u64;
    assert!(failed > 0 && failed < 2_048, "{failed}");
    let vm = iod.disk("a");
    assert_eq!(vm["errors"], failed, "{vm}");
    assert!(vm["last_error"].as_str().unwrap().contains("No space left on device"), "{vm}");
    drop(client);
    let (_, log) = iod.end();
    assert!(log.contains("disk \"a\" is sparse"), "{log}");
}

/// A file system of 1 MiB that is full, with the sparse image of disk `a`, whose writes wait for
/// room. Its last field is the file that fills it.
struct FullDisk {
    iod: Iod,
    dir: tempfile::TempDir,
    _mount: Tmpfs,
    filler: PathBuf,
}

impl FullDisk {
    fn start(test: &str) -> Option<Self> {
        Self::start_with(test, "")
    }

    /// A disk with more keys than [`FullDisk::start`] gives it.
    fn start_with(test: &str, more: &str) -> Option<Self> {
        let dir = disk(8);
        let Some(mount) = Tmpfs::mount(&dir.path().join("full"), "1m") else {
            skip(test, "no file system can be mounted here");
            return None;
        };
        let image = mount.0.join("sparse");
        std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let iod = Iod::start(dir.path(), &pair(dir.path(), &image, &format!("cached = true\n{more}")));
        let filler = mount.0.join("filler");
        let full = Self { iod, dir, _mount: mount, filler };
        full.fill();
        Some(full)
    }

    /// Uses up all room.
    fn fill(&self) {
        // Ends with an error, with the last free byte.
        let _ = std::fs::write(&self.filler, vec![0; 2 << 20]);
    }

    fn empty(&self) {
        std::fs::remove_file(&self.filler).unwrap();
    }

    fn client(&self) -> Client {
        Client::connect(&self.dir.path().join("a"), Options { buffer: 65_536, ..Options::default() }).unwrap()
    }

    /// Writes that wait, and that had to.
    fn waiting(&self) -> (u64, u64) {
        let disk = self.iod.disk("a");
        let of = |key: &str| disk[key].as_u64().unwrap();
        (of("waiting_for_room"), of("waited_for_room"))
    }

    fn wait_for(&self, waiting: u64) {
        wait_for("writes that wait for room", || self.waiting().0 == waiting);
    }

    fn push(&self, client: &mut Client, sector: u64, data: &[u8]) -> u16 {
        let slot = client.queues[0].push_with(&write(sector, data.len() as u32), data).unwrap();
        client.queues[0].notify().unwrap();
        slot
    }

    fn end(self, errors_of: [u64; 2]) {
        assert_eq!(errors(&self.iod), errors_of);
        self.iod.end_well();
    }
}

/// Writes without room wait, over and over again; reads, and writes over what is there, do not.
#[test]
fn writes_wait_for_room_and_go_on() {
    let Some(full) = FullDisk::start("writes_wait_for_room_and_go_on") else { return };
    let neighbour = Neighbour::start(full.dir.path().join("b"));
    let mut a = full.client();
    for round in 1..=20u8 {
        let data = vec![round; 65_536];
        // In several pieces, of which the first may find room.
        let sectors = [u64::from(round) * 512, u64::from(round) * 512 + 128];
        let slots = sectors.map(|sector| full.push(&mut a, sector, &data));
        full.wait_for(2);
        assert_eq!(request(&mut a, &read(30_000, 4_096), None), (0, vec![0; 4_096]));
        assert!(a.queues[0].pop_used().is_none(), "they wait");
        full.empty();
        let mut done: Vec<_> = (0..2).map(|_| completion(&mut a.queues[0]).expect("room")).collect();
        done.sort_by_key(|answer| answer.slot);
        assert!(done.iter().all(|answer| answer.status == 0 && slots.contains(&answer.slot)), "{done:?}");
        assert_eq!(full.waiting().0, 0);
        for sector in sectors {
            assert_eq!(request(&mut a, &read(sector, 65_536), None), (0, data.clone()));
            // Room for the next round.
            assert_eq!(request(&mut a, &deallocate(11), Some(&range(sector, 128, 0))).0, 0);
        }
        full.fill();
    }
    assert!(full.waiting().1 >= 40, "{:?}", full.waiting());
    assert!(neighbour.end().0 > 0);
    drop(a);
    full.end([0, 0]);
}

/// A queue stops at once, without memory of requests in flight: what waits is an I/O error.
#[test]
fn a_queue_without_inflight_memory_stops_with_errors() {
    let Some(full) = FullDisk::start("a_queue_without_inflight_memory_stops_with_errors") else { return };
    let mut a = full.client();
    full.push(&mut a, 0, &[1; 65_536]);
    full.wait_for(1);
    a.raw().get_vring_base(0).unwrap();
    assert_eq!(completion(&mut a.queues[0]).map(|answer| answer.status), Some(1));
    assert_eq!(full.waiting().0, 0);
    drop(a);
    full.end([1, 0]);
}

/// Starts a queue with this memory of requests in flight.
fn start_queue(a: &mut Client, base: u16, (made, file): (&VhostUserInflight, &std::fs::File)) {
    a.raw().set_inflight_fd(made, file.as_raw_fd()).unwrap();
    let addresses = a.ring_addresses(0);
    a.raw().set_vring_addr(0, &addresses).unwrap();
    start_at(a, base);
    a.raw().set_vring_enable(0, true).unwrap();
}

/// With it the next start of the queue carries them out, also that of another connection.
#[test]
fn what_waits_survives_a_stop_and_a_disconnect() {
    let Some(full) = FullDisk::start("what_waits_survives_a_stop_and_a_disconnect") else { return };
    let mut a = full.client();
    accept_all(&mut a);
    let wanted = VhostUserInflight::new(0, 0, 1, a.queues[0].size());
    a.raw().get_vring_base(0).unwrap();
    let (made, file) = a.raw().get_inflight_fd(&wanted).unwrap();
    let start = |a: &mut Client, base: u16| start_queue(a, base, (&made, &file));
    start(&mut a, 0);
    let data = vec![7; 65_536];
    full.push(&mut a, 0, &data);
    full.wait_for(1);
    let base = a.raw().get_vring_base(0).unwrap();
    assert_eq!((base, full.waiting().0), (1, 0));
    assert!(a.queues[0].pop_used().is_none());
    start(&mut a, base as u16);
    full.wait_for(1);
    full.empty();
    assert_eq!(completion(&mut a.queues[0]).map(|answer| answer.status), Some(0));
    assert_eq!(request(&mut a, &read(0, 65_536), None), (0, data));
    // A live migration does not take that memory along: the guest gets its answer here.
    full.fill();
    let _log = begin_log(&mut a);
    full.push(&mut a, 8_192, &[1; 65_536]);
    full.wait_for(1);
    let base = a.raw().get_vring_base(0).unwrap();
    assert_eq!(completion(&mut a.queues[0]).map(|answer| answer.status), Some(1));
    a.set_logging(false).unwrap();
    start(&mut a, base as u16);
    full.empty();
    // A guest that goes while it waits leaves nothing behind.
    full.fill();
    full.push(&mut a, 4_096, &[1; 65_536]);
    full.wait_for(1);
    drop(a);
    wait_for("the end of its requests", || full.waiting().0 == 0);
    let mut again = full.client();
    assert_eq!(request(&mut again, &read(0, 4_096), None), (0, vec![7; 4_096]));
    drop(again);
    full.end([1, 0]);
}

/// A guest is paused while a write waits, saved, and goes on with fresh memory of requests in
/// flight: what was answered is not served again, and the write is not answered.
#[test]
fn a_guest_that_was_saved_is_not_served_twice() {
    let Some(full) = FullDisk::start("a_guest_that_was_saved_is_not_served_twice") else { return };
    let mut a = full.client();
    accept_all(&mut a);
    let start = |a: &mut Client, base: u16| {
        let wanted = VhostUserInflight::new(0, 0, 1, a.queues[0].size());
        let (made, file) = a.raw().get_inflight_fd(&wanted).unwrap();
        start_queue(a, base, (&made, &file));
    };
    a.raw().get_vring_base(0).unwrap();
    start(&mut a, 0);
    let waits = full.push(&mut a, 0, &[1; 65_536]);
    full.wait_for(1);
    for _ in 0..2 {
        assert_eq!(request(&mut a, &read(8_192, 4_096), None).0, 0);
    }
    let base = a.raw().get_vring_base(0).unwrap();
    assert_eq!(base, 3);
    start(&mut a, base as u16);
    // `request` checks that the answer is that of its own request.
    for _ in 0..3 {
        assert_eq!(request(&mut a, &read(8_192, 4_096), None).0, 0);
    }
    full.empty();
    assert_eq!(request(&mut a, &write(0, 4_096), Some(&[2; 4_096])).0, 0);
    assert!(a.queues[0].pop_used().is_none(), "request {waits} has no answer");
    drop(a);
    let (status, log) = full.iod.end();
    assert!(status.success() && log.contains("1 requests that were under way elsewhere"), "{status}: {log}");
}

/// A guest moves on whose queues were started a moment ago: what a previous process had fetched is
/// answered, also where waiting writes of another queue have all places of requests.
#[test]
fn a_stop_before_a_move_waits_for_no_room() {
    let test = "a_stop_before_a_move_waits_for_no_room";
    let Some(full) = FullDisk::start_with(test, "depth = 2\n") else { return };
    let options = Options { queues: 2, ..Options::default() };
    let mut a = Client::connect(&full.dir.path().join("a"), options).unwrap();
    accept_all(&mut a);
    assert_eq!(a.stop_queue(0).unwrap(), 0);
    let size = a.queues[0].size();
    let (made, file) = a.raw().get_inflight_fd(&VhostUserInflight::new(0, 0, 2, size)).unwrap();
    // As a killed process leaves the first queue: the version, the number of descriptors, and the
    // flag of a request of three.
    let slot = a.queues[0].push_with(&write(0, 4_096), &[1; 4_096]).unwrap();
    file.write_all_at(&1_u16.to_ne_bytes(), 8).unwrap();
    file.write_all_at(&size.to_ne_bytes(), 10).unwrap();
    file.write_all_at(&[1], 16 + 16 * 3 * u64::from(slot)).unwrap();
    a.raw().set_inflight_fd(&made, file.as_raw_fd()).unwrap();
    let _log = begin_log(&mut a);
    for sector in [1_024, 2_048] {
        a.queues[1].push_with(&write(sector, 4_096), &[2; 4_096]).unwrap();
    }
    a.queues[1].notify().unwrap();
    full.wait_for(2);
    start_at(&mut a, 1);
    assert_eq!(a.stop_queue(0).unwrap(), 1);
    assert_eq!(a.queues[0].pop_used().map(|answer| answer.status), Some(1));
    for _ in 0..2 {
        assert_eq!(completion(&mut a.queues[1]).map(|answer| answer.status), Some(1));
    }
    drop(a);
    full.end([3, 0]);
}
