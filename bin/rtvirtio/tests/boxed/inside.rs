//! Runs the test `inside_the_box` of this very program in the box, with two sockets.

use std::path::Path;
use std::time::Duration;

use rtvirtio_testbed::boxed::{self, BoxRun};
use rtvirtio_testbed::image::{self, Kernel};

/// A run takes one to two minutes on two free cores; beyond this it hangs.
const LIMIT: Duration = Duration::from_secs(600);

/// Starts the box for this test with these programs too, and checks that the test in it passed.
pub fn run(test: &str, more: &[&Path]) {
    let image = match boxed::ensure_kernel(&image::default_cache(), Kernel::Standard, &|l| eprintln!("{l}")) {
        Ok(image) => image,
        Err(e) => return rtvirtio_testkit::skip(test, &e.to_string()),
    };
    let me = std::env::current_exe().unwrap();
    let name = me.file_name().unwrap().to_str().unwrap();
    let script = format!("{name} --ignored --exact inside_the_box --nocapture\n");
    let mut run = BoxRun::new(&script, LIMIT);
    let ours = [me.as_path(), Path::new(env!("CARGO_BIN_EXE_rtvirtio"))];
    let programs = [&ours[..], more].concat();
    run.programs = &programs;
    run.two_sockets = true;
    let out = boxed::run(&image, &run, &|l| eprintln!("box: {l}")).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    assert!(out.output.contains("1 passed"), "{}", out.output);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
}
