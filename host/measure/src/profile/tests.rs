use rtvirtio_model::GuestPoint;
use rtvirtio_units::Nanos;

use super::process::{Section, job_text};
use super::*;

fn point(iops: [f64; 3], fast: (u64, u64), slow: (u64, u64)) -> Point {
    let mut latencies = Latencies::new();
    latencies.record(Nanos(fast.0), fast.1);
    latencies.record(Nanos(slow.0), slow.1);
    Point { iops: iops.to_vec(), latencies, max: Nanos(fast.0.max(slow.0)), tail: true, error: 0.0 }
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
        with(0, point([10_000.0, 10_200.0, 9_900.0], (lat, 4_000), (20 * lat, 9))),
        "too few samples for p99.99 at depth 1 (at least 4009): it may be 5.1 times as long",
    );
    only(
        with(1, Point { error: 0.31, ..healthy().remove(1) }),
        "the rate at depth 2 is known to 31 % only, and a plan bears 20 %",
    );
    // BFQ's tail is read by no model.
    let unread = point([10_000.0, 10_200.0, 9_900.0], (lat, 4_000), (20 * lat, 9));
    assert_eq!(with(0, Point { tail: false, ..unread }), Vec::<String>::new());
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
        let iops = vec![1e4, 1.01e4, 1.02e4];
        doubts_of(&[Point { iops, latencies: l, max: Nanos(1), ..Point::default() }])
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
fn two_equal_counts_are_chance_and_three_are_not() {
    let equal = |n| {
        let iops = vec![70.0; n];
        let doubts = doubts_of(&[Point { iops, ..point([0.0; 3], (100_000, 29_000), (200_000, 900)) }]);
        doubts.iter().any(|d| d.contains("identical"))
    };
    assert!(!equal(2) && equal(3));
}

#[test]
fn the_median_of_two_is_their_mean() {
    let of = |iops: Vec<f64>| summarise(&[1], &[Point { iops, ..Point::default() }])[0].iops.0;
    assert_eq!((of(vec![10.0, 20.0]), of(vec![30.0, 10.0, 20.0]), of(Vec::new())), (15.0, 20.0, 0.0));
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
    // Less than half the time of a whole measurement.
    let whole = least_time(block, Extent::Whole, true);
    assert!(least_time(block, Extent::Confirming, true) * 2 < whole, "{whole:?}");
}

#[test]
fn job_text_runs_the_points_one_after_the_other() {
    let mut options = ProfileOptions::new("/dev/a:b".into(), Bytes(1 << 30), "/x".into());
    let ms = Duration::from_millis;
    let cells: Vec<Cell> = [Series::Read, Series::Write, Series::Sync]
        .into_iter()
        .flat_map(|s| s.cells(options.block, options.extent))
        .collect();
    let sections: Vec<_> = (0..cells.len()).map(|cell| Section { cell, slot: ms(400) }).collect();
    let text = job_text(&options, &cells, &sections, 16);
    let common = crate::fio::COMMON;
    assert!(
        text.starts_with(&format!(
            "[global]\n{common}filename=/dev/a\\:b\nsize=1073741824\nramp_time=30ms\n\n[p0]\n"
        )),
        "{text}"
    );
    let read = "\n[p1]\nstartdelay=400ms\nruntime=360ms\nrw=randread\nioengine=libaio\n\
                bs=4096\niodepth=2\nrandseed=18\n";
    assert!(text.contains(read), "{text}");
    assert!(text.contains("\n[p6]\nstartdelay=2400ms\n") && text.contains("bs=131072\niodepth=1\n"));
    assert!(text.contains("rw=randwrite\nioengine=libaio\nbs=4096\niodepth=32\n"), "{text}");
    // Synced writes: the last `direct` counts for fio.
    let sync = "rw=randwrite\nioengine=psync\ndirect=0\nsync=dsync\nbs=4096\niodepth=1\n";
    assert_eq!(text.matches(sync).count(), 1, "{text}");
    assert!(!text.contains("write_lat_log"));
    options.watch = true;
    assert!(job_text(&options, &cells, &sections, 16).contains("write_lat_log=/x/profile\n"));
    // Another start of the same points has other addresses.
    assert!(!job_text(&options, &cells, &sections, 16 + 256).contains("randseed=18\n"));
}

#[test]
fn models_read_tails_of_all_but_bfq_and_the_lesser_of_larger_requests() {
    let tails = |series: Series| {
        let cells = series.cells(Bytes::from_kib(4), Extent::Whole);
        cells.into_iter().filter(|c| c.point.tail).map(|c| (c.depth, c.block == LARGE)).collect::<Vec<_>>()
    };
    let mut own: Vec<_> = DEPTHS.map(|d| (d, false)).to_vec();
    assert_eq!((tails(Series::ReadBfq), tails(Series::Sync)), (Vec::new(), vec![(1, false)]));
    own.push((32, true));
    assert_eq!((tails(Series::Read), tails(Series::Write)), (own.clone(), own));
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
