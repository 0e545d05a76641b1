//! Test of KVM on this host. `/dev/kvm` is no proof: some hosts offer it and cannot run a stock
//! kernel. So one is started.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::spawn::{Lifetime, spawn};

#[cfg(test)]
mod tests;

/// Name of QEMU's binary for x86-64 guests.
pub const QEMU: &str = "qemu-system-x86_64";
/// Text that Linux prints, after the program's path, when it has booted as far as the first user
/// program (`run_init_process` in `init/main.c`).
const BOOTED: &str = " as init process";
/// Time without console output after which the kernel counts as hung. Under KVM a stock kernel
/// needs about a second for all of its boot, under a KVM that is itself emulated about nine.
const SILENCE: Duration = Duration::from_secs(15);
/// Longest boot, even with console output.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of the probe's guest, in MiB: kernel, initramfs, and the unpacked initramfs.
const PROBE_MEMORY_MIB: u32 = 512;

/// Result of the test of KVM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvmProbe {
    /// A stock kernel booted under KVM.
    Works,
    /// KVM is there, but a stock kernel does not boot under it.
    Broken {
        /// Failure of the boot.
        reason: String,
    },
    /// There is no KVM that this user may use.
    Absent {
        /// Reason, with the remedy.
        reason: String,
    },
}

/// Boots `kernel` with `initrd` under KVM, waits for its first user program, and ends it. Gives up
/// a kernel that hangs after 15 s.
///
/// # Errors
/// Only errors of the probe itself (no QEMU, no space for its files). Failures of KVM are in the
/// result.
pub fn probe_kvm(kernel: &Path, initrd: &Path) -> io::Result<KvmProbe> {
    // kernel file
    if let Err(e) = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        let remedy = match e.kind() {
            io::ErrorKind::NotFound => "load kvm-intel or kvm-amd, or enable virtualisation in the firmware",
            io::ErrorKind::PermissionDenied => "run as root or join the group kvm",
            _ => "see dmesg",
        };
        return Ok(KvmProbe::Absent { reason: format!("/dev/kvm: {e}; {remedy}") });
    }
    for (what, path) in [("kernel", kernel), ("initramfs", initrd)] {
        // A missing file must not be taken for a broken KVM.
        rtvirtio_kernel::trusted::open_config(path)
            .map_err(|e| io::Error::new(e.kind(), format!("{what} {}: {e}", path.display())))?;
    }
    boot(QEMU, kernel, initrd)
}

fn boot(qemu: &str, kernel: &Path, initrd: &Path) -> io::Result<KvmProbe> {
    let dir = tempfile::Builder::new().prefix(&rtvirtio_kernel::ProcessId::prefix("probe")).tempdir()?;
    let (serial, stderr) = (dir.path().join("serial"), dir.path().join("stderr"));
    fs::File::create(&serial)?;
    let mut command = Command::new(qemu);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "kvm"])
        .args(["-cpu", "max", "-m", &PROBE_MEMORY_MIB.to_string(), "-no-reboot"])
        // A kernel panic must end QEMU: `panic=-1` reboots, at which `-no-reboot` exits.
        .args(["-append", "console=ttyS0 panic=-1 reboot=t"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .arg("-serial")
        .arg(format!("file:{}", serial.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(&stderr)?);
    let child = spawn(command, Vec::new(), Lifetime::WithParent).map_err(|e| {
        io::Error::new(e.kind(), format!("cannot start {qemu}: {e}; install the package qemu-system-x86"))
    })?;
    let mut child = Reaper(child);
    let start = Instant::now();
    let (mut seen, mut last_heard) = (0, start);
    loop {
        let ended = child.0.try_wait()?;
        let console = read_lossy(&serial);
        if console.contains(BOOTED) {
            return Ok(KvmProbe::Works);
        }
        let complaint = read_lossy(&stderr);
        // On an emulation failure QEMU prints this and stays paused for a debugger.
        if complaint.contains("KVM internal error") {
            return Ok(KvmProbe::Broken { reason: internal_error(&complaint) });
        }
        if let Some(status) = ended {
            let mut said = last_lines(&complaint, 2);
            if said.is_empty() {
                said = last_lines(&console, 1);
            }
            return Ok(KvmProbe::Broken { reason: format!("QEMU ended with {status}: {said}") });
        }
        if console.len() != seen {
            (seen, last_heard) = (console.len(), Instant::now());
        }
        if last_heard.elapsed() >= SILENCE || start.elapsed() >= PROBE_TIMEOUT {
            let last = last_lines(&console, 1);
            let waited = start.elapsed().as_secs();
            let reason = format!("no user program within {waited} s; last line on the console: {last:?}");
            return Ok(KvmProbe::Broken { reason });
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Summary of QEMU's `KVM internal error. Suberror: 1`, a line with its name, and the registers.
fn internal_error(complaint: &str) -> String {
    let mut lines = complaint.lines().skip_while(|l| !l.contains("KVM internal error"));
    let head = lines.next().unwrap_or("KVM internal error").trim();
    match lines.next().map(str::trim) {
        Some(detail) if !detail.is_empty() && !detail.contains('=') => format!("{head} ({detail})"),
        _ => head.to_owned(),
    }
}

/// Last `n` lines that are not empty, joined by `; `.
fn last_lines(text: &str, n: usize) -> String {
    let mut lines: Vec<&str> = text.lines().rev().map(str::trim).filter(|l| !l.is_empty()).take(n).collect();
    lines.reverse();
    lines.join("; ")
}

fn read_lossy(path: &Path) -> String {
    // own file
    fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
}

/// QEMU of the probe, ended when dropped.
struct Reaper(Child);

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
