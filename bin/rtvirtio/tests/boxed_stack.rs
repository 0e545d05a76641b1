//! Stacked devices on a real kernel: a striped device mapper volume over two disks, md's RAID 1 and
//! dm's multipath of both modes, in the box, because the machine that runs the tests may have none.

#[path = "boxed/inside.rs"]
mod inside;

use std::path::Path;

use inside::{LIMIT, file, ok, the_box};
use rtvirtio_testbed::boxed::BoxRun;
use rtvirtio_testbed::image::Kernel;
use rtvirtio_testkit::site::PROFILE;

/// Everything is checked inside; each line stops the script when it fails.
const SCRIPT: &str = include_str!("boxed/stack.sh");

#[test]
fn settings_of_a_volume_act_on_the_disks_below_it() {
    let test = "settings_of_a_volume_act_on_the_disks_below_it";
    let dmsetup = Path::new("/usr/sbin/dmsetup");
    if !dmsetup.exists() {
        return rtvirtio_testkit::skip(test, "dmsetup is not installed");
    }
    let Some(image) = the_box(test, Kernel::Standard) else { return };
    let programs = [Path::new(env!("CARGO_BIN_EXE_rtvirtio")), dmsetup];
    let (spec, plan) = (file("stack.toml"), file("stack.plan"));
    let files = [
        ("/root/stack.toml", spec.as_path()),
        ("/root/stack.plan", plan.as_path()),
        ("/root/state/profiles/dm-0.json", Path::new(PROFILE)),
    ];
    let run = BoxRun { programs: &programs, files: &files, ..BoxRun::new(SCRIPT, LIMIT) };
    let output = ok(&image, &run);
    assert_eq!(output.matches("every byte as before").count(), 4, "{output}");
}
