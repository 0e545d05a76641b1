//! A cluster whose VMs have CPU contracts, enforced by `rtvirtio-pacemaker`.
//!
//! The VMs are emulated machines whose firmware computes for ever: real QEMU processes with threads
//! and a monitor, and no system in the guest. They are plain processes, or VMs of each node's
//! libvirt.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::node::processes_below;
use super::publisher::Publishers;
use super::{Cluster, ClusterError, DISK, NodeOptions, script};

/// Bytes of the firmware image.
const FIRMWARE: usize = 64 << 10;
/// Bytes of a libvirt VM's disk.
const DISK_BYTES: u64 = 1 << 20;
/// Budget of each contract, us.
pub const BUDGET_US: u64 = 1_000;
/// Period of each contract, us.
pub const PERIOD_US: u64 = 80_000;
/// Real-time budget of a node in each second, us: two contracts of 12.5 ms fit, three do not.
pub const NODE_BUDGET_US: u64 = 30_000;
/// Share of a node's budget that a contract takes, in thousandths.
pub const TAKES: u64 = 417;

/// The group of a libvirt VM below a node's group of a controller:
/// `machine/qemu-ID-NAME.libvirt-qemu`, with another ID at each start.
#[must_use]
pub fn domain_group(groups: &Path, vm: &str) -> Option<PathBuf> {
    let end = format!("-{vm}.libvirt-qemu");
    let entries = fs::read_dir(groups.join("machine")).into_iter().flatten().flatten();
    let is_of = |name: &str| {
        let id = name.strip_prefix("qemu-").and_then(|rest| rest.strip_suffix(&end));
        id.is_some_and(|id| id.parse::<u32>().is_ok())
    };
    entries.map(|e| e.path()).find(|p| p.file_name().and_then(|n| n.to_str()).is_some_and(is_of))
}

/// Directories of the programs on a node.
const DIRS: [&str; 4] = ["--state-dir", "/run/lasting/state", "--run-dir", "/run/rtvirtio"];

/// Resource agent that starts the VMs of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmAgent {
    /// `ocf:heartbeat:anything`: QEMU as a process.
    Process,
    /// `ocf:heartbeat:VirtualDomain`: a VM of the node's libvirt.
    Domain,
    /// `ocf:rtvirtio:VirtualDomain`, whose guests start with the contract in force; with the text
    /// of the agent.
    Paused(&'static str),
}

pub struct ContractCluster {
    /// The cluster, for its nodes.
    pub cluster: Cluster,
    dir: PathBuf,
    agent: VmAgent,
    program: PathBuf,
    file: PathBuf,
    promises_io: bool,
}

impl ContractCluster {
    /// Starts so many nodes, with fencing or without; `program` is `rtvirtio-pacemaker`. `name`
    /// becomes a part of cgroups' names. No VM exists yet.
    pub fn start(
        dir: &Path,
        name: &str,
        program: &Path,
        nodes: usize,
        agent: VmAgent,
        fencing: bool,
    ) -> Result<Self, ClusterError> {
        let agents = dir.join("agents");
        let own = agents.join("rtvirtio");
        fs::create_dir_all(&own).map_err(|e| ClusterError::io(&own, e))?;
        let exec = |what: &str| {
            format!(
                "#!/bin/sh\nexport RTVIRTIO_STATE_DIR=/run/lasting/state RTVIRTIO_RUN_DIR=/run/rtvirtio RTVIRTIO_PACEMAKER={}\nexec {what}\n",
                program.display()
            )
        };
        script(&own.join("contract"), &exec("\"$RTVIRTIO_PACEMAKER\" agent \"$1\""))?;
        if let VmAgent::Paused(text) = agent {
            let product = dir.join("VirtualDomain");
            script(&product, text)?;
            script(&own.join("VirtualDomain"), &exec(&format!("{} \"$@\"", product.display())))?;
        }
        // The reset vector lies 16 bytes below the end of the firmware: `jmp` to itself.
        let mut firmware = vec![0x90; FIRMWARE];
        firmware[FIRMWARE - 16..FIRMWARE - 14].copy_from_slice(&[0xeb, 0xfe]);
        write(&dir.join("spin.bin"), &firmware)?;
        let file = dir.join("site.toml");
        write(&file, b"contract = []\n")?;
        let libvirt = agent != VmAgent::Process;
        let options = NodeOptions { budget_us: NODE_BUDGET_US, agents, libvirt, fencing };
        let cluster = Cluster::start(dir, name, nodes, options)?;
        Ok(Self {
            cluster,
            dir: dir.to_owned(),
            agent,
            program: program.to_owned(),
            file,
            promises_io: false,
        })
    }

    /// Gives later specs a target for reads from the node's disk, [`DISK`].
    pub fn promise_io(&mut self) {
        self.promises_io = true;
    }

    /// Writes the contracts of these VMs, the first with the highest priority.
    pub fn set_contracts(&self, vms: &[&str]) -> Result<(), ClusterError> {
        let mut text = if vms.is_empty() { "contract = []\n".to_owned() } else { String::new() };
        for (i, vm) in vms.iter().enumerate() {
            self.write_spec(vm, BUDGET_US)?;
            text += &format!(
                "[[contract]]\nresource = \"{vm}\"\nspec = \"{vm}.toml\"\npriority = {}\n",
                100 - i.min(100)
            );
        }
        write(&self.file, text.as_bytes())
    }

    /// Writes the spec of a VM with this budget in each period.
    pub fn write_spec(&self, vm: &str, budget_us: u64) -> Result<(), ClusterError> {
        let reach = match self.agent {
            VmAgent::Process => format!("qmp = \"/run/{vm}.qmp\""),
            VmAgent::Domain | VmAgent::Paused(_) => format!("domain = \"{vm}\""),
        };
        let (device, target) = if self.promises_io {
            (DISK, "target = { percentile = \"p99.99\", latency = \"100ms\" }\n")
        } else {
            ("/dev/vda", "")
        };
        let spec = format!(
            "[device]\npath = \"{device}\"\n[[vm]]\nname = \"{vm}\"\n{reach}\ncpu = {{ budget = \"{budget_us}us\", period = \"{PERIOD_US}us\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n{target}"
        );
        write(&self.dir.join(format!("{vm}.toml")), spec.as_bytes())
    }

    /// Makes a VM a resource that Pacemaker starts, watches and stops.
    pub fn add_vm(&self, asked: usize, vm: &str) -> Result<(), ClusterError> {
        let xml = match self.agent {
            VmAgent::Process => self.process_xml(vm),
            VmAgent::Domain => self.domain_xml(vm, "heartbeat")?,
            VmAgent::Paused(_) => self.domain_xml(vm, "rtvirtio")?,
        };
        self.cluster.run(asked, &["cibadmin", "--create", "-o", "resources", "--xml-text", &xml]).map(|_| ())
    }

    /// A libvirt VM with a raw disk that all nodes share; the guest ignores a shutdown request.
    fn domain_xml(&self, vm: &str, provider: &str) -> Result<String, ClusterError> {
        let (config, disk) = (self.dir.join(format!("{vm}.xml")), self.dir.join(format!("{vm}.img")));
        let image = fs::File::create(&disk).and_then(|f| f.set_len(DISK_BYTES));
        image.map_err(|e| ClusterError::io(&disk, e))?;
        let domain = format!(
            "<domain type='qemu'>\n<name>{vm}</name>\n<memory unit='MiB'>64</memory>\n<vcpu>1</vcpu>\n\
             <os><type arch='x86_64' machine='pc'>hvm</type><loader readonly='yes' type='rom'>{}</loader></os>\n\
             <devices>\n<emulator>/usr/bin/qemu-system-x86_64</emulator>\n\
             <disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='{}'/>\
             <target dev='vda' bus='virtio'/></disk>\n</devices>\n</domain>\n",
            self.dir.join("spin.bin").display(),
            disk.display()
        );
        write(&config, domain.as_bytes())?;
        // The capacity that heartbeat's agent sets by itself is not defined for these nodes.
        let mut values = vec![
            ("config", config.display().to_string()),
            ("hypervisor", "qemu:///system".to_owned()),
            ("force_stop", "true".to_owned()),
            ("autoset_utilization_cpu", "false".to_owned()),
            ("autoset_utilization_host_memory", "false".to_owned()),
            ("autoset_utilization_hv_memory", "false".to_owned()),
        ];
        if provider == "rtvirtio" {
            values.push(("spec", self.dir.join(format!("{vm}.toml")).display().to_string()));
        }
        let values: String = values
            .iter()
            .map(|(name, value)| format!("<nvpair id=\"{vm}-{name}\" name=\"{name}\" value=\"{value}\"/>"))
            .collect();
        Ok(format!(
            "<primitive id=\"{vm}\" class=\"ocf\" provider=\"{provider}\" type=\"VirtualDomain\">\
             <instance_attributes id=\"{vm}-params\">{values}</instance_attributes><operations>\
             <op id=\"{vm}-start\" name=\"start\" interval=\"0\" timeout=\"120s\"/>\
             <op id=\"{vm}-stop\" name=\"stop\" interval=\"0\" timeout=\"60s\"/>\
             <op id=\"{vm}-monitor\" name=\"monitor\" interval=\"5s\" timeout=\"60s\"/></operations></primitive>"
        ))
    }

    fn process_xml(&self, vm: &str) -> String {
        let options = format!(
            "-nodefaults -no-user-config -display none -machine pc -accel tcg -m 64 -name {vm},debug-threads=on -bios {} -qmp unix:/run/{vm}.qmp,server=on,wait=off",
            self.dir.join("spin.bin").display()
        );
        format!(
            "<primitive id=\"{vm}\" class=\"ocf\" provider=\"heartbeat\" type=\"anything\"><instance_attributes id=\"{vm}-params\">\
             <nvpair id=\"{vm}-binfile\" name=\"binfile\" value=\"/usr/bin/qemu-system-x86_64\"/>\
             <nvpair id=\"{vm}-options\" name=\"cmdline_options\" value=\"{options}\"/>\
             <nvpair id=\"{vm}-pidfile\" name=\"pidfile\" value=\"/run/{vm}.pid\"/></instance_attributes>\
             <operations><op id=\"{vm}-monitor\" name=\"monitor\" interval=\"2s\" timeout=\"60s\"/></operations></primitive>"
        )
    }

    /// Runs `rtvirtio-pacemaker` on a node.
    pub fn rtvirtio(&self, node: usize, args: &[&str]) -> Result<String, ClusterError> {
        let program = self.program.display().to_string();
        self.cluster.run(node, &[&[program.as_str()], args, &DIRS].concat())
    }

    /// Lets each of these nodes publish its capacity for contracts.
    pub fn publish(&self, nodes: &[usize]) -> Result<(), ClusterError> {
        let file = self.file.display().to_string();
        nodes.iter().try_for_each(|n| self.rtvirtio(*n, &["publish", &file, "--quiet"]).map(|_| ()))
    }

    /// Publishes periodically on these nodes, at this interval, as the service of a node does.
    pub fn publish_every(&self, nodes: &[usize], every: &str) -> Result<Publishers, ClusterError> {
        let (program, file) = (self.program.display().to_string(), self.file.display().to_string());
        let command = [program.as_str(), "publish", &file, "--quiet", "--every", every];
        let command = [&command[..], &DIRS].concat();
        let start = |n: &usize| {
            self.cluster.start_program(*n, &command, &self.dir.join(format!("publish-n{}.log", n + 1)))
        };
        nodes.iter().map(start).collect()
    }

    /// Writes the contracts' constraints into the CIB.
    pub fn constrain(&self, asked: usize) -> Result<(), ClusterError> {
        let file = self.file.display().to_string();
        self.rtvirtio(asked, &["constraints", &file, "--apply", "--quiet"]).map(|_| ())
    }

    /// Published capacities of all nodes, from `show --json`.
    pub fn published(&self, asked: usize) -> Result<Vec<Value>, ClusterError> {
        let file = self.file.display().to_string();
        let text = self.rtvirtio(asked, &["show", &file, "--json"])?;
        let bad =
            || ClusterError::Refused { command: "show --json".to_owned(), said: text.clone(), code: None };
        serde_json::from_str(&text).map_err(|_| bad())
    }

    /// The file with a VM's budget on a node: of the contract's group, or of the libvirt VM's,
    /// whose name has another number at each start.
    #[must_use]
    pub fn budget_file(&self, node: usize, vm: &str) -> PathBuf {
        let node = self.cluster.group(node, "cpu");
        let group = match self.agent {
            VmAgent::Process => node.join(format!("rtvirtio-{vm}")),
            VmAgent::Domain | VmAgent::Paused(_) => {
                domain_group(&node, vm).unwrap_or_else(|| node.join("machine").join(vm))
            }
        };
        group.join("cpu.rt_runtime_us")
    }

    /// A VM's budget on a node in us; `None` without a group or, under libvirt, a contract.
    #[must_use]
    pub fn budget(&self, node: usize, vm: &str) -> Option<u64> {
        let text = fs::read_to_string(self.budget_file(node, vm)).ok()?;
        text.trim().parse().ok().filter(|us| *us > 0)
    }

    /// The node on which a VM runs.
    #[must_use]
    pub fn node_of(&self, asked: usize, vm: &str) -> Option<usize> {
        let name = self.cluster.active_on(asked, vm).ok()??;
        name.strip_prefix('n')?.parse::<usize>().ok()?.checked_sub(1)
    }

    /// Whether the agent on a node verifies a VM's contract, which reads every setting back.
    #[must_use]
    pub fn verifies(&self, node: usize, vm: &str) -> bool {
        let spec = format!("OCF_RESKEY_spec={}", self.dir.join(format!("{vm}.toml")).display());
        let (instance, program) = (format!("OCF_RESOURCE_INSTANCE={vm}"), self.program.display().to_string());
        let command = ["env", &spec, &instance, &program, "agent", "monitor"];
        self.budget(node, vm).is_some() && self.cluster.run(node, &[&command[..], &DIRS].concat()).is_ok()
    }

    /// The id of a VM's process in its node, which changes with each start.
    #[must_use]
    pub fn start_of(&self, node: usize, vm: &str) -> Option<String> {
        let file = match self.agent {
            VmAgent::Process => format!("/run/{vm}.pid"),
            VmAgent::Domain | VmAgent::Paused(_) => format!("/run/libvirt/qemu/{vm}.pid"),
        };
        self.cluster.run(node, &["cat", &file]).ok()
    }

    /// Waits until a VM runs on one of these nodes with a contract that verifies; returns the node.
    ///
    /// # Errors
    /// [`ClusterError::Waited`] after `longest`.
    pub fn wait_held(&mut self, vm: &str, nodes: &[usize], longest: Duration) -> Result<usize, ClusterError> {
        let begin = std::time::Instant::now();
        loop {
            let budget = |n: &&usize| self.budget(**n, vm).is_some();
            if let Some(node) = nodes.iter().find(budget).filter(|n| self.verifies(**n, vm)) {
                return Ok(*node);
            }
            if begin.elapsed() > longest {
                let (what, log) = (format!("the contract of {vm}"), self.cluster.log());
                return Err(ClusterError::Waited { what, log });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Restarts a killed node.
    pub fn start_node(&mut self, node: usize) -> Result<(), ClusterError> {
        self.cluster.start_node(node)
    }
}

/// Whether QEMU runs a VM in a cgroup of the host, or below it.
#[must_use]
pub fn runs_in(group: &Path, vm: &str) -> bool {
    let is_vm = |pid: u32| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        // QEMU's name of a process VM, and of a libvirt VM.
        let names = [format!("{vm},"), format!("guest={vm},")];
        read("comm").starts_with("qemu-system")
            && read("cmdline").split('\0').any(|arg| names.iter().any(|name| arg.starts_with(name)))
    };
    processes_below(group).into_iter().any(is_vm)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), ClusterError> {
    fs::write(path, bytes).map_err(|e| ClusterError::io(path, e))
}
