//! Settings of a unit of systemd outlast its reloads: a real systemd on cgroup v2 in the box,
//! because the machine that runs the tests may have cgroup v1.

use std::path::Path;

#[path = "boxed_systemd/container.rs"]
mod container;

/// Everything is checked inside; each line stops the script when it fails.
const CHECK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/check.sh");
const PLAN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/p.plan");
const SPEC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_systemd/s.toml");

#[test]
fn settings_of_a_unit_outlast_a_reload_of_systemd() {
    let files = [("/root/check.sh", CHECK), ("/root/p.plan", PLAN), ("/root/s.toml", SPEC)];
    let files = files.map(|(place, path)| (place, Path::new(path)));
    container::play("settings_of_a_unit_outlast_a_reload_of_systemd", &[], &files);
}
