//! The command line as a client of the service, and without one.

mod common;

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Rig, contract_of_none, output_text, spec_of_none};
use rtvirtio_daemon::api::{Client, ClientError};
use rtvirtio_testkit::site::{signal, text, wait_for};
use rtvirtio_testkit::{HANG, Need, has};
use rustix::process::Signal;
use serde_json::{Value, json};

#[test]
fn contracts_go_where_the_service_reads_and_are_shown_alike_without_it() {
    let test = "contracts_go_where_the_service_reads_and_are_shown_alike_without_it";
    if !has(test, &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    let spec = rig.site.dir.path().join("plant.toml");
    fs::write(&spec, spec_of_none("plc")).unwrap();
    let set = ["contract", "set", "plc", spec.to_str().unwrap()];
    rig.start(&[]);

    // Without `--contracts` it is the service's directory, and the answer says what became of it.
    let (code, said) = rig.site.json(&set);
    let file = rig.contracts().join("plc.toml");
    assert_eq!((code, said["file"].as_str()), (0, file.to_str()), "{said:#}");
    assert!(file.exists());
    // A busy machine may take longer than the command waits.
    wait_for("what the service makes of it", || {
        let of = &rig.site.json(&set).1["service"];
        (&of["name"], &of["state"]) == (&json!("plc"), &json!("off"))
    });

    // Another one is what the user wants, and not what the service reads.
    let other = rig.site.dir.path().join("other");
    let elsewhere = [&set[..], &["--contracts", other.to_str().unwrap()]].concat();
    let out = rig.site.output(&elsewhere);
    assert!(out.status.success() && other.join("plc.toml").exists(), "{}", output_text(&out));
    assert!(text(&out.stderr).contains("rtvirtiod reads the contracts in"), "{}", output_text(&out));
    let out = rig.site.output(&["contract", "set", "plc", spec.to_str().unwrap(), "--libvirt"]);
    assert!(text(&out.stderr).contains("is not named by `domain`"), "{}", output_text(&out));

    // The same form and the same words, from the service and without it.
    let show = ["contract", "show", "--contracts", rig.contracts().to_str().unwrap()].map(str::to_owned);
    let show: Vec<&str> = show.iter().map(String::as_str).collect();
    let (code, mut with) = rig.site.json(&show);
    assert_eq!((code, with[0]["state"].as_str()), (0, Some("off")), "{with:#}");
    // How old the service's look is; the command without it looks now.
    assert!(
        with[0].as_object_mut().unwrap().remove("looked_s").is_some_and(|age| age.is_number()),
        "{with:#}"
    );
    let said = text(&rig.site.output(&show).stderr);
    assert!(said.contains("as rtvirtiod (process "), "{said}");
    rig.kill();
    let (code, without) = rig.site.json(&show);
    // Nothing keeps it.
    assert_eq!((code, &without), (3, &with));
    let said = text(&rig.site.output(&show).stderr);
    assert!(said.contains("rtvirtiod does not run"), "{said}");

    rig.start(&[]);
    rig.wait_state("plc", "off");
    rig.site.ok(&["contract", "remove", "plc"]);
    assert!(!file.exists());
    wait_for("no contract", || rig.vm("plc") == Value::Null);
}

#[test]
fn a_service_that_does_not_answer_is_not_taken_for_none() {
    if !has("a_service_that_does_not_answer_is_not_taken_for_none", &[Need::Root]) {
        return;
    }
    let mut rig = Rig::new();
    rig.start(&[]);
    let client = Client::find(&rig.site.run_dir()).unwrap().unwrap().with_patience(HANG);
    client.status().unwrap();
    let service = &rig.service.as_ref().unwrap().0;
    signal(service, Signal::STOP);
    // Each of its threads stops for itself.
    wait_for("the stop", || {
        let tasks = fs::read_dir(format!("/proc/{}/task", service.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        })
    });
    let e = client.clone().with_patience(Duration::from_millis(200)).status().unwrap_err();
    assert!(matches!(e, ClientError::Silent { .. }), "{e}");
    signal(service, Signal::CONT);
    client.status().unwrap();

    // The service runs without its socket: `status` reports that, and shows the rest.
    fs::remove_file(rig.socket()).unwrap();
    let (code, status) = rig.site.json(&["status"]);
    assert_eq!((code, &status["in_force"], &status["service"]), (3, &json!(false), &Value::Null));
    assert!(status["service_unknown"].as_str().unwrap().contains("rtvirtiod runs"), "{status:#}");
    // Where its contracts are is not known.
    let spec = rig.site.dir.path().join("plant.toml");
    fs::write(&spec, spec_of_none("plc")).unwrap();
    let out = rig.site.output(&["contract", "set", "plc", spec.to_str().unwrap()]);
    assert!(!out.status.success(), "{}", output_text(&out));
    assert!(text(&out.stderr).contains("name it with --contracts"), "{}", output_text(&out));
    rig.contract(&["set", "plc", spec.to_str().unwrap()]);
    assert!(rig.contracts().join("plc.toml").exists());
}

#[test]
fn top_shows_each_vm_on_one_line_and_on_a_terminal_until_q() {
    let test = "top_shows_each_vm_on_one_line_and_on_a_terminal_until_q";
    if !has(test, &[Need::Root, Need::Program("script")]) {
        return;
    }
    let mut rig = Rig::new();
    let out = rig.site.output(&["top"]);
    assert!(!out.status.success(), "{}", output_text(&out));
    assert!(text(&out.stderr).contains("systemctl start rtvirtiod"), "{}", output_text(&out));

    contract_of_none(&rig, "plc");
    rig.start(&[]);
    rig.wait_state("plc", "off");
    let (code, top) = rig.site.json(&["top"]);
    let line = &top["lines"][0];
    assert_eq!(
        (code, &top["schema"], &line["vm"], &line["state"]),
        (0, &json!("rtvirtio.top.v1"), &json!("plc"), &json!("off")),
        "{top:#}"
    );
    let once = rig.site.ok(&["top", "--sort", "vm"]);
    assert!(once.starts_with("VM ") && once.contains("plc") && !once.contains('\x1b'), "{once}");

    // On a terminal, with its keys: another order, an update, the end.
    let command = rig.site.command(&["top", "-d", "1h"]);
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    let mut on_terminal = Command::new("script");
    on_terminal.args(["-qec", &words.join(" "), "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    for (name, value) in command.get_envs() {
        on_terminal.env(name, value.unwrap());
    }
    let mut child = on_terminal.spawn().unwrap();
    let mut keys = child.stdin.take().unwrap();
    keys.write_all(b"s q").unwrap();
    let out = child.wait_with_output().unwrap();
    drop(keys);
    let shown = text(&out.stdout);
    assert!(out.status.success(), "{shown}");
    let frames: Vec<&str> = shown.split("\x1b[H").collect();
    assert!(
        frames.len() == 4 && frames[1].contains("by trouble") && frames[3].contains("by VM"),
        "{shown:?}"
    );
    assert!(frames[3].contains("plc") && shown.trim_end().ends_with("\x1b[?1049l"), "{shown:?}");
}
