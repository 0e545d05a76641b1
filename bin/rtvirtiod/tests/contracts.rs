//! Contracts of real QEMU machines through the days of a service: put in force, new threads,
//! restarts, `kill -9`, another program's hand, removal.

mod common;

use std::fs;

use common::{Plc, Rig, can_run, spec_of_none};
use rtvirtio_kernel::text::{cpu_list, cpu_ranges};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{Need, has};
use serde_json::Value;

fn fifo(n: usize) -> Vec<(String, u64)> {
    vec![("fifo".to_owned(), 1); n]
}

#[test]
fn a_contract_is_put_in_force_kept_through_kill_9_and_put_back() {
    if !can_run("a_contract_is_put_in_force_kept_through_kill_9_and_put_back") {
        return;
    }
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    let before = plc.vcpus(&rig);
    rig.start(&[]);
    plc.contract(&rig, "4ms", "criticality = \"high\"");
    rig.wait_state(&plc.name, "in_force");
    assert_eq!((plc.vcpus(&rig), plc.budget().as_deref()), (fifo(1), Some("4000")));

    // A new thread is taken in.
    plc.plug();
    wait_for("the new vCPU", || plc.vcpus(&rig) == fifo(2));

    // Killed, nothing changes; started again it finds all as it was.
    rig.kill();
    assert_eq!((plc.vcpus(&rig), plc.budget().as_deref()), (fifo(2), Some("4000")));
    let events = rig.events().len();
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    let changed: Vec<Value> =
        rig.events()[events..].iter().filter(|e| e["kind"] == "changed").cloned().collect();
    assert!(changed.is_empty(), "{changed:#?}");

    // `apply` and `revert` by hand do not work against it.
    let spec = plc.spec(&rig, "5ms", "");
    let out = rig.site.output(&["apply", spec.to_str().unwrap(), "--cpu-only"]);
    assert!(common::output_text(&out).contains("rtvirtio contract remove"), "{}", common::output_text(&out));
    let out = rig.site.output(&["revert"]);
    assert_eq!(out.status.code(), Some(3), "{}", common::output_text(&out));
    assert_eq!(plc.budget().as_deref(), Some("4000"));

    // Another budget, then none.
    plc.contract(&rig, "5ms", "");
    wait_for("the new budget", || plc.budget().as_deref() == Some("5000"));
    rig.contract(&["remove", &plc.name]);
    wait_for("the end of the contract", || !plc.group().exists());
    wait_for("the old policy", || plc.vcpus(&rig).iter().all(|v| *v == before[0]));
    let reasons: Vec<String> = rig.events().iter().map(|e| e["text"].as_str().unwrap().to_owned()).collect();
    for reason in ["the contract in ", "its contract was changed", "its contract was removed"] {
        assert!(reasons.iter().any(|text| text.contains(reason)), "{reason}: {reasons:#?}");
    }
}

#[test]
fn a_restarted_vm_has_its_contract_again_and_a_stopped_service_can_be_reverted() {
    if !can_run("a_restarted_vm_has_its_contract_again_and_a_stopped_service_can_be_reverted") {
        return;
    }
    let mut rig = Rig::new();
    let mut plc = Plc::start(&rig, "plc");
    plc.contract(&rig, "4ms", "");
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    plc.machine = None;
    rig.wait_state(&plc.name, "off");
    wait_for("the group's end", || !plc.group().exists());
    plc.boot();
    rig.wait_state(&plc.name, "in_force");
    assert_eq!(plc.vcpus(&rig), fifo(1));

    // It ends while nothing watches, and comes again before the service does.
    rig.kill();
    plc.boot();
    rig.start(&[]);
    wait_for("the contract of the new start", || plc.vcpus(&rig) == fifo(1));
    rig.wait_state(&plc.name, "in_force");

    rig.kill();
    let (code, status) = rig.site.json(&["status"]);
    assert_eq!((code, &status["contracts_in_force"][0]), (3, &Value::from(plc.name.clone())));
    let (code, reverted) = rig.site.json(&["revert"]);
    assert_eq!((code, &reverted["done"]), (0, &Value::from(true)), "{reverted:#}");
    assert!(!plc.group().exists());
}

#[test]
fn another_hand_on_a_knob_meets_the_policy() {
    if !can_run("another_hand_on_a_knob_meets_the_policy") {
        return;
    }
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    plc.contract(&rig, "4ms", "");
    let write = |value: &str| fs::write(plc.group().join("cpu.rt_runtime_us"), value).unwrap();

    // Restored: the default.
    fs::write(rig.config(), "compare = \"200ms\"\n").unwrap();
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    write("3000");
    wait_for("the budget again", || plc.budget().as_deref() == Some("4000"));
    rig.kill();

    // Reported and left.
    fs::write(rig.config(), "compare = \"200ms\"\n[drift]\nbudget = \"report\"\n").unwrap();
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    write("3000");
    rig.wait_state(&plc.name, "drift");
    let drift = rig.vm(&plc.name)["drift"][0].clone();
    assert_eq!((&drift["wanted"], &drift["found"]), (&Value::from("4000"), &Value::from("3000")));
    assert_eq!(plc.budget().as_deref(), Some("3000"));
    rig.kill();

    // Left to the other program for good.
    fs::write(rig.config(), "compare = \"200ms\"\n[drift]\nbudget = \"yield\"\n").unwrap();
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    assert_eq!(plc.budget().as_deref(), Some("3000"));
    rig.contract(&["remove", &plc.name]);
    wait_for("the end of the contract", || !plc.group().exists());
}

#[test]
fn what_does_not_fit_gives_way_by_criticality_and_a_malformed_file_concerns_only_itself() {
    if !can_run("what_does_not_fit_gives_way_by_criticality_and_a_malformed_file_concerns_only_itself") {
        return;
    }
    let mut rig = Rig::new();
    let (low, high) = (Plc::start(&rig, "low"), Plc::start(&rig, "high"));
    low.contract(&rig, "12ms", "criticality = \"low\"");
    rig.start(&[]);
    rig.wait_state(&low.name, "in_force");
    high.contract(&rig, "12ms", "criticality = \"high\"");
    rig.wait_state(&high.name, "in_force");
    rig.wait_state(&low.name, "refused");
    assert!(rig.vm(&low.name)["why"].as_str().unwrap().contains("too much"));
    assert!(!low.group().exists() && high.budget().as_deref() == Some("12000"));

    fs::write(rig.contracts().join("broken.toml"), "[[vm]\nname = ").unwrap();
    wait_for("the fault", || rig.status()["faults"].as_array().is_some_and(|f| f.len() == 1));
    assert_eq!(rig.vm(&high.name)["state"], "in_force");
    // A contract that becomes unreadable keeps what is in force.
    fs::write(rig.contracts().join(format!("{}.toml", high.name)), "[[vm]\nname = ").unwrap();
    rig.wait_state(&high.name, "held");
    assert_eq!(high.budget().as_deref(), Some("12000"));
    fs::remove_file(rig.contracts().join(format!("{}.toml", high.name))).unwrap();
    wait_for("its end", || !high.group().exists());
    rig.wait_state(&low.name, "in_force");
}

#[test]
fn asked_first_and_observing_sets_nothing() {
    if !can_run("asked_first_and_observing_sets_nothing") {
        return;
    }
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    plc.contract(&rig, "4ms", "");
    rig.start(&["--mode", "observe"]);
    rig.wait_state(&plc.name, "would_apply");
    assert!(!plc.group().exists());
    rig.kill();
    rig.start(&["--mode", "ask"]);
    rig.wait_state(&plc.name, "waiting");
    assert!(!plc.group().exists());
    rig.contract(&["accept", &plc.name]);
    rig.wait_state(&plc.name, "in_force");
    // What was accepted is kept by the next process too.
    rig.kill();
    rig.site.ok(&["revert"]);
    rig.start(&["--mode", "ask"]);
    rig.wait_state(&plc.name, "in_force");
    let second = rig.command(&[]).output().unwrap();
    assert!(
        common::output_text(&second).contains("another rtvirtiod runs"),
        "{}",
        common::output_text(&second)
    );
}

#[test]
fn a_number_means_the_process_that_had_it_first_and_another_number_another_vm() {
    if !can_run("a_number_means_the_process_that_had_it_first_and_another_number_another_vm") {
        return;
    }
    let mut rig = Rig::new();
    let (one, two) = (Plc::start(&rig, "one"), Plc::start(&rig, "two"));
    let (ours, free) = (fifo(1), two.vcpus(&rig));
    let pid = |of: &Plc| of.machine.as_ref().unwrap().pid();
    let by_number = |rig: &Rig, pid: u32| {
        let spec = one.spec(rig, "4ms", "");
        let text = fs::read_to_string(&spec).unwrap();
        let named = format!("qmp = \"{}\"", one.qmp().display());
        fs::write(&spec, text.replace(&named, &format!("pid = {pid}"))).unwrap();
        rig.contract(&["set", &one.name, spec.to_str().unwrap()]);
    };
    by_number(&rig, pid(&one));
    rig.start(&[]);
    rig.wait_state(&one.name, "in_force");
    assert_eq!((one.vcpus(&rig), two.vcpus(&rig)), (ours.clone(), free.clone()));

    // The contract is the other VM's now, although the first one still runs.
    by_number(&rig, pid(&two));
    wait_for("the contract of the other VM", || two.vcpus(&rig) == ours && one.vcpus(&rig) == free);
    rig.wait_state(&one.name, "in_force");
    rig.kill();
    rig.site.ok(&["revert"]);

    // Another process had this number when the contract was first seen: while the service did not
    // run it has ended.
    let file = rig.site.state_dir().join("pids.json");
    let mut seen: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let start = &mut seen[&one.name]["process"]["start_time"];
    *start = (start.as_u64().unwrap() - 1).into();
    fs::write(&file, seen.to_string()).unwrap();
    rig.start(&[]);
    rig.wait_state(&one.name, "off");
    assert!(rig.vm(&one.name)["why"].as_str().unwrap().contains("another process has this number"));
    assert_eq!(two.vcpus(&rig), free);
    // Set anew it means the process that has the number now.
    rig.contract(&["remove", &one.name]);
    wait_for("no contract", || rig.vm(&one.name).is_null());
    by_number(&rig, pid(&two));
    rig.wait_state(&one.name, "in_force");
    assert_eq!(two.vcpus(&rig), ours);
}

/// The journals lie in the state directory: another run directory makes no second keeper of them.
#[test]
fn one_service_works_on_a_state_directory_and_others_see_it() {
    if !can_run("one_service_works_on_a_state_directory_and_others_see_it") {
        return;
    }
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    plc.contract(&rig, "4ms", "");
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    let other = rig.site.dir.path().join("other");
    let mut second = rig.command(&[]);
    let second = second.env("RTVIRTIO_RUN_DIR", &other).output().unwrap();
    let said = common::output_text(&second);
    assert!(second.status.code() == Some(1) && said.contains("on this state directory"), "{said}");
    let with_other = |rig: &Rig, args: &[&str]| {
        let out = rig.site.command(args).env("RTVIRTIO_RUN_DIR", &other).output().unwrap();
        (out.status.code(), common::output_text(&out))
    };
    let run = rig.site.run_dir().display().to_string();
    let (code, said) = with_other(&rig, &["status"]);
    assert!(code == Some(3) && said.contains(&run) && !said.contains("does not run"), "{code:?} {said}");
    let (code, said) = with_other(&rig, &["revert"]);
    assert!(code == Some(3) && said.contains("keeps it in force") && said.contains(&run), "{code:?} {said}");
    assert_eq!(plc.budget().as_deref(), Some("4000"));
    rig.kill();
    let (code, said) = with_other(&rig, &["revert"]);
    assert!(code == Some(0) && !plc.group().exists(), "{code:?} {said}");
}

#[test]
fn specs_of_the_command_line_and_of_the_configuration_are_contracts_too() {
    if !has("specs_of_the_command_line_and_of_the_configuration_are_contracts_too", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    let write = |file: &str, vm: &str| {
        let path = rig.site.dir.path().join(file);
        fs::write(&path, spec_of_none(vm)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (listed, given) = (write("listed.toml", "listed"), write("given.toml", "given"));
    write("contracts.d/own.toml", "own");
    fs::write(rig.config(), format!("specs = [\"{listed}\"]\n")).unwrap();
    rig.start(&["--spec", &given]);
    for (vm, file) in [("listed", listed.as_str()), ("given", given.as_str()), ("own", "own.toml")] {
        rig.wait_state(vm, "off");
        assert!(rig.vm(vm)["file"].as_str().unwrap().ends_with(file), "{:#}", rig.vm(vm));
    }
    // What changes in them is taken up as that of the directory.
    let path = rig.site.dir.path().join("listed.toml");
    fs::write(&path, fs::read_to_string(&path).unwrap().replace("listed", "other")).unwrap();
    rig.wait_state("other", "off");
    assert!(rig.vm("listed").is_null());
    fs::remove_file(&path).unwrap();
    wait_for("the fault", || rig.status()["faults"].as_array().is_some_and(|all| all.len() == 1));
    assert_eq!(rig.vm("given")["state"], "off");
}

/// A good contract is never lost to a bad one, wherever it stands.
#[test]
fn a_contract_that_does_not_fit_leaves_the_one_in_force_and_is_not_written() {
    if !can_run("a_contract_that_does_not_fit_leaves_the_one_in_force_and_is_not_written") {
        return;
    }
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    let other = rig.site.dir.path().join("other.toml");
    fs::write(&other, spec_of_none("other")).unwrap();
    rig.start(&["--spec", other.to_str().unwrap()]);
    plc.contract(&rig, "4ms", "");
    rig.wait_state(&plc.name, "in_force");
    let file = rig.contracts().join(format!("{}.toml", plc.name));
    let good = fs::read_to_string(&file).unwrap();

    // `contract set` changes nothing.
    let set = |budget: &str, more: &[&str]| {
        let (spec, dir) = (plc.spec(&rig, budget, ""), rig.contracts());
        let args = ["contract", "set", &plc.name, spec.to_str().unwrap(), "--contracts"];
        let out = rig.site.output(&[&args[..], &[dir.to_str().unwrap()], more].concat());
        (out.status.code(), common::output_text(&out))
    };
    for more in [&[][..], &["--dry-run"]] {
        let (code, text) = set("19999us", more);
        assert!(code == Some(2) && text.contains("nothing is changed") && text.contains("at most"), "{text}");
    }
    let (code, text) = set("5ms", &["--dry-run"]);
    assert!(code == Some(0) && text.contains("fits"), "{text}");
    assert_eq!(fs::read_to_string(&file).unwrap(), good);

    // Neither does a file that is changed by other means.
    let is_kept = |file: &std::path::Path| {
        fs::write(file, good.replace("4ms", "19999us")).unwrap();
        rig.wait_state(&plc.name, "refused");
        let why = || rig.vm(&plc.name)["why"].as_str().unwrap_or_default().to_owned();
        wait_for("the reason", || why().contains("too much") && why().contains("stay until"));
        assert_eq!((plc.budget().as_deref(), plc.vcpus(&rig)), (Some("4000"), fifo(1)));
        // It says so until it is mended.
        let (code, _) = rig.site.json(&["status"]);
        assert_eq!(code, 3);
        fs::write(file, &good).unwrap();
        rig.wait_state(&plc.name, "in_force");
        assert_eq!(plc.budget().as_deref(), Some("4000"));
    };
    is_kept(&file);
    // The same of a spec that the service was given: nothing was put back on the way.
    fs::write(&other, &good).unwrap();
    fs::remove_file(&file).unwrap();
    rig.wait_state(&plc.name, "in_force");
    is_kept(&other);
    let texts: Vec<String> = rig.events().iter().map(|e| e["text"].as_str().unwrap().to_owned()).collect();
    assert!(texts.iter().all(|text| !text.starts_with("put back")), "{texts:#?}");
    // One that fits replaces it.
    fs::write(&other, good.replace("4ms", "5ms")).unwrap();
    wait_for("the new budget", || plc.budget().as_deref() == Some("5000"));
}

#[test]
fn cpus_are_given_to_one_vm_until_it_ends() {
    if !can_run("cpus_are_given_to_one_vm_until_it_ends") {
        return;
    }
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let all = cpu_list(&online).unwrap();
    // One whole CPU, and where the host has two another one for the VM's other threads.
    let two: std::collections::BTreeSet<u32> = all.iter().rev().take(2).copied().collect();
    let key = format!("cores = {{ cpus = \"{}\", whole = true }}", cpu_ranges(&two));
    let mut rig = Rig::new();
    let mut first = Plc::start(&rig, "first");
    // Of two new contracts the one of this name would be first.
    let second = Plc::start(&rig, "a-second");
    let before = second.cpus_of_vcpu(0);
    first.contract(&rig, "4ms", &key);
    rig.start(&[]);
    rig.wait_state(&first.name, "in_force");
    let cpu = first.cpus_of_vcpu(0).unwrap();
    assert!(cpu_list(&cpu).is_some_and(|one| one.len() == 1 && one.is_subset(&two)), "{cpu}");
    let (spec, dir) = (second.spec(&rig, "4ms", &key), rig.contracts());
    let set = |more: &[&str]| {
        let args =
            ["contract", "set", &second.name, spec.to_str().unwrap(), "--contracts", dir.to_str().unwrap()];
        let out = rig.site.output(&[&args[..], more].concat());
        (out.status.code(), common::output_text(&out))
    };
    for more in [&["--dry-run"][..], &[]] {
        let (code, text) = set(more);
        assert!(code == Some(2) && text.contains("no CPUs for its threads"), "{code:?} {text}");
        assert!(text.contains("would fit") && text.contains("nothing is changed"), "{text}");
    }
    assert!(!dir.join(format!("{}.toml", second.name)).exists());
    // A file that is written by other means is refused, and nothing else is touched.
    fs::copy(&spec, dir.join(format!("{}.toml", second.name))).unwrap();
    rig.wait_state(&second.name, "refused");
    let why = rig.vm(&second.name)["why"].to_string();
    assert!(why.contains("no CPUs for its threads") && why.contains("it may use CPUs"), "{why}");
    assert_eq!(rig.vm(&first.name)["state"], "in_force");
    assert_eq!(second.cpus_of_vcpu(0), before);
    assert_eq!(first.cpus_of_vcpu(0).as_deref(), Some(&cpu[..]));
    // A changed contract of the VM that has them is put back and applied anew, and keeps them.
    first.contract(&rig, "5ms", &key);
    wait_for("the new budget", || first.budget().as_deref() == Some("5000"));
    rig.wait_state(&first.name, "in_force");
    assert_eq!(rig.vm(&second.name)["state"], "refused");
    assert!(first.cpus_of_vcpu(0).is_some_and(|cpu| cpu_list(&cpu).unwrap().is_subset(&two)));

    // With the VM end what it has; the next one gets it.
    first.machine = None;
    rig.wait_state(&second.name, "in_force");
    let cpu = second.cpus_of_vcpu(0).unwrap();
    assert!(cpu_list(&cpu).is_some_and(|one| one.len() == 1 && one.is_subset(&two)), "{cpu}");
    rig.contract(&["remove", &second.name]);
    wait_for("the CPUs from before", || second.cpus_of_vcpu(0) == before);
}

#[test]
fn a_vcpu_that_is_plugged_in_gets_a_cpu_as_soon_as_one_is_free() {
    if !can_run("a_vcpu_that_is_plugged_in_gets_a_cpu_as_soon_as_one_is_free") {
        return;
    }
    let online = cpu_list(&fs::read_to_string("/sys/devices/system/cpu/online").unwrap()).unwrap();
    let two: Vec<u32> = online.iter().rev().take(2).copied().collect();
    let [a, b] = two[..] else {
        return rtvirtio_testkit::skip("a_vcpu_that_is_plugged_in_gets_a_cpu", "the host has one CPU");
    };
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    // A VM without a contract, pinned by another program.
    let other = Plc::start(&rig, "other");
    let pin = |cpus: &[u32]| {
        let threads = other.machine.as_ref().unwrap().threads();
        let vcpu = threads.iter().find(|thread| thread.name.starts_with("CPU 0/")).unwrap();
        let mut set = rustix::thread::CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu as usize));
        let tid = rustix::thread::Pid::from_raw(i32::try_from(vcpu.tid).unwrap());
        rustix::thread::sched_setaffinity(tid, &set).unwrap();
    };
    let before = plc.cpus_of_vcpu(0);
    let free: Vec<u32> = online.iter().copied().collect();
    pin(&[a]);
    rig.start(&[]);
    plc.contract(&rig, "4ms", &format!("cores = \"{a},{b}\""));
    rig.wait_state(&plc.name, "in_force");
    assert_eq!(plc.cpus_of_vcpu(0), Some(b.to_string()));
    plc.plug();
    let why = || rig.vm(&plc.name)["why"].as_str().unwrap_or_default().to_owned();
    wait_for("the reason", || why().contains("vcpu 1 was plugged in later and gets no CPU of its own"));
    assert_eq!(rig.vm(&plc.name)["state"], "pending");
    assert_eq!((plc.vcpus(&rig), plc.cpus_of_vcpu(1)), (fifo(2), plc.cpus_of_vcpu(0)));

    // It is tried again meanwhile, every 5 s.
    std::thread::sleep(std::time::Duration::from_secs(11));
    // As soon as a CPU is free it gets that one, and the next service leaves both where they are.
    pin(&free);
    rig.wait_state(&plc.name, "in_force");
    let is_placed =
        || (plc.cpus_of_vcpu(0), plc.cpus_of_vcpu(1)) == (Some(b.to_string()), Some(a.to_string()));
    assert!(is_placed(), "{:?}", plc.cpus_of_vcpu(1));
    rig.kill();
    rig.start(&[]);
    rig.wait_state(&plc.name, "in_force");
    assert!(is_placed(), "{:?}", plc.cpus_of_vcpu(1));
    // The CPU counts for others now.
    let key = format!("cores = {{ cpus = \"{a}\", whole = true }}");
    let (spec, dir) = (other.spec(&rig, "4ms", &key), rig.contracts());
    let args = ["contract", "set", &other.name, spec.to_str().unwrap(), "--contracts"];
    let out = rig.site.output(&[&args[..], &[dir.to_str().unwrap()]].concat());
    let text = common::output_text(&out);
    assert!(!out.status.success() && text.contains("no CPUs for its threads"), "{text}");
    let events = rig.events();
    let reasons = events.iter().filter(|e| e.to_string().contains("gets no CPU of its own")).count();
    assert_eq!(reasons, 1, "once, not with each attempt: {events:#?}");
    rig.contract(&["remove", &plc.name]);
    wait_for("the CPUs from before", || plc.cpus_of_vcpu(0) == before && plc.cpus_of_vcpu(1) == before);
}
