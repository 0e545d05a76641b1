//! io.cost and io.latency on a real kernel: set up, read back, weights that act, put back. In the
//! box, because both need cgroup v2, which the machine that runs the tests may not have.

use std::path::Path;
use std::time::Duration;

use rtvirtio_testbed::boxed::{self, BoxRun};
use rtvirtio_testbed::image;
use rtvirtio_testkit::site::PROFILE;

/// A run takes about 30 s on two free cores.
const LIMIT: Duration = Duration::from_secs(600);

/// Everything is checked inside; each line stops the script when it fails.
const SCRIPT: &str = include_str!("boxed/io-cost.sh");

#[test]
fn io_cost_divides_a_device_by_weights_and_is_put_back() {
    let test = "io_cost_divides_a_device_by_weights_and_is_put_back";
    let image = match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => image,
        Err(e) => return rtvirtio_testkit::skip(test, &e.to_string()),
    };
    let mut run = BoxRun::new(SCRIPT, LIMIT);
    let programs = [Path::new(env!("CARGO_BIN_EXE_rtvirtio"))];
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/boxed").join(name);
    let (spec, plan) = (file("io-cost.toml"), file("io-cost.plan"));
    let files = [
        ("/root/io-cost.toml", spec.as_path()),
        ("/root/io-cost.plan", plan.as_path()),
        ("/root/state/profiles/nullb0.json", Path::new(PROFILE)),
    ];
    (run.programs, run.files) = (&programs, &files);
    let out = boxed::run(&image, &run, &|l| eprintln!("box: {l}")).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    if out.output.contains("the kernel has no io.cost") {
        return rtvirtio_testkit::skip(test, "the box's kernel has no io.cost, and says so");
    }
    assert!(out.output.contains("put back, no differences"), "{}", out.output);
    let has_latency = out.output.contains("io.latency is put back");
    assert!(has_latency || out.output.contains("the kernel has no io.latency"), "{}", out.output);
    if !has_latency {
        rtvirtio_testkit::skip(test, "the box's kernel has no io.latency, and says so");
    }
}
