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
    let entry = |name: &str| DevicePlan {
        device: Some(name.to_owned()),
        plan: serde_json::from_value(plan()).unwrap(),
        notes: Vec::new(),
    };
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
