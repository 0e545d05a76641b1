//! Directories, files and records for tests.

use std::path::{Path, PathBuf};

use rtvirtio_apply::JOURNAL_FILE;
use rtvirtio_kernel::{ProcessId, Root};
use rtvirtio_spec::HostSpec;
use tempfile::TempDir;

use crate::contracts::InForce;
use crate::dirs::{Dirs, write_state};
use crate::scope_files::{IN_FORCE_FILE, VmInForce, vm_dir};
use crate::started::StartedVm;

/// Directories of an installation without files, as long as the first value lives.
pub fn dirs() -> (TempDir, Dirs) {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
    (dir, dirs)
}

/// Host without files, as long as the first value lives.
pub fn root() -> (TempDir, Root) {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    (dir, root)
}

/// Makes a file of a host, with its directory.
pub fn put(root: &Root, path: impl AsRef<Path>, text: &str) {
    let path = root.at(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// Makes the files of a thread that sleeps and may use these CPUs.
pub fn put_thread(root: &Root, (pid, tid): (u32, u32), name: &str, cpus: &str) {
    let dir = format!("/proc/{pid}/task/{tid}");
    put(root, format!("{dir}/stat"), &format!("{tid} ({name}) S 1 {}\n", "0 ".repeat(60)));
    put(root, format!("{dir}/status"), &format!("Cpus_allowed_list:\t{cpus}\n"));
}

/// Task of [`spec`] that reads 4 KiB, without a rate.
pub const READS: &str = "op = \"read\"\nblock = \"4KiB\"\n";

/// Spec of one disk and one VM, with these lines of the VM and of its only task.
pub fn spec(vm: &str, task: &str) -> HostSpec {
    let text = format!("[device]\npath = \"/dev/sdz\"\n[[vm]]\n{vm}\n[[vm.task]]\nname = \"t\"\n{task}\n");
    HostSpec::parse("x.toml", &text).unwrap()
}

/// This process, and an earlier one with its id that has ended.
pub fn alive_and_ended() -> (ProcessId, ProcessId) {
    let this = ProcessId::find(std::process::id()).unwrap().unwrap();
    let ended = ProcessId { start_time: this.start_time + 1, ..this };
    (this, ended)
}

/// VM that was started as these processes.
pub fn start(vm: &str, processes: &[&ProcessId]) -> StartedVm {
    StartedVm { vm: vm.to_owned(), processes: processes.iter().map(|process| (*process).clone()).collect() }
}

/// Saves a contract of the service as in force for these processes; returns its directory.
pub fn put_in_force(dirs: &Dirs, processes: &[&ProcessId], cpu: &InForce) -> PathBuf {
    let saved = VmInForce {
        vm: cpu.vm.clone(),
        contract: String::new(),
        processes: start(&cpu.vm, processes).processes,
        cpu: Some(cpu.clone()),
        reason: String::new(),
        since: String::new(),
    };
    let scope = vm_dir(dirs, &cpu.vm);
    write_state(&scope, JOURNAL_FILE, b"{}").unwrap();
    write_state(&scope, IN_FORCE_FILE, &serde_json::to_vec(&saved).unwrap()).unwrap();
    scope
}
