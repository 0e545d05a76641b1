//! A real systemd on cgroup v2: the first process of a container in the box.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_testbed::boxed::BoxRun;
use rtvirtio_testbed::image::Kernel;

#[path = "../boxed/inside.rs"]
mod inside;

/// Longest time of a run; beyond this it hangs.
const LIMIT: Duration = Duration::from_secs(900);
/// Where Debian 12 and 13 have them; the executor is a program of its own since systemd 254.
const SYSTEMD: [&str; 4] =
    ["/usr/lib/systemd/systemd", "/usr/bin/systemctl", "/usr/bin/systemd-run", "/usr/bin/unshare"];
const EXECUTOR: &str = "/usr/lib/systemd/systemd-executor";
const BOOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/boot.sh");
/// Last line of a script that found all as it should be.
const GOOD: &str = "all is as it should be";

/// Runs `/root/check.sh`, which is one of `files` (path in the box, path here), as the service that
/// this systemd starts. `programs` are those of this host that it needs besides systemd and ours.
/// A machine without these programs or the box skips the test by its name.
pub fn play(test: &str, programs: &[PathBuf], files: &[(&str, &Path)]) {
    let needed: Vec<&Path> =
        SYSTEMD.iter().map(Path::new).chain(programs.iter().map(PathBuf::as_path)).collect();
    if let Some(missing) = needed.iter().find(|path| !path.is_file()) {
        return rtvirtio_testkit::skip(test, &format!("{} is missing", missing.display()));
    }
    let Some(image) = inside::the_box(test, Kernel::Standard) else { return };
    let service = rtvirtio_testkit::site::program("rtvirtiod");
    let ours = [Path::new(env!("CARGO_BIN_EXE_rtvirtio")), service.as_path()];
    let executor = Some(Path::new(EXECUTOR)).filter(|path| path.is_file());
    let programs: Vec<&Path> = needed.into_iter().chain(ours).chain(executor).collect();
    let boot = [("/root/boot.sh", Path::new(BOOT))];
    let files: Vec<(&str, &Path)> = boot.into_iter().chain(files.iter().copied()).collect();
    let run = BoxRun { programs: &programs, files: &files, ..BoxRun::new("sh boot.sh\n", LIMIT) };
    // The box hangs now and then: one that prints nothing for long is started anew.
    let output = inside::ok_with_guests(&image, &run, &|_| false);
    assert!(output.contains(GOOD), "{output}");
}
