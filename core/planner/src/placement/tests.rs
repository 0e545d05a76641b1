use super::*;
use rtvirtio_model::{Bfq, Elevator, VmConfig};

fn start_of(vms: usize) -> Config {
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vec![vm; vms] }
}

fn vm(path: &[(&str, u32)], ceiling: Option<f64>) -> Placement {
    let path = path.iter().map(|(path, weight)| CgroupNode { path: (*path).to_owned(), weight: *weight });
    Placement { own_cgroup: true, path: path.collect(), ceiling: ceiling.map(Iops) }
}

fn weights(placements: &Placements, own: &[u32]) -> Vec<u32> {
    let mut config = start_of(own.len());
    config.vms.iter_mut().zip(own).for_each(|(vm, weight)| vm.weight = *weight);
    placements.in_effect(&config).vms.iter().map(|vm| vm.weight).collect()
}

#[test]
fn siblings_keep_their_weights() {
    let all =
        Placements::new(vec![vm(&[("/m", 500), ("/m/a", 1)], None), vm(&[("/m", 500), ("/m/b", 1)], None)]);
    assert_eq!(weights(&all, &[50, 300]), [50, 300]);
    assert!((0..2).all(|i| all.weights_compare(i) && all.limits_act(i)));
    assert_eq!(weights(&Placements::default(), &[50, 300]), [50, 300]);
}

/// The share of a VM is the product along its path: 300 in a cgroup of 50 beside one of 150 has a
/// quarter of the device, whatever the other VM's own weight.
#[test]
fn weights_of_different_parents_act_through_these() {
    let all = Placements::new(vec![
        vm(&[("/rt", 50), ("/rt/a", 1)], None),
        vm(&[("/nort", 150), ("/nort/b", 1)], None),
    ]);
    assert_eq!(weights(&all, &[300, 50]), [333, 1000]);
    assert_eq!(weights(&all, &[1, 1000]), [333, 1000]);
    assert!((0..2).all(|i| !all.weights_compare(i) && all.limits_act(i)) && !all.any_weights_compare());
    // Two of three are siblings: between them their weights act.
    let all = Placements::new(vec![
        vm(&[("/rt", 100), ("/rt/a", 1)], None),
        vm(&[("/nort", 100), ("/nort/b", 1)], None),
        vm(&[("/nort", 100), ("/nort/c", 1)], None),
    ]);
    assert_eq!(weights(&all, &[100, 100, 300]), [1000, 250, 750]);
    assert_eq!([0, 1, 2].map(|i| all.weights_compare(i)), [false, true, true]);
    // A VM at the height of another's parent.
    let all = Placements::new(vec![vm(&[("/a", 1)], None), vm(&[("/x", 100), ("/x/b", 1)], None)]);
    assert_eq!(weights(&all, &[300, 7]), [1000, 333]);
}

#[test]
fn a_cap_is_no_higher_than_the_ceiling() {
    let all = Placements::new(vec![vm(&[("/m/a", 1)], Some(30.0)), vm(&[("/m/b", 1)], None)]);
    let mut config = start_of(2);
    let caps = |config: &Config| -> Vec<_> {
        all.in_effect(config).vms.iter().map(|vm| vm.cap.map(|cap| cap.0)).collect()
    };
    assert_eq!(caps(&config), [Some(30.0), None]);
    config.vms[0].cap = Some(Iops(10.0));
    config.vms[1].cap = Some(Iops(90.0));
    assert_eq!(caps(&config), [Some(10.0), Some(90.0)]);
    config.vms[0].cap = Some(Iops(100.0));
    assert_eq!(caps(&config), [Some(30.0), Some(90.0)]);
}

#[test]
fn in_one_cgroup_nothing_acts_on_one_vm_alone() {
    let all = Placements::shared(2);
    assert!((0..2).all(|i| !all.weights_compare(i) && !all.limits_act(i)));
    assert_eq!(weights(&all, &[100, 100]), [1000, 1000]);
    let shared = Placement { own_cgroup: false, ..vm(&[("/m", 1)], None) };
    let all = Placements::new(vec![shared.clone(), shared, vm(&[("/own", 1)], None)]);
    assert_eq!(weights(&all, &[100, 100, 100]), [500, 500, 1000]);
    assert_eq!([0, 1, 2].map(|i| all.limits_act(i)), [false, false, true]);
}
