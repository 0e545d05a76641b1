//! resctrl of the simulated kernel: two caches with eight ways, bandwidth in percent. Rules read in
//! `fs/resctrl/rdtgroup.c`, `fs/resctrl/ctrlmondata.c` and `Documentation/filesystems/resctrl.rst`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::resctrl::{line_values, task_group};
use rustix::io::Errno;

use super::sim::SimKernel;

pub const RESCTRL: &str = "/sys/fs/resctrl";
const SCHEMATA: &str = "    MB:0=100;1=100\n    L3:0=ff;1=ff\n";
/// Control groups, the default one included.
const CLASSES: usize = 3;

impl SimKernel {
    pub fn resctrl(&self) {
        self.put(format!("{RESCTRL}/schemata"), SCHEMATA);
        self.put(format!("{RESCTRL}/info/last_cmd_status"), "ok\n");
        self.put(format!("{RESCTRL}/info/L3/io_alloc"), "disabled\n");
        self.put(format!("{RESCTRL}/info/L3/io_alloc_cbm"), "");
        fs::create_dir_all(self.at(format!("{RESCTRL}/mon_groups"))).unwrap();
    }

    /// Puts a thread into a group, and names its process.
    pub fn resctrl_task(&self, pid: u32, tid: u32, group: &str) {
        self.put(format!("/proc/{tid}/status"), &format!("Tgid:\t{pid}\n"));
        self.put(format!("/proc/{pid}/task/{tid}/cpu_resctrl_groups"), &shown(group));
    }

    fn refused(&self, code: Errno, why: &str) -> io::Result<()> {
        self.put(format!("{RESCTRL}/info/last_cmd_status"), &format!("{why}\n"));
        Err(code.into())
    }

    /// Files of all threads that show their group, and that group.
    fn tasks_of_resctrl(&self) -> io::Result<Vec<(PathBuf, PathBuf)>> {
        let mut all = Vec::new();
        for process in fs::read_dir(self.at("/proc"))? {
            let Ok(tasks) = fs::read_dir(process?.path().join("task")) else { continue };
            for task in tasks {
                let file = task?.path().join("cpu_resctrl_groups");
                let group = task_group(&fs::read_to_string(&file)?).unwrap();
                all.push((file, Path::new(RESCTRL).join(group.trim_start_matches('/'))));
            }
        }
        Ok(all)
    }

    pub fn read_resctrl(&self, path: &Path) -> io::Result<String> {
        if path.ends_with("tasks") {
            fs::metadata(self.at(path.parent().unwrap()))?;
            let own = |(file, group): &(PathBuf, PathBuf)| {
                let tid = file.parent()?.file_name()?.to_str()?.parse::<u32>().ok()?;
                (group.as_path() == path.parent()?).then_some(tid)
            };
            let mut tids: Vec<u32> = self.tasks_of_resctrl()?.iter().filter_map(own).collect();
            tids.sort_unstable();
            return Ok(tids.iter().map(|tid| format!("{tid}\n")).collect());
        }
        let is_off = || self.get(path.with_file_name("io_alloc")).starts_with("disabled");
        if path.ends_with("io_alloc_cbm") && is_off() {
            return Err(Errno::INVAL.into());
        }
        fs::read_to_string(self.at(path))
    }

    pub fn write_resctrl(&self, path: &Path, value: &str) -> io::Result<()> {
        let dir = path.parent().unwrap();
        match path.file_name().unwrap().to_str().unwrap() {
            "tasks" => {
                fs::metadata(self.at(dir))?;
                let is_it = |(file, _): &&(PathBuf, PathBuf)| file.parent().unwrap().ends_with(value.trim());
                let all = self.tasks_of_resctrl()?;
                let (file, _) = all.iter().find(is_it).ok_or(Errno::SRCH)?;
                fs::write(file, shown(&format!("/{}", dir.strip_prefix(RESCTRL).unwrap().display())))
            }
            "schemata" | "io_alloc_cbm" if !value.ends_with('\n') => Err(Errno::INVAL.into()),
            "schemata" => {
                let (resource, _) = value.split_once(':').unwrap();
                let values = line_values(value, resource).unwrap();
                if resource == "L3" && !values.split(';').all(is_contiguous) {
                    return self.refused(Errno::INVAL, "The mask 5 has non-consecutive 1-bits");
                }
                let old = fs::read_to_string(self.at(path))?;
                let line = |old: &str| match old.trim().split_once(':') {
                    Some((name, _)) if name == resource => format!("    {resource}:{values}\n"),
                    _ => format!("{old}\n"),
                };
                fs::write(self.at(path), old.lines().map(line).collect::<String>())
            }
            "io_alloc" => {
                let on = value == "1";
                self.put(dir.join("io_alloc_cbm"), if on { "0=ff;1=ff\n" } else { "" });
                fs::write(self.at(path), if on { "enabled\n" } else { "disabled\n" })
            }
            "io_alloc_cbm" => fs::write(self.at(path), value),
            _ => Err(Errno::ACCESS.into()),
        }
    }

    pub fn make_resctrl(&self, path: &Path) -> io::Result<()> {
        let dirs = fs::read_dir(self.at(RESCTRL))?.filter(|e| e.as_ref().unwrap().path().is_dir()).count();
        // `info`, `mon_groups`, and the default group itself.
        if dirs - 2 + 1 == CLASSES && path.parent() == Some(Path::new(RESCTRL)) {
            return self.refused(Errno::NOSPC, "Out of CLOSIDs");
        }
        fs::create_dir(self.at(path))?;
        fs::create_dir(self.at(path.join("mon_groups")))?;
        fs::write(self.at(path.join("schemata")), SCHEMATA)
    }

    pub fn remove_resctrl(&self, path: &Path) -> io::Result<()> {
        fs::metadata(self.at(path))?;
        for (file, group) in self.tasks_of_resctrl()? {
            if group == path {
                fs::write(file, shown("/"))?;
            }
        }
        fs::remove_dir_all(self.at(path))
    }
}

/// Text of `cpu_resctrl_groups` for a control group.
fn shown(group: &str) -> String {
    match group.trim_start_matches('/') {
        "" => "res:/\nmon:\n".to_owned(),
        name => format!("res:{name}\nmon:\n"),
    }
}

fn is_contiguous(part: &str) -> bool {
    let mask = u64::from_str_radix(part.split_once('=').unwrap().1, 16).unwrap();
    let is_low_ones = |bits: u64| bits & (bits + 1) == 0;
    mask != 0 && is_low_ones(mask >> mask.trailing_zeros())
}
