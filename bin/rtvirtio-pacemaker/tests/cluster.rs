//! Three nodes of a real Pacemaker cluster: contracts follow their VMs, and what does not fit is
//! refused before a VM is stopped.

use std::fs;
use std::path::{Path, PathBuf};

use rtvirtio_testbed::cluster::Cluster;
use rtvirtio_testkit::{HANG, Need, has, tempdir, unique};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rtvirtio-pacemaker");
const AGENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/contract");

/// A node gives real-time groups 50 ms of each second, and a contract takes 20 ms: two fit.
const NODE_BUDGET_US: u64 = 50_000;
const VMS: [&str; 5] = ["plc", "hmi", "gate", "log", "cam"];

struct Site {
    cluster: Cluster,
    agents: PathBuf,
    file: PathBuf,
}

/// The agents' directory of our provider, and the cluster file with the specs.
fn write_files(dir: &Path) -> (PathBuf, PathBuf) {
    let agents = dir.join("agents");
    let own = agents.join("rtvirtio");
    fs::create_dir_all(&own).unwrap();
    let agent = own.join("contract");
    let script = format!(
        "#!/bin/sh\nexport RTVIRTIO_PACEMAKER={PROGRAM} RTVIRTIO_STATE_DIR=/run/lasting/state RTVIRTIO_RUN_DIR=/run/rtvirtio\n\
         exec sh {AGENT} \"$@\"\n"
    );
    fs::write(&agent, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&agent, mode).unwrap();
    let mut file = String::new();
    for (i, vm) in VMS.iter().enumerate() {
        let spec = format!(
            "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"{vm}\"\nqmp = \"/run/{vm}.qmp\"\ncpu = {{ budget = \"1ms\", period = \"50ms\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n"
        );
        fs::write(dir.join(format!("{vm}.toml")), spec).unwrap();
        file += &format!(
            "[[contract]]\nresource = \"{vm}\"\nspec = \"{vm}.toml\"\npriority = {}\n",
            100 - i
        );
    }
    let path = dir.join("site.toml");
    fs::write(&path, file).unwrap();
    // A guest that computes from its first instruction on: `jmp` to itself at the reset vector.
    let mut firmware = vec![0x90; 64 << 10];
    firmware[(64 << 10) - 16..(64 << 10) - 14].copy_from_slice(&[0xeb, 0xfe]);
    fs::write(dir.join("spin.bin"), firmware).unwrap();
    (agents, path)
}

/// A VM as a resource: QEMU as a process that Pacemaker starts and stops.
fn vm_xml(vm: &str, dir: &Path) -> String {
    let options = format!(
        "-nodefaults -no-user-config -display none -machine pc -accel tcg -m 64 -name {vm},debug-threads=on -bios {} \
         -qmp unix:/run/{vm}.qmp,server=on,wait=off",
        dir.join("spin.bin").display()
    );
    format!(
        "<primitive id=\"{vm}\" class=\"ocf\" provider=\"heartbeat\" type=\"anything\"><instance_attributes id=\"{vm}-p\">\
         <nvpair id=\"{vm}-b\" name=\"binfile\" value=\"/usr/bin/qemu-system-x86_64\"/>\
         <nvpair id=\"{vm}-o\" name=\"cmdline_options\" value=\"{options}\"/>\
         <nvpair id=\"{vm}-f\" name=\"pidfile\" value=\"/run/{vm}.pid\"/></instance_attributes>\
         <operations><op id=\"{vm}-m\" name=\"monitor\" interval=\"2s\" timeout=\"30s\"/></operations></primitive>"
    )
}

impl Site {
    fn rtvirtio(&self, node: usize, args: &[&str]) -> String {
        let state = ["--state-dir", "/run/lasting/state", "--run-dir", "/run/rtvirtio"];
        self.cluster.run(node, &[&[PROGRAM], args, &state].concat()).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Each node of these tells what it could promise.
    fn publish(&self, nodes: &[usize]) {
        let file = self.file.display().to_string();
        nodes.iter().for_each(|n| drop(self.rtvirtio(*n, &["publish", &file, "--quiet"])));
    }

    /// What all nodes have published, as `show` has it.
    fn published(&self, node: usize) -> Vec<serde_json::Value> {
        let file = self.file.display().to_string();
        serde_json::from_str(&self.rtvirtio(node, &["show", &file, "--json"])).unwrap()
    }

    fn node_of(&self, asked: usize, resource: &str) -> Option<usize> {
        let name = self.cluster.active_on(asked, resource).ok()??;
        name.strip_prefix('n')?.parse::<usize>().ok().map(|n| n - 1)
    }

    /// The budget that the kernel has for a VM on a node, in us; `None` without a group.
    fn budget(&self, node: usize, vm: &str) -> Option<String> {
        fs::read_to_string(self.budget_file(node, vm)).ok().map(|t| t.trim().to_owned())
    }

    fn budget_file(&self, node: usize, vm: &str) -> PathBuf {
        self.cluster.group(node, "cpu").join(format!("rtvirtio-{vm}/cpu.rt_runtime_us"))
    }

    /// Waits until the contract of a VM is held where the VM runs; returns the node.
    fn wait_held(&mut self, asked: usize, vm: &str) -> usize {
        let contract = format!("{vm}-contract");
        let (mut at, agents, file) = (None, self.agents.clone(), self.file.clone());
        self.cluster
            .wait(&format!("the contract of {vm}"), HANG, |c| {
                let find = |r: &str| c.active_on(asked, r).ok().flatten();
                at = find(vm).filter(|n| find(&contract).as_ref() == Some(n));
                Ok(at.is_some())
            })
            .unwrap_or_else(|e| panic!("{e} ({} {})", agents.display(), file.display()));
        let node = at.unwrap()[1..].parse::<usize>().unwrap() - 1;
        assert_eq!(self.budget(node, vm).as_deref(), Some("1000"), "{vm} on n{}", node + 1);
        node
    }
}

#[test]
fn contracts_follow_their_vms() {
    let programs = Cluster::PROGRAMS.map(Need::Program);
    let needs = [&[Need::Root, Need::QEMU, Need::RT_GROUPS], &programs[..]].concat();
    if !has("contracts_follow_their_vms", &needs) {
        return;
    }
    let dir = tempdir().unwrap();
    let (agents, file) = write_files(dir.path());
    let name = unique("pcmk");
    let cluster = Cluster::start(dir.path(), &name, 3, NODE_BUDGET_US, &agents).unwrap_or_else(|e| panic!("{e}"));
    let mut site = Site { cluster, agents, file };
    // Three VMs are resources; the contracts of the other two are only known.
    for vm in &VMS[..3] {
        let xml = vm_xml(vm, dir.path());
        site.cluster.run(0, &["cibadmin", "--create", "-o", "resources", "--xml-text", &xml]).unwrap();
    }
    let three = dir.path().join("three.toml");
    let text = fs::read_to_string(&site.file).unwrap();
    let end = text.match_indices("[[contract]]").nth(3).unwrap().0;
    fs::write(&three, &text[..end]).unwrap();
    site.file = three;
    site.publish(&[0, 1, 2]);
    // A contract takes 400 of 1000, by the node's own budget.
    let published = site.published(0);
    assert_eq!(published.len(), 9, "{published:?}");
    for p in &published {
        assert_eq!((&p["takes"]["rtvirtio-cpu"], &p["veto"]), (&400.into(), &false.into()), "{p}");
    }
    let file = site.file.display().to_string();
    site.rtvirtio(0, &["constraints", &file, "--apply", "--quiet"]);
    let at: Vec<usize> = VMS[..3].iter().map(|vm| site.wait_held(0, vm)).collect();
    // Balanced over the nodes.
    let mut nodes = at.clone();
    nodes.sort_unstable();
    assert_eq!(nodes, [0, 1, 2], "{at:?}");

    // Another program changes a budget: the agent's monitor restores it.
    fs::write(site.budget_file(at[0], "plc"), "500").unwrap();
    let path = site.budget_file(at[0], "plc");
    let restored = |_: &Cluster| Ok(fs::read_to_string(&path).is_ok_and(|t| t.trim() == "1000"));
    site.cluster.wait("the monitor to restore the budget", HANG, restored).unwrap_or_else(|e| panic!("{e}"));

    // An operator fills n_of(hmi) with a second contract, and then moves a third VM there.
    let full = at[1];
    let to = format!("n{}", full + 1);
    site.cluster.run(0, &["crm_resource", "--move", "-r", "gate", "-N", &to]).unwrap();
    let moved = |c: &Cluster| Ok(c.active_on(0, "gate-contract").ok().flatten().as_ref() == Some(&to));
    site.cluster.wait("gate to be moved", HANG, moved).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(site.wait_held(0, "gate"), full);
    assert_eq!(site.budget(at[2], "gate"), None, "what was left is put back");
    site.publish(&[0, 1, 2]);
    let veto = site.published(0).into_iter().find(|p| p["resource"] == "plc" && p["node"] == to.as_str());
    let veto = veto.unwrap();
    assert_eq!(veto["veto"], true, "{veto}");
    assert!(veto["why"].as_str().unwrap().contains("of each CPU"), "{veto}");
    let started = |site: &Site| {
        let file = format!("/run/{}.pid", VMS[0]);
        site.cluster.run(at[0], &["cat", &file]).unwrap()
    };
    let before = started(&site);
    site.cluster.run(0, &["crm_resource", "--move", "-r", "plc", "-N", &to]).unwrap();
    // The transition that the order starts is over once the cluster is idle again.
    site.cluster.run(0, &["crm_resource", "--wait"]).unwrap();
    assert_eq!(site.node_of(0, "plc"), Some(at[0]), "it was not moved");
    assert_eq!(started(&site), before, "and never stopped");
    assert_eq!(site.wait_held(0, "plc"), at[0]);
    site.cluster.run(0, &["crm_resource", "--clear", "-r", "plc"]).unwrap();
    site.cluster.run(0, &["crm_resource", "--clear", "-r", "gate"]).unwrap();

    // A node dies: its VM and the contract come up where there is room.
    site.cluster.kill_node(at[0]);
    let other = at[2];
    let on = site.wait_held(other, "plc");
    assert_eq!(on, other, "the other node is full");
    for (vm, node) in [("plc", on), ("hmi", full), ("gate", full)] {
        assert_eq!(site.budget(node, vm).as_deref(), Some("1000"), "{vm}");
    }
}
