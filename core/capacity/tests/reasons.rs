//! Text of refusals.

use rtvirtio_capacity::{Contract, DeviceModel, Disk, Node, Options, Refused, admit};
use rtvirtio_spec::HostSpec;
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::{Bytes, Ratio};

fn node(cpu: f64) -> Node {
    let device =
        DeviceModel::declared("qlc-nvme", &TwinProfile::built_in("qlc-nvme").unwrap(), Bytes(1 << 30));
    Node { disks: vec![Disk::new(None, &device, &Options::default())], networks: Vec::new(), cpu: Ratio(cpu) }
}

fn contract(more: &str) -> Contract {
    let text = format!(
        "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\ncpu = {{ budget = \"4ms\", period = \"20ms\" }}\n\
         [[vm.task]]\nname = \"t\"\nop = \"write\"\nblock = \"4KiB\"\n{more}\n"
    );
    let host = HostSpec::parse("test", &text).unwrap();
    let mut all = Contract::all_of(&host, |_| Err("a demand")).unwrap();
    all.remove(0)
}

const MODEST: &str = "rate = \"100/s\"\ntarget = { percentile = \"p99.99\", latency = \"30ms\" }";

#[test]
fn it_takes_of_disk_and_cpu_and_is_admitted() {
    let answer = admit(&node(0.8), &[], &contract(MODEST));
    assert!(answer.is_admitted() && answer.fits_by_sum(), "{answer:?}");
    assert_eq!(answer.takes.cpu.0, 250);
    assert!((1..500).contains(&answer.takes.disks[0].0), "{answer:?}");
    assert_eq!(answer.in_force.cpu.0, 0);
}

#[test]
fn each_resource_refuses_with_its_numbers() {
    let c = contract(MODEST);
    let cpu = admit(&node(0.5), &[&c, &c], &c);
    assert_eq!(cpu.refused, Some(Refused::Cpu { asked: 0.6000000000000001, available: 0.5 }));
    assert!(cpu.refused.unwrap().to_string().contains("60.0 % of each CPU"));
    let fast = contract("rate = \"900/s\"\ntarget = { percentile = \"p99.99\", latency = \"30ms\" }");
    let many = vec![&fast; 40];
    assert!(matches!(admit(&node(100.0), &many, &fast).refused, Some(Refused::DeviceTime { .. })));
    let short = contract("rate = \"1/s\"\ntarget = { percentile = \"p99.99\", latency = \"2ms\" }");
    let answer = admit(&node(0.8), &[], &short);
    match answer.refused {
        Some(Refused::Deadline { ref vm, needed, deadline, .. }) if vm == "a" && needed > deadline => {}
        ref other => panic!("{other:?}"),
    }
    // The device's garbage collection is in the reason.
    assert!(answer.refused.unwrap().to_string().contains("8ms for its own stalls"));
    assert!(answer.takes.disks[0].0 > 1000);
}

#[test]
fn a_disk_that_is_not_there_and_targets_that_nothing_covers_are_named() {
    let mut elsewhere = contract(MODEST);
    elsewhere.disks[0].device = Some("fast".to_owned());
    let answer = admit(&node(0.8), &[], &elsewhere);
    assert_eq!(answer.refused, Some(Refused::NoDisk { device: "fast".to_owned(), known: "disk".to_owned() }));
    let synced = contract(
        "rate = \"10/s\"\nsync = \"fdatasync\"\ntarget = { percentile = \"p99\", latency = \"30ms\" }",
    );
    let answer = admit(&node(0.8), &[], &synced);
    assert!(answer.is_admitted());
    assert_eq!((answer.takes.disks[0].0, answer.unpromised.len()), (0, 1), "no target is covered");
}
