//! Starts a VMM so that it is in its cgroups before it does anything, and cannot outlive its owner
//! unless it should.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Sender};
use std::thread;

use rustix::process::Signal;

#[cfg(test)]
mod tests;

/// Lifetime of a child process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// The kernel kills the child when this process ends, however it ends (`PR_SET_PDEATHSIG` in
    /// prctl(2)).
    WithParent,
    /// The child continues after this process; another process must end it.
    Detached,
}

/// Starts `command` in a new session, in the cgroups whose open `cgroup.procs` (v2, or one per
/// hierarchy in v1) are given.
///
/// The child moves *itself* (writes `0`) between fork and exec. So it is in place before the VMM
/// opens its disk, and every thread, page and request of it is accounted there from the start; no
/// stopped process, no race. A session of its own keeps Ctrl-C from it: the owner decides the order
/// in which processes end.
///
/// The parent-death signal belongs to the *thread* that forked, not to the process: a VMM started
/// by a worker thread would die with that thread. So all such children are forked by one thread
/// that never ends.
///
/// # Errors
/// As exec, or the write to a cgroup, reports.
pub fn spawn(mut command: Command, cgroups: Vec<File>, lifetime: Lifetime) -> io::Result<Child> {
    let parent = rustix::process::getpid();
    let in_child = move || {
        rustix::process::setsid()?;
        if lifetime == Lifetime::WithParent {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from(io::ErrorKind::BrokenPipe));
            }
        }
        for mut procs in &cgroups {
            procs.write_all(b"0")?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only system calls (setsid, prctl, getppid,
    // write) on data made before the fork; it neither allocates nor locks: an `io::Error` from an
    // errno or a kind holds no heap memory.
    unsafe { command.pre_exec(in_child) };
    match lifetime {
        Lifetime::Detached => command.spawn(),
        Lifetime::WithParent => spawn_on_keeper(command),
    }
}

type Order = (Command, Sender<io::Result<Child>>);

/// Network namespace of the calling thread.
const NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Thread that forks, with its network namespace.
struct Keeper {
    orders: Sender<Order>,
    namespace: Option<PathBuf>,
}

fn spawn_on_keeper(mut command: Command) -> io::Result<Child> {
    static KEEPER: OnceLock<Option<Keeper>> = OnceLock::new();
    let gone = || io::Error::other("the thread that starts processes is gone");
    let keeper = KEEPER.get_or_init(|| {
        let namespace = std::fs::read_link(NAMESPACE).ok();
        let (orders, inbox) = mpsc::channel::<Order>();
        let run = move || {
            for (mut command, reply) in inbox {
                // The receiver waits below; it cannot be gone.
                let _ = reply.send(command.spawn());
            }
        };
        thread::Builder::new()
            .name("rtvirtio-spawn".into())
            .spawn(run)
            .ok()
            .map(|_| Keeper { orders, namespace })
    });
    let keeper = keeper.as_ref().ok_or_else(gone)?;
    // A child must be in its caller's namespace, whichever thread forks it.
    if keeper.namespace.is_some() && std::fs::read_link(NAMESPACE).ok() != keeper.namespace {
        // kernel file
        let namespace = File::open(NAMESPACE)?;
        let enter = move || {
            let network = Some(rustix::thread::LinkNameSpaceType::Network);
            Ok(rustix::thread::move_into_link_name_space(namespace.as_fd(), network)?)
        };
        // SAFETY: between fork and exec the closure makes only a system call (setns) on a
        // descriptor opened before the fork.
        unsafe { command.pre_exec(enter) };
    }
    let (reply, answer) = mpsc::channel();
    keeper.orders.send((command, reply)).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}
