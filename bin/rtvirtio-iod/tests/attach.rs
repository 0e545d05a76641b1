//! Disks come and go while others run.

mod common;

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::resources::Resources;
use common::{
    FLUSH, Iod, changed, completion, configure, connect, disk, read, request, two_disks, with_keys, write,
};
use rtvirtio_domain_client::{BlkRequest, Client};
use rtvirtio_testkit::LoopDevice;
use rtvirtio_testkit::site::wait_for;
use serde_json::Value;
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;

/// The table of a disk `name` on a file of its own.
fn table(dir: &Path, name: &str) -> String {
    let d = dir.display();
    format!("[[device.disk]]\nname = \"{name}\"\nsocket = \"{d}/{name}\"\npath = \"{d}/{name}.img\"\n")
}

fn image(dir: &Path, name: &str) {
    File::create(dir.join(format!("{name}.img"))).unwrap().set_len(1 << 20).unwrap();
}

/// A guest with several requests in flight that writes each block with its own bytes, reads it, and
/// counts. Each completion must be of a request that is in flight, and there must be one for each.
struct Verifier {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<(u64, u64)>,
}

/// Requests in flight.
const DEPTH: usize = 8;

impl Verifier {
    fn start(socket: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, socket) = (Arc::clone(&stop), socket.to_owned());
        let thread = std::thread::spawn(move || {
            let mut client = connect(&socket);
            let (mut submitted, mut completed, mut round) = (0u64, 0u64, 0u64);
            while !stopped.load(Ordering::Relaxed) {
                let bytes = |i: usize| -> Vec<u8> {
                    (0..4_096u64).map(|at| (at ^ round ^ (i as u64) << 5) as u8).collect()
                };
                for kind in [1, 0] {
                    let mut slots = Vec::new();
                    for i in 0..DEPTH {
                        let ask = BlkRequest { kind, priority: 0, sector: i as u64 * 8, len: 4_096 };
                        // The engine polls the ring: the data comes before the request.
                        let data = if kind == 1 { bytes(i) } else { Vec::new() };
                        let slot = client.queues[0].push_with(&ask, &data).expect("room for a request");
                        slots.push(Some(slot));
                        submitted += 1;
                    }
                    client.queues[0].notify().unwrap();
                    for _ in 0..DEPTH {
                        let answer = completion(&mut client.queues[0]).expect("no request is lost");
                        assert_eq!(answer.status, 0);
                        let i =
                            slots.iter().position(|s| *s == Some(answer.slot)).expect("one in flight, once");
                        slots[i] = None;
                        completed += 1;
                        if kind == 0 {
                            let at = client.queues[0].data(answer.slot);
                            assert_eq!(client.mem.read(at, 4_096), bytes(i), "round {round}, block {i}");
                        }
                    }
                    assert_eq!(client.queues[0].pop_used().map(|a| a.slot), None, "no completion twice");
                }
                round += 1;
            }
            (submitted, completed)
        });
        Self { stop, thread }
    }

    fn end(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the data is right")
    }
}

/// 100 disks come and go in turn, each used by a guest of its own, next to a guest that verifies
/// its data: nothing is lost, doubled or changed, and nothing stays behind.
#[test]
fn a_hundred_disks_come_and_go() {
    let dir = disk(8);
    let base = two_disks(dir.path(), 8, "");
    let mut iod = Iod::start(dir.path(), &base);
    let turn = |iod: &Iod, i: usize| {
        let name = format!("x{i}");
        image(dir.path(), &name);
        configure(dir.path(), &(base.clone() + &table(dir.path(), &name)));
        assert_eq!(changed(&iod.reload(false)), [format!("disk \"{name}\": attached")]);
        let mut client = connect(&dir.path().join(&name));
        assert_eq!(client.capacity, 1 << 20);
        let data = vec![i as u8; 4_096];
        assert_eq!(request(&mut client, &write(8, 4_096), Some(&data)).0, 0);
        assert_eq!(request(&mut client, &read(8, 4_096), None), (0, data.clone()));
        drop(client);
        configure(dir.path(), &base);
        wait_for("the guest is gone", || {
            iod.reload(false)["changed"].as_array().is_some_and(|list| !list.is_empty())
        });
        assert!(!dir.path().join(&name).exists(), "its socket goes");
        let image = dir.path().join(format!("{name}.img"));
        assert_eq!(std::fs::read(&image).unwrap()[4_096..8_192], data, "what its guest wrote is there");
        // Its lock is released: it could be locked by another program.
        let file = File::open(&image).unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        std::fs::remove_file(image).unwrap();
    };
    let verifier = Verifier::start(&dir.path().join("b"));
    (0..5).for_each(|i| turn(&iod, i));
    let before = Resources::of(iod.pid());
    (5..100).for_each(|i| turn(&iod, i));
    let (submitted, completed) = verifier.end();
    eprintln!("the neighbour: {submitted} requests submitted, {completed} completed");
    assert!(completed > 0 && submitted == completed, "{submitted} submitted, {completed} completed");
    assert!(iod.is_alive());
    drop(connect(&dir.path().join("b")));
    let status = iod.status_json();
    let names: Vec<&Value> = status["vms"].as_array().unwrap().iter().map(|vm| &vm["name"]).collect();
    assert_eq!(names, ["a", "b"]);
    wait_for("descriptors and threads as before", || {
        let after = Resources::of(iod.pid());
        // The verifier has left, and with it its descriptors.
        after.descriptors <= before.descriptors && after.threads <= before.threads
    });
    let after = Resources::of(iod.pid());
    eprintln!("{before:?} -> {after:?}");
    assert!(after.resident_kib - before.resident_kib < 4_096, "memory stays: {before:?} -> {after:?}");
    iod.end_well();
}

/// Many disks at once, more than there were at the start; a device may start without any.
#[test]
fn a_device_may_start_empty() {
    let dir = disk(8);
    let iod = Iod::start(dir.path(), "[[device]]\nname = \"d\"\nwindow = 4\n");
    let names: Vec<String> = (0..40).map(|i| format!("x{i}")).collect();
    names.iter().for_each(|name| image(dir.path(), name));
    let tables: String = names.iter().map(|name| table(dir.path(), name)).collect();
    configure(dir.path(), &format!("[[device]]\nname = \"d\"\nwindow = 4\n{tables}"));
    assert_eq!(changed(&iod.reload(false)).len(), 40);
    let mut clients: Vec<Client> = names.iter().map(|name| connect(&dir.path().join(name))).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        let data = vec![i as u8; 4_096];
        assert_eq!(request(client, &write(0, 4_096), Some(&data)).0, 0);
        assert_eq!(request(client, &read(0, 4_096), None), (0, data));
        // Each VM may have a flush at the device in addition to the window.
        client.queues[0].push(&FLUSH).unwrap();
    }
    clients.iter_mut().for_each(|client| client.queues[0].notify().unwrap());
    for client in &mut clients {
        assert_eq!(completion(&mut client.queues[0]).map(|a| a.status), Some(0));
    }
    iod.end_well();
    assert!(names.iter().all(|name| !dir.path().join(name).exists()), "sockets go at the end");
}

/// A disk in use goes only by force; then its guest is cut off, and no other one is.
#[test]
fn a_disk_with_a_guest_goes_by_force_only() {
    let dir = disk(8);
    let both = two_disks(dir.path(), 8, "");
    let iod = Iod::start(dir.path(), &both);
    let (mut a, mut b) = (connect(&dir.path().join("a")), connect(&dir.path().join("b")));
    assert_eq!(request(&mut a, &write(0, 4_096), Some(&[1; 4_096])).0, 0);
    let at = both.find("[[device.disk]]\nname = \"b\"").unwrap();
    let only_b = both[..both.find("[[device.disk]]").unwrap()].to_owned() + &both[at..];
    configure(dir.path(), &only_b);
    let reply = iod.reload(false);
    let error = reply["error"].as_str().unwrap();
    assert!(
        error.contains("disk \"a\" would be removed, and a guest is attached") && error.contains("--force"),
        "{error}"
    );
    assert!(error.contains("`chardev-remove`"), "{error}");
    assert_eq!(request(&mut a, &read(0, 4_096), None), (0, vec![1; 4_096]));
    assert_eq!(changed(&iod.reload(true)), ["disk \"a\": detached"]);
    assert!(a.raw_is_closed(), "all that vhost-user has for it is the end of the connection");
    assert_eq!(request(&mut b, &read(0, 4_096), None).0, 0);
    assert!(!dir.path().join("a").exists());
    // It comes again.
    configure(dir.path(), &both);
    assert_eq!(changed(&iod.reload(false)), ["disk \"a\": attached"]);
    let mut a = connect(&dir.path().join("a"));
    assert_eq!(request(&mut a, &read(0, 4_096), None), (0, vec![1; 4_096]));
    let inode = dir.path().join("a").metadata().unwrap();
    assert!(inode.file_type().is_socket() && inode.mode() & 0o777 == 0o600);
    // As QEMU leaves a connection after `device_del`: open, with all queues stopped.
    configure(dir.path(), &only_b);
    assert!(iod.reload(false)["error"].as_str().unwrap().contains("`chardev-remove`"));
    a.raw().set_vring_enable(0, false).unwrap();
    a.raw().get_vring_base(0).unwrap();
    assert_eq!(changed(&iod.reload(false)), ["disk \"a\": detached"]);
    assert!(a.raw_is_closed());
}

/// What a start refuses is refused, with disk and key, and changes nothing; so is a promise that
/// would break those of others.
#[test]
fn an_attach_refuses_what_a_start_refuses() {
    let dir = disk(8);
    let d = dir.path().display().to_string();
    let costs = "cost = { read = { base = \"100us\", per_mib = \"1ms\" }, write = { base = \"100us\", per_mib = \"1ms\" } }";
    let reserve = "reserve = { share = \"50%\", burst = \"1ms\", deadline = \"5ms\" }\n";
    let base = with_keys(&two_disks(dir.path(), 8, costs), "a", reserve);
    let iod = Iod::start(dir.path(), &base);
    let mut client = connect(&dir.path().join("b"));
    for name in ["x", "odd", "qcow", "held"] {
        image(dir.path(), name);
    }
    std::fs::write(dir.path().join("odd.img"), vec![0; 1_000]).unwrap();
    std::fs::write(dir.path().join("qcow.img"), [b"QFI\xfb\0\0\0\x03".as_slice(), &[0; 1 << 16]].concat())
        .unwrap();
    let held = File::open(dir.path().join("held.img")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    std::fs::write(dir.path().join("taken"), "a file").unwrap();
    let x = table(dir.path(), "x");
    let cases = [
        (x.clone() + &reserve.replace("50%", "60%"), "device \"d\""),
        (
            x.clone() + &reserve.replace("5ms", "1us").replace("50%", "10%"),
            "disk \"x\" cannot be promised 1us",
        ),
        (table(dir.path(), "missing"), "missing.img: cannot open: No such file"),
        (table(dir.path(), "odd"), "no multiple of 512"),
        (table(dir.path(), "qcow"), "qemu-img convert -O raw"),
        (table(dir.path(), "held"), "has locked it (flock)"),
        (x.replace("x.img", "disk"), "disks \"a\" and \"x\" lie on the same part"),
        (x.replace("/x\"", "/taken\""), "a regular file, which is not removed"),
        (x.replace(&format!("{d}/x\""), "/tmp/rtvirtio-no-such-dir/x\""), "`socket` of disk \"x\""),
        (x.clone() + "urgent_quantum = \"1MiB\"\n", "`urgent_quantum` of 1048576 bytes needs a restart"),
        (x.clone() + "weight = 0\n", "disk \"x\": weight is 0"),
    ];
    let descriptors = Resources::of(iod.pid()).descriptors;
    for (text, why) in cases {
        configure(dir.path(), &(base.clone() + &text));
        let reply = iod.reload(false);
        let error = reply["error"].as_str().unwrap_or_else(|| panic!("{why}: {reply}"));
        assert!(error.contains(why), "{why}: {error}");
        assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
        assert!(!dir.path().join("x").exists(), "{why}: no socket stays");
    }
    assert_eq!(std::fs::read_to_string(dir.path().join("taken")).unwrap(), "a file");
    wait_for("refused disks are closed", || Resources::of(iod.pid()).descriptors == descriptors);
    // The process itself opens no files: a signal alone does not attach.
    configure(dir.path(), &(base + &x));
    assert!(iod.command("reload").contains("opens no files"), "disks come with their descriptors");
    assert_eq!(changed(&iod.reload(false)), ["disk \"x\": attached"]);
    // Its lock is that of the I/O domain.
    let image = File::open(dir.path().join("x.img")).unwrap();
    let locked = rustix::fs::flock(&image, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert!(locked.is_err(), "the lock is held by the domain");
    drop(connect(&dir.path().join("x")));
}

/// A block device is opened exclusively, by the I/O domain, until it goes.
#[test]
fn a_block_device_comes_and_goes() {
    let dir = disk(8);
    image(dir.path(), "x");
    let Some(device) = LoopDevice::attach(&dir.path().join("x.img")) else {
        return rtvirtio_testkit::skip("a_block_device_comes_and_goes", "loop devices cannot be made");
    };
    let base = two_disks(dir.path(), 8, "");
    let iod = Iod::start(dir.path(), &base);
    let path = dir.path().join("x.img").display().to_string();
    let x = table(dir.path(), "x").replace(&path, &device.0.display().to_string());
    configure(dir.path(), &(base.clone() + &x));
    assert_eq!(changed(&iod.reload(false)), ["disk \"x\": attached"]);
    let exclusive = || {
        use std::os::unix::fs::OpenOptionsExt;
        File::options().read(true).custom_flags(libc::O_EXCL).open(&device.0)
    };
    assert_eq!(exclusive().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    let mut client = connect(&dir.path().join("x"));
    assert_eq!(request(&mut client, &write(0, 4_096), Some(&[9; 4_096])).0, 0);
    drop(client);
    configure(dir.path(), &base);
    wait_for("it goes", || iod.reload(false)["changed"].as_array().is_some_and(|list| !list.is_empty()));
    assert!(exclusive().is_ok());
}
