use super::*;

fn plan() -> serde_json::Value {
    serde_json::json!({
        "scheme": "by-hand", "model": "slice", "settings": [], "tasks": [], "feasible": true,
        "infeasible": null, "evaluated": 0,
    })
}

fn parse(value: &serde_json::Value) -> Result<HostPlan> {
    HostPlan::parse(Path::new("x.plan"), value.to_string().as_bytes())
}

fn host(devices: &[&str]) -> HostSpec {
    let device = |name: &&str| format!("[[device]]\nname = \"{name}\"\npath = \"/dev/{name}\"\n");
    let vm = |name: &&str| {
        let task = "[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";
        format!("[[vm]]\nname = \"{name}\"\ncgroup = \"/{name}\"\ndevice = \"{name}\"\n{task}")
    };
    let text: String = devices.iter().map(device).chain(devices.iter().map(vm)).collect();
    HostSpec::parse("x.toml", &text).unwrap()
}

#[test]
fn a_file_of_the_first_form_is_the_plan_of_one_device() {
    let mut v1 = plan();
    v1["schema"] = PLAN_SCHEMA_V1.into();
    v1["spec_file"] = "/etc/plant.toml".into();
    let read = parse(&v1).unwrap();
    assert_eq!((read.schema.as_str(), read.devices.len()), (PLAN_SCHEMA, 1));
    assert_eq!(read.spec_file.as_deref(), Some("/etc/plant.toml"));
    assert_eq!(read.devices[0].device, None);
    assert_eq!(parse(&serde_json::to_value(&read).unwrap()).unwrap(), read);
    read.check_devices(&host(&["sda"])).unwrap();
}

#[test]
fn a_plan_for_other_devices_is_refused() {
    let entry = |name: &str| DevicePlan::new(Some(name.to_owned()), serde_json::from_value(plan()).unwrap());
    let plan = HostPlan::new(vec![entry("fast"), entry("big")]);
    plan.check_devices(&host(&["fast", "big"])).unwrap();
    for devices in [&["big", "fast"][..], &["fast"], &["fast", "big", "slow"]] {
        assert_eq!(plan.check_devices(&host(devices)).unwrap_err().kind(), Kind::File);
    }
}

#[test]
fn what_is_no_plan_is_refused() {
    let with = |key: &str, value: serde_json::Value| {
        let mut plan = plan();
        plan["schema"] = PLAN_SCHEMA_V1.into();
        plan[key] = value;
        plan
    };
    let files = [
        serde_json::json!({}),
        serde_json::json!([]),
        with("schema", "rtvirtio.plan.v9".into()),
        with("more", 1.into()),
        serde_json::json!({"schema": PLAN_SCHEMA, "feasible": true, "devices": []}),
    ];
    for file in files {
        assert_eq!(parse(&file).unwrap_err().kind(), Kind::File, "{file}");
    }
}

/// Spec and measurement of a plan may have changed by the time it is applied.
#[test]
fn a_plan_knows_whether_its_spec_or_its_measurement_has_changed() {
    let (temp, dirs) = crate::fixtures::dirs();
    let of = |rate: &str| {
        let text = format!(
            "# A comment.\n[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"plc\"\nlab = \"process\"\n[[vm.task]]\nname = \"t\"\n\
             op = \"read\"\nblock = \"4KiB\"\nrate = \"{rate}\"\n"
        );
        text
    };
    let host = HostSpec::parse("x.toml", &of("50/s")).unwrap();
    let profile = rtvirtio_model::Profile {
        schema: rtvirtio_model::PROFILE_SCHEMA.to_owned(),
        device: "twin-qlc-nvme".to_owned(),
        identity: None,
        size: rtvirtio_units::Bytes(1 << 30),
        block: rtvirtio_units::Bytes::from_kib(4),
        read: Vec::new(),
        write: Vec::new(),
        sync: Vec::new(),
        read_bfq: Vec::new(),
        large: None,
        guest: None,
        cpus: 2,
        kernel: "6".to_owned(),
        doubts: Vec::new(),
    };
    let file = temp.path().join("a.json");
    let write = |path: &Path, profile: &rtvirtio_model::Profile| {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, rtvirtio_measure::profile::to_json(profile, path).unwrap()).unwrap();
    };
    write(&file, &profile);
    let entry = |profile: Option<ProfileUsed>| DevicePlan {
        profile,
        ..DevicePlan::new(None, serde_json::from_value(plan()).unwrap())
    };
    let used = ProfileUsed::from_profile(&profile, Some(&file)).unwrap();
    let made = HostPlan::new(vec![entry(Some(used))]).of_spec(&host).unwrap();
    let made = parse(&serde_json::to_value(&made).unwrap()).unwrap();
    let changes = |host: &HostSpec| made.changes_since(host, &dirs).unwrap();
    assert_eq!(changes(&host), Vec::<String>::new());
    let same = HostSpec::parse("y.toml", &of("50/s").replace("# A comment.", "# Another one.")).unwrap();
    assert_eq!(changes(&same), Vec::<String>::new());
    let other = HostSpec::parse("x.toml", &of("90/s")).unwrap();
    assert_eq!(changes(&other), ["the spec has changed since the plan was made"]);
    write(&file, &rtvirtio_model::Profile { cpus: 4, ..profile });
    assert_eq!(changes(&host), ["the device was measured anew since the plan was made"]);
    std::fs::remove_file(&file).unwrap();
    assert!(changes(&host)[0].contains("is not there"));
    // One that does not say what it was made from is taken as it is.
    let old = HostPlan::new(vec![entry(None)]);
    assert_eq!(old.changes_since(&other, &dirs).unwrap(), Vec::<String>::new());
}
