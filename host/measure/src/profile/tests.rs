use rtvirtio_model::GuestPoint;
use rtvirtio_units::Nanos;

use super::*;

fn point(iops: [f64; 3], fast: (u64, u64), slow: (u64, u64)) -> Point {
    let mut latencies = Latencies::new();
    latencies.record(Nanos(fast.0), fast.1);
    latencies.record(Nanos(slow.0), slow.1);
    Point { iops: iops.to_vec(), latencies, max: Nanos(fast.0.max(slow.0)) }
}

/// Six points of a healthy device.
fn healthy() -> Vec<Point> {
    DEPTHS
        .iter()
        .map(|d| {
            let iops = 10_000.0 * f64::from(*d).min(8.0);
            let lat = (f64::from(*d) / iops * 1e9) as u64;
            point([iops, iops * 1.02, iops * 0.99], (lat, 29_000), (lat * 2, 1_000))
        })
        .collect()
}

fn doubts_of(points: &[Point]) -> Vec<String> {
    checks::doubts("reads with none", &summarise(&DEPTHS, points), points)
}

#[test]
fn a_healthy_device_raises_no_doubt() {
    assert_eq!(doubts_of(&healthy()), Vec::<String>::new());
}

#[test]
fn each_check_finds_its_fault() {
    let with = |i: usize, p: Point| {
        let mut points = healthy();
        points[i] = p;
        doubts_of(&points)
    };
    let only = |doubts: Vec<String>, text: &str| {
        assert!(doubts.len() == 1 && doubts[0].contains(text), "{doubts:?} should be one with {text:?}");
    };
    let lat = 100_000;
    only(
        with(0, point([10_000.0, 10_200.0, 9_900.0], (lat, 9_000), (2 * lat, 90))),
        "too few samples for p99.99 at depth 1 (at least 9090",
    );
    only(
        with(0, point([10_000.0, 12_000.0, 9_900.0], (lat, 29_000), (2 * lat, 900))),
        "differ by up to 21 % at depth 1",
    );
    only(
        with(5, point([60_000.0, 60_200.0, 60_100.0], (400_000, 29_000), (800_000, 900))),
        "throughput falls from",
    );
    only(
        with(0, point([10_000.0, 10_200.0, 9_900.0], (3 * lat, 29_000), (6 * lat, 900))),
        "median latency falls",
    );
    only(with(0, point([10_000.0; 3], (lat, 29_000), (2 * lat, 900))), "identical numbers");
    only(
        with(0, point([10_000.0, 10_200.0, 9_900.0], (lat, 29_000), (31 * lat, 900))),
        "this looks like a rate limit",
    );
    // A standstill of 5 ms with 32 in flight.
    only(
        with(5, point([80_000.0, 81_600.0, 79_200.0], (400_000, 29_968), (5_000_000, 32))),
        "at depth 32: something stalled",
    );
}

#[test]
fn two_groups_need_an_empty_middle() {
    let mut spread = Latencies::new();
    for i in 0..1_000 {
        spread.record(Nanos(100_000 + i * 3_000), 1);
    }
    let groups = |l: Latencies| {
        doubts_of(&[Point { iops: vec![1e4, 1.01e4, 1.02e4], latencies: l, max: Nanos(1) }])
            .iter()
            .any(|d| d.contains("rate limit"))
    };
    assert!(!groups(spread.clone()));
    // A rare stall is not a group: less than one in a hundred.
    let mut rare: Latencies = (0..10_000).map(|i| Nanos(100_000 + i)).collect();
    rare.record(Nanos(50_000_000), 50);
    assert!(!groups(rare.clone()));
    rare.record(Nanos(50_000_000), 100);
    assert!(groups(rare));
}

#[test]
fn time_fits_the_budget() {
    for (series, points) in [(2, 14), (4, 26)] {
        let point = point_time(Duration::from_secs(36), series, points).unwrap();
        let total = REPETITIONS as u32 * (START_COST * series as u32 + slot(point) * points as u32);
        assert!(total <= Duration::from_secs(36) && total > Duration::from_secs(35), "{total:?}");
    }
    assert_eq!(point_time(least_budget(3, 22), 3, 22), Some(SHORTEST));
    assert_eq!(point_time(least_budget(2, 14) - Duration::from_millis(1), 2, 14), None);
}

#[test]
fn few_points_confirm() {
    let block = Bytes::from_kib(4);
    let of = |writes| Extent::Confirming.series(true, writes);
    assert_eq!((of(false), of(true)), (vec![Series::Read], vec![Series::Read, Series::Write]));
    assert_eq!(
        Series::Write.points(block, Extent::Confirming),
        CONFIRMING_DEPTHS.map(|d| (d, block)).to_vec()
    );
    // A third of the time of a whole measurement.
    let whole = least_time(block, Extent::Whole, true);
    assert!(least_time(block, Extent::Confirming, true) * 3 < whole, "{whole:?}");
}

#[test]
fn job_text_runs_the_depths_one_after_the_other() {
    let mut options = ProfileOptions::new("/dev/a:b".into(), Bytes(1 << 30), "/x".into());
    options.seed = 10;
    let text = job_text(&options, Series::ReadBfq, 1, Duration::from_millis(870));
    assert!(
        text.starts_with(&format!("[global]\n{COMMON}filename=/dev/a\\:b\nsize=1073741824\nrw=randread\n"))
    );
    assert!(text.contains(
        "ramp_time=100ms\nruntime=870ms\n\n[p0]\nstartdelay=0ms\nbs=4096\niodepth=1\nrandseed=17\n"
    ));
    assert!(text.ends_with("[p5]\nstartdelay=5000ms\nbs=4096\niodepth=32\nrandseed=22\n"));
    let read = job_text(&options, Series::Read, 0, RAMP);
    assert!(read.contains("[p6]\nstartdelay=1380ms\nbs=131072\niodepth=1\n"), "{read}");
    assert!(job_text(&options, Series::Write, 0, RAMP).contains("rw=randwrite\nioengine=libaio\n"));
    // Synced writes: the last `direct` counts for fio.
    let sync = job_text(&options, Series::Sync, 0, RAMP);
    assert!(sync.contains("rw=randwrite\nioengine=psync\ndirect=0\nsync=dsync\n"), "{sync}");
    assert_eq!(sync.matches("\niodepth=1\n").count(), SYNC_SLOTS);
    assert_eq!(Series::Sync.points(options.block, Extent::Whole).len(), SYNC_SLOTS);
}

fn profile() -> Profile {
    let read = summarise(&DEPTHS, &healthy());
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        device: "loop0".to_owned(),
        identity: None,
        size: Bytes(1 << 30),
        block: Bytes::from_kib(4),
        guest: Some(GuestPoint { kind: "process".to_owned(), point: read[0].clone(), cpu_per_request: 1e-5 }),
        sync: Vec::new(),
        read_bfq: read.clone(),
        large: Some(LargeRequests { block: LARGE, read: read.clone(), write: Vec::new() }),
        read,
        write: Vec::new(),
        cpus: 2,
        kernel: "6.1".to_owned(),
        doubts: vec!["a doubt".to_owned()],
    }
}

#[test]
fn profiles_come_back_as_saved_and_replace_the_old_one_whole() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("p.json");
    std::fs::write(&path, "old").unwrap();
    save(&profile(), &path).unwrap();
    assert_eq!(load(&path).unwrap(), profile());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    let e = save(&profile(), &dir.path().join("no/p.json")).unwrap_err().to_string();
    assert!(e.contains("cannot write") && e.contains("no/p.json"), "{e}");
}

#[test]
fn other_profiles_are_refused_with_the_reason() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("p.json");
    let e = |text: &str| {
        std::fs::write(&path, text).unwrap();
        load(&path).unwrap_err().to_string()
    };
    let good = serde_json::to_string_pretty(&profile()).unwrap();
    let point = profile().read[0].clone();
    assert!(
        e(&good.replace("profile.v1", "profile.v9"))
            .contains("\"rtvirtio.profile.v9\", not \"rtvirtio.profile.v1\"")
    );
    assert!(e("{}").contains("it has no schema"));
    assert!(e("half").contains("it is not JSON"));
    assert!(e(&good.replace("\"cpus\"", "\"cpu\"")).contains("unknown field `cpu`"));
    assert!(e(&good.replace("\"cpus\"", "\"cpu\"")).contains("rtvirtio profile"));
    // Impossible numbers: the models would compute infinite times from them, or none.
    let edited = |change: &dyn Fn(&mut Profile)| {
        let mut p = profile();
        change(&mut p);
        e(&serde_json::to_string(&p).unwrap())
    };
    assert!(edited(&|p| p.block = Bytes(0)).contains("its block size is 0 bytes"));
    assert!(edited(&|p| p.read[0].iops = Iops(1e-320)).contains("read at depth 1: "));
    assert!(edited(&|p| p.read[0].iops = Iops(-1.0)).contains("-1 requests per second cannot be"));
    assert!(edited(&|p| p.read[0].spread = -1e308).contains("a spread of"));
    assert!(edited(&|p| p.read[0].max.0 = u64::MAX).contains("a latency of"));
    let guest =
        |cpu_per_request| GuestPoint { kind: "qemu-kvm".to_owned(), point: point.clone(), cpu_per_request };
    assert!(edited(&|p| p.guest = Some(guest(1e9))).contains("CPU time"));
    let large = |block| LargeRequests {
        block,
        read: vec![DepthPoint { iops: Iops(1e300), ..point.clone() }],
        write: vec![],
    };
    assert!(edited(&|p| p.large = Some(large(Bytes(8192)))).contains("large.read"));
    assert!(edited(&|p| p.large = Some(large(Bytes(u64::MAX)))).contains("of larger requests"));
    assert!(e(&format!("{good}{}", " ".repeat(MAX_FILE_BYTES))).contains("more than 1048576 bytes"));
    assert!(load(&dir.path().join("none")).unwrap_err().to_string().contains("cannot read"));
}
