//! For tests and experiments that end a process at one exact point of `apply` or `revert`: before
//! and after every single change, and at every [`Step`].
//!
//! Points are counted in the files and the observer that are handed in; the code under test knows
//! nothing of it. A service that runs as it is can be handed none: a debug build counts points of
//! its own, see [`KILL_AT`].

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rtvirtio_kernel::sched::Attr;

use crate::{HostFiles, Observer, Step};

/// Counter of points that calls a function at one of them.
#[derive(Clone)]
pub struct Points {
    count: Rc<Cell<u64>>,
    at: u64,
    end: fn(),
}

impl Points {
    /// Calls `end` at the point of this number; 0 is none.
    #[must_use]
    pub fn new(at: u64, end: fn()) -> Self {
        Self { count: Rc::new(Cell::new(0)), at, end }
    }

    /// Counts a point, and calls `end` at the chosen one.
    pub fn pass(&self) {
        self.count.set(self.count.get() + 1);
        if self.count.get() == self.at {
            (self.end)();
        }
    }
}

/// Ends this process with SIGKILL, which nothing can catch.
pub fn kill_self() {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    // The signal is pending for this very thread; nothing below runs.
    loop {
        std::thread::park();
    }
}

/// Environment variable with the number of the point, counted from 1 over the whole process, at
/// which a program in a debug build ends itself with SIGKILL: before and after each change of the
/// real host, and at each step that only [`Silent`](crate::Silent) watches. Release builds ignore
/// it.
pub const KILL_AT: &str = "RTVIRTIO_KILL_AT";

/// Counts a point of this process, and kills it at `KILL_AT`.
pub(crate) fn pass_in_process() {
    static AT: OnceLock<Option<u64>> = OnceLock::new();
    static COUNT: AtomicU64 = AtomicU64::new(0);
    if !cfg!(debug_assertions) {
        return;
    }
    let at = AT.get_or_init(|| std::env::var(KILL_AT).ok()?.parse().ok());
    if at.is_some_and(|at| COUNT.fetch_add(1, Ordering::Relaxed) + 1 == at) {
        kill_self();
    }
}

/// A change of the real host, with a point of this process before and after it.
pub(crate) fn between_in_process<T>(change: impl FnOnce() -> T) -> T {
    pass_in_process();
    let result = change();
    pass_in_process();
    result
}

/// Interceptor of the calls of host files: it counts points, or makes errors in a test.
pub trait Intercept {
    /// Makes the call, or fails in its place. `change` is the value that is written, empty for a
    /// change of another kind, and `None` where the call only reads.
    fn intercept<T>(
        &self,
        path: &Path,
        change: Option<&str>,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T>;
}

/// Host files whose every call is intercepted.
pub struct InterceptedHost<'a, I>(pub &'a dyn HostFiles, pub I);

/// Path under which a call of a thread is intercepted.
fn of_thread(pid: u32, tid: u32, file: &str) -> PathBuf {
    format!("/proc/{pid}/task/{tid}/{file}").into()
}

impl<I: Intercept> HostFiles for InterceptedHost<'_, I> {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.1.intercept(path, None, || self.0.read(path))
    }
    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        self.1.intercept(path, Some(value), || self.0.write(path, value))
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        self.1.intercept(dir, None, || self.0.list(dir))
    }
    fn identity(&self, path: &Path) -> io::Result<u64> {
        self.1.intercept(path, None, || self.0.identity(path))
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.1.intercept(path, Some(""), || self.0.make_dir(path))
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.1.intercept(path, Some(""), || self.0.remove_dir(path))
    }
    fn thread_start(&self, pid: u32, tid: u32) -> io::Result<u64> {
        self.1.intercept(&of_thread(pid, tid, "stat"), None, || self.0.thread_start(pid, tid))
    }
    fn scheduling(&self, pid: u32, tid: u32) -> io::Result<Attr> {
        self.1.intercept(&of_thread(pid, tid, "sched"), None, || self.0.scheduling(pid, tid))
    }
    fn set_scheduling(&self, pid: u32, tid: u32, attr: &Attr) -> io::Result<()> {
        let path = of_thread(pid, tid, "sched");
        self.1.intercept(&path, Some(""), || self.0.set_scheduling(pid, tid, attr))
    }
    fn set_affinity(&self, pid: u32, tid: u32, cpus: &BTreeSet<u32>) -> io::Result<()> {
        let path = of_thread(pid, tid, "status");
        self.1.intercept(&path, Some(""), || self.0.set_affinity(pid, tid, cpus))
    }
    fn unit(&self, unit: &str) -> io::Result<String> {
        self.1.intercept(Path::new(unit), None, || self.0.unit(unit))
    }
    fn set_unit(&self, unit: &str, assignments: &str) -> io::Result<()> {
        self.1.intercept(Path::new(unit), Some(""), || self.0.set_unit(unit, assignments))
    }
    fn device(&self, path: &Path) -> io::Result<String> {
        self.1.intercept(path, None, || self.0.device(path))
    }
}

impl Intercept for Points {
    /// A point before and after every change.
    fn intercept<T>(
        &self,
        _: &Path,
        change: Option<&str>,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        if change.is_none() {
            return call();
        }
        self.pass();
        let result = call();
        self.pass();
        result
    }
}

/// Observer that counts every step as a point.
pub struct CountedSteps(pub Points);

impl Observer for CountedSteps {
    fn step(&mut self, _: Step) {
        self.0.pass();
    }
}
