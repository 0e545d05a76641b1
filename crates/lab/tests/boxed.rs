//! The box does what it is for: cgroup v2, BFQ on null_blk, and stock guests under its own KVM.

use std::process::Command;
use std::time::{Duration, Instant};

use rtvirtio_lab::boxed::{self, BoxImage, BoxRun};
use rtvirtio_lab::image;

fn the_box(test: &str) -> Option<BoxImage> {
    let skip = |reason: String| {
        assert!(std::env::var_os("RTVIRTIO_NO_SKIP").is_none(), "{test} may not be skipped: {reason}");
        eprintln!("SKIP {test}: {reason}");
        None
    };
    let found = Command::new("qemu-system-x86_64").arg("--version").output();
    if let Err(e) = found {
        return skip(format!("qemu-system-x86_64: {e}"));
    }
    match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => Some(image),
        Err(e) => skip(e.to_string()),
    }
}

/// Each line stops the script when it fails.
const FUNCTIONS: &str = r#"
set -eu
say() { echo "$(cut -d' ' -f1 /proc/uptime) $*"; }
say up
grep -qw io /sys/fs/cgroup/cgroup.controllers
! grep -q 'cgroup ' /proc/mounts
echo bfq >/sys/block/nullb0/queue/scheduler
grep -q '\[bfq\]' /sys/block/nullb0/queue/scheduler
echo +io >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/rtvirtio
echo 300 >/sys/fs/cgroup/rtvirtio/io.bfq.weight
grep -qx 'default 300' /sys/fs/cgroup/rtvirtio/io.bfq.weight
echo "$(cat /sys/block/nullb0/dev) riops=500" >/sys/fs/cgroup/rtvirtio/io.max
grep -q 'riops=500' /sys/fs/cgroup/rtvirtio/io.max
say cgroup
fio --name=x --filename=/dev/nullb0 --rw=randread --bs=4k --direct=1 --ioengine=psync --time_based --runtime=1 \
    --output-format=json >fio.json
grep -q '"99.990000"' fio.json
say fio
test -c /dev/kvm
grep -qw kvm_amd /proc/modules
"#;

#[test]
fn cgroup_v2_bfq_and_exit_status() {
    let Some(image) = the_box("cgroup_v2_bfq_and_exit_status") else { return };
    let script = format!("{FUNCTIONS}\nexit 7\n");
    let out = boxed::run(&image, &BoxRun::new(&script, Duration::from_secs(120)), &|l| eprintln!("box: {l}"))
        .unwrap();
    assert_eq!(out.exit_code, Some(7), "{}\n{}", out.output, out.console);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
}

#[test]
fn script_that_hangs_is_ended() {
    let Some(image) = the_box("script_that_hangs_is_ended") else { return };
    let start = Instant::now();
    let run = BoxRun::new("echo waiting; sleep 1000", Duration::from_secs(15));
    let error = boxed::run(&image, &run, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("within 15 s") && error.contains("waiting"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(25));
}
