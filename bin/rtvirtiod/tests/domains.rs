//! Contracts of libvirt's VMs, by name, on a real libvirt: restarts of VMs and of libvirt's
//! daemon, hot-plugged threads, the room for budgets above their groups; contracts in their
//! metadata, and how these stand, written next to them.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::Rig;
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{Libvirt, Need, has};
use rtvirtio_vmm::libvirt::{CONTRACT_NAMESPACE, DomainStatus, DomainXml};
use serde_json::Value;

const CPU: &str = "/sys/fs/cgroup/cpu";

struct Domain<'l> {
    libvirt: &'l Libvirt,
    name: String,
}

impl<'l> Domain<'l> {
    /// A machine in its firmware, which finds nothing to boot.
    fn start(rig: &Rig, libvirt: &'l Libvirt, name: &str) -> Self {
        let name = rig.site.vm(name);
        let xml = format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu current='1'>2</vcpu>\
             <iothreads>1</iothreads><os><type arch='x86_64' machine='q35'>hvm</type></os>\
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/></devices></domain>"
        );
        libvirt.start_domain(&name, &xml);
        Self { libvirt, name }
    }

    fn contract(&self, rig: &Rig) {
        let spec = self.spec(rig, "2ms");
        rig.contract(&["set", &self.name, spec.to_str().unwrap()]);
    }

    fn spec(&self, rig: &Rig, budget: &str) -> PathBuf {
        let spec = rig.site.dir.path().join(format!("{}.spec.toml", self.name));
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{0}\"\ndomain = \"{0}\"\nuri = \"{1}\"\n\
             cpu = {{ budget = \"{budget}\", period = \"20ms\" }}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            self.name,
            self.libvirt.uri()
        );
        fs::write(&spec, text).unwrap();
        spec
    }

    /// How its contract stands, in its live metadata.
    fn status(&self) -> Option<DomainStatus> {
        DomainXml::parse(&self.libvirt.ok(&["dumpxml", &self.name])).unwrap().status.map(|status| *status)
    }

    fn wait_status(&self, state: &str) -> DomainStatus {
        wait_for(&format!("the status {state}"), || self.status().is_some_and(|s| s.state == state));
        self.status().unwrap()
    }

    /// Its cgroups of the CPU controller, of every start that is still there.
    fn groups(&self) -> Vec<PathBuf> {
        let all = self.libvirt.cgroups();
        let ours = |g: &PathBuf| g.starts_with(CPU) && g.to_string_lossy().contains(&self.name);
        all.into_iter().filter(ours).collect()
    }

    fn budget(&self) -> Option<String> {
        let group = self.groups().into_iter().next()?;
        Some(fs::read_to_string(group.join("cpu.rt_runtime_us")).ok()?.trim().to_owned())
    }

    /// Policies of its threads, by name.
    fn policies(&self, rig: &Rig) -> Vec<(String, String)> {
        let spec = rig.site.dir.path().join(format!("{}.spec.toml", self.name));
        let all = rig.site.json(&["threads", spec.to_str().unwrap()]).1;
        let threads = all[0]["threads"].as_array().cloned().unwrap_or_default();
        let text = |t: &Value, key: &str| t[key].as_str().unwrap_or_default().to_owned();
        threads.iter().map(|t| (text(t, "name"), text(t, "policy"))).collect()
    }

    fn is_fifo(&self, rig: &Rig, thread: &str) -> bool {
        self.policies(rig).iter().any(|(name, policy)| name.starts_with(thread) && policy == "fifo")
    }
}

/// The budget of the group above those of VMs.
fn room(domain: &Domain<'_>) -> u64 {
    let group = domain.groups().remove(0);
    let above = group.parent().unwrap();
    fs::read_to_string(above.join("cpu.rt_runtime_us")).unwrap().trim().parse().unwrap()
}

#[test]
fn a_domain_keeps_its_contract_through_restarts_of_it_and_of_libvirt() {
    let test = "a_domain_keeps_its_contract_through_restarts_of_it_and_of_libvirt";
    let needs = [&Libvirt::NEEDS[..], &[Need::RT_GROUPS]].concat();
    if !has(test, &needs) {
        return;
    }
    let mut rig = Rig::new();
    let mut libvirt = Libvirt::start(rig.site.dir.path());
    let hist = {
        fs::write(rig.config(), format!("libvirt = \"{}\"\n", libvirt.uri())).unwrap();
        let plc = Domain::start(&rig, &libvirt, "plc");
        let before = room(&plc);
        plc.contract(&rig);
        rig.start(&[]);
        rig.wait_state(&plc.name, "in_force");
        assert!(plc.is_fifo(&rig, "CPU 0"), "{:?}", plc.policies(&rig));
        assert_eq!(plc.budget().as_deref(), Some("2000"));
        assert_eq!(plc.wait_status("in_force").why, "");
        assert_eq!(rig.metric("rtvirtio_loop_reporters"), 1.0, "libvirt's events are heard");
        let of_one = room(&plc);
        assert!(of_one > before);

        // A second one makes more room, and takes it along.
        let hist = Domain::start(&rig, &libvirt, "hist");
        hist.contract(&rig);
        rig.wait_state(&hist.name, "in_force");
        assert!(room(&plc) > of_one);
        rig.contract(&["remove", &hist.name]);
        wait_for("less room", || room(&plc) == of_one);
        libvirt.ok(&["destroy", &hist.name]);

        // Hot-plugged.
        libvirt.ok(&["iothreadadd", &plc.name, "2", "--live"]);
        wait_for("the added I/O thread", || plc.is_fifo(&rig, "IO iothread2"));
        // Another start has another cgroup.
        libvirt.ok(&["destroy", &plc.name]);
        rig.wait_state(&plc.name, "off");
        libvirt.ok(&["start", &plc.name]);
        wait_for("the contract of the new start", || plc.budget().as_deref() == Some("2000"));
        rig.wait_state(&plc.name, "in_force");
        assert!(plc.is_fifo(&rig, "CPU 0"));
        hist.name
    };
    // libvirt's daemon restarts: nothing changes, and the VM is found all the same.
    libvirt.restart();
    let unheard = |status: &Value| status["problems"].to_string().contains("are not received");
    wait_for("libvirt's events again", || rig.metric("rtvirtio_loop_reporters") == 1.0);
    wait_for("no more about them", || !unheard(&rig.status()));
    let name = rig.status()["vms"][0]["name"].as_str().unwrap().to_owned();
    rig.wait_state(&name, "in_force");
    let plc = Domain { libvirt: &libvirt, name };
    assert!(plc.is_fifo(&rig, "CPU 0"));
    let status = plc.wait_status("in_force");
    // Its metadata carries a contract too: the file counts, until it is removed. That of another
    // VM is malformed, and concerns no other.
    let in_metadata = |domain: &Domain<'_>, budget: &str| {
        let spec = domain.spec(&rig, budget);
        rig.contract(&["set", &domain.name, spec.to_str().unwrap(), "--libvirt"]);
    };
    in_metadata(&plc, "2ms");
    let torn = Domain::start(&rig, &libvirt, "torn");
    let set = ["metadata", &torn.name, "--uri", CONTRACT_NAMESPACE, "--key", "rtvirtio", "--set"];
    libvirt.ok(&[&set[..], &["<contract>[[vm]</contract>", "--live"]].concat());
    let hist = Domain { libvirt: &libvirt, name: hist };
    // One that does not fit: the command refuses it, and another tool may write it all the same.
    in_metadata(&hist, "2ms");
    let metadata = ["metadata", &hist.name, "--uri", CONTRACT_NAMESPACE, "--config"];
    let text = libvirt.ok(&metadata);
    assert!(text.contains("2ms"), "{text}");
    let too_much = text.replace("\"2ms\"", "\"19ms\"").replace("&quot;2ms&quot;", "&quot;19ms&quot;");
    libvirt.ok(&[&metadata[..], &["--key", "rtvirtio", "--set", too_much.trim()]].concat());
    rig.kill();
    rig.start(&[]);
    wait_for("both contracts", || rig.vm(&plc.name)["overrides"].is_string());
    rig.wait_state(&plc.name, "in_force");
    let is_torn = |fault: &Value| fault["file"].as_str().is_some_and(|file| file.contains(&torn.name));
    let faults = rig.status()["faults"].clone();
    assert!(faults.as_array().is_some_and(|all| all.len() == 1 && all.iter().all(is_torn)), "{faults}");
    // One whose contract cannot be met starts, and is refused with the reason.
    libvirt.ok(&["start", &hist.name]);
    rig.wait_state(&hist.name, "refused");
    let refused = hist.wait_status("refused");
    assert_eq!(Some(refused.why.as_str()), rig.vm(&hist.name)["why"].as_str());
    assert!(refused.why.contains("too much"), "{refused:?}");
    assert_eq!(hist.budget().as_deref(), Some("0"));
    assert!(torn.wait_status("malformed").why.contains("TOML"), "{:?}", torn.status());
    // What says the same was not written anew by another process of the service.
    assert_eq!((plc.budget().as_deref(), plc.status()), (Some("2000"), Some(status)));
    for domain in [&hist, &torn] {
        libvirt.ok(&["destroy", &domain.name]);
        libvirt.ok(&["undefine", &domain.name]);
    }
    // Its events say so, else it is seen when metadata is read again.
    wait_for("the end of its contract", || rig.vm(&hist.name).is_null());
    rig.contract(&["remove", &plc.name]);
    let is_from = |vm: &Value| vm["file"].as_str().is_some_and(|from| from.starts_with("the metadata of"));
    wait_for("the contract of the metadata", || is_from(&rig.vm(&plc.name)));
    rig.wait_state(&plc.name, "in_force");
    assert!(rig.contract(&["show"]).contains("from the metadata of domain"));
    rig.contract(&["remove", &plc.name, "--libvirt", &libvirt.uri()]);
    rig.kill();
    rig.start(&[]);
    wait_for("the end of the contract", || plc.budget().as_deref() == Some("0"));
    wait_for("the old policy", || !plc.is_fifo(&rig, "CPU 0"));
    wait_for("the end of its status", || plc.status().is_none());
    wait_for("no room", || room(&plc) == 0);
    let failed: Vec<Value> = rig.events().into_iter().filter(|e| e["kind"] == "failed").collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(Path::new(CPU).exists());
}
