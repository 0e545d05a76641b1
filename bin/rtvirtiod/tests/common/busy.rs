//! Machines that read from one disk under a plan: something of all that the service shows.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rtvirtio_testkit::site::PROFILE;
use serde_json::Value;

use super::disk::Disk;
use super::{Plc, Rig};

/// A controller with targets of which one cannot be proven so soon, and a neighbour that misses its
/// own on any machine.
pub struct BusyPlant {
    loads: Vec<Load>,
    pub plc: Plc,
    pub hist: Plc,
    disk: Disk,
    pub rig: Rig,
}

impl BusyPlant {
    /// Machines, profile and contracts; the service is not started yet.
    pub fn new(test: &str) -> Option<Self> {
        let rig = Rig::new();
        let disk = Disk::new(test, &rig)?;
        let profiles = rig.site.state_dir().join("profiles");
        fs::create_dir_all(&profiles).unwrap();
        let mut profile: Value = serde_json::from_str(&fs::read_to_string(PROFILE).unwrap()).unwrap();
        profile["device"] = disk.device.name.clone().into();
        fs::write(profiles.join(format!("{}.json", disk.device.name)), profile.to_string()).unwrap();
        let drive =
            format!("file=/dev/{},format=raw,if=none,id=d,cache=none,file.locking=off", disk.device.name);
        // A second monitor for the load: each serves one client at a time.
        let options = [
            "-drive",
            &drive,
            "-device",
            "virtio-blk-pci,id=disk,drive=d,share-rw=on",
            "-qmp",
            "unix:load,server=on,wait=off",
        ];
        let machine = |name: &str| Plc::named(&rig, name, name.to_owned(), &options);
        let (plc, hist) = (machine("plc"), machine("hist"));
        disk.place(&plc, 1);
        disk.place(&hist, 1);
        let loads = vec![Load::start(&plc, 1), Load::start(&hist, 16)];
        let plant = Self { loads, plc, hist, disk, rig };
        fs::write(plant.rig.config(), "compare = \"200ms\"\nobserve = \"500ms\"\n[plan]\n").unwrap();
        let targets = "targets = [{ percentile = \"p99\", latency = \"100ms\" }, { percentile = \"p99.99\", latency = \"5s\" }]";
        plant.contract(&plant.plc, "high", &format!("name = \"control\"\nrate = \"50/s\"\n{targets}"));
        let target = "target = { percentile = \"p50\", latency = \"1us\" }";
        plant.contract(&plant.hist, "low", &format!("name = \"scan\"\ndepth = 16\n{target}"));
        Some(plant)
    }

    fn contract(&self, vm: &Plc, criticality: &str, task: &str) {
        let text = format!(
            "[device]\npath = \"/dev/{}\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\ncriticality = \"{criticality}\"\n\
             [[vm.task]]\nop = \"read\"\nblock = \"4KiB\"\n{task}\n",
            self.disk.device.name,
            vm.name,
            vm.qmp().display()
        );
        fs::write(self.rig.contracts().join(format!("{}.toml", vm.name)), text).unwrap();
    }

    /// Puts back what is in force before the machines and the disk go.
    pub fn end(mut self) {
        self.rig.kill();
        self.rig.site.ok(&["revert"]);
        self.loads.clear();
    }
}

/// Reads of a machine without a system, at which QEMU's monitor asks the emulated disk. Ends when
/// dropped.
struct Load {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    /// So many at a time.
    fn start(vm: &Plc, depth: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (socket, stopped) = (vm.qmp().with_file_name("load"), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            // It ends with the machine too.
            let _ = read_until(&socket, depth, &stopped);
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

fn read_until(socket: &Path, depth: u64, stop: &AtomicBool) -> std::io::Result<()> {
    let mut monitor = UnixStream::connect(socket)?;
    let mut answers = BufReader::new(monitor.try_clone()?).lines();
    monitor.write_all(b"{\"execute\":\"qmp_capabilities\"}")?;
    let mut block = 0;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..depth {
            block = (block + 1) % 4096;
            let command = format!("qemu-io d \\\"aio_read -q {} 4k\\\"", block * 4096);
            write!(
                monitor,
                "{{\"execute\":\"human-monitor-command\",\"arguments\":{{\"command-line\":\"{command}\"}}}}"
            )?;
        }
        let mut left = depth;
        while left > 0 {
            let answer = answers.next().ok_or(std::io::ErrorKind::UnexpectedEof)??;
            left -= u64::from(answer.contains("\"return\""));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
