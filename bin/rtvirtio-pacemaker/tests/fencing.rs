//! A node whose link is cut is switched off before its VM starts elsewhere.

use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_testbed::cluster::{BUDGET_US, Cluster, ContractCluster, VmAgent, runs_in};
use rtvirtio_testkit::{HANG, Need, has, tempdir, unique};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rtvirtio-pacemaker");

fn done<T>(result: Result<T, rtvirtio_testbed::cluster::ClusterError>) -> T {
    result.unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_cut_node_is_off_before_its_vm_starts_elsewhere() {
    let programs = Cluster::PROGRAMS.map(Need::Program);
    let agents = Need::Path("/usr/lib/ocf/resource.d/heartbeat/anything", "no resource-agents");
    let needs = [&[Need::Root, Need::QEMU, Need::RT_GROUPS, agents], &programs[..]].concat();
    if !has("a_cut_node_is_off_before_its_vm_starts_elsewhere", &needs) {
        return;
    }
    let dir = tempdir().unwrap();
    let program = Path::new(PROGRAM);
    let mut site =
        done(ContractCluster::start(dir.path(), &unique("fence"), program, 3, VmAgent::Process, true));
    let all = [0, 1, 2];
    done(site.add_vm(0, "plc"));
    done(site.set_contracts(&["plc"]));
    done(site.publish(&all));
    done(site.constrain(0));
    let cut = done(site.wait_held("plc", &all, HANG));
    assert_eq!(all.map(|n| site.cluster.switched_off(n)), [None; 3]);

    let groups = all.map(|n| site.cluster.group(n, "cpu"));
    done(site.cluster.set_link(cut, false));
    let begin = Instant::now();
    loop {
        let on: Vec<usize> = all.into_iter().filter(|n| runs_in(&groups[*n], "plc")).collect();
        assert!(on.len() < 2, "it runs on {on:?}");
        if on.first().is_some_and(|n| *n != cut) {
            break;
        }
        assert!(begin.elapsed() < HANG, "plc starts nowhere: {}", site.cluster.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    let off = site.cluster.switched_off(cut);
    assert!(off.is_some_and(|at| at >= begin), "the node was not switched off before");
    let others: Vec<usize> = all.into_iter().filter(|n| *n != cut).collect();
    let on = done(site.wait_held("plc", &others, HANG));
    assert_eq!(site.budget(on, "plc"), Some(BUDGET_US));
    // The others were left alone.
    assert!(others.iter().all(|n| site.cluster.switched_off(*n).is_none()));
}
