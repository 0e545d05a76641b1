//! Properties of a host that its figures depend on.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use rtvirtio_kernel::{Root, preempt_rt};
use rtvirtio_workflow::{cpus, kernel_release};
use serde::{Deserialize, Serialize};

/// Programs whose versions are recorded.
const PROGRAMS: &[&str] =
    &["qemu-system-x86_64", "qemu-storage-daemon", "fio", "virsh", "ovs-vswitchd", "cyclictest", "tc"];
/// Most characters kept of a version.
const VERSION: usize = 80;

/// A host, without name, serial number or address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineFacts {
    /// Distribution, as `/etc/os-release` calls it.
    pub system: String,
    /// Release of the running kernel.
    pub kernel: String,
    /// Whether the kernel is a PREEMPT_RT one.
    pub preempt_rt: bool,
    /// Model name of the processor.
    pub processor: String,
    /// CPUs that may be used.
    pub cpus: u32,
    /// Installed memory, MiB.
    pub memory_mib: u64,
    /// Whether the host is a virtual machine itself.
    pub virtual_machine: bool,
    /// Whether there is `/dev/kvm`; whether guests run with it is in the results.
    pub kvm: bool,
    /// Versions of programs that are installed.
    pub programs: BTreeMap<String, String>,
}

impl MachineFacts {
    /// Facts of this host. Unreadable ones are empty.
    #[must_use]
    pub fn read(root: &Root) -> Self {
        let read = |path: &str| fs::read_to_string(root.at(path)).unwrap_or_default();
        let (cpuinfo, meminfo) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let of = |text: &str, key: &str| {
            let line = text.lines().find(|line| line.starts_with(key));
            line.and_then(|line| Some(line.split_once([':', '='])?.1.trim().to_owned())).unwrap_or_default()
        };
        let kib = of(&meminfo, "MemTotal").trim_end_matches(" kB").parse::<u64>().unwrap_or_default();
        Self {
            system: of(&read("/etc/os-release"), "PRETTY_NAME").trim_matches('"').to_owned(),
            kernel: kernel_release(),
            preempt_rt: preempt_rt(root).unwrap_or_default(),
            processor: of(&cpuinfo, "model name"),
            cpus: cpus(),
            memory_mib: kib / 1024,
            virtual_machine: of(&cpuinfo, "flags").split(' ').any(|flag| flag == "hypervisor"),
            kvm: root.at("/dev/kvm").exists(),
            programs: PROGRAMS.iter().filter_map(|name| Some(((*name).to_owned(), version(name)?))).collect(),
        }
    }

    /// Whether figures of both can be in one bundle: the same machine, by its known properties,
    /// with the same kernel.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let of =
            |facts: &Self| (facts.kernel.clone(), facts.processor.clone(), facts.cpus, facts.memory_mib / 64);
        of(self) == of(other)
    }

    /// Facts as sentences for reports.
    #[must_use]
    pub fn sentences(&self) -> Vec<String> {
        let kind = if self.virtual_machine { "a virtual machine" } else { "a machine" };
        let kernel = if self.preempt_rt { "PREEMPT_RT kernel" } else { "Linux" };
        let kvm = if self.kvm { "with" } else { "without" };
        let programs: Vec<String> = self.programs.iter().map(|(name, v)| format!("{name} {v}")).collect();
        vec![
            format!(
                "{}, {kernel} {}, {kind} with {} CPUs ({}) and {} MiB, {kvm} /dev/kvm.",
                self.system, self.kernel, self.cpus, self.processor, self.memory_mib
            ),
            format!(
                "Installed: {}.",
                if programs.is_empty() { "none of the peers".to_owned() } else { programs.join("; ") }
            ),
        ]
    }
}

/// The first line of `NAME --version` that has a digit, less the program's name; `None` where the
/// program is missing.
fn version(name: &str) -> Option<String> {
    let argument = if name == "tc" { "-V" } else { "--version" };
    let out = Command::new(name).arg(argument).output().ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    let line = text.lines().find(|line| line.contains(|c: char| c.is_ascii_digit())).unwrap_or("installed");
    // `fio-3.33`, `QEMU emulator version 7.2.22 (Debian ...)`, `iproute2-6.1.0`.
    let starts = |(i, c): (usize, char)| c.is_ascii_digit() && !line[..i].ends_with(char::is_alphanumeric);
    let from = line.char_indices().find(|at| starts(*at)).map_or(0, |(i, _)| i);
    Some(line[from..].trim().chars().filter(|c| !c.is_control()).take(VERSION).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_and_tell_hosts_apart() {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("etc/os-release", "NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\n"),
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: fpu hypervisor sse\n"),
            ("proc/meminfo", "MemTotal:       25165824 kB\nMemFree: 1 kB\n"),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let facts = MachineFacts::read(&Root::new(dir.path()));
        assert_eq!(facts.system, "Debian GNU/Linux 12 (bookworm)");
        assert_eq!((facts.processor.as_str(), facts.memory_mib), ("A CPU @ 2 GHz", 24_576));
        assert!(facts.virtual_machine && !facts.kvm && !facts.preempt_rt);
        assert!(facts.is_same(&facts.clone()));
        assert!(!facts.is_same(&MachineFacts { kernel: "6.1".into(), ..facts.clone() }));
        assert!(facts.sentences()[0].contains("a virtual machine with"));
    }
}
