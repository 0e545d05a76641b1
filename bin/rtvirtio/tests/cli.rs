//! What needs neither root nor a lab: help, spec errors, planning.

use rtvirtio_testkit::site::{PROFILE, Site, lines, text};

#[test]
fn every_command_has_help_with_examples() {
    let site = Site::new();
    let all = [commands(&site, &[]), commands(&site, &["lab"])].concat();
    assert!(all.len() > 30, "{all:?}");
    for command in all {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let command = command.as_slice();
        let help = site.ok(&[command, &["--help"]].concat());
        assert!(help.contains("EXAMPLES"), "{command:?}\n{help}");
        assert!(help.contains("--json"), "{command:?}\n{help}");
    }
}

#[test]
fn a_wrong_spec_is_told_with_its_place_also_as_json() {
    let site = Site::new();
    let path = &site.write("bad.toml", "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"raed\"\nblock = \"4KiB\"\n");
    let out = site.output(&["plan", path]);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert!(said.contains("bad.toml:8:6") && said.contains("read"), "{said}");
    let (code, json) = site.json(&["plan", path]);
    assert_eq!(code, 1);
    assert_eq!(json["errors"][0]["line"], 8);
}

#[test]
fn planning_without_a_profile_names_the_remedy() {
    let site = Site::new();
    let out = site.output(&["plan", "examples/fig7.toml"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("rtvirtio-lab profile twin:qlc-nvme"), "{}", text(&out.stderr));
}

#[test]
fn nothing_in_force_is_said_and_is_no_error() {
    let site = Site::new();
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    let none = serde_json::json!({"schema": "rtvirtio.status.v1", "in_force": false});
    assert_eq!(site.json(&["status"]), (0, none));
}

/// All commands of a program, as its help lists them.
fn commands(site: &Site, program: &[&str]) -> Vec<Vec<String>> {
    let help = site.ok(&[program, &["--help"]].concat());
    // Below one heading or several.
    let listed = help.lines().skip_while(|l| !l.starts_with("Usage:")).take_while(|l| *l != "Options:");
    let names = listed.filter(|l| {
        l.strip_prefix("  ").is_some_and(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
    });
    let names: Vec<&str> =
        names.filter_map(|l| l.split_whitespace().next()).filter(|n| *n != "help").collect();
    let mut all = Vec::new();
    for name in names {
        let command = [program, &[name]].concat();
        all.push(command.iter().map(|part| (*part).to_owned()).collect());
        all.extend(commands(site, &command));
    }
    all
}

#[test]
fn a_mistake_in_the_command_line_has_a_code_of_its_own() {
    let site = Site::new();
    for args in
        [&["verfy"][..], &["plan"], &["verify", "--for", "3 parsec", "x.toml"], &["lab", "up"], &[], &["lab"]]
    {
        let out = site.output(args);
        assert_eq!(out.status.code(), Some(64), "{args:?}: {}", text(&out.stderr));
        assert!(text(&out.stderr).contains("--help") || text(&out.stderr).contains("Usage"), "{args:?}");
    }
    for args in [&["--help"][..], &["--version"], &["help", "plan"], &["lab", "--version"]] {
        site.ok(args);
    }
}

#[test]
fn the_papers_models_are_no_models_of_the_product_and_the_error_says_where_they_are() {
    let site = Site::new();
    for command in ["predict", "plan", "apply", "tune"] {
        for model in ["analytical", "mlp"] {
            let out = site.output(&[command, "x.toml", "--model", model]);
            let said = text(&out.stderr);
            assert_eq!(out.status.code(), Some(64), "{command}: {said}");
            assert!(said.contains("rtvirtio-bench cases") && said.contains("--model slice"), "{said}");
        }
        let out = site.output(&[command, "x.toml", "--model", "other"]);
        assert!(text(&out.stderr).contains("[possible values: auto, slice, bound]"), "{}", text(&out.stderr));
        let help = site.output(&["help", command]);
        assert!(text(&help.stdout).contains("slice"), "{command}");
        assert!(!text(&help.stdout).contains("analytical"), "{command}");
    }
    // A plan of an older version is no file that goes wrong later.
    let old = plan_of("rtvirtio.plan.v1").replace("\"model\":\"slice\"", "\"model\":\"analytical\"");
    let out = site.output(&["apply", &site.write("old.plan", &old), "--dry-run"]);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    assert!(said.contains("make one with `rtvirtio plan") && said.contains("analytical"), "{said}");
}

#[test]
fn a_plan_file_of_another_form_is_refused() {
    let site = Site::new();
    for (content, said) in [
        ("{}", "is not a plan"),
        (&plan_of("rtvirtio.plan.v9"), "plan again"),
        (&plan_of("rtvirtio.plan.v1"), "--spec"),
    ] {
        let out = site.output(&["apply", &site.write("x.plan", content), "--dry-run"]);
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
    let spec = &site.write("relaxed.toml", &relaxed);
    let limit = |margin: &[&str]| {
        let args = [&["plan", spec, "--profile", PROFILE, "--model", "slice", "--defaults"], margin].concat();
        let (code, plan) = site.json(&args);
        assert_eq!(code, 0, "{plan:#}");
        let settings = plan["devices"][0]["plan"]["settings"].as_array().unwrap();
        let limit = settings.iter().find(|s| s["knob"].to_string().contains("limit"));
        limit.map_or(f64::INFINITY, |s| s["value"].as_str().unwrap().parse().unwrap())
    };
    let (much, little) = (limit(&[]), limit(&["--margin", "20"]));
    assert!(much.is_finite() && little > 1.5 * much, "{much} {little}");
    // The I/O domain's reservations know no margin, and a plan that is made has its own.
    let out = site.output(&["plan", spec, "--domain", "--margin", "20"]);
    assert!(text(&out.stderr).contains("cannot be used with"), "{}", text(&out.stderr));
    let saved = &site.write("made.plan", &plan_of("rtvirtio.plan.v1"));
    let out = site.output(&["apply", saved, "--dry-run", "--margin", "20", "--spec", spec]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("give --margin to `rtvirtio plan`"), "{}", text(&out.stderr));
}

/// Probability of at most `held` of `n`, each with probability `p`.
fn at_most(held: u64, n: u64, p: f64) -> f64 {
    let mut term = (1.0 - p).powf(n as f64);
    let mut sum = term;
    for k in 1..=held {
        term *= (n - k + 1) as f64 / k as f64 * p / (1.0 - p);
        sum += term;
    }
    sum
}

#[test]
fn a_model_learns_from_guests_what_it_says_of_them() {
    let site = Site::new();
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data");
    let [processes, guests] = ["emmc", "emmc-qemu"].map(|name| format!("{data}/{name}.jsonl"));
    let models = site.state_dir().join("models");
    std::fs::create_dir_all(&models).unwrap();
    let model = models.join("twin-emmc.json");
    let fit = ["bench", "accuracy", &processes, "--confidence", "95", "--model", model.to_str().unwrap()];
    // Of each VM kind: what the bounds rest on, their least confidence and what is expected of the
    // first task, ms.
    let header = lines(std::path::Path::new(&guests)).swap_remove(0);
    let profile = site.write("profile.json", &header["profiles"]["emmc"].to_string());
    let predicted = |lab: &str| {
        let task = "[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"200/s\"\ntarget = { latency = \"500ms\" }\n";
        let vm = |name| format!("[[vm]]\nname = \"{name}\"\nlab = \"{lab}\"\n{task}");
        let text = format!("[device]\ntwin = \"emmc\"\nsize = \"1GiB\"\n{}{}", vm("a"), vm("b"));
        let spec = site.write("guests.toml", &text);
        let (_, told) = site.json(&["predict", &spec, "--defaults", "--profile", &profile]);
        let tasks = told.as_array().unwrap_or_else(|| panic!("{told:#}"));
        tasks.iter().map(|t| t["forecast"].clone()).collect::<Vec<_>>()
    };
    let upper = |f: &serde_json::Value, what: &str| f["upper"][what].clone();
    let (_, found) = site.json(&[&fit[..], &["--guests", &guests]].concat());
    let claim = |id: &str| {
        let claims = found["claims"].as_array().unwrap();
        claims.iter().find(|c| c["id"] == id).unwrap_or_else(|| panic!("no {id}: {claims:#?}")).clone()
    };
    let coverage = claim("accuracy.guests.coverage@emmc");
    // Of n bounds that hold with 95 % fewer may hold by chance. So few that the chance is below 1 %
    // refute them.
    assert_eq!(coverage["at_least"].as_f64(), Some(0.95));
    let n = coverage["n"].as_u64().unwrap();
    let held = (coverage["value"].as_f64().unwrap() * n as f64).round() as u64;
    assert!(n >= 50 && at_most(held, n, 0.95) > 0.01, "{held} of {n} bounds held: {coverage:#}");
    assert!(claim("accuracy.guests.factor@emmc")["value"].as_f64().unwrap() < 2.0);
    let (known, process) = (predicted("qemu"), predicted("process"));
    for f in &known {
        assert_eq!((upper(f, "basis"), upper(f, "confidence")), ("guests".into(), 0.95.into()), "{f:#}");
        assert!(upper(f, "outside").is_null(), "{f:#}");
    }
    // A model that knows no guests takes its place, and does not cost it.
    let learned = std::fs::read(&model).unwrap();
    let again = site.output(&fit);
    assert!(text(&again.stderr).contains("had learned from guests too"), "{}", text(&again.stderr));
    assert_eq!(std::fs::read(models.join("twin-emmc.json.before")).unwrap(), learned);
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&model).unwrap()).unwrap();
    assert!(saved.get("guests").is_none_or(serde_json::Value::is_null));
    let unknown = predicted("qemu");
    assert!(unknown.iter().all(|f| upper(f, "basis") == "extrapolated"), "{unknown:#?}");
    assert_ne!(known, unknown);
    assert_eq!(predicted("process"), process, "nothing else is said of processes");
    // Guests of another disk, or none at all.
    for (file, told) in [("qlc-nvme-qemu", "it is not of emmc"), ("emmc", "no runs in QEMU guests")] {
        let wrong = format!("{data}/{file}.jsonl");
        let refused = site.output(&[&fit[..], &["--guests", &wrong]].concat());
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(told), "{}", text(&refused.stderr));
    }
}
