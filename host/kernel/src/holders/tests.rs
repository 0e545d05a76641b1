use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use rtvirtio_testkit::{LoopDevice, Need, has};

use super::*;

const MIB: u64 = 1 << 20;

fn image(dir: &tempfile::TempDir, name: &str) -> PathBuf {
    let path = dir.path().join(name);
    File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    path
}

/// Directory with an image, where the test is root.
fn root_with_image(test: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    has(test, &[Need::Root]).then(|| {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = image(&dir, "image");
        (dir, path)
    })
}

fn attach(file: &Path, options: &[&str]) -> LoopDevice {
    LoopDevice::with_options(file, options).expect("losetup")
}

/// Child process, killed when dropped.
struct Process(Child);

impl Process {
    /// Starts a process with this file as its standard input.
    fn with(file: File) -> Self {
        Self(Command::new("sleep").arg("1000").stdin(file).spawn().unwrap())
    }

    fn qemu(drive: &str, more: &[&str]) -> Self {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-machine", "q35,accel=tcg", "-nodefaults", "-display", "none", "-S", "-m", "16"]);
        command.args(["-drive", drive, "-device", "virtio-blk-pci,drive=d", "-qmp", "stdio"]).args(more);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // QEMU's main loop answers a command: its devices are created and locked by then.
        let input = child.stdin.as_mut().unwrap();
        io::Write::write_all(input, b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
        let mut out = io::BufReader::new(child.stdout.take().unwrap());
        let mut said = String::new();
        while !said.contains("return") {
            assert!(io::BufRead::read_line(&mut out, &mut said).unwrap() > 0, "{said}");
        }
        child.stdout = Some(out.into_inner());
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Mount, removed when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn ext4(device: &Path, point: &Path) -> Self {
        std::fs::create_dir_all(point).unwrap();
        run("mkfs.ext4", &["-q", "-F", device.to_str().unwrap()]);
        run("mount", &[device.to_str().unwrap(), point.to_str().unwrap()]);
        Self(point.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

fn run(program: &str, args: &[&str]) {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let out = Command::new(program).args(args).env("PATH", path).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

fn refusal(path: &Path) -> String {
    match Claim::take(path, &[]) {
        Err(e @ ClaimError::InUse { .. }) => e.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

fn can_loop(test: &str) -> bool {
    has(test, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")])
}

fn open(path: &Path, writes: bool) -> File {
    OpenOptions::new().read(true).write(writes).open(path).unwrap()
}

#[test]
fn a_process_is_named_with_what_it_has_open() {
    let Some((dir, path)) = root_with_image("a_process_is_named_with_what_it_has_open") else { return };
    let reader = Process::with(open(&path, false));
    let writer = Process::with(open(&path, true));
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let said = refusal(&link);
    assert!(said.contains(&format!("process {} (sleep) has {}", reader.pid(), link.display())), "{said}");
    assert!(said.contains("open for reading"), "{said}");
    assert!(said.contains(&format!("process {} (sleep)", writer.pid())), "{said}");
    assert!(said.contains("open for writing"), "{said}");
    // A process that the caller excepts does not count.
    let claim = Claim::take(&path, &[reader.pid(), writer.pid()]).unwrap();
    drop((claim, reader, writer));
    // A free file can be claimed, and is free again after.
    drop(Claim::take(&path, &[]).unwrap());
    drop(Claim::take(&path, &[]).unwrap());
}

/// Counts while mapped, although its descriptor is closed.
#[test]
fn a_mapping_counts() {
    let Some((_dir, path)) = root_with_image("a_mapping_counts") else { return };
    let file = open(&path, true);
    let (ready, tell) = rustix::pipe::pipe().unwrap();
    let mut ready = File::from(ready);
    // SAFETY: the child makes system calls only, and is ended below.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping of an open file, and descriptors of this process alone.
        unsafe {
            let at = libc::mmap(std::ptr::null_mut(), 4_096, prot, flags, file.as_raw_fd(), 0);
            libc::write(tell.as_raw_fd(), [u8::from(at != libc::MAP_FAILED)].as_ptr().cast(), 1);
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
            loop {
                libc::pause();
            }
        }
    }
    drop((file, tell));
    let mut done = [0];
    io::Read::read_exact(&mut ready, &mut done).unwrap();
    // The pipe's other end is closed once all its descriptors are.
    assert_eq!(io::Read::read(&mut ready, &mut [0]).unwrap(), 0);
    let taken = Claim::take(&path, &[]);
    // SAFETY: a child of this process, which has not been waited for.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    assert_eq!(done, [1], "mapped");
    let said = taken.unwrap_err().to_string();
    assert!(said.contains(&format!("process {pid} ")) && said.contains("for writing"), "{said}");
}

/// A holder that goes within the time, such as udev's probes, is waited for.
#[test]
fn a_short_use_is_waited_for() {
    let Some((_dir, path)) = root_with_image("a_short_use_is_waited_for") else { return };
    let process = Process::with(open(&path, false));
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        drop(process);
    });
    drop(Claim::take(&path, &[]).unwrap());
    ends.join().unwrap();
}

#[test]
fn locks_are_seen_and_set() {
    let Some((_dir, path)) = root_with_image("locks_are_seen_and_set") else { return };
    // Open in this process, whose descriptors do not count.
    let other = open(&path, true);
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    assert!(refusal(&path).contains("(flock)"));
    rustix::fs::flock(&other, FlockOperation::Unlock).unwrap();
    assert_eq!(lock_image(&other, Sharing { writes: false, others_write: false }).unwrap(), Ok(()));
    assert!(refusal(&path).contains("QEMU's image locks"));
    drop(other);
    let claim = Claim::take(&path, &[]).unwrap();
    let other = open(&path, true);
    assert!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).is_err());
    assert!(lock_image(&other, Sharing { writes: false, others_write: false }).unwrap().is_err());
    drop(claim);
}

/// A disk, its partitions, the file below and a loop device above share their bytes.
#[test]
fn every_name_of_the_same_bytes_counts() {
    let test = "every_name_of_the_same_bytes_counts";
    if !can_loop(test) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let file = image(&dir, "image");
    let disk = attach(&file, &["--partscan"]);
    let [first, second] = [1, 2].map(|n| PathBuf::from(format!("{}p{n}", disk.0.display())));
    // As the kernel makes them from a partition table; it may read none here.
    for (number, first) in [("1", "2048"), ("2", "45056")] {
        run("addpart", &[disk.0.to_str().unwrap(), number, first, "40960"]);
    }
    // The backing file: the loop device is its user.
    let said = refusal(&file);
    assert!(said.contains("is the backing file of") && said.contains(disk.0.to_str().unwrap()), "{said}");
    let with = |opened: &Path, claimed: &Path| {
        let process = Process::with(open(opened, true));
        let said = Claim::take(claimed, &[]).map(drop).map_err(|e| e.to_string());
        said.map_err(|said| {
            let process = format!("process {} (sleep) has {}", process.pid(), opened.display());
            assert!(said.contains(&process), "{said}");
        })
    };
    assert!(with(&first, &disk.0).is_err(), "a partition, when the disk is meant");
    assert!(with(&disk.0, &first).is_err(), "the disk, when a partition is meant");
    assert!(with(&first, &second).is_ok(), "another partition is another thing");
    assert!(with(&file, &disk.0).is_err(), "the backing file, when the loop device is meant");
    assert!(with(&file, &second).is_err(), "the backing file, when a partition of the loop device is meant");
    // Another loop device over the same bytes, and one over other bytes.
    let above = attach(&first, &[]);
    let said = refusal(&disk.0);
    assert!(
        said.contains(&format!("{} is the backing file of {}", first.display(), above.0.display())),
        "{said}"
    );
    drop(above);
    drop(disk);
    let lower = attach(&file, &["--sizelimit", "33554432"]);
    let upper = attach(&file, &["--offset", "33554432"]);
    drop(Claim::take(&lower.0, &[]).unwrap());
    let whole = attach(&file, &[]);
    let said = refusal(&lower.0);
    assert!(said.contains(whole.0.to_str().unwrap()) && !said.contains(upper.0.to_str().unwrap()), "{said}");
}

#[test]
fn mounts_and_swap_are_uses() {
    let test = "mounts_and_swap_are_uses";
    if !can_loop(test) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let file = image(&dir, "image");
    let disk = attach(&file, &[]);
    let mounted = Mounted::ext4(&disk.0, &dir.path().join("mnt"));
    let before = std::fs::read(&file).unwrap();
    let said = refusal(&disk.0);
    let point = format!("{} is mounted on {}", disk.0.display(), mounted.0.display());
    assert!(said.contains(&point), "{said}");
    assert!(refusal(&file).contains(&point), "through the file");
    assert!(matches!(Claim::of_made(&disk.0), Err(ClaimError::InUse { .. })));
    assert!(before == std::fs::read(&file).unwrap(), "looking changes nothing");
    drop(mounted);
    drop(Claim::take(&disk.0, &[]).unwrap());
    run("mkswap", &["-q", disk.0.to_str().unwrap()]);
    run("swapon", &[disk.0.to_str().unwrap()]);
    let holders = Holders::find(&disk.0, &[]);
    run("swapoff", &[disk.0.to_str().unwrap()]);
    let holders = holders.unwrap();
    assert_eq!(holders.found, [Holder::Swap { what: disk.0.display().to_string() }]);
}

/// The kernel's refusal of an exclusive open, where no other holder is visible.
#[test]
fn an_exclusive_open_is_respected_and_made() {
    let test = "an_exclusive_open_is_respected_and_made";
    if !can_loop(test) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let disk = attach(&image(&dir, "image"), &[]);
    let exclusively = || OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&disk.0);
    let held = exclusively().unwrap();
    assert!(refusal(&disk.0).contains("exclusively"));
    drop(held);
    let claim = Claim::take(&disk.0, &[]).unwrap();
    assert_eq!(exclusively().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    assert!(open(&disk.0, true).as_raw_fd() >= 0, "a writer opens it by itself");
    drop(claim);
}

/// A stock QEMU with its default locking refuses the claim, and the claim refuses it.
#[test]
fn qemu_is_seen_and_sees_the_claim() {
    let test = "qemu_is_seen_and_sees_the_claim";
    if !has(test, &[Need::Root, Need::QEMU]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = image(&dir, "image");
    let drive = format!("file={},format=raw,if=none,id=d", path.display());
    let qemu = Process::qemu(&drive, &[]);
    let said = refusal(&path);
    assert!(said.contains(&format!("process {} (qemu-system-x86)", qemu.pid())), "{said}");
    // QEMU's locks are found even where its descriptors cannot be read.
    let holders = exclusive(&path).unwrap().unwrap_err();
    assert!(matches!(holders, Holder::ImageLock { .. }), "{holders}");
    drop(qemu);
    let claim = Claim::take(&path, &[]).unwrap();
    let mut refused = Command::new("qemu-system-x86_64");
    refused.args(["-machine", "q35,accel=tcg", "-nodefaults", "-display", "none", "-S", "-m", "16"]);
    refused.args(["-drive", &drive, "-device", "virtio-blk-pci,drive=d"]);
    let out = refused.output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("Failed to get \"write\" lock"), "{said}");
    drop(claim);
}

/// Descriptors of root's processes cannot be read by another user: that does not mean that there
/// are none.
#[test]
fn without_root_it_is_not_known() {
    let Some((dir, path)) = root_with_image("without_root_it_is_not_known") else { return };
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let process = Process::with(open(&path, true));
    let (mut said, mut tell) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the child becomes another user, allocates (glibc's locks are whole after fork), and
    // leaves by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let own = libc::c_uint::try_from(tell.as_raw_fd()).unwrap();
        // SAFETY: as above. What other tests have open and locked at this moment is not kept.
        let done = unsafe {
            libc::syscall(libc::SYS_close_range, 3, own - 1, 0);
            libc::syscall(libc::SYS_close_range, own + 1, libc::c_uint::MAX, 0);
            libc::syscall(libc::SYS_setresuid, 65_533, 65_533, 65_533)
        };
        let taken = Claim::take(&path, &[]);
        let fine = match &taken {
            Err(e @ ClaimError::Unseen { processes, .. }) => {
                processes.iter().any(|p| p.pid == process.pid())
                    && e.to_string().contains("cannot see the open files of")
                    && e.to_string().ends_with("run as root")
            }
            _ => false,
        };
        if !fine {
            let _ = io::Write::write_all(&mut tell, format!("{taken:?}").as_bytes());
        }
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(if done == 0 { i32::from(!fine) } else { 2 }) };
    }
    drop(tell);
    let mut taken = String::new();
    io::Read::read_to_string(&mut said, &mut taken).unwrap();
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "{status}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "{}", taken.get(..2000).unwrap_or(&taken));
}

#[test]
fn what_cannot_be_seen_is_said() {
    let unseen = |n: u32| -> Vec<Unseen> { (1..=n).map(|pid| Unseen { pid, program: "p".into() }).collect() };
    assert_eq!(describe_unseen(&[]), None);
    let said = describe_unseen(&unseen(5)).unwrap();
    assert!(
        said.starts_with("cannot see the open files of 5 processes: 1 (p), 2 (p), 3 (p), ...; "),
        "{said}"
    );
    let missing = Claim::take(Path::new("/nowhere/disk"), &[]).unwrap_err();
    assert!(missing.to_string().contains("/nowhere/disk"), "{missing}");
    assert!(Claim::take(Path::new("/dev/null"), &[]).is_err());
}
