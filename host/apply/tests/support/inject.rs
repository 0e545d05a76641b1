//! Errors of the kernel and of guests' agents at chosen calls.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rtvirtio_apply::{GuestFiles, Guests, HostFiles};
use rtvirtio_kernel::sched::Attr;
use rtvirtio_vmm::AgentAddress;
use rustix::io::Errno;

/// The path of an agent, for the calls that name it.
fn socket(agent: &AgentAddress) -> PathBuf {
    match agent {
        AgentAddress::Socket(path) => path.clone(),
        AgentAddress::Libvirt(agent) => PathBuf::from(&agent.uuid),
    }
}

/// Choice of the calls that fail.
#[derive(Clone, Debug)]
pub enum Fails {
    /// No call fails at all.
    Never,
    /// Calls of these numbers, counted from 1.
    At(Vec<u64>),
    /// The call of this number and all that follow.
    From(u64),
    /// All calls that name a path with this end.
    Path(PathBuf),
    /// All changes that name a path with this end.
    Write(PathBuf),
}

/// Counter of the calls of a host and its guests together, which lets some of them fail.
#[derive(Clone)]
pub struct Injector {
    fails: Fails,
    errno: Errno,
    /// Whether a change that fails has been made all the same.
    after: bool,
    calls: Rc<Cell<u64>>,
    hits: Rc<Cell<u64>>,
}

impl Injector {
    pub fn new(fails: Fails, errno: Errno, after: bool) -> Self {
        Self { fails, errno, after, calls: Rc::default(), hits: Rc::default() }
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.calls.get()
    }

    /// Number of errors so far.
    pub fn hits(&self) -> u64 {
        self.hits.get()
    }

    fn call<T>(&self, path: &Path, is_change: bool, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.calls.set(self.calls.get() + 1);
        let number = self.calls.get();
        let fails = match &self.fails {
            Fails::Never => false,
            Fails::At(numbers) => numbers.contains(&number),
            Fails::From(first) => number >= *first,
            Fails::Path(end) => path.ends_with(end),
            Fails::Write(end) => is_change && path.ends_with(end),
        };
        if !fails {
            return call();
        }
        self.hits.set(self.hits.get() + 1);
        if self.after && is_change {
            let _ = call();
        }
        Err(self.errno.into())
    }
}

fn thread(pid: u32, tid: u32, file: &str) -> PathBuf {
    format!("/proc/{pid}/task/{tid}/{file}").into()
}

pub struct FailingHost<'a>(pub &'a dyn HostFiles, pub Injector);

impl HostFiles for FailingHost<'_> {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.1.call(path, false, || self.0.read(path))
    }
    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        self.1.call(path, true, || self.0.write(path, value))
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        self.1.call(dir, false, || self.0.list(dir))
    }
    fn identity(&self, path: &Path) -> io::Result<u64> {
        self.1.call(path, false, || self.0.identity(path))
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.1.call(path, true, || self.0.make_dir(path))
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.1.call(path, true, || self.0.remove_dir(path))
    }
    fn thread_start(&self, pid: u32, tid: u32) -> io::Result<u64> {
        self.1.call(&thread(pid, tid, "stat"), false, || self.0.thread_start(pid, tid))
    }
    fn scheduling(&self, pid: u32, tid: u32) -> io::Result<Attr> {
        self.1.call(&thread(pid, tid, "sched"), false, || self.0.scheduling(pid, tid))
    }
    fn set_scheduling(&self, pid: u32, tid: u32, attr: &Attr) -> io::Result<()> {
        self.1.call(&thread(pid, tid, "sched"), true, || self.0.set_scheduling(pid, tid, attr))
    }
    fn unit(&self, unit: &str) -> io::Result<String> {
        self.1.call(Path::new(unit), false, || self.0.unit(unit))
    }
}

pub struct FailingGuests<'a>(pub &'a dyn Guests, pub Injector);

struct FailingGuest(Box<dyn GuestFiles>, Injector);

impl Guests for FailingGuests<'_> {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let guest = self.1.call(&socket(agent), false, || self.0.connect(agent))?;
        Ok(Box::new(FailingGuest(guest, self.1.clone())))
    }
}

impl GuestFiles for FailingGuest {
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>> {
        self.1.call(Path::new(path), false, || self.0.read(path))
    }
    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.1.call(Path::new(path), true, || self.0.write(path, bytes))
    }
}
