//! Stacked devices on a real kernel: a striped device mapper volume over two disks, md's RAID 1 and
//! dm's multipath of both modes, in the box, because the machine that runs the tests may have none.

use std::path::Path;
use std::time::Duration;

use rtvirtio_testbed::boxed::{self, BoxRun};
use rtvirtio_testbed::image;
use rtvirtio_testkit::site::PROFILE;

/// A run takes about 20 s on two free cores.
const LIMIT: Duration = Duration::from_secs(600);

/// Everything is checked inside; each line stops the script when it fails.
const SCRIPT: &str = include_str!("boxed/stack.sh");

#[test]
fn settings_of_a_volume_act_on_the_disks_below_it() {
    let test = "settings_of_a_volume_act_on_the_disks_below_it";
    let dmsetup = Path::new("/usr/sbin/dmsetup");
    if !dmsetup.exists() {
        return rtvirtio_testkit::skip(test, "dmsetup is not installed");
    }
    let image = match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => image,
        Err(e) => return rtvirtio_testkit::skip(test, &e.to_string()),
    };
    let mut run = BoxRun::new(SCRIPT, LIMIT);
    let programs = [Path::new(env!("CARGO_BIN_EXE_rtvirtio")), dmsetup];
    let file = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/boxed").join(name);
    let (spec, plan) = (file("stack.toml"), file("stack.plan"));
    let files = [
        ("/root/stack.toml", spec.as_path()),
        ("/root/stack.plan", plan.as_path()),
        ("/root/state/profiles/dm-0.json", Path::new(PROFILE)),
    ];
    (run.programs, run.files) = (&programs, &files);
    let out = boxed::run(&image, &run, &|l| eprintln!("box: {l}")).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    assert_eq!(out.output.matches("every byte as before").count(), 4, "{}", out.output);
}
