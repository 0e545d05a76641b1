//! Settings of a unit of systemd outlast its reloads: a real systemd on cgroup v2, the first
//! process of a container in the box, because the machine that runs the tests may have cgroup v1.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_testbed::boxed::{self, BoxRun};
use rtvirtio_testbed::image;

/// A run takes about a minute on two free cores; beyond this it hangs.
const LIMIT: Duration = Duration::from_secs(400);
/// Where Debian 12 and 13 have them; the executor is a program of its own since systemd 254.
const SYSTEMD: [&str; 3] = ["/usr/lib/systemd/systemd", "/usr/bin/systemctl", "/usr/bin/systemd-run"];
const EXECUTOR: &str = "/usr/lib/systemd/systemd-executor";

/// Everything is checked inside; each line stops the script when it fails.
const BOOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/boot.sh");
const CHECK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/check.sh");
const PLAN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/p.plan");
const SPEC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/s.toml");

#[test]
fn settings_of_a_unit_outlast_a_reload_of_systemd() {
    let test = "settings_of_a_unit_outlast_a_reload_of_systemd";
    let unshare = Path::new("/usr/bin/unshare");
    let needed = SYSTEMD.iter().map(Path::new).chain([unshare]);
    if let Some(missing) = needed.clone().find(|path| !path.is_file()) {
        return rtvirtio_testkit::skip(test, &format!("{} is missing", missing.display()));
    }
    let image = match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => image,
        Err(e) => return rtvirtio_testkit::skip(test, &e.to_string()),
    };
    let rtvirtio = PathBuf::from(env!("CARGO_BIN_EXE_rtvirtio"));
    let service = rtvirtio_testkit::site::program("rtvirtiod");
    let executor = Some(Path::new(EXECUTOR)).filter(|path| path.is_file());
    let programs: Vec<&Path> =
        needed.chain([rtvirtio.as_path(), service.as_path()]).chain(executor).collect();
    let files =
        [("/root/boot.sh", BOOT), ("/root/check.sh", CHECK), ("/root/p.plan", PLAN), ("/root/s.toml", SPEC)];
    let files = files.map(|(place, path)| (place, Path::new(path)));
    let mut run = BoxRun::new("sh boot.sh\n", LIMIT);
    run.programs = &programs;
    run.files = &files;
    let out = boxed::run(&image, &run, &|line| eprintln!("box: {line}")).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    assert!(out.output.contains("all is as it should be"), "{}", out.output);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
}
