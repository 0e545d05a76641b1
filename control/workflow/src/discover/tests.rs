use std::path::Path;

use rtvirtio_measure::observe::{Observed, Tail};
use rtvirtio_spec::HostSpec;
use rtvirtio_units::{Bytes, Iops, Percentile};
use rtvirtio_vmm::disk_stats::Direction;

use super::*;

#[test]
fn names_fit_a_spec_and_are_unique() {
    let mut names = BTreeSet::new();
    assert_eq!(unique("plc", &mut names), "plc");
    assert_eq!(unique("plc", &mut names), "plc-2");
    assert_eq!(unique("-Web Server (old)", &mut names), "Web-Server--old-");
    assert_eq!(unique("…", &mut names), "vm");
    let long = "x".repeat(60);
    assert_eq!(unique(&long, &mut names).len(), 32);
    assert_eq!(unique(&long, &mut names), format!("{}-2", "x".repeat(30)));
}

fn seen(direction: Direction, rate: f64, size: u64, tails: &[(f64, u64)]) -> Observed {
    let tail = |(p, ns): &(f64, u64)| Tail { percentile: Percentile(*p), latency_ns: Nanos(*ns) };
    Observed {
        direction,
        n: (rate * 300.0) as u64,
        rate: Iops(rate),
        mean_size: Some(Bytes(size)),
        mean_ns: Some(Nanos(500_000)),
        depth: Some(rate * 0.0005),
        tails: tails.iter().map(tail).collect(),
        longest_ns: None,
    }
}

fn disk(path: &str, device: Option<&str>, directions: Option<Vec<Observed>>) -> FoundDisk {
    FoundDisk {
        path: path.into(),
        target: None,
        is_file: false,
        writes: true,
        device: device.map(|name| FoundDevice {
            name: name.to_owned(),
            dev: "8:0".to_owned(),
            path: Path::new("/dev").join(name),
        }),
        activity: directions.map(|directions| Activity { source: Source::Qemu, directions }),
    }
}

fn found(disks: Vec<FoundDisk>, observed: bool) -> Discovery {
    let plc = FoundVm {
        name: "plc".to_owned(),
        vmm: Vmm::Qemu,
        pid: 4711,
        reach: FoundReach::Cgroup(r"/machine.slice/machine-qemu\x2d1\x2dplc.scope".into()),
        qmp: None,
        agent: None,
        cgroup: None,
        own_cgroup: false,
        disks,
        notes: vec!["a note\nname = \"x\"".to_owned()],
    };
    Discovery {
        schema: DISCOVERY_SCHEMA.to_owned(),
        vms: vec![plc],
        unreadable: Vec::new(),
        uri: None,
        cpu: None,
        observed_ns: observed.then_some(Nanos::from_millis(300_000)),
    }
}

#[test]
fn a_spec_of_what_was_seen_loads() {
    let directions = vec![
        seen(Direction::Read, 99.2, 4100, &[(50.0, 400_000), (99.0, 3_000_000), (99.9, 8_200_000)]),
        seen(Direction::Write, 8.3, 70_000, &[(50.0, 400_000), (99.0, 2_000_000), (99.9, 3_000_000)]),
        seen(Direction::Flush, 8.0, 0, &[(50.0, 400_000), (99.0, 2_500_000)]),
    ];
    let text = spec_text(&found(vec![disk("/dev/vg0/plc", Some("sda"), Some(directions))], true), "today");
    let spec = rtvirtio_spec::parse("found.toml", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let tasks = &spec.vms[0].tasks;
    assert_eq!(tasks.len(), 3, "{text}");
    assert_eq!((tasks[0].rate, tasks[0].block), (Some(Iops(100.0)), Bytes(4096)), "{text}");
    assert_eq!((tasks[1].rate, tasks[1].block), (Some(Iops(18.0 / 60.0)), Bytes(70_144)), "{text}");
    assert!(text.contains("p99.9"), "{text}");
    assert!(text.contains("latency = \"20ms\""), "twice 8.2 ms, rounded up: {text}");
    assert!(text.contains("8.0/s") && text.contains("flushes"), "{text}");
    assert_eq!((tasks[2].rate, tasks[2].block), (Some(Iops(8.0)), Bytes(69_632)), "{text}");
    assert_eq!(tasks[2].targets[0].latency, Nanos(10_000_000), "twice 2 + 2.5 ms, rounded up: {text}");
}

#[test]
fn what_is_not_known_stays_a_comment() {
    let text = spec_text(&found(vec![disk("/dev/vg0/plc", Some("sda"), None)], false), "today");
    assert!(text.contains("--observe 5min"), "{text}");
    assert!(!text.lines().any(|l| l.starts_with("[[vm.task]]")), "nothing is made up: {text}");
    let text = spec_text(&found(vec![disk("/mnt/nfs/plc.raw", None, None)], false), "today");
    assert!(
        !text.lines().any(|l| l.starts_with("[[vm]]")),
        "a VM without a device is no VM of a spec: {text}"
    );
}

#[test]
fn disks_on_two_devices_are_named_and_what_rests_stays_a_comment() {
    let reads = vec![seen(Direction::Read, 50.0, 4096, &[(99.0, 3_000_000)])];
    let mut all = found(
        vec![
            disk("/dev/vg0/log", Some("sda"), Some(reads.clone())),
            disk("/dev/vg1/log", Some("sdb"), Some(reads)),
        ],
        true,
    );
    let mut rests = all.vms[0].clone();
    rests.name = "rests".to_owned();
    rests.disks = vec![disk("/dev/vg2/x", Some("sdc"), Some(Vec::new()))];
    all.vms.push(rests);
    let text = spec_text(&all, "today");
    let spec = HostSpec::parse("found.toml", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let parts: Vec<_> = spec.parts().iter().map(|p| (p.name.as_deref(), p.spec.vms[0].tasks.len())).collect();
    assert_eq!(parts, [(Some("sda"), 1), (Some("sdb"), 1)], "{text}");
    assert_eq!(spec.vms().len(), 1, "{text}");
    assert!(text.contains("\"reads-log-2\""), "two disks of one name: {text}");
    assert!(text.contains("# [[vm]]") && text.contains("# name = \"rests\""), "{text}");
    assert!(text.contains("sdc was idle"), "{text}");
}

/// The number that a note proposes.
fn burst_of(note: &str) -> Option<u32> {
    note.split_once("burst = ")?.1.parse().ok()
}

#[test]
fn a_tail_that_a_mean_rate_does_not_explain_is_noted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../learn/data/qlc-nvme.profile.json");
    let profile = rtvirtio_measure::profile::load(&path).unwrap();
    let notes_of = |p99: u64| {
        let reads = seen(Direction::Read, 200.0, 4096, &[(50.0, 200_000), (99.0, p99)]);
        let mut found = found(vec![disk("/dev/sdz", Some("sdz"), Some(vec![reads]))], true);
        found.vms[0].notes.clear();
        compared::with(&mut found, &|_| Some(profile.clone())).unwrap();
        let text = spec_text(&found, "today");
        (found.vms[0].notes.clone(), text)
    };
    let (calm, _) = notes_of(300_000);
    assert_eq!(calm, Vec::<String>::new());
    let (notes, text) = notes_of(280_000_000);
    assert!(notes.len() == 1 && notes[0].starts_with("p99 of its reads was 280ms"), "{notes:?}");
    assert!(text.contains("# Note: p99 of its reads"), "{text}");
    // As many as a spec takes do not explain it; of shorter tails the shorter has fewer.
    assert_eq!(burst_of(&notes[0]), None, "{notes:?}");
    let [fewer, more] = [20_000_000, 60_000_000].map(|p99| burst_of(&notes_of(p99).0[0]).unwrap());
    assert!(2 <= fewer && fewer < more, "{fewer} {more}");
}
