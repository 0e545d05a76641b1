//! The process under a service manager: it says when it serves, that its engines answer, and its
//! end.

mod common;

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Iod, disk, program, read, request, two_disks};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_testkit::{HANG, Need, has};

/// Timeout of the watchdog; it is notified several times within.
const WATCHDOG: Duration = Duration::from_millis(400);

/// The socket of a service manager.
struct Manager(UnixDatagram);

impl Manager {
    fn bind(dir: &Path) -> Self {
        Self(UnixDatagram::bind(dir.join("notify")).unwrap())
    }

    /// The next lines; `None` where none come within a time.
    fn next(&self, timeout: Duration) -> Option<String> {
        self.0.set_read_timeout(Some(timeout)).unwrap();
        let mut text = [0; 256];
        match self.0.recv(&mut text) {
            Ok(read) => Some(String::from_utf8(text[..read].to_vec()).unwrap()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(e) => panic!("{e}"),
        }
    }

    /// Waits until a line comes.
    fn wait_for(&self, line: &str) {
        while self.next(HANG).unwrap_or_else(|| panic!("no {line}")).trim() != line {}
    }

    /// Takes what has arrived.
    fn drain(&self) {
        while self.next(Duration::from_millis(1)).is_some() {}
    }
}

fn start(dir: &Path, watchdog: bool) -> Iod {
    let mut command = Command::new("sh");
    // As systemd does, which names the process that it starts.
    command.args(["-c", "WATCHDOG_PID=$$ exec \"$0\" \"$@\""]).arg(program().get_program());
    command.stderr(Stdio::piped()).env("NOTIFY_SOCKET", dir.join("notify"));
    if watchdog {
        command.env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string());
    }
    Iod::with_command(dir, &two_disks(dir, 8, ""), &mut command).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn it_is_ready_when_guests_may_connect_and_tells_its_end() {
    let dir = disk(8);
    let manager = Manager::bind(dir.path());
    let iod = start(dir.path(), false);
    assert_eq!(manager.next(HANG).as_deref(), Some("READY=1\n"));
    let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    drop(client);
    iod.end_well();
    // Without a watchdog nothing else is sent.
    assert_eq!(manager.next(HANG).as_deref(), Some("STOPPING=1\n"));
}

#[test]
fn a_socket_that_is_gone_prevents_no_start() {
    let dir = disk(8);
    let iod = start(dir.path(), true);
    let mut client = Client::connect(&dir.path().join("a"), Options::default()).unwrap();
    assert_eq!(request(&mut client, &read(0, 4_096), None).0, 0);
    drop(client);
    let stderr = iod.end_well();
    assert!(stderr.contains("the service manager is not notified"), "{stderr}");
}

/// A thread that is stopped, as one that hangs, until this is dropped.
struct Stopped(libc::pid_t);

impl Stopped {
    fn new(thread: libc::pid_t) -> Self {
        ptrace(libc::PTRACE_SEIZE, thread);
        ptrace(libc::PTRACE_INTERRUPT, thread);
        let mut status = 0;
        // SAFETY: the kernel writes one integer, which outlives the call.
        let stopped = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        assert!(stopped == thread && libc::WIFSTOPPED(status), "{}", io::Error::last_os_error());
        Self(thread)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        ptrace(libc::PTRACE_DETACH, self.0);
    }
}

fn ptrace(request: libc::c_uint, thread: libc::pid_t) {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: these requests read and write no memory of this process.
    let done = unsafe { libc::ptrace(request, thread, none, none) };
    assert!(done == 0, "{}", io::Error::last_os_error());
}

/// The thread of the device's engine.
fn engine(iod: &Iod) -> libc::pid_t {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", iod.pid())).unwrap().flatten();
    let is_engine =
        |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap() == "iod-d\n";
    let found: Vec<_> = tasks.filter(is_engine).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].file_name().to_string_lossy().parse().unwrap()
}

#[test]
fn the_watchdog_is_notified_only_while_the_engine_answers() {
    if !has("the_watchdog_is_notified_only_while_the_engine_answers", &[Need::Root]) {
        return;
    }
    let dir = disk(8);
    let manager = Manager::bind(dir.path());
    let iod = start(dir.path(), true);
    for _ in 0..3 {
        manager.wait_for("WATCHDOG=1");
    }
    let stopped = Stopped::new(engine(&iod));
    // The one whose answer was on its way.
    std::thread::sleep(WATCHDOG);
    manager.drain();
    assert_eq!(manager.next(4 * WATCHDOG), None, "while the engine hangs");
    drop(stopped);
    for _ in 0..3 {
        manager.wait_for("WATCHDOG=1");
    }
    iod.end_well();
}
