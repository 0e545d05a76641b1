//! Profiles and specs for the tests: the twin and the disk that the reference measurements are of.

use rtvirtio_spec::{Device, LabKind, Spec, Target, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};

use crate::types::{Bfq, Config, DepthPoint, Elevator, GuestPoint, PROFILE_SCHEMA, Profile, VmConfig};

pub(crate) fn point(depth: u32, iops: f64, us: [u64; 4]) -> DepthPoint {
    let [p50, p99, p9999, max] = us.map(Nanos::from_micros);
    DepthPoint { depth, iops: Iops(iops), spread: 0.02, n: 200_000, p50, p99, p9999, max }
}

fn profile(read: Vec<DepthPoint>, read_bfq: Vec<DepthPoint>) -> Profile {
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        device: "loop0".to_owned(),
        identity: None,
        size: Bytes(1 << 30),
        block: Bytes::from_kib(4),
        write: read.clone(),
        read,
        sync: Vec::new(),
        read_bfq,
        large: None,
        guest: None,
        cpus: 2,
        kernel: "6.18".to_owned(),
        doubts: Vec::new(),
    }
}

/// A twin with one channel, 60 us + 1 ns/B: median 105 us, p99.99 1.8 ms, 15.5 k IOPS at depth 16.
pub(crate) fn twin() -> Profile {
    profile(
        vec![point(1, 9_300.0, [105, 150, 1_800, 5_000]), point(16, 15_500.0, [1_030, 1_200, 3_500, 8_000])],
        vec![point(1, 9_000.0, [109, 160, 1_900, 5_000]), point(16, 14_800.0, [1_080, 1_300, 3_800, 8_000])],
    )
}

/// Profile of a disk with about 140 k IOPS at depth 32.
pub(crate) fn disk() -> Profile {
    profile(
        vec![point(1, 17_000.0, [55, 90, 300, 1_500]), point(32, 140_000.0, [220, 400, 1_200, 3_000])],
        vec![point(1, 16_000.0, [58, 95, 320, 1_500]), point(32, 110_000.0, [280, 500, 1_400, 3_000])],
    )
}

pub(crate) fn with_guest(mut p: Profile, kind: &str, us: [u64; 4], cpu_per_request: f64) -> Profile {
    p.guest = Some(GuestPoint { kind: kind.to_owned(), point: point(1, 5_000.0, us), cpu_per_request });
    p
}

pub(crate) fn task(name: &str, rate: f64, target_ms: u64) -> Task {
    Task {
        targets: vec![Target { percentile: Percentile::P9999, latency: Nanos::from_millis(target_ms) }],
        ..Task::reads(name, Some(Iops(rate)))
    }
}

pub(crate) fn flood(depth: u32) -> Task {
    Task { rate: None, depth, targets: Vec::new(), ..task("flood", 1.0, 1) }
}

pub(crate) fn spec(kind: LabKind, vms: &[Vec<Task>]) -> Spec {
    let vm = |(i, tasks): (usize, &Vec<Task>)| Vm::of_lab(&format!("vm{i}"), kind, tasks.clone());
    Spec {
        device: Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) },
        vms: vms.iter().enumerate().map(vm).collect(),
    }
}

/// `vms` VMs of 100 + 500 + 1500 requests per second.
pub(crate) fn paper_mix(kind: LabKind, vms: usize) -> Spec {
    let tasks = vec![task("light", 100.0, 300), task("medium", 500.0, 300), task("heavy", 1500.0, 300)];
    spec(kind, &vec![tasks; vms])
}

/// Three VMs of the mix, and a fourth that floods.
pub(crate) fn flooded(kind: LabKind, depth: u32) -> Spec {
    let mut s = paper_mix(kind, 3);
    s.vms.extend(
        spec(kind, &[vec![flood(depth)]]).vms.into_iter().map(|vm| Vm { name: "noisy".to_owned(), ..vm }),
    );
    s
}

pub(crate) fn config(spec: &Spec, elevator: Elevator, bfq: Bfq) -> Config {
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    Config { elevator, bfq, vms: vec![vm; spec.vms.len()] }
}

/// BFQ without idling and raising.
pub(crate) fn quick() -> Bfq {
    Bfq { slice_idle: Nanos(0), low_latency: false, ..Bfq::default() }
}

/// The paper's mix on three process VMs under default BFQ.
pub(crate) fn example() -> (Profile, Spec, Config) {
    let spec = paper_mix(LabKind::Process, 3);
    let config = config(&spec, Elevator::Bfq, Bfq::default());
    (twin(), spec, config)
}
