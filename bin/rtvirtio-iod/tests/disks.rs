//! Invalid disks, sockets and locks are refused with the remedy, and nothing is destroyed.

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Iod, configure, deallocate, disk, program, range, read, request, two_disks, with_keys, write};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_testkit::{ChildGuard, LoopDevice, Machine, Need, has};
use rustix::net::SocketAddrUnix;

/// A disk on a whole file.
fn one(dir: &Path, path: &Path, more: &str) -> String {
    let (d, p) = (dir.display(), path.display());
    format!(
        "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{p}\"\n{more}\n"
    )
}

fn refused(dir: &Path, config: &str) -> String {
    let stderr = Iod::try_start(dir, config).err().expect("it does not start");
    // A check refuses with the same text as a start.
    let checked = check(dir, config).unwrap_err();
    assert_eq!(checked.trim(), stderr.trim());
    stderr
}

/// The output of `--check`, or its error.
fn check(dir: &Path, config: &str) -> Result<String, String> {
    configure(dir, config);
    let out = common::check(dir);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if out.status.success() { Ok(text(&out.stdout)) } else { Err(text(&out.stderr)) }
}

fn run(program: &str, args: &[&str]) {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let out = Command::new(program).args(args).env("PATH", path).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

const LOOPS: [Need; 2] = [Need::Root, Need::Path("/dev/loop-control", "no loop devices")];

/// What a guest's firmware or partitions do not stand is said before the guest meets it.
#[test]
fn blocks_of_another_size_are_said() {
    if !has("blocks_of_another_size_are_said", &LOOPS) {
        return;
    }
    let dir = disk(64);
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    for (blocks, is_said) in [(512, false), (4_096, true)] {
        let device = LoopDevice::with_blocks(&image, blocks).unwrap();
        let said = check(dir.path(), &one(dir.path(), &device.0, "format = \"raw\"")).unwrap();
        assert_eq!(said.contains("its guest sees blocks of 4096 bytes"), is_said, "{said}");
    }
}

/// Requests of whole sectors on a device with blocks of 4 KiB, many at once to the same blocks: no
/// write is lost, whatever its neighbours in the block are.
#[test]
fn sectors_on_a_device_with_larger_blocks_keep_all_data() {
    const SECTORS: usize = 256;
    if !has("sectors_on_a_device_with_larger_blocks_keep_all_data", &LOOPS) {
        return;
    }
    let dir = disk(64);
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let device = LoopDevice::with_blocks(&image, 4_096).unwrap();
    let said = check(dir.path(), &one(dir.path(), &device.0, "block_size = \"512B\"")).unwrap();
    assert!(said.contains("costs a read before it"), "{said}");
    let shared = "block_size = \"512B\"\nshared = true";
    let said = refused(dir.path(), &one(dir.path(), &device.0, shared));
    assert!(said.contains("cannot be written in parts"), "{said}");
    let more = "block_size = \"512B\"\n";
    let config =
        one(dir.path(), &device.0, more).replace("\"d\"\n", "\"d\"\nwindow = 16\nquantum = \"8KiB\"\n");
    let iod = Iod::start(dir.path(), &config);
    let mut client = common::connect(&dir.path().join("a"));
    let mut model = vec![0; SECTORS * 512];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for round in 0..100 {
        // Adjacent writes from the first sector to the last, submitted at once.
        let mut at = 0;
        let mut pushed = 0;
        while at < SECTORS {
            let n = (1 + random(if round % 2 == 0 { 3 } else { 40 })).min(SECTORS - at);
            if random(4) > 0 && client.queues[0].free_slots() > 0 {
                let data: Vec<u8> = (0..n * 512).map(|_| random(256) as u8).collect();
                model[at * 512..][..data.len()].copy_from_slice(&data);
                let write = write(at as u64, data.len() as u32);
                client.queues[0].push_with(&write, &data).expect("a free slot");
                pushed += 1;
            }
            at += n;
        }
        client.queues[0].notify().unwrap();
        for _ in 0..pushed {
            assert_eq!(common::completion(&mut client.queues[0]).expect("an answer").status, 0);
        }
        let (first, n) = (random(SECTORS - 64), 1 + random(64));
        let (status, got) = request(&mut client, &read(first as u64, n as u32 * 512), None);
        assert!(status == 0 && got == model[first * 512..][..n * 512], "round {round}, sector {first}, {n}");
    }
    drop((client, iod));
    let mut whole = vec![0; model.len()];
    std::fs::File::open(&device.0).unwrap().read_exact_at(&mut whole, 0).unwrap();
    assert!(whole == model);
}

/// A boot sector for BIOSes, of a disk with sectors of 512 bytes: reads the second sector, sends
/// its first byte to the serial port, writes the sector to the third, sends `D`.
fn boot_sector() -> Vec<u8> {
    let mut sector = vec![0; 512];
    // A jump to the code behind the parameters, of which FAT's bytes per sector are one.
    sector[..3].copy_from_slice(&[0xeb, 0x3c, 0x90]);
    sector[11..13].copy_from_slice(&512_u16.to_le_bytes());
    let code: &[&[u8]] = &[
        &[0x31, 0xc0, 0x8e, 0xc0, 0x8e, 0xd8],             // ax, es, ds = 0
        &[0xbb, 0x00, 0x7e, 0xb6, 0x00, 0x52],             // bx = buffer, head 0; push the drive
        &[0xb8, 0x01, 0x02, 0xb9, 0x02, 0x00, 0xcd, 0x13], // read one sector, the second
        &[0xba, 0xf8, 0x03, 0xa0, 0x00, 0x7e, 0xee, 0x5a], // its byte to the port; pop the drive
        &[0xb8, 0x01, 0x03, 0xb9, 0x03, 0x00, 0xcd, 0x13], // write one sector, the third
        &[0xba, 0xf8, 0x03, 0xb0, b'D', 0xee, 0xf4, 0xeb, 0xfd],
    ];
    let code = code.concat();
    sector[0x3e..][..code.len()].copy_from_slice(&code);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// An ordinary image on a device with blocks of 4 KiB: SeaBIOS starts it, reads and writes.
#[test]
fn seabios_starts_an_image_of_512_bytes_on_larger_blocks() {
    let test = "seabios_starts_an_image_of_512_bytes_on_larger_blocks";
    if !has(test, &[LOOPS[0], LOOPS[1], Need::QEMU]) {
        return;
    }
    let dir = disk(64);
    let image = dir.path().join("image");
    let mut contents = boot_sector();
    for sector in 1..8 {
        contents.extend([b'a' + sector; 512]);
    }
    std::fs::write(&image, &contents).unwrap();
    std::fs::File::options().write(true).open(&image).unwrap().set_len(16 << 20).unwrap();
    let device = LoopDevice::with_blocks(&image, 4_096).unwrap();
    let said = check(dir.path(), &one(dir.path(), &device.0, "")).unwrap();
    assert!(said.contains("its contents were made for 512 bytes"), "{said}");
    let iod = Iod::start(dir.path(), &one(dir.path(), &device.0, "block_size = \"512B\""));
    let vm = rtvirtio_testkit::tempdir().unwrap();
    let chardev = format!("socket,id=c,path={}/a", dir.path().display());
    let mut options = vec!["-machine", "memory-backend=mem", "-serial", "file:serial", "-chardev", &chardev];
    options.extend(["-object", "memory-backend-memfd,id=mem,size=64M,share=on"]);
    options.extend(["-device", "vhost-user-blk-pci,chardev=c,bootindex=1"]);
    let machine = Machine::start(vm.path(), "bios", &options);
    let serial = || std::fs::read(vm.path().join("serial")).unwrap_or_default();
    rtvirtio_testkit::site::wait_for("the boot sector", || serial().ends_with(b"D"));
    drop((machine, iod));
    assert!(serial().ends_with(b"bD"), "{:?}", String::from_utf8_lossy(&serial()));
    contents[1_024..][..512].fill(b'b');
    let mut found = vec![0; contents.len()];
    std::fs::File::open(&device.0).unwrap().read_exact_at(&mut found, 0).unwrap();
    assert!(found == contents);
}

/// A QEMU that listens is the user's VM: it is not to be stopped, but to connect.
#[test]
fn a_qemu_that_listens_is_told_apart() {
    if !has("a_qemu_that_listens_is_told_apart", &[Need::QEMU]) {
        return;
    }
    let dir = common::disk(64);
    let chardev = format!("socket,id=c,path={}/a,server=on,wait=off", dir.path().display());
    let vm = rtvirtio_testkit::tempdir().unwrap();
    let machine = Machine::start(vm.path(), "server", &["-chardev", &chardev]);
    let said = refused(dir.path(), &one(dir.path(), &dir.path().join("disk"), ""));
    let who = format!("a QEMU, process {}, listens there itself", machine.pid());
    assert!(said.contains(&who) && said.contains("mode='client'") && !said.contains("stop it"), "{said}");
}

#[test]
fn an_image_of_another_format_is_refused_and_unharmed() {
    let test = "an_image_of_another_format_is_refused_and_unharmed";
    if !has(test, &[Need::Program("qemu-img")]) {
        return;
    }
    let dir = disk(8);
    for kind in ["qcow2", "vmdk", "vdi", "vhdx", "vpc"] {
        let image = dir.path().join(format!("image.{kind}"));
        run("qemu-img", &["create", "-q", "-f", kind, image.to_str().unwrap(), "16M"]);
        let before = std::fs::read(&image).unwrap();
        // VHDX and others are not a whole number of sectors either; the error is about the format.
        let stderr = refused(dir.path(), &one(dir.path(), &image, "size = \"64KiB\""));
        assert!(stderr.contains("disk \"a\"") && stderr.contains("it is an image of format"), "{stderr}");
        assert!(
            stderr.contains("qemu-img convert -O raw") && stderr.contains("format = \"raw\""),
            "{stderr}"
        );
        assert!(before == std::fs::read(&image).unwrap(), "{kind} was changed");
    }
}

/// A guest may write the signature of an image: `format = "raw"` serves it, and other disks of the
/// file are not refused for it.
#[test]
fn a_raw_disk_may_look_like_an_image() {
    let dir = disk(16);
    let file = dir.path().join("disk");
    let config = two_disks(dir.path(), 16, "");
    let iod = Iod::start(dir.path(), &config);
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    let mut data = vec![0; 4_096];
    data[..4].copy_from_slice(b"QFI\xfb");
    assert_eq!(request(&mut a, &write(0, 4_096), Some(&data)).0, 0);
    drop(a);
    drop(iod);
    let stderr = refused(dir.path(), &config);
    assert!(stderr.contains("disk \"a\"") && stderr.contains("format qcow2"), "{stderr}");
    let iod = Iod::start(dir.path(), &with_keys(&config, "a", "format = \"raw\"\n"));
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    assert_eq!(request(&mut a, &read(0, 4_096), None), (0, data));
    drop((a, iod));
    // At the start of a part of the file, and at the end of the file.
    let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    open.write_all_at(&[0; 4], 0).unwrap();
    open.write_all_at(b"conectix", (16 << 20) - 512).unwrap();
    let stderr = refused(dir.path(), &config);
    assert!(stderr.contains("disk \"b\"") && stderr.contains("VHD"), "{stderr}");
    open.write_all_at(&[0; 8], (16 << 20) - 512).unwrap();
    open.write_all_at(b"LUKS\xba\xbe\x00\x02", 8 << 20).unwrap();
    let stderr = refused(dir.path(), &config);
    assert!(stderr.contains("disk \"b\"") && stderr.contains("luks"), "{stderr}");
}

#[test]
fn a_file_of_partial_sectors_is_refused() {
    let dir = disk(8);
    let file = dir.path().join("disk");
    let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    let config = one(dir.path(), &file, "");
    open.set_len(100).unwrap();
    assert!(refused(dir.path(), &config).contains("it has 100 bytes, less than one sector"));
    open.set_len(100_000).unwrap();
    let stderr = refused(dir.path(), &config);
    assert!(
        stderr.contains("100000 bytes is no multiple of 512") && stderr.contains("truncate -s %512"),
        "{stderr}"
    );
    drop(Iod::start(dir.path(), &one(dir.path(), &file, "size = \"64KiB\"")));
}

/// Mounted, below device mapper or md, or swap: the kernel uses the device; or a file is below a
/// loop device.
#[test]
fn kernel_users_are_refused() {
    let test = "kernel_users_are_refused";
    if !has(test, &LOOPS) {
        return;
    }
    let dir = disk(32);
    let file = dir.path().join("disk");
    let device = LoopDevice::attach(&file).unwrap();
    let node = device.0.to_str().unwrap();
    let whole = one(dir.path(), &device.0, "");
    let shared = one(dir.path(), &device.0, "shared = true");
    run("mkfs.ext4", &["-q", "-F", node]);
    let point = dir.path().join("mnt");
    std::fs::create_dir(&point).unwrap();
    run("mount", &[node, point.to_str().unwrap()]);
    let stderr = std::panic::catch_unwind(|| {
        [
            refused(dir.path(), &whole),
            refused(dir.path(), &shared),
            refused(dir.path(), &one(dir.path(), &file, "")),
        ]
    });
    run("umount", &[point.to_str().unwrap()]);
    let [exclusive, shared, below] = stderr.unwrap();
    for stderr in [&exclusive, &shared, &below] {
        assert!(stderr.contains(&format!("{node} is mounted on {}", point.display())), "{stderr}");
    }
    assert!(below.contains(&format!("losetup -d {node}")), "{below}");
    // Free again: one lock covers all parts of a device. The kernel may release a file system some
    // time after its unmount, as long as anything else refers to it.
    wait_until_free(&device.0);
    let parts = two_disks(dir.path(), 32, "").replace(&format!("{}/disk", dir.path().display()), node);
    let iod = Iod::start(dir.path(), &parts);
    let mounted = Command::new("mount").arg(node).arg(&point).output().unwrap();
    assert!(!mounted.status.success(), "what is served cannot be mounted");
    iod.kill();
    wait_until_free(&device.0);
    drop(Iod::start(dir.path(), &parts));
}

/// Waits until a device can be opened exclusively.
fn wait_until_free(device: &Path) {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::EXCL.bits() as i32;
    common::until(&format!("an exclusive open of {}", device.display()), || {
        std::fs::File::options().read(true).custom_flags(flags).open(device).ok()
    });
}

/// Ended when dropped.
struct Qemu(ChildGuard);

fn qemu(drive: &str) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-machine", "q35,accel=tcg", "-nodefaults", "-display", "none", "-S", "-m", "16"]);
    command.args(["-drive", drive, "-device", "virtio-blk-pci,drive=d", "-qmp", "stdio"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

impl Qemu {
    fn start(drive: &str) -> Self {
        Self::run(qemu(drive))
    }

    /// QEMU answers a command from its main loop: its devices are created and locked by then.
    fn run(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let input = child.stdin.as_mut().unwrap();
        std::io::Write::write_all(input, b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut stderr = String::new();
        while !stderr.contains("return") {
            assert!(std::io::BufRead::read_line(&mut out, &mut stderr).unwrap() > 0, "{stderr}");
        }
        child.stdout = Some(out.into_inner());
        Self(ChildGuard(child))
    }
}

/// An unmodified QEMU with its default locking.
#[test]
fn qemu_and_the_domain_exclude_each_other() {
    let test = "qemu_and_the_domain_exclude_each_other";
    if !has(test, &[Need::QEMU]) {
        return;
    }
    let dir = disk(16);
    let file = dir.path().join("disk");
    let drive = format!("file={},format=raw,if=none,id=d", file.display());
    let reads = format!("{drive},readonly=on");
    let config = two_disks(dir.path(), 16, "");
    let running = Qemu::start(&drive);
    let stderr = refused(dir.path(), &config);
    assert!(stderr.contains(&format!("process {} (qemu-system-x86)", running.0.id())), "{stderr}");
    drop(running);
    let locked_out = |drive: &str| {
        let mut child = qemu(drive).spawn().unwrap();
        // It exits by itself, or at the end of its monitor's input.
        drop(child.stdin.take());
        let out = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(stderr.contains("lock"), "{stderr}");
        stderr
    };
    let iod = Iod::start(dir.path(), &config);
    assert!(locked_out(&drive).contains("Failed to get \"write\" lock"));
    assert!(locked_out(&reads).contains("Failed to get shared \"write\" lock"));
    if has("qemu_and_the_domain_exclude_each_other, qemu-img", &[Need::Program("qemu-img")]) {
        // As with another QEMU: `info` does not read a raw image, the others do.
        let image = |args: &[&str]| {
            let out = Command::new("qemu-img").args(args).output().unwrap();
            String::from_utf8_lossy(&out.stderr).into_owned()
        };
        let (path, copy) = (file.to_str().unwrap(), dir.path().join("copy"));
        let stderr = image(&["convert", "-f", "raw", "-O", "raw", path, copy.to_str().unwrap()]);
        assert!(stderr.contains("Failed to get shared \"write\" lock"), "{stderr}");
        let stderr = image(&["resize", "-f", "raw", path, "17M"]);
        assert!(stderr.contains("Failed to get \"write\" lock"), "{stderr}");
        assert_eq!(image(&["info", "-U", "-f", "raw", path]), "");
    }
    // The same after a kill; the dead process's locks do not prevent a restart.
    iod.kill();
    let iod = Iod::start(dir.path(), &config);
    assert!(locked_out(&drive).contains("Failed to get \"write\" lock"));
    drop(iod);
    // Several readers are allowed.
    let read_only = one(dir.path(), &file, "read_only = true");
    let iod = Iod::start(dir.path(), &read_only);
    drop(Qemu::start(&reads));
    assert!(locked_out(&drive).contains("Failed to get \"write\" lock"));
    drop(iod);
    let reader = Qemu::start(&reads);
    drop(Iod::start(dir.path(), &read_only));
    assert!(refused(dir.path(), &config).contains("image locks"));
    drop(reader);
    // And several writers, if all are declared `shared`.
    let share = "shared = true";
    let iod = Iod::start(dir.path(), &one(dir.path(), &file, share));
    let args: Vec<String> = qemu(&drive).get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let args = args.iter().map(|a| a.replace("virtio-blk-pci,", "virtio-blk-pci,share-rw=on,"));
    let mut sharing = Command::new("qemu-system-x86_64");
    sharing.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    drop(Qemu::run(sharing));
    assert!(locked_out(&drive).contains("lock"), "one that does not share");
    drop(iod);
}

/// A socket is bound only where there is no file, or a dead socket.
#[test]
fn only_a_dead_socket_is_replaced() {
    let dir = disk(8);
    let d = dir.path();
    let config = two_disks(d, 8, "");
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    for name in ["a", "ctl"] {
        let path = d.join(name);
        std::fs::write(&path, "precious").unwrap();
        let stderr = Iod::try_start(d, &config).err().unwrap();
        assert!(stderr.contains("a regular file, which is not removed"), "{stderr}");
        assert!(check(d, &config).unwrap_err().contains("a regular file, which is not removed"));
        assert_eq!(text(&path), "precious");
        std::fs::remove_file(&path).unwrap();
    }
    // A failed start leaves no files.
    assert!(!d.join("a").exists() && !d.join("b").exists() && !d.join("ctl").exists());
    // The same file by another path.
    std::os::unix::fs::symlink(d, d.join("same")).unwrap();
    let socket = |path: &str| format!("socket = \"{}/{path}\"", d.display());
    for (path, why) in [
        ("same/disk", "`socket` of disk \"b\" lead to the same file"),
        ("same/a", "lead to the same file"),
        ("iod.toml", "the configuration file"),
    ] {
        let stderr = refused(d, &config.replace(&socket("b"), &socket(path)));
        assert!(stderr.contains(why), "{path}: {stderr}");
    }
    assert!(text(&d.join("iod.toml")).contains("[[device]]"));
    // A listener that does not accept, with a full backlog, is detected at once.
    let busy = UnixListener::bind(d.join("a")).unwrap();
    let mut waiting = Vec::new();
    rustix::net::listen(&busy, 0).unwrap();
    loop {
        let (next, address) = unconnected(&d.join("a"));
        match rustix::net::connect(&next, &address) {
            Ok(()) => waiting.push(next),
            Err(e) => break assert_eq!(e, rustix::io::Errno::AGAIN),
        }
    }
    let stderr = Iod::try_start(d, &config).err().unwrap();
    assert!(stderr.contains("another process listens there"), "{stderr}");
    assert!(check(d, &config).unwrap_err().contains("another process listens there"));
    drop(busy);
    // A dead socket is replaced. A file of another process in its place stays at the end.
    let iod = Iod::start(d, &config);
    std::fs::remove_file(d.join("a")).unwrap();
    std::fs::write(d.join("a"), "precious").unwrap();
    drop(iod);
    assert_eq!(text(&d.join("a")), "precious");
    assert!(!d.join("b").exists() && !d.join("ctl").exists());
}

/// A socket that does not wait, and the address of another.
fn unconnected(socket: &Path) -> (OwnedFd, SocketAddrUnix) {
    let flags = rustix::net::SocketFlags::NONBLOCK;
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
    let stream = rustix::net::socket_with(family, kind, flags, None).unwrap();
    (stream, SocketAddrUnix::new(socket).unwrap())
}

/// Whether another user with only this group can connect.
fn connects(socket: &Path, group: libc::gid_t) -> bool {
    let (stream, address) = unconnected(socket);
    // SAFETY: the child makes system calls only, and leaves by _exit.
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            // Raw system calls: libc's wrappers would synchronise with other threads, which a
            // forked child lacks.
            let done = libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>())
                | libc::syscall(libc::SYS_setresgid, group, group, group)
                | libc::syscall(libc::SYS_setresuid, 65_533, 65_533, 65_533);
            let connected = rustix::net::connect(&stream, &address).is_ok();
            libc::_exit(if done != 0 { 2 } else { i32::from(!connected) });
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) < 2, "{status}");
        libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn sockets_have_explicit_modes_and_groups() {
    let test = "sockets_have_explicit_modes_and_groups";
    if !has(test, &[Need::Root]) {
        return;
    }
    let dir = disk(8);
    let d = dir.path();
    let config = format!(
        "control_group = \"65534\"\n{}",
        with_keys(&two_disks(d, 8, ""), "b", "socket_group = \"daemon\"\n")
    );
    configure(d, &config);
    // The most permissive umask.
    let mut child = Command::new("sh")
        .args(["-c", "umask 0; exec \"$0\" --config \"$1\""])
        .arg(program().get_program())
        .arg(d.join("iod.toml"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    let of = |name: &str| {
        let meta = d.join(name).symlink_metadata().unwrap();
        (meta.mode() & 0o7777, meta.gid())
    };
    let found = [of("a"), of("b"), of("ctl")];
    std::fs::set_permissions(d, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let connects = [("a", 1), ("b", 1), ("b", 2)].map(|(name, group)| connects(&d.join(name), group));
    rtvirtio_testkit::site::signal(&child, rustix::process::Signal::TERM);
    child.wait().unwrap();
    assert_eq!(line, "ready\n");
    assert_eq!(connects, [false, true, false], "another user, by the group");
    assert_eq!(found, [(0o600, 0), (0o660, 1), (0o660, 65_534)]);
    let stderr = refused(d, &config.replace("\"daemon\"", "\"no-such-group\""));
    assert!(
        stderr.contains("disk \"b\"") && stderr.contains("there is no group \"no-such-group\""),
        "{stderr}"
    );
}

#[test]
fn a_check_finds_what_a_start_finds_and_changes_nothing() {
    let dir = disk(8);
    let d = dir.path();
    let config = two_disks(d, 8, "");
    let names = || {
        let mut names: Vec<_> = std::fs::read_dir(d).unwrap().flatten().map(|e| e.file_name()).collect();
        names.sort();
        names
    };
    configure(d, &config);
    let before = names();
    let stderr = check(d, &config).unwrap();
    assert!(stderr.contains("1 devices, 2 disks"), "{stderr}");
    assert_eq!(names(), before);
    // A check leaves a dead socket.
    drop(UnixListener::bind(d.join("a")).unwrap());
    check(d, &config).unwrap();
    assert!(d.join("a").exists());
    // A check keeps no lock. A running I/O domain of the same file is no error, one of another file
    // is.
    let iod = Iod::start(d, &config);
    let stderr = check(d, &config).unwrap();
    assert!(stderr.contains(&format!("process {} answers on", iod.pid())), "{stderr}");
    assert!(stderr.contains("in use by that domain"), "{stderr}");
    let other = disk(8);
    let same_disk = one(other.path(), &d.join("disk"), "");
    let stderr = check(other.path(), &same_disk).unwrap_err();
    assert!(stderr.contains("disk \"a\"") && stderr.contains(&format!("process {}", iod.pid())), "{stderr}");
    // The running I/O domain is not affected.
    let mut a = Client::connect(&d.join("a"), Options::default()).unwrap();
    assert_eq!(request(&mut a, &read(0, 4_096), None).0, 0);
    drop((a, iod));
    for (from, to, words) in [
        ("/disk\"", "/none\"", ["disk \"a\"", "No such file"]),
        ("offset = \"4MiB\"", "offset = \"2MiB\"", ["disks \"a\" and \"b\"", "lie on the same part"]),
        ("size = \"4MiB\"", "size = \"40MiB\"", ["disk \"a\"", "would end at byte"]),
        ("window = 4", "windoww = 4", ["line 4", "windoww"]),
    ] {
        let stderr = refused(d, &config.replace(from, to));
        assert!(words.iter().all(|word| stderr.contains(word)), "{to}: {stderr}");
    }
    let long = format!("{}/{}", d.display(), "x".repeat(120));
    for (to, why) in [("/no/such/dir/b", "/no/such/dir"), (long.as_str(), "`socket` of disk \"b\"")] {
        let stderr =
            check(d, &config.replace(&format!("{}/b\"", d.display()), &format!("{to}\""))).unwrap_err();
        assert!(stderr.contains("`socket` of disk \"b\"") && stderr.contains(why), "{stderr}");
    }
}

/// A truncated backing file: reads beyond its end fail, a write there extends it again.
#[test]
fn a_write_beyond_a_truncated_file_extends_it() {
    let dir = disk(8);
    let file = dir.path().join("disk");
    let _iod = Iod::start(dir.path(), &one(dir.path(), &file, ""));
    let mut a = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    let data: Vec<u8> = (0..4_096_u32).map(|i| (i % 251) as u8).collect();
    assert_eq!(request(&mut a, &write(8, 4_096), Some(&data)).0, 0);
    let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    open.set_len(1 << 20).unwrap();
    assert_eq!(request(&mut a, &read(8_192, 4_096), None).0, 1);
    // Discard and write-zeroes keep the length: at sector 8192, of 8 sectors, no flags.
    for kind in [11, 13] {
        let _ = request(&mut a, &deallocate(kind), Some(&range(8_192, 8, 0)));
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 1 << 20, "kind {kind}");
    }
    assert_eq!(request(&mut a, &write(8_192, 4_096), Some(&data)).0, 0);
    assert_eq!(std::fs::metadata(&file).unwrap().len(), (4 << 20) + 4_096);
    assert_eq!(request(&mut a, &read(8_192, 4_096), None), (0, data.clone()));
    assert_eq!(request(&mut a, &read(8, 4_096), None), (0, data), "what was not cut is there");
    assert_eq!(request(&mut a, &read(4_096, 4_096), None), (0, vec![0; 4_096]), "what was cut is zeroes");
    assert_eq!(request(&mut a, &read(8_208, 4_096), None).0, 1, "beyond the last write");
    // Never beyond the disk.
    assert_eq!(request(&mut a, &write(16_384, 4_096), Some(&[0; 4_096])).0, 1);
}
