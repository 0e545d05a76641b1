//! Two guests behind one uplink: on taps of QEMU, or on the I/O domain.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_testbed::image::GuestImage;
use rtvirtio_testbed::netns::{self, Namespace};
use rtvirtio_testbed::qemu::{Accel, GuestDisk, GuestNic, NicBackend, QemuConfig, QemuGuest};
use rtvirtio_units::{Bytes, Nanos, Ratio};
use rtvirtio_vmm::agent::Process;
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use super::ovs::OvsDpdk;
use super::probe::Address;
use super::sink::Sink;
use crate::backend::Backend;
use rtvirtio_domain_config::WIRE_OVERHEAD;
use rtvirtio_harness::cores::{bind, core_and_others};

/// Address of the host's end of the uplink.
pub const HOST: Address = Address { mac: [0x52, 0x54, 0, 0, 0, 1], ip: [10, 200, 0, 1] };
/// Addresses of the guests: the victim and its neighbour.
pub const GUESTS: [Address; 2] = [
    Address { mac: [0x52, 0x54, 0, 0, 0, 0xa], ip: [10, 200, 0, 10] },
    Address { mac: [0x52, 0x54, 0, 0, 0, 0xb], ip: [10, 200, 0, 11] },
];
/// Names of ports and guests.
pub const NAMES: [&str; 2] = ["a", "b"];
/// Rate of the uplink, bit/s, where it is limited.
pub const LINK: f64 = 100e6;
/// Time limit of commands in a guest.
const COMMAND: Duration = Duration::from_secs(60);
/// Port of the host's end for TCP and UDP.
const SINK: u16 = 7_001;

/// The network of the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum System {
    /// QEMU's taps on a bridge.
    Tap,
    /// Ports of the I/O domain.
    Domain,
    /// Open vSwitch with DPDK, in place of the bridge.
    Dpdk,
}

impl System {
    /// Name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tap => "taps",
            Self::Domain => "I/O domain",
            Self::Dpdk => "OVS-DPDK",
        }
    }
}

/// Queueing discipline behind the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// Without a rate limit.
    Free,
    /// A link of [`LINK`] with one queue: 1.5 MB.
    Fifo,
    /// Link of `Fifo`, with a tuned HTB before it: the victim first, with 10 Mbit/s.
    Htb,
}

/// Settings of the thread of the I/O domain's network.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct NetThread {
    /// SCHED_FIFO priority of the domain's network thread.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=99))]
    pub fifo: Option<u8>,
    /// Budget of CPU time of that thread, such as 30%.
    #[arg(long, value_name = "SHARE")]
    pub cpu_budget: Option<Ratio>,
    /// Period of that budget.
    #[arg(long, value_name = "TIME", requires = "cpu_budget")]
    pub cpu_period: Option<Nanos>,
    /// Time that the thread polls before it sleeps, on the core of the load; adaptive when `None`.
    #[arg(skip)]
    pub poll: Option<Nanos>,
}

impl NetThread {
    /// Keys in the I/O domain's file.
    fn keys(&self) -> String {
        let fifo = self.fifo.map(|priority| format!("fifo = {priority}\n"));
        let budget = self.cpu_budget.map(|share| format!("cpu_budget = \"{share}\"\n"));
        let period = self.cpu_period.map(|period| format!("cpu_period = \"{period}\"\n"));
        let poll = self.poll.map(|time| format!("poll = \"{time}\"\n"));
        [fifo, budget, period, poll].into_iter().flatten().collect()
    }

    /// Command-line options for these settings, without `poll`.
    #[must_use]
    pub fn options(&self) -> String {
        let fifo = self.fifo.map(|priority| format!(" --fifo {priority}"));
        let budget = self.cpu_budget.map(|share| format!(" --cpu-budget {share}"));
        let period = self.cpu_period.map(|period| format!(" --cpu-period {period}"));
        [fifo, budget, period].into_iter().flatten().collect()
    }
}

/// Settings of ports and thread in the I/O domain's file.
#[derive(Clone, Copy, Debug, Default)]
pub struct BedOptions {
    /// Most frames per second that the neighbour receives.
    pub cap: u32,
    /// Least time between two notifications of the neighbour; none when `None`.
    pub coalesce: Option<Nanos>,
    /// Settings of the network's thread.
    pub thread: NetThread,
}

/// Configuration of the link and the ports in the I/O domain's file.
fn domain_config(dir: &Path, link: Option<f64>, options: &BedOptions) -> String {
    let head = "[[network]]\nname = \"bench\"\n";
    let mut text = format!("control = {:?}\n{head}{}", dir.join("control"), options.thread.keys());
    if let Some(rate) = link {
        text.push_str(&format!("link = \"{}Mbit/s\"\n", rate / 1e6));
    }
    let reserve = "reserve = { rate = \"10Mbit/s\", burst = \"3kB\", deadline = \"2ms\" }\n";
    let coalesce = options.coalesce.map(|time| format!("rx_coalesce = \"{time}\"\n"));
    let keys = [
        if link.is_some() { reserve.to_owned() } else { String::new() },
        format!("rx_cap = {{ frames = \"{}/s\" }}\n{}", options.cap, coalesce.unwrap_or_default()),
    ];
    for ((name, address), keys) in NAMES.iter().zip(GUESTS).zip(keys) {
        text.push_str(&format!(
            "[[network.port]]\nname = {name:?}\nsocket = {:?}\ntap = \"tap-{name}\"\nmac = \"{}\"\n{keys}",
            dir.join(name),
            mac(address)
        ));
    }
    // A port for attackers.
    text.push_str(&format!(
        "[[network.port]]\nname = \"c\"\nsocket = {:?}\ntap = \"tap-c\"\nmac = \"52:54:00:00:00:0c\"\n",
        dir.join("c")
    ));
    text
}

/// Disks of both guests, each a part of a device: the victim's has a share of the device's time.
fn disk_config(dir: &Path, device: &Path, size: Bytes) -> String {
    let cost = "cost = { read = { base = \"10us\", per_mib = \"300us\" }, write = { base = \"10us\", per_mib = \"300us\" } }";
    let mut text = format!("[[device]]\nname = \"d\"\nwindow = 4\nstall = \"1ms\"\n{cost}\n");
    let reserve = "reserve = { share = \"20%\", burst = \"500us\", deadline = \"5ms\" }\n";
    for (i, (name, keys)) in NAMES.iter().zip([reserve, ""]).enumerate() {
        text.push_str(&format!(
            "[[device.disk]]\nname = {name:?}\nsocket = {:?}\npath = {device:?}\noffset = \"{}\"\nsize = \"{size}\"\nformat = \"raw\"\n{keys}",
            disk_socket(dir, name),
            Bytes(size.0 * i as u64),
        ));
    }
    text
}

fn disk_socket(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}-disk"))
}

/// An Ethernet address as text.
pub fn mac(address: Address) -> String {
    address.mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn ip(address: Address) -> String {
    address.ip.map(|byte| byte.to_string()).join(".")
}

/// Script by which a guest takes an address. It drops its neighbour table when its link goes down,
/// and resolves again a second later: the host's end is entered for good.
pub fn address_setup(guest: Address) -> String {
    let (guest, host) = (ip(guest), ip(HOST));
    format!("ip addr add {guest}/24 dev eth0 && ip link set eth0 up && arp -s {host} {}", mac(HOST))
}

/// Guests, their network, and the host's end of it.
pub struct NetTestBed {
    /// Namespace of the network.
    pub namespace: Namespace,
    /// Kind of network that connects the guests.
    pub system: System,
    /// The victim and its neighbour.
    pub guests: [QemuGuest; 2],
    /// The I/O domain, for [`System::Domain`].
    pub domain: Option<Backend>,
    /// The switch, for [`System::Dpdk`].
    pub ovs: Option<OvsDpdk>,
    dir: tempfile::TempDir,
    uplink: Uplink,
    /// Disks in the I/O domain's file.
    disks: String,
    options: BedOptions,
    /// Core of the I/O domain.
    core: u32,
}

impl NetTestBed {
    /// Boots both guests; on the I/O domain each has a part of `disk`, of this size. The calling
    /// thread moves into the namespace.
    pub fn new(
        system: System,
        (image, accel): (&GuestImage, Accel),
        options: BedOptions,
        disk: Option<(&Path, Bytes)>,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        progress.check_cancelled()?;
        let namespace = Namespace::new().context("a network namespace")?;
        namespace.enter()?;
        netns::bridge(&["tap-a", "tap-b", "tap-c"])?;
        netns::run("ip", &format!("link set up1 address {}", mac(HOST)))?;
        netns::run("ip", &format!("addr add {}/24 dev up1", ip(HOST)))?;
        let dir = tempfile::Builder::new().prefix("rtvirtio-net-").tempdir()?;
        let disks = disk.map(|(device, size)| disk_config(dir.path(), device, size)).unwrap_or_default();
        let (core, others) = core_and_others()?;
        let domain = match system {
            System::Domain => {
                let config = domain_config(dir.path(), Some(LINK), &options) + &disks;
                Some(Backend::start_domain(dir.path(), &config)?)
            }
            System::Tap | System::Dpdk => None,
        };
        let ovs = match system {
            System::Dpdk => {
                netns::run("ip", "link set up0 nomaster")?;
                // DPDK passes frames on as they are, and the host's end leaves checksums to a
                // network card: a guest would refuse all of TCP.
                netns::run("ethtool", "-K up1 tx off")?;
                let ports = NAMES.map(|name| dir.path().join(name));
                let ports: Vec<_> = GUESTS.iter().map(|guest| mac(*guest)).zip(ports).collect();
                Some(OvsDpdk::start(dir.path(), "up0", &ports, others[0])?)
            }
            System::Tap | System::Domain => None,
        };
        let boot = |i: usize| -> anyhow::Result<QemuGuest> {
            progress.check_cancelled()?;
            let backend = match system {
                System::Tap => NicBackend::Tap(format!("tap-{}", NAMES[i])),
                System::Domain => NicBackend::VhostUser(dir.path().join(NAMES[i])),
                System::Dpdk => NicBackend::VhostUserServer(dir.path().join(NAMES[i])),
            };
            let nic = Some(GuestNic { mac: mac(GUESTS[i]), backend });
            let run_dir = dir.path().join("run");
            let disk = match disk {
                None => GuestDisk::None,
                Some(_) => {
                    GuestDisk::VhostUser { socket: disk_socket(dir.path(), NAMES[i]), queues: Some(1) }
                }
            };
            let base = QemuConfig::new(NAMES[i], image.clone(), disk, &run_dir);
            let mut guest = QemuGuest::start(&QemuConfig { nic, accel, ..base })?;
            command(&mut guest, &address_setup(GUESTS[i]))?;
            Ok(guest)
        };
        let guests = [boot(0)?, boot(1)?];
        for address in GUESTS {
            let entry =
                format!("neigh replace {} lladdr {} dev up1 nud permanent", ip(address), mac(address));
            netns::run("ip", &entry)?;
        }
        // The load comes from another core, as it does from a network. There the switch polls, too.
        for guest in &guests {
            bind(guest.handle().process.pid, &[core])?;
        }
        let core = if options.thread.poll.is_some() { others[0] } else { core };
        domain.as_ref().map_or(Ok(()), |domain| bind(domain.pid(), &[core]))?;
        Ok(Self { namespace, system, guests, domain, ovs, dir, uplink: Uplink::Free, disks, options, core })
    }

    /// Directory of the sockets.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Sets the queue behind the bridge.
    pub fn set_uplink(&mut self, uplink: Uplink) -> anyhow::Result<()> {
        self.namespace.enter()?;
        let tc = |arguments: &str| netns::run("tc", arguments);
        if self.uplink != Uplink::Free {
            tc("qdisc del dev up0 root")?;
        }
        self.uplink = uplink;
        let mbit = LINK / 1e6;
        match uplink {
            Uplink::Free => {}
            Uplink::Fifo => {
                tc(&format!("qdisc add dev up0 root tbf rate {mbit}mbit burst 16kb limit 1500000"))?;
            }
            Uplink::Htb => {
                // Slightly below the link, so that the queue is here.
                let rate = mbit * 0.99;
                tc("qdisc add dev up0 root handle 1: htb default 20")?;
                tc(&format!(
                    "class add dev up0 parent 1: classid 1:1 htb rate {rate}mbit burst 3k cburst 3k"
                ))?;
                tc(&format!(
                    "class add dev up0 parent 1:1 classid 1:10 htb rate 10mbit ceil {rate}mbit prio 0 burst 3k cburst 3k"
                ))?;
                tc(&format!(
                    "class add dev up0 parent 1:1 classid 1:20 htb rate {}mbit ceil {rate}mbit prio 1 burst 3k cburst 3k",
                    rate - 10.0
                ))?;
                tc(&format!(
                    "filter add dev up0 parent 1: protocol ip u32 match ip src {}/32 flowid 1:10",
                    ip(GUESTS[0])
                ))?;
            }
        }
        Ok(())
    }

    /// Bytes on the wire that were sent toward the host's end.
    pub fn sent_bytes(&self) -> anyhow::Result<u64> {
        self.namespace.enter()?;
        let text = std::fs::read_to_string("/proc/thread-self/net/dev")?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix("up0:")).context("up0")?;
        // The ninth and tenth columns are bytes and frames sent.
        let mut numbers = line.split_whitespace().skip(8).map_while(|word| word.parse::<u64>().ok());
        let (bytes, frames) = numbers.next().zip(numbers.next()).context("bytes of up0")?;
        Ok(bytes + frames * WIRE_OVERHEAD)
    }

    /// Starts the neighbour's load at full speed; ended with [`NetTestBed::stop_neighbour`].
    pub fn start_neighbour(&mut self, udp: bool) -> anyhow::Result<Process> {
        let (protocol, size) = if udp { ("udp", "1400") } else { ("tcp", "64k") };
        let script = format!(
            "fio --name=n --ioengine=net --protocol={protocol} --hostname={} --port={SINK} --rw=write --bs={size} \
             --size=100g --time_based --runtime=600 >/run/load.log 2>&1",
            ip(HOST)
        );
        Ok(self.guests[1].spawn(&["sh", "-c", &script])?)
    }

    /// Starts the neighbour's TCP load at full speed after `wait`; it ends by itself.
    pub fn send_later(&mut self, wait: Duration, length: Duration) -> anyhow::Result<()> {
        let script = format!(
            "sleep {}; fio --name=n --ioengine=net --protocol=tcp --hostname={} --port={SINK} --rw=write --bs=64k \
             --size=100g --time_based --runtime={} >/run/load.log 2>&1",
            wait.as_secs(),
            ip(HOST),
            length.as_secs()
        );
        self.guests[1].spawn(&["sh", "-c", &script])?;
        Ok(())
    }

    /// Ends the neighbour's load.
    pub fn stop_neighbour(&mut self, process: Process) -> anyhow::Result<()> {
        command(&mut self.guests[1], "killall -9 fio; true")?;
        let begin = Instant::now();
        while self.guests[1].poll(process)?.is_none() {
            if begin.elapsed() > COMMAND {
                bail!("the neighbour's load does not end");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Seconds in which the victim sends this many bytes by TCP to the host's end.
    pub fn tcp_seconds(&mut self, bytes: u64) -> anyhow::Result<f64> {
        self.namespace.enter()?;
        let listener = std::net::TcpListener::bind((ip(HOST).as_str(), 0))?;
        let port = listener.local_addr()?.port();
        let receiving = std::thread::spawn(move || -> std::io::Result<(u64, Duration)> {
            let (mut stream, _) = listener.accept()?;
            let begin = Instant::now();
            let received = std::io::copy(&mut stream, &mut std::io::sink())?;
            Ok((received, begin.elapsed()))
        });
        command(
            &mut self.guests[0],
            &format!(
                "fio --name=n --ioengine=net --protocol=tcp --hostname={} --port={port} --rw=write --bs=64k --size={bytes}",
                ip(HOST)
            ),
        )?;
        let (received, time) = receiving.join().map_err(|_| anyhow::anyhow!("a defect"))??;
        // fio adds a message at the end.
        if received < bytes {
            bail!("{received} of {bytes} bytes arrived");
        }
        Ok(time.as_secs_f64())
    }

    /// Starts a sink for the neighbour's load; ended when dropped.
    pub fn sink(&self) -> anyhow::Result<Sink> {
        self.namespace.enter()?;
        Sink::start(&ip(HOST), SINK)
    }

    /// CPU time of the neighbour's QEMU, and of the I/O domain.
    pub fn cpu_time(&self) -> anyhow::Result<Nanos> {
        let root = rtvirtio_kernel::Root::default();
        let qemu = rtvirtio_kernel::process::cpu_time(&root, self.guests[1].handle().process.pid)?;
        Ok(Nanos(qemu.as_nanos() as u64 + self.switch_time()?.0))
    }

    /// CPU time of the I/O domain, or of the switch.
    pub fn switch_time(&self) -> anyhow::Result<Nanos> {
        let switch = self.domain.as_ref().or(self.ovs.as_ref().map(OvsDpdk::process));
        let time = switch.map_or(Ok(Duration::ZERO), Backend::cpu_time)?;
        Ok(Nanos(time.as_nanos() as u64))
    }

    /// Kills the I/O domain and restarts it with a link of this rate; returns the time of the kill.
    ///
    /// # Errors
    /// When there is none, or it does not start.
    pub fn crash(&mut self, link: Option<f64>) -> anyhow::Result<Instant> {
        self.namespace.enter()?;
        let begin = Instant::now();
        self.domain.take().context("no domain")?.kill()?;
        let config = domain_config(self.dir.path(), link, &self.options) + &self.disks;
        let domain = Backend::start_domain(self.dir.path(), &config)?;
        bind(domain.pid(), &[self.core])?;
        self.domain = Some(domain);
        Ok(begin)
    }
}

impl Drop for NetTestBed {
    fn drop(&mut self) {
        // The guests end first: they wait for a stopped switch until their time limit.
        if let Some(ovs) = &self.ovs {
            let _ = ovs.set_stopped(false);
        }
    }
}

/// Runs a shell command in a guest.
pub fn command(guest: &mut QemuGuest, script: &str) -> anyhow::Result<()> {
    let out = guest.exec(&["sh", "-c", script], COMMAND)?;
    if !out.success() {
        bail!("in the guest: {script}: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}
