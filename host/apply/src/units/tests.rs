use super::*;
use crate::systemd::without_weight;

/// Output of `systemctl show` by systemd 252.
const SHOWN: &str = "ControlGroup=/machine.slice/plc.scope\nCPUQuotaPerSecUSec=125ms\nCPUQuotaPeriodUSec=infinity\n\
    CPUWeight=[not set]\nIODeviceWeight=/dev/block/253:0 6700\nIODeviceWeight=/dev/sda 50\nIOAccounting=no\nLoadState=loaded\n";

fn weight_form(path: &str) -> Form {
    Form::UnitDeviceWeight { unit: "plc.scope".to_owned(), dev: "253:0".to_owned(), path: path.to_owned() }
}

fn quota_form() -> Form {
    Form::UnitQuota { unit: "plc.scope".to_owned() }
}

#[test]
fn properties_are_read_as_systemd_shows_them() {
    assert_eq!(quota_form().value(SHOWN).unwrap(), "125000 infinity");
    assert_eq!(weight_form("/dev/block/253:0").value(SHOWN).unwrap(), "6700");
    assert_eq!(weight_form("/dev/sda").value(SHOWN).unwrap(), "50");
    assert_eq!(weight_form("/dev/sdb").value(SHOWN).unwrap(), "default");
    assert_eq!(Form::UnitIo { unit: String::new() }.value(SHOWN).unwrap(), "no");
    // Nothing is read out of what is not understood.
    assert_eq!(quota_form().value("CPUQuotaPerSecUSec=soon\nCPUQuotaPeriodUSec=infinity\n"), None);
    assert_eq!(quota_form().value(""), None);
    assert_eq!(weight_form("/dev/sda").value("IODeviceWeight=/dev/sda much\n"), None);
}

#[test]
fn times_are_exact() {
    for (text, us) in [
        ("0", "0"),
        ("250us", "250"),
        ("10ms", "10000"),
        ("123.400ms", "123400"),
        ("1.250s", "1250000"),
        ("2min 8s", "128000000"),
        ("1min 2.500s", "62500000"),
        ("1h 1us", "3600000001"),
        ("infinity", "infinity"),
    ] {
        assert_eq!(time_us(text).as_deref(), Some(us), "{text}");
    }
    for wrong in ["", "1", "1 s", "-1s", "s", "1.s.s", "18446744073709551615s", "[not set]"] {
        assert_eq!(time_us(wrong), None, "{wrong}");
    }
}

#[test]
fn what_was_not_set_is_emptied_again() {
    assert_eq!(quota_form().text("infinity infinity"), "CPUQuota=\nCPUQuotaPeriodSec=");
    assert_eq!(quota_form().text("123400 20000"), "CPUQuota=12.34%\nCPUQuotaPeriodSec=20000us");
    let others = without_weight("/dev/block/253:0", SHOWN).unwrap();
    assert_eq!(others, "IODeviceWeight=\nIODeviceWeight=/dev/sda 50");
}

#[test]
fn a_cap_that_systemd_cannot_keep_is_rounded_up_and_known() {
    // (cpu.max, period of the unit, property, what systemd writes)
    for (cpu_max, now, property, kept) in [
        ("20000 100000", "infinity", "200000 infinity", "20000 100000"),
        ("20000 100000", "50000", "200000 100000", "20000 100000"),
        ("2000 20000", "infinity", "100000 20000", "2000 20000"),
        ("12500 100000", "infinity", "130000 infinity", "13000 100000"),
        ("150000 100000", "infinity", "1500000 infinity", "150000 100000"),
        ("max 100000", "infinity", "infinity infinity", "max 100000"),
        // Less than 1 ms is not taken: the period grows.
        ("500 10000", "infinity", "50000 10000", "1000 20000"),
    ] {
        assert_eq!(quota(cpu_max, now), Some((property.to_owned(), kept.to_owned())), "{cpu_max}");
    }
    assert_eq!(quota("many 100000", "infinity"), None);
}

#[test]
fn each_weight_of_bfq_has_one_of_systemd() {
    // `BFQ_WEIGHT()` of systemd.
    let bfq = |w: u64| if w <= 100 { w } else { 100 + (w - 100) * 900 / 9900 };
    for weight in 1..=1000 {
        assert_eq!(bfq(systemd_weight(weight)), weight);
        assert!((1..=10_000).contains(&systemd_weight(weight)));
    }
    assert_eq!(systemd_weight(1000), 10_000);
}

/// systemd writes its own weight of a device to `io.weight` too.
#[test]
fn a_weight_of_io_cost_is_not_kept_next_to_the_units_own() {
    let root = rtvirtio_kernel::Root::default();
    let machine = Machine::new(&root, &crate::machine::NoGuests);
    let form = Form::IoWeight { dev: "253:0".to_owned() };
    let file = "/sys/fs/cgroup/machine.slice/plc.scope/io.weight";
    let write = Write::new("io.weight of plc", Target::host(file, form), "800");
    let of = |shown: &str| property("plc.scope", &write, &Unit::new(shown), &machine);
    let why = of("IODeviceWeight=/dev/block/253:0 6700\n").unwrap_err();
    assert!(why.contains("IODeviceWeight="), "{why}");
    let (given, kept) = of("IODeviceWeight=\n").unwrap();
    assert_eq!((given.target.form, kept.as_str()), (Form::UnitIo { unit: "plc.scope".to_owned() }, "800"));
    assert!(of("IODeviceWeight=/dev/sda much\n").unwrap_err().contains("not understood"));
}

#[test]
fn a_latency_target_is_not_kept_next_to_the_units_own() {
    let root = rtvirtio_kernel::Root::default();
    let machine = Machine::new(&root, &crate::machine::NoGuests);
    let file = "/sys/fs/cgroup/machine.slice/plc.scope/io.latency";
    let target = Target::host(file, Form::IoLatency { dev: "253:0".to_owned() });
    let write = Write::new("io.latency of plc", target, "2000");
    let of = |shown: &str| property("plc.scope", &write, &Unit::new(shown), &machine);
    let why = of("IODeviceLatencyTargetUSec=/dev/sda 25ms\n").unwrap_err();
    assert!(why.contains("IODeviceLatencyTargetSec="), "{why}");
    let (given, kept) = of("IODeviceLatencyTargetUSec=\n").unwrap();
    assert_eq!((given.target.form, kept.as_str()), (Form::UnitIo { unit: "plc.scope".to_owned() }, "2000"));
}

#[test]
fn a_unit_is_known_by_its_directory() {
    let unit = |path: &str| unit_of(Path::new(path)).map(str::to_owned);
    let scope = "/sys/fs/cgroup/machine.slice/machine-qemu\\x2d1\\x2dplc.scope";
    assert_eq!(unit(&format!("{scope}/cpu.max")).as_deref(), Some("machine-qemu\\x2d1\\x2dplc.scope"));
    assert_eq!(unit("/sys/fs/cgroup/machine.slice/cpu.max").as_deref(), Some("machine.slice"));
    assert_eq!(unit(&format!("{scope}/libvirt/vcpu0/cpu.max")), None);
    assert_eq!(unit("/sys/fs/cgroup/plc/cpu.max"), None);
}

/// systemd writes over it, and what is not journaled does not come back.
#[test]
fn what_was_written_by_hand_and_cannot_be_read_is_not_taken_for_unset() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = rtvirtio_kernel::Root::new(dir.path());
    let machine = Machine::new(&root, &crate::machine::NoGuests);
    let group = Path::new("/sys/fs/cgroup/machine.slice/plc.scope");
    let weight = root.at(group.join("cpu.weight"));
    std::fs::create_dir_all(root.at(group)).unwrap();
    std::fs::write(&weight, "300\n").unwrap();
    let shown = BTreeMap::from([("plc.scope".to_owned(), Ok(SHOWN.to_owned()))]);
    let found = || {
        let target = Target::host(group.join("CPUQuota"), quota_form());
        let mut properties = [Write::new("CPUQuota of plc.scope", target, "200000 infinity")];
        side_effects(&mut properties, &[], &shown, &machine).map(|()| properties[0].side_effects.len())
    };
    assert_eq!(found().unwrap(), 1, "the weight, and no file that is not there");
    std::fs::remove_file(&weight).unwrap();
    std::fs::create_dir(&weight).unwrap();
    assert!(matches!(found(), Err(ApplyError::Host(HostError::Read { .. }))));
}
