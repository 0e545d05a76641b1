use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rtvirtio_apply::{
    Form, JOURNAL_FILE, KnobState, KnobStatus, NoGuests, Session, Silent, Status, Target, Write,
};
use rtvirtio_cpu::{Backend, Contract, Level, Order};
use rtvirtio_kernel::ProcessId;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::contracts::InForce;
use rtvirtio_workflow::started::StartedVm;
use rtvirtio_workflow::write_state;

use super::standing::compared;
use super::*;
use crate::node::contract_dirs;

/// Keeps the last warning.
#[derive(Default)]
struct Said {
    last: Mutex<String>,
    cancelled: AtomicBool,
}

impl Said {
    fn last(&self) -> String {
        self.last.lock().unwrap().clone()
    }
}

impl Progress for Said {
    fn warn(&self, text: &str) {
        text.clone_into(&mut self.last.lock().unwrap());
    }

    fn cancel_flag(&self) -> &AtomicBool {
        &self.cancelled
    }
}

fn resource(dir: &Path) -> Parameters {
    let dirs = Dirs { state: dir.join("state"), run: dir.join("run") };
    Parameters { spec: dir.join("plc.toml"), resource: "plc".to_owned(), disk: false, dirs, timeout: None }
}

/// A contract in force with one setting, a file that stands for one of the kernel.
fn in_force(dir: &Path) -> (Parameters, PathBuf) {
    let (p, file) = (resource(dir), dir.join("setting"));
    apply_to(&p.own().state, &[&file]);
    (p, file)
}

fn apply_to(state: &Path, files: &[&Path]) {
    let write = |file: &&Path| {
        std::fs::write(file, "0\n").unwrap();
        Write::new("setting", Target::host(file, Form::Plain), "1")
    };
    let writes: Vec<Write> = files.iter().map(write).collect();
    let root = Root::default();
    let session = Session::open(state).unwrap();
    session.apply(&writes, &Machine::new(&root, &NoGuests), &mut Silent).unwrap();
}

/// Contracts of 1 ms in 100 ms in force.
fn have(p: &Parameters, vms: &[&str]) {
    let contract = Contract::new(Nanos::from_micros(1000), Nanos::from_micros(100_000)).unwrap();
    let had = |vm: &&str| InForce {
        vm: (*vm).to_owned(),
        contract,
        order: Order::Contract,
        level: Level::ALONE,
        backend: Backend::RtGroup,
        group: None,
        urgency: None,
        cores: None,
        partition: None,
    };
    let text = serde_json::to_vec(&vms.iter().map(had).collect::<Vec<_>>()).unwrap();
    write_state(&p.own().state, contracts::IN_FORCE_FILE, &text).unwrap();
}

/// A VM of a spec, which does not answer; `more` is lines of it.
fn vm(name: &str, budget: &str, more: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\nqmp = \"/run/rtvirtio-none.qmp\"\n\
         cpu = {{ budget = \"{budget}\", period = \"100ms\" }}\n{more}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n"
    )
}

const DEVICE: &str = "[device]\npath = \"/dev/vda\"\n";

/// The contract of a VM that has 1 ms in 100 ms; the spec asks for nearly all.
fn ask_for_too_much(p: &Parameters) {
    have(p, &["plc"]);
    std::fs::write(&p.spec, DEVICE.to_owned() + &vm("plc", "99ms", "")).unwrap();
}

#[test]
fn a_contract_that_cannot_be_applied_takes_none_away() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (p, file) = in_force(dir.path());
    let said = Said::default();
    let stays = |says: [&str; 2]| {
        assert_eq!(run("monitor", &p, &said), Ocf::Success, "{}", said.last());
        assert!(says.iter().all(|words| said.last().contains(words)), "{}", said.last());
        assert_eq!(std::fs::read_to_string(&file).unwrap().trim(), "1");
        assert!(p.own().state.join(JOURNAL_FILE).exists());
    };
    // Another program changes the setting while the spec is missing, then broken.
    std::fs::write(&file, "7\n").unwrap();
    stays(["was changed to 7", "it is applied again"]);
    std::fs::write(&p.spec, "[[vm").unwrap();
    std::fs::write(&file, "0\n").unwrap();
    stays(["is as before the contract", "it is applied again"]);
    // The user asks for another contract.
    ask_for_too_much(&p);
    stays(["asks for 99ms in 100ms now", "what is in force stays"]);
    std::fs::write(&file, "7\n").unwrap();
    stays(["was changed to 7", "it is applied again"]);
    // Nothing can be written there any more: said to Pacemaker, and not put back here.
    std::fs::remove_file(&file).unwrap();
    assert_eq!(run("monitor", &p, &said), Ocf::Generic);
    assert!(p.own().state.join(JOURNAL_FILE).exists());
}

/// A contract in force with its spec, in which two VMs have the same.
fn as_applied(dir: &Path) -> (Parameters, String) {
    let (p, _) = in_force(dir);
    let text = DEVICE.to_owned() + &vm("plc", "1ms", "") + &vm("hmi", "1ms", "").replace("none", "no");
    have(&p, &["plc", "hmi"]);
    applied_spec::save(&p.own(), text.as_bytes()).unwrap();
    std::fs::write(&p.spec, &text).unwrap();
    (p, text)
}

#[test]
fn all_that_makes_the_contract_is_compared_with_what_was_applied() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (p, text) = as_applied(dir.path());
    let said = Said::default();
    let says = |now: String| {
        std::fs::write(&p.spec, now).unwrap();
        said.warn("");
        assert_eq!(run("monitor", &p, &said), Ocf::Success, "{}", said.last());
        said.last()
    };
    // Neither load nor targets nor comments make another contract.
    let target = "rate = \"20/s\"\ntarget = { percentile = \"p99\", latency = \"5ms\" }";
    for same in [text.clone(), format!("# a comment\n{text}"), text.replace("rate = \"10/s\"", target)] {
        assert_eq!(says(same), "");
    }
    let first = |more: &str| text.replacen("}\n", &format!("}}\n{more}\n"), 1);
    let alone = DEVICE.to_owned() + &vm("plc", "1ms", "");
    let with_log = text.clone() + &vm("log", "1ms", "").replace("none", "log");
    for (other, word) in [
        (first("cores = \"0\""), "plc: the spec has another value of `cores`"),
        (first("priorities = \"rt\""), "plc: the spec has another value of `priorities`"),
        (text.replacen("-none", "-other", 1), "plc: the spec has another VM of this name"),
        (alone, "hmi: the spec asks for nothing now, 1ms in 100ms was applied"),
        (with_log, "log: the spec asks for 1ms in 100ms now"),
        (text.replacen("1ms", "2ms", 1), "plc: the spec asks for 2ms in 100ms now"),
    ] {
        let said = says(other);
        assert!(said.contains(word) && said.contains("what is in force stays"), "{word}: {said}");
    }
    // Damaged is not absent.
    write_state(&p.own().state, "applied.toml", b"[[vm").unwrap();
    let said = says(text);
    assert!(said.contains("in force as applied") && said.contains("applied.toml"), "{said}");
}

/// Each try takes the contract in force away for a moment.
#[test]
fn a_spec_that_could_not_be_applied_is_not_tried_at_every_monitor() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (p, text) = as_applied(dir.path());
    let said = Said::default();
    let says = |now: &str| {
        std::fs::write(&p.spec, now).unwrap();
        assert_eq!(run("monitor", &p, &said), Ocf::Success, "{}", said.last());
        said.last()
    };
    let other = text.replacen("1ms", "2ms", 1);
    applied_spec::refuse(&p.own(), other.as_bytes()).unwrap();
    let waits = says(&other);
    assert!(waits.contains("asks for 2ms in 100ms now"), "{waits}");
    assert!(waits.contains("restart this resource"), "{waits}");
    // Nor to set right what another program has changed.
    assert_eq!(next(&p).unwrap().text, text.as_bytes());
    applied_spec::refuse(&p.own(), text.as_bytes()).unwrap();
    applied_spec::accept(&p.own(), text.as_bytes()).unwrap();
    assert!(applied_spec::is_refused(&p.own(), other.as_bytes()).unwrap(), "the applied one is another");
    // The user has changed the file.
    let again = format!("{other}# again\n");
    let tried = says(&again);
    assert!(tried.contains("what is in force stays"), "{tried}");
    assert_eq!(next(&p).unwrap().text, again.as_bytes());
    // A contract that came into force is not refused, and its copy stays.
    applied_spec::refuse(&p.own(), again.as_bytes()).unwrap();
    applied_spec::accept(&p.own(), again.as_bytes()).unwrap();
    assert!(!applied_spec::is_refused(&p.own(), again.as_bytes()).unwrap());
    assert!(applied_spec::applied(&p.own(), &p.spec).unwrap().is_some());
    // Nothing is left behind.
    applied_spec::refuse(&p.own(), other.as_bytes()).unwrap();
    assert_eq!(run("stop", &p, &said), Ocf::Success, "{}", said.last());
    for file in ["applied.toml", "refused.toml", JOURNAL_FILE] {
        assert!(!p.own().state.join(file).exists(), "{file}");
    }
}

/// Budget kept for a VM that has ended would count against the new contract.
#[test]
fn spare_room_is_lowered_before_a_contract_is_found_not_to_fit() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (p, _) = in_force(dir.path());
    let (said, above) = (Said::default(), dir.path().join("above"));
    apply_to(&contract_dirs(&p.dirs, "shared").state, &[&above]);
    assert_eq!(std::fs::read_to_string(&above).unwrap().trim(), "1");
    ask_for_too_much(&p);
    assert_eq!(run("monitor", &p, &said), Ocf::Success, "{}", said.last());
    assert!(said.last().contains("what is in force stays"), "{}", said.last());
    assert_eq!(std::fs::read_to_string(&above).unwrap().trim(), "0");
}

/// Pacemaker stops a resource whose monitor fails, and no start would bring the rest back.
#[test]
fn one_setting_that_cannot_be_set_again_does_not_take_the_others_away() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (p, said) = (resource(dir.path()), Said::default());
    let (file, other) = (dir.path().join("setting"), dir.path().join("other"));
    apply_to(&p.own().state, &[&file, &other]);
    // Nobody can write there.
    let beyond_reach = |file: &Path| {
        std::fs::remove_file(file).unwrap();
        std::os::unix::fs::symlink("/proc/sys/kernel/ostype", file).unwrap();
    };
    beyond_reach(&file);
    for spec in [None, Some("[[vm")] {
        if let Some(text) = spec {
            std::fs::write(&p.spec, text).unwrap();
        }
        assert_eq!(run("monitor", &p, &said), Ocf::Success, "{}", said.last());
        assert!(said.last().contains("what is in force stays"), "{}", said.last());
    }
    ask_for_too_much(&p);
    assert_eq!(run("monitor", &p, &said), Ocf::Success, "{}", said.last());
    assert_eq!(std::fs::read_to_string(&other).unwrap().trim(), "1");
    // Nothing is left.
    beyond_reach(&other);
    assert_eq!(run("monitor", &p, &said), Ocf::Generic);
    assert!(p.own().state.join(JOURNAL_FILE).exists());
    // Without its budget a contract is not in force, whatever else is.
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let p = resource(dir.path());
    let (budget, other) = (dir.path().join("cpu.rt_runtime_us"), dir.path().join("other"));
    apply_to(&p.own().state, &[&budget, &other]);
    beyond_reach(&budget);
    assert_eq!(run("monitor", &p, &said), Ocf::Generic, "{}", said.last());
}

#[test]
fn a_contract_without_settings_ends_with_the_boot_and_with_its_vm() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (p, said) = (resource(dir.path()), Said::default());
    let (own, monitor) = (p.own(), || run("monitor", &p, &said));
    let this = ProcessId::find(std::process::id()).unwrap().unwrap();
    let gone = ProcessId { pid: this.pid, start_time: this.start_time + 1 };
    let vm = |process: &ProcessId| StartedVm { vm: "plc".to_owned(), processes: vec![process.clone()] };
    assert_eq!(monitor(), Ocf::NotRunning, "nothing is applied");
    for (vms, finds) in [
        (vec![], Ocf::Success),
        (vec![vm(&this)], Ocf::Success),
        (vec![vm(&this), vm(&gone)], Ocf::NotRunning),
    ] {
        marker::save(&own, &vms).unwrap();
        assert_eq!(monitor(), finds, "{vms:?}");
    }
    // The node was fenced, and is back.
    marker::save(&own, &[vm(&this)]).unwrap();
    let file = own.state.join(marker::FILE);
    let text = std::fs::read_to_string(&file).unwrap();
    let boot = std::fs::read_to_string(marker::BOOT_ID).unwrap();
    assert!(text.contains(boot.trim()), "{text}");
    std::fs::write(&file, text.replace(boot.trim(), "another")).unwrap();
    assert_eq!(monitor(), Ocf::NotRunning);
    // Damaged is not absent.
    std::fs::write(&file, "{").unwrap();
    assert_eq!(monitor(), Ocf::Generic);
    assert!(said.last().contains("the agent's `stop` removes it"), "{}", said.last());
    std::fs::write(&file, "").unwrap();
    assert_eq!(monitor(), Ocf::NotRunning, "of no boot");
    marker::remove(&own).unwrap();
    assert_eq!(monitor(), Ocf::NotRunning);
}

fn parameters(given: &[(&str, &str)]) -> Result<Parameters, String> {
    let given: Vec<(String, String)> =
        given.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    let find = move |name: &str| given.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let dirs = Dirs { state: "/var/lib/rtvirtio".into(), run: "/run/rtvirtio".into() };
    Parameters::of_environment(&find, &dirs)
}

#[test]
fn what_cannot_be_read_is_not_what_was_changed() {
    let unknown = || KnobState::Unknown { error: "no answer".to_owned() };
    let gone = || KnobState::Gone { why: "no thread".to_owned() };
    let of_knobs = |knobs: Vec<(&str, KnobState)>| {
        let knob = |(path, state): (&str, KnobState)| KnobStatus {
            knob: "knob".to_owned(),
            path: path.to_owned(),
            old: None,
            new: "1".to_owned(),
            state,
        };
        let status = Status {
            pid: 1,
            version: String::new(),
            complete: true,
            reverting: false,
            leftover: false,
            rebooted: false,
            knobs: knobs.into_iter().map(knob).collect(),
        };
        match compared(&status) {
            ContractState::Verified => "verified",
            ContractState::None => "none",
            ContractState::Differs(_) => "differs",
            ContractState::Unknown(_) => "unknown",
        }
    };
    let of = |states: Vec<KnobState>| of_knobs(states.into_iter().map(|state| ("/path", state)).collect());
    let changed = || KnobState::Changed { found: "2".to_owned() };
    assert_eq!(of(vec![KnobState::InForce, gone()]), "verified");
    assert_eq!(of(vec![KnobState::InForce, unknown()]), "unknown");
    assert_eq!(of(vec![unknown(), KnobState::InForce, changed()]), "differs");
    assert_eq!(of(vec![unknown()]), "unknown");
    assert_eq!(of(vec![unknown(), gone()]), "differs");
    assert_eq!(of(vec![gone()]), "differs");
    // irqbalance moves interrupts, and the contract holds all the same.
    let irq = || ("/proc/irq/24/smp_affinity_list", changed());
    assert_eq!(of_knobs(vec![irq(), ("/path", KnobState::InForce)]), "verified");
    assert_eq!(of_knobs(vec![irq(), ("/path", changed())]), "differs");
}

/// Pacemaker gives a call its timeout; without it that of the agent's description counts.
#[test]
fn the_waits_of_a_call_end_before_its_timeout() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let usual = resource(dir.path());
    for action in ["start", "stop", "monitor"] {
        let metadata = crate::METADATA;
        let of = |word: &str| metadata.split_once(&format!("<action name=\"{action}\" {word}=\"")).unwrap().1;
        let seconds = of("timeout").split_once("s\"").unwrap().0.parse().unwrap();
        assert_eq!(waiting_time(action, &usual), Duration::from_secs(seconds) * 2 / 3, "{action}");
    }
    let spec = [("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "x")];
    let given = parameters(&[&spec[..], &[("OCF_RESKEY_CRM_meta_timeout", "90000")]].concat()).unwrap();
    assert_eq!(waiting_time("start", &given), Duration::from_secs(60));
    // A lock that another agent holds is waited for no longer either.
    let _limit = WaitLimit::lasting(Duration::ZERO);
    let _held = Scopes::lock(&usual.dirs).unwrap();
    let e = locked(&usual, Duration::from_secs(3600), &Said::default()).err().unwrap();
    assert!(matches!(e, PacemakerError::Step(_)), "{e}");
}

#[test]
fn parameters_come_from_the_executors_environment() {
    let p = parameters(&[
        ("OCF_RESKEY_spec", "/etc/plc.toml"),
        ("OCF_RESOURCE_INSTANCE", "plc-contract"),
        ("OCF_RESKEY_resource", "plc"),
    ])
    .unwrap();
    assert_eq!((p.resource.as_str(), p.disk, p.timeout), ("plc", false, None));
    assert_eq!(p.own().state, PathBuf::from("/var/lib/rtvirtio/contracts/plc"));
    let other = [("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "x"), ("OCF_RESKEY_state_dir", "/s")];
    assert_eq!(parameters(&other).unwrap().own().state, PathBuf::from("/s/contracts/x"));
    for bad in [
        &[("OCF_RESOURCE_INSTANCE", "x")][..],
        &[("OCF_RESKEY_spec", "/s")],
        &[("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "../x")],
        &[("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "vm-100")],
        &[("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "x"), ("OCF_RESKEY_disk", "perhaps")],
        &[("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "x"), ("OCF_RESKEY_CRM_meta_timeout", "60s")],
        &[("OCF_RESKEY_spec", "/s"), ("OCF_RESOURCE_INSTANCE", "x"), ("OCF_RESKEY_CRM_meta_timeout", "0")],
    ] {
        assert!(parameters(bad).is_err(), "{bad:?}");
    }
}
