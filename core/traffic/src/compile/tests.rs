use proptest::prelude::*;
use rtvirtio_sched::{Charge, Regulator};
use rtvirtio_units::Enforcement;

use super::*;
use crate::settings::Setting;

const MIB: u64 = 1 << 20;

fn bytes(rate: u64, burst: u64, peak: Option<u64>) -> Tspec {
    Tspec { unit: Unit::Bytes, rate, burst, peak, largest: 64 << 10 }
}

fn frames(rate: u64, burst: u64, peak: Option<u64>) -> Tspec {
    Tspec { largest: 1_514, ..bytes(rate, burst, peak) }
}

fn requests(rate: u64, burst: u64) -> Tspec {
    Tspec { unit: Unit::Requests, rate, burst, peak: None, largest: 1 }
}

fn lines(compiled: &Compiled) -> Vec<String> {
    compiled.settings.iter().map(ToString::to_string).collect()
}

fn io_max() -> Place {
    Place::IoMax { cgroup: "/sys/fs/cgroup/vm0".into(), dev: "8:0".into() }
}

fn v1() -> Place {
    Place::ThrottleV1 { cgroup: "/sys/fs/cgroup/blkio/vm0".into(), dev: "8:0".into() }
}

fn libvirt() -> Place {
    Place::Libvirt { domain: "plc".into(), disk: "vda".into(), interface: "vnet0".into() }
}

#[test]
fn the_domain_keeps_all_of_it() {
    let asked = bytes(20_000_000, MIB, Some(80_000_000));
    let c = compile(&asked, Direction::Read, &Place::IoDomain).unwrap();
    assert_eq!(lines(&c), ["read_cap = { bytes = \"20000000B/s\", bytes_burst = \"1048576B\", peak = 4.0 }"]);
    assert_eq!((c.excess, c.worth, c.kept), (Some(0.0), Enforcement::Guarantee, Some(asked.arrival())));
    let c = compile(&requests(500, 16), Direction::Tx, &Place::IoDomain).unwrap();
    assert_eq!(lines(&c), ["tx_cap = { frames = \"500/s\", frames_burst = 16 }"]);
}

#[test]
fn the_kernel_has_no_burst_of_its_own() {
    let c = compile(&bytes(20_000_000, MIB, None), Direction::Write, &io_max()).unwrap();
    assert_eq!(lines(&c), ["echo \"8:0 wbps=20000000\" >\"/sys/fs/cgroup/vm0/io.max\""]);
    // Three slices of 100 ms and a request; the burst asked for is 1 MiB.
    let burst = 6e6 + 65_536.0;
    assert_eq!((c.worth, c.excess, c.burst.kept), (Enforcement::Cap, Some(burst - MIB as f64), Some(burst)));
    let c = compile(&requests(500, 100), Direction::Read, &v1()).unwrap();
    let file = "/sys/fs/cgroup/blkio/vm0/blkio.throttle.read_iops_device";
    assert_eq!(lines(&c), [format!("echo \"8:0 500\" >\"{file}\"")]);
    assert_eq!(c.excess, Some(51.0), "151 at once");
    let error = compile(&requests(1 << 33, 1), Direction::Read, &v1()).unwrap_err();
    assert!(matches!(error, CompileError::Range { .. }), "{error}");
    let error = compile(&bytes(1, MIB, None), Direction::Rx, &io_max()).unwrap_err();
    assert!(matches!(error, CompileError::Direction { .. }) && error.to_string().contains("tc-tbf"));
}

#[test]
fn bytes_and_requests_of_a_direction_are_set_together() {
    let (rate, iops) = (bytes(50_000_000, MIB, Some(100_000_000)), requests(3_000, 32));
    let all = [(Direction::Read, rate), (Direction::Read, iops), (Direction::Write, bytes(MIB, MIB, None))];
    let set = |tspec: &Tspec, place: &Place| compile_among(tspec, Direction::Read, &all, place).unwrap();
    let drive = Place::Qemu { drive: "d".into() };
    for (place, expected) in [
        (io_max(), "echo \"8:0 rbps=50000000 riops=3000\" >\"/sys/fs/cgroup/vm0/io.max\""),
        (
            Place::IoDomain,
            "read_cap = { bytes = \"50000000B/s\", bytes_burst = \"1048576B\", requests = \"3000/s\", requests_burst = 32, peak = 2.0 }",
        ),
        (
            libvirt(),
            "virsh blkdeviotune plc vda --read-bytes-sec 50000000 --write-bytes-sec 1048576 --write-bytes-sec-max 1048576 --write-bytes-sec-max-length 1 --read-iops-sec 3000 --live",
        ),
    ] {
        // Whichever of the two is asked for, the setting is that of both.
        for of in [&rate, &iops] {
            assert_eq!(lines(&set(of, &place))[0], expected);
        }
    }
    let sent: serde_json::Value = serde_json::from_str(&lines(&set(&iops, &drive))[0]).unwrap();
    let limit = |key: &str| sent["arguments"][key].as_u64().unwrap();
    assert_eq!(["bps_rd", "iops_rd", "bps_wr", "iops_wr", "bps"].map(limit), [50_000_000, 3_000, MIB, 0, 0]);
    // Each of v1's files holds one limit.
    assert!(lines(&set(&iops, &v1()))[0].ends_with("blkio.throttle.read_iops_device\""));
    // The peak of bytes is one of requests too in the domain: never more than asked, and said.
    let kept = set(&iops, &Place::IoDomain);
    assert_eq!((kept.excess, kept.peak.kept), (Some(0.0), Some(6_000.0)));
    assert!(kept.notes.iter().any(|note| note.contains("one `peak`")), "{:?}", kept.notes);
    // A limit that cannot be set takes the line with it: nothing is set by half.
    let huge = [(Direction::Read, requests(1 << 33, 1))];
    assert!(compile_among(&rate, Direction::Read, &huge, &io_max()).is_err());
}

#[test]
fn tc_takes_bytes_of_networks() {
    let asked = frames(1_000_000, 30_000, Some(4_000_000));
    let c = compile(&asked, Direction::Rx, &Place::TcTbf { interface: "tap0".into() }).unwrap();
    assert_eq!(
        lines(&c),
        [
            "tc qdisc replace dev tap0 root tbf rate 1000000bps burst 30000b peakrate 4000000bps mtu 1514 latency 50ms"
        ]
    );
    assert!(c.excess.unwrap() < 64.0, "less than a tick of either rate: {:?}", c.excess);
    let c = compile(&asked, Direction::Tx, &Place::TcHtb { interface: "tap0".into() }).unwrap();
    let all = lines(&c).join("\n");
    assert!(
        all.contains("redirect dev ifb-tap0") && all.contains("dev ifb-tap0 parent 1: classid 1:1"),
        "{all}"
    );
    assert!(all.contains("ceil 4000000bps cburst 1514b"), "{all}");
    assert!((1_514.0..1_700.0).contains(&c.excess.unwrap()), "one frame: {:?}", c.excess);
    let flat = frames(1_000_000, 30_000, Some(1_000_000));
    let c = compile(&flat, Direction::Rx, &Place::TcTbf { interface: "tap0".into() }).unwrap();
    assert!(!lines(&c)[0].contains("peakrate") && c.excess.unwrap() < 64.0, "{c:?}");
    for (bad, direction) in [(requests(5, 5), Direction::Rx), (frames(1, 1_514, None), Direction::Read)] {
        assert!(compile(&bad, direction, &Place::TcTbf { interface: "tap0".into() }).is_err());
    }
}

#[test]
fn qemu_has_bursts_of_a_tenth_of_a_second_or_of_seconds() {
    let place = Place::Qemu { drive: "/machine/peripheral/d/virtio-backend".into() };
    let of = |tspec: Tspec| compile(&tspec, Direction::Read, &place).unwrap();
    let small = of(bytes(10 * MIB, 2 * MIB, None));
    assert!(lines(&small)[0].contains("\"bps_rd\": 10485760, \"bps_wr\": 0"), "{:?}", lines(&small));
    assert_eq!((small.burst.kept, small.excess), (Some(1_048_576.0 + 65_536.0), Some(0.0)));
    let whole = of(bytes(MIB, 4 * MIB, None));
    assert!(lines(&whole)[0].contains("\"bps_rd_max\": 4194304, \"bps_rd_max_length\": 1"));
    assert_eq!(whole.excess, Some(65_536.0));
    let lasting = of(bytes(MIB, 20 * MIB, Some(4 * MIB)));
    assert!(lines(&lasting)[0].contains("\"bps_rd_max\": 4194304, \"bps_rd_max_length\": 5"));
    // A tenth of a second of the peak may go at once, and one request.
    assert!(lasting.excess.unwrap() <= 0.4 * MIB as f64 + 65_536.0 + 1.0, "{:?}", lasting.excess);
    // QEMU merges requests before it counts them, so a limit on requests bounds none of the
    // guest's.
    let joined = of(requests(100, 1));
    assert_eq!((joined.worth, joined.excess, joined.rate.kept), (Enforcement::Hint, None, None));
    assert!(joined.notes.iter().any(|note| note.contains("request-merging=off")), "{:?}", joined.notes);
    // One command for both directions: a second would remove the first's limit.
    let others = [(Direction::Write, requests(7, 1)), (Direction::Rx, frames(3_000, 2_000, None))];
    let quoted = Place::Qemu { drive: "a\"b".into() };
    let both = compile_among(&bytes(MIB, MIB, None), Direction::Read, &others, &quoted);
    let line = &lines(&both.unwrap())[0].clone();
    let sent: serde_json::Value = serde_json::from_str(line).unwrap();
    let of = |key: &str| sent["arguments"][key].clone();
    assert_eq!((of("id"), of("bps_rd"), of("iops_wr")), ("a\"b".into(), MIB.into(), 7.into()), "{line}");
    let of = |tspec: Tspec| compile(&tspec, Direction::Read, &place).unwrap();
    let no_peak = of(bytes(10 * MIB, MIB, Some(40 * MIB)));
    assert!(no_peak.peak.kept.is_none() && no_peak.notes.iter().any(|n| n.contains("peak")));
}

/// The user of a delegated cgroup names what is below it.
#[test]
fn a_cgroups_name_is_no_command() {
    let line = |cgroup: &str, dev: &str| {
        let place = Place::IoMax { cgroup: cgroup.into(), dev: dev.into() };
        lines(&compile(&requests(500, 100), Direction::Read, &place).unwrap()).remove(0)
    };
    for name in ["$(touch x)", "a`touch x`", "a\"; touch x; \"", "a!x", "a\nb", "a\\"] {
        let shown = line(&format!("/sys/fs/cgroup/{name}"), "8:0");
        let path = shown.strip_prefix("echo \"8:0 riops=500\" >").unwrap();
        let echo = format!("printf %s {path}");
        let out = std::process::Command::new("/bin/sh").args(["-c", &echo]).output().unwrap();
        assert_eq!(
            String::from_utf8(out.stdout).unwrap(),
            format!("/sys/fs/cgroup/{name}/io.max"),
            "{shown}"
        );
    }
    let scope = "/sys/fs/cgroup/machine.slice/machine-qemu\\x2d1\\x2dplc.scope";
    assert_eq!(line(scope, "8:0"), format!("echo \"8:0 riops=500\" >\"{scope}/io.max\""));
    assert_eq!(line("$CGROUP", "$DEV"), "echo \"$DEV riops=500\" >\"$CGROUP/io.max\"");
}

#[test]
fn libvirt_sets_both() {
    let disk = compile(&requests(100, 300), Direction::Write, &libvirt()).unwrap();
    assert_eq!(
        lines(&disk),
        [
            "virsh blkdeviotune plc vda --write-iops-sec 100 --write-iops-sec-max 300 --write-iops-sec-max-length 1 --live",
            "<iotune><write_iops_sec>100</write_iops_sec><write_iops_sec_max>300</write_iops_sec_max>\
             <write_iops_sec_max_length>1</write_iops_sec_max_length></iotune>"
        ]
    );
    let hostile =
        Place::Libvirt { domain: "a b$(touch x)".into(), disk: "--live".into(), interface: "vnet0".into() };
    let quoted = compile(&requests(100, 300), Direction::Write, &hostile).unwrap();
    assert!(
        lines(&quoted)[0]
            .starts_with("virsh blkdeviotune 'a b$(touch x)' --device --live --write-iops-sec 100"),
        "{quoted:?}"
    );
    let rx = compile(&frames(1_000_500, 30_000, Some(4_000_000)), Direction::Rx, &libvirt()).unwrap();
    assert_eq!(
        lines(&rx),
        [
            "virsh domiftune plc vnet0 --inbound 1000,4000,29 --live",
            "<bandwidth><inbound average='1000' peak='4000' burst='29'/></bandwidth>"
        ]
    );
    let tx = compile(&frames(1_000_500, 30_000, Some(4_000_000)), Direction::Tx, &libvirt()).unwrap();
    assert!(tx.peak.kept.is_none() && lines(&tx)[0].contains("--outbound 1000,0,29"), "{tx:?}");
    assert!(compile(&frames(999, 1_514, None), Direction::Tx, &libvirt()).is_err());
}

fn group(memory: MemoryControl) -> Place {
    Place::Resctrl(ResctrlPlace {
        group: "/sys/fs/resctrl/vm0".into(),
        memory_domains: vec![0, 1],
        memory: Some(memory),
        cache_domains: vec![0],
        cache: Some(Cache { all: 0xfffff, least: 1, shareable: 0xc0000, ways: 4 }),
        tasks: vec![11, 12],
    })
}

#[test]
fn schemata_have_the_units_of_their_maker() {
    let asked = bytes(2_600_000_000, MIB, None);
    let of = |memory| compile(&asked, Direction::Read, &group(memory));
    let intel = of(MemoryControl::Percent { least: 10, step: 10, full: Some(10e9), mpam: false }).unwrap();
    assert_eq!(
        lines(&intel),
        [
            "mkdir -p /sys/fs/resctrl/vm0",
            "echo \"MB:0=20;1=20\" >\"/sys/fs/resctrl/vm0/schemata\"",
            // Without the two ways that devices write to.
            "echo \"L3:0=3c000\" >\"/sys/fs/resctrl/vm0/schemata\"",
            "echo \"11\" >\"/sys/fs/resctrl/vm0/tasks\"",
            "echo \"12\" >\"/sys/fs/resctrl/vm0/tasks\""
        ]
    );
    assert_eq!((intel.worth, intel.excess, intel.rate.kept), (Enforcement::Hint, None, Some(2e9)));
    let amd = of(MemoryControl::EighthGb { most: 2_048 }).unwrap();
    assert!(lines(&amd)[1].contains("MB:0=20;1=20") && amd.worth == Enforcement::Cap, "{amd:?}");
    assert_eq!(amd.rate.kept, Some(2.5e9));
    let mpam = of(MemoryControl::Percent { least: 1, step: 1, full: Some(10e9), mpam: true }).unwrap();
    assert!(lines(&mpam)[1].contains("MB:0=26;1=26") && mpam.worth == Enforcement::Cap);
    let mbps = of(MemoryControl::MibPerSecond).unwrap();
    assert!(lines(&mbps)[1].contains("MB:0=2479;1=2479") && mbps.worth == Enforcement::Hint);
    // Of no bandwidth at all every rate would be 100 %.
    for full in [None, Some(0.0), Some(f64::NAN)] {
        let unknown = of(MemoryControl::Percent { least: 10, step: 10, full, mpam: true }).unwrap_err();
        assert!(unknown.to_string().contains("--full-bandwidth"), "{unknown}");
    }
    let least = of(MemoryControl::Percent { least: 10, step: 10, full: Some(1e11), mpam: false });
    assert!(matches!(least, Err(CompileError::Range { .. })), "{least:?}");
    let none = ResctrlPlace {
        memory: None,
        ..match group(MemoryControl::MibPerSecond) {
            Place::Resctrl(place) => place,
            other => panic!("{other:?}"),
        }
    };
    assert!(matches!(
        compile(&asked, Direction::Read, &Place::Resctrl(none)),
        Err(CompileError::Missing { .. })
    ));
}

#[test]
fn ways_are_adjacent_and_avoid_those_of_devices_where_they_can() {
    let cache = Cache { all: 0x7ff, least: 2, shareable: 0x600, ways: 1 };
    assert_eq!(cache.mask(), Some(0x180));
    assert_eq!(Cache { ways: 9, ..cache }.mask(), Some(0x1ff));
    assert_eq!(Cache { ways: 10, ..cache }.mask(), Some(0x7fe));
    assert_eq!(Cache { ways: 12, ..cache }.mask(), None);
}

#[test]
fn registers_have_addresses_and_words() {
    let port = AxiPort { base: 0xFE14_A100, clock_hz: 250e6, transaction: 8 };
    let asked = Tspec { largest: 8, ..bytes(500_000_000, 800, Some(1_000_000_000)) };
    let c = compile(&asked, Direction::Rx, &Place::Qos400(port.clone())).unwrap();
    assert_eq!(
        lines(&c),
        [
            "0xfe14a118 = 0x80000000  aw_p",
            "0xfe14a11c = 0x00000064  aw_b",
            "0xfe14a120 = 0x40000000  aw_r",
            "0xfe14a10c = 0x00000001  qos_cntl, bits 0x00000001"
        ]
    );
    assert_eq!((c.worth, c.excess, c.rate.error), (Enforcement::Guarantee, Some(0.0), Some(0.0)));
    let c = compile(&asked, Direction::Tx, &Place::Qos400(port)).unwrap();
    assert!(lines(&c)[2].contains("ar_r") && lines(&c)[3].contains("0x00000002"));
}

/// A bucket of QEMU, with the names of `util/throttle.c`.
struct Leaky {
    avg: f64,
    max: f64,
    length: f64,
    level: f64,
    burst_level: f64,
}

impl Leaky {
    fn wait(&self) -> f64 {
        let (size, burst) =
            if self.max == 0.0 { (self.avg / 10.0, 0.0) } else { (self.max * self.length, self.max / 10.0) };
        let mut wait = ((self.level - size) / self.avg).max(0.0);
        if self.length > 1.0 {
            wait = wait.max((self.burst_level - burst) / self.max);
        }
        wait
    }

    fn pass(&mut self, time: f64) {
        self.level = (self.level - self.avg * time).max(0.0);
        if self.length > 1.0 {
            self.burst_level = (self.burst_level - self.max * time).max(0.0);
        }
    }
}

/// The number after a key of the QMP command.
fn value(json: &str, key: &str) -> f64 {
    let at = format!("\"{key}\": ");
    json.split_once(&at).map_or(0.0, |(_, rest)| rest.split([',', ' ', '}']).next().unwrap().parse().unwrap())
}

proptest! {
    /// A flood through QEMU's bucket never exceeds the compiled arrival curve.
    #[test]
    fn qemu_keeps_what_is_said(
        rate in 1_000u64..1_000_000, burst in 4_096u64..10_000_000, times in prop::option::of(1u64..8),
        idle in 0.0f64..3.0,
    ) {
        let one = 4_096;
        let asked = Tspec { unit: Unit::Bytes, rate, burst, peak: times.map(|t| rate * t), largest: one };
        let c = compile(&asked, Direction::Read, &Place::Qemu { drive: "/machine/peripheral/d/virtio-backend".into() }).unwrap();
        let json = c.settings[0].to_string();
        let mut bucket = Leaky {
            avg: value(&json, "bps_rd"),
            max: value(&json, "bps_rd_max"),
            length: value(&json, "bps_rd_max_length").max(1.0),
            level: 0.0,
            burst_level: 0.0,
        };
        let (kept, mut now, mut passed) = (c.kept.unwrap(), 0.0f64, Vec::new());
        for i in 0..400 {
            // Pauses refill the bucket.
            let pause = if i == 200 { idle } else { 0.0 };
            bucket.pass(pause);
            now += pause;
            let wait = bucket.wait().max(0.0);
            bucket.pass(wait);
            now += wait;
            bucket.level += one as f64;
            bucket.burst_level += one as f64;
            passed.push(now);
        }
        for (i, from) in passed.iter().enumerate() {
            for (j, to) in passed.iter().enumerate().skip(i) {
                let moved = ((j - i + 1) as u64 * one) as f64;
                prop_assert!(moved <= kept.at(to - from) + 1e-3, "{} in {} s", moved, to - from);
            }
        }
    }

    /// The line for the I/O domain's file parses to the same limit.
    #[test]
    fn the_domain_reads_what_is_written(
        rate in 512u64..1_000_000_000_000, burst in 65_536u64..1 << 34, more in prop::option::of(0u64..1 << 40),
    ) {
        let asked = bytes(rate, burst, more.map(|more| (rate + more).min(1 << 45)).filter(|p| *p >= rate));
        let line = compile(&asked, Direction::Read, &Place::IoDomain).unwrap().settings[0].to_string();
        let text = format!(
            "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"v\"\nsocket = \"/run/v\"\npath = \"/dev/v\"\n{line}\n"
        );
        let file = rtvirtio_domain_config::File::parse(std::path::Path::new("iod.toml"), &text).unwrap();
        let cap = file.devices[0].sched().vms[0].caps[0];
        let found = cap.bytes.unwrap();
        prop_assert_eq!((found.rate, found.burst), (asked.rate, asked.burst));
        // A float of the ratio may be off by its last bit.
        if let Some((found, asked)) = found.peak.zip(asked.peak) {
            prop_assert!(found.abs_diff(asked) <= 1 + asked / (1 << 51), "{} {}", found, asked);
        }
        prop_assert_eq!(found.peak.is_some(), asked.peak.is_some());
    }

    /// A flood through the I/O domain's own regulator keeps the specification, and uses it.
    #[test]
    fn the_domain_regulates_as_asked(rate in 100_000u64..10_000_000, bursts in 1u64..20, times in 1u64..5) {
        let one = 64 << 10;
        let asked = bytes(rate, bursts * one, Some(rate * times));
        let cap = rtvirtio_sched::Cap { bytes: Some(asked.tokens()), ..rtvirtio_sched::Cap::default() };
        let charge = Charge { requests: 1, bytes: one, time: 0 };
        let mut regulator = Regulator::new(&cap, charge);
        let (mut now, mut passed) = (rtvirtio_units::Nanos(0), Vec::new());
        for _ in 0..100 {
            now = regulator.ready_at(now, &charge);
            regulator.take(now, &charge);
            passed.push(now.0);
        }
        let curve = asked.arrival();
        for (i, from) in passed.iter().enumerate() {
            for (j, to) in passed.iter().enumerate().skip(i) {
                let moved = ((j - i + 1) as u64 * one) as f64;
                prop_assert!(moved <= curve.at((to - from) as f64 / 1e9) + 1e-3);
            }
        }
        // The flood got everything except for rounding of one unit of service.
        let got = 100.0 * one as f64;
        prop_assert!(got + one as f64 >= curve.at((passed[99] - passed[0]) as f64 / 1e9).min(got));
    }
}

#[test]
fn settings_say_their_kind() {
    let c = compile(&bytes(1_000_000, MIB, None), Direction::Read, &io_max()).unwrap();
    assert!(matches!(&c.settings[0], Setting::File { text, .. } if text == "8:0 rbps=1000000"));
}

#[test]
fn requests_of_a_cgroup_are_those_of_whole_slices() {
    let of = |rate| compile(&requests(rate, 1), Direction::Read, &io_max()).unwrap();
    let noted = |of: &Compiled, word: &str| of.notes.iter().any(|note| note.contains(word));
    let (whole, between, few) = (of(70), of(78), of(9));
    assert!(!noted(&whole, "multiple of 10") && whole.worth == Enforcement::Cap);
    assert!(noted(&between, "multiple of 10") && between.worth == Enforcement::Cap);
    assert!(noted(&few, "either way") && few.worth == Enforcement::Hint && few.excess.is_none());
    assert_eq!((whole.rate.kept, between.rate.kept), (Some(70.0), Some(70.0)));
}
