use std::cmp::Reverse;

use super::*;

fn judged(hosts: usize, seed: u64, sizes: &[Size]) -> Outcomes {
    let mut random = Random::new(seed);
    let mut outcomes = Outcomes::default();
    for number in 0..hosts {
        let size = sizes[number % sizes.len()];
        run_host(size, host(size, &mut random), &mut random, &mut outcomes).unwrap();
    }
    outcomes
}

fn data(outcomes: Outcomes, seconds: Seconds) -> CoresData {
    CoresData {
        schema: CoresData::SCHEMA.to_owned(),
        host: HostFacts { cpus: 2, ..HostFacts::default() },
        command: String::new(),
        generated: String::new(),
        seed: 1,
        hosts: 100,
        outcomes,
        seconds,
    }
}

#[test]
fn placements_on_random_hosts_break_no_rule_and_all_that_fits_is_placed() {
    let outcomes = judged(120, 5, &[Size::Small, Size::Medium]);
    assert!(outcomes.broken.is_empty(), "{outcomes:?}");
    assert_eq!((outcomes.small.refused_wrongly, outcomes.small.farther), (0, 0), "{outcomes:?}");
    assert!(outcomes.placed > 120 && outcomes.refused > 30, "{outcomes:?}");
    assert!(outcomes.small.fit > 30 && outcomes.small.vms > outcomes.small.fit, "{outcomes:?}");
    assert_eq!(judged(9, 6, &[Size::Medium]), judged(9, 6, &[Size::Medium]), "a seed has its hosts");
}

#[test]
fn a_vm_is_counted_by_the_best_of_all_placements() {
    let order = |nodes, domains, speed| Order { nodes, domains, speed: Reverse(speed) };
    let counted = |best: Option<Order>, found: Option<(Order, usize)>| {
        let mut small = Small::default();
        small.count(best, found);
        assert_eq!(small.vms, 1);
        [small.fit, small.refused_wrongly, small.farther, small.slower]
    };
    let best = Some(order(1, 2, 2048));
    assert_eq!(counted(None, None), [0, 0, 0, 0]);
    assert_eq!(counted(best, None), [1, 1, 0, 0]);
    assert_eq!(counted(best, Some((order(1, 2, 2048), 0))), [1, 0, 0, 0]);
    assert_eq!(counted(best, Some((order(1, 2, 1024), 0))), [1, 0, 0, 1]);
    assert_eq!(counted(best, Some((order(1, 3, 2048), 0))), [1, 0, 1, 0]);
    assert_eq!(counted(best, Some((order(1, 3, 2048), 1))), [1, 0, 0, 0], "as was said");
    assert_eq!(counted(best, Some((order(2, 2, 2048), 0))), [1, 0, 1, 0]);
    assert_eq!(counted(best, Some((order(2, 2, 2048), 1))), [1, 0, 0, 0]);
}

#[test]
fn claims_are_of_what_was_counted() {
    let small = Small { vms: 300, fit: 200, refused_wrongly: 2, farther: 1, slower: 3 };
    let outcomes = Outcomes { placed: 1000, refused: 400, small, ..Outcomes::default() };
    let seconds = Seconds { whole: vec![0.02; 20], mixed: vec![0.03; 20] };
    let good = data(outcomes, seconds);
    let of = |data: &CoresData, id: &str| data.claims().into_iter().find(|claim| claim.id == id).unwrap();
    assert!(good.claims().iter().all(|claim| claim.met));
    assert_eq!(of(&good, "cores.refused_wrongly").value, 0.01);
    assert_eq!((of(&good, "cores.seconds").value, of(&good, "cores.seconds").n), (0.03, 20));
    assert_eq!(of(&good, "cores.farther").n, 198);
    let mut bad = good;
    bad.outcomes.broken = BTreeMap::from([(Rule::Alone, 1)]);
    assert!(!of(&bad, "cores.violations").met);
    bad.outcomes.small.refused_wrongly = 3;
    assert!(!of(&bad, "cores.refused_wrongly").met);
    bad.seconds.whole = vec![0.2; 20];
    assert!(!of(&bad, "cores.seconds").met);
    let none = data(Outcomes::default(), Seconds { whole: Vec::new(), mixed: Vec::new() });
    assert!(none.claims().iter().filter(|claim| claim.has_limit()).all(|claim| !claim.met));
    let text = serde_json::to_string(&bad).unwrap();
    assert_eq!(crate::saved::from_json::<CoresData>(&text).unwrap(), bad);
}

#[test]
fn a_large_host_takes_64_vms() {
    assert!(time_of(&|_| own_cpus()).is_ok());
    assert!(time_of(&|vm| if vm % 2 == 0 { own_cpus() } else { shared_cpus() }).is_ok());
}
