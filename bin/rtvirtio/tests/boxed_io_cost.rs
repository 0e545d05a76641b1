//! io.cost and io.latency on a real kernel: set up, read back, weights that act, put back. In the
//! box, because both need cgroup v2, which the machine that runs the tests may not have.

#[path = "boxed/inside.rs"]
mod inside;

use std::path::Path;

use inside::{LIMIT, file, ok, the_box};
use rtvirtio_testbed::boxed::BoxRun;
use rtvirtio_testbed::image::Kernel;
use rtvirtio_testkit::site::PROFILE;

/// Everything is checked inside; each line stops the script when it fails.
const SCRIPT: &str = include_str!("boxed/io-cost.sh");

#[test]
fn io_cost_divides_a_device_by_weights_and_is_put_back() {
    let test = "io_cost_divides_a_device_by_weights_and_is_put_back";
    let Some(image) = the_box(test, Kernel::Standard) else { return };
    let programs = [Path::new(env!("CARGO_BIN_EXE_rtvirtio"))];
    let (spec, plan) = (file("io-cost.toml"), file("io-cost.plan"));
    let files = [
        ("/root/io-cost.toml", spec.as_path()),
        ("/root/io-cost.plan", plan.as_path()),
        ("/root/state/profiles/nullb0.json", Path::new(PROFILE)),
    ];
    let run = BoxRun { programs: &programs, files: &files, ..BoxRun::new(SCRIPT, LIMIT) };
    let output = ok(&image, &run);
    if output.contains("the kernel has no io.cost") {
        return rtvirtio_testkit::skip(test, "the box's kernel has no io.cost, and says so");
    }
    assert!(output.contains("put back, no differences"), "{output}");
    // Without it (Debian 12's kernel) a plan that has it is refused in words.
    let is_refused = output.contains("the kernel has no io.latency");
    assert!(is_refused || output.contains("io.latency is put back"), "{output}");
}
