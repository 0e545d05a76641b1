//! Three nodes of a real Pacemaker cluster: contracts follow their VMs, and what does not fit is
//! refused before a VM is stopped.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_testbed::cluster::{BUDGET_US, Cluster, ContractCluster, TAKES, VmAgent};
use rtvirtio_testkit::{HANG, Need, has, tempdir, unique};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rtvirtio-pacemaker");
const VMS: [&str; 3] = ["plc", "hmi", "gate"];

/// The VM's own test of Pacemaker: no failure may end as a hang of the test.
fn done<T>(result: Result<T, rtvirtio_testbed::cluster::ClusterError>) -> T {
    result.unwrap_or_else(|e| panic!("{e}"))
}

/// Waits until a VM's contract verifies where the VM runs; returns the node. A resource counts as
/// located while it is still being started.
fn held(site: &ContractCluster, asked: usize, vm: &str) -> usize {
    let begin = Instant::now();
    loop {
        if let Some(node) = site.node_of(asked, vm).filter(|n| site.verifies(*n, vm)) {
            assert_eq!(site.budget(node, vm), Some(BUDGET_US), "{vm} on n{}", node + 1);
            return node;
        }
        assert!(begin.elapsed() < HANG, "the contract of {vm} does not verify: {}", site.cluster.log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What the cluster has of each VM and its contract, as it tells it.
fn written(site: &ContractCluster) {
    let text = done(site.cluster.run(0, &["cibadmin", "--query"]));
    let cib = roxmltree::Document::parse(&text).unwrap();
    let by_id = |id: &str| cib.descendants().find(|n| n.attribute("id") == Some(id)).unwrap();
    for (i, vm) in VMS.iter().enumerate() {
        let meta = by_id(vm).children().find(|n| n.has_tag_name("meta_attributes")).unwrap();
        let value = |name: &str| {
            meta.children().find(|n| n.attribute("name") == Some(name)).and_then(|n| n.attribute("value"))
        };
        assert_eq!(value("priority"), Some((100 - i).to_string().as_str()), "{vm}");
        assert_eq!(value("resource-stickiness"), Some("1000"), "{vm}");
        let stop = by_id(&format!("{vm}-contract-stop"));
        assert_eq!((stop.attribute("name"), stop.attribute("on-fail")), (Some("stop"), Some("ignore")));
    }
}

#[test]
fn contracts_follow_their_vms() {
    let programs = Cluster::PROGRAMS.map(Need::Program);
    let agents = Need::Path("/usr/lib/ocf/resource.d/heartbeat/anything", "no resource-agents");
    let needs = [&[Need::Root, Need::QEMU, Need::RT_GROUPS, agents], &programs[..]].concat();
    if !has("contracts_follow_their_vms", &needs) {
        return;
    }
    let dir = tempdir().unwrap();
    let program = Path::new(PROGRAM);
    let mut site =
        done(ContractCluster::start(dir.path(), &unique("pcmk"), program, 3, VmAgent::Process, false));
    VMS.iter().for_each(|vm| done(site.add_vm(0, vm)));
    done(site.set_contracts(&VMS));
    done(site.publish(&[0, 1, 2]));
    // By the budget of the node's own group.
    let published = done(site.published(0));
    assert_eq!(published.len(), 9, "{published:?}");
    for p in &published {
        assert_eq!((&p["takes"]["rtvirtio-cpu"], &p["veto"]), (&TAKES.into(), &false.into()), "{p}");
    }
    done(site.constrain(0));
    written(&site);
    let at: Vec<usize> = VMS.iter().map(|vm| held(&site, 0, vm)).collect();
    let mut nodes = at.clone();
    nodes.sort_unstable();
    assert_eq!(nodes, [0, 1, 2], "balanced over the nodes: {at:?}");

    // Another program changes a budget: the agent's monitor restores it.
    let path = site.budget_file(at[0], "plc");
    fs::write(&path, "500").unwrap();
    let restored =
        |_: &Cluster| Ok(fs::read_to_string(&path).is_ok_and(|t| t.trim() == BUDGET_US.to_string()));
    done(site.cluster.wait("the monitor to restore the budget", HANG, restored));

    // An operator moves a VM next to another: there is room for two.
    let full = at[1];
    let to = format!("n{}", full + 1);
    done(site.cluster.run(0, &["crm_resource", "--move", "-r", "gate", "-N", &to]));
    done(site.wait_held("gate", &[full], HANG));
    assert_eq!(held(&site, 0, "gate"), full);
    assert_eq!(site.budget(at[2], "gate"), None, "what was left is put back");

    // And a third: the node refuses, with the reason, and the VM is never stopped.
    done(site.publish(&[0, 1, 2]));
    let all = done(site.published(0));
    let veto = all.iter().find(|p| p["resource"] == "plc" && p["node"] == to.as_str()).unwrap();
    assert_eq!(veto["veto"], true, "{veto}");
    assert!(veto["why"].as_str().unwrap().contains("of each CPU"), "{veto}");
    assert!(all.iter().all(|p| p["node"] != to.as_str() || p["resource"] == "plc" || p["veto"] == false));
    let before = site.start_of(at[0], "plc");
    assert!(before.is_some());
    done(site.cluster.run(0, &["crm_resource", "--move", "-r", "plc", "-N", &to]));
    // Until the cluster has done all that follows from it.
    done(site.cluster.run(0, &["crm_resource", "--wait"]));
    assert_eq!(held(&site, 0, "plc"), at[0], "it was not moved");
    assert_eq!(site.start_of(at[0], "plc"), before, "and never stopped");
    for vm in ["plc", "gate"] {
        done(site.cluster.run(0, &["crm_resource", "--clear", "-r", vm]));
    }

    // A node dies: its VM and the contract come up where there is room.
    site.cluster.kill_node(at[0]);
    let other = at[2];
    let waiting: Vec<usize> = vec![full, other];
    assert_eq!(done(site.wait_held("plc", &waiting, HANG)), other, "the other node is full");
    for (vm, node) in [("plc", other), ("hmi", full), ("gate", full)] {
        assert_eq!(site.budget(node, vm), Some(BUDGET_US), "{vm}");
        // The agent's own look may be under way.
        rtvirtio_testkit::site::wait_for(&format!("{vm} verifies"), || site.verifies(node, vm));
    }
}
