use std::fs;
use std::time::Duration;

use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{HANG, Need, SilentDisk, has};

use super::*;

/// Files that are waited for on the busiest machine.
fn patient(dir: impl Into<PathBuf>, more: Vec<PathBuf>) -> ContractFiles {
    let mut files = ContractFiles::new(dir, more);
    files.reader.timeout = HANG;
    files
}

fn spec(vm: &str, more: &str) -> String {
    format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{vm}\"\npid = 7\n{more}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    )
}

#[test]
fn a_malformed_file_concerns_only_itself_and_what_it_had_is_held() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut files = patient(dir.path(), Vec::new());
    assert_eq!(files.changed(), Some(Desired::default()));
    assert_eq!(files.changed(), None);
    fs::write(at("a.toml"), spec("plc", "criticality = \"high\"")).unwrap();
    fs::write(at("b.toml"), "[[vm]\n").unwrap();
    fs::write(at(".c.toml"), "not looked at").unwrap();
    fs::write(at("d.toml.dpkg-new"), "not looked at").unwrap();
    let desired = files.changed().unwrap();
    assert_eq!(desired.contracts.len(), 1);
    assert_eq!(desired.contracts[0].criticality(), Criticality::High);
    assert_eq!(desired.faults.len(), 1);
    assert!(desired.faults[0].origin.to_string().ends_with("b.toml") && desired.held.is_empty());
    // A file that was valid keeps what is in force for its VMs.
    fs::write(at("a.toml"), "criticality").unwrap();
    let desired = files.changed().unwrap();
    assert_eq!((desired.contracts.len(), desired.held.as_slice()), (0, &["plc".to_owned()][..]));
    // Once it is removed, it does not.
    fs::remove_file(at("a.toml")).unwrap();
    let desired = files.changed().unwrap();
    assert_eq!((desired.held.len(), desired.faults.len()), (0, 1));
}

#[test]
fn a_hundred_vms_in_one_file_are_a_hundred_contracts() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let vm = |i: usize| spec(&format!("vm{i}"), "").replace("pid = 7", &format!("pid = {}", 100 + i));
    let rest = |i: usize| vm(i).split_once("[[vm]]").map(|(_, vm)| format!("[[vm]]{vm}")).unwrap();
    let all = vm(0) + &(1..100).map(rest).collect::<String>();
    fs::write(dir.path().join("all.toml"), all).unwrap();
    let desired = patient(dir.path(), Vec::new()).changed().unwrap();
    assert_eq!((desired.contracts.len(), desired.faults), (100, Vec::new()));
}

/// Settings of an earlier process may belong to a file that cannot be read now.
#[test]
fn a_file_that_was_never_right_since_the_start_holds_all() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a.toml"), "[[vm]\n").unwrap();
    let mut files = patient(dir.path(), Vec::new());
    let desired = files.changed().unwrap();
    assert!(desired.holds("plc") && desired.hides_contracts() && desired.faults.len() == 1);
    // A change of another file tells nothing of this one; a new invalid one holds none.
    fs::write(at("b.toml"), spec("hist", "")).unwrap();
    assert!(files.changed().unwrap().holds("plc"));
    fs::write(at("a.toml"), spec("plc", "")).unwrap();
    fs::write(at("c.toml"), "[[vm]\n").unwrap();
    let desired = files.changed().unwrap();
    assert!(!desired.holds("other") && !desired.hides_contracts(), "{desired:?}");
    // An unreadable directory holds all too: here a file has its name.
    let mut files = patient(at("b.toml"), Vec::new());
    let desired = files.changed().unwrap();
    assert!(desired.holds("plc") && desired.contracts.is_empty());
    fs::remove_file(at("b.toml")).unwrap();
    assert!(!files.changed().unwrap().holds("plc"), "there is none");
}

#[test]
fn a_directory_that_cannot_be_read_is_never_taken_for_empty() {
    let temp = rtvirtio_testkit::tempdir().unwrap();
    let (dir, away) = (temp.path().join("contracts.d"), temp.path().join("away"));
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("a.toml"), spec("plc", "")).unwrap();
    let mut files = patient(&dir, Vec::new());
    assert_eq!(files.changed().unwrap().contracts.len(), 1);
    fs::rename(&dir, &away).unwrap();
    fs::write(&dir, "a file").unwrap();
    for look in 0..3 {
        let desired = files.changed().unwrap();
        assert!(desired.holds("plc") && !desired.holds("other"), "look {look}: {desired:?}");
    }
    fs::remove_file(&dir).unwrap();
    fs::create_dir(&dir).unwrap();
    let desired = files.changed().unwrap();
    assert!(!desired.holds("plc") && desired.faults.is_empty(), "it is empty");
    assert_eq!(files.changed(), None);
}

#[test]
fn a_vm_has_one_contract_and_its_identity_is_what_is_put_in_force() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("a.toml"), spec("plc", "")).unwrap();
    fs::write(at("b.toml"), spec("plc", "cpu = { budget = \"4ms\", period = \"20ms\" }")).unwrap();
    let mut files = patient(dir.path(), Vec::new());
    // The first of a list has no more right to the name than the second.
    let both = files.changed().unwrap();
    assert_eq!((both.contracts.len(), both.held.as_slice()), (0, &["plc".to_owned()][..]));
    assert!(both.faults.len() == 2 && both.plant.is_none() && both.hides_contracts(), "{both:?}");
    assert!(both.faults[0].why.contains("b.toml too") && both.faults[1].why.contains("a.toml too"));
    fs::remove_file(at("b.toml")).unwrap();
    let first = files.changed().unwrap();
    assert!(first.faults.is_empty() && first.held.is_empty() && !first.contracts[0].sets_something());
    // Criticality decides only which contract gives way, and changes no setting.
    fs::write(at("a.toml"), spec("plc", "criticality = \"low\"")).unwrap();
    assert_eq!(files.changed().unwrap().contracts[0].id, first.contracts[0].id);
    fs::write(at("a.toml"), spec("plc", "cpu = { budget = \"4ms\", period = \"20ms\" }")).unwrap();
    let other = files.changed().unwrap();
    assert_ne!(other.contracts[0].id, first.contracts[0].id);
    assert!(other.contracts[0].sets_something() && other.contracts[0].parts.len() == 1);
}

#[test]
fn what_is_planned_for_is_of_all_files_and_has_no_cpu_in_it() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut files = patient(dir.path(), Vec::new());
    assert_eq!(files.changed().unwrap().plant, None);
    fs::write(at("a.toml"), spec("plc", "")).unwrap();
    fs::write(at("b.toml"), spec("hist", "")).unwrap();
    let both = files.changed().unwrap().plant.unwrap();
    assert_eq!((both.host.parts().len(), both.host.vms().len()), (1, 2));
    assert_eq!(both.only(&["hist".to_owned()].into()).unwrap().vms().len(), 1);
    assert!(both.only(&BTreeSet::new()).is_none());
    fs::write(at("a.toml"), spec("plc", "cpu = { budget = \"4ms\", period = \"20ms\" }")).unwrap();
    assert_eq!(files.changed().unwrap().plant.unwrap().id, both.id);
    fs::write(at("a.toml"), spec("plc", "").replace("4KiB", "8KiB")).unwrap();
    assert_ne!(files.changed().unwrap().plant.unwrap().id, both.id);
}

#[test]
fn a_fifo_concerns_only_itself() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    fs::write(dir.path().join("a.toml"), spec("plc", "")).unwrap();
    let fifo = dir.path().join("x.toml");
    let named = dir.path().join("named");
    for fifo in [&fifo, &named] {
        assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
    }
    let mut files = patient(dir.path(), vec![named]);
    let desired = files.changed().unwrap();
    assert_eq!(desired.contracts.iter().map(|c| c.vm.name.as_str()).collect::<Vec<_>>(), ["plc"]);
    assert_eq!(desired.faults.len(), 2, "{:?}", desired.faults);
    assert!(desired.faults.iter().all(|fault| fault.why.contains("FIFO")));
}

#[test]
fn a_file_on_a_disk_that_hangs_concerns_only_itself_and_what_it_had_is_held() {
    const TEST: &str = "a_file_on_a_disk_that_hangs_concerns_only_itself_and_what_it_had_is_held";
    if !has(TEST, &[Need::Root, Need::Path("/dev/fuse", "no /dev/fuse")]) {
        return;
    }
    let temp = rtvirtio_testkit::tempdir().unwrap();
    let (dir, far) = (temp.path().join("contracts.d"), temp.path().join("far"));
    for dir in [&dir, &far] {
        fs::create_dir(dir).unwrap();
    }
    fs::write(dir.join("a.toml"), spec("plc", "")).unwrap();
    fs::write(far.join("hist.toml"), spec("hist", "")).unwrap();
    let more = vec![far.join("hist.toml")];
    let mut files = patient(&dir, more.clone());
    let names = |of: &Desired| of.contracts.iter().map(|c| c.vm.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&files.changed().unwrap()), ["plc", "hist"]);

    let disk = SilentDisk::mount(&far);
    files.reader.timeout = Duration::from_millis(200);
    let mut desired = Desired::default();
    // Any file may be late for once on a busy machine.
    let mut until = |files: &mut ContractFiles, what: &str, is_so: &dyn Fn(&Desired) -> bool| {
        wait_for(what, || {
            desired = files.changed().unwrap_or_else(|| std::mem::take(&mut desired));
            is_so(&desired)
        });
        desired.clone()
    };
    let now = until(&mut files, "the rest", &|of| names(of) == ["plc"] && of.faults.len() == 1);
    assert_eq!(now.held, ["hist"]);
    assert!(now.faults[0].origin.to_string().ends_with("hist.toml"), "{:?}", now.faults);
    assert!(now.faults[0].why.contains("does not answer"), "{:?}", now.faults);
    // The others are read meanwhile.
    fs::write(dir.join("b.toml"), spec("hmi", "")).unwrap();
    let now = until(&mut files, "a new file", &|of| names(of) == ["plc", "hmi"]);
    assert!(now.holds("hist") && !now.holds("other"));
    // So they are after a start, when what is in force may be of the file that does not answer.
    let mut started = ContractFiles::new(&dir, more);
    started.reader.timeout = Duration::from_millis(200);
    let now = until(&mut started, "the first look", &|of| names(of) == ["plc", "hmi"]);
    assert!(now.holds("hist") && now.has_unread, "{now:?}");

    drop(disk);
    until(&mut files, "its return", &|of| names(of) == ["plc", "hmi", "hist"] && of.held.is_empty());
}

#[test]
fn contracts_are_incomplete_until_the_first_answer() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let mut files = ContractFiles::new(dir.path(), Vec::new());
    files.reader.timeout = Duration::ZERO;
    let desired = files.changed().unwrap();
    assert!(desired.is_incomplete && desired.holds("plc"), "{desired:?}");
}

#[test]
fn the_most_critical_is_admitted_first_and_what_is_in_force_before_what_is_new() {
    let all = ["low", "high", "medium", "medium"].iter().enumerate().map(|(i, word)| {
        let text = spec(&format!("vm{i}"), &format!("criticality = \"{word}\""));
        Contract::of_spec(&HostSpec::parse("x.toml", &text).unwrap(), Path::new("x.toml")).remove(0)
    });
    let desired = Desired { contracts: all.collect(), ..Desired::default() };
    let order = |in_force: &str| {
        let all = desired.by_criticality(|vm| vm == in_force);
        all.iter().map(|c| c.vm.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(order(""), ["vm1", "vm2", "vm3", "vm0"]);
    assert_eq!(order("vm3"), ["vm1", "vm3", "vm2", "vm0"]);
    assert_eq!(order("vm0"), ["vm1", "vm2", "vm3", "vm0"]);
}
