use rtvirtio_model::{Bfq, Elevator, VmConfig};
use rtvirtio_spec::LabKind;

use super::*;
use crate::tests::{fig7, knobs, profile, spec, start, task};
use crate::{Knob, PlanOptions, Space, check_actable, plan, quality};

fn start_of(vms: usize) -> Config {
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vec![vm; vms] }
}

fn vm(path: &[(&str, u32)], ceiling: Option<f64>) -> Placement {
    let path = path.iter().map(|(path, weight)| CgroupNode { path: (*path).to_owned(), weight: *weight });
    Placement { own_cgroup: true, path: path.collect(), ceiling: ceiling.map(Iops), ..Placement::default() }
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

/// The share of a VM is the product along its path: 300 in a cgroup of 50 next to one of 150 has a
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

/// VMs with different parents have no weights that compare; their parents' weights count in the
/// prediction.
#[test]
fn weights_are_searched_between_siblings_only() {
    let s = fig7();
    let place = |parent: &str, i: usize, weight: u32| Placement {
        own_cgroup: true,
        path: [(parent.to_owned(), weight), (format!("{parent}/vm{i}"), 100)]
            .map(|(path, weight)| CgroupNode { path, weight })
            .to_vec(),
        ..Placement::default()
    };
    let n = s.vms.len();
    let weights = |options: &PlanOptions| -> Vec<String> {
        let p = plan(&s, &profile(), options).unwrap();
        check_actable(&s, &options.placements, &options.start, &p.settings).unwrap();
        let of = |k: &&Knob| matches!(k, Knob::VmWeight { .. });
        knobs(&p).into_iter().filter(of).map(|k| format!("{k:?}")).collect()
    };
    let mut options = PlanOptions::new(start(&s));
    // Nothing but weights can be set, and those in force starve the most urgent VM.
    options.space = Space {
        elevators: Vec::new(),
        slice_idle: Vec::new(),
        timeout_sync: Vec::new(),
        max_budget: Vec::new(),
        caps: false,
        guests: false,
        ..Space::default()
    };
    for (i, vm) in options.start.vms.iter_mut().enumerate() {
        vm.weight = if i == 0 { 1 } else { 700 };
    }
    assert!(!weights(&options).is_empty(), "siblings have weights");
    options.placements = Placements::new((0..n).map(|i| place(&format!("/p{i}"), i, 100)).collect());
    assert!(weights(&options).is_empty(), "no two have one parent");
    // The first two are siblings, the others are not.
    options.placements = Placements::new((0..n).map(|i| place(&format!("/p{}", i.max(1)), i, 100)).collect());
    let set = weights(&options);
    assert!(set.iter().all(|w| w.contains("vm0") || w.contains("vm1")), "{set:?}");
    // The parents' weights decide whether a VM's target holds.
    let of = |first: u32| {
        let mut options = PlanOptions::new(start(&s));
        options.placements = Placements::new(
            (0..n).map(|i| place(&format!("/p{i}"), i, if i == 0 { first } else { 100 })).collect(),
        );
        let quality = quality(&s, &profile(), &options, &options.start).unwrap();
        (quality.missed, quality.margin)
    };
    assert_ne!(of(1), of(1000));
}

/// A limit that no plan sets stays in the prediction.
#[test]
fn a_ceiling_above_a_vm_is_counted() {
    let s = spec(LabKind::Process, &[vec![task("a", 100.0, Some(50))], vec![task("b", 20.0, Some(200))]]);
    let free = PlanOptions::new(start(&s));
    assert!(plan(&s, &profile(), &free).unwrap().feasible);
    let at = |path: &str, ceiling| Placement {
        own_cgroup: true,
        path: vec![CgroupNode { path: path.to_owned(), weight: 100 }],
        ceiling,
        ceiling_by: "raise `iops-read` of drive d0".to_owned(),
        ..Placement::default()
    };
    let mut options = PlanOptions::new(start(&s));
    options.placements = Placements::new(vec![at("/a", Some(Iops(30.0))), at("/b", None)]);
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(!p.feasible && p.tasks[0].forecast.rate_kept < 0.31, "{p:?}");
    assert!(p.tasks[1].forecast.rate_kept > 0.99);
    // No longer target helps a VM whose rate is limited; the limit is named with its remedy.
    let reason = p.infeasible.unwrap().reason;
    assert!(
        reason.contains("vm0 gets at most 30/s, and its tasks ask for 100/s: raise `iops-read`"),
        "{reason}"
    );
    assert!(!reason.contains("move a VM away"), "{reason}");
}
