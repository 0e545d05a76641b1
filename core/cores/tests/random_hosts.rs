//! Placements on random hosts, against the rules and against exhaustive search.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rtvirtio_cores::{Cpu, Host, Placement, Refused, Request, Use};

/// xorshift64: the same hosts in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 33).unwrap() % n
    }

    fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(u32::try_from(of.len()).unwrap()) as usize]
    }
}

/// Nodes, caches for each, cores for each, CPUs for each.
fn regular(shape: [u32; 4]) -> Vec<Cpu> {
    let [nodes, llcs, cores, threads] = shape;
    let (per_llc, per_node) = (cores * threads, llcs * cores * threads);
    let cpu = |id: u32| Cpu {
        id,
        core: id / threads * threads,
        llc: id / per_llc * per_llc,
        node: id / per_node,
        capacity: 1024,
        isolated: false,
        tickless: false,
    };
    (0..nodes * per_node).map(cpu).collect()
}

fn host(random: &mut Random, most: u32) -> Host {
    let shape = loop {
        let shape = [1 + random.below(3), 1 + random.below(3), 1 + random.below(8), 1 + random.below(2)];
        if shape.iter().product::<u32>() <= most {
            break shape;
        }
    };
    let mut cpus = regular(shape);
    let (isolated, slow) = (random.below(3) == 0, random.below(4) == 0);
    for cpu in &mut cpus {
        cpu.isolated = isolated && cpu.core % 3 == 1;
        cpu.capacity = if slow && cpu.core % 5 > 2 { 512 } else { 1024 };
    }
    // CPUs that are offline.
    cpus.retain(|cpu| cpu.id == 0 || random.below(12) > 0);
    Host::new(cpus, 950).unwrap()
}

fn request(random: &mut Random, vcpus: u32) -> Request {
    let each = match random.below(2) {
        0 => Use::Whole,
        _ => Use::Part(random.one_of(&[50, 200, 475, 600, 950])),
    };
    let node = (random.below(6) == 0).then_some(0);
    let service_share = random.one_of(&[20, 100, 300]);
    Request { vcpus: 1 + random.below(vcpus), each, service: random.below(4), service_share, node }
}

/// Rules that placements together break on a host.
fn violations(host: &Host, all: &[Placement]) -> usize {
    let cpus: BTreeMap<u32, &Cpu> = host.cpus().iter().map(|cpu| (cpu.id, cpu)).collect();
    let mut broken = 0;
    let mut sum: BTreeMap<u32, u32> = BTreeMap::new();
    let mut of_core: BTreeMap<u32, BTreeSet<usize>> = BTreeMap::new();
    let mut whole = BTreeSet::new();
    for (vm, placement) in all.iter().enumerate() {
        let asked = placement.request;
        let distinct: BTreeSet<_> = placement.vcpus.iter().collect();
        broken += usize::from(distinct.len() != asked.vcpus as usize);
        broken += usize::from(placement.service.len() != asked.service as usize);
        let each = if let Use::Part(share) = asked.each { share } else { 1000 };
        let vcpus = placement.vcpus.iter().map(|cpu| (cpu, each, true));
        for (id, share, vcpu) in
            vcpus.chain(placement.service.iter().map(|cpu| (cpu, asked.service_share, false)))
        {
            let Some(cpu) = cpus.get(id) else {
                broken += 1;
                continue;
            };
            *sum.entry(*id).or_default() += share;
            of_core.entry(cpu.core).or_default().insert(vm);
            let own = vcpu && asked.each == Use::Whole;
            if own {
                whole.insert((*id, cpu.core));
            }
            broken += usize::from(cpu.isolated && !own);
            broken += usize::from(asked.node.is_some_and(|node| node != cpu.node));
        }
    }
    for (id, core) in &whole {
        broken += usize::from(sum[id] != 1000) + usize::from(of_core[core].len() != 1);
    }
    let alone: BTreeSet<u32> = whole.iter().map(|(id, _)| *id).collect();
    broken + sum.iter().filter(|(id, sum)| !alone.contains(id) && **sum > 950).count()
}

#[test]
fn no_rule_is_broken_on_ten_thousand_hosts() {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let (mut placed, mut refused) = (0, 0);
    for _ in 0..10_000 {
        let empty = host(&mut random, 48);
        let (mut now, mut all) = (empty.clone(), Vec::new());
        for _ in 0..1 + random.below(8) {
            let ask = request(&mut random, 12);
            match now.place(&ask) {
                Ok(placement) => {
                    assert_eq!(placement.beyond, 0);
                    now.take(&placement);
                    all.push(placement);
                    placed += 1;
                }
                Err(Refused::Room { asked, vcpus, share }) => {
                    refused += 1;
                    // What is said to fit does, and one more does not.
                    let fits = |ask: Request| now.place(&ask).is_ok();
                    assert!(vcpus == 0 || fits(Request { vcpus, ..asked }));
                    assert!(vcpus + 1 == asked.vcpus || !fits(Request { vcpus: vcpus + 1, ..asked }));
                    assert!(share == 0 || fits(Request { each: Use::Part(share), ..asked }));
                }
                Err(Refused::Node(_)) => {}
                Err(Refused::Request) => panic!("{ask:?}"),
            }
            if random.below(5) == 0 && !all.is_empty() {
                let ends = random.below(u32::try_from(all.len()).unwrap()) as usize;
                now.release(&all.swap_remove(ends));
            }
            assert_eq!(violations(&empty, &all), 0, "{all:?}");
        }
        all.iter().for_each(|placement| now.release(placement));
        assert_eq!(now, empty, "all that was taken is given back");
    }
    println!("{placed} placed, {refused} refused");
    assert!(placed > 10_000 && refused > 5_000);
}

/// All placements of one request on what others leave, by trying each CPU for each thread.
fn exhaustive(host: &Host, taken: &[Placement], ask: &Request) -> Option<(usize, usize)> {
    fn go(host: &Host, all: &mut Vec<Placement>, best: &mut Option<(usize, usize)>) {
        let (now, asked) = (all.last().unwrap(), all.last().unwrap().request);
        if now.vcpus.len() < asked.vcpus as usize || now.service.len() < asked.service as usize {
            let vcpu = now.vcpus.len() < asked.vcpus as usize;
            let least = if vcpu { now.vcpus.last() } else { now.service.last() }.copied();
            for cpu in host.cpus().iter().map(|cpu| cpu.id) {
                // Threads of a kind are alike: one order of them is enough.
                if least.is_some_and(|least| cpu < least || (vcpu && cpu == least)) {
                    continue;
                }
                let last = all.last_mut().unwrap();
                if vcpu { &mut last.vcpus } else { &mut last.service }.push(cpu);
                go(host, all, best);
                let last = all.last_mut().unwrap();
                if vcpu { &mut last.vcpus } else { &mut last.service }.pop();
            }
        } else if violations(host, all) == 0 {
            let used = now.vcpus.iter().chain(&now.service);
            let cpus: Vec<&Cpu> =
                used.map(|id| host.cpus().iter().find(|cpu| cpu.id == *id).unwrap()).collect();
            let nodes: BTreeSet<_> = cpus.iter().map(|cpu| cpu.node).collect();
            let domains: BTreeSet<_> = cpus.iter().map(|cpu| cpu.domain()).collect();
            let cost = (nodes.len(), domains.len());
            *best = Some(best.map_or(cost, |best| best.min(cost)));
        }
    }
    let mut all = taken.to_vec();
    let (vcpus, service) = (Vec::new(), Vec::new());
    all.push(Placement { request: *ask, vcpus, service, nodes: 0, domains: 0, beyond: 0 });
    let mut best = None;
    go(host, &mut all, &mut best);
    best
}

#[test]
fn small_hosts_get_what_exhaustive_search_finds() {
    let mut random = Random(0x0123_4567_89AB_CDEF);
    let (mut placed, mut refused) = (0, 0);
    for _ in 0..600 {
        let (mut now, mut all) = (host(&mut random, 8), Vec::new());
        for _ in 0..3 {
            let ask = Request { service: random.below(3), ..request(&mut random, 4) };
            let found = now.place(&ask);
            let best = exhaustive(&now, &all, &ask);
            assert_eq!(found.as_ref().ok().map(|p| (p.nodes, p.domains)), best, "{ask:?} on {now:?}");
            match found {
                Err(_) => refused += 1,
                Ok(placement) => {
                    now.take(&placement);
                    all.push(placement);
                    placed += 1;
                }
            }
        }
    }
    println!("{placed} placed, {refused} refused");
    assert!(placed > 300 && refused > 300);
}

/// vCPUs that come later break no rule, move nothing, and stay as near as there is room.
#[test]
fn later_vcpus_get_what_is_free_and_move_nothing() {
    let mut random = Random(0x2545_F491_4F6C_DD1D);
    let (mut placed, mut refused, mut on_siblings) = (0, 0, 0);
    for _ in 0..5_000 {
        let empty = host(&mut random, 32);
        let (mut now, mut all) = (empty.clone(), Vec::<Placement>::new());
        for _ in 0..2 + random.below(10) {
            let at = random.below(u32::try_from(all.len()).unwrap() + 1) as usize;
            let Some(had) = all.get(at).cloned() else {
                let found = now.place(&request(&mut random, 5));
                all.extend(found.ok().inspect(|placement| now.take(placement)));
                continue;
            };
            match now.place_more(&had, 1) {
                Ok(more) => {
                    assert_eq!(more.vcpus[..had.vcpus.len()], had.vcpus);
                    assert_eq!((&more.service, more.vcpus.len()), (&had.service, had.vcpus.len() + 1));
                    let core = |id: &u32| now.cpus().iter().find(|cpu| cpu.id == *id).unwrap().core;
                    let of_last = core(more.vcpus.last().unwrap());
                    on_siblings += usize::from(had.vcpus.iter().any(|cpu| core(cpu) == of_last));
                    now.release(&had);
                    now.take(&more);
                    all[at] = more;
                    placed += 1;
                }
                Err(_) => {
                    // By trying each CPU.
                    for cpu in now.cpus() {
                        let mut tried = all.clone();
                        tried[at].vcpus.push(cpu.id);
                        tried[at].request.vcpus += 1;
                        assert!(violations(&empty, &tried) > 0, "{had:?} and CPU {} on {now:?}", cpu.id);
                    }
                    refused += 1;
                }
            }
            assert_eq!(violations(&empty, &all), 0, "{all:?}");
        }
    }
    println!("{placed} placed, {on_siblings} of them next to their own, {refused} refused");
    assert!(placed > 3_000 && refused > 2_000 && on_siblings > 300);
}

#[test]
fn later_vcpus_stay_on_the_node_where_there_is_room() {
    let mut host = Host::new(regular([2, 2, 1, 2]), 950).unwrap();
    let ask = Request { vcpus: 1, each: Use::Whole, service: 0, service_share: 0, node: None };
    let mut one = host.place(&ask).unwrap();
    host.take(&one);
    for (cpu, nodes, domains) in [(1, 1, 1), (2, 1, 2), (3, 1, 2), (4, 2, 3)] {
        let more = host.place_more(&one, 1).unwrap();
        assert_eq!((more.vcpus.last(), more.nodes, more.domains), (Some(&cpu), nodes, domains));
        host.release(&one);
        host.take(&more);
        one = more;
    }
    host.only(&[0, 1, 2, 3, 4].into());
    let refused = host.place_more(&one, 1).unwrap_err();
    assert!(matches!(refused, Refused::Room { vcpus: 0, .. }), "{refused}");
}

/// 64 VMs on 256 CPUs in 2 nodes of 8 caches. How long that takes is printed, not asserted.
#[test]
fn a_large_host_is_filled_by_64_vms() {
    let mut host = Host::new(regular([2, 8, 8, 2]), 950).unwrap();
    let ask = Request { vcpus: 3, each: Use::Whole, service: 2, service_share: 100, node: None };
    let begun = Instant::now();
    for vm in 0..64 {
        let placement = host.place(&ask).unwrap_or_else(|e| panic!("VM {vm}: {e}"));
        assert_eq!((placement.nodes, placement.domains, placement.beyond), (1, 1, 0), "VM {vm}");
        host.take(&placement);
    }
    println!("64 VMs on 256 CPUs: {:?}", begun.elapsed());
    // Each VM has two cores, and a spare sibling for its service threads; nothing is left.
    let Err(Refused::Room { vcpus, share, .. }) = host.place(&ask) else { panic!("a 65th VM") };
    assert_eq!((vcpus, share), (0, 0));
}

#[test]
fn cores_for_the_host_and_requests_that_are_none() {
    let mut host = Host::new(regular([1, 1, 2, 2]), 950).unwrap();
    host.keep(1);
    let ask = Request { vcpus: 2, each: Use::Whole, service: 0, service_share: 0, node: None };
    assert_eq!(host.place(&ask).unwrap().vcpus, [2, 3]);
    let more = Request { vcpus: 3, ..ask };
    let refused = host.place(&more).unwrap_err();
    assert_eq!(refused, Refused::Room { asked: more, vcpus: 2, share: 0 });
    assert!(refused.to_string().ends_with("2 vCPUs would fit"), "{refused}");
    let beside = Request { service: 1, service_share: 100, ..ask };
    let refused = host.place(&beside).unwrap_err();
    assert_eq!(refused, Refused::Room { asked: beside, vcpus: 1, share: 850 });
    for bad in
        [Request { vcpus: 0, ..ask }, Request { each: Use::Part(0), ..ask }, Request { service: 1, ..ask }]
    {
        assert_eq!(host.place(&bad), Err(Refused::Request));
    }
    assert_eq!(host.place(&Request { node: Some(7), ..ask }), Err(Refused::Node(7)));
}

/// 32 caches, of which some are full: more sets of 16 than can be tried.
#[test]
fn where_not_all_sets_are_tried_the_distance_has_a_bound() {
    let mut host = Host::new(regular([1, 32, 4, 1]), 950).unwrap();
    (0..24).for_each(|i| host.keep(i * 4 + i % 4));
    let ask = Request { vcpus: 56, each: Use::Part(900), service: 0, service_share: 0, node: None };
    let placement = host.place(&ask).unwrap();
    // 8 whole caches have 32 CPUs, and 8 more have 24.
    assert_eq!((placement.domains, placement.beyond), (16, 0));
    // With service threads the bound is not met by the largest.
    let more = host.place(&Request { service: 40, service_share: 900, ..ask }).unwrap();
    assert!(more.domains - more.beyond <= 31 && more.beyond < more.domains, "{more:?}");
}
