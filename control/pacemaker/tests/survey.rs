//! Answers of a node for disks, by its own profile of the device in a spec.

use std::fs;
use std::path::Path;

use rtvirtio_pacemaker_control::{NodeAnswer, SlowDisks, load, survey};
use rtvirtio_testkit::{skip, tempdir};
use rtvirtio_workflow::Dirs;

/// Profile of the flash twin.
const PROFILE: &str = include_str!("../../learn/data/qlc-nvme.profile.json");

/// A block device of this machine, with the name under which its profile is found.
fn device() -> Option<String> {
    let mut names: Vec<String> = fs::read_dir("/sys/block")
        .ok()?
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|n| Path::new("/dev").join(n).exists())
        .collect();
    names.sort();
    names.into_iter().next()
}

fn answer(dir: &Path) -> NodeAnswer {
    answer_with(dir, &SlowDisks::new())
}

fn answer_with(dir: &Path, slow: &SlowDisks) -> NodeAnswer {
    let contracts = load(&dir.join("site.toml")).unwrap();
    survey(&contracts, &Dirs { state: dir.join("state"), run: dir.join("run") }, slow).unwrap()
}

#[test]
fn a_nodes_own_profile_decides() {
    let Some(device) = device() else { return skip("a_nodes_own_profile_decides", "no block device") };
    let dir = tempdir().unwrap();
    let vm = |name: &str, ms: u32| {
        let text = format!(
            "[device]\npath = \"/dev/{device}\"\n[[vm]]\nname = \"{name}\"\nqmp = \"/run/{name}.qmp\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
             block = \"4KiB\"\nrate = \"300/s\"\ntarget = {{ percentile = \"p99.99\", latency = \"{ms}ms\" }}\n"
        );
        fs::write(dir.path().join(format!("{name}.toml")), text).unwrap();
        format!("[[contract]]\nresource = \"{name}\"\nspec = \"{name}.toml\"\n")
    };
    fs::write(dir.path().join("site.toml"), vm("plc", 100) + &vm("fast", 1)).unwrap();
    let refused = |a: &NodeAnswer, i: usize| a.contracts[i].refused.clone().unwrap_or_default();

    // Without a measurement nothing is promised.
    let unknown = answer(dir.path());
    assert!(refused(&unknown, 0).contains("has not been measured"), "{unknown:?}");
    assert_eq!(unknown.contracts[0].takes.len(), 0);

    let profiles = dir.path().join("state/profiles");
    fs::create_dir_all(&profiles).unwrap();
    let mut profile: serde_json::Value = serde_json::from_str(PROFILE).unwrap();
    profile["device"] = device.clone().into();
    profile["guest"] = serde_json::Value::Null;
    let save = |profile: &serde_json::Value| {
        fs::write(profiles.join(format!("{device}.json")), profile.to_string()).unwrap();
    };
    save(&profile);
    let measured = answer(dir.path());
    let attribute = format!("rtvirtio-disk-{device}");
    assert_eq!(measured.resources, [attribute.clone(), "rtvirtio-cpu".to_owned()]);
    assert_eq!(measured.contracts[0].refused, None, "{measured:?}");
    let takes = measured.contracts[0].takes[&attribute];
    assert!((1..1000).contains(&takes), "{measured:?}");
    assert!(!measured.contracts[0].takes.contains_key("rtvirtio-cpu"), "it asks for none");
    assert!(refused(&measured, 1).contains("may pass in the worst case"), "{measured:?}");

    // Its requests take long.
    let now = answer_with(dir.path(), &SlowDisks::from([(format!("/dev/{device}"), 7.2)]));
    assert!(refused(&now, 0).contains("takes 7 times as long as when it was measured"), "{now:?}");
    let other = answer_with(dir.path(), &SlowDisks::from([("/dev/other".to_owned(), 7.2)]));
    assert_eq!(other.contracts[0].refused, None);

    // Measured again, it is a slower disk.
    for kind in ["read", "write", "read_bfq"] {
        for point in profile[kind].as_array_mut().unwrap() {
            let slower = |v: &mut serde_json::Value, by: f64| *v = (v.as_f64().unwrap() * by).into();
            slower(&mut point["iops"], 0.02);
            for latency in ["p50", "p99", "p9999", "max"] {
                point[latency] = (point[latency].as_u64().unwrap() * 50).into();
            }
        }
    }
    save(&profile);
    let slow = answer(dir.path());
    assert!(!refused(&slow, 0).is_empty(), "{slow:?}");
    assert!(!slow.contracts[0].in_force);
}

/// A spec's networks need no measurement: the link is declared.
#[test]
fn networks_are_counted_by_name() {
    let dir = tempdir().unwrap();
    let vm = |name: &str, network: &str, port: &str, rate: u32| {
        let text = format!(
            "[device]\npath = \"/dev/no-such-disk\"\n[[network]]\n{network}\n[[vm]]\nname = \"{name}\"\nqmp = \"/run/{name}.qmp\"\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n[[vm.nic]]\nmac = \"52:54:00:00:00:01\"\n{port}\n\
             [[vm.flow]]\nname = \"sv\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"{rate}/s\"\ntarget = {{ latency = \"5ms\" }}\n"
        );
        fs::write(dir.path().join(format!("{name}.toml")), text).unwrap();
        format!("[[contract]]\nresource = \"{name}\"\nspec = \"{name}.toml\"\n")
    };
    let field = "name = \"field\"\nlink = \"100Mbit/s\"";
    let site = vm("plc", field, "tap = \"a\"", 20_000)
        + &vm("fast", field, "tap = \"b\"", 60_000)
        + &vm("other", &field.replace("100", "10"), "tap = \"c\"", 1)
        + &vm("gone", "link = \"1Gbit/s\"\nuplink = \"packet\"\ninterface = \"no-such-if\"", "", 1);
    fs::write(dir.path().join("site.toml"), site).unwrap();
    let answer = answer(dir.path());
    assert_eq!(answer.resources, ["rtvirtio-net-field", "rtvirtio-cpu"], "{answer:?}");
    let why = |i: usize| answer.contracts[i].refused.clone().unwrap_or_default();
    assert_eq!(why(0), "");
    assert!((300..500).contains(&answer.contracts[0].takes["rtvirtio-net-field"]), "{answer:?}");
    assert!(why(1).contains("% of the link's time"), "{answer:?}");
    assert!(why(2).contains("give all the same") && why(3).contains("no interface no-such-if"), "{answer:?}");
    // A contract that cannot be judged is in force: whether another fits next to it is unknown.
    let own = dir.path().join("state/contracts/gone");
    fs::create_dir_all(&own).unwrap();
    let mark = |boot: &str, vms: &str| {
        let text = format!("{{\"boot_id\":\"{}\",\"vms\":[{vms}]}}", boot.trim());
        fs::write(own.join("nothing-to-set"), text).unwrap();
        answer_with(dir.path(), &SlowDisks::new())
    };
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let beside = mark(&boot, "");
    assert!(beside.contracts[3].in_force, "{beside:?}");
    let why = beside.contracts[0].refused.clone().unwrap_or_default();
    assert!(why.contains("what gone, in force here, takes is not known"), "{beside:?}");
    // Not after a restart of the node, and not for a VM that has ended.
    let ended = "{\"vm\":\"gone\",\"processes\":[{\"pid\":1,\"start_time\":18446744073709551615}]}";
    for after in [mark("another", ""), mark(&boot, ended)] {
        assert!(!after.contracts[3].in_force, "{after:?}");
    }
}
