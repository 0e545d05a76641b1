//! What a lab left whose state is lost is named by `check` and removed by `down`.

use std::fs;
use std::path::Path;

use rtvirtio_testkit::site::{Site, can_run};

#[test]
fn a_lab_whose_state_is_lost_is_named_and_removed() {
    if !can_run("a_lab_whose_state_is_lost_is_named_and_removed") {
        return;
    }
    let site = Site::new();
    site.ok(&["lab", "up", "examples/fig7-process.toml"]);
    let (_, state) = site.json(&["lab", "status"]);
    let device = state["device"].as_str().unwrap().trim_start_matches("/dev/").to_owned();
    let name = state["cgroups"][0].as_str().unwrap().trim_start_matches('/').to_owned();
    let run = site.run_dir().display().to_string();
    let about = |id: &str, part: &str| {
        let (_, found) = site.json(&["check"]);
        let found = found.as_array().unwrap().iter().filter(|f| f["id"] == id);
        found.filter(|f| f["what"].as_str().unwrap().contains(part)).count()
    };
    assert_eq!((about("leftovers.cgroups", &name), about("leftovers.twins", &run)), (0, 0), "it is up");
    fs::remove_file(site.run_dir().join("lab.json")).unwrap();
    fs::remove_file(site.run_dir().join("inventory.json")).unwrap();
    assert_eq!((about("leftovers.cgroups", &name), about("leftovers.twins", &run)), (1, 1));
    site.ok(&["lab", "down"]);
    assert_eq!((about("leftovers.cgroups", &name), about("leftovers.twins", &run)), (0, 0));
    assert!(!Path::new("/sys/block").join(device).join("loop/backing_file").exists());
    // The twin's process ends with its mount.
    rtvirtio_testkit::site::wait_for("its end", || site.left_behind().is_empty());
    site.assert_clean();
}
