//! A Pacemaker cluster on one machine: real corosync and pacemakerd, each node in namespaces of its
//! own.
//!
//! A node has its own processes, network (a veth on a common bridge), host name, mounts (`/run`,
//! `/dev/shm`, Pacemaker's and Corosync's directories), and its own cgroups: it sees a group of the
//! host as its root, with a real-time budget of its own. All nodes share the kernel and the file
//! system below, so a file or a loop device is their shared storage. Killing a node ends all of its
//! processes at once. Fencing is off, or switches a node off by a power switch outside.

mod contracts;
mod error;
mod node;
mod power;
mod properties;
mod publisher;
mod storage;

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub use contracts::{
    BUDGET_US, ContractCluster, NODE_BUDGET_US, PERIOD_US, TAKES, VmAgent, domain_group, runs_in,
};
pub use error::ClusterError;
use node::{Files, Node};
use power::Power;
use properties::fencing_prefix;
pub use publisher::Publishers;
pub use storage::{DISK, NodeDisk};

/// Longest time until a cluster has elected a controller.
const ELECTION: Duration = Duration::from_secs(180);
/// Directory with the files of all nodes' libvirt, and its cache of QEMU's capabilities.
const LIBVIRT_DIR: &str = "libvirt";
/// Directory with the fence agent.
const FENCE_DIR: &str = "sbin";
/// Directory with requests to the power switch.
const POWER_DIR: &str = "power";
/// Interval of checks of a condition.
const PAUSE: Duration = Duration::from_millis(100);

/// A running cluster. Dropping it ends all processes and removes all groups.
pub struct Cluster {
    dir: PathBuf,
    name: String,
    /// Process that holds the network namespace with the bridge.
    switch: Child,
    /// Power switch; `None` without fencing.
    power: Option<Power>,
    nodes: Vec<Node>,
    options: NodeOptions,
    /// Directories of libvirt's that the host did not have; nodes mount their own over them.
    made: Vec<&'static str>,
}

#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Real-time budget of the node's groups in each second, us.
    pub budget_us: u64,
    /// Directory with resource agents of further providers.
    pub agents: PathBuf,
    pub libvirt: bool,
    /// Whether a lost node is switched off before its resources start elsewhere.
    pub fencing: bool,
}

impl Cluster {
    /// Programs that a cluster needs.
    pub const PROGRAMS: [&str; 6] = ["pacemakerd", "corosync", "cibadmin", "ip", "unshare", "nsenter"];

    /// Programs that a libvirt of each node needs.
    pub const LIBVIRT: [&str; 2] = ["libvirtd", "virsh"];

    /// Starts so many nodes, from `n1` on, with their files below `dir`, and waits for a
    /// controller. `name` is a part of cgroups' names.
    pub fn start(dir: &Path, name: &str, nodes: usize, options: NodeOptions) -> Result<Self, ClusterError> {
        let dir = dir.join("cluster");
        std::fs::create_dir_all(&dir).map_err(|e| ClusterError::io(&dir, e))?;
        let script =
            "ip link add br0 type bridge && ip link set br0 up && ip link set lo up && exec sleep infinity";
        let mut unshare = Command::new("setpriv");
        unshare.args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", script]);
        // The sweep of dead tests' leftovers finds the process by this directory.
        unshare.env("RTVIRTIO_RUN_DIR", &dir).stdin(Stdio::null()).stdout(Stdio::null());
        let switch = unshare.spawn().map_err(|e| ClusterError::program("setpriv", e))?;
        let names: Vec<String> = (1..=nodes).map(|i| format!("n{i}")).collect();
        std::fs::write(dir.join("corosync.conf"), corosync_conf(&names))
            .map_err(|e| ClusterError::io(&dir, e))?;
        let made = if options.libvirt { libvirt_files(&dir)? } else { Vec::new() };
        let name = name.to_owned();
        let mut cluster = Self { dir, name, switch, power: None, nodes: Vec::new(), options, made };
        if cluster.options.fencing {
            cluster.power = Some(Power::start(cluster.dir.join(POWER_DIR), &cluster.dir.join(FENCE_DIR))?);
        }
        cluster.wait("the bridge", ELECTION, |c| {
            let up = c.in_switch(&["ip", "link", "show", "br0", "up"]);
            Ok(up.is_ok_and(|text| text.contains("br0")))
        })?;
        for (i, node) in names.iter().enumerate() {
            let started = cluster.new_node(i, node)?;
            cluster.nodes.push(started);
            cluster.plug(i)?;
        }
        cluster.wait_online(nodes)?;
        let fencing = cluster.options.fencing;
        if fencing {
            let xml = fence_xml(&names);
            cluster.run(0, &["cibadmin", "--create", "-o", "resources", "--xml-text", &xml])?;
        }
        let enabled = if fencing { "true" } else { "false" };
        let prefix = fencing_prefix()?;
        for (name, value) in [
            (&*format!("{prefix}-action"), "off"),
            (&*format!("{prefix}-enabled"), enabled),
            ("no-quorum-policy", "stop"),
            ("fence-reaction", "stop"),
        ] {
            cluster.run(0, &["crm_attribute", "-t", "crm_config", "-n", name, "-v", value])?;
        }
        Ok(cluster)
    }

    /// Waits until so many nodes are online and a controller is elected.
    ///
    /// # Errors
    /// [`ClusterError::Waited`].
    pub fn wait_online(&mut self, nodes: usize) -> Result<(), ClusterError> {
        self.wait("the nodes to be online", ELECTION, |c| {
            // A node whose process 1 has ended does not come back.
            if c.nodes.iter().filter(|node| node.runs()).count() < nodes {
                return Err(ClusterError::Waited {
                    what: "the nodes to be online: one has ended".to_owned(),
                    log: c.log(),
                });
            }
            let Some(any) = c.nodes.iter().position(Node::runs) else { return Ok(false) };
            let status = c.run(any, &["crm_mon", "-1", "--output-as=xml"]).unwrap_or_default();
            let online = status.matches(" online=\"true\"").count();
            let joined = status.matches(" pending=\"false\"").count();
            Ok(online == nodes && joined >= nodes && status.contains("with_quorum=\"true\""))
        })
    }

    /// Runs a program on a node; returns its output.
    pub fn run(&self, node: usize, command: &[&str]) -> Result<String, ClusterError> {
        let mut nsenter = self.nodes[node].enter();
        output(nsenter.args(command), command)
    }

    /// Starts a program on a node in the background; its output goes into a file.
    fn start_program(&self, node: usize, command: &[&str], log: &Path) -> Result<Child, ClusterError> {
        let out = std::fs::File::create(log).map_err(|e| ClusterError::io(log, e))?;
        let err = out.try_clone().map_err(|e| ClusterError::io(log, e))?;
        let mut nsenter = self.nodes[node].enter();
        nsenter.args(command).env("LC_ALL", "C").stdin(Stdio::null()).stdout(out).stderr(err);
        nsenter.spawn().map_err(|e| ClusterError::program("nsenter", e))
    }

    /// Waits for a condition.
    ///
    /// # Errors
    /// [`ClusterError::Waited`] after `longest`, and errors of the condition.
    pub fn wait(
        &mut self,
        what: &str,
        longest: Duration,
        mut condition: impl FnMut(&Self) -> Result<bool, ClusterError>,
    ) -> Result<(), ClusterError> {
        let begin = Instant::now();
        while !condition(self)? {
            if begin.elapsed() > longest {
                let log = self.log();
                return Err(ClusterError::Waited { what: what.to_owned(), log });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// The node on which a resource is active; `None` where it is stopped.
    pub fn active_on(&self, asked: usize, resource: &str) -> Result<Option<String>, ClusterError> {
        let text = self.run(asked, &["crm_resource", "--resource", resource, "--locate"])?;
        // `resource plc is running on: n1`
        Ok(text.lines().find_map(|l| Some(l.split_once("running on:")?.1.trim().to_owned())))
    }

    /// Cuts a node's power: all of its processes end at once.
    pub fn kill_node(&mut self, node: usize) {
        self.nodes[node].kill();
    }

    /// Time of the last switch-off of a node by fencing; `None` without one. No process of the node
    /// was left at that time.
    #[must_use]
    pub fn switched_off(&self, node: usize) -> Option<Instant> {
        self.power.as_ref()?.switched_off(&format!("n{}", node + 1))
    }

    /// Restarts a killed node, with its files.
    pub fn start_node(&mut self, node: usize) -> Result<(), ClusterError> {
        self.nodes[node].kill();
        self.nodes[node] = self.new_node(node, &format!("n{}", node + 1))?;
        self.plug(node)
    }

    fn new_node(&self, node: usize, name: &str) -> Result<Node, ClusterError> {
        let libvirt = self.options.libvirt.then(|| self.dir.join(LIBVIRT_DIR));
        let fence = self.options.fencing.then(|| self.dir.join(FENCE_DIR));
        let files =
            Files { agents: &self.options.agents, libvirt: libvirt.as_deref(), fence: fence.as_deref() };
        let started = Node::start(node + 1, name, &self.dir, &self.name, self.options.budget_us, files)?;
        if let Some(power) = &self.power {
            power.connect(name, started.outlet());
        }
        Ok(started)
    }

    /// Sets a node's network link down or up.
    pub fn set_link(&self, node: usize, up: bool) -> Result<(), ClusterError> {
        let link = format!("e{}", node + 1);
        self.in_switch(&["ip", "link", "set", &link, if up { "up" } else { "down" }]).map(|_| ())
    }

    /// Directory of a node that lasts over its restarts; on the node it is `/run/lasting`.
    #[must_use]
    pub fn lasting(&self, node: usize) -> PathBuf {
        self.nodes[node].lasting()
    }

    /// The group of the host that is the root of a node's groups, below a v1 controller.
    #[must_use]
    pub fn group(&self, node: usize, controller: &str) -> PathBuf {
        self.nodes[node].group(controller)
    }

    /// Last lines of the nodes' logs.
    #[must_use]
    pub fn log(&self) -> String {
        self.nodes.iter().map(Node::log).collect()
    }

    /// Connects a node's network to the bridge.
    fn plug(&self, node: usize) -> Result<(), ClusterError> {
        let (link, pid) = (format!("e{}", node + 1), self.nodes[node].init()?.to_string());
        let _ = self.in_switch(&["ip", "link", "del", &link]);
        let add = ["ip", "link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &pid];
        self.in_switch(&add)?;
        self.in_switch(&["ip", "link", "set", &link, "master", "br0", "up"]).map(|_| ())
    }

    fn in_switch(&self, command: &[&str]) -> Result<String, ClusterError> {
        let mut nsenter = Command::new("nsenter");
        nsenter.args(["--net", "--target", &self.switch.id().to_string()]).args(command);
        output(&mut nsenter, command)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // No fencing request may reach a node that is being removed.
        self.power = None;
        self.nodes.iter().for_each(Node::kill);
        self.nodes.iter().for_each(Node::remove_groups);
        let _ = self.switch.kill();
        let _ = self.switch.wait();
        for dir in &self.made {
            let _ = std::fs::remove_dir(dir);
        }
    }
}

/// Configuration of every node's libvirt: it works without systemd, AppArmor and a user of
/// libvirt's, and changes no file's owner. Returns the directories that were made on the host.
fn libvirt_files(dir: &Path) -> Result<Vec<&'static str>, ClusterError> {
    let dir = dir.join(LIBVIRT_DIR);
    let files = [
        (
            "qemu.conf",
            "namespaces = []\nsecurity_driver = \"none\"\nuser = \"root\"\ngroup = \"root\"\ndynamic_ownership = 0\nstdio_handler = \"file\"\n",
        ),
        (
            "libvirtd.conf",
            "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nlog_outputs = \"2:file:/var/log/libvirtd.log\"\n",
        ),
    ];
    std::fs::create_dir_all(&dir).map_err(|e| ClusterError::io(&dir, e))?;
    for (name, text) in files {
        let path = dir.join(name);
        std::fs::write(&path, text).map_err(|e| ClusterError::io(&path, e))?;
    }
    let dirs = ["/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt"];
    Ok(dirs.into_iter().filter(|dir| std::fs::create_dir(dir).is_ok()).collect())
}

/// Fencing resource by which any node may have another switched off.
fn fence_xml(nodes: &[String]) -> String {
    let values = [("pcmk_host_list", nodes.join(" ")), ("pcmk_host_check", "static-list".to_owned())];
    let values: String = values
        .iter()
        .map(|(name, value)| format!("<nvpair id=\"power-{name}\" name=\"{name}\" value=\"{value}\"/>"))
        .collect();
    format!(
        "<primitive id=\"power\" class=\"stonith\" type=\"fence_lab\">\
         <instance_attributes id=\"power-params\">{values}</instance_attributes></primitive>"
    )
}

fn script(path: &Path, text: &str) -> Result<(), ClusterError> {
    std::fs::write(path, text).map_err(|e| ClusterError::io(path, e))?;
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(path, mode).map_err(|e| ClusterError::io(path, e))
}

fn output(program: &mut Command, command: &[&str]) -> Result<String, ClusterError> {
    let out = program.env("LC_ALL", "C").stdin(Stdio::null()).output();
    let out = out.map_err(|e| ClusterError::program("nsenter", e))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if out.status.success() {
        return Ok(text(&out.stdout));
    }
    let said = format!("{} {}", text(&out.stdout), text(&out.stderr));
    Err(ClusterError::Refused { command: command.join(" "), said, code: out.status.code() })
}

/// Node i has the address 10.77.0.i.
fn corosync_conf(names: &[String]) -> String {
    let mut s = String::from(
        "totem {\n version: 2\n cluster_name: rtvirtio\n transport: knet\n crypto_cipher: none\n crypto_hash: none\n}\nnodelist {\n",
    );
    for (i, name) in names.iter().enumerate() {
        let id = i + 1;
        // Writing to a String cannot fail.
        let _ = writeln!(s, " node {{\n  ring0_addr: 10.77.0.{id}\n  name: {name}\n  nodeid: {id}\n }}");
    }
    // Corosync's real-time priority would need a budget that the node's group does not have.
    s + "}\nquorum {\n provider: corosync_votequorum\n}\nsystem {\n sched_rr: no\n move_to_root_cgroup: no\n}\n\
         logging {\n to_logfile: yes\n logfile: /var/log/corosync.log\n to_syslog: no\n}\n"
}
