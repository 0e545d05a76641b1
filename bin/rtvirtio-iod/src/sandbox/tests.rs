//! Each test in a child process: confinement is irreversible.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use super::*;

/// Runs `act` in a forked child; returns its exit status.
fn child(act: impl FnOnce() -> i32) -> ExitStatus {
    // SAFETY: the child makes system calls, allocates (glibc's locks are consistent after fork),
    // and leaves by _exit.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // Another test's thread may have held a lock of the standard library at this moment, which
        // the child then waits for without end.
        // SAFETY: a system call without memory.
        unsafe { libc::alarm(60) };
        let code = act();
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    ExitStatus::from_raw(status)
}

/// The error number, or 0.
fn errno(result: libc::c_long) -> i32 {
    if result >= 0 { 0 } else { io::Error::last_os_error().raw_os_error().unwrap_or(255) }
}

const ROLES: [Role; 4] =
    [Role::Engine { passes_priority: false }, Role::VhostUser, Role::Control, Role::Spawner];

fn open(path: &std::ffi::CStr, flags: i32) -> i32 {
    // SAFETY: the path is a terminated string.
    errno(unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o600) })
}

/// The first calls of an intruder end the process, in every role.
#[test]
fn a_forbidden_call_ends_the_process() {
    if !seccomp::is_supported() {
        panic!("this kernel has no seccomp");
    }
    type Try = (&'static str, fn() -> i32);
    let tries: [Try; 8] = [
        // SAFETY: system calls without memory, or with a terminated string.
        ("socket", || errno(unsafe { libc::syscall(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0) })),
        ("execve", || {
            let none: [*const libc::c_char; 1] = [std::ptr::null()];
            // SAFETY: as above; both lists are terminated.
            errno(unsafe {
                libc::syscall(libc::SYS_execve, c"/bin/true".as_ptr(), none.as_ptr(), none.as_ptr())
            })
        }),
        // SAFETY: as above.
        ("ptrace", || errno(unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, 0, 0) })),
        // SAFETY: as above.
        ("fork", || errno(unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) })),
        ("memory with code", || {
            let prot = libc::PROT_READ | libc::PROT_EXEC;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping.
            errno(unsafe { libc::syscall(libc::SYS_mmap, 0, 4_096, prot, flags, -1, 0) })
        }),
        // SAFETY: as above.
        ("a signal to the parent", || errno(unsafe { libc::syscall(libc::SYS_kill, libc::getppid(), 0) })),
        // SAFETY: as above.
        ("a ring of one's own", || errno(unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, 0) })),
        // SAFETY: as above.
        ("another user", || errno(unsafe { libc::syscall(libc::SYS_setuid, 0) })),
    ];
    let filters = seccomp::Filters::new(false, false).unwrap();
    for role in ROLES {
        for (name, act) in &tries {
            let end = child(|| if filters.apply(role).is_ok() { act() } else { 254 });
            assert_eq!(end.signal(), Some(libc::SIGSYS), "{name} as {role:?}: {end}");
        }
        // Control run: a child with allowed calls exits by itself.
        let end = child(|| if filters.apply(role).is_ok() { 7 } else { 254 });
        assert_eq!(end.code(), Some(7), "{role:?}: {end}");
    }
}

/// Buffers are registered where a disk's memory is pinned, by the threads that do that, and nothing
/// else is.
#[test]
fn buffers_are_registered_only_where_memory_is_pinned() {
    // SAFETY: no ring has the descriptor, so no memory is looked at.
    let register = |of: u32| errno(unsafe { libc::syscall(libc::SYS_io_uring_register, 1 << 30, of, 0, 0) });
    let (update, clone, files) = (16, 30, 2);
    for pins in [false, true] {
        let filters = seccomp::Filters::new(false, pins).unwrap();
        for role in ROLES {
            let may = pins && role != Role::Control;
            let takes_over = may && matches!(role, Role::Engine { .. });
            for (operation, allowed) in [(update, may), (clone, takes_over), (files, false)] {
                let act = || if filters.apply(role).is_ok() { register(operation) } else { 254 };
                let end = child(act);
                let wanted = if allowed { (Some(libc::EBADF), None) } else { (None, Some(libc::SIGSYS)) };
                assert_eq!((end.code(), end.signal()), wanted, "{operation} as {role:?}, pins: {pins}");
            }
        }
    }
}

#[test]
fn files_are_refused_by_seccomp_alone() {
    let filters = seccomp::Filters::new(false, false).unwrap();
    for role in [Role::Engine { passes_priority: true }, Role::VhostUser, Role::Spawner] {
        let end = child(|| {
            filters.apply(role).unwrap();
            open(c"/etc/passwd", libc::O_RDONLY)
        });
        assert_eq!(end.code(), Some(libc::EACCES), "{role:?}: {end}");
    }
    let of = |flags| {
        child(|| {
            filters.apply(Role::Control).unwrap();
            open(c"/dev/null", flags)
        })
    };
    assert_eq!(of(libc::O_RDONLY | libc::O_CLOEXEC).code(), Some(0));
    assert_eq!(of(libc::O_WRONLY).signal(), Some(libc::SIGSYS));
    assert_eq!(of(libc::O_RDONLY | libc::O_CREAT).signal(), Some(libc::SIGSYS));
}

/// The role that starts threads starts confined ones, and only those may go on without the right
/// to start others.
#[test]
fn threads_are_started_by_one_role() {
    use rtvirtio_engine::confine::{Confine, Spawner, StartThread};
    let start = |second: bool| {
        child(move || {
            let filters = seccomp::Filters::new(false, false).unwrap();
            let confine = Confine::with(move |role| filters.apply(role));
            let spawner = Spawner::start(&confine).unwrap();
            confine.apply(Role::Control).unwrap();
            let body = Box::new(move || {
                if second {
                    let _ = std::thread::spawn(|| ());
                }
            });
            match spawner.start_thread("vm-x", Role::VhostUser, body).map(|t| t.join().is_ok()) {
                Ok(true) => 7,
                _ => 8,
            }
        })
    };
    let end = start(false);
    assert_eq!(end.code(), Some(7), "{end}");
    let end = start(true);
    assert_eq!(end.signal(), Some(libc::SIGSYS), "a VM's thread starts none: {end}");
}

/// `log` allows and logs, for testing a new libc.
#[test]
fn log_only_logs() {
    let filters = seccomp::Filters::new(true, false).unwrap();
    let end = child(|| {
        filters.apply(Role::VhostUser).unwrap();
        // SAFETY: a system call without memory.
        errno(unsafe { libc::syscall(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0) })
    });
    assert_eq!(end.code(), Some(0), "{end}");
}

fn config(dir: &Path) -> (File, PathBuf) {
    let path = dir.join("conf/iod.toml");
    std::fs::create_dir_all(dir.join("conf")).unwrap();
    std::fs::create_dir_all(dir.join("run")).unwrap();
    let d = dir.display();
    let text = format!(
        "control = \"{d}/run/ctl\"\n[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"a\"\nsocket = \"{d}/run/a\"\npath = \"{d}/disk\"\n"
    );
    std::fs::write(&path, &text).unwrap();
    (File::parse(&path, &text).unwrap(), path)
}

/// The control role may open files; landlock limits them to the configuration's directory.
#[test]
fn paths_and_capabilities_are_given_up() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (file, path) = config(dir.path());
    std::fs::write(dir.path().join("disk"), "x").unwrap();
    std::fs::write(dir.path().join("run/a"), "x").unwrap();
    let end = child(|| {
        let Ok(sandbox) = Sandbox::enter(&file, &path) else { return 100 };
        if sandbox.lacking.iter().any(|l| l == "landlock") {
            return 200;
        }
        let denied =
            |result: io::Result<()>| result.is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
        let read = |path: &Path| std::fs::read(path).map(|_| ());
        // Root could read it otherwise.
        if !denied(read(Path::new("/etc/shadow"))) || !denied(read(&dir.path().join("disk"))) {
            return 1;
        }
        if !denied(std::fs::write(dir.path().join("conf/new"), "x")) || !denied(std::fs::write(&path, "x")) {
            return 2;
        }
        if !denied(std::os::unix::net::UnixListener::bind(dir.path().join("run/b")).map(|_| ())) {
            return 3;
        }
        if !denied(std::net::TcpStream::connect("127.0.0.1:9").map(|_| ())) {
            return 4;
        }
        // After an editor replaced the file: the directory counts.
        if read(&path).is_err() || std::fs::remove_file(dir.path().join("run/a")).is_err() {
            return 5;
        }
        let Ok(sets) = rustix::thread::capabilities(None) else { return 6 };
        if !STARTUP_CAPABILITIES.contains(sets.permitted) || !sets.inheritable.is_empty() {
            return 7;
        }
        let Ok(confine) = sandbox.confine() else { return 8 };
        if confine.apply(Role::Engine { passes_priority: false }).is_err() {
            return 9;
        }
        0
    });
    match end.code() {
        Some(200) => {
            rtvirtio_testkit::skip("paths_and_capabilities_are_given_up", "no landlock in this kernel")
        }
        code => assert_eq!(code, Some(0), "{end}"),
    }
}

#[test]
fn off_is_off() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (mut file, path) = config(dir.path());
    file.sandbox = Mode::Off;
    let end = child(|| {
        let Ok(sandbox) = Sandbox::enter(&file, &path) else { return 1 };
        let _ = sandbox.confine().map(|c| c.apply(Role::VhostUser));
        i32::from(std::fs::read("/etc/passwd").is_err())
    });
    assert_eq!(end.code(), Some(0));
    assert_eq!(Sandbox::enter(&file, &path).unwrap().describe(&file, true), "sandbox: off, as the file says");
}

/// A panic is reported, with a backtrace as far as possible, and does not end as a killed process.
/// An abort is an abort.
#[test]
fn a_panic_is_still_reported() {
    let filters = seccomp::Filters::new(false, false).unwrap();
    for role in ROLES {
        let end = child(|| {
            filters.apply(role).unwrap();
            let backtrace = std::backtrace::Backtrace::force_capture().to_string();
            let caught = std::panic::catch_unwind(|| panic!("as a defect of ours would"));
            i32::from(caught.is_ok() || backtrace.is_empty())
        });
        assert_eq!(end.code(), Some(0), "{role:?}: {end}");
        // A process may signal itself only, so the child has filters of its own.
        let end = child(|| {
            seccomp::Filters::new(false, false).unwrap().apply(role).unwrap();
            std::process::abort()
        });
        assert_eq!(end.signal(), Some(libc::SIGABRT), "{role:?}: {end}");
    }
}
