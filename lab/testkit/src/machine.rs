//! A QEMU whose guest has no system, for tests of its threads and its monitor.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::HANG;

/// Bytes of the firmware image.
const FIRMWARE: usize = 64 << 10;

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
    ///
    /// # Panics
    /// As [`Machine::start`], and when `dir` cannot be written.
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
