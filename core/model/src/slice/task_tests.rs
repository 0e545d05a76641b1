//! Tasks that sync their writes, and tasks of several sizes.

use rtvirtio_spec::{BlockShare, LabKind, Op, SyncKind, Task};
use rtvirtio_units::{Bytes, Iops, Ratio};

use super::*;
use crate::testkit::{config, point, spec, task, twin};
use crate::types::Bfq;

#[test]
fn a_synced_write_costs_what_was_measured_and_is_refused_where_it_was_not() {
    let mut log = task("log", 50.0, 10);
    (log.op, log.sync) = (Op::Write, Some(SyncKind::Fdatasync));
    let s = spec(LabKind::Process, &[vec![log], vec![task("reader", 100.0, 20)]]);
    let config = config(&s, Elevator::None, Bfq::default());
    let unknown = twin();
    let e = Slice.forecast(&unknown, &s, &config).unwrap_err();
    assert!(matches!(&e, ModelError::NoSyncs { task, .. } if task == "vm0/log"), "{e}");
    assert!(e.to_string().contains("--destroy-data") && SliceSearch::new(&unknown, &s).is_err(), "{e}");
    assert!(crate::spare_rates(&unknown, &s, &config).is_err());
    // A flush of 3 ms in the median, 9 at p99.99.
    let profile = Profile { sync: vec![point(1, 300.0, [3_100, 5_000, 9_000, 12_000])], ..twin() };
    let synced = Slice.forecast(&profile, &s, &config).unwrap();
    let mut plain = s.clone();
    plain.vms[0].tasks[0].sync = None;
    let written = Slice.forecast(&profile, &plain, &config).unwrap();
    let ms = |f: &Forecast| f.latency_ns.as_millis_f64();
    assert!(ms(&synced[0]) >= 9.0 && ms(&written[0]) < 6.0, "{synced:?} {written:?}");
    // The neighbour waits for the flush.
    assert!(ms(&synced[1]) > ms(&written[1]) + 2.5, "{synced:?} {written:?}");
    // 300 a second is all the device does.
    let mut fast = s;
    fast.vms[0].tasks[0].rate = Some(Iops(600.0));
    let kept = Slice.forecast(&profile, &fast, &config).unwrap()[0].rate_kept;
    assert!((0.3..0.55).contains(&kept), "{kept}");
    let shares = crate::declared_shares(&profile, &fast, &config).unwrap();
    assert!((shares[0] - 2.0).abs() < 1e-9, "{shares:?}");
}

#[test]
fn a_mix_of_sizes_loads_by_its_mean_and_waits_by_its_largest() {
    let size = |kib, share| BlockShare { size: Bytes::from_kib(kib), share: Ratio(share) };
    let of = |block: u64, mix: Vec<BlockShare>| {
        let t = Task { block: Bytes::from_kib(block), mix, ..task("t", 300.0, 50) };
        let s = spec(LabKind::Process, &[vec![t], vec![task("other", 100.0, 50)]]);
        let config = config(&s, Elevator::None, Bfq::default());
        let shares = crate::declared_shares(&twin(), &s, &config).unwrap()[0];
        (Slice.forecast(&twin(), &s, &config).unwrap(), shares)
    };
    let (mixed, load) = of(64, vec![size(4, 0.8), size(64, 0.2)]);
    let (largest, most) = of(64, Vec::new());
    let (mean, as_mean) = of(16, Vec::new());
    assert!((load / as_mean - 1.0).abs() < 1e-9 && load < most / 3.0, "{load} {as_mean} {most}");
    // Its own service, and what the other task waits for.
    let service = |f: &[Forecast]| f[0].terms.iter().find(|t| t.name == "own-service").unwrap().latency_ns;
    assert_eq!(service(&mixed), service(&largest));
    let other = |f: &[Forecast]| f[1].latency_ns;
    assert!(other(&mean) < other(&mixed) && other(&mixed) <= other(&largest), "{mixed:?} {largest:?}");
}
