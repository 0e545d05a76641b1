//! Sockets and logs of one guest in its run directory.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use super::{QemuError, make_run_dir};

/// Bytes that are read from the end of a log, and largest number of reported lines.
const TAIL_BYTES: u64 = 262_144;
const TAIL_LINES: usize = 6;
/// Lines of a fault of the guest's kernel: its message, registers and call trace.
const FAULT_LINES: usize = 48;
/// Messages with which the report of a fault begins.
const FAULTS: [&str; 5] = ["BUG: ", "Oops: ", "general protection fault", "invalid opcode", "Kernel panic"];
/// Messages about a guest that hangs.
const LOCKUPS: [&str; 5] =
    ["soft lockup - CPU", "hard LOCKUP on", "workqueue lockup", "detected stall", "blocked for more than"];

#[derive(Debug)]
pub(super) struct Files {
    run_dir: PathBuf,
    name: String,
    pub(super) qmp: PathBuf,
    pub(super) agent: PathBuf,
    pub(super) start: PathBuf,
    pub(super) incoming: PathBuf,
    pub(super) serial: PathBuf,
    pub(super) stderr: PathBuf,
}

impl Files {
    pub(super) fn new(run_dir: &Path, name: &str) -> Files {
        let file = |kind: &str| run_dir.join(format!("{name}.{kind}"));
        Files {
            run_dir: run_dir.to_path_buf(),
            name: name.to_owned(),
            qmp: file("qmp"),
            agent: file("qga"),
            start: file("start"),
            incoming: file("in"),
            serial: file("console"),
            stderr: file("stderr"),
        }
    }

    fn all(&self) -> [&Path; 6] {
        [&self.qmp, &self.agent, &self.start, &self.incoming, &self.serial, &self.stderr]
    }

    /// Makes the directory and removes files of a crashed guest of this name.
    pub(super) fn prepare(&self) -> Result<(), QemuError> {
        let failed = |operation, path: &Path| {
            let path = path.to_path_buf();
            move |source| QemuError::Io { operation, path, source }
        };
        make_run_dir(&self.run_dir).map_err(failed("create", &self.run_dir))?;
        // A socket without a listener refuses. A full backlog makes this wait until the other
        // client of a running QEMU disconnects.
        if self.qmp.exists() && UnixStream::connect(&self.qmp).is_ok() {
            return Err(QemuError::Busy { name: self.name.clone(), run_dir: self.run_dir.clone() });
        }
        self.remove_files();
        File::create(&self.serial).map_err(failed("create", &self.serial)).map(drop)
    }

    /// Removes the files, and the directory if it is empty then.
    pub(super) fn remove(&self) {
        self.remove_files();
        // Other guests of the lab may still have files there.
        let _ = fs::remove_dir(&self.run_dir);
    }

    fn remove_files(&self) {
        for path in self.all() {
            // A missing file is fine; one that cannot be removed is harmless.
            let _ = fs::remove_file(path);
        }
    }

    /// Last lines of QEMU's standard error and of the guest's console, each below a heading.
    pub(super) fn last_words(&self) -> String {
        let mut text = String::new();
        for (what, path) in [("QEMU's errors", &self.stderr), ("the guest's console ends with", &self.serial)]
        {
            let lines = tail(path);
            if !lines.is_empty() {
                text.push_str(&format!("\n  {what}:"));
                for line in lines {
                    text.push_str(&format!("\n    {line}"));
                }
            }
        }
        text
    }

    /// Whether the console shows a fault of the guest's kernel that is no lockup.
    pub(super) fn has_panicked(&self) -> bool {
        end(&self.serial).iter().any(|line| is_one_of(&FAULTS, line) && !is_one_of(&LOCKUPS, line))
    }
}

fn is_one_of(messages: &[&str], line: &str) -> bool {
    messages.iter().any(|message| line.contains(message))
}

fn tail(path: &Path) -> Vec<String> {
    let lines = end(path);
    let fault = lines.iter().position(|line| is_one_of(&FAULTS, line) || is_one_of(&LOCKUPS, line));
    let (from, most) =
        fault.map_or((lines.len().saturating_sub(TAIL_LINES), TAIL_LINES), |at| (at, FAULT_LINES));
    lines[from..].iter().take(most).cloned().collect()
}

/// Lines at the end of a log, without empty ones.
fn end(path: &Path) -> Vec<String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    // Without the log the error is only shorter.
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    // The guest wrote the text: no control characters on the user's terminal.
    let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>().trim().to_owned();
    text.lines().map(clean).filter(|l| !l.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_are_short_and_clean() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let files = Files::new(dir.path(), "vm1");
        assert_eq!(files.last_words(), "");
        let noise: String = (0..10_000).map(|i| format!("line {i}\r\n")).collect();
        fs::write(&files.serial, noise.clone() + "\x1b[31mlast\x07\r\n").unwrap();
        fs::write(&files.stderr, "qemu: cannot open\n").unwrap();
        let words = files.last_words();
        assert_eq!(words.lines().count(), 1 + 2 + 1 + TAIL_LINES);
        assert!(words.starts_with("\n  QEMU's errors:\n    qemu: cannot open\n"), "{words}");
        assert!(words.ends_with("\n    line 9999\n    [31mlast"), "{words}");
        let fault = "[ 1.0] BUG: unable to handle\r\n[ 1.0] Kernel panic - not syncing: x\r\n";
        fs::write(&files.serial, noise.clone() + fault + &noise[..400]).unwrap();
        let words = files.last_words();
        assert!(
            words.contains(
                "with:\n    [ 1.0] BUG: unable to handle\n    [ 1.0] Kernel panic - not syncing: x\n"
            ),
            "{words}"
        );
    }

    #[test]
    fn a_hang_is_told_from_a_panic() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let files = Files::new(dir.path(), "vm1");
        let panicked = |console: &str| {
            fs::write(&files.serial, console).unwrap();
            files.has_panicked()
        };
        assert!(!panicked("[ 1.0] booted\r\n"));
        let lockup = "[ 9.0] watchdog: BUG: soft lockup - CPU#0 stuck for 22s! [fio:80]\r\n";
        let stall = "[ 9.1] rcu: INFO: rcu_preempt self-detected stall on CPU\r\n";
        assert!(!panicked(&lockup.repeat(2_000)) && !panicked(stall));
        assert!(files.last_words().contains("self-detected stall"));
        for fault in ["BUG: kernel NULL pointer", "Oops: 0002 [#1]", "Kernel panic - not syncing"] {
            assert!(panicked(&format!("{lockup}[ 9.5] {fault}\r\n")), "{fault}");
        }
        // A panic stays the first words, however often the guest repeats what follows.
        panicked(&format!("[ 8.0] Oops: 0002 [#1]\r\n{}", lockup.repeat(2_000)));
        assert!(files.last_words().contains("with:\n    [ 8.0] Oops: 0002"), "{}", files.last_words());
    }

    #[test]
    fn a_dead_socket_is_cleared_and_a_live_one_refused() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let files = Files::new(&dir.path().join("run"), "vm1");
        files.prepare().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&files.qmp).unwrap();
        assert!(matches!(files.prepare(), Err(QemuError::Busy { .. })));
        drop(listener);
        files.prepare().unwrap();
        assert!(!files.qmp.exists());
        files.remove();
        assert!(!dir.path().join("run").exists());
    }
}
