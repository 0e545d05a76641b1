//! Errors of the kernel and of guests' agents at chosen calls.

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rtvirtio_apply::points::Intercept;
use rtvirtio_apply::{GuestFiles, Guests};
use rtvirtio_vmm::AgentAddress;
use rustix::io::Errno;

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
}

impl Intercept for Injector {
    fn intercept<T>(
        &self,
        path: &Path,
        change: Option<&str>,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        self.calls.set(self.calls.get() + 1);
        let number = self.calls.get();
        let fails = match &self.fails {
            Fails::Never => false,
            Fails::At(numbers) => numbers.contains(&number),
            Fails::From(first) => number >= *first,
            Fails::Path(end) => path.ends_with(end),
            Fails::Write(end) => change.is_some() && path.ends_with(end),
        };
        if !fails {
            return call();
        }
        self.hits.set(self.hits.get() + 1);
        if self.after && change.is_some() {
            let _ = call();
        }
        Err(self.errno.into())
    }
}

/// Guests whose every call is intercepted.
pub struct InterceptedGuests<'a, I>(pub &'a dyn Guests, pub I);

struct InterceptedGuest<I>(Box<dyn GuestFiles>, I);

impl<I: Intercept + Clone + 'static> Guests for InterceptedGuests<'_, I> {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let path = match agent {
            AgentAddress::Socket(path) => path.clone(),
            AgentAddress::Libvirt(agent) => PathBuf::from(&agent.uuid),
        };
        let guest = self.1.intercept(&path, None, || self.0.connect(agent))?;
        Ok(Box::new(InterceptedGuest(guest, self.1.clone())))
    }
}

impl<I: Intercept> GuestFiles for InterceptedGuest<I> {
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>> {
        let Self(guest, with) = self;
        with.intercept(Path::new(path), None, || guest.read(path))
    }
    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let Self(guest, with) = self;
        with.intercept(Path::new(path), Some(""), || guest.write(path, bytes))
    }
}
