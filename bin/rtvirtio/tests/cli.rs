//! What needs neither root nor a lab: help, spec errors, planning.

mod common;

use common::{Site, text};

#[test]
fn every_command_has_help_with_examples() {
    let site = Site::new();
    let commands: [&[&str]; 13] = [
        &["check"],
        &["profile"],
        &["predict"],
        &["plan"],
        &["apply"],
        &["status"],
        &["revert"],
        &["verify"],
        &["lab", "up"],
        &["lab", "run"],
        &["lab", "down"],
        &["lab", "status"],
        &["demo"],
    ];
    for command in commands {
        let help = site.ok(&[command, &["--help"]].concat());
        assert!(help.contains("EXAMPLES"), "{command:?}\n{help}");
        assert!(help.contains("--json"), "{command:?}\n{help}");
    }
}

#[test]
fn a_wrong_spec_is_told_with_its_place_also_as_json() {
    let site = Site::new();
    let path = site.dir.path().join("bad.toml");
    std::fs::write(&path, "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"raed\"\nblock = \"4KiB\"\n").unwrap();
    let out = site.output(&["plan", path.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert!(said.contains("bad.toml:8:6") && said.contains("read"), "{said}");
    let (code, json) = site.json(&["plan", path.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert_eq!(json["errors"][0]["line"], 8);
}

#[test]
fn planning_without_a_profile_names_the_remedy() {
    let site = Site::new();
    let out = site.output(&["plan", "examples/fig7.toml"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("rtvirtio profile twin:qlc-nvme"), "{}", text(&out.stderr));
}

#[test]
fn nothing_in_force_is_said_and_is_no_error() {
    let site = Site::new();
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    assert_eq!(site.json(&["status"]), (0, serde_json::Value::Null));
}

#[test]
fn a_plan_file_of_another_form_is_refused() {
    let site = Site::new();
    let path = site.dir.path().join("x.plan");
    for (content, said) in [
        ("{}", "is not a plan"),
        (&plan_of("rtvirtio.plan.v9"), "plan again"),
        (&plan_of("rtvirtio.plan.v1"), "--spec"),
    ] {
        std::fs::write(&path, content).unwrap();
        let out = site.output(&["apply", path.to_str().unwrap(), "--dry-run"]);
        assert_eq!(out.status.code(), Some(1));
        assert!(text(&out.stderr).contains(said), "{}", text(&out.stderr));
    }
}

fn plan_of(schema: &str) -> String {
    serde_json::json!({
        "schema": schema, "scheme": "by-hand", "model": "slice", "settings": [], "tasks": [], "feasible": true,
        "infeasible": null, "evaluated": 0,
    })
    .to_string()
}

#[test]
fn less_margin_leaves_the_neighbour_more() {
    let site = Site::new();
    let strict = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/cases/1vm-H-strict-flood.toml");
    let relaxed = std::fs::read_to_string(strict).unwrap().replace("latency = \"5ms\"", "latency = \"40ms\"");
    let path = site.dir.path().join("relaxed.toml");
    std::fs::write(&path, relaxed).unwrap();
    let spec = path.to_str().unwrap();
    let profile = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/bench/data/qlc-nvme.profile.json");
    let limit = |margin: &[&str]| {
        let args = [&["plan", spec, "--profile", profile, "--model", "slice", "--defaults"], margin].concat();
        let (code, plan) = site.json(&args);
        assert_eq!(code, 0, "{plan:#}");
        let settings = plan["settings"].as_array().unwrap();
        let limit = settings.iter().find(|s| s["knob"].to_string().contains("limit"));
        limit.map_or(f64::INFINITY, |s| s["value"].as_str().unwrap().parse().unwrap())
    };
    let (much, little) = (limit(&[]), limit(&["--margin", "20"]));
    assert!(much.is_finite() && little > 1.5 * much, "{much} {little}");
    // The I/O domain's reservations know no margin, and a plan that is made has its own.
    let out = site.output(&["plan", spec, "--domain", "--margin", "20"]);
    assert!(text(&out.stderr).contains("cannot be used with"), "{}", text(&out.stderr));
    let saved = site.dir.path().join("made.plan");
    std::fs::write(&saved, plan_of("rtvirtio.plan.v1")).unwrap();
    let out = site.output(&["apply", saved.to_str().unwrap(), "--dry-run", "--margin", "20", "--spec", spec]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("give --margin to `rtvirtio plan`"), "{}", text(&out.stderr));
}
