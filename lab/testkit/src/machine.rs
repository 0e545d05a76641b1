//! A QEMU whose guest has no system, for tests of its threads and its monitor.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::HANG;

/// Bytes of the firmware image.
const FIRMWARE: usize = 64 << 10;

/// A thread of a [`Machine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadCpus {
    pub tid: u32,
    pub name: String,
    /// CPUs that it may use: `0-3,6`.
    pub cpus: String,
}

/// Text of a spec with one VM, found by its monitor, that reads from a device; with further keys of
/// the VM.
#[must_use]
pub fn vm_spec(device: &str, vm: &str, qmp: &Path, keys: &str) -> String {
    format!(
        "[device]\npath = \"{device}\"\n[[vm]]\nname = \"{vm}\"\nqmp = \"{}\"\n{keys}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
        qmp.display()
    )
}

/// An emulated machine in its firmware. Killed when this is dropped.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    qmp: PathBuf,
}

impl Machine {
    /// Starts a machine of this name, its monitor in `dir`, with further options of QEMU, and waits
    /// until the monitor answers: its socket exists before the threads of the vCPUs do. It runs in
    /// `dir`.
    ///
    /// # Panics
    /// When QEMU does not start; ask [`crate::has`] for [`crate::Need::QEMU`] before.
    #[must_use]
    pub fn start(dir: &Path, name: &str, options: &[&str]) -> Self {
        crate::sweep();
        let qmp = dir.join("qmp");
        let child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc", "-accel", "tcg"])
            .args(["-m", "64", "-name", &format!("{name},debug-threads=on")])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())])
            .args(options)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let machine = Self { child: child.expect("qemu-system-x86_64"), qmp };
        // The nice value 0, also where the tests run at another: the kernel gives 0 to children of
        // real-time threads. Without root it cannot be changed.
        let pid = rustix::process::Pid::from_child(&machine.child);
        let _ = rustix::process::setpriority_process(Some(pid), 0);
        let start = Instant::now();
        while let Err(error) = machine.ask() {
            assert!(start.elapsed() < HANG, "QEMU's monitor does not answer: {error}");
            thread::sleep(Duration::from_millis(20));
        }
        machine
    }

    /// Sends a command to the monitor. QEMU's main loop replies once the machine is built.
    fn ask(&self) -> io::Result<()> {
        let mut monitor = UnixStream::connect(&self.qmp)?;
        monitor.set_read_timeout(Some(HANG))?;
        monitor.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-status\"}")?;
        for line in BufReader::new(monitor).lines() {
            if line?.contains("\"status\"") {
                return Ok(());
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    /// Starts a machine whose guest computes from its first instruction on and never ends.
    #[must_use]
    pub fn spinning(dir: &Path, name: &str, options: &[&str]) -> Self {
        // The reset vector lies 16 bytes below the end of the firmware: `jmp` to itself.
        let mut firmware = vec![0x90; FIRMWARE];
        firmware[FIRMWARE - 16..FIRMWARE - 14].copy_from_slice(&[0xeb, 0xfe]);
        let path = dir.join("spin.bin");
        fs::write(&path, firmware).expect("the firmware");
        let path = path.display().to_string();
        Self::start(dir, name, &[options, &["-bios", &path]].concat())
    }

    /// Sends a command to the monitor, and returns what it returns. The monitor serves one client
    /// at a time, and waits for its end.
    pub fn execute(&self, command: &str, arguments: &Value) -> Value {
        let mut monitor = UnixStream::connect(&self.qmp).expect("the monitor");
        monitor.set_read_timeout(Some(HANG)).expect("a timeout");
        let commands =
            [json!({"execute": "qmp_capabilities"}), json!({"execute": command, "arguments": arguments})];
        commands.iter().for_each(|one| write!(monitor, "{one}").expect("the monitor"));
        let answers = BufReader::new(monitor).lines().map(|line| line.expect("an answer of the monitor"));
        let mut answers = answers.filter_map(|line| serde_json::from_str::<Value>(&line).ok());
        // The second answer; events are none.
        let is_answer = |of: &Value| of.get("return").is_some() || of.get("error").is_some();
        let mut answer = answers.by_ref().filter(is_answer).nth(1).expect("an answer of the monitor");
        assert!(answer.get("error").is_none(), "{command}: {answer}");
        answer["return"].take()
    }

    /// Plugs one more vCPU in; the machine needs `maxcpus` for it.
    pub fn plug_vcpu(&self) {
        let all = self.execute("query-hotpluggable-cpus", &json!({}));
        let all = all.as_array().expect("a list of CPUs");
        let free = all.iter().find(|cpu| cpu.get("qom-path").is_none()).expect("room for a vCPU");
        let mut arguments = free["props"].clone();
        arguments["driver"] = free["type"].clone();
        self.execute("device_add", &arguments);
    }

    /// Threads of QEMU that live, each with the CPUs that it may use as the kernel lists them.
    #[must_use]
    pub fn threads(&self) -> Vec<ThreadCpus> {
        let dir = format!("/proc/{}/task", self.pid());
        let one = |tid: u32| {
            let read = |name: &str| fs::read_to_string(format!("{dir}/{tid}/{name}")).ok();
            let status = read("status")?;
            let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            Some(ThreadCpus { tid, name: read("comm")?.trim_end().to_owned(), cpus: cpus.trim().to_owned() })
        };
        let mut tids: Vec<u32> = fs::read_dir(&dir)
            .expect("its threads")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        tids.sort_unstable();
        tids.into_iter().filter_map(one).collect()
    }

    /// CPUs of the thread of this vCPU; `None` where it has none.
    #[must_use]
    pub fn vcpu_cpus(&self, vcpu: u32) -> Option<String> {
        let name = format!("CPU {vcpu}/");
        self.threads().into_iter().find(|thread| thread.name.starts_with(&name)).map(|thread| thread.cpus)
    }

    /// Process id of QEMU.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Socket of the monitor.
    #[must_use]
    pub fn qmp(&self) -> &Path {
        &self.qmp
    }

    /// Kills QEMU, as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}
