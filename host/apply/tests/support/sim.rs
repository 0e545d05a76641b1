//! Directory that answers writes as the kernel does. Every rule was measured on Linux 6.18 or read
//! in its source (`block/bfq-iosched.c`, `block/bfq-cgroup.c`, `block/blk-throttle.c`,
//! `block/blk-iocost.c`, `block/elevator.c`).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use rtvirtio_apply::{GuestFiles, Guests, HostFiles};
use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::text;
use rtvirtio_units::io_cost::{CostModel, CostQos};
use rtvirtio_vmm::AgentAddress;

use super::resctrl::RESCTRL;

const HZ: u64 = 250;
pub const DEV: &str = "7:0";
/// Files of a group with the I/O controller, as they are at first.
const IO_FILES: [(&str, &str); 4] =
    [("io.bfq.weight", "default 100\n"), ("io.max", ""), ("io.weight", "default 100\n"), ("io.latency", "")];

pub struct SimKernel {
    root: PathBuf,
}

fn errno(code: rustix::io::Errno) -> io::Error {
    code.into()
}

fn invalid() -> io::Error {
    errno(rustix::io::Errno::INVAL)
}

/// Files of an elevator with their defaults.
fn defaults(elevator: &str) -> &'static [(&'static str, &'static str)] {
    match elevator {
        "bfq" => &[
            ("back_seek_max", "16384"),
            ("low_latency", "1"),
            ("max_budget", "0"),
            ("slice_idle", "8"),
            ("slice_idle_us", "8000"),
            ("strict_guarantees", "0"),
            ("timeout_sync", "124"),
        ],
        "mq-deadline" => &[("async_depth", "256"), ("fifo_batch", "16"), ("read_expire", "500")],
        "kyber" => &[("read_lat_nsec", "2000000"), ("write_lat_nsec", "10000000")],
        _ => &[],
    }
}

/// `async_depth` that an elevator sets at its start.
fn default_depth(elevator: &str, requests: u64) -> u64 {
    if matches!(elevator, "bfq" | "kyber") { requests * 3 / 4 } else { requests }
}

fn number_in(file: &Path) -> u64 {
    fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

impl SimKernel {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root.join(path.as_ref().strip_prefix("/").unwrap_or(path.as_ref()))
    }

    pub fn put(&self, path: impl AsRef<Path>, text: &str) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub fn get(&self, path: impl AsRef<Path>) -> String {
        fs::read_to_string(self.at(path)).unwrap()
    }

    /// A disk with an elevator and its defaults.
    pub fn disk(&self, name: &str, elevator: &str) {
        self.put(format!("/sys/block/{name}/dev"), &format!("{DEV}\n"));
        self.put(format!("/sys/block/{name}/queue/scheduler"), "[none] mq-deadline kyber bfq \n");
        self.put(format!("/sys/block/{name}/queue/nr_requests"), "128\n");
        self.put(format!("/sys/block/{name}/queue/wbt_lat_usec"), "2000\n");
        self.put(format!("/sys/class/block/{name}/dev"), &format!("{DEV}\n"));
        fs::create_dir_all(self.at("/sys/dev/block")).unwrap();
        let _ = symlink(format!("../../block/{name}"), self.at(format!("/sys/dev/block/{DEV}")));
        self.write(Path::new(&format!("/sys/block/{name}/queue/scheduler")), elevator).unwrap();
    }

    /// Moves `async_depth` of a disk from the elevator to the queue, as in Linux 7.
    pub fn with_async_depth(&self, name: &str) {
        let queue = self.at(format!("/sys/block/{name}/queue"));
        let _ = fs::remove_file(queue.join("iosched/async_depth"));
        let current = text::elevators(&fs::read_to_string(queue.join("scheduler")).unwrap()).unwrap().current;
        let depth = default_depth(&current, number_in(&queue.join("nr_requests")));
        fs::write(queue.join("async_depth"), format!("{depth}\n")).unwrap();
    }

    pub fn boot(&self, id: &str) {
        self.put("/proc/sys/kernel/random/boot_id", id);
    }

    pub fn v1(&self, groups: &[&str]) {
        self.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup/blkio rw - cgroup cgroup rw,blkio\n");
        for group in groups {
            let dir = PathBuf::from("/sys/fs/cgroup/blkio").join(group.trim_start_matches('/'));
            self.put(dir.join("blkio.bfq.weight"), "100\n");
            self.put(dir.join("blkio.bfq.weight_device"), "default 100\n");
            for file in ["read_bps", "write_bps", "read_iops", "write_iops"] {
                self.put(dir.join(format!("blkio.throttle.{file}_device")), "");
            }
        }
    }

    /// Cgroups as given, parents first; none has I/O files until its parent enables them.
    pub fn v2(&self, groups: &[&str]) {
        self.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        self.put("/sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
        self.put("/sys/fs/cgroup/cgroup.subtree_control", "cpu\n");
        self.put("/sys/fs/cgroup/io.cost.model", "");
        self.put("/sys/fs/cgroup/io.cost.qos", "");
        for group in groups {
            let dir = PathBuf::from("/sys/fs/cgroup").join(group.trim_start_matches('/'));
            self.put(dir.join("cgroup.subtree_control"), "\n");
        }
    }

    fn scheduler(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let have = text::elevators(&fs::read_to_string(&file)?).unwrap();
        if !have.available.iter().any(|e| e == value) {
            return Err(invalid());
        }
        if have.current == value {
            return Ok(());
        }
        let word = |e: &String| if e == value { format!("[{e}] ") } else { format!("{e} ") };
        fs::write(&file, have.available.iter().map(word).collect::<String>() + "\n")?;
        let queue = file.parent().unwrap();
        let _ = fs::remove_dir_all(queue.join("iosched"));
        for (name, default) in defaults(value) {
            fs::create_dir_all(queue.join("iosched"))?;
            fs::write(queue.join("iosched").join(name), format!("{default}\n"))?;
        }
        let requests = if value == "none" { 128 } else { 256 };
        fs::write(queue.join("nr_requests"), format!("{requests}\n"))?;
        if queue.join("async_depth").exists() {
            let _ = fs::remove_file(queue.join("iosched/async_depth"));
            fs::write(queue.join("async_depth"), format!("{}\n", default_depth(value, requests)))?;
        }
        fs::write(queue.join("wbt_lat_usec"), if value == "bfq" { "0\n" } else { "2000\n" })?;
        if have.current == "bfq" {
            self.forget_weights(&self.at("/sys/fs/cgroup"))?;
        }
        Ok(())
    }

    /// `nr_requests`, which scales `async_depth` where the queue has it.
    fn requests(&self, path: &Path, value: &str) -> io::Result<()> {
        let (file, number) = (self.at(path), value.parse::<u64>().map_err(|_| invalid())?);
        let depth = file.with_file_name("async_depth");
        if depth.exists() {
            let scaled = (number_in(&depth) * number / number_in(&file)).max(1);
            fs::write(depth, format!("{scaled}\n"))?;
        }
        fs::write(file, format!("{number}\n"))
    }

    fn depth(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let scheduler = fs::read_to_string(file.with_file_name("scheduler"))?;
        let number: u64 = value.parse().map_err(|_| invalid())?;
        if number == 0 || text::elevators(&scheduler).unwrap().current == "none" {
            return Err(invalid());
        }
        fs::write(&file, format!("{}\n", number.min(number_in(&file.with_file_name("nr_requests")))))
    }

    fn forget_weights(&self, dir: &Path) -> io::Result<()> {
        let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                self.forget_weights(&path)?;
            } else if path.ends_with("blkio.bfq.weight_device") || path.ends_with("io.bfq.weight") {
                let mut weights = text::weights(&fs::read_to_string(&path)?).unwrap();
                weights.devices.remove(DEV);
                fs::write(&path, show(&weights))?;
            }
        }
        Ok(())
    }

    fn tunable(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let number: u64 = value.trim().parse().map_err(|_| invalid())?;
        let set = |name: &str, v: u64| fs::write(file.with_file_name(name), format!("{v}\n"));
        let get = |name: &str| -> u64 {
            fs::read_to_string(file.with_file_name(name)).unwrap().trim().parse().unwrap()
        };
        let name = file.file_name().unwrap().to_str().unwrap();
        match name {
            "slice_idle" => set(name, number).and_then(|()| set("slice_idle_us", number * 1000)),
            "slice_idle_us" => set(name, number).and_then(|()| set("slice_idle", number / 1000)),
            "timeout_sync" | "read_expire" => {
                let jiffies = (number.max(1) * HZ).div_ceil(1000);
                set(name, (jiffies * 1000).div_ceil(HZ))
            }
            "low_latency" => set(name, number.min(1)),
            "strict_guarantees" => {
                if number > 0 && get(name) == 0 && get("slice_idle_us") < 8000 {
                    set("slice_idle", 8)?;
                    set("slice_idle_us", 8000)?;
                }
                set(name, number.min(1))
            }
            _ => set(name, number),
        }
    }

    fn weight(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let mut weights = text::weights(&fs::read_to_string(&file)?).unwrap();
        let range =
            |w: u64| if (1..=1000).contains(&w) { Ok(w) } else { Err(errno(rustix::io::Errno::RANGE)) };
        let words: Vec<_> = value.split_whitespace().collect();
        match words[..] {
            [w] | ["default", w] => {
                weights.default = Some(range(w.parse().map_err(|_| invalid())?)?);
                weights.devices.clear();
            }
            [dev, "default"] => {
                weights.devices.remove(dev);
            }
            [dev, w] => {
                weights.devices.insert(dev.to_owned(), range(w.parse().map_err(|_| invalid())?)?);
            }
            _ => return Err(invalid()),
        }
        fs::write(file, show(&weights))
    }

    /// A line of `io.cost.model` or `io.cost.qos`. The first one for a device makes that of the
    /// other file too, and none goes again. Writeback throttling goes off and on with io.cost.
    fn io_cost(&self, path: &Path, value: &str) -> io::Result<()> {
        let (dev, words) = value.split_once(' ').ok_or_else(invalid)?;
        if dev != DEV {
            return Err(errno(rustix::io::Errno::NODEV));
        }
        let root = PathBuf::from("/sys/fs/cgroup");
        let auto = [
            (
                "io.cost.model",
                "ctrl=auto model=linear rbps=9 rseqiops=8 rrandiops=8 wbps=9 wseqiops=8 wrandiops=8",
            ),
            (
                "io.cost.qos",
                "enable=0 ctrl=auto rpct=0.00 rlat=25000 wpct=0.00 wlat=25000 min=1.00 max=10000.00",
            ),
        ];
        for (name, line) in auto.iter().filter(|(name, _)| self.get(root.join(name)).is_empty()) {
            self.put(root.join(name), &format!("{DEV} {line}\n"));
        }
        let line = if path.ends_with("io.cost.model") {
            match words.parse::<CostModel>().map_err(|_| invalid())? {
                CostModel::Auto => auto[0].1.to_owned(),
                model => model.to_string(),
            }
        } else {
            let qos: CostQos = words.parse().map_err(|_| invalid())?;
            let queue = PathBuf::from(format!("/sys/dev/block/{DEV}/queue"));
            // As `wbt_enable_default()`: BFQ keeps it off.
            let is_off = qos.enable || self.get(queue.join("scheduler")).contains("[bfq]");
            self.put(queue.join("wbt_lat_usec"), if is_off { "0\n" } else { "2000\n" });
            match qos.targets {
                None => auto[1].1.replace("enable=0", &format!("enable={}", u8::from(qos.enable))),
                Some(_) => qos.to_string(),
            }
        };
        fs::write(self.at(path), format!("{DEV} {line}\n"))
    }

    /// `io.weight`: its default leaves the lines of devices, and a device that io.cost was never
    /// set up for takes none.
    fn io_weight(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let mut weights = text::weights(&fs::read_to_string(&file)?).unwrap();
        let (dev, weight) = value.split_once(' ').ok_or_else(invalid)?;
        if self.get("/sys/fs/cgroup/io.cost.qos").is_empty() {
            return Err(errno(rustix::io::Errno::OPNOTSUPP));
        }
        if weight == "default" {
            weights.devices.remove(dev);
        } else {
            let range = |w: &u64| (1..=10_000).contains(w);
            let weight = weight.parse().ok().filter(range).ok_or_else(invalid)?;
            weights.devices.insert(dev.to_owned(), weight);
        }
        fs::write(file, show(&weights))
    }

    fn throttle(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let old = fs::read_to_string(&file)?;
        let (dev, number) = value.split_once(' ').ok_or_else(invalid)?;
        let number: u64 = number.trim().parse().map_err(|_| invalid())?;
        let mut lines: Vec<String> =
            old.lines().filter(|l| !l.starts_with(&format!("{dev} "))).map(str::to_owned).collect();
        if number > 0 {
            lines.push(format!("{dev} {number}"));
        }
        lines.sort();
        fs::write(file, lines.iter().map(|l| format!("{l}\n")).collect::<String>())
    }

    /// A device's line of `KEY=VALUE`, which is there while any value is not `max`.
    fn keyed_line(&self, path: &Path, value: &str, keys: &[&str]) -> io::Result<()> {
        let file = self.at(path);
        let old = fs::read_to_string(&file)?;
        let (dev, pairs) = value.split_once(' ').ok_or_else(invalid)?;
        let mut limits: BTreeMap<&str, Option<u64>> =
            keys.iter().map(|k| (*k, text::io_max_limit(&old, dev, k))).collect();
        for pair in pairs.split_whitespace() {
            let (key, v) = pair.split_once('=').ok_or_else(invalid)?;
            let slot = limits.get_mut(key).ok_or_else(invalid)?;
            *slot = if v == "max" { None } else { Some(v.parse().map_err(|_| invalid())?) };
        }
        let mut lines: Vec<String> =
            old.lines().filter(|l| !l.starts_with(&format!("{dev} "))).map(str::to_owned).collect();
        if limits.values().any(Option::is_some) {
            let show = |k: &&str| format!("{k}={}", limits[*k].map_or("max".into(), |v| v.to_string()));
            lines.push(format!("{dev} {}", keys.iter().map(show).collect::<Vec<_>>().join(" ")));
        }
        lines.sort();
        fs::write(file, lines.iter().map(|l| format!("{l}\n")).collect::<String>())
    }

    fn subtree(&self, path: &Path, value: &str) -> io::Result<()> {
        let file = self.at(path);
        let dir = file.parent().unwrap().to_owned();
        let old = fs::read_to_string(&file)?;
        let mut words: Vec<&str> = old.split_whitespace().filter(|w| *w != "io").collect();
        let children = || fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir());
        match value {
            "+io" if !text::has_word(&old, "io") => {
                if !file.starts_with(self.at("/sys/fs/cgroup")) || !self.has_io(&dir) {
                    return Err(errno(rustix::io::Errno::NOENT));
                }
                words.push("io");
                for (child, (name, text)) in children().flat_map(|c| IO_FILES.map(|file| (c.clone(), file))) {
                    fs::write(child.join(name), text)?;
                }
            }
            "-io" => {
                for child in children() {
                    let below = fs::read_to_string(child.join("cgroup.subtree_control"))?;
                    if text::has_word(&below, "io") {
                        return Err(errno(rustix::io::Errno::BUSY));
                    }
                }
                for (child, (name, _)) in children().flat_map(|c| IO_FILES.map(|file| (c.clone(), file))) {
                    let _ = fs::remove_file(child.join(name));
                }
            }
            "+io" => return Ok(()),
            _ => return Err(invalid()),
        }
        fs::write(file, words.join(" ") + "\n")
    }

    /// The root has every controller; any other group has those that its parent enables.
    fn has_io(&self, dir: &Path) -> bool {
        dir == self.at("/sys/fs/cgroup")
            || fs::read_to_string(dir.parent().unwrap().join("cgroup.subtree_control"))
                .is_ok_and(|t| text::has_word(&t, "io"))
    }
}

fn show(weights: &text::Weights) -> String {
    let lines = weights.devices.iter().map(|(dev, w)| format!("{dev} {w}\n"));
    format!("default {}\n", weights.default.unwrap()) + &lines.collect::<String>()
}

impl HostFiles for SimKernel {
    fn read(&self, path: &Path) -> io::Result<String> {
        if path.starts_with(RESCTRL) {
            return self.read_resctrl(path);
        }
        if path.ends_with("tasks") {
            return self.tasks(path.parent().unwrap());
        }
        fs::read_to_string(self.at(path))
    }

    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        if path.starts_with(RESCTRL) {
            return self.write_resctrl(path, value);
        }
        if path.ends_with("tasks") {
            return self.attach(path.parent().unwrap(), value);
        }
        // Opening fails first, as in the kernel.
        fs::OpenOptions::new().write(true).open(self.at(path))?;
        let name = path.file_name().unwrap().to_str().unwrap();
        match name {
            "scheduler" => self.scheduler(path, value),
            "blkio.bfq.weight_device" | "io.bfq.weight" => self.weight(path, value),
            "io.max" => self.keyed_line(path, value, &["rbps", "wbps", "riops", "wiops"]),
            "io.latency" => self.keyed_line(path, value, &["target"]),
            "io.weight" => self.io_weight(path, value),
            "io.cost.model" | "io.cost.qos" => self.io_cost(path, value),
            _ if name.starts_with("cpu.") => self.cpu_file(path, value),
            "cgroup.subtree_control" => self.subtree(path, value),
            _ if name.starts_with("blkio.throttle.") => self.throttle(path, value),
            _ if path.parent().unwrap().ends_with("iosched") => self.tunable(path, value),
            "nr_requests" => self.requests(path, value),
            "async_depth" => self.depth(path, value),
            "wbt_lat_usec" => {
                let number: u64 = value.parse().map_err(|_| invalid())?;
                fs::write(self.at(path), format!("{number}\n"))
            }
            _ => Err(errno(rustix::io::Errno::ACCESS)),
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.at(dir))? {
            names.push(entry?.file_name().into_string().unwrap());
        }
        names.sort();
        Ok(names)
    }

    fn identity(&self, path: &Path) -> io::Result<u64> {
        fs::metadata(self.at(path)).map(|m| m.ino())
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        if path.starts_with(RESCTRL) { self.make_resctrl(path) } else { self.make_group(path) }
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        if path.starts_with(RESCTRL) { self.remove_resctrl(path) } else { self.remove_group(path) }
    }

    fn thread_start(&self, pid: u32, tid: u32) -> io::Result<u64> {
        self.start_of(pid, tid)
    }

    fn scheduling(&self, _: u32, tid: u32) -> io::Result<Attr> {
        self.policy(tid)
    }

    fn set_scheduling(&self, _: u32, tid: u32, attr: &Attr) -> io::Result<()> {
        self.set_policy(tid, attr)
    }
}

/// A guest whose agent is the file `X.sock` and whose files are in the directory `X` next to it.
pub struct SimGuests;

struct SimGuest {
    socket: PathBuf,
    kernel: SimKernel,
}

impl Guests for SimGuests {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let AgentAddress::Socket(agent) = agent else { return Err(io::ErrorKind::NotFound.into()) };
        fs::metadata(agent)?;
        let kernel = SimKernel::new(agent.with_extension(""));
        Ok(Box::new(SimGuest { socket: agent.to_owned(), kernel }))
    }
}

impl GuestFiles for SimGuest {
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>> {
        fs::metadata(&self.socket)?;
        self.kernel.read(Path::new(path)).map(String::into_bytes)
    }

    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        fs::metadata(&self.socket)?;
        self.kernel.write(Path::new(path), std::str::from_utf8(bytes).unwrap())
    }
}
