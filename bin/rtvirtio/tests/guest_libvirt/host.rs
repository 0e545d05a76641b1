//! A libvirt daemon with two VMs on one loop device: `plc` with a guest and its agent, and
//! `historian` without either.

use std::fs;
use std::path::Path;

use rtvirtio_testbed::image::{self, GuestImage};
use rtvirtio_testkit::site::{Site, wait_for};
use rtvirtio_testkit::{Libvirt, LoopDevice, Need, has};
use serde_json::Value;

/// Detached when dropped.
struct Disk {
    device: String,
    _attached: LoopDevice,
    _dir: tempfile::TempDir,
}

impl Disk {
    fn new() -> Self {
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let file = dir.path().join("disk");
        // Not full of holes: a read of those does not reach the disk.
        fs::write(&file, vec![0x5a; 64 << 20]).unwrap();
        let attached = LoopDevice::attach(&file).expect("losetup");
        Self { device: attached.0.display().to_string(), _attached: attached, _dir: dir }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // It keeps its queue settings, and the next user may not expect them.
        let queue = Path::new("/sys/block").join(self.device.trim_start_matches("/dev/")).join("queue");
        let _ = fs::write(queue.join("scheduler"), "none");
    }
}

pub struct Host {
    pub libvirt: Libvirt,
    pub plc: String,
    pub historian: String,
    disk: Disk,
}

impl Host {
    /// `None`, after saying so, where the machine does not allow it.
    pub fn start(test: &str, site: &Site) -> Option<Self> {
        let needs = [&Libvirt::NEEDS[..], &[Need::Path("/dev/loop-control", "no loop devices")]].concat();
        if !has(test, &needs) {
            return None;
        }
        let image = image::ensure(&image::default_cache(), &|line| eprintln!("{line}")).unwrap();
        let disk = Disk::new();
        let libvirt = Libvirt::start(site.dir.path());
        let host = Self { libvirt, plc: site.vm("plc"), historian: site.vm("historian"), disk };
        host.libvirt.start_domain(&host.plc, &host.plc_xml(&image));
        host.libvirt.start_domain(&host.historian, &host.historian_xml());
        host.await_agent();
        Some(host)
    }

    /// The guest names its only disk `vda`, whatever libvirt calls it.
    fn plc_xml(&self, image: &GuestImage) -> String {
        let (kernel, initrd) = (image.kernel.display(), image.initrd.display());
        let boot = format!(
            "<kernel>{kernel}</kernel><initrd>{initrd}</initrd>\
             <cmdline>console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check mitigations=off</cmdline>"
        );
        let agent = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>";
        self.domain(&self.plc, 448, &boot, agent)
    }

    /// A machine in its firmware, which finds nothing to boot.
    fn historian_xml(&self) -> String {
        self.domain(&self.historian, 64, "", "")
    }

    /// Both have the disk read-only: QEMU's locks keep it from being written by two.
    fn domain(&self, name: &str, mib: u32, boot: &str, devices: &str) -> String {
        format!(
            "<domain type='qemu'><name>{name}</name><memory unit='MiB'>{mib}</memory>\
             <vcpu current='1'>2</vcpu><iothreads>1</iothreads>\
             <os><type arch='x86_64' machine='q35'>hvm</type>{boot}</os><features><acpi/></features><cpu mode='maximum'/>\
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>\
             <disk type='block' device='disk'><driver name='qemu' type='raw' cache='none' io='native' iothread='1'/>\
             <source dev='{}'/><target dev='vdb' bus='virtio'/><readonly/></disk>\
             {devices}<memballoon model='none'/></devices></domain>",
            self.disk.device
        )
    }

    /// Waits until the agent of `plc` answers.
    pub fn await_agent(&self) {
        let ping = ["qemu-agent-command", &self.plc, r#"{"execute":"guest-ping"}"#];
        wait_for("the guest agent", || self.libvirt.virsh(ping).status.success());
    }

    /// A spec for both: `plc` has a CPU contract, and its target needs a limit on `historian`.
    pub fn spec(&self, site: &Site) -> String {
        let uri = self.libvirt.uri();
        let vm = |name: &str, rest: &str| {
            format!("[[vm]]\nname = \"{name}\"\ndomain = \"{name}\"\nuri = \"{uri}\"\ndisk = \"vdb\"\n{rest}")
        };
        let cycle = "cpu = { budget = \"10ms\", period = \"20ms\" }\n\
                     [[vm.task]]\nname = \"cycle\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"50/s\"\n\
                     target = { percentile = \"p99\", latency = \"8ms\" }\n";
        let bulk = "[[vm.task]]\nname = \"bulk\"\nop = \"read\"\nblock = \"256KiB\"\ndepth = 8\n";
        let text = format!(
            "[device]\npath = \"{}\"\n{}{}",
            self.disk.device,
            vm(&self.plc, cycle),
            vm(&self.historian, bulk)
        );
        site.write("plant.toml", &text)
    }

    /// The threads of `plc`, by name: policy and cgroup of the CPU controller.
    pub fn threads(&self, site: &Site, spec: &str) -> Vec<(String, String, String)> {
        let (code, all) = site.json(&["threads", spec, &self.plc]);
        assert_eq!(code, 0, "{all}");
        let one = |t: &Value| {
            let text = |key: &str| t[key].as_str().unwrap().to_owned();
            let all = t["cgroups"].as_array().unwrap();
            let of = |controller: &str| {
                let has = |c: &&Value| c["controllers"].as_str().unwrap().split(',').any(|c| c == controller);
                all.iter().find(has)
            };
            // On v2 the only hierarchy has no name.
            let cpu = of("cpu").or_else(|| of(""));
            (text("name"), text("policy"), cpu.unwrap()["path"].as_str().unwrap().to_owned())
        };
        all[0]["threads"].as_array().unwrap().iter().map(one).collect()
    }
}
