use rtvirtio_spec::LibvirtDomain;

use super::*;
use crate::desired::Desired;

const URI: &str = LibvirtDomain::DEFAULT_URI;
const SECOND: Nanos = Nanos::from_millis(1_000);

fn at(ms: u64) -> BootTime {
    BootTime { id: "boot".to_owned(), ms }
}

fn text(vm: &str) -> String {
    format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\n{vm}cpu = {{ budget = \"2ms\", period = \"20ms\" }}\n[[vm.task]]\n\
         name = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    )
}

fn vm(n: usize) -> ArrivingVm {
    let uuid = format!("a9949d75-95e3-4747-82e3-c9fee104{n:04}");
    ArrivingVm { name: format!("vm{n}"), uuid: Some(uuid), proxmox: None, text: Some(text("")) }
}

fn arrival(n: usize, hold: Nanos, now: &BootTime) -> Arrival {
    Arrival::new(&vm(n), URI, hold, now).unwrap().unwrap()
}

fn names(arrivals: &Arrivals) -> Vec<&str> {
    arrivals.all().iter().map(Arrival::vm).collect()
}

#[test]
fn reservations_survive_the_service_and_end_with_their_time_and_with_the_host() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, now) = (dir.path(), at(5_000));
    let mut arrivals = Arrivals::load(state, &Ok(now.clone()));
    assert!(arrivals.all().is_empty() && arrivals.problem().is_none());
    arrivals.take(arrival(1, SECOND, &now), state, &now).unwrap();
    arrivals.take(arrival(2, SECOND, &at(5_500)), state, &now).unwrap();
    // The same VM again is one reservation, with the later end.
    arrivals.take(arrival(1, SECOND, &at(5_800)), state, &now).unwrap();
    assert_eq!(names(&arrivals), ["vm2", "vm1"]);
    let mut again = Arrivals::load(state, &Ok(now.clone()));
    assert_eq!(again.all(), arrivals.all());
    assert_eq!(again.expire(state, &at(6_499)).0, []);
    let (ended, unstored) = again.expire(state, &at(6_500));
    assert_eq!((ended.len(), ended[0].0.as_str(), unstored), (1, "vm2", None));
    assert_eq!(names(&Arrivals::load(state, &Ok(at(6_500)))), ["vm1"]);
    // Its time was over while no service ran: that it ends is said.
    assert_eq!(names(&Arrivals::load(state, &Ok(at(6_800)))), ["vm1"]);
    // By UUID or name, and not by another's.
    let known = Ok(now.clone());
    assert_eq!(again.give_back("vm2", state, &known).0, []);
    assert_eq!(again.give_back(&vm(1).uuid.unwrap().to_uppercase(), state, &known).0.len(), 1);
    assert!(Arrivals::load(state, &Ok(now.clone())).all().is_empty());
    arrivals.take(arrival(3, SECOND, &now), state, &now).unwrap();
    let rebooted = BootTime { id: "another".to_owned(), ms: 1 };
    let after = Arrivals::load(state, &Ok(rebooted));
    assert!(after.all().is_empty() && after.problem().is_none());
    // A time that no request could have asked for.
    let stored = std::fs::read_to_string(state.join(FILE)).unwrap();
    assert!(stored.contains("\"until_ms\":6000"), "{stored}");
    std::fs::write(state.join(FILE), stored.replace("6000", "18446744073709551615")).unwrap();
    let mut forged = Arrivals::load(state, &Ok(now.clone()));
    assert_eq!(forged.expire(state, &at(now.ms + LONGEST_HOLD.0 / 1_000_000)).0.len(), 3);
}

#[test]
fn what_cannot_be_read_is_not_taken_for_none_and_what_cannot_be_stored_is_not_reserved() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, now) = (dir.path(), at(5_000));
    for bad in ["", "{", "{\"schema\":\"x\",\"boot_id\":\"boot\",\"arrivals\":[]}"] {
        std::fs::write(state.join(FILE), bad).unwrap();
        let mut arrivals = Arrivals::load(state, &Ok(now.clone()));
        assert!(arrivals.problem().unwrap().contains(FILE), "{bad}");
        assert!(arrivals.know(state, &Ok(now.clone())).is_err(), "{bad}");
        std::fs::remove_file(state.join(FILE)).unwrap();
        arrivals.know(state, &Ok(now.clone())).unwrap();
        assert!(arrivals.problem().is_none());
    }
    let mut arrivals = Arrivals::default();
    for n in 0..MOST_ARRIVALS {
        arrivals.take(arrival(n, SECOND, &now), state, &now).unwrap();
    }
    let more = arrivals.take(arrival(MOST_ARRIVALS, SECOND, &now), state, &now);
    assert_eq!(more, Err(ArrivalError::TooMany));
    assert!(Arrivals::load(state, &Err("no clock".to_owned())).problem().unwrap().contains("no clock"));
    // A directory in the place of the file.
    std::fs::remove_file(state.join(FILE)).unwrap();
    std::fs::create_dir_all(state.join(FILE).join("x")).unwrap();
    let mut arrivals = Arrivals::default();
    let e = arrivals.take(arrival(1, SECOND, &now), state, &now).unwrap_err();
    assert!(matches!(e, ArrivalError::NotStored { .. }) && e.is_temporary(), "{e}");
    assert!(arrivals.all().is_empty());
}

#[test]
fn a_contract_of_this_host_counts_in_place_of_the_reservation() {
    let now = at(0);
    let all = [arrival(1, SECOND, &now)];
    let of = |reach: &str, origin: Origin| {
        let name = format!("name = \"vm1\"\n{reach}\n");
        let spec = rtvirtio_spec::HostSpec::parse("x", &text(&name)).unwrap();
        Desired { contracts: Contract::of_spec(&spec, origin), ..Desired::default() }
    };
    let domain = || Origin::Domain { name: "vm1".to_owned(), uri: URI.to_owned() };
    let file = || Origin::File("x.toml".into());
    let is_counted = |desired: &Desired, runs: bool| !counted(desired, &all, |_| runs).is_empty();
    let uuid = format!("domain = \"{}\"", vm(1).uuid.unwrap().to_uppercase());
    assert!(is_counted(&Desired::default(), false));
    for reach in ["domain = \"vm1\"", &uuid] {
        assert!(!is_counted(&of(reach, file()), false), "{reach}");
        // Metadata of an earlier start, until the VM runs.
        assert!(is_counted(&of(reach, domain()), false), "{reach}");
        assert!(!is_counted(&of(reach, domain()), true), "{reach}");
    }
    // Other VMs of the same name: one of both can be admitted, and that is the host's own.
    for reach in ["domain = \"vm1\"\nuri = \"qemu:///session\"", "qmp = \"/q\"", "proxmox = 101"] {
        let desired = of(reach, file());
        assert!(!is_counted(&desired, true), "{reach}");
        let mut arrivals = Arrivals { all: all.to_vec(), ..Arrivals::default() };
        arrivals.find_namesakes(&desired);
        let shown = arrivals.snapshots(&Admission::default());
        assert_eq!(shown[0].state, ArrivalState::Refused, "{reach}");
        assert!(shown[0].why.as_ref().unwrap().contains("another VM here (x.toml)"), "{shown:?}");
        arrivals.find_namesakes(&Desired::default());
        assert_eq!(arrivals.snapshots(&Admission::default())[0].state, ArrivalState::Reserved);
    }
    let proxmox = ArrivingVm::of_proxmox(101);
    assert!(is_of(&proxmox, URI, &of("proxmox = 101", file()).contracts[0]));
    assert!(!is_of(&proxmox, URI, &of("proxmox = 102", file()).contracts[0]));
}

#[test]
fn a_reservation_is_renewed_while_its_vm_is_being_moved_here() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, now) = (dir.path(), at(5_000));
    let mut arrivals = Arrivals::default();
    for n in 1..=2 {
        arrivals.take(arrival(n, SECOND, &now), state, &now).unwrap();
    }
    let line = |args: &[&str]| {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        CommandLine::parse(&args)
    };
    let uuid = vm(1).uuid.unwrap().to_uppercase();
    let machine = line(&["-name", "guest=vm1", "-uuid", &uuid, "-incoming", "defer"]);
    // Another VM, which has the name of one that is to come.
    let other_uuid = vm(9).uuid.unwrap();
    let other = line(&["-name", "guest=vm2", "-uuid", &other_uuid]);
    let here = |of: &Arrival| {
        assert!(!of.is_machine(&other));
        of.is_machine(&machine).then(|| "it is here".to_owned())
    };
    assert!(!arrivals.is_due(&at(5_999)) && arrivals.is_due(&at(6_000)));
    assert_eq!(arrivals.renew(state, &at(5_999), here), (Vec::new(), None));
    let renewed = vec![("vm1".to_owned(), "it is here".to_owned())];
    assert_eq!(arrivals.renew(state, &at(6_000), here), (renewed, None));
    let (ended, unstored) = arrivals.expire(state, &at(6_000));
    assert!(ended[0].0 == "vm2" && ended[0].1.contains("not come") && unstored.is_none(), "{ended:?}");
    // For as long as at first, also after a restart of the service.
    let end = 6_000 + USUAL_HOLD.0 / 1_000_000;
    let again = Arrivals::load(state, &Ok(at(6_001)));
    assert_eq!((again.all(), names(&again)), (arrivals.all(), vec!["vm1"]));
    assert!(!arrivals.is_due(&at(end - 1)) && arrivals.is_due(&at(end)));
    // Not for ever.
    let mut times = 1;
    let mut due = end;
    while !arrivals.renew(state, &at(due), here).0.is_empty() {
        (times, due) = (times + 1, due + USUAL_HOLD.0 / 1_000_000);
    }
    assert_eq!(times, MOST_RENEWALS);
    assert_eq!(arrivals.expire(state, &at(due)).0[0].0, "vm1");
    // A VM of a contract file, by what the file names it.
    let of = |reach: &str| {
        let file = text(&format!("name = \"plc\"\n{reach}\n"));
        Arrival::new(&ArrivingVm::of_body(&file, None).unwrap(), URI, SECOND, &now).unwrap().unwrap()
    };
    assert!(of("domain = \"vm1\"").is_machine(&CommandLine { libvirt: true, ..machine.clone() }));
    assert!(of("qmp = \"/q\"").is_machine(&CommandLine { qmp: Some("/q".into()), ..other.clone() }));
    assert!(!of("qmp = \"/q\"").is_machine(&machine) && !of("pid = 7").is_machine(&machine));
}

#[test]
fn a_name_in_the_form_of_a_uuid_is_no_name() {
    let (one, other) = (vm(1).uuid.unwrap(), vm(2).uuid.unwrap());
    assert!(names_domain("plc", "plc", &one) && names_domain(&one.to_uppercase(), "plc", &one));
    // A VM that is named like another one's UUID.
    assert!(!names_domain(&one, &one, &other) && !names_domain("PLC", "plc", &one));
}

#[test]
fn only_the_vm_itself_gives_a_reservation_back() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, now) = (dir.path(), at(5_000));
    let known = Ok(now.clone());
    let mut arrivals = Arrivals::default();
    // A domain, whose contract has the name of another one, and a VM of a contract file.
    let domain = ArrivingVm { text: Some(text("name = \"plc\"\n")), ..vm(1) };
    let file = text("name = \"vm9\"\nqmp = \"/q\"\n");
    for vm in [domain, ArrivingVm::of_body(&file, None).unwrap()] {
        let arrival = Arrival::new(&vm, URI, SECOND, &now).unwrap().unwrap();
        arrivals.take(arrival, state, &now).unwrap();
    }
    assert_eq!(names(&arrivals), ["plc", "vm9"]);
    for other in ["plc", &vm(2).uuid.unwrap(), &vm(9).uuid.unwrap()] {
        assert_eq!(arrivals.give_back(other, state, &known).0, [], "{other}");
    }
    assert_eq!(arrivals.give_back("vm9", state, &known).0.len(), 1);
    // Without a clock it ends, and what is stored keeps the run of the kernel.
    let (ended, unstored) = arrivals.give_back("vm1", state, &Err("no clock".to_owned()));
    assert_eq!((ended.len(), unstored), (1, Some("no clock".to_owned())));
    assert!(arrivals.all().is_empty());
    assert_eq!(names(&Arrivals::load(state, &known)), ["plc"]);
}

#[test]
fn a_second_request_that_is_undone_leaves_the_first_reservation() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, now) = (dir.path(), at(5_000));
    let mut arrivals = Arrivals::default();
    for n in 1..=2 {
        arrivals.take(arrival(n, SECOND, &now), state, &now).unwrap();
    }
    let first = arrivals.all().to_vec();
    let before = arrivals.take(arrival(1, LONGEST_HOLD, &now), state, &now).unwrap();
    assert_ne!(arrivals.all(), first);
    assert_eq!(arrivals.put_back(before, state, &Ok(now.clone())), None);
    assert_eq!(arrivals.all(), first);
    assert_eq!(Arrivals::load(state, &Ok(now)).all(), first);
}

#[test]
fn the_clock_of_reservations_is_the_kernels() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    assert!(BootTime::read(&root).is_err());
    std::fs::create_dir_all(dir.path().join("proc/sys/kernel/random")).unwrap();
    std::fs::write(dir.path().join("proc/sys/kernel/random/boot_id"), "boot\n").unwrap();
    std::fs::write(dir.path().join("proc/uptime"), "12.25 3.00\n").unwrap();
    assert_eq!(BootTime::read(&root).unwrap(), at(12_250));
    std::fs::write(dir.path().join("proc/uptime"), "soon\n").unwrap();
    assert!(BootTime::read(&root).is_err());
}
