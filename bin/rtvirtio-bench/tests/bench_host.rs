//! The bundle of a host: what is announced, and a run that is stopped.

use std::fs;
use std::process::Stdio;

use rtvirtio_testkit::site::{Site, can_run, signal, text, wait_for};
use rustix::process::Signal;

#[test]
fn every_part_is_announced_with_what_it_touches() {
    let site = Site::new();
    let out = site.dir.path().join("host");
    let args = ["bench", "host", "--dry-run", "--budget", "2h", "--out", out.to_str().unwrap()];
    let (code, parts) = site.json(&args);
    assert_eq!(code, 0);
    let parts = parts.as_array().unwrap();
    assert!(parts.len() >= 10, "{parts:?}");
    for part in parts {
        assert!(!part["touches"].as_str().unwrap().is_empty(), "{part}");
        let command = part["command"].as_str().unwrap();
        assert!(
            command.starts_with(if part["name"] == "demo" { "rtvirtio-lab " } else { "rtvirtio-bench " }),
            "{part}"
        );
        assert_eq!(part["seconds"] == 0, part["left_out"].is_string(), "{part}");
    }
    assert!(!out.exists(), "a dry run makes nothing");

    let wrong = site.output(&["bench", "host", "--only", "nothing"]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong.stderr).contains("no part is called `nothing`: there is"), "{}", text(&wrong.stderr));
    let wrong = site.output(&["bench", "host", "--device", "/dev/null", "--dry-run"]);
    assert!(text(&wrong.stderr).contains("name a directory on a file system of the drive"));
}

#[test]
fn a_stopped_part_puts_everything_back() {
    if !can_run("a_stopped_part_puts_everything_back") {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("host");
    let args = ["bench", "host", "--only", "before-after", "--budget", "3min", "--yes", "--out"];
    let args = [&args[..], &[out.to_str().unwrap()]].concat();
    let mut child = site.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let fio = || site.left_behind().iter().any(|line| line.contains("job.fio"));
    wait_for("a measurement", || fio() || child.try_wait().unwrap().is_some());
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_for("the end of fio", || !fio());
    site.assert_clean();
    // What has no figures is measured when it goes on.
    let (_, parts) = site.json(&[&args[..], &["--dry-run"]].concat());
    let first = &parts.as_array().unwrap()[0];
    assert!(first["name"] == "before-after" && first["left_out"].is_null(), "{first}");
    assert!(fs::metadata(out.join("host.json")).is_err());
}
