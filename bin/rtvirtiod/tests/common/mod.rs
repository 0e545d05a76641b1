//! The service with directories of its own, and QEMU machines that it keeps contracts for.
#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod browser;
pub mod busy;
pub mod disk;

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rtvirtio_testkit::site::{Site, program, text, wait_for};
use rtvirtio_testkit::{HANG, Machine, Need, has};
use serde_json::Value;

/// The service's process; killed when this is dropped, as `kill -9` does.
pub struct Service(pub Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Directories, and perhaps a service on them. The service goes first: what is in force is put back
/// by the site.
pub struct Rig {
    pub service: Option<Service>,
    pub site: Site,
    _alone: MutexGuard<'static, ()>,
}

/// Budgets of all rigs come out of one host's: one rig at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Whether CPU contracts of real machines can be had here.
pub fn can_run(test: &str) -> bool {
    has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU])
}

impl Rig {
    pub fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let rig = Self { service: None, site: Site::new(), _alone: alone };
        fs::create_dir_all(rig.contracts()).unwrap();
        rig
    }

    pub fn contracts(&self) -> PathBuf {
        self.site.dir.path().join("contracts.d")
    }

    pub fn socket(&self) -> PathBuf {
        self.site.run_dir().join("rtvirtiod.sock")
    }

    /// `rtvirtiod` on these directories, with further options.
    pub fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(program("rtvirtiod"));
        command
            .args(["--config", self.config().to_str().unwrap()])
            .args(["--contracts", self.contracts().to_str().unwrap()])
            .args(options)
            .env("RTVIRTIO_RUN_DIR", self.site.run_dir())
            .env("RTVIRTIO_STATE_DIR", self.site.state_dir())
            .stdin(Stdio::null());
        command
    }

    pub fn config(&self) -> PathBuf {
        self.site.dir.path().join("rtvirtiod.toml")
    }

    /// Starts it, and waits until it answers.
    pub fn start(&mut self, options: &[&str]) {
        let command = self.command(options);
        self.run(command);
    }

    /// Runs the service as this command, and waits until it answers.
    pub fn run(&mut self, mut command: Command) {
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(self.site.dir.path().join("rtvirtiod.log"))
            .unwrap();
        let child = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        self.service = Some(Service(child));
        wait_for("the service", || std::os::unix::net::UnixStream::connect(self.socket()).is_ok());
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.service = None;
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.site.dir.path().join("rtvirtiod.log")).unwrap_or_default()
    }

    /// What `rtvirtio status --json` says of the service.
    pub fn status(&self) -> Value {
        self.site.json(&["status"]).1["service"].clone()
    }

    /// One VM of it.
    pub fn vm(&self, name: &str) -> Value {
        let status = self.status();
        let vms = status["vms"].as_array().cloned().unwrap_or_default();
        vms.into_iter().find(|vm| vm["name"] == name).unwrap_or(Value::Null)
    }

    pub fn wait_state(&self, name: &str, state: &str) {
        let begin = std::time::Instant::now();
        loop {
            let last = self.vm(name);
            if last["state"] == state {
                return;
            }
            assert!(begin.elapsed() < HANG, "{name} is not {state}: {last:#}\n{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// A metric without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let stream = std::os::unix::net::UnixStream::connect(self.socket()).unwrap();
        let text = answer(stream, "GET", "/metrics", "localhost").1;
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name}: {text}"))
    }

    /// Runs `rtvirtio contract ...` and expects success.
    pub fn contract(&self, args: &[&str]) -> String {
        let contracts = self.contracts();
        let all = [&["contract"], args, &["--contracts", contracts.to_str().unwrap()]].concat();
        self.site.ok(&all)
    }

    /// The events of the service's file.
    pub fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.site.state_dir().join("history.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// A machine with room for one more vCPU, and its spec.
pub struct Plc {
    pub machine: Option<Machine>,
    pub name: String,
    dir: PathBuf,
    options: Vec<String>,
}

impl Plc {
    pub fn start(rig: &Rig, name: &str) -> Self {
        Self::named(rig, name, rig.site.vm(name), &[])
    }

    /// With a name of its own choice and further options of QEMU. A VM with a CPU contract has a
    /// name of [`Site::vm`], by which its group is found again.
    pub fn named(rig: &Rig, dir: &str, name: String, options: &[&str]) -> Self {
        let dir = rig.site.dir.path().join(dir);
        fs::create_dir_all(&dir).unwrap();
        let options = options.iter().map(|&o| o.to_owned()).collect();
        let mut plc = Self { machine: None, name, dir, options };
        plc.boot();
        plc
    }

    /// Starts it again, at the same socket.
    pub fn boot(&mut self) {
        let options = ["-machine", "q35", "-smp", "1,maxcpus=2"];
        let options = [&options[..], &self.options.iter().map(String::as_str).collect::<Vec<_>>()].concat();
        self.machine = None;
        let _ = fs::remove_file(self.dir.join("qmp"));
        self.machine = Some(Machine::start(&self.dir, &self.name, &options));
    }

    pub fn qmp(&self) -> PathBuf {
        self.dir.join("qmp")
    }

    pub fn spec(&self, rig: &Rig, budget: &str, more: &str) -> PathBuf {
        let path = rig.site.dir.path().join(format!("{}.spec.toml", self.name));
        let spec = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\ncpu = {{ budget = \"{budget}\", period = \"20ms\" }}\n\
             {more}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            self.name,
            self.qmp().display()
        );
        fs::write(&path, spec).unwrap();
        path
    }

    /// Sets its contract.
    pub fn contract(&self, rig: &Rig, budget: &str, more: &str) {
        let spec = self.spec(rig, budget, more);
        rig.contract(&["set", &self.name, spec.to_str().unwrap()]);
    }

    /// Plugs the second vCPU in.
    pub fn plug(&self) {
        self.machine.as_ref().unwrap().plug_vcpu();
    }

    /// CPUs that a vCPU may use; `None` where the VM has none of this number.
    pub fn cpus_of_vcpu(&self, vcpu: u32) -> Option<String> {
        self.machine.as_ref()?.vcpu_cpus(vcpu)
    }

    /// Policy and priority of its vCPUs.
    pub fn vcpus(&self, rig: &Rig) -> Vec<(String, u64)> {
        let pid = self.machine.as_ref().unwrap().pid().to_string();
        let all = rig.site.json(&["threads", &pid]).1;
        let threads = all[0]["threads"].as_array().unwrap().iter();
        let vcpus = threads.filter(|t| t["role"]["kind"] == "vcpu");
        vcpus.map(|t| (t["policy"].as_str().unwrap().to_owned(), t["priority"].as_u64().unwrap())).collect()
    }

    /// The group of its contract.
    pub fn group(&self) -> PathBuf {
        Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{}", self.name))
    }

    pub fn budget(&self) -> Option<String> {
        let text = fs::read_to_string(self.group().join("cpu.rt_runtime_us")).ok()?;
        Some(text.trim().to_owned())
    }
}

/// Status and body of a request over HTTP.
pub fn answer<S: Read + Write>(stream: S, method: &str, path: &str, host: &str) -> (u16, String) {
    answer_of(stream, method, path, host).unwrap()
}

/// The same of a service that may end meanwhile.
pub fn try_answer<S: Read + Write>(stream: S, method: &str, path: &str) -> Option<(u16, String)> {
    answer_of(stream, method, path, "localhost").ok()
}

/// The same with a body, of which a service that refuses it need not read all.
pub fn answer_of_body<S: Read + Write>(
    mut stream: S,
    method: &str,
    path: &str,
    body: &[u8],
) -> (u16, String) {
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n")
        .unwrap();
    let _ = stream.write_all(body);
    read_answer(stream).unwrap()
}

fn answer_of<S: Read + Write>(
    mut stream: S,
    method: &str,
    path: &str,
    host: &str,
) -> std::io::Result<(u16, String)> {
    write!(stream, "{method} {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n")?;
    read_answer(stream)
}

fn read_answer<S: Read>(mut stream: S) -> std::io::Result<(u16, String)> {
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let cut = || std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(cut)?;
    let status = head.split_ascii_whitespace().nth(1).and_then(|code| code.parse().ok());
    Ok((status.ok_or_else(cut)?, body.to_owned()))
}

/// An address on loopback that is free now; another test would have to take it in this moment.
pub fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A spec that sets nothing, of a VM that never runs.
pub fn spec_of_none(name: &str) -> String {
    format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{name}\"\nqmp = \"/nowhere/{name}.qmp\"\n[[vm.task]]\nname = \"t\"\n\
         op = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\ntarget = {{ percentile = \"p99\", latency = \"10ms\" }}\n"
    )
}

/// Writes a contract of it.
pub fn contract_of_none(rig: &Rig, name: &str) {
    fs::write(rig.contracts().join(format!("{name}.toml")), spec_of_none(name)).unwrap();
}

pub fn output_text(out: &std::process::Output) -> String {
    text(&out.stdout) + &text(&out.stderr)
}
