//! A real guest on an I/O domain that is killed while serving it, or whose file system is full.

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::guest::shell;
use common::{Iod, configure, disk, two_disks, until, with_keys};
use rtvirtio_testbed::image;
use rtvirtio_testbed::qemu::{GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_testkit::ChildGuard;
use rtvirtio_testkit::site::wait_for;
use rtvirtio_vmm::Reconnect;

const KILLS: u32 = 3;

#[test]
fn a_guest_loses_nothing_when_the_domain_is_killed() {
    let test = "a_guest_loses_nothing_when_the_domain_is_killed";
    if !rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::QEMU]) {
        return;
    }
    let image = image::ensure(&image::default_cache(), &|line| eprintln!("{line}")).unwrap();
    let dir = disk(192);
    let config = two_disks(dir.path(), 128, "").replace("offset = \"64MiB\"", "offset = \"128MiB\"");
    let config = with_keys(&config, "a", "queues = 2\n");
    let mut iod = Iod::start(dir.path(), &config);
    let socket = GuestDisk::VhostUser { socket: dir.path().join("a"), queues: Some(2) };
    let mut guest = QemuGuest::start(&QemuConfig::new("vm", image, socket, &dir.path().join("run"))).unwrap();
    // The disk's properties in the guest's kernel.
    let seen = shell(&mut guest, "cd /sys/block/vda; cat size queue/write_cache serial; ls mq | wc -l");
    assert!(seen.starts_with("131072\nwrite back\na"), "{seen}");
    let fio = "exec fio --name=v --filename=/dev/vda --rw=randrw --bssplit=4k/60:64k/40 --size=32M \
               --io_size=1G --time_based --runtime=10 --direct=1 --ioengine=libaio --iodepth=16 \
               --verify=crc32c --verify_fatal=1 --verify_backlog=64";
    let verify = guest.spawn(&["sh", "-c", fio]).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    for _ in 0..KILLS {
        iod.kill();
        std::thread::sleep(Duration::from_millis(100));
        iod = Iod::start(dir.path(), &config);
        // QEMU reconnects once a second.
        std::thread::sleep(Duration::from_millis(1_900));
    }
    let output = until("the end of fio", || guest.poll(verify).unwrap());
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.success(), "{text}");
    assert!(text.contains("err= 0"), "{text}");
    let kernel = shell(&mut guest, "dmesg");
    assert!(!kernel.contains("I/O error"), "{kernel}");
    // The last process served it too, with the requests in flight of its predecessors.
    assert!(iod.status().contains("\"attached\":true"), "{}", iod.status());
    // It grows, and the guest sees that at once, also where that is after a restart.
    let size = |guest: &mut QemuGuest| shell(guest, "cat /sys/block/vda/size").trim().to_owned();
    let sized = |mib: u32| config.replacen("size = \"64MiB\"", &format!("size = \"{mib}MiB\""), 1);
    configure(dir.path(), &sized(96));
    let changed = iod.reload(false);
    assert_eq!(changed["changed"], serde_json::json!(["disk \"a\": size 64MiB -> 96MiB"]), "{changed}");
    wait_for("the new size", || size(&mut guest) == "196608");
    iod.kill();
    iod = Iod::start(dir.path(), &sized(128));
    wait_for("the size after a restart", || size(&mut guest) == "262144");
    shell(&mut guest, "dd if=/dev/urandom of=/dev/vda bs=1M seek=127 count=1 oflag=direct 2>&1");
    drop(iod);
    guest.stop().unwrap();
}

/// QEMU before 9.1 does not negotiate again with the next process for a guest that has not started
/// its disk: paused as here, in firmware, or on arrival of a migration.
#[test]
fn a_guest_that_starts_after_a_kill_has_its_disk() {
    let test = "a_guest_that_starts_after_a_kill_has_its_disk";
    if !rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::QEMU]) {
        return;
    }
    let qemu = "qemu-system-x86_64";
    let key = Reconnect::of_program(Path::new(qemu)).unwrap().option();
    let dir = disk(16);
    let config = two_disks(dir.path(), 16, "");
    let mut iod = Iod::start(dir.path(), &config);
    let mut command = Command::new(qemu);
    command.args(["-machine", "q35,accel=tcg,memory-backend=mem", "-nodefaults", "-display", "none", "-S"]);
    command.args(["-m", "32", "-object", "memory-backend-memfd,id=mem,size=32M,share=on"]);
    command.arg("-chardev").arg(format!("socket,id=c,path={}/a,{key}", dir.path().display()));
    command.args(["-device", "vhost-user-blk-pci,chardev=c", "-qmp", "stdio"]);
    let mut child = ChildGuard(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let (mut input, output) = (child.0.stdin.take().unwrap(), child.0.stdout.take().unwrap());
    let mut output = BufReader::new(output);
    let mut ask = |name: &str| {
        writeln!(input, "{{\"execute\": \"{name}\"}}").unwrap();
        let mut line = String::new();
        while !line.contains("\"return\"") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0 && !line.contains("\"error\""), "{line}");
        }
    };
    ask("qmp_capabilities");
    wait_for("the first connection", || iod.disk("a")["connected"] == true);
    iod.kill();
    iod = Iod::start(dir.path(), &config);
    wait_for("the next connection", || iod.disk("a")["connected"] == true);
    assert_eq!(iod.disk("a")["attached"], false);
    ask("cont");
    // Its firmware reads the disk.
    wait_for("the guest's start of its disk", || iod.disk("a")["attached"] == true);
    wait_for("a request", || iod.disk("a")["read"]["requests"].as_u64() > Some(0));
    ask("quit");
}

/// The guest's writes find no room, wait, and go on, as often as that happens.
#[test]
fn a_guest_sees_no_error_while_the_file_system_is_full() {
    let test = "a_guest_sees_no_error_while_the_file_system_is_full";
    if !rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::Root, rtvirtio_testkit::Need::QEMU]) {
        return;
    }
    let rounds = rtvirtio_testkit::site::number("RTVIRTIO_ROUNDS", 4);
    let image = image::ensure(&image::default_cache(), &|line| eprintln!("{line}")).unwrap();
    let dir = disk(8);
    let full = rtvirtio_testkit::SmallDisk::mount(&dir.path().join("full"));
    let sparse = dir.path().join("full/sparse");
    std::fs::File::create(&sparse).unwrap().set_len(64 << 20).unwrap();
    let d = dir.path().display();
    let config = format!(
        "[[device]]\nname = \"d\"\nwindow = 4\n[[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\n\
         path = \"{}\"\ncached = true\nformat = \"raw\"\n",
        sparse.display()
    );
    let iod = Iod::start(dir.path(), &config);
    // Neither the file nor QEMU says how many queues there are.
    let socket = GuestDisk::VhostUser { socket: dir.path().join("a"), queues: None };
    let config = QemuConfig { vcpus: 3, ..QemuConfig::new("vm", image, socket, &dir.path().join("run")) };
    let mut guest = QemuGuest::start(&config).unwrap();
    assert_eq!(shell(&mut guest, "ls /sys/block/vda/mq | wc -l").trim(), "3", "a queue for each vCPU");
    for round in 0..rounds {
        full.fill();
        // 128 KiB of 256, somewhere else each time, and back to a hole at the end.
        let write = format!(
            "yes {round} | dd of=/dev/vda bs=64k count=2 seek={} iflag=fullblock oflag=direct 2>&1",
            round * 8
        );
        let writer = guest.spawn(&["sh", "-c", &write]).unwrap();
        wait_for("a write that waits", || iod.disk("a")["waiting_for_room"].as_u64() > Some(0));
        assert!(guest.poll(writer).unwrap().is_none());
        full.empty();
        let wrote = until("the end of the write", || guest.poll(writer).unwrap());
        assert!(wrote.success(), "{}", String::from_utf8_lossy(&wrote.stdout));
        let check = format!(
            "dd if=/dev/vda bs=64k count=2 skip={} iflag=direct 2>/dev/null | tr -d '\\n{round}' | wc -c; \
             blkdiscard -o {} -l 131072 /dev/vda 2>&1",
            round * 8,
            round * 8 * 65_536
        );
        let seen = shell(&mut guest, &check);
        assert_eq!(seen.trim(), "0", "bytes that are not what was written, then errors of the discard");
    }
    let kernel = shell(&mut guest, "dmesg");
    assert!(!kernel.contains("I/O error"), "{kernel}");
    let status = iod.disk("a");
    assert_eq!((&status["errors"], &status["waiting_for_room"]), (&0.into(), &0.into()), "{status}");
    guest.stop().unwrap();
    drop(iod);
}
