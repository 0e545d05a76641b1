//! The loop on a host as users have it: cgroup v2 only, BFQ as a module, guests under KVM, and a VM
//! in groups as libvirt makes them there. Inside the box, because the machine that runs the tests
//! may have none of it.

// In a directory: cargo builds each file of `tests` itself as a test program.
#[path = "boxed/inside.rs"]
mod inside;

use std::path::Path;

use inside::{LIMIT, file, ok_with_guests, the_box};
use rtvirtio_testbed::boxed::{BoxOutcome, BoxRun};
use rtvirtio_testbed::image::Kernel;

/// Everything is checked inside; each line stops the script when it fails.
const SCRIPT: &str = include_str!("boxed/loop.sh");

/// A run takes 35 to 90 s on two cores, and 40 s more for each guest that emulated SVM resets.
#[test]
fn the_loop_on_cgroup_v2_under_kvm() {
    let Some(image) = the_box("the_loop_on_cgroup_v2_under_kvm", Kernel::Standard) else { return };
    let lab = rtvirtio_testkit::site::program("rtvirtio-lab");
    let programs = [Path::new(env!("CARGO_BIN_EXE_rtvirtio")), lab.as_path()];
    let (spec, plan) = (file("s.toml"), file("p.plan"));
    let files = [("/root/s.toml", spec.as_path()), ("/root/p.plan", plan.as_path())];
    let run = BoxRun { programs: &programs, files: &files, ..BoxRun::new(SCRIPT, LIMIT) };
    // A nested guest's QEMU that ends in the middle of a run, as `emulation failure` of nested
    // pages does it, or a nested guest that hangs.
    let gone = ["is the guest still alive", "cannot connect to guest agent", "Connection reset by peer"];
    let hangs = |line: &str| line.contains("guest agent") && line.contains("no answer within");
    let is_gone = |line: &str| hangs(line) || gone.iter().any(|g| line.contains(g));
    let lost = |out: &BoxOutcome| out.exit_code != Some(0) && out.output.lines().any(is_gone);
    let output = ok_with_guests(&image, &run, &lost);
    assert!(output.contains("every byte as before"), "{output}");
    assert!(output.contains("the scope was left as it was"), "{output}");
}
