//! The box for a test: its image, and a run whose script must succeed.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_testbed::boxed::{self, BoxImage, BoxOutcome, BoxRun};
use rtvirtio_testbed::image::{self, Kernel};

/// Longest time of a run, which takes half a minute to two minutes; beyond this it hangs.
pub const LIMIT: Duration = Duration::from_secs(600);

/// Image of the box with this kernel; a machine where it cannot be made skips the test by its name.
pub fn the_box(test: &str, kernel: Kernel) -> Option<BoxImage> {
    boxed::ensure_kernel(&image::default_cache(), kernel, &|line| eprintln!("{line}"))
        .map_err(|e| rtvirtio_testkit::skip(test, &e.to_string()))
        .ok()
}

/// Runs the script once and expects exit code 0; returns its output.
pub fn ok(image: &BoxImage, run: &BoxRun<'_>) -> String {
    checked(boxed::run(image, run, &|line| eprintln!("box: {line}")).unwrap())
}

/// Runs the script as [`ok`] does, again in another box where the emulation loses this one or a
/// guest in it.
pub fn ok_with_guests(image: &BoxImage, run: &BoxRun<'_>, lost: &dyn Fn(&BoxOutcome) -> bool) -> String {
    checked(boxed::run_with_guests(image, run, &|line| eprintln!("box: {line}"), lost).unwrap())
}

fn checked(out: BoxOutcome) -> String {
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
    out.output
}

/// A file of `tests/boxed`.
pub fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/boxed").join(name)
}

/// Runs the test `inside_the_box` of this very program in a box with two sockets, with these
/// programs too, and checks that it passed.
pub fn run(test: &str, more: &[&Path]) {
    let Some(image) = the_box(test, Kernel::Standard) else { return };
    let me = std::env::current_exe().unwrap();
    let name = me.file_name().unwrap().to_str().unwrap();
    let script = format!("{name} --ignored --exact inside_the_box --nocapture\n");
    let ours = [me.as_path(), Path::new(env!("CARGO_BIN_EXE_rtvirtio"))];
    let programs = [&ours[..], more].concat();
    let run = BoxRun { programs: &programs, two_sockets: true, ..BoxRun::new(&script, LIMIT) };
    let output = ok(&image, &run);
    assert!(output.contains("1 passed"), "{output}");
}
