//! Real guests under TCG, from Debian's packages to fio's result.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_kernel::ProcessId;
use rtvirtio_testbed::image::{self, GuestImage, Kernel};
use rtvirtio_testbed::qemu::{
    DiskRegion, GUEST_DISK, GuestDisk, GuestState, QemuConfig, QemuError, QemuGuest,
};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{HANG, Need, has, skip};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::agent::NEEDED;
use rtvirtio_vmm::spawn::Lifetime;
use rtvirtio_vmm::{GuestAgent, KvmProbe, VmmError};

const DISK_SIZE: u64 = 64 << 20;

/// A disk file, a run directory and the image; all but the image's cache is removed with it.
struct Fixture {
    dir: tempfile::TempDir,
    image: GuestImage,
}

fn fixture(test: &str) -> Option<Fixture> {
    fixture_of(test, Kernel::Standard)
}

fn fixture_of(test: &str, kernel: Kernel) -> Option<Fixture> {
    if !has(test, &[Need::QEMU]) {
        return None;
    }
    let image = match image::ensure_kernel(&image::default_cache(), kernel, &|line| eprintln!("{line}")) {
        Ok(image) => image,
        Err(e) => {
            skip(test, &e.to_string());
            return None;
        }
    };
    // Not on tmpfs: the disk is opened for direct I/O.
    let dir = rtvirtio_testkit::disk_dir().unwrap();
    Some(Fixture { dir, image })
}

impl Fixture {
    fn config(&self, name: &str) -> QemuConfig {
        let disk = self.dir.path().join(format!("{name}.disk"));
        fs::write(&disk, vec![0x5a; DISK_SIZE as usize]).unwrap();
        let disk = DiskRegion { path: disk, offset: Bytes(DISK_SIZE / 2), size: Bytes(DISK_SIZE / 2) };
        QemuConfig::new(name, self.image.clone(), disk, &self.run_dir())
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }
}

/// The kernel's release shows PREEMPT_RT, and the guest's disk, elevators and cyclictest work as
/// with the standard one.
#[test]
fn a_guest_boots_the_preempt_rt_kernel() {
    let Some(fixture) = fixture_of("a_guest_boots_the_preempt_rt_kernel", Kernel::Rt) else { return };
    assert!(fixture.image.release.ends_with("-rt-amd64"), "{}", fixture.image.release);
    let config = QemuConfig { lock_memory: true, ..fixture.config("rt") };
    let mut guest = QemuGuest::start(&config).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", guest.handle().process.pid)).unwrap();
    let locked = status.lines().find_map(|l| l.strip_prefix("VmLck:")?.trim().strip_suffix(" kB")).unwrap();
    assert!(locked.parse::<u64>().unwrap() << 10 >= config.memory.0, "{locked} kB are locked");
    eprintln!("one PREEMPT_RT guest booted in {:.1} s under TCG", guest.boot_time().as_secs_f64());
    let said = |guest: &mut QemuGuest, argv: &[&str]| {
        let out = guest.exec(argv, Duration::from_secs(60)).unwrap();
        assert!(out.success(), "{argv:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let version = said(&mut guest, &["uname", "-v"]);
    assert!(version.contains(" PREEMPT_RT "), "{version}");
    assert_eq!(said(&mut guest, &["uname", "-r"]).trim(), fixture.image.release);
    guest.write_file("/sys/block/vda/queue/scheduler", b"bfq").unwrap();
    let ticks = said(&mut guest, &["cyclictest", "-q", "-m", "-p", "90", "-i", "1000", "-l", "200"]);
    assert!(ticks.contains("C:    200"), "{ticks}");
    guest.stop().unwrap();
}

#[test]
fn fio_knobs_and_a_clean_end() {
    let Some(fixture) = fixture("fio_knobs_and_a_clean_end") else { return };
    let mut guest = QemuGuest::start(&fixture.config("vm1")).unwrap();
    eprintln!("one guest booted in {:.1} s under TCG", guest.boot_time().as_secs_f64());

    // The monitor and the kernel agree on the threads.
    let threads = guest.qmp().unwrap().query_iothreads().unwrap();
    let pid = guest.handle().process.pid;
    let comm = fs::read_to_string(format!("/proc/{pid}/task/{}/comm", threads[0].thread_id)).unwrap();
    assert_eq!(comm.trim(), "IO io0");

    // Its disk is the slice, not the whole file.
    let size = guest.read_file("/sys/block/vda/size", 64).unwrap();
    assert_eq!(String::from_utf8(size).unwrap().trim(), (DISK_SIZE / 2 / 512).to_string());

    // The clock that fio measures with.
    let clock =
        guest.read_file("/sys/devices/system/clocksource/clocksource0/current_clocksource", 64).unwrap();
    assert_eq!(String::from_utf8(clock).unwrap().trim(), "tsc");

    let out = guest
        .exec(
            &[
                "fio",
                "--name=light",
                &format!("--filename={GUEST_DISK}"),
                "--rw=randread",
                "--bs=4k",
                "--direct=1",
                "--ioengine=psync",
                "--rate_iops=100",
                "--time_based",
                "--runtime=2",
                "--output-format=json",
            ],
            Duration::from_secs(60),
        )
        .unwrap();
    assert!(out.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let result: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let reads = result["jobs"][0]["read"]["total_ios"].as_u64().unwrap();
    assert!((150..=250).contains(&reads), "{reads} reads in 2 s at 100/s");
    assert!(result["jobs"][0]["read"]["clat_ns"]["percentile"]["99.990000"].as_u64().unwrap() > 0);

    guest.write_file("/sys/block/vda/queue/scheduler", b"bfq").unwrap();
    let elevators = guest.read_file("/sys/block/vda/queue/scheduler", 256).unwrap();
    assert!(String::from_utf8(elevators).unwrap().contains("[bfq]"));
    guest.write_file("/sys/block/vda/queue/iosched/slice_idle", b"3").unwrap();
    assert_eq!(guest.read_file("/sys/block/vda/queue/iosched/slice_idle", 64).unwrap(), b"3\n");
    // A value that the kernel refuses is an error, and the attribute keeps its value.
    let error = guest.write_file("/sys/block/vda/queue/scheduler", b"nonsense").unwrap_err();
    assert!(error.to_string().contains("/sys/block/vda/queue/scheduler"), "{error}");
    let elevators = guest.read_file("/sys/block/vda/queue/scheduler", 256).unwrap();
    assert!(String::from_utf8(elevators).unwrap().contains("[bfq]"));

    // Files larger than one message, both ways; errors of programs; time limits.
    let big: Vec<u8> = (0..300_000_u32).map(|i| (i % 251) as u8).collect();
    guest.write_file("/tmp/big", &big).unwrap();
    assert_eq!(guest.read_file("/tmp/big", 1 << 20).unwrap(), big);
    assert!(guest.read_file("/tmp/big", 1000).is_err());
    assert!(guest.read_file("/dev/zero", 100_000).is_err());
    let out = guest.exec(&["sh", "-c", "echo out; echo err >&2; exit 3"], HANG).unwrap();
    assert_eq!((out.code, out.stdout, out.stderr), (Some(3), b"out\n".to_vec(), b"err\n".to_vec()));
    assert!(guest.exec(&["no-such-program"], HANG).is_err());
    let start = Instant::now();
    assert!(guest.exec(&["sleep", "1000"], Duration::from_millis(300)).is_err());
    assert!(start.elapsed() < HANG);
    let gone =
        "n=0; while pgrep -f 'sleep 100[0]'; do n=$((n + 1)); test $n -lt 300 || exit 1; sleep 0.2; done";
    let left = guest.exec(&["sh", "-c", gone], HANG).unwrap();
    assert!(left.success(), "the program that timed out still runs: {left:?}");

    // A second guest of the same name is refused, and does not harm the first.
    let error = QemuGuest::start(&fixture.config("vm1")).unwrap_err();
    assert!(matches!(error, QemuError::Busy { .. }), "{error}");
    guest.agent().unwrap().ping().unwrap();

    let process = guest.handle().process.clone();
    guest.stop().unwrap();
    assert!(!process.is_alive());
    assert!(ProcessId::find(pid).unwrap().is_none(), "not even a zombie");
    assert!(!fixture.run_dir().exists());
}

/// As RHEL ships the agent: the error names disabled commands, and how to allow them.
#[test]
fn a_disabled_command_of_the_agent_is_named() {
    let Some(fixture) = fixture("a_disabled_command_of_the_agent_is_named") else { return };
    let config = fixture.config("vm1");
    let mut guest = QemuGuest::start(&config).unwrap();
    guest.agent().unwrap().require(&NEEDED).unwrap();
    // The guest's init starts the agent by its name, so it starts this wrapper.
    let wrapper = b"#!/bin/sh\nexec /usr/bin/qemu-ga.real \"$@\" -b guest-exec,guest-file-open\n";
    let end = "mv /usr/bin/qemu-ga /usr/bin/qemu-ga.real && mv /tmp/qemu-ga /usr/bin/qemu-ga && \
               chmod 755 /usr/bin/qemu-ga && (sleep 1; kill $(pidof qemu-ga)) >/dev/null 2>&1 &";
    guest.write_file("/tmp/qemu-ga", wrapper).unwrap();
    assert!(guest.exec(&["sh", "-c", end], HANG).unwrap().success());
    guest.close_agent();
    let socket = guest.handle().agent_socket();
    let connect = || GuestAgent::connect(&socket, Duration::from_secs(5));
    wait_for("the agent with disabled commands", || {
        connect().is_ok_and(|mut agent| {
            agent.require(&NEEDED).is_err_and(|e| matches!(e, VmmError::Disabled { .. }))
        })
    });
    let mut agent = connect().unwrap();
    let all = agent.require(&NEEDED).unwrap_err().to_string();
    assert!(all.contains("does not allow guest-exec, guest-file-open: allow them inside the guest"), "{all}");
    assert!(all.contains("/etc/sysconfig/qemu-ga") && all.contains("restart qemu-guest-agent"), "{all}");
    // Each command names itself, also as the first one.
    let one = agent.exec(&["true"], HANG).unwrap_err();
    assert!(matches!(&one, VmmError::Disabled { commands, .. } if commands == "guest-exec"), "{one}");
    let one = agent.read_file("/proc/version", 4096).unwrap_err();
    assert!(matches!(&one, VmmError::Disabled { commands, .. } if commands == "guest-file-open"), "{one}");
    // The agent still answers other commands.
    agent.ping().unwrap();
}

#[test]
fn guest_that_dies_mid_run_is_told_with_the_cause() {
    let Some(fixture) = fixture("guest_that_dies_mid_run_is_told_with_the_cause") else { return };
    let mut guest = QemuGuest::start(&fixture.config("vm1")).unwrap();
    let process = guest.handle().process.clone();
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(700));
        process.signal(rustix::process::Signal::KILL);
    });
    let start = Instant::now();
    let error = guest.exec(&["sleep", "1000"], HANG * 2).unwrap_err();
    killer.join().unwrap();
    assert!(start.elapsed() < HANG);
    let text = error.to_string();
    assert!(text.contains("guest vm1 is gone (signal: 9 (SIGKILL))"), "{text}");
    assert!(text.contains("rtvirtio-guest: ready after"), "{text}");
    drop(guest);
    assert!(!fixture.run_dir().exists());
}

/// The disk's first block says when the guest is to hang, and when to panic.
#[test]
fn a_guest_that_hangs_is_told_from_one_that_panicked() {
    let Some(fixture) = fixture("a_guest_that_hangs_is_told_from_one_that_panicked") else { return };
    let config = fixture.config("vm1");
    let GuestDisk::Region(disk) = config.disk.clone() else { panic!("{:?}", config.disk) };
    let say = |word: &str| {
        let file = fs::OpenOptions::new().write(true).open(&disk.path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, word.as_bytes(), disk.offset.0).unwrap();
        file.sync_all().unwrap();
    };
    let until = |word: &str| {
        let block = format!("dd if={GUEST_DISK} bs=4096 count=1 iflag=direct 2>/dev/null");
        format!("until {block} | grep -q {word}; do sleep 0.2; done")
    };
    let mut guest = QemuGuest::start(&config).unwrap();
    assert_eq!(guest.examine().0, GuestState::Answers);
    guest.qmp().unwrap().execute("stop", None).unwrap();
    assert_eq!(guest.examine().0, GuestState::Paused("paused".to_owned()));
    guest.qmp().unwrap().execute("cont", None).unwrap();
    let (hang, panic) = (until("hang"), until("panic"));
    let script = format!("{hang}; kill -STOP $PPID; {panic}; echo c > /proc/sysrq-trigger");
    guest.spawn(&["sh", "-c", &script]).unwrap();
    say("hang");
    wait_for("silence of the agent", || guest.examine().0 == GuestState::Hangs);
    say("panic");
    wait_for("the end of QEMU", || !guest.is_alive());
    let (state, words) = guest.examine();
    assert!(state == GuestState::Panicked && words.contains("Kernel panic"), "{state}{words}");
}

#[test]
fn guest_that_panics_is_told_with_its_console() {
    let Some(fixture) = fixture("guest_that_panics_is_told_with_its_console") else { return };
    let mut config = fixture.config("vm1");
    // A disk image is no initramfs: the kernel finds no root file system.
    config.image.initrd = fixture.dir.path().join("vm1.disk");
    let error = QemuGuest::start(&config).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, QemuError::Gone { .. }) && text.contains("Kernel panic"), "{text}");
    assert!(!fixture.run_dir().exists());
}

#[test]
fn three_at_once_and_found_again_from_a_handle() {
    let Some(fixture) = fixture("three_at_once_and_found_again_from_a_handle") else { return };
    let configs: Vec<QemuConfig> = (1..=3)
        .map(|i| QemuConfig { lifetime: Lifetime::Detached, ..fixture.config(&format!("vm{i}")) })
        .collect();
    let start = Instant::now();
    let guests: Vec<QemuGuest> = thread::scope(|scope| {
        let starts: Vec<_> = configs.iter().map(|c| scope.spawn(|| QemuGuest::start(c).unwrap())).collect();
        starts.into_iter().map(|s| s.join().unwrap()).collect()
    });
    eprintln!("three guests booted in {:.1} s under TCG", start.elapsed().as_secs_f64());
    let handles: Vec<_> = guests.into_iter().map(QemuGuest::detach).collect();
    for handle in &handles {
        assert!(handle.is_alive());
        let mut guest = QemuGuest::attach(handle).unwrap();
        let out = guest.exec(&["uname", "-r"], HANG).unwrap();
        assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), fixture.image.release);
        // Dropping an attached guest leaves it running.
        drop(guest);
        assert!(handle.is_alive());
    }
    for handle in &handles {
        handle.kill().unwrap();
        assert!(!handle.is_alive());
    }
    assert!(!fixture.run_dir().exists());
}

#[test]
fn kvm_probe_gives_an_answer_with_a_reason() {
    let Some(fixture) = fixture("kvm_probe_gives_an_answer_with_a_reason") else { return };
    let start = Instant::now();
    let probe = rtvirtio_vmm::probe_kvm(&fixture.image.kernel, &fixture.image.initrd).unwrap();
    eprintln!("KVM here: {probe:?}, found in {:.1} s", start.elapsed().as_secs_f64());
    assert!(start.elapsed() < HANG);
    match probe {
        KvmProbe::Works => {
            let config = QemuConfig { accel: rtvirtio_testbed::qemu::Accel::Kvm, ..fixture.config("vm1") };
            // The probe's result must hold for a guest.
            QemuGuest::start(&config).unwrap().stop().unwrap();
        }
        KvmProbe::Broken { reason } | KvmProbe::Absent { reason } => assert!(reason.len() > 10, "{reason}"),
    }
}
