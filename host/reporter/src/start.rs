//! Command whose start-up a user waits for: the host is asked to prioritise this machine meanwhile.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rtvirtio_startup::{PORT, StartMessage};
use rtvirtio_units::Nanos;

use crate::ReporterError;
use crate::child::Signals;
use crate::slice_idle::{self, Raised};

/// Directory in which Linux lists virtio-serial ports.
const PORTS: &str = "/sys/class/virtio-ports";
/// Number of attempts while another process has the port open to write a line.
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(10);

/// `IOPRIO_WHO_PROCESS`, and classes as in `include/uapi/linux/ioprio.h`: the class is in bits 13
/// to 15, the level below.
const WHO_PROCESS: libc::c_int = 1;
const REAL_TIME: libc::c_int = 1 << 13;
const BEST_EFFORT_FIRST: libc::c_int = 2 << 13;
const NONE: libc::c_int = 0;

/// Limits and priorities of a start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartOptions {
    /// Time after which the start-up counts as over: an interactive program does not end by itself.
    pub longest: Duration,
    /// Whether its I/O is real-time in this guest meanwhile (`ionice -c 1`), which the guest's
    /// scheduler and the I/O domain respect.
    pub real_time: bool,
    /// `slice_idle` of BFQ on this guest's disks meanwhile, in ms; 0 leaves it as it is.
    pub slice_idle: u32,
}

/// Starts a command, announces it to the host, and announces the end of the start-up: when the
/// command ends, or after the longest time. Then waits for its end. Returns its exit code, 128 and
/// the signal where one ended it. `note` gets a text for each step that failed; the command runs
/// all the same. Signals that would end this process end the command.
pub fn start(
    argv: &[String],
    options: StartOptions,
    note: &mut dyn FnMut(&str),
) -> Result<i32, ReporterError> {
    let [program, args @ ..] = argv else {
        return Err(ReporterError::io("start", "")(io::ErrorKind::InvalidInput.into()));
    };
    // Before any change: however this process ends, it is reverted.
    let signals = Signals::handle().map_err(ReporterError::io("start", program.as_str()))?;
    let id = std::process::id();
    let wanted = Nanos(u64::try_from(options.longest.as_nanos()).unwrap_or(u64::MAX));
    let port = find_port(Path::new(PORTS));
    let said = match &port {
        None => Err(format!("this machine has no port {PORT}")),
        Some(port) => say(port, StartMessage::Start { id, wanted }),
    };
    if let Err(why) = &said {
        note(&format!("the host is not notified: {why}"));
    }
    let mut command = Command::new(program);
    command.args(args);
    let (sys_block, run) = (Path::new(slice_idle::SYS_BLOCK), Path::new(slice_idle::RUN));
    let raised = Raised::begin(sys_block, run, options.slice_idle, note).unwrap_or_else(|e| {
        note(&format!("this machine's disks do not wait for it: {e}"));
        None
    });
    if options.real_time {
        // SAFETY: between fork and exec only async-signal-safe system calls are made.
        unsafe {
            command.pre_exec(|| {
                // Without the right to a real-time class, the highest best-effort level.
                if set_priority(0, REAL_TIME).is_err() {
                    let _ = set_priority(0, BEST_EFFORT_FIRST);
                }
                Ok(())
            });
        }
    }
    let ended = signals.start(&mut command).and_then(|mut child| {
        let ended = child.wait(options.longest);
        Ok((child, ended?))
    });
    if let Some(Err(e)) = raised.map(|raised| raised.end(note)) {
        note(&format!("not put back, which the next `rtvirtio-guest start` by root does: {e}"));
    }
    if let (Ok(()), Some(port)) = (&said, &port) {
        if let Err(why) = say(port, StartMessage::End { id }) {
            note(&format!("the host is not notified of the end of the start: {why}"));
        }
    }
    let (mut child, ended) = ended.map_err(ReporterError::io("start", program.as_str()))?;
    let status = match ended {
        Some(status) => status,
        None => {
            if options.real_time {
                let left = family(Path::new("/proc"), child.id());
                if left.iter().any(|tid| set_priority(*tid, NONE).is_err_and(|e| !is_gone(&e))) {
                    note("some of its threads keep their I/O priority");
                }
            }
            child.wait_for_end().map_err(ReporterError::io("wait for", program.as_str()))?
        }
    };
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// Device file of the port.
fn find_port(ports: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(ports).ok()?;
    // kernel file
    let is_ours = |dir: &PathBuf| fs::read_to_string(dir.join("name")).is_ok_and(|name| name.trim() == PORT);
    let dir = entries.flatten().map(|entry| entry.path()).find(is_ours)?;
    Some(Path::new("/dev").join(dir.file_name()?))
}

/// Writes a line. The port is opened only for that: the kernel allows a single opener.
fn say(port: &Path, word: StartMessage) -> Result<(), String> {
    let mut attempt = 1;
    let mut file = loop {
        // kernel file
        let opened = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(port);
        match opened {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && attempt < ATTEMPTS => {
                attempt += 1;
                std::thread::sleep(PAUSE);
            }
            opened => break opened.map_err(|e| format!("{}: {e}", port.display()))?,
        }
    };
    file.write_all(word.to_string().as_bytes()).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => format!("no process on the host listens at {}", port.display()),
        _ => format!("{}: {e}", port.display()),
    })
}

/// Thread ids of a process and its descendants.
fn family(proc: &Path, of: u32) -> BTreeSet<u32> {
    let numbers = |dir: &Path| -> Vec<u32> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    // The parent is the second field after the name, which is in parentheses and may contain any.
    let parent = |pid: u32| -> Option<u32> {
        // kernel file
        let stat = fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let parents: Vec<(u32, u32)> =
        numbers(proc).into_iter().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut processes = vec![of];
    let mut next = 0;
    while let Some(pid) = processes.get(next).copied() {
        processes.extend(parents.iter().filter(|(_, parent)| *parent == pid).map(|(pid, _)| *pid));
        next += 1;
    }
    processes.iter().flat_map(|pid| numbers(&proc.join(pid.to_string()).join("task"))).collect()
}

/// Sets the I/O priority of a thread; 0 is the calling one.
fn set_priority(tid: u32, priority: libc::c_int) -> io::Result<()> {
    // SAFETY: ioprio_set(2) takes numbers only.
    let done = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, tid, priority) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use std::sync::PoisonError;

    use rustix::process::Pid;

    use super::*;
    use crate::child::FORKS;

    fn command(text: &str) -> Vec<String> {
        ["sh", "-c", text].map(str::to_owned).to_vec()
    }

    fn priority_of(tid: u32) -> libc::c_long {
        // SAFETY: ioprio_get(2) takes numbers only.
        unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, tid) }
    }

    #[test]
    fn a_command_runs_without_a_host_and_its_code_is_kept() {
        let _alone = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
        let options = StartOptions { longest: Duration::from_secs(60), real_time: true, slice_idle: 0 };
        let mut notes = Vec::new();
        let code = start(&command("exit 3"), options, &mut |n| notes.push(n.to_owned())).unwrap();
        assert_eq!(code, 3);
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains(PORT), "{notes:?}");
        assert!(start(&["/no/such/program".to_owned()], options, &mut |_| {}).is_err());
    }

    #[test]
    fn what_outlives_the_start_is_ordinary_again() {
        let _alone = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let file = dir.path().join("pids");
        let text = format!("sleep 1000 & echo $$ $! >{f}.new; mv {f}.new {f}; wait", f = file.display());
        let options = StartOptions { longest: Duration::from_millis(300), real_time: true, slice_idle: 0 };
        let runs = std::thread::spawn(move || start(&command(&text), options, &mut |_| {}));
        let pids = loop {
            if let Ok(text) = fs::read_to_string(&file) {
                break text.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<u32>>();
            }
            std::thread::sleep(PAUSE);
        };
        let (shell, sleeps) = (pids[0], pids[1]);
        let own = family(Path::new("/proc"), shell);
        assert!(own.contains(&shell) && own.contains(&sleeps), "{own:?} {pids:?}");
        // Both have a priority class of their own until the time is over, and none after it.
        let is_ordinary = || [shell, sleeps].iter().all(|pid| priority_of(*pid) >> 13 == 0);
        let became = (0..3_000).any(|_| {
            std::thread::sleep(PAUSE);
            is_ordinary()
        });
        assert!(became, "{own:?}");
        let pid = i32::try_from(sleeps).ok().and_then(Pid::from_raw).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        assert_eq!(runs.join().unwrap().unwrap(), 0);
    }

    #[test]
    fn the_port_is_found_by_its_name() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        for (port, name) in [("vport1p1", "org.qemu.guest_agent.0"), ("vport1p2", PORT)] {
            fs::create_dir(dir.path().join(port)).unwrap();
            fs::write(dir.path().join(port).join("name"), format!("{name}\n")).unwrap();
        }
        assert_eq!(find_port(dir.path()), Some("/dev/vport1p2".into()));
        assert_eq!(find_port(&dir.path().join("none")), None);
        // A line is written to the port by a single write.
        let file = dir.path().join("port");
        fs::write(&file, "").unwrap();
        say(&file, StartMessage::End { id: 5 }).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "end 5\n");
        assert!(say(dir.path(), StartMessage::End { id: 5 }).is_err());
    }
}
