//! Sums of integers never admit what the full admission refuses, and the ledger agrees with it.

use proptest::prelude::*;
use rtvirtio_capacity::{
    Contract, DeviceModel, Disk, DiskCapacity, Ledger, Network, Node, OnDisk, OnNetwork, Options, Reserve,
    Scalars, Shape, admit, missed_turn,
};
use rtvirtio_spec::{Direction, Flow, LabKind, Mark, Op, TWIN_PROFILES, Target, Task, Traffic, Vm};
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos, Percentile, Ratio};

fn device(twin: usize, stall_ms: u64) -> DeviceModel {
    let name = TWIN_PROFILES[twin % TWIN_PROFILES.len()];
    let mut device = DeviceModel::declared(name, &TwinProfile::built_in(name).unwrap(), Bytes(1 << 30));
    device.latency = Nanos::from_millis(stall_ms);
    device
}

#[derive(Clone, Debug)]
struct Asked {
    op: Op,
    kib: u64,
    rate: Option<f64>,
    depth: u32,
    target_us: u64,
    cpu: f64,
}

fn asked() -> impl Strategy<Value = Asked> {
    let op = prop_oneof![Just(Op::Read), Just(Op::Write), Just(Op::Mixed { write_share: Ratio(0.3) })];
    let rate = prop_oneof![3 => (1.0..1_500.0).prop_map(Some), 1 => Just(None)];
    (op, 1u64..=64, rate, 1u32..8, 2_000u64..400_000, 0.0..0.4)
        .prop_map(|(op, kib, rate, depth, target_us, cpu)| Asked { op, kib, rate, depth, target_us, cpu })
}

fn contract(i: usize, a: &Asked) -> Contract {
    let task = Task {
        op: a.op,
        block: Bytes::from_kib(a.kib),
        depth: a.depth,
        targets: vec![Target { percentile: Percentile::P9999, latency: Nanos::from_micros(a.target_us) }],
        ..Task::reads("t", a.rate.map(Iops))
    };
    let name = format!("vm{i}");
    let vm = Vm::of_lab(&name, LabKind::Process, vec![task]);
    Contract {
        vm: name,
        disks: vec![OnDisk { device: None, vm }],
        networks: Vec::new(),
        received: Vec::new(),
        cpu: Some(Ratio(a.cpu)),
    }
}

/// A flow: bytes, rate, whether it is urgent, latency of its target in us.
type Sent = (u64, f64, bool, u64);

fn sent() -> impl Strategy<Value = Sent> {
    (14u64..1_514, 1.0..3_000.0f64, any::<bool>(), 1_000u64..100_000)
}

/// A contract on any of two disks and of two links, with a share of each CPU.
type Everywhere = ([Option<Asked>; 2], [Option<Sent>; 2], f64);

fn everywhere() -> impl Strategy<Value = Everywhere> {
    let (disk, link) = (|| prop::option::of(asked()), || prop::option::of(sent()));
    ([disk(), disk()], [link(), link()], 0.0..0.4f64)
}

fn everywhere_contract(i: usize, (disks, links, cpu): &Everywhere) -> Contract {
    let name = |kind: &str, n: usize| Some(format!("{kind}{n}"));
    let mut of = Contract {
        vm: format!("vm{i}"),
        disks: Vec::new(),
        networks: Vec::new(),
        received: Vec::new(),
        cpu: Some(Ratio(*cpu)),
    };
    for (n, asked) in disks.iter().enumerate() {
        let on = asked.iter().flat_map(|a| contract(i, a).disks);
        of.disks.extend(on.map(|on| OnDisk { device: name("disk", n), ..on }));
    }
    for (n, sent) in links.iter().enumerate() {
        of.networks.extend(sent.map(|(frame, rate, is_urgent, us)| {
            let target = Target { percentile: Percentile::P9999, latency: Nanos::from_micros(us) };
            let flow = Flow {
                name: "f".to_owned(),
                nic: n,
                direction: Direction::Tx,
                frame: Bytes(frame),
                rate: Iops(rate),
                burst: 1,
                mark: is_urgent.then_some(Mark::Pcp(4)),
                target: Some(target),
            };
            OnNetwork { network: name("link", n), flows: vec![flow], traffic: Traffic::default() }
        }));
    }
    of
}

/// The contracts that the sums admit one after the other, and their sum.
fn by_sums<'c>(node: &Node, contracts: &'c [Contract]) -> (Vec<&'c Contract>, Scalars) {
    let (mut placed, mut sum) = (Vec::new(), node.nothing());
    for c in contracts {
        let mut with = sum.clone();
        with.add(&node.scalars(c));
        if with.fit() {
            sum = with;
            placed.push(c);
        }
    }
    (placed, sum)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn a_sum_within_the_limits_is_admitted(
        twin in 0usize..4,
        stall_ms in 0u64..20,
        many in prop::collection::vec(asked(), 1..40),
        cpu in 0.1..1.0f64,
    ) {
        let device = device(twin, stall_ms);
        let contracts: Vec<Contract> = many.iter().enumerate().map(|(i, a)| contract(i, a)).collect();
        let mut disk = Disk::new(None, &device, &Options::default());
        let on: Vec<&OnDisk> = contracts.iter().flat_map(|c| &c.disks).collect();
        disk.choose(&on);
        let node = Node { disks: vec![disk], networks: Vec::new(), cpu: Ratio(cpu) };
        let (placed, _) = by_sums(&node, &contracts);
        // Every prefix, so that each was admitted on top of those before it.
        for n in 1..=placed.len() {
            let (candidate, in_force) = placed[..n].split_last().unwrap();
            let answer = admit(&node, in_force, candidate);
            prop_assert!(answer.is_admitted(), "{:?}", answer);
            prop_assert!(answer.fits_by_sum());
        }
    }

    /// Several disks and links and the CPU together: none may hide what another refuses.
    #[test]
    fn a_sum_over_all_resources_is_admitted(
        twins in [0usize..4, 0usize..4],
        mbit in [10.0..1_000.0f64, 10.0..1_000.0f64],
        many in prop::collection::vec(everywhere(), 1..30),
        cpu in 0.1..1.0f64,
    ) {
        let contracts: Vec<Contract> =
            many.iter().enumerate().map(|(i, e)| everywhere_contract(i, e)).collect();
        let disks = twins.iter().enumerate().map(|(n, twin)| {
            let mut disk = Disk::new(Some(format!("disk{n}")), &device(*twin, 2), &Options::default());
            let on = contracts.iter().flat_map(|c| &c.disks).filter(|on| on.device == disk.name);
            let on: Vec<&OnDisk> = on.collect();
            disk.choose(&on);
            disk
        });
        let networks = mbit.iter().enumerate().map(|(n, mbit)| {
            Network::new(Some(format!("link{n}")), BytesPerSec(mbit * 1e6 / 8.0), 1_500, None)
        });
        let node = Node { disks: disks.collect(), networks: networks.collect(), cpu: Ratio(cpu) };
        let (placed, sum) = by_sums(&node, &contracts);
        for n in 1..=placed.len() {
            let (candidate, in_force) = placed[..n].split_last().unwrap();
            let answer = admit(&node, in_force, candidate);
            prop_assert!(answer.is_admitted() && answer.fits_by_sum(), "{:?}", answer);
        }
        // In whatever order they are removed, nothing remains.
        let mut rest = sum;
        placed.iter().for_each(|c| rest.subtract(&node.scalars(c)));
        prop_assert_eq!(rest, node.nothing());
    }

    #[test]
    fn the_ledger_answers_as_the_schedulers_admission(
        twin in 0usize..4,
        stall_ms in 0u64..10,
        shape in 0usize..18,
        many in prop::collection::vec(asked(), 1..30),
    ) {
        let device = device(twin, stall_ms);
        let shapes = Shape::all(&device, &Options::default());
        let disk = DiskCapacity::new(&device, &Options::default(), shapes[shape % shapes.len()]);
        let mut ledger = Ledger::default();
        let (mut placed, mut tasks): (Vec<Reserve>, Vec<Task>) = (Vec::new(), Vec::new());
        for (i, a) in many.iter().enumerate() {
            let r = disk.reserve(&contract(i, a).disks[0].vm).unwrap().unwrap();
            let mut with = placed.clone();
            with.push(r);
            let admitted = disk.admit(&with).is_ok();
            let fits = ledger.fits(disk.room(), &r);
            // Equal up to rounding.
            prop_assert!(!fits || admitted);
            if admitted != fits {
                let later = Reserve { deadline: Nanos(r.deadline.0 + 2), ..r };
                prop_assert!(ledger.fits(disk.room(), &later) || !placed.is_empty());
            }
            if fits {
                ledger.insert(&r);
                placed = with;
                tasks.extend(contract(i, a).disks.remove(0).vm.tasks);
            }
        }
        prop_assert_eq!(ledger.len(), placed.len());
        let reserved: f64 = placed.iter().map(|r| r.share.0).sum();
        let limited = disk.shape.device(&device);
        prop_assert!(tasks.iter().all(|t| missed_turn(t, &limited, disk.shape, reserved).is_none()));
        for r in &placed {
            prop_assert!(ledger.remove(r));
        }
        prop_assert!(ledger.is_empty());
    }

    #[test]
    fn one_that_sums_never_admit_is_refused_alone(twin in 0usize..4, a in asked()) {
        let device = device(twin, 1);
        for shape in Shape::all(&device, &Options::default()) {
            let disk = DiskCapacity::new(&device, &Options::default(), shape);
            let r = disk.reserve(&contract(0, &a).disks[0].vm).unwrap().unwrap();
            prop_assert_eq!(disk.part(&r).is_some(), disk.admit(&[r]).is_ok());
        }
    }
}
