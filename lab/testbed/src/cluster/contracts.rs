//! A cluster whose VMs have CPU contracts, told to it and held by `rtvirtio-pacemaker`.
//!
//! The VMs are emulated machines whose firmware computes for ever: real QEMU processes with
//! threads and a monitor, and no system in the guest.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{Cluster, ClusterError};

/// Bytes of the firmware.
const FIRMWARE: usize = 64 << 10;
/// Budget of each contract, us.
pub const BUDGET_US: u64 = 1_000;
/// Period of each contract, us.
pub const PERIOD_US: u64 = 80_000;
/// Real-time budget of a node in each second, us: two contracts of 12.5 ms fit, three do not.
pub const NODE_BUDGET_US: u64 = 30_000;
/// What a contract takes of a node, in thousandths.
pub const TAKES: u64 = 417;

/// The cluster with its contracts.
pub struct ContractCluster {
    /// The cluster.
    pub cluster: Cluster,
    dir: PathBuf,
    agents: PathBuf,
    program: PathBuf,
    file: PathBuf,
}

impl ContractCluster {
    /// Starts so many nodes; `program` is `rtvirtio-pacemaker`. `name` becomes a part of cgroups'
    /// names. No VM is there yet.
    ///
    /// # Errors
    /// What does not start.
    pub fn start(dir: &Path, name: &str, program: &Path, nodes: usize) -> Result<Self, ClusterError> {
        let agents = dir.join("agents");
        let own = agents.join("rtvirtio");
        fs::create_dir_all(&own).map_err(|e| ClusterError::io(&own, e))?;
        let agent = own.join("contract");
        let script = format!(
            "#!/bin/sh\nexport RTVIRTIO_STATE_DIR=/run/lasting/state RTVIRTIO_RUN_DIR=/run/rtvirtio\nexec {} agent \"$1\"\n",
            program.display()
        );
        write(&agent, script.as_bytes())?;
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755))
            .map_err(|e| ClusterError::io(&agent, e))?;
        // The reset vector lies 16 bytes below the end of the firmware: `jmp` to itself.
        let mut firmware = vec![0x90; FIRMWARE];
        firmware[FIRMWARE - 16..FIRMWARE - 14].copy_from_slice(&[0xeb, 0xfe]);
        write(&dir.join("spin.bin"), &firmware)?;
        let file = dir.join("site.toml");
        write(&file, b"contract = []\n")?;
        let cluster = Cluster::start(dir, name, nodes, NODE_BUDGET_US, &agents)?;
        Ok(Self { cluster, dir: dir.to_owned(), agents, program: program.to_owned(), file })
    }

    /// Writes the contracts of these VMs, the first with the highest priority.
    ///
    /// # Errors
    /// When a file cannot be written.
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
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write_spec(&self, vm: &str, budget_us: u64) -> Result<(), ClusterError> {
        let spec = format!(
            "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"{vm}\"\nqmp = \"/run/{vm}.qmp\"\ncpu = {{ budget = \"{budget_us}us\", period = \"{PERIOD_US}us\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n"
        );
        write(&self.dir.join(format!("{vm}.toml")), spec.as_bytes())
    }

    /// Makes a VM a resource: QEMU as a process that Pacemaker starts, watches and stops.
    ///
    /// # Errors
    /// When the cluster refuses it.
    pub fn add_vm(&self, asked: usize, vm: &str) -> Result<(), ClusterError> {
        let options = format!(
            "-nodefaults -no-user-config -display none -machine pc -accel tcg -m 64 -name {vm},debug-threads=on -bios {} -qmp unix:/run/{vm}.qmp,server=on,wait=off",
            self.dir.join("spin.bin").display()
        );
        let xml = format!(
            "<primitive id=\"{vm}\" class=\"ocf\" provider=\"heartbeat\" type=\"anything\"><instance_attributes id=\"{vm}-params\">\
             <nvpair id=\"{vm}-binfile\" name=\"binfile\" value=\"/usr/bin/qemu-system-x86_64\"/>\
             <nvpair id=\"{vm}-options\" name=\"cmdline_options\" value=\"{options}\"/>\
             <nvpair id=\"{vm}-pidfile\" name=\"pidfile\" value=\"/run/{vm}.pid\"/></instance_attributes>\
             <operations><op id=\"{vm}-monitor\" name=\"monitor\" interval=\"2s\" timeout=\"60s\"/></operations></primitive>"
        );
        self.cluster.run(asked, &["cibadmin", "--create", "-o", "resources", "--xml-text", &xml]).map(|_| ())
    }

    /// Runs `rtvirtio-pacemaker` on a node.
    ///
    /// # Errors
    /// Its failure.
    pub fn rtvirtio(&self, node: usize, args: &[&str]) -> Result<String, ClusterError> {
        let program = self.program.display().to_string();
        let dirs = ["--state-dir", "/run/lasting/state", "--run-dir", "/run/rtvirtio"];
        self.cluster.run(node, &[&[program.as_str()], args, &dirs].concat())
    }

    /// Each of these nodes tells what it could promise.
    ///
    /// # Errors
    /// Those of the program.
    pub fn publish(&self, nodes: &[usize]) -> Result<(), ClusterError> {
        let file = self.file.display().to_string();
        nodes.iter().try_for_each(|n| self.rtvirtio(*n, &["publish", &file, "--quiet"]).map(|_| ()))
    }

    /// Writes the contracts' rules into the CIB.
    ///
    /// # Errors
    /// Those of the program.
    pub fn constrain(&self, asked: usize) -> Result<(), ClusterError> {
        let file = self.file.display().to_string();
        self.rtvirtio(asked, &["constraints", &file, "--apply", "--quiet"]).map(|_| ())
    }

    /// What all nodes have published, as `show --json` has it.
    ///
    /// # Errors
    /// Those of the program; output that is no list.
    pub fn published(&self, asked: usize) -> Result<Vec<Value>, ClusterError> {
        let file = self.file.display().to_string();
        let text = self.rtvirtio(asked, &["show", &file, "--json"])?;
        let bad =
            || ClusterError::Refused { command: "show --json".to_owned(), said: text.clone(), code: None };
        serde_json::from_str(&text).map_err(|_| bad())
    }

    /// The file with the budget that the kernel has for a VM on a node.
    #[must_use]
    pub fn budget_file(&self, node: usize, vm: &str) -> PathBuf {
        self.cluster.group(node, "cpu").join(format!("rtvirtio-{vm}/cpu.rt_runtime_us"))
    }

    /// That budget in us; `None` without a group.
    #[must_use]
    pub fn budget(&self, node: usize, vm: &str) -> Option<u64> {
        fs::read_to_string(self.budget_file(node, vm)).ok()?.trim().parse().ok()
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
        let command = [
            "env",
            &spec,
            &instance,
            &program,
            "agent",
            "monitor",
            "--state-dir",
            "/run/lasting/state",
            "--run-dir",
            "/run/rtvirtio",
        ];
        self.budget(node, vm).is_some() && self.cluster.run(node, &command).is_ok()
    }

    /// The id of a VM's process in its node, as long as it is the same start.
    #[must_use]
    pub fn start_of(&self, node: usize, vm: &str) -> Option<String> {
        self.cluster.run(node, &["cat", &format!("/run/{vm}.pid")]).ok()
    }

    /// Waits until a VM runs on a node of these where its contract verifies; returns the node.
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

    /// Starts a killed node again.
    ///
    /// # Errors
    /// As [`Cluster::start_node`].
    pub fn start_node(&mut self, node: usize) -> Result<(), ClusterError> {
        self.cluster.start_node(node, &self.agents)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), ClusterError> {
    fs::write(path, bytes).map_err(|e| ClusterError::io(path, e))
}
