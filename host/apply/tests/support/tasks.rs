//! Threads and v1 CPU cgroups of the simulated kernel. Rules read in `kernel/sched/rt.c`
//! (`tg_rt_schedulable()`, `sched_rt_can_attach()`), `kernel/sched/syscalls.c` and
//! `kernel/cgroup/cgroup-v1.c`, and measured on Linux 6.18.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{Form, Place, Target, Write};
use rtvirtio_kernel::sched::{Attr, Policy};
use rustix::io::Errno;

use super::sim::SimKernel;

pub const CPU: &str = "/sys/fs/cgroup/cpu";
const FILES: [(&str, &str); 4] = [
    ("cpu.rt_period_us", "1000000"),
    ("cpu.rt_runtime_us", "0"),
    ("cpu.cfs_period_us", "100000"),
    ("cpu.cfs_quota_us", "-1"),
];

/// Home of the VM's threads before a contract.
pub const VMS: &str = "/sys/fs/cgroup/cpu/vms";

fn errno(code: Errno) -> io::Error {
    code.into()
}

/// A group of ours, and files in it.
pub fn group(dir: &Path, home: &Path, scheduling: &str, files: &[(&str, &str)]) -> Vec<Write> {
    let form = Form::Group { home: home.to_owned(), scheduling: scheduling.to_owned() };
    let target = Target { place: Place::Host, path: dir.to_owned(), form };
    let file = |(name, value): &(&str, &str)| {
        let also_ours = if *name == "cpu.rt_runtime_us" { vec!["0".to_owned()] } else { Vec::new() };
        let write = Write::new(*name, Target::host(dir.join(name), Form::Plain), *value);
        Write { created_by: Some(0), also_ours, ..write }
    };
    [Write::new("cgroup", target, "present")].into_iter().chain(files.iter().map(file)).collect()
}

/// Move of a simulated thread.
pub fn cgroup(pid: u32, tid: u32, to: &str) -> Write {
    Write::new("cgroup", Target::thread_cgroup(pid, tid, 1000 + u64::from(tid), "cpu", Path::new(CPU)), to)
}

/// Policy of a simulated thread.
pub fn policy(pid: u32, tid: u32, attr: &Attr) -> Write {
    Write::new("policy", Target::scheduling(pid, tid, 1000 + u64::from(tid)), attr.to_string())
}

impl SimKernel {
    /// The CPU hierarchy's root, with its budget.
    pub fn cpu_root(&self) {
        self.cpu_group(Path::new(CPU)).unwrap();
        self.put(format!("{CPU}/cpu.rt_runtime_us"), "950000\n");
    }

    fn cpu_group(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(self.at(dir))?;
        for (file, default) in FILES {
            fs::write(self.at(dir.join(file)), format!("{default}\n"))?;
        }
        Ok(())
    }

    pub fn thread(&self, pid: u32, tid: u32, attr: &Attr, cgroup: &str) {
        let dir = format!("/proc/{pid}/task/{tid}");
        self.put(format!("{dir}/start"), &format!("{}\n", 1000 + tid));
        self.put(format!("{dir}/sched"), &format!("{attr}\n"));
        self.put(format!("{dir}/cgroup"), &format!("1:cpu:{cgroup}\n0::/\n"));
    }

    /// Marks the thread as about to end, and still in its cgroup.
    pub fn ending(&self, pid: u32, tid: u32) {
        self.put(format!("/proc/{pid}/task/{tid}/ending"), "");
    }

    pub fn end(&self, pid: u32, tid: u32) {
        fs::remove_dir_all(self.at(format!("/proc/{pid}/task/{tid}"))).unwrap();
    }

    /// The directory of a thread, whichever of its process's threads `pid` is: `/proc/TID` exists
    /// for every thread.
    fn task_dir(&self, tid: u32) -> io::Result<PathBuf> {
        for process in fs::read_dir(self.at("/proc"))? {
            let dir = process?.path().join("task").join(tid.to_string());
            if dir.exists() {
                return Ok(dir);
            }
        }
        Err(errno(Errno::SRCH))
    }

    fn group_of(dir: &Path) -> io::Result<PathBuf> {
        let text = fs::read_to_string(dir.join("cgroup"))?;
        let path = text.lines().find_map(|l| l.strip_prefix("1:cpu:")).unwrap();
        Ok(Path::new(CPU).join(path.trim_start_matches('/')))
    }

    fn budget(&self, group: &Path) -> i64 {
        self.get(group.join("cpu.rt_runtime_us")).trim().parse().unwrap()
    }

    pub fn tasks(&self, group: &Path) -> io::Result<String> {
        fs::metadata(self.at(group))?;
        let mut text = String::new();
        for process in fs::read_dir(self.at("/proc"))? {
            let Ok(tasks) = fs::read_dir(process?.path().join("task")) else { continue };
            for task in tasks {
                let dir = task?.path();
                if Self::group_of(&dir)? == group {
                    text += &format!("{}\n", dir.file_name().unwrap().to_str().unwrap());
                }
            }
        }
        Ok(text)
    }

    pub fn attach(&self, group: &Path, tid: &str) -> io::Result<()> {
        fs::metadata(self.at(group))?;
        let dir = self.task_dir(tid.trim().parse().map_err(|_| errno(Errno::INVAL))?)?;
        let attr: Attr = fs::read_to_string(dir.join("sched"))?.trim().parse().unwrap();
        if matches!(attr.policy, Policy::Fifo | Policy::Rr) && self.budget(group) == 0 {
            return Err(errno(Errno::INVAL));
        }
        let path = group.strip_prefix(CPU).unwrap();
        fs::write(dir.join("cgroup"), format!("1:cpu:/{}\n0::/\n", path.display()))
    }

    pub fn cpu_file(&self, path: &Path, value: &str) -> io::Result<()> {
        let number: i64 = value.trim().parse().map_err(|_| errno(Errno::INVAL))?;
        let period: i64 = self.get(path.with_file_name("cpu.rt_period_us")).trim().parse().unwrap();
        let group = path.parent().unwrap();
        match path.file_name().unwrap().to_str().unwrap() {
            "cpu.rt_runtime_us" if number > period => return Err(errno(Errno::INVAL)),
            "cpu.rt_runtime_us" if number == 0 => {
                for tid in self.tasks(group)?.lines() {
                    let dir = self.task_dir(tid.parse().unwrap())?;
                    if fs::read_to_string(dir.join("sched"))?.starts_with("fifo") {
                        return Err(errno(Errno::BUSY));
                    }
                }
            }
            _ => {}
        }
        fs::write(self.at(path), format!("{number}\n"))
    }

    pub fn make_group(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(self.at(path))?;
        self.cpu_group(path)
    }

    pub fn remove_group(&self, path: &Path) -> io::Result<()> {
        if !self.tasks(path)?.is_empty() {
            return Err(errno(Errno::BUSY));
        }
        fs::remove_dir_all(self.at(path))
    }

    pub fn start_of(&self, pid: u32, tid: u32) -> io::Result<u64> {
        let of_process = self.at(format!("/proc/{pid}/task/{tid}"));
        let dir = if pid == tid && !of_process.exists() { self.task_dir(tid)? } else { of_process };
        if dir.join("ending").exists() {
            return Err(errno(Errno::NOENT));
        }
        let text = fs::read_to_string(dir.join("start"))?;
        Ok(text.trim().parse().unwrap())
    }

    pub fn policy(&self, tid: u32) -> io::Result<Attr> {
        Ok(fs::read_to_string(self.task_dir(tid)?.join("sched"))?.trim().parse().unwrap())
    }

    pub fn set_policy(&self, tid: u32, attr: &Attr) -> io::Result<()> {
        let dir = self.task_dir(tid)?;
        if matches!(attr.policy, Policy::Fifo | Policy::Rr) && self.budget(&Self::group_of(&dir)?) == 0 {
            return Err(errno(Errno::PERM));
        }
        fs::write(dir.join("sched"), format!("{attr}\n"))
    }
}
