//! Functions of the box: cgroup v2, BFQ on null_blk, and stock guests under its own KVM.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rtvirtio_testbed::boxed::{self, BoxCommand, BoxError, BoxImage, BoxRun};
use rtvirtio_testbed::image;
use rtvirtio_testbed::qemu::{Accel, DiskRegion, GUEST_DISK, QemuConfig, QemuGuest};
use rtvirtio_testkit::{Need, has, skip};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::KvmProbe;

fn the_box(test: &str) -> Option<BoxImage> {
    if !has(test, &[Need::QEMU]) {
        return None;
    }
    match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => Some(image),
        Err(e) => {
            skip(test, &e.to_string());
            None
        }
    }
}

/// Each line stops the script when it fails.
const FUNCTIONS: &str = r#"
set -eu
say() { echo "$(cut -d' ' -f1 /proc/uptime) $*"; }
say up
grep -qw io /sys/fs/cgroup/cgroup.controllers
if grep -q '^[^ ]* [^ ]* cgroup ' /proc/mounts; then echo 'cgroup v1 is mounted'; exit 1; fi
echo bfq >/sys/block/nullb0/queue/scheduler
grep -q '\[bfq\]' /sys/block/nullb0/queue/scheduler
echo +io >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/rtvirtio
echo +io >/sys/fs/cgroup/rtvirtio/cgroup.subtree_control
echo 300 >/sys/fs/cgroup/rtvirtio/io.bfq.weight
grep -qx 'default 300' /sys/fs/cgroup/rtvirtio/io.bfq.weight
echo "$(cat /sys/block/nullb0/dev) riops=500" >/sys/fs/cgroup/rtvirtio/io.max
grep -q 'riops=500' /sys/fs/cgroup/rtvirtio/io.max
echo "$(cat /sys/block/nullb0/dev) riops=max" >/sys/fs/cgroup/rtvirtio/io.max
say cgroup
fio --name=x --filename=/dev/nullb0 --rw=randread --bs=4k --direct=1 --ioengine=psync --time_based --runtime=1 \
    --output-format=json >fio.json
grep -q '"99.990000"' fio.json
say fio
test -c /dev/kvm
grep -qw kvm_amd /proc/modules
"#;

#[test]
fn the_exit_status_and_what_a_command_leaves_come_out() {
    let Some(image) = the_box("the_exit_status_and_what_a_command_leaves_come_out") else { return };
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let script = "mkdir d; echo \"$1\" >d/words; test -t 1 || echo no terminal; exit 7";
    let words = ["sh", "-c", script, "sh", "it's; two"].map(str::to_owned);
    let command = BoxCommand {
        words: &words,
        programs: &[],
        results: &dir.path().join("results"),
        timeout: Duration::from_secs(120),
        cancel: &AtomicBool::new(false),
    };
    let out = boxed::run_command(&image, &command, &|l| eprintln!("box: {l}")).unwrap();
    assert_eq!(out.exit_code, Some(7), "{}\n{}", out.output, out.console);
    assert_eq!(out.output.trim(), "no terminal");
    assert_eq!(fs::read_to_string(dir.path().join("results/d/words")).unwrap(), "it's; two\n");
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());

    let error = boxed::run_command(&image, &command, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("is not empty"), "{error}");
    let stopped = BoxCommand { cancel: &AtomicBool::new(true), results: &dir.path().join("none"), ..command };
    let error = boxed::run_command(&image, &stopped, &|_| ()).unwrap_err();
    assert!(matches!(error, BoxError::Cancelled), "{error}");
}

#[test]
fn script_that_hangs_is_ended() {
    let Some(image) = the_box("script_that_hangs_is_ended") else { return };
    // A busy machine boots slowly: each try has twice the time, until the script has begun.
    let ended = |first: u64, run: &dyn Fn(Duration) -> BoxRun<'static>, words: &str| {
        let began = [1, 2, 4, 8, 16].map(|n| n * first).into_iter().any(|seconds| {
            let run = run(Duration::from_secs(seconds));
            let error = boxed::run(&image, &run, &|_| ()).unwrap_err().to_string();
            assert!(error.contains(&format!("{words} {seconds} s")), "{error}");
            error.contains("waiting")
        });
        assert!(began, "the script does not begin");
    };
    ended(12, &|limit| BoxRun::new("echo waiting; sleep 1000", limit), "within");
    // A silent script has a timeout of its own.
    let quiet = |quiet| BoxRun { quiet, ..BoxRun::new("echo waiting; sleep 1000", Duration::from_secs(600)) };
    ended(3, &quiet, "printed nothing within");
}

#[test]
fn a_box_that_cannot_boot_is_told_with_its_console() {
    let Some(image) = the_box("a_box_that_cannot_boot_is_told_with_its_console") else { return };
    let mut run = BoxRun::new("echo never", Duration::from_secs(120));
    // Too little memory to unpack the initramfs.
    run.memory = Bytes(288 << 20);
    let error = boxed::run(&image, &run, &|l| eprintln!("box: {l}")).unwrap_err().to_string();
    assert!(error.contains("did not boot in 3 tries") && error.contains("[    "), "{error}");
}

#[test]
fn a_stock_guest_runs_under_the_boxs_kvm() {
    let Some(image) = the_box("a_stock_guest_runs_under_the_boxs_kvm") else { return };
    // This very program goes into the box and runs the test below there.
    let me = std::env::current_exe().unwrap();
    let name = me.file_name().unwrap().to_str().unwrap().to_owned();
    let script = format!("{FUNCTIONS}\n{name} --ignored --exact guest_under_kvm --nocapture\n");
    let mut run = BoxRun::new(&script, Duration::from_secs(300));
    let programs = [me.as_path()];
    run.programs = &programs;
    let out = boxed::run_with_guests(&image, &run, &|l| eprintln!("box: {l}"), &|_| false).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    assert!(out.output.contains("1 passed"), "{}", out.output);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
}

fn config_in_box() -> QemuConfig {
    let image = image::ensure(Path::new("/nonexistent"), &|_| ()).unwrap();
    let group = PathBuf::from("/sys/fs/cgroup/rtvirtio/vm1");
    fs::create_dir_all(&group).unwrap();
    let size = Bytes(64 << 20);
    let disk = DiskRegion { path: "/dev/nullb0".into(), offset: size, size };
    let mut config = QemuConfig::new("vm1", image, disk, Path::new("/run/rtvirtio"));
    config.accel = Accel::Kvm;
    config.cgroup_procs = vec![group.join("cgroup.procs")];
    config
}

/// Tries per guest. The box's KVM runs on emulated SVM, where about one guest in twenty is reset
/// while it boots (QEMU 7.2, more when the machine is busy): a flaw of the emulation, not of the
/// tested code.
const TRIES: usize = 4;

fn boot(config: &QemuConfig) -> QemuGuest {
    let tries = (1..TRIES).map(|_| QemuGuest::start(config)).find_map(Result::ok);
    tries.unwrap_or_else(|| QemuGuest::start(config).unwrap())
}

#[test]
#[ignore = "runs inside the box; a_stock_guest_runs_under_the_boxs_kvm starts it there"]
fn guest_under_kvm() {
    assert_eq!(std::env::var("RTVIRTIO_GUEST_IMAGE").as_deref(), Ok("/guest"), "this is not the box");
    let start = Instant::now();
    let first = config_in_box();
    let probe = || rtvirtio_vmm::probe_kvm(&first.image.kernel, &first.image.initrd).unwrap();
    let found = (0..TRIES).map(|_| probe()).find(|p| *p == KvmProbe::Works);
    assert_eq!(found, Some(KvmProbe::Works), "{:?}", probe());
    println!("KVM found to work in {:.1} s", start.elapsed().as_secs_f64());

    let mut guest = boot(&first);
    println!("one guest booted in {:.1} s under KVM", guest.boot_time().as_secs_f64());
    assert!(guest.qmp().unwrap().query_kvm().unwrap().enabled);
    let cpu = guest.qmp().unwrap().query_cpus_fast().unwrap()[0].thread_id;
    let pid = guest.handle().process.pid;
    let comm = fs::read_to_string(format!("/proc/{pid}/task/{cpu}/comm")).unwrap();
    assert_eq!(comm.trim(), "CPU 0/KVM");
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap().trim(), "0::/rtvirtio/vm1");
    let filename = format!("--filename={GUEST_DISK}");
    let fio = [
        "fio",
        "--name=x",
        &filename,
        "--rw=randread",
        "--bs=4k",
        "--direct=1",
        "--ioengine=psync",
        "--rate_iops=50",
        "--time_based",
        "--runtime=2",
        "--output-format=json",
    ];
    let out = guest.exec(&fio, Duration::from_secs(60)).unwrap();
    let result: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let reads = result["jobs"][0]["read"]["total_ios"].as_u64().unwrap();
    assert!(reads > 0);
    println!("{reads} reads in 2 s at 50/s");
    // The requests are accounted to the guest's cgroup.
    let stat = fs::read_to_string("/sys/fs/cgroup/rtvirtio/vm1/io.stat").unwrap();
    let ios = stat.split_whitespace().find_map(|f| f.strip_prefix("rios=")).unwrap().parse::<u64>().unwrap();
    assert!(ios >= reads, "{stat}");
    guest.write_file("/sys/block/vda/queue/scheduler", b"bfq").unwrap();
    guest.stop().unwrap();
    assert!(!Path::new("/run/rtvirtio").exists());
    fs::remove_dir("/sys/fs/cgroup/rtvirtio/vm1").unwrap();
}
