//! Rules for the HA manager of Proxmox VE, and the placements that follow from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rtvirtio_capacity::{Contract, admit};
use rtvirtio_fleet::{Fleet, HaRule, NoRule, Proxmox, ProxmoxError, ProxmoxVersion, load};
use rtvirtio_testkit::tempdir;

fn vm(name: &str, reach: &str, budget_ms: u32) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\n{reach}\ncpu = {{ budget = \"{budget_ms}ms\", period = \"100ms\" }}\n[[vm.task]]\nname = \"t\"\n\
         op = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\ntarget = {{ percentile = \"p99.99\", latency = \"60ms\" }}\n"
    )
}

fn write(dir: &Path, name: &str, vms: &[String]) {
    fs::write(dir.join(name), "[device]\npath = \"/dev/sda\"\n".to_owned() + &vms.concat()).unwrap();
}

fn fleet(dir: &Path, text: &str) -> Fleet {
    fs::write(dir.join("fleet.toml"), text).unwrap();
    load(&dir.join("fleet.toml")).unwrap()
}

fn told(fleet: &Fleet) -> Proxmox {
    Proxmox::from_fleet(fleet, ProxmoxVersion::V9, &|| false).unwrap()
}

/// Node on which the HA manager starts a resource while one node is lost.
fn runs_on<'r>(rule: &'r HaRule, lost: Option<&str>) -> Option<&'r str> {
    let online = rule.nodes.iter().filter(|n| Some(n.node.as_str()) != lost);
    online.max_by_key(|n| n.priority).map(|n| n.node.as_str())
}

#[test]
fn after_any_single_loss_the_priorities_lead_to_what_is_admitted() {
    let dir = tempdir().unwrap();
    write(dir.path(), "here.toml", &[vm("here", "proxmox = 100", 30)]);
    let sizes = [40, 35, 30, 20, 15, 10];
    let vms: Vec<String> =
        (101..).zip(sizes).map(|(id, ms)| vm(&format!("v{id}"), &format!("proxmox = {id}"), ms)).collect();
    write(dir.path(), "new.toml", &vms);
    let text = "[[host]]\nname = \"n1\"\ntwin = \"qlc-nvme\"\nspec = \"here.toml\"\n\
                [[host]]\nname = \"n2\"\ntwin = \"qlc-nvme\"\n[[host]]\nname = \"n3\"\ntwin = \"qlc-nvme\"\n\
                [[contracts]]\nspec = \"new.toml\"\n";
    let fleet = fleet(dir.path(), text);
    let told = told(&fleet);
    assert_eq!((told.rules.len(), told.without.len()), (7, 0), "{told:?}");
    let kind =
        |rule: &HaRule| &fleet.kinds[fleet.contracts.iter().find(|c| c.name == rule.contract).unwrap().kind];
    let class = |node: &str| &fleet.classes[fleet.hosts.iter().find(|h| h.name == node).unwrap().class];
    for lost in [None, Some("n1"), Some("n2"), Some("n3")] {
        let mut on: BTreeMap<&str, Vec<&Contract>> = BTreeMap::new();
        for rule in &told.rules {
            on.entry(runs_on(rule, lost).unwrap()).or_default().push(kind(rule));
        }
        for (node, contracts) in on {
            let (last, others) = contracts.split_last().unwrap();
            let admission = admit(class(node), others, last);
            assert!(admission.is_admitted(), "{node} without {lost:?}: {admission:?}");
        }
    }
    let here = &told.rules[0];
    assert_eq!((here.contract.as_str(), here.resource.as_str()), ("n1/here", "vm:100"));
    assert_eq!((here.nodes[0].node.as_str(), here.nodes[0].priority), ("n1", 3));
    let list: Vec<String> = here.nodes.iter().map(|n| format!("{}:{}", n.node, n.priority)).collect();
    let list = list.join(",");
    assert_eq!(
        here.commands,
        [format!("ha-manager rules add node-affinity rtvirtio-100 --resources vm:100 --nodes {list}")]
    );
    let eight = Proxmox::from_fleet(&fleet, ProxmoxVersion::V8, &|| false).unwrap();
    assert_eq!(
        eight.rules[0].commands,
        [
            format!("ha-manager groupadd rtvirtio-100 --nodes {list}"),
            "ha-manager set vm:100 --group rtvirtio-100".to_owned()
        ]
    );
}

#[test]
fn what_has_no_rule_says_why() {
    let dir = tempdir().unwrap();
    let host = "[[host]]\nname = \"n1\"\ntwin = \"qlc-nvme\"\n";
    write(dir.path(), "large.toml", &[vm("large", "proxmox = 200", 99)]);
    write(dir.path(), "alike.toml", &[vm("alike", "proxmox = 201", 1)]);
    write(dir.path(), "other.toml", &[vm("other", "qmp = \"/run/other.qmp\"", 1)]);
    let contracts = "[[contracts]]\nspec = \"large.toml\"\n[[contracts]]\nspec = \"alike.toml\"\ncount = 1\n[[contracts]]\nspec = \"other.toml\"\n";
    let told = told(&fleet(dir.path(), &(host.to_owned() + contracts)));
    assert!(told.rules.is_empty(), "{told:?}");
    let why: Vec<(&str, NoRule)> = told.without.iter().map(|w| (w.contract.as_str(), w.why)).collect();
    assert_eq!(why, [("large", NoRule::NoHost), ("alike-1", NoRule::NoNumber), ("other", NoRule::NoNumber)]);

    let of = |text: &str| Proxmox::from_fleet(&fleet(dir.path(), text), ProxmoxVersion::V9, &|| false);
    let twice = format!("{host}spec = \"alike.toml\"\n[[contracts]]\nspec = \"alike.toml\"\n");
    assert!(matches!(of(&twice), Err(ProxmoxError::Twice { id: 201, .. })));
    let dotted = host.replace("n1", "n1.example");
    assert_eq!(of(&dotted), Err(ProxmoxError::Node { host: "n1.example".to_owned() }));
}
