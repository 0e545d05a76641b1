//! The resource agent, called as Pacemaker's executor calls it, on a real QEMU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rtvirtio_testkit::{Machine, Need, has, tempdir, unique};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rtvirtio-pacemaker");
const NEEDS: [Need; 3] = [Need::Root, Need::QEMU, Need::RT_GROUPS];

struct Agent {
    spec: PathBuf,
    state: PathBuf,
}

impl Agent {
    fn run(&self, action: &str) -> (Option<i32>, String) {
        let out: Output = Command::new(PROGRAM)
            .args(["agent", action, "--state-dir"])
            .arg(&self.state)
            .arg("--run-dir")
            .arg(self.state.with_file_name("run"))
            .env("OCF_RESKEY_spec", &self.spec)
            .env("OCF_RESOURCE_INSTANCE", "plc")
            .output()
            .unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    }

    fn ok(&self, action: &str) -> String {
        let (code, said) = self.run(action);
        assert_eq!(code, Some(0), "{action}: {said}");
        said
    }

    fn write(&self, vm: &str, qmp: &Path, budget: &str) {
        let spec = format!(
            "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"{vm}\"\nqmp = \"{}\"\ncpu = {{ budget = \"{budget}\", period = \"100ms\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n",
            qmp.display()
        );
        fs::write(&self.spec, spec).unwrap();
    }
}

#[test]
fn a_contract_comes_is_restored_changes_and_goes() {
    if !has("a_contract_comes_is_restored_changes_and_goes", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let vm = unique("ocf");
    let mut machine = Machine::spinning(dir.path(), &vm, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state") };
    agent.write(&vm, machine.qmp(), "1ms");
    let budget = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}/cpu.rt_runtime_us"));
    let found = || fs::read_to_string(&budget).ok().map(|t| t.trim().to_owned());
    assert_eq!(agent.run("monitor").0, Some(7), "nothing is applied");
    agent.ok("start");
    assert_eq!(found().as_deref(), Some("1000"));
    agent.ok("start");
    assert_eq!(agent.ok("monitor"), "");
    // Another program: said, and put right.
    fs::write(&budget, "700").unwrap();
    let said = agent.ok("monitor");
    assert!(said.contains("was changed to 700") && said.contains("applied again"), "{said}");
    assert_eq!(found().as_deref(), Some("1000"));
    // The user: the new contract.
    agent.write(&vm, machine.qmp(), "2ms");
    let said = agent.ok("monitor");
    assert!(said.contains("asks for 2ms in 100ms now"), "{said}");
    assert_eq!(found().as_deref(), Some("2000"));
    // A file that is broken takes nothing away.
    let good = fs::read(&agent.spec).unwrap();
    fs::write(&agent.spec, "[[vm").unwrap();
    assert!(agent.ok("monitor").contains("held as applied"));
    assert_eq!(agent.run("validate-all").0, Some(6));
    fs::write(&agent.spec, good).unwrap();
    agent.ok("stop");
    assert_eq!(found(), None, "its group is gone");
    assert_eq!(agent.run("monitor").0, Some(7));
    agent.ok("stop");
    // A VM that has ended takes its contract with it.
    agent.ok("start");
    machine.kill();
    assert_eq!(agent.run("monitor").0, Some(7));
    agent.ok("stop");
    assert_eq!(found(), None);
}

#[test]
fn it_says_what_it_is_and_refuses_what_it_does_not_know() {
    let agent = |action: &str, spec: Option<&str>| {
        let mut command = Command::new(PROGRAM);
        command.args(["agent", action]).env_remove("OCF_RESKEY_spec").env("OCF_RESOURCE_INSTANCE", "plc");
        if let Some(spec) = spec {
            command.env("OCF_RESKEY_spec", spec);
        }
        command.output().unwrap()
    };
    let out = agent("meta-data", None);
    let xml = String::from_utf8(out.stdout).unwrap();
    for part in ["<resource-agent name=\"contract\"", "name=\"spec\"", "name=\"monitor\""] {
        assert!(out.status.success() && xml.contains(part), "{xml}");
    }
    assert_eq!(agent("start", None).status.code(), Some(6), "no spec");
    assert_eq!(agent("promote", Some("/x")).status.code(), Some(3));
}
