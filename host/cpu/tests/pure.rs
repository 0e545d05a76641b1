//! Admission, splitting and order: arithmetic only.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use rtvirtio_cpu::{Backend, Contract, Grant, Level, Load, Order, Over, Share, admit, attr, levels, split};
use rtvirtio_kernel::sched::Policy;
use rtvirtio_units::{Nanos, Ratio};
use rtvirtio_vmm::Role;

const GROUP: Backend = Backend::RtGroup;

fn contract(budget_ms: u64, period_ms: u64) -> Contract {
    Contract::new(Nanos::from_millis(budget_ms), Nanos::from_millis(period_ms)).unwrap()
}

fn grant(limit: f64, fair_server: f64, taken: &[(&str, f64)]) -> Grant {
    let taken = taken
        .iter()
        .map(|(name, s)| Load { name: (*name).to_owned(), share: Ratio(*s), over: Over::Every, pid: None })
        .collect();
    Grant { limit: Ratio(limit), fair_server: Ratio(fair_server), taken }
}

fn vms(all: &[Contract]) -> Vec<(String, Contract)> {
    all.iter().enumerate().map(|(i, c)| (format!("vm{i}"), *c)).collect()
}

#[test]
fn a_contract_is_never_impossible() {
    assert_eq!(Contract::new(Nanos::from_millis(21), Nanos::from_millis(20)), None);
    assert_eq!(Contract::new(Nanos(999), Nanos::from_millis(20)), None);
    let full = Contract::new(Nanos::from_millis(20), Nanos::from_millis(20)).unwrap();
    assert_eq!((full.share(), full.to_string()), (Ratio(1.0), "20ms in 20ms".to_owned()));
    assert_eq!(contract(4, 20).budget_us(), 4000);
}

#[test]
fn what_fits_is_admitted_and_the_rest_is_said() {
    let free = admit(&grant(0.95, 0.0, &[]), &vms(&[contract(4, 20), contract(15, 20)])).unwrap();
    assert!(free.0.abs() < 1e-9, "{free:?}");
    let free = admit(&grant(0.95, 0.05, &[("cgroup web", 0.3)]), &vms(&[contract(4, 20)])).unwrap();
    assert!((free.0 - 0.4).abs() < 1e-9, "{free:?}");
}

#[test]
fn a_refusal_says_by_how_much_and_what_would_fit() {
    let all = vms(&[contract(10, 20), contract(6, 20)]);
    let error = admit(&grant(0.95, 0.05, &[("cgroup web", 0.2)]), &all).unwrap_err().to_string();
    assert_eq!(
        error,
        "vm1: its contract of 6ms in 20ms is 10.0 % of each CPU too much: the kernel grants 95.0 %, 5.0 % of it to its fair server, \
         and is taken: 20.0 % by cgroup web, 50.0 % by vm0; write budget = \"4000us\" at most"
    );
    // Many processes of one program are one item.
    let many = vec![("deadline threads of jackd", 0.1); 9];
    let full = admit(&grant(0.95, 0.0, &many), &vms(&[contract(4, 20)])).unwrap_err().to_string();
    assert!(full.contains("and is taken: 90.0 % by deadline threads of jackd;"), "{full}");
    let full = admit(&grant(0.95, 0.0, &[("cgroup web", 0.95)]), &vms(&[contract(1, 20)])).unwrap_err();
    assert!(
        full.to_string().ends_with("take some from the others, or move the VM to another host"),
        "{full}"
    );
}

#[test]
fn a_root_domain_grants_what_its_own_deadline_threads_leave() {
    let all: BTreeSet<u32> = (0..16).collect();
    let set = |cpus: &[u32]| cpus.iter().copied().collect::<BTreeSet<u32>>();
    let mut grant = grant(0.95, 0.05, &[("rest", 0.3), ("two", 0.4), ("one", 0.2), ("cgroup web", 0.1)]);
    let over = [Over::Rest(all), Over::Partition(set(&[2, 3])), Over::Partition(set(&[4])), Over::Every];
    grant.taken.iter_mut().zip(over).for_each(|(load, over)| load.over = over);
    let near = |grant: &Grant, free: f64| (grant.free() - free).abs() < 1e-9;
    assert!(near(&grant, 0.5), "{grant:?}");
    // The same threads on 12 CPUs.
    let partitions = set(&[2, 3, 4, 5]);
    let rest = grant.in_root_domain(None, &partitions);
    assert!(near(&rest, 0.4) && !rest.is_exceeded(), "{rest:?}");
    let of = |cpus: &[u32]| grant.in_root_domain(Some(&set(cpus)), &partitions);
    assert!(near(&of(&[2, 3]), 0.4), "{:?}", of(&[2, 3]));
    // A fifth of one CPU is a tenth of two.
    assert!(near(&of(&[4, 5]), 0.7), "{:?}", of(&[4, 5]));
    let few = grant.in_root_domain(None, &(0..12).collect());
    assert!(few.is_exceeded() && near(&few, 0.0), "{few:?}");
    let text = admit(&of(&[2, 3]), &vms(&[contract(19, 20)])).unwrap_err().to_string();
    assert!(text.contains("40.0 % by two") && !text.contains("rest"), "{text}");
    let text = admit(&grant, &vms(&[contract(19, 20)])).unwrap_err().to_string();
    assert!(text.contains("30.0 % by rest") && !text.contains("two"), "{text}");
}

#[test]
fn a_budget_follows_use_slowly() {
    let used = |a, b| [(1, Duration::from_millis(a)), (2, Duration::from_millis(b))];
    let first = split(4_000_000, 1, 20_000_000, &used(300, 100), None).unwrap();
    // Truncated to whole nanoseconds, never rounded up.
    let near = |shares: &[Share], expected: [u64; 2]| {
        shares.iter().zip(expected).all(|(s, e)| (e - 1..=e).contains(&s.runtime))
    };
    assert!(near(&first, [2_875_000, 1_125_000]), "{first:?}");
    // All load moves to the other thread: a quarter of the way at each split.
    let next = split(4_000_000, 1, 20_000_000, &used(0, 400), Some(&first)).unwrap();
    assert!(near(&next, [2_218_750, 1_781_250]), "{next:?}");
    let mut shares = next;
    for _ in 0..40 {
        shares = split(4_000_000, 1, 20_000_000, &used(0, 400), Some(&shares)).unwrap();
    }
    // An eighth is divided evenly: a thread that has done nothing yet can answer all the same.
    assert!(shares[0].runtime < 251_000 && shares[1].runtime > 3_749_000, "{shares:?}");
    assert!(shares[0].runtime >= 250_000, "{shares:?}");
    assert_eq!(split(90_000, 1, 20_000_000, &used(1, 1), None), None, "less than 50 us for each");
    let even = split(4_000_000, 1, 20_000_000, &used(0, 0), None).unwrap();
    assert_eq!(even[0].runtime, even[1].runtime);
}

/// A vCPU that was just plugged in has used nothing, and its guest is about to start it.
#[test]
fn a_thread_that_comes_gets_an_even_part_and_its_own_by_and_by() {
    let used = |last| [(1, 300), (2, 100), (3, last)].map(|(tid, ms)| (tid, Duration::from_millis(ms)));
    let before = split(4_000_000, 1, 20_000_000, &used(0)[..2], None).unwrap();
    let mut shares = split(4_000_000, 1, 20_000_000, &used(0), Some(&before)).unwrap();
    // A third counts for it at first, next to all that the others had: a quarter of 4 ms.
    assert!(shares[2].runtime >= 1_000_000, "{shares:?}");
    for _ in 0..40 {
        shares = split(4_000_000, 1, 20_000_000, &used(0), Some(&shares)).unwrap();
    }
    assert!(shares[2].runtime < 170_000, "{shares:?}");
    let busy = split(4_000_000, 1, 20_000_000, &used(4000), Some(&before)).unwrap();
    assert!(busy[2].runtime > busy[0].runtime, "{busy:?}");
}

/// The paper's rule: the main loop and I/O threads at the highest priority, vCPUs one below, AIO
/// workers out of the class.
#[test]
fn whatever_serves_a_vcpu_stands_above_it() {
    let vcpu = |order| attr(&Role::Vcpu(vec![0]), order, Level::ALONE, GROUP).unwrap();
    for order in [Order::Contract, Order::Rt] {
        for service in [Role::Emulator, Role::IoThread("a".into()), Role::Vhost, Role::KvmPit] {
            assert!(
                attr(&service, order, Level::ALONE, GROUP).unwrap().priority > vcpu(order).priority,
                "{service} {order:?}"
            );
        }
        assert_eq!(attr(&Role::Other, order, Level::ALONE, GROUP), None);
    }
    assert_eq!(
        attr(&Role::Emulator, Order::Rt, Level::ALONE, GROUP).unwrap().to_string(),
        "fifo 98 reset-on-fork"
    );
    assert_eq!(vcpu(Order::Rt).to_string(), "fifo 97 reset-on-fork");
    assert_eq!(attr(&Role::AioWorker, Order::Rt, Level::ALONE, GROUP).unwrap().policy, Policy::Other);
    // A worker that inherits stays in the budget.
    assert!(!attr(&Role::Emulator, Order::Contract, Level::ALONE, GROUP).unwrap().reset_on_fork);
    assert_eq!(attr(&Role::AioWorker, Order::Contract, Level::ALONE, GROUP).unwrap().policy, Policy::Fifo);
}

proptest! {
    /// Admitted contracts never exceed the grant, and refused ones would.
    #[test]
    fn admission_is_exact(
        limit in 0.0..=1.0f64,
        server in 0.0..0.2f64,
        taken in prop::collection::vec(0.0..0.5f64, 0..4),
        budgets in prop::collection::vec((1..=100u64, 1..=100u64), 1..8),
    ) {
        let loads: Vec<_> = taken.iter().map(|t| ("x", *t)).collect();
        let grant = grant(limit, server, &loads);
        let contracts: Vec<_> = budgets.iter().map(|(a, b)| contract(*a.min(b), *a.max(b))).collect();
        let sum: f64 = contracts.iter().map(|c| c.share().0).sum();
        let free = (limit - server - taken.iter().sum::<f64>()).max(0.0);
        // The kernel's own rounding: 20 binary digits for each.
        let tolerance = 8.0 / f64::from(1 << 20);
        match admit(&grant, &vms(&contracts)) {
            Ok(left) => {
                prop_assert!(sum <= free + tolerance);
                prop_assert!((left.0 - (free - sum)).abs() < tolerance);
            }
            Err(_) => prop_assert!(sum > free - tolerance),
        }
    }

    /// For any change of load, the parts never exceed the budget and no thread is left without one.
    #[test]
    fn a_split_never_passes_the_budget(
        budget in 1_000_000..100_000_000u64,
        cpus in 1..8u32,
        rounds in prop::collection::vec(prop::collection::vec(0..1000u64, 1..8), 1..6),
    ) {
        let mut before = None;
        for round in rounds {
            let used: Vec<_> = (0..).zip(&round).map(|(tid, ms)| (tid, Duration::from_millis(*ms))).collect();
            let shares = split(budget, cpus, 100_000_000, &used, before.as_deref()).unwrap();
            let sum: u64 = shares.iter().map(|s| s.runtime).sum();
            prop_assert!(sum <= budget * u64::from(cpus), "{sum}");
            prop_assert!(shares.iter().all(|s| (50_000..=100_000_000).contains(&s.runtime)));
            before = Some(shares);
        }
    }
}

#[test]
fn shorter_periods_stand_above_and_services_above_all_vcpus_of_their_vm() {
    let ms = |budget: u64, period: u64| {
        Contract::new(Nanos(budget * 1_000_000), Nanos(period * 1_000_000)).unwrap()
    };
    let group = Backend::RtGroup;
    let all = [
        (group, Order::Contract, ms(10, 100)),
        (group, Order::Contract, ms(2, 10)),
        (group, Order::Rt, ms(1, 50)),
        (group, Order::Contract, ms(20, 100)),
        (Backend::Deadline, Order::Contract, ms(1, 5)),
        (group, Order::Rt, ms(1, 20)),
        (Backend::Throttle, Order::Rt, ms(1, 2)),
    ];
    let found = levels(&all);
    let of = |above, below| Level { above, below };
    assert_eq!(found, [of(1, 1), of(0, 2), of(1, 0), of(2, 0), of(0, 0), of(0, 1), of(0, 0)]);
    let at = |i: usize, role: &Role| attr(role, all[i].1, found[i], all[i].0).unwrap().priority;
    let vcpu = Role::Vcpu(vec![0]);
    // From the first to the last: each VM's vCPUs are above the services of the next.
    for pair in [5, 2, 1, 0, 3].windows(2) {
        assert!(at(pair[0], &vcpu) > at(pair[1], &Role::Emulator), "{pair:?}");
    }
    assert_eq!((at(5, &Role::Emulator), at(2, &vcpu), at(1, &Role::Emulator), at(3, &vcpu)), (98, 95, 6, 1));
    // Interrupt threads of the host, at 50, stay between the two however many VMs there are.
    let many = levels(&vec![(group, Order::Contract, ms(1, 10)); 60]);
    let many_rt = levels(&vec![(group, Order::Rt, ms(1, 10)); 60]);
    assert!(many.iter().all(|l| attr(&Role::Emulator, Order::Contract, *l, group).unwrap().priority < 50));
    assert!(many_rt.iter().all(|l| attr(&vcpu, Order::Rt, *l, group).unwrap().priority > 50));
    // Where levels run out, it is the longest periods that share one.
    for (order, all) in [(Order::Contract, &many), (Order::Rt, &many_rt)] {
        let at = |i: usize| attr(&vcpu, order, all[i], group).unwrap().priority;
        assert!(at(0) > at(1) && at(21) > at(22) && at(22) == at(59), "{order:?}");
    }
    // Without a budget of its own a VM stays below the interrupt threads.
    let free = |role: &Role| attr(role, Order::Rt, Level::ALONE, Backend::Throttle).unwrap().priority;
    assert_eq!((free(&Role::Emulator), free(&vcpu)), (49, 48));
}
