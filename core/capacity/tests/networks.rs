//! Networks: sums of integers never admit what the scheduler's admission refuses, the ledger agrees
//! with it, and a refusal has its reason.

use proptest::prelude::*;
use rtvirtio_capacity::{Contract, Ledger, Network, Node, OnNetwork, Refused, Reserve, Scalars, admit};
use rtvirtio_spec::{Direction, Flow, HostSpec, Mark, Target, Traffic};
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos, Percentile, Ratio};

fn network(mbit: f64) -> Network {
    Network::new(None, BytesPerSec(mbit * 1e6 / 8.0), 1_500, None)
}

fn node(mbit: f64) -> Node {
    Node { disks: Vec::new(), networks: vec![network(mbit)], cpu: Ratio(1.0) }
}

/// A flow: bytes, rate, frames at once, whether it is urgent, latency of a target in us.
type Asked = (u64, f64, u32, bool, Option<u64>);

fn asked() -> impl Strategy<Value = Asked> {
    let target = prop_oneof![4 => (1_000u64..300_000).prop_map(Some), 1 => Just(None)];
    (14u64..1_514, 1.0..3_000.0f64, 1u32..20, any::<bool>(), target)
}

fn flow(i: usize, &(frame, rate, burst, is_urgent, target): &Asked) -> Flow {
    Flow {
        name: format!("f{i}"),
        nic: 0,
        direction: Direction::Tx,
        frame: Bytes(frame),
        rate: Iops(rate),
        burst,
        mark: is_urgent.then_some(Mark::Pcp(4)),
        target: target.map(|us| Target { percentile: Percentile::P9999, latency: Nanos::from_micros(us) }),
    }
}

fn contract(i: usize, flows: &[Asked]) -> Contract {
    let flows = flows.iter().enumerate().map(|(i, a)| flow(i, a)).collect();
    let on = OnNetwork { network: None, flows, traffic: Traffic::default() };
    Contract { vm: format!("vm{i}"), disks: Vec::new(), networks: vec![on], received: Vec::new(), cpu: None }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_sum_within_the_limits_is_admitted(
        mbit in 10.0..10_000.0f64,
        many in prop::collection::vec(prop::collection::vec(asked(), 1..4), 1..25),
    ) {
        let node = node(mbit);
        let contracts: Vec<Contract> = many.iter().enumerate().map(|(i, a)| contract(i, a)).collect();
        let (mut placed, mut sum) = (Vec::new(), Scalars::none(0, 1));
        for candidate in &contracts {
            let mut with = sum.clone();
            with.add(&node.scalars(candidate));
            if with.fit() {
                let answer = admit(&node, &placed, candidate);
                prop_assert!(answer.is_admitted() && answer.fits_by_sum(), "{:?}", answer);
                placed.push(candidate);
                sum = with;
            }
        }
    }

    /// A contract alone: its part is no more than a whole exactly where it is admitted.
    #[test]
    fn the_part_of_one_is_exact(mbit in 10.0..1_000.0f64, flows in prop::collection::vec(asked(), 1..4)) {
        let network = network(mbit);
        let on = contract(0, &flows).networks.remove(0);
        let reserves = network.reserves(&on).unwrap();
        let all: Vec<Reserve> = reserves.into_iter().flatten().collect();
        let is_admitted = network.admit(&[reserves]).is_ok();
        prop_assert_eq!(network.part(&all).is_some(), is_admitted);
    }

    #[test]
    fn the_ledger_answers_as_the_schedulers_admission(
        mbit in 10.0..1_000.0f64,
        many in prop::collection::vec(prop::collection::vec(asked(), 1..4), 1..20),
    ) {
        let network = network(mbit);
        let (mut ledger, mut placed) = (Ledger::default(), Vec::new());
        for (i, flows) in many.iter().enumerate() {
            let reserves = network.reserves(&contract(i, flows).networks[0]).unwrap();
            let all: Vec<Reserve> = reserves.into_iter().flatten().collect();
            let with = [placed.as_slice(), &[reserves]].concat();
            let fits = ledger.fit(network.room(), &all);
            prop_assert!(!fits || network.admit(&with).is_ok());
            if !fits && network.admit(&with).is_ok() {
                // Equal up to rounding.
                let later = |r: &Reserve| Reserve { deadline: Nanos(r.deadline.0 + 2), ..*r };
                let later: Vec<Reserve> = all.iter().map(later).collect();
                prop_assert!(ledger.fit(network.room(), &later) || !placed.is_empty());
            }
            if fits {
                all.iter().for_each(|r| ledger.insert(r));
                placed = with;
            }
        }
        prop_assert_eq!(ledger.len(), placed.iter().flatten().flatten().count());
    }
}

fn of_spec(network: &str, vm: &str, flow: &str) -> Contract {
    let text = format!(
        "[device]\ntwin = \"qlc-nvme\"\n[[network]]\nlink = \"100Mbit/s\"\n{network}\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n{vm}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
         [[vm.nic]]\nmac = \"52:54:00:00:00:01\"\ntap = \"tap0\"\n{flow}\n"
    );
    let host = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
    let mut contract = Contract::all_of(&host, |_| Err("a demand")).unwrap().remove(0);
    contract.disks.clear();
    contract
}

fn sent(rate: &str, target: &str) -> String {
    format!(
        "[[vm.flow]]\nname = \"sv\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"{rate}\"\ntarget = {{ latency = \"{target}\" }}"
    )
}

#[test]
fn each_reason_has_its_numbers() {
    let modest = of_spec("", "", &sent("4000/s", "5ms"));
    let answer = admit(&node(100.0), &[], &modest);
    assert!(answer.is_admitted() && (1..1000).contains(&answer.takes.networks[0].0), "{answer:?}");
    let many = vec![&modest; 13];
    match admit(&node(100.0), &many, &modest).refused {
        Some(Refused::LinkRate { asked, available, .. }) => assert!(asked > available && available == 100.0),
        other => panic!("{other:?}"),
    }
    let short = of_spec("", "", &sent("100/s", "200us"));
    match admit(&node(100.0), &[], &short).refused {
        Some(ref why @ Refused::LinkDeadline { ref vm, needed, deadline, .. }) => {
            assert!(vm == "a" && needed > deadline && why.to_string().contains("frames of a cannot"));
        }
        other => panic!("{other:?}"),
    }
    let held = of_spec("", "traffic.tx = { rate = \"99/s\" }", &sent("100/s", "20ms"));
    let why = admit(&node(100.0), &[], &held).refused.unwrap();
    assert!(matches!(why, Refused::HeldBack { held: None, .. }), "{why:?}");
    assert!(why.to_string().contains("nothing bounds"), "{why}");
    let long = of_spec("mtu = 9000", "", &sent("100/s", "20ms").replace("200B", "8000B"));
    assert!(matches!(admit(&node(100.0), &[], &long).refused, Some(Refused::Frame { .. })));
}

#[test]
fn a_network_that_is_not_there_and_received_frames_are_named() {
    let of_field = of_spec("name = \"field\"", "", &sent("100/s", "20ms"));
    let answer = admit(&node(100.0), &[], &of_field);
    let known = "network".to_owned();
    assert_eq!(answer.refused, Some(Refused::NoNetwork { network: "field".to_owned(), known }));
    assert!(answer.takes.networks[0].0 > 1000);
    // Also where the host has none at all.
    let none = Node { networks: Vec::new(), ..node(1.0) };
    assert!(!none.scalars(&of_field).fit());
    let received = of_spec("", "", &sent("100/s", "20ms").replace("\"tx\"", "\"rx\""));
    assert!(received.networks.is_empty());
    let unpromised = received.unpromised();
    assert_eq!((unpromised.len(), unpromised[0].task.as_str()), (1, "sv"));
}
