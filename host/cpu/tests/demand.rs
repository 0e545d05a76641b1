//! Curves, the worst case of a contract, and the look-up of a budget: arithmetic only.

use proptest::prelude::*;
use rtvirtio_cpu::{
    Asked, Backend, CPU_PROFILE_SCHEMA, Contract, CpuProfile, CurveChoice, Demand, DemandError, Neighbour,
    Neighbours, Order, Run, Setup, Surroundings, find, find_all, interference_us, points, tick,
};
use rtvirtio_units::{Iops, Nanos};

const TICK: Nanos = Nanos::from_millis(1);

fn run(budget_percent: u64, neighbour_percent: Option<u64>, requests_per_s: f64) -> Run {
    // 2.1 ms of CPU time for each request, as in the paper.
    let cpu = requests_per_s * 0.0021;
    Run { round: 0, budget_percent, neighbour_percent, requests_per_s, cpu, neighbour_requests_per_s: None }
}

/// Profile of a VM that answers 4 requests a second for each percent, measured three times, and a
/// quarter less next to a neighbour of 40 %.
fn profile(period_ms: u64) -> CpuProfile {
    let mut runs = Vec::new();
    for budget in (10..=90).step_by(10) {
        for noise in [-1.0, 0.0, 1.0] {
            runs.push(run(budget, None, 4.0 * budget as f64 + noise));
            if budget <= 50 {
                runs.push(run(budget, Some(10), 3.8 * budget as f64 + noise));
                runs.push(run(budget, Some(40), 3.0 * budget as f64 + noise));
            }
        }
    }
    with(runs, period_ms)
}

fn with(runs: Vec<Run>, period_ms: u64) -> CpuProfile {
    let setup = Setup {
        vm: "web".to_owned(),
        kernel: "6.18".to_owned(),
        cpu_model: "x".to_owned(),
        cpus: 2,
        vcpus: 1,
        backend: Backend::RtGroup,
        order: Order::Contract,
        period_us: period_ms * 1000,
        seconds: 5.0,
        load: "http://web/".to_owned(),
        neighbour: Some(Neighbour { vm: "other".to_owned(), load: "x".to_owned(), budgets: vec![10, 40] }),
        budgets: vec![10],
        repeat: 3,
    };
    CpuProfile {
        schema: CPU_PROFILE_SCHEMA.to_owned(),
        version: "0".to_owned(),
        generated: "now".to_owned(),
        setup,
        free_requests_per_s: 400.0,
        runs,
    }
}

fn demand(requests: f64, deadline_ms: u64) -> Demand {
    Demand { requests: Iops(requests), deadline: Nanos::from_millis(deadline_ms) }
}

fn here(others: u32) -> Surroundings {
    Surroundings { backend: Backend::RtGroup, tick: TICK, others }
}

fn next_to(percent: f64) -> Neighbours {
    Neighbours { share: percent / 100.0, unknown: false, count: 1 }
}

fn contract(budget_us: u64, period_us: u64) -> Contract {
    Contract::new(Nanos(budget_us * 1000), Nanos(period_us * 1000)).unwrap()
}

#[test]
fn a_bound_is_students_and_falls_to_what_larger_budgets_carry() {
    let of = |all: &[(u64, f64)]| points(&all.iter().map(|(b, r)| run(*b, None, *r)).collect::<Vec<_>>());
    // 100, 102, 104: mean 102, sd 2, t(2 degrees) = 2.920.
    let one = of(&[(20, 100.0), (20, 104.0), (20, 102.0)]);
    assert_eq!((one[0].n, one[0].mean, one[0].sd), (3, 102.0, 2.0));
    assert!((one[0].lower.unwrap() - (102.0 - 2.92 * 2.0 / 3f64.sqrt())).abs() < 1e-9);
    assert!((one[0].cpu_per_request.unwrap() - 0.0021).abs() < 1e-12);
    // One measurement shows nothing about the next.
    assert_eq!(of(&[(20, 100.0)])[0].lower, None);
    // Two measurements that differ much: the bound is 0, never negative.
    assert_eq!(of(&[(20, 1.0), (20, 9.0)])[0].lower, Some(0.0));
    let falling = of(&[(20, 100.0), (20, 100.0), (40, 60.0), (40, 60.0), (60, 90.0), (60, 90.0)]);
    let lower: Vec<_> = falling.iter().map(|p| p.lower.unwrap()).collect();
    assert_eq!(lower, [60.0, 60.0, 90.0]);
}

/// Shin and Lee's worst case, and the debt of a tick.
#[test]
fn the_latest_answer_is_the_supply_bound_functions() {
    let at = |tick: u64, others: u32, budget, period, work_us: u64| {
        let s = Surroundings { backend: Backend::RtGroup, tick: Nanos(tick * 1000), others };
        s.latest(contract(budget, period), Nanos(work_us * 1000)).0 / 1000
    };
    // The paper's 4 ms in 20 ms and 2.1 ms: nothing for 32 ms, then a fifth.
    assert_eq!(at(0, 0, 4000, 20_000, 2100), 32_000 + 10_500);
    assert_eq!(at(0, 0, 20_000, 20_000, 2100), 2100, "a whole CPU");
    // Measured on a kernel with a tick of 4 ms: 21.0 ms without a CPU at 1 ms in 5 ms, 9.3 ms at 2
    // ms in 5 ms.
    assert_eq!(at(4000, 0, 1000, 5000, 0), 8000 + 20_000);
    assert_eq!(at(4000, 0, 2000, 5000, 0), 6000 + 10_000);
    assert_eq!(at(4000, 1, 2000, 5000, 0), 6000 + 20_000, "another VM's tick runs into its time");
    // One server for each thread on the way: 3 x 2 P, and the work on two of them, by seven eighths
    // of the budget.
    let deadline = Surroundings { backend: Backend::Deadline, tick: Nanos(0), others: 0 };
    assert_eq!(deadline.latest(contract(2000, 10_000), Nanos(700_000)).0, 60_000_000 + 8_000_000);
    assert_eq!(deadline.period_for(Nanos::from_millis(120)), Nanos::from_millis(10));
    assert_eq!(here(0).period_for(Nanos::from_millis(20)), Nanos::from_millis(5));
    assert_eq!(here(0).period_for(Nanos::from_millis(60_000)), Nanos::from_millis(1000), "the longest");
    // 1, 2.5, 3.3, 4, 10 ms are the ticks that Linux can have.
    assert!((900_000..=10_100_000).contains(&tick().0), "{:?}", tick());
}

#[test]
fn neighbours_of_one_priority_may_take_two_budgets_in_a_row() {
    let own = contract(4000, 10_000);
    assert_eq!(interference_us(own, &[]), 0);
    assert_eq!(interference_us(own, &[contract(3000, 10_000)]), 6000);
    // ceil((10 + 5 - 2) / 5) = 3 times 2 ms.
    assert_eq!(interference_us(own, &[contract(2000, 5000), contract(1000, 100_000)]), 6000 + 2000);
}

#[test]
fn the_smallest_budget_that_carries_the_requests_is_taken() {
    let p = profile(5);
    // 4 a second for each percent, less t(2) 1/sqrt(3) = 1.69: 20 % carries 78.3 surely.
    let alone = find(&p, &demand(78.0, 100), &Neighbours::default(), here(0)).unwrap();
    assert_eq!((alone.contract, alone.curve), (contract(1000, 5000), CurveChoice::Alone));
    let alone = find(&p, &demand(79.0, 100), &Neighbours::default(), here(0)).unwrap();
    assert_eq!(alone.contract, contract(1500, 5000), "its mean of 80 is no promise");
    assert_eq!((alone.point.budget_percent, alone.point.n), (30, 3));
    assert!((alone.work.as_millis_f64() - 2.1).abs() < 1e-6);
    let words = alone.description(&demand(79.0, 100));
    for part in
        ["1.5ms in 5ms for 79/s within 100ms", "is 30 %, which answered 120/s", "n = 3", "measured alone"]
    {
        assert!(words.contains(part), "{words}");
    }
}

/// A budget on each of two CPUs carries more than one CPU's share; then the worst case does not
/// hold for all requests.
#[test]
fn requests_that_take_several_cpus_at_once_are_reported() {
    let mut p = profile(10);
    let at = |p: &CpuProfile| find(p, &demand(70.0, 200), &Neighbours::default(), here(0)).unwrap();
    // 70 a second of 2.1 ms are 14.7 % of a CPU, in a budget of 20 %.
    assert!(!at(&p).parallel);
    p.runs.iter_mut().for_each(|r| r.cpu *= 1.5);
    assert!(at(&p).parallel);
    assert!(at(&p).description(&demand(70.0, 200)).contains("several CPUs"));
}

/// Global EDF on several CPUs has a tardiness that depends on threads of others.
#[test]
fn a_latest_answer_under_sched_deadline_is_an_estimate() {
    let mut p = profile(10);
    let group = find(&p, &demand(70.0, 200), &Neighbours::default(), here(0)).unwrap();
    assert!(!group.estimate && !group.description(&demand(70.0, 200)).contains("estimated"));
    p.setup.backend = Backend::Deadline;
    let threads = Surroundings { backend: Backend::Deadline, ..here(0) };
    let split = find(&p, &demand(70.0, 200), &Neighbours::default(), threads).unwrap();
    assert!(split.estimate, "{split:?}");
    let words = split.description(&demand(70.0, 200));
    assert!(words.contains("of CPU time is estimated to be answered within"), "{words}");
}

#[test]
fn neighbours_are_looked_up_in_the_curve_with_them() {
    let p = profile(10);
    let at = |percent: f64| find(&p, &demand(70.0, 200), &next_to(percent), here(1)).unwrap();
    assert_eq!(
        (at(10.0).curve, at(10.0).point.budget_percent),
        (CurveChoice::Neighbour { neighbour_percent: 10 }, 20)
    );
    assert_eq!(
        (at(11.0).curve, at(11.0).point.budget_percent),
        (CurveChoice::Neighbour { neighbour_percent: 40 }, 30)
    );
    // 10 % more than measured: 70 / 0.9 = 77.8, of which 30 % carries 88.3 next to 40 %.
    let beyond = at(50.0);
    assert!(
        matches!(beyond.curve, CurveChoice::BeyondNeighbour { neighbour_percent: 40, margin } if (margin - 0.1).abs() < 1e-9)
    );
    assert!((beyond.needed.0 - 70.0 / 0.9).abs() < 1e-9);
    // The load of a VM without a contract is unknown: the largest neighbour that was measured.
    let unknown = Neighbours { unknown: true, ..Neighbours::default() };
    let choice = find(&p, &demand(70.0, 200), &unknown, here(1)).unwrap();
    assert_eq!(choice.curve, CurveChoice::Neighbour { neighbour_percent: 40 });
    // No curve with a neighbour.
    let alone = with(p.runs.iter().filter(|r| r.neighbour_percent.is_none()).cloned().collect(), 10);
    let margin = |b: &Neighbours| find(&alone, &demand(70.0, 200), b, here(1)).unwrap();
    assert_eq!(
        (margin(&next_to(5.0)).curve, margin(&next_to(5.0)).point.budget_percent),
        (CurveChoice::Margin { margin: 0.3 }, 30)
    );
    assert_eq!(margin(&next_to(60.0)).curve.margin(), 0.6);
    assert_eq!(margin(&unknown).curve.margin(), 0.3);
}

#[test]
fn what_no_budget_carries_is_refused_with_the_number() {
    let p = profile(10);
    let error = |d: &Demand, b: &Neighbours| find(&p, d, b, here(1)).unwrap_err();
    let text = error(&demand(400.0, 200), &Neighbours::default()).to_string();
    assert!(
        text.contains("carries 400/s: 400/s are needed") && text.contains("358.3/s is the most"),
        "{text}"
    );
    let others = next_to(40.0);
    let text = error(&demand(200.0, 200), &others).to_string();
    assert!(
        text.contains("alongside a neighbour of 40 %") && text.contains("ask for at most 148.3/s"),
        "{text}"
    );
    // Enough throughput, but 2 (10 - 9) + 2 x 1/0.9 + 2.1/0.9 = 6.6 ms is the best at this period.
    let late = error(&demand(10.0, 6), &Neighbours::default());
    let text = late.to_string();
    assert!(late.is_infeasible() && text.contains("comes after 6.556ms, with 90 %"), "{text}");
    assert!(text.contains("profile cpu web --period 1.5ms"), "{text}");
    // A short deadline may need more than the throughput does: 2 (10 - 4) + 1/0.4 + 2.1/0.4 = 19.75
    // ms.
    let d = demand(10.0, 20);
    assert_eq!(find(&p, &d, &Neighbours::default(), here(0)).unwrap().point.budget_percent, 40);
}

#[test]
fn a_profile_that_says_too_little_is_refused() {
    let p = profile(10);
    let first: Vec<Run> = (1..=9).map(|b| run(b * 10, None, b as f64)).collect();
    for (profile, part) in
        [(with(first, 10), "--repeat 3"), (with(Vec::new(), 10), "no measurement of this VM alone")]
    {
        let error = find(&profile, &demand(1.0, 100), &Neighbours::default(), here(0)).unwrap_err();
        assert!(!error.is_infeasible() && error.to_string().contains(part), "{error}");
    }
    let other = Surroundings { backend: Backend::Deadline, ..here(0) };
    let text = find(&p, &demand(1.0, 100), &Neighbours::default(), other).unwrap_err().to_string();
    assert!(
        text.contains("measured under cpu.rt_runtime_us") && text.contains("held by SCHED_DEADLINE"),
        "{text}"
    );
}

#[test]
fn a_file_comes_back_as_it_was_saved() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("web.json");
    let mut p = profile(10);
    p.runs[0].requests_per_s = 0.1 + 0.2;
    let json = p.to_json().unwrap();
    assert_eq!(json["points"][0]["n"], 3);
    std::fs::write(&path, json.to_string()).unwrap();
    assert_eq!(CpuProfile::load(&path).unwrap(), p);
    let error = |text: String| {
        std::fs::write(&path, text).unwrap();
        CpuProfile::load(&path).unwrap_err().to_string()
    };
    assert!(error(json.to_string().replace("profile.v1", "profile.v2")).contains("profile.v2"));
    assert!(error("{".to_owned()).contains("no CPU profile"));
    p.runs[3].cpu = -1.0;
    assert!(error(p.to_json().unwrap().to_string()).contains("run 3 is impossible"));
    p.runs[3].cpu = 1.0;
    p.setup.period_us = 0;
    assert!(error(p.to_json().unwrap().to_string()).contains("its period is 0 us"));
}

#[test]
fn two_demands_count_as_each_others_neighbours() {
    let p = profile(10);
    let ask = |r: f64| Asked::Found { profile: &p, demand: demand(r, 300), backend: Backend::RtGroup };
    let found = find_all(&[ask(60.0), ask(60.0), Asked::Given(contract(1000, 10_000))], 0.0, TICK).unwrap();
    let one = found[0].as_ref().unwrap();
    // 20 % + 10 % are next to each: the curve of 40 %, on which 30 % carries 88.3.
    assert_eq!((one.point.budget_percent, one.curve), (30, CurveChoice::Neighbour { neighbour_percent: 40 }));
    assert!(found[2].is_none());
    let error = find_all(&[ask(60.0), ask(180.0)], 0.0, TICK).unwrap_err();
    assert!(matches!(error, DemandError::TooMany { .. }), "{error}");
    // Other shares count too.
    let found = find_all(&[ask(60.0)], 0.05, TICK).unwrap();
    assert_eq!(found[0].as_ref().unwrap().curve, CurveChoice::Neighbour { neighbour_percent: 10 });
}

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let one = (1..=9u64, prop::option::of(1..=4u64), 0.0..500.0f64, 0.0..1.0f64);
    let all = prop::collection::vec(one, 1..60);
    all.prop_map(|v| {
        let make =
            |(b, n, r, cpu): (u64, Option<u64>, f64, f64)| Run { cpu, ..run(b * 10, n.map(|n| n * 10), r) };
        v.into_iter().map(make).collect()
    })
}

proptest! {
    /// On every curve the bound never falls with the budget, and is never above the mean.
    #[test]
    fn bounds_are_monotone(runs in runs()) {
        let all = points(&runs);
        prop_assert_eq!(all.iter().map(|p| p.n).sum::<usize>(), runs.len());
        for p in &all {
            let later = all.iter().filter(|q| q.neighbour_percent == p.neighbour_percent && q.budget_percent > p.budget_percent);
            for q in later {
                if let (Some(a), Some(b)) = (p.lower, q.lower) {
                    prop_assert!(a <= b, "{p:?} {q:?}");
                }
            }
            prop_assert!(p.lower.is_none_or(|l| l <= p.mean && l >= 0.0));
        }
    }

    /// The budget found carries the demand, and no smaller one that was measured does.
    #[test]
    fn the_smallest_is_found(
        runs in runs(),
        requests in 0.1..400.0f64,
        deadline in 4..400u64,
        share in 0.0..0.9f64,
        unknown: bool,
    ) {
        let p = with([runs.clone(), runs.clone(), runs].concat(), 10);
        let (d, b) = (demand(requests, deadline), Neighbours { share, unknown, count: 1 });
        match find(&p, &d, &b, here(1)) {
            Ok(choice) => {
                prop_assert!(choice.needed.0 >= requests);
                prop_assert!(choice.point.lower.unwrap() >= choice.needed.0);
                prop_assert!(choice.latest <= d.deadline);
                prop_assert!(here(1).latest(choice.contract, choice.work) <= d.deadline);
                let curve = p.points().into_iter().filter(|q| q.neighbour_percent == choice.point.neighbour_percent);
                for smaller in curve.filter(|q| q.budget_percent < choice.point.budget_percent) {
                    let contract = contract(smaller.budget_percent * 100, 10_000);
                    let carries = smaller.lower.unwrap() >= choice.needed.0;
                    prop_assert!(!carries || here(1).latest(contract, choice.work) > d.deadline, "{smaller:?} {choice:?}");
                }
                // A smaller demand never takes a larger budget.
                let less = find(&p, &demand(requests / 2.0, deadline * 2), &b, here(1)).unwrap();
                prop_assert!(less.contract.budget_us() <= choice.contract.budget_us());
            }
            Err(DemandError::TooMany { fits, .. }) => prop_assert!(fits.0 < requests),
            Err(DemandError::TooLate { best, .. }) => prop_assert!(best > d.deadline),
            Err(e @ DemandError::Profile { .. }) => prop_assert!(e.to_string().contains("no measurement of this VM alone"), "{e}"),
        }
    }

    /// A larger budget, less work or a smaller period is never later.
    #[test]
    fn the_latest_answer_is_monotone(budget in 1..=100u64, more in 0..=100u64, work in 0..10_000u64, period in 1..=100u64) {
        let at = |b: u64, p: u64, w: u64| here(0).latest(contract((b.min(100)) * p * 10, p * 1000), Nanos(w * 1000));
        prop_assert!(at(budget + more, period, work) <= at(budget, period, work));
        prop_assert!(at(budget, period, work) <= at(budget, period, work + 100));
        prop_assert!(at(budget, period, work) <= at(budget, period + 1, work));
    }
}
