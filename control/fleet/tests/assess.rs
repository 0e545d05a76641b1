//! Fleets from files: placement, losses and hosts to buy.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rtvirtio_capacity::{Refused, admit};
use rtvirtio_fleet::{Cluster, FitsOn, Fleet, FleetError, Search, assess, load};
use rtvirtio_testkit::tempdir;

fn vm(name: &str, budget_ms: u32, rate: u32, target_ms: u32) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nlab = \"process\"\ncpu = {{ budget = \"{budget_ms}ms\", period = \"100ms\" }}\n[[vm.task]]\nname = \"t\"\n\
         op = \"read\"\nblock = \"4KiB\"\nrate = \"{rate}/s\"\ntarget = {{ percentile = \"p99.99\", latency = \"{target_ms}ms\" }}\n"
    )
}

fn write(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).unwrap();
}

fn fleet(dir: &Path, text: &str) -> Result<Fleet, FleetError> {
    write(dir, "fleet.toml", text);
    load(&dir.join("fleet.toml"))
}

/// Each of them would let whoever reads the fleet wait, or read without end.
#[test]
fn a_fleet_names_regular_files() {
    let dir = tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    write(dir.path(), "a.toml", &(DEVICE.to_owned() + &vm("a", 45, 100, 60)));
    let host = |key: &str| format!("[[host]]\nname = \"h\"\n{key}\n[[contracts]]\nspec = \"a.toml\"\n");
    for key in [
        "twin = \"fifo\"",
        "twin = \"/dev/zero\"",
        "profile = \"fifo\"",
        "profile = \"/dev/zero\"",
        "spec = \"fifo\"",
    ] {
        assert!(fleet(dir.path(), &host(key)).is_err(), "{key}");
    }
    let text = host("twin = \"qlc-nvme\"");
    assert!(fleet(dir.path(), &text.replace("a.toml", "fifo")).is_err());
    assert!(fleet(dir.path(), &text).is_ok());
    assert!(matches!(load(&fifo), Err(FleetError::Read { .. })));
    // The path given on a command line may be a pipe.
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| rtvirtio_fleet::load_named(&fifo));
        fs::write(&fifo, &text).unwrap();
        assert!(reading.join().unwrap().is_ok());
    });
}

const DEVICE: &str = "[device]\ntwin = \"qlc-nvme\"\n";

#[test]
fn contracts_are_placed_by_priority_and_losses_are_told() {
    let dir = tempdir().unwrap();
    write(dir.path(), "a.toml", &(DEVICE.to_owned() + &vm("a", 45, 100, 60)));
    write(dir.path(), "b.toml", &(DEVICE.to_owned() + &vm("b", 45, 100, 60)));
    let text = "[[host]]\nname = \"h\"\ncount = 2\ntwin = \"qlc-nvme\"\n\
                [[contracts]]\nspec = \"b.toml\"\ncount = 2\n\
                [[contracts]]\nspec = \"a.toml\"\npriority = 5\ncount = 2\n";
    let fleet = fleet(dir.path(), text).unwrap();
    let answer = assess(&fleet, &|| false);
    let names: Vec<&str> = answer.contracts.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["a-1", "a-2", "b-1", "b-2"]);
    // The criticality of a spec's VMs decides where the file names no priority.
    write(
        dir.path(),
        "b.toml",
        &(DEVICE.to_owned() + &vm("b", 45, 100, 60).replace("lab =", "criticality = \"high\"\nlab =")),
    );
    let critical = assess(&self::fleet(dir.path(), text).unwrap(), &|| false);
    assert_eq!((critical.contracts[0].name.as_str(), critical.contracts[0].priority), ("b-1", 100));
    // Each of the two hosts takes two contracts of 45 % of each CPU, of its 95 %.
    assert!(answer.contracts.iter().all(|c| c.host.is_some()), "{answer:?}");
    assert!(matches!(&answer.contracts[0].fits, FitsOn::Hosts(h) if h.len() == 2));
    // Both hosts are full: the loss of one loses its contracts, and one more host is enough.
    assert!(answer.losses.iter().all(|l| l.contracts == 2 && !l.lost.is_empty()), "{answer:?}");
    assert_eq!(answer.buy.iter().map(|b| b.hosts).collect::<Vec<_>>(), [Some(1)]);
    let more = assess(
        &self::fleet(dir.path(), &text.replace("count = 2\ntwin", "count = 3\ntwin")).unwrap(),
        &|| false,
    );
    assert!(more.losses.iter().all(|l| l.lost.is_empty()) && more.buy.is_empty(), "{more:?}");
}

#[test]
fn what_has_no_host_says_why_and_what_is_in_force_counts() {
    let dir = tempdir().unwrap();
    write(dir.path(), "here.toml", &(DEVICE.to_owned() + &vm("here", 80, 50, 60)));
    write(dir.path(), "new.toml", &(DEVICE.to_owned() + &vm("new", 30, 50, 60) + &vm("fast", 1, 50, 2)));
    let text = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\nspec = \"here.toml\"\n[[contracts]]\nspec = \"new.toml\"\n";
    let answer = assess(&fleet(dir.path(), text).unwrap(), &|| false);
    let of = |name: &str| answer.contracts.iter().find(|c| c.name == name).unwrap();
    assert!(of("h/here").in_force);
    assert!(matches!(of("new").refused, Some((ref h, Refused::Cpu { .. })) if h == "h"), "{answer:?}");
    assert!(matches!(of("fast").refused, Some((_, Refused::Deadline { .. }))), "{answer:?}");
    // No number of such hosts promises 2 ms on this device.
    assert_eq!(answer.buy.iter().map(|b| b.hosts).collect::<Vec<_>>(), [None]);
    assert!(answer.broken.is_empty() && answer.doubts[0].contains("declared"), "{answer:?}");
    let over = text.replace("spec = \"here.toml\"", "spec = \"here.toml\"\ncpu = \"50%\"");
    let answer = assess(&fleet(dir.path(), &over).unwrap(), &|| false);
    assert!(matches!(answer.broken.as_slice(), [(h, Refused::Cpu { .. })] if h == "h"), "{answer:?}");
}

/// What such a contract takes has no number, so no sum shows the room that is left.
#[test]
fn nothing_is_placed_beside_a_contract_in_force_that_is_refused_even_alone() {
    let dir = tempdir().unwrap();
    write(dir.path(), "here.toml", &(DEVICE.to_owned() + &vm("old", 5, 50, 2) + &vm("fine", 5, 50, 60)));
    write(dir.path(), "new.toml", &(DEVICE.to_owned() + &vm("new", 5, 50, 60)));
    let text = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\nspec = \"here.toml\"\n[[contracts]]\nspec = \"new.toml\"\n";
    let answer = assess(&fleet(dir.path(), text).unwrap(), &|| false);
    let new = answer.contracts.iter().find(|c| c.name == "new").unwrap();
    assert!(new.host.is_none(), "{answer:?}");
    assert!(matches!(&new.fits, FitsOn::Hosts(hosts) if hosts.is_empty()), "{answer:?}");
    assert!(matches!(new.refused, Some((_, Refused::Deadline { .. }))), "{answer:?}");
    assert!(!answer.hosts[0].taken.fit(), "{answer:?}");
    assert!(matches!(answer.broken.as_slice(), [(h, Refused::Deadline { .. })] if h == "h"), "{answer:?}");
}

#[test]
fn a_rate_that_one_request_at_a_time_may_miss_is_refused() {
    let dir = tempdir().unwrap();
    let text = "[[host]]\nname = \"h\"\ncount = 2\ntwin = \"qlc-nvme\"\n[[contracts]]\nspec = \"a.toml\"\ncount = 2\n";
    let assessed = |vm: &str| {
        write(dir.path(), "a.toml", &(DEVICE.to_owned() + vm));
        assess(&fleet(dir.path(), text).unwrap(), &|| false).contracts
    };
    for contract in assessed(&vm("a", 80, 9_000, 60)) {
        let refused = contract.refused.as_ref().map(|(_, refused)| refused);
        assert!(matches!(refused, Some(Refused::OneAtATime { vm, .. }) if vm == "a"), "{contract:?}");
        assert_eq!(contract.host, None);
    }
    // Smaller pieces keep the lower rate, and a task that does not wait misses none.
    for kept in [vm("a", 80, 3_000, 60), vm("a", 80, 9_000, 60).replace("op =", "loop = \"open\"\nop =")] {
        let contracts = assessed(&kept);
        assert!(contracts.iter().all(|c| c.host.is_some()), "{contracts:?}");
    }
}

/// What each VM asks for is printed by its name: of two, one would get what the other asks for.
#[test]
fn two_contracts_of_one_name_are_refused() {
    let dir = tempdir().unwrap();
    write(dir.path(), "large.toml", &(DEVICE.to_owned() + &vm("plc", 45, 100, 60)));
    write(dir.path(), "small.toml", &(DEVICE.to_owned() + &vm("plc", 1, 10, 60)));
    write(dir.path(), "named.toml", &(DEVICE.to_owned() + &vm("plc-1", 1, 10, 60)));
    write(dir.path(), "other.toml", &(DEVICE.to_owned() + &vm("hist", 1, 10, 60)));
    let of = |entries: &[&str]| {
        let entry = |e: &&str| format!("[[contracts]]\nspec = {e}\n");
        let host = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\nspec = \"large.toml\"\n".to_owned();
        fleet(dir.path(), &(host + &entries.iter().map(entry).collect::<String>()))
    };
    // One in force somewhere, and others of one kind, are no two.
    of(&["\"large.toml\"\ncount = 3", "\"other.toml\""]).unwrap();
    for (second, name) in
        [("\"small.toml\"", "plc"), ("\"small.toml\"\ncount = 2", "plc"), ("\"named.toml\"", "plc-1")]
    {
        let e = of(&["\"large.toml\"\ncount = 2", second]).unwrap_err().to_string();
        assert!(e.contains(&format!("two contracts of a VM {name}:")), "{e}");
    }
}

#[test]
fn mistakes_name_the_key() {
    let dir = tempdir().unwrap();
    let demand = DEVICE.to_owned()
        + &vm("a", 1, 1, 60)
            .replace("budget = \"1ms\", period = \"100ms\"", "requests = \"50/s\", deadline = \"20ms\"");
    write(dir.path(), "demand.toml", &demand);
    let host = "[[host]]\nname = \"h\"\n";
    for (text, says) in [
        (String::new(), "no [[host]]"),
        (format!("{host}twin = \"qlc-nvme\"\nprofil = 1\n"), "profil"),
        (host.to_owned(), "say one of profile"),
        (format!("{host}twin = \"nvme9\"\n"), "nvme9"),
        (format!("{host}profile = \"none.json\"\n"), "host h"),
        (format!("{host}twin = \"qlc-nvme\"\ncpu = \"150%\"\n"), "\"0%\" to \"100%\""),
        (format!("{host}twin = \"qlc-nvme\"\n{host}twin = \"qlc-nvme\"\n"), "two hosts h"),
        (format!("{host}twin = \"qlc-nvme\"\ncount = 2\nspec = \"demand.toml\"\n"), "give each a [[host]]"),
        (format!("{host}twin = \"qlc-nvme\"\n[[contracts]]\nspec = \"demand.toml\"\n"), "budgets = { a"),
        (format!("{host}twin = \"qlc-nvme\"\ncount = 4294967295\n"), "more than"),
        (format!("{host}twin = \"qlc-nvme\"\ncount = 500001\n"), "more than"),
        (format!("{host}twin = \"qlc-nvme\"\nnetworks = {{ f = \"1bit/s\" }}\n"), "no rate of a link"),
        (format!("{host}twin = \"qlc-nvme\"\nnetworks = {{ f = 5 }}\n"), "a link's rate as"),
        (
            format!("{host}twin = \"qlc-nvme\"\nnetworks = {{ f = {{ link = \"1Gbit/s\", mtu = 20 }} }}\n"),
            "68 to 9216",
        ),
        (
            format!("{host}twin = \"qlc-nvme\"\nnetworks = {{ a-b = \"1Gbit/s\", a_b = \"1Gbit/s\" }}\n"),
            "\"a-b\" and \"a_b\" are both CUSTOM_RTVIRTIO_NET_A_B in OpenStack",
        ),
        // On another host too: a request of the one would be taken from the other.
        (
            format!(
                "{host}twin = \"qlc-nvme\"\nnetworks = {{ up = \"1Gbit/s\" }}\n\
                 [[host]]\nname = \"i\"\ntwin = \"qlc-nvme\"\nnetworks = {{ UP = \"1Gbit/s\" }}\n"
            ),
            "\"up\" and \"UP\" are both",
        ),
    ] {
        let error = fleet(dir.path(), &text).unwrap_err();
        assert!(error.to_string().contains(says), "{error} of {text}");
    }
    let with = format!(
        "{host}twin = \"qlc-nvme\"\n[[contracts]]\nspec = \"demand.toml\"\nbudgets = {{ a = \"20%\" }}\n"
    );
    assert_eq!(fleet(dir.path(), &with).unwrap().kinds[0].cpu.unwrap().0, 0.2);
}

#[test]
fn openstack_counts_the_same_integers() {
    let dir = tempdir().unwrap();
    write(dir.path(), "here.toml", &(DEVICE.to_owned() + &vm("here", 19, 1, 60)));
    write(dir.path(), "new.toml", &(DEVICE.to_owned() + &vm("new", 38, 1, 60)));
    let text = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\nspec = \"here.toml\"\n[[contracts]]\nspec = \"new.toml\"\ncount = 3\n";
    let fleet = fleet(dir.path(), text).unwrap();
    let told = serde_json::to_value(rtvirtio_fleet::OpenStack::from_fleet(&fleet)).unwrap();
    assert_eq!(told["resource_classes"], serde_json::json!(["CUSTOM_RTVIRTIO_CPU", "CUSTOM_RTVIRTIO_DISK"]));
    let cpu = &told["inventories"]["h"]["CUSTOM_RTVIRTIO_CPU"];
    assert_eq!(
        (&cpu["total"], &cpu["reserved"], &cpu["allocation_ratio"]),
        (&1000.into(), &200.into(), &1.0.into())
    );
    assert_eq!(told["flavors"]["new"]["resources:CUSTOM_RTVIRTIO_CPU"], 400);
    let disk = |v: &serde_json::Value| v.as_u64().unwrap();
    let (reserved, takes) = (
        disk(&told["inventories"]["h"]["CUSTOM_RTVIRTIO_DISK"]["reserved"]),
        disk(&told["flavors"]["new"]["resources:CUSTOM_RTVIRTIO_DISK"]),
    );
    assert!(reserved > 0 && reserved == takes, "the same I/O: {told}");
}

/// Without a demand the engine would start it on any host.
#[test]
fn what_no_host_promises_asks_engines_for_more_than_there_is() {
    let dir = tempdir().unwrap();
    write(dir.path(), "new.toml", &(DEVICE.to_owned() + &vm("fast", 1, 50, 2)));
    let text = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\n[[contracts]]\nspec = \"new.toml\"\n";
    let fleet = fleet(dir.path(), text).unwrap();
    let openstack = rtvirtio_fleet::OpenStack::from_fleet(&fleet);
    assert_eq!(openstack.flavors["fast"]["resources:CUSTOM_RTVIRTIO_DISK"], 1_001);
    let kubernetes = rtvirtio_fleet::Kubernetes::from_fleet(&fleet);
    assert_eq!(kubernetes.requests["fast"]["rtvirtio.io/disk"], "1001");
}

fn with_flow(name: &str, mac: u8, rate: u32) -> String {
    DEVICE.to_owned()
        + "[[network]]\nname = \"field\"\nlink = \"100Mbit/s\"\n"
        + &vm(name, 1, 1, 90)
        + &format!(
            "[[vm.nic]]\nmac = \"52:54:00:00:00:{mac:02x}\"\ntap = \"{name}\"\n\
             [[vm.flow]]\nname = \"sv\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"{rate}/s\"\ntarget = {{ latency = \"5ms\" }}\n"
        )
}

#[test]
fn links_carry_what_they_can_and_no_more() {
    let dir = tempdir().unwrap();
    write(dir.path(), "here.toml", &with_flow("here", 1, 20_000));
    write(dir.path(), "new.toml", &with_flow("new", 2, 20_000));
    // The network of the host is that of its spec; 224 bytes, 20 000 times, and 10 %: 40 % of it.
    let text = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\nspec = \"here.toml\"\n\
                [[contracts]]\nspec = \"new.toml\"\ncount = 2\n";
    let answer = assess(&fleet(dir.path(), text).unwrap(), &|| false);
    let placed = answer.contracts.iter().filter(|c| c.host.is_some()).count();
    assert_eq!((placed, answer.hosts[0].taken.networks.len()), (2, 1), "{answer:?}");
    let why = answer.contracts.iter().find_map(|c| c.refused.as_ref()).unwrap();
    assert!(matches!(why.1, Refused::LinkRate { .. }), "{why:?}");
    // On a faster link of the file all have room.
    let fast = text.replace("spec = \"here", "networks = { field = \"1Gbit/s\" }\nspec = \"here");
    let loaded = fleet(dir.path(), &fast).unwrap();
    let answer = assess(&loaded, &|| false);
    assert!(answer.contracts.iter().all(|c| c.host.is_some()), "{answer:?}");
    let told = serde_json::to_value(rtvirtio_fleet::OpenStack::from_fleet(&loaded)).unwrap();
    let net = &told["inventories"]["h"]["CUSTOM_RTVIRTIO_NET_FIELD"];
    let takes = &told["flavors"]["new"]["resources:CUSTOM_RTVIRTIO_NET_FIELD"];
    assert!(net["reserved"] == *takes && takes.as_u64() > Some(0), "the same flows: {told}");
    // Kubernetes has no notion of reserved.
    let told = serde_json::to_value(rtvirtio_fleet::Kubernetes::from_fleet(&loaded)).unwrap();
    let all = told["patches"]["h"].as_array().unwrap();
    let net = all.iter().find(|o| o["path"] == "/status/capacity/rtvirtio.io~1net-field").unwrap();
    assert_eq!(net["value"], (1000 - takes.as_u64().unwrap()).to_string());
    assert_eq!(told["requests"]["new"]["rtvirtio.io/net-field"], takes.to_string());
    let table = text.replace(
        "spec = \"here",
        "networks = { field = { link = \"1Gbit/s\", stall = \"9ms\" } }\nspec = \"here",
    );
    let answer = assess(&fleet(dir.path(), &table).unwrap(), &|| false);
    let why = answer.contracts.iter().find_map(|c| c.refused.as_ref()).unwrap();
    assert!(matches!(why.1, Refused::LinkDeadline { .. }), "{why:?}");
    // A host without the network admits none of them.
    let none = "[[host]]\nname = \"h\"\ntwin = \"qlc-nvme\"\n[[contracts]]\nspec = \"new.toml\"\n";
    let answer = assess(&fleet(dir.path(), none).unwrap(), &|| false);
    assert!(matches!(answer.contracts[0].refused, Some((_, Refused::NoNetwork { .. }))), "{answer:?}");
}

/// Frame, rate and target in ms, and whether the frames are urgent.
type AskedFlow = (u32, u32, u32, bool);

fn flow() -> impl Strategy<Value = Option<AskedFlow>> {
    prop::option::of((60u32..1_500, 1u32..2_000, 5u32..50, any::<bool>()))
}

fn flow_toml(i: usize, (frame, rate, ms, is_urgent): AskedFlow) -> String {
    let mark = if is_urgent { "pcp = 4\n" } else { "" };
    format!(
        "[[vm.nic]]\nmac = \"52:54:00:00:00:{i:02x}\"\ntap = \"tap{i}\"\n[[vm.flow]]\nname = \"f\"\ndirection = \"tx\"\n\
         frame = \"{frame}B\"\nrate = \"{rate}/s\"\n{mark}target = {{ latency = \"{ms}ms\" }}\n"
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// After any arrivals and departures, the full admission accepts the contracts on each host.
    #[test]
    fn nothing_is_placed_beyond_admission(
        many in prop::collection::vec((1u32..40, 1u32..300, 20u32..200, flow(), any::<bool>()), 1..60),
    ) {
        let dir = tempdir().unwrap();
        let specs: String = many
            .iter()
            .enumerate()
            .map(|(i, (cpu, rate, ms, flow, _))| {
                vm(&format!("v{i}"), *cpu, *rate, *ms) + &flow.map_or_else(String::new, |f| flow_toml(i, f))
            })
            .collect();
        let links = "[[network]]\nname = \"field\"\nlink = \"100Mbit/s\"\n";
        write(dir.path(), "all.toml", &(DEVICE.to_owned() + links + &specs));
        // On the slower link flows are the bottleneck.
        let text = "[[host]]\nname = \"h\"\ncount = 3\ntwin = \"qlc-nvme\"\nnetworks = { field = \"100Mbit/s\" }\n\
                    [[host]]\nname = \"e\"\ntwin = \"emmc\"\nnetworks = { field = \"20Mbit/s\" }\n[[contracts]]\nspec = \"all.toml\"\n";
        let fleet = fleet(dir.path(), text).unwrap();
        let classes: Vec<usize> = fleet.hosts.iter().map(|h| h.class).collect();
        let mut cluster = Cluster::new(fleet.classes.clone(), &classes, &fleet.kinds);
        let mut at: Vec<Option<usize>> = Vec::new();
        for (kind, (.., leaves)) in many.iter().enumerate() {
            at.push(cluster.place(kind, Search::Exact { tries: usize::MAX }));
            let older = kind / 2;
            if let Some(host) = at[older].filter(|_| *leaves) {
                cluster.remove(host, older);
                at[older] = None;
            }
        }
        for (host, of) in fleet.hosts.iter().enumerate() {
            let on: Vec<_> = (0..at.len()).filter(|k| at[*k] == Some(host)).map(|k| &fleet.kinds[k]).collect();
            if let Some((last, others)) = on.split_last() {
                prop_assert!(admit(&fleet.classes[of.class], others, last).is_admitted());
            }
        }
    }
}
