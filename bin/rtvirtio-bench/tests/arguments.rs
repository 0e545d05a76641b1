//! Wrong arguments are refused before anything is made or measured: no lab, no root.

use std::path::Path;

use rtvirtio_testkit::site::{Site, text};

/// The error of a call that must fail, and that must not have begun.
fn refused(site: &Site, args: &[&str]) -> String {
    let out = site.output(args);
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
    assert!(!said.contains("lab") || !site.run_dir().exists(), "{args:?}: {said}");
    assert!(!site.run_dir().join("bench").exists(), "{args:?} made a lab: {said}");
    said
}

#[test]
fn names_that_there_are_not() {
    let site = Site::new();
    for (args, says) in [
        (&["bench", "cases", "--only", "nothing"][..], "no case is named like that"),
        (&["bench", "cases", "--schemes", "bond"], "there is no scheme bond; there are default-bfq"),
        (&["bench", "contention", "--only", "fig9"], "no set-up is named like that"),
        (&["bench", "cases", "twin:nothing"], "nothing"),
        (&["bench", "contention", "twin:nothing"], "nothing"),
        // Also the second of two devices: the first would be swept for hours.
        (&["bench", "sweep", "twin:emmc", "twin:nothing"], "nothing"),
        (&["bench", "tails", "twin:nothing"], "nothing"),
        (&["bench", "profile-time", "twin:emmc", "twin:nothing"], "nothing"),
        (&["bench", "iod", "twin:nothing"], "nothing"),
        (&["bench", "iod-added", "--device", "twin:nothing"], "nothing"),
        (&["bench", "iod-crash", "twin:nothing"], "nothing"),
        (&["bench", "iod-startup", "twin:nothing"], "nothing"),
        (&["lab", "profile", "twin:nothing"], "nothing"),
    ] {
        let said = refused(&site, args);
        assert!(said.contains(says), "{args:?}: {said}");
    }
}

#[test]
fn files_of_another_device_and_places_that_cannot_be_written() {
    let site = Site::new();
    let profile = rtvirtio_testkit::site::PROFILE;
    for command in ["cases", "contention", "sweep"] {
        let said = refused(&site, &["bench", command, "twin:emmc", "--profile", profile]);
        assert!(said.contains("is of twin-qlc-nvme, this is twin-emmc"), "{said}");
        let said = refused(&site, &["bench", command, "twin:emmc", "--profile", "/nowhere"]);
        assert!(said.contains("/nowhere"), "{said}");
    }
    let local = ["cases", "contention", "sweep", "tails", "profile-time", "regulation", "reservation"];
    let of_iod = ["iod", "iod-added", "iod-attach", "iod-crash", "iod-migrate", "iod-startup"];
    for command in local.into_iter().chain(of_iod) {
        let device: &[&str] = if command == "sweep" { &["twin:emmc"] } else { &[] };
        // A file where a directory is needed.
        let out = Path::new(profile).join("out");
        let args = [&["bench", command], device, &["--out", out.to_str().unwrap()]].concat();
        let said = refused(&site, &args);
        assert!(said.contains("--out") && said.contains("is no directory"), "{said}");
    }
    let said = refused(&site, &["bench", "cases", "--html", "/"]);
    assert!(said.contains("it is a directory"), "{said}");
}
