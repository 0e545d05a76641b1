//! Open vSwitch with DPDK: a database and a switch of its own, whose ports and flows are static.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rustix::process::Signal;

use crate::backend::Backend;
use rtvirtio_harness::huge_pages::HugePages;

/// The switch of Debian's `openvswitch-switch-dpdk`; elsewhere `ovs-vswitchd` may be one with DPDK.
const SWITCHES: [&str; 2] = ["/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk", "ovs-vswitchd"];
/// Schema of the switch's database.
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Huge pages of 2 MiB that the switch needs.
const PAGES: u64 = 256;
/// Memory that the switch takes at its start, MiB; the rest follows when it makes its buffers.
const SOCKET_MEMORY: u64 = 256;
/// Time limit until the database and the switch answer.
const START: Duration = Duration::from_secs(20);
/// Name of the bridge.
const BRIDGE: &str = "ovs0";

/// Program of a switch with DPDK, and its version; an error says why there is none.
///
/// # Errors
/// Where it is not installed.
pub fn find() -> Result<(&'static str, String), String> {
    for program in SWITCHES {
        let Ok(out) = Command::new(program).arg("--version").stderr(Stdio::null()).output() else { continue };
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if out.status.success() && lines.iter().any(|line| line.starts_with("DPDK")) {
            if let Err(e) = Command::new("ethtool").arg("--version").output() {
                return Err(format!(
                    "no ethtool, to turn checksum offload off at the far end (Debian's ethtool): {e}"
                ));
            }
            return Ok((program, lines.join(", ")));
        }
    }
    Err("no Open vSwitch with DPDK is installed (Debian's openvswitch-switch-dpdk)".to_owned())
}

/// A running switch. Dropping it ends its processes and returns its huge pages, in this order; the
/// kernel ends the processes with this one.
pub struct OvsDpdk {
    switch: Backend,
    _database: Backend,
    _pages: HugePages,
    /// Commands that made the switch, in order.
    pub commands: Vec<String>,
}

impl OvsDpdk {
    /// Starts the switch in the calling thread's network namespace, between an interface and
    /// vhost-user ports, each with its Ethernet address. The switch polls on `cpu`.
    ///
    /// # Errors
    /// When it is not installed, without huge pages, and when it does not start: with the end of
    /// its log.
    pub fn start(dir: &Path, interface: &str, ports: &[(String, PathBuf)], cpu: u32) -> anyhow::Result<Self> {
        let (program, _) = find().map_err(anyhow::Error::msg)?;
        let run = dir.join("ovs");
        std::fs::create_dir(&run)?;
        let pages = HugePages::reserve(PAGES)?;
        let mut made = Making { run, commands: Vec::new() };
        made.run("ovsdb-tool", &["create", "conf.db", SCHEMA])?;
        let database = made.start("ovsdb-server", &["conf.db", "--remote=punix:db.sock"])?;
        made.wait(&["--no-wait", "init"])?;
        let mask = format!("{:#x}", 1u64.checked_shl(cpu).context("a CPU beyond 63")?);
        let memory = format!("other_config:dpdk-socket-mem={SOCKET_MEMORY}");
        let [pmd, lcore] = ["pmd-cpu", "dpdk-lcore"].map(|key| format!("other_config:{key}-mask={mask}"));
        // Huge pages without files that outlive the switch.
        let extra = "other_config:dpdk-extra=--in-memory";
        let init = "other_config:dpdk-init=true";
        made.set(&["--no-wait", "set", "Open_vSwitch", ".", init, &memory, &pmd, &lcore, extra])?;
        let switch = made.start(program, &["unix:db.sock"])?;
        let built = made.ports(interface, ports);
        let Making { run, commands } = made;
        built.with_context(|| {
            let log = std::fs::read_to_string(run.join("switch.log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().rev().take(12).collect();
            lines.into_iter().rev().collect::<Vec<_>>().join("\n")
        })?;
        Ok(Self { switch, _database: database, _pages: pages, commands })
    }

    /// Process of the switch.
    #[must_use]
    pub fn process(&self) -> &Backend {
        &self.switch
    }

    /// Stops or continues the switch, which uses its CPU whether there are frames or not.
    pub fn set_stopped(&self, stopped: bool) -> anyhow::Result<()> {
        self.switch.signal(if stopped { Signal::STOP } else { Signal::CONT })
    }
}

impl Drop for OvsDpdk {
    fn drop(&mut self) {
        // A stopped process would not end on SIGTERM.
        let _ = self.set_stopped(false);
    }
}

/// A switch whose start is not finished.
struct Making {
    run: PathBuf,
    commands: Vec<String>,
}

impl Making {
    fn command(&mut self, program: &str, arguments: &[&str]) -> Command {
        // The directory has another name each time.
        let dir = self.run.parent().unwrap_or(&self.run).display().to_string();
        self.commands.push([&[program], arguments].concat().join(" ").replace(&dir, "DIR"));
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.run);
        for key in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR"] {
            command.env(key, &self.run);
        }
        command
    }

    fn run(&mut self, program: &str, arguments: &[&str]) -> anyhow::Result<()> {
        // In a process group of its own: this process handles Ctrl-C and ends the others.
        let mut command = self.command(program, arguments);
        let out = command.process_group(0).output().with_context(|| program.to_owned())?;
        if !out.status.success() {
            bail!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&out.stderr).trim());
        }
        Ok(())
    }

    fn set(&mut self, arguments: &[&str]) -> anyhow::Result<()> {
        let limit = format!("--timeout={}", START.as_secs());
        self.run("ovs-vsctl", &[&["--db=unix:db.sock", limit.as_str()], arguments].concat())
    }

    /// Starts a process that logs into a file.
    fn start(&mut self, program: &str, arguments: &[&str]) -> anyhow::Result<Backend> {
        let is_switch = program != "ovsdb-server";
        let name = if is_switch { "switch" } else { "database" };
        let own =
            [format!("--unixctl={name}.ctl"), format!("--log-file={name}.log"), "-vconsole:off".to_owned()];
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        let mut command = self.command(program, &[arguments, &own].concat());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = spawn(command, Vec::new(), Lifetime::WithParent).with_context(|| program.to_owned())?;
        Ok(Backend::from_child(child))
    }

    /// Runs a command of `ovs-vsctl` as soon as the database answers.
    fn wait(&mut self, arguments: &[&str]) -> anyhow::Result<()> {
        let begin = Instant::now();
        while !self.run.join("db.sock").exists() {
            if begin.elapsed() > START {
                bail!(std::io::Error::new(ErrorKind::TimedOut, "ovsdb-server does not listen"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.set(arguments)
    }

    /// A bridge of the interface and the ports, with a flow to each.
    fn ports(&mut self, interface: &str, ports: &[(String, PathBuf)]) -> anyhow::Result<()> {
        let bridge = ["--", "set", "bridge", BRIDGE, "datapath_type=netdev", "fail_mode=secure"];
        self.set(&[&["add-br", BRIDGE][..], &bridge].concat())?;
        // DPDK sends past the interface's queue by default, and so past the rate of a slow link.
        let devargs = format!("options:dpdk-devargs=eth_af_packet0,iface={interface},qdisc_bypass=0");
        let add = |name: &'static str| ["add-port", BRIDGE, name, "--", "set", "Interface", name];
        self.set(&[&add("uplink")[..], &["type=dpdk", &devargs, "ofport_request=100"]].concat())?;
        self.run("ovs-ofctl", &["del-flows", BRIDGE])?;
        for (i, (mac, socket)) in ports.iter().enumerate() {
            let (name, number) = (format!("vm{i}"), i + 1);
            let path = format!("options:vhost-server-path={}", socket.display());
            let port = format!("ofport_request={number}");
            let add = ["add-port", BRIDGE, &name, "--", "set", "Interface", &name];
            self.set(&[&add[..], &["type=dpdkvhostuserclient", &path, &port]].concat())?;
            self.run("ovs-ofctl", &["add-flow", BRIDGE, &format!("dl_dst={mac},actions=output:{number}")])?;
        }
        // All other frames are for the host's end.
        self.run("ovs-ofctl", &["add-flow", BRIDGE, "priority=1,in_port=100,actions=drop"])?;
        self.run("ovs-ofctl", &["add-flow", BRIDGE, "priority=0,actions=output:100"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A missing switch is reported with a reason that a reader can act on.
    #[test]
    fn a_switch_is_found_with_its_version_or_named() {
        match find() {
            Ok((program, version)) => {
                assert!(version.contains("DPDK") && program.contains("vswitchd"), "{version}")
            }
            Err(why) => assert!(why.contains("openvswitch-switch-dpdk"), "{why}"),
        }
    }
}
