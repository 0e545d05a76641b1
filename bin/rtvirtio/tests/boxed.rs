//! The loop on a host as users have it: cgroup v2 only, BFQ as a module, guests under KVM, and a VM
//! in groups as libvirt makes them there. Inside the box, because the machine that runs the tests
//! may have none of it.

use std::path::Path;
use std::time::Duration;

use rtvirtio_testbed::boxed::{self, BoxOutcome, BoxRun};
use rtvirtio_testbed::image;

/// A run takes 35 to 90 s on two cores, and 40 s more for each guest that emulated SVM resets.
const LIMIT: Duration = Duration::from_secs(600);

/// Everything is checked inside; each line stops the script when it fails.
const SCRIPT: &str = include_str!("boxed/loop.sh");

#[test]
fn the_loop_on_cgroup_v2_under_kvm() {
    let test = "the_loop_on_cgroup_v2_under_kvm";
    let image = match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => image,
        Err(e) => {
            rtvirtio_testkit::skip(test, &e.to_string());
            return;
        }
    };
    let mut run = BoxRun::new(SCRIPT, LIMIT);
    let lab = rtvirtio_testkit::site::program("rtvirtio-lab");
    let programs = [Path::new(env!("CARGO_BIN_EXE_rtvirtio")), lab.as_path()];
    let files = [
        ("/root/s.toml", Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed/s.toml"))),
        ("/root/p.plan", Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed/p.plan"))),
    ];
    run.programs = &programs;
    run.files = &files;
    // A nested guest's QEMU that ends in the middle of a run, as `emulation failure` of nested
    // pages does it, or a nested guest that hangs.
    let gone = ["is the guest still alive", "cannot connect to guest agent", "Connection reset by peer"];
    let hangs = |line: &str| line.contains("guest agent") && line.contains("no answer within");
    let is_gone = |line: &str| hangs(line) || gone.iter().any(|g| line.contains(g));
    let lost = |out: &BoxOutcome| out.exit_code != Some(0) && out.output.lines().any(is_gone);
    let out = boxed::run_with_guests(&image, &run, &|l| eprintln!("box: {l}"), &lost).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    assert!(out.output.contains("every byte as before"), "{}", out.output);
    assert!(out.output.contains("the scope was left as it was"), "{}", out.output);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
}
