//! An I/O domain for each test, and its clients.
#![allow(dead_code, reason = "each test program uses a part")]

pub mod guest;
pub mod resources;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rtvirtio_domain_client::{BlkCompletion, BlkRequest, Client, ClientQueue, DirtyPages, Options};
use rtvirtio_domain_config::File;
use rtvirtio_domain_resources::handover::{Opened, send_descriptors};
use rtvirtio_testkit::HANG;
use rtvirtio_testkit::site::wait_for;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use vhost::VhostBackend as _;
use vhost::vhost_user::VhostUserFrontend as _;

/// A running process; ended when dropped.
pub struct Iod {
    child: Child,
    dir: PathBuf,
}

/// An I/O domain with the disks `a`, for an attacker, and `b`, for a neighbour.
pub struct AttackedDomain {
    pub dir: tempfile::TempDir,
    pub iod: Iod,
}

impl AttackedDomain {
    pub fn new() -> Self {
        Self::with("")
    }

    /// With further keys of disk `a`.
    pub fn with(keys: &str) -> Self {
        let dir = disk(64);
        let iod = Iod::start(dir.path(), &with_keys(&two_disks(dir.path(), 64, ""), "a", keys));
        Self { dir, iod }
    }

    pub fn socket(&self, disk: &str) -> PathBuf {
        self.dir.path().join(disk)
    }
}

pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_rtvirtio-iod"))
}

impl Iod {
    /// Starts one on a configuration, which is written into `dir`.
    pub fn start(dir: &Path, config: &str) -> Self {
        Self::try_start(dir, config).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The same; returns its standard error when it does not start.
    pub fn try_start(dir: &Path, config: &str) -> Result<Self, String> {
        Self::with_log(dir, config, Stdio::piped())
    }

    /// The same with another standard error, which is not returned then.
    pub fn with_log(dir: &Path, config: &str, log: Stdio) -> Result<Self, String> {
        Self::with_command(dir, config, program().stderr(log))
    }

    /// The same by a command, which may have an environment of its own.
    pub fn with_command(dir: &Path, config: &str, command: &mut Command) -> Result<Self, String> {
        let file = dir.join("iod.toml");
        configure(dir, config);
        let mut child = command.arg("--config").arg(&file).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line == "ready\n" {
            return Ok(Self { child, dir: dir.to_owned() });
        }
        let mut stderr = String::new();
        if let Some(mut log) = child.stderr.take() {
            log.read_to_string(&mut stderr).unwrap();
        }
        let _ = child.wait();
        Err(stderr)
    }

    /// Kills it, as a crash does.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Ends it as a service manager does; returns its status and standard error.
    pub fn end(mut self) -> (ExitStatus, String) {
        self.signal(Signal::TERM);
        let status = self.child.wait().unwrap();
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (status, stderr)
    }

    /// Ends it, which has to succeed; returns its standard error.
    pub fn end_well(self) -> String {
        let (status, stderr) = self.end();
        assert!(status.success(), "{status}: {stderr}");
        stderr
    }

    /// The reply to `status`.
    pub fn status(&self) -> String {
        self.command("status")
    }

    pub fn status_json(&self) -> Value {
        serde_json::from_str(&self.status()).unwrap()
    }

    /// The status of a disk.
    pub fn disk(&self, name: &str) -> Value {
        named(&self.status_json()["vms"], name)
    }

    /// Reloads the file: opens the disks and ports that come and passes them on, as `rtvirtio iod
    /// reload` does. Returns the reply.
    pub fn reload(&self, force: bool) -> Value {
        let found: Value = serde_json::from_str(&self.command("preview")).unwrap();
        if found.get("error").is_some() {
            return found;
        }
        let names = |key: &str| -> std::collections::BTreeSet<String> {
            found[key].as_array().unwrap().iter().map(|n| n.as_str().unwrap().to_owned()).collect()
        };
        let (disks, ports) = (names("attach"), names("attach_ports"));
        let file = File::load(&self.dir.join("iod.toml")).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let opened = match Opened::open(&file, [&disks, &ports], self.pid(), uid) {
            Ok(opened) => opened,
            Err(e) => return serde_json::json!({ "error": e.to_string() }),
        };
        let stream = UnixStream::connect(self.dir.join("ctl")).unwrap();
        opened.send_reload(&stream, force).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        let reply: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"));
        if reply.get("changed").is_some() {
            opened.release();
        }
        reply
    }

    pub fn command(&self, command: &str) -> String {
        self.ask(&format!("{{\"command\": \"{command}\"}}"), &[])
    }

    /// The reply to a request, with descriptors that are sent ahead of it.
    pub fn ask(&self, request: &str, descriptors: &[BorrowedFd<'_>]) -> String {
        let mut stream = UnixStream::connect(self.dir.join("ctl")).unwrap();
        if !descriptors.is_empty() {
            send_descriptors(&stream, descriptors).unwrap();
        }
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }
}

/// The entry of a list in a status.
pub fn named(list: &Value, name: &str) -> Value {
    let found = list.as_array().unwrap().iter().find(|entry| entry["name"] == name);
    found.unwrap_or_else(|| panic!("{name}: {list}")).clone()
}

/// What a reload has changed.
pub fn changed(reply: &Value) -> Vec<String> {
    let list = reply["changed"].as_array().unwrap_or_else(|| panic!("{reply}"));
    list.iter().map(|c| c.as_str().unwrap().to_owned()).collect()
}

/// Waits until there is a value.
pub fn until<T>(what: &str, mut value: impl FnMut() -> Option<T>) -> T {
    let mut found = None;
    wait_for(what, || {
        found = value();
        found.is_some()
    });
    found.unwrap()
}

/// Waits until links have a carrier as the kernel's other parts know it, up to a second later than
/// the driver on a busy machine: until then a bridge drops what comes.
pub fn wait_for_links(links: &[&str]) {
    wait_for(&format!("the carrier of {links:?}"), || {
        let out = Command::new("ip").args(["-json", "link", "show"]).output().unwrap();
        let all: Vec<Value> = serde_json::from_slice(&out.stdout).unwrap();
        let is_up = |name: &&str| all.iter().any(|l| l["ifname"] == **name && l["operstate"] == "UP");
        links.iter().all(is_up)
    });
}

/// The output of `--check` on the configuration in a directory.
pub fn check(dir: &Path) -> Output {
    program().arg("--config").arg(dir.join("iod.toml")).arg("--check").output().unwrap()
}

/// Replaces the configuration as an editor does, by renaming.
pub fn configure(dir: &Path, config: &str) {
    let text = format!("control = \"{}\"\n{config}", dir.join("ctl").display());
    std::fs::write(dir.join("iod.toml.new"), text).unwrap();
    std::fs::rename(dir.join("iod.toml.new"), dir.join("iod.toml")).unwrap();
}

impl Drop for Iod {
    fn drop(&mut self) {
        // `wait` after `kill` or `end` returns the known status.
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.signal(Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

/// A guest on the other disk that writes and reads at depth 1, and checks the data.
pub struct Neighbour {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Duration>>,
}

/// Durations of a neighbour's write-read pairs.
#[derive(Clone, Copy, Debug)]
pub struct Pairs {
    pub n: usize,
    pub p50: Duration,
    pub p999: Duration,
    pub longest: Duration,
}

impl Neighbour {
    pub fn start(socket: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut client = Client::connect(&socket, Options::default()).unwrap();
            let mut took = Vec::new();
            // One pair at least, however soon it is to end.
            while took.is_empty() || !stopped.load(Ordering::Relaxed) {
                let n = took.len() as u64;
                let data: Vec<u8> = (0..4_096u64).map(|i| (i ^ n) as u8).collect();
                let sector = n % 100 * 8;
                let begin = Instant::now();
                assert_eq!(request(&mut client, &write(sector, 4_096), Some(&data)).0, 0);
                let (status, got) = request(&mut client, &read(sector, 4_096), None);
                assert_eq!(status, 0, "pair {n}");
                let wrong = got.iter().zip(&data).filter(|(got, wrote)| got != wrote).count();
                assert!(wrong == 0, "pair {n}: {wrong} bytes differ, which begin {:?}", got.get(..8));
                took.push(begin.elapsed());
            }
            took
        });
        Self { stop, thread }
    }

    /// Number of pairs, and the longest of them.
    pub fn end(self) -> (u64, Duration) {
        let pairs = self.measured();
        (pairs.n as u64, pairs.longest)
    }

    /// The same with percentiles.
    pub fn measured(self) -> Pairs {
        self.stop.store(true, Ordering::Relaxed);
        let mut took = self.thread.join().expect("the neighbour got every answer");
        took.sort_unstable();
        let at = |q: f64| took.get((took.len() as f64 * q) as usize).copied().unwrap_or_default();
        let longest = took.last().copied().unwrap_or_default();
        Pairs { n: took.len(), p50: at(0.5), p999: at(0.999), longest }
    }
}

/// A directory on a file system with direct I/O, with a disk file of `mib` MiB.
pub fn disk(mib: u64) -> tempfile::TempDir {
    let dir = rtvirtio_testkit::disk_dir().unwrap();
    let file = std::fs::File::create(dir.path().join("disk")).unwrap();
    file.set_len(mib << 20).unwrap();
    dir
}

/// Two VMs, each on one half of the disk.
pub fn two_disks(dir: &Path, mib: u64, more: &str) -> String {
    let d = dir.display();
    let half = mib / 2;
    format!(
        "[[device]]\nname = \"d\"\nwindow = 4\n{more}\n\
         [[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{d}/disk\"\nsize = \"{half}MiB\"\n\
         [[device.disk]]\nname = \"b\"\nsocket = \"{d}/b\"\npath = \"{d}/disk\"\noffset = \"{half}MiB\"\nsize = \"{half}MiB\"\n"
    )
}

/// A configuration with further keys of a disk.
pub fn with_keys(config: &str, disk: &str, keys: &str) -> String {
    let name = format!("name = \"{disk}\"\n");
    assert!(config.contains(&name), "{disk}: {config}");
    config.replace(&name, &(name.clone() + keys))
}

/// The next completion; `None` when it hangs.
pub fn completion(queue: &mut ClientQueue) -> Option<BlkCompletion> {
    let begin = Instant::now();
    while begin.elapsed() < HANG {
        if let Some(answer) = queue.pop_used() {
            return Some(answer);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    None
}

/// Submits one request and waits for it; returns status and data.
pub fn request(client: &mut Client, ask: &BlkRequest, data: Option<&[u8]>) -> (u8, Vec<u8>) {
    let mem = std::sync::Arc::clone(&client.mem);
    let queue = &mut client.queues[0];
    let slot = queue.push_with(ask, data.unwrap_or_default()).unwrap();
    let at = queue.data(slot);
    queue.notify().unwrap();
    let answer = completion(queue).expect("an answer");
    assert_eq!(answer.slot, slot);
    (answer.status, mem.read(at, ask.len as usize))
}

pub const fn read(sector: u64, len: u32) -> BlkRequest {
    BlkRequest { kind: 0, priority: 0, sector, len }
}

pub const fn write(sector: u64, len: u32) -> BlkRequest {
    BlkRequest { kind: 1, priority: 0, sector, len }
}

pub const FLUSH: BlkRequest = BlkRequest { kind: 4, priority: 0, sector: 0, len: 0 };

/// A discard (11) or zeroing (13), of a [`range`].
pub const fn deallocate(kind: u32) -> BlkRequest {
    BlkRequest { kind, priority: 0, sector: 0, len: 16 }
}

pub fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Bytes that differ by the seed and by the sector.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(31) ^ (i >> 9)) as u8).collect()
}

/// Shares a log of all memory and begins to use it.
pub fn begin_log(client: &mut Client) -> DirtyPages {
    let log = DirtyPages::covering(&client.mem).unwrap();
    client.share_log(&log).unwrap();
    client.set_logging(true).unwrap();
    log
}

/// Accepts all that the back end offers, memory of requests in flight too.
pub fn accept_all(client: &mut Client) {
    let there = client.raw().get_protocol_features().unwrap();
    client.raw().set_protocol_features(there).unwrap();
}

/// Disables and enables the first queue: everything that the back end writes is written then.
pub fn settle(client: &mut Client) {
    client.raw().set_vring_enable(0, false).unwrap();
    client.raw().set_vring_enable(0, true).unwrap();
}

/// Starts the first queue, which was stopped, at an index.
pub fn start_at(client: &mut Client, base: u16) {
    let kick = client.queues[0].kick.try_clone().unwrap();
    client.raw().set_vring_base(0, base).unwrap();
    client.raw().set_vring_kick(0, &kick).unwrap();
}

/// Writes 32 blocks, changes something meanwhile, and checks the completions and the last block.
pub fn change_under_load(client: &mut Client, round: u64, change: impl FnOnce(&mut Client)) {
    for n in 0..32_u64 {
        let data = vec![(round + n) as u8; 4_096];
        let sector = (round * 32 + n) * 8 % 60_000;
        client.queues[0].push_with(&write(sector, 4_096), &data).expect("a free slot");
    }
    client.queues[0].notify().unwrap();
    change(client);
    for _ in 0..32 {
        let done = completion(&mut client.queues[0]).expect("an answer");
        assert_eq!(done.status, 0, "round {round}");
    }
    let (status, got) = request(client, &read((round * 32 + 31) * 8 % 60_000, 4_096), None);
    assert!(status == 0 && got.iter().all(|byte| *byte == (round + 31) as u8), "round {round}");
}

/// A client with requests of up to 64 KiB.
pub fn connect(socket: &Path) -> Client {
    Client::connect(socket, Options { size: 256, buffer: 65_536, ..Options::default() }).unwrap()
}
