//! The machine that is changed: the host's files, and the files inside guests.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rtvirtio_kernel::queue_file::{self, is_queue_file};
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::{Root, task, text};
use rtvirtio_vmm::AgentAddress;
use rustix::io::Errno;

use crate::points::between_in_process;
use crate::resctrl;
use crate::systemd::{self, Unit};
use crate::target::{Form, Place, Target};

/// Kernel files of the host. [`Root`] is the real one. Errors are those of the system calls.
pub trait HostFiles {
    /// The whole text of a file.
    fn read(&self, path: &Path) -> io::Result<String>;
    /// Writes one whole value to a file that exists.
    fn write(&self, path: &Path, value: &str) -> io::Result<()>;
    /// Names in a directory, sorted.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Inode, which distinguishes a directory from a later one of the same name.
    fn identity(&self, path: &Path) -> io::Result<u64>;
    /// Makes a directory.
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Start time of a thread, in 1/100 s since boot.
    ///
    /// # Errors
    /// As the system call reports; `NotFound` when it is gone.
    fn thread_start(&self, pid: u32, tid: u32) -> io::Result<u64>;
    /// Policy and parameters of a thread.
    fn scheduling(&self, pid: u32, tid: u32) -> io::Result<Attr>;
    /// Sets policy and parameters of a thread.
    ///
    /// # Errors
    /// As the system call reports, with the reason where it is known.
    fn set_scheduling(&self, pid: u32, tid: u32, attr: &Attr) -> io::Result<()>;
    /// Allows a thread these CPUs.
    fn set_affinity(&self, _pid: u32, _tid: u32, _cpus: &BTreeSet<u32>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Properties of a unit of systemd, as `systemctl show` prints them.
    fn unit(&self, _unit: &str) -> io::Result<String> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Sets properties of a unit of systemd until it ends or the host is restarted: `NAME=VALUE`
    /// lines.
    fn set_unit(&self, _unit: &str, _assignments: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// The number of a block device, `MAJ:MIN`.
    fn device(&self, _path: &Path) -> io::Result<String> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl HostFiles for Root {
    fn read(&self, path: &Path) -> io::Result<String> {
        if self.is_real() && is_queue_file(path) {
            queue_file::may_use(self, path)?;
        }
        Self::read(self, path).map_err(rtvirtio_kernel::HostError::into_io)
    }

    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        between_in_process(|| match self.is_real() && is_queue_file(path) {
            true => queue_file::write(self, path, value),
            false => Self::write(self, path, value).map_err(rtvirtio_kernel::HostError::into_io),
        })
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        Self::list(self, dir).map_err(rtvirtio_kernel::HostError::into_io)
    }

    fn identity(&self, path: &Path) -> io::Result<u64> {
        self.inode(path).map_err(rtvirtio_kernel::HostError::into_io)
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        between_in_process(|| std::fs::create_dir(self.at(path)))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        between_in_process(|| std::fs::remove_dir(self.at(path)))
    }

    fn thread_start(&self, pid: u32, tid: u32) -> io::Result<u64> {
        let stat = task::stat(self, pid, tid).map_err(rtvirtio_kernel::HostError::into_io)?;
        // Its cgroup is the root's already, and would look like another program's change.
        if stat.ended {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("thread {tid} has ended")));
        }
        Ok(stat.start)
    }

    fn scheduling(&self, _: u32, tid: u32) -> io::Result<Attr> {
        sched::get(tid)
    }

    fn set_scheduling(&self, pid: u32, tid: u32, attr: &Attr) -> io::Result<()> {
        between_in_process(|| sched::set(tid, attr)).map_err(|e| {
            if e.raw_os_error() == Some(Errno::SRCH.raw_os_error()) {
                return e;
            }
            let kind = e.kind();
            io::Error::new(kind, sched::explain(self, pid, tid, attr, e))
        })
    }

    fn set_affinity(&self, _: u32, tid: u32, cpus: &BTreeSet<u32>) -> io::Result<()> {
        between_in_process(|| task::set_affinity(tid, cpus))
    }

    fn unit(&self, unit: &str) -> io::Result<String> {
        if !self.is_real() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "systemd of another root is not asked"));
        }
        systemd::show(unit)
    }

    fn set_unit(&self, unit: &str, assignments: &str) -> io::Result<()> {
        between_in_process(|| systemd::set(unit, assignments))
    }

    fn device(&self, path: &Path) -> io::Result<String> {
        let number = std::fs::metadata(self.at(path))?.rdev();
        Ok(format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number)))
    }
}

/// Files inside one guest, through its agent.
pub trait GuestFiles {
    /// The whole content of a file.
    ///
    /// # Errors
    /// Kind `NotFound` when the file does not exist in the guest, which then has no such setting;
    /// any other kind when it may have.
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>>;
    /// Writes one whole value to a file that exists.
    ///
    /// # Errors
    /// Kind `InvalidInput` when the guest's kernel refuses the value.
    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()>;
}

/// Connects to guests' agents.
pub trait Guests {
    /// Connects to an agent.
    ///
    /// # Errors
    /// Kind `NotFound` (no such socket, or this start of the VM has ended) or `ConnectionRefused`
    /// (nothing listens) when the guest's QEMU has ended; any other kind when it may be running, of
    /// these `TimedOut` after a wait for its answer.
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>>;
}

/// Guests for plans that touch only the host: every connection is refused.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoGuests;

impl Guests for NoGuests {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let text = format!("no way to reach the guest agent {agent}");
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }
}

/// Values of [`Form::Group`] and [`Form::ResctrlGroup`]: whether the directory exists.
pub(crate) const PRESENT: &str = "present";
pub(crate) const ABSENT: &str = "absent";
/// The file of a v1 cgroup, or of a group of resctrl, that lists its threads, and takes one.
pub(crate) const TASKS: &str = "tasks";

/// Host and guests together. Connections to guests are made on first use and kept. An agent that
/// has not answered in time is not waited for again: each of the settings in its guest would cost
/// as long. The same holds for systemd and its units.
pub struct Machine<'a> {
    root: &'a Root,
    host: &'a dyn HostFiles,
    guests: &'a dyn Guests,
    open: RefCell<BTreeMap<AgentAddress, Box<dyn GuestFiles>>>,
    /// Agents that have not answered in time, each with the error.
    silent: RefCell<BTreeMap<AgentAddress, String>>,
    /// Error of systemd, where it has not answered in time.
    silent_systemd: RefCell<Option<String>>,
}

/// Error of reading or writing a knob, by whether its object still exists.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file, or the device, cgroup or guest that it belongs to, is gone.
    Gone(io::Error),
    /// Any other error: the object may still exist.
    Io(io::Error),
}

impl Fault {
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Gone(e) | Self::Io(e) => e,
        }
    }

    /// Only `ENOENT`, `ENODEV` and `ESRCH` say that the object itself is gone. After any other
    /// error it may still exist and have our value.
    pub(crate) fn from_io(error: io::Error) -> Self {
        if rtvirtio_kernel::is_gone(&error) { Self::Gone(error) } else { Self::Io(error) }
    }

    /// Fault of a knob's file: what debugfs does not show may still have our value.
    fn of_target(self, target: &Target) -> Self {
        match self {
            Self::Gone(e) if target.in_debugfs() => {
                let hint = "is debugfs mounted? mount -t debugfs debugfs /sys/kernel/debug";
                Self::Io(io::Error::other(format!("{e}; {hint}")))
            }
            // While devices have no ways (`resctrl_io_alloc_cbm_show()`).
            Self::Io(e)
                if target.form == Form::IoAllocWays
                    && e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) =>
            {
                Self::Gone(e)
            }
            fault => fault,
        }
    }

    /// For an error of connecting to a guest's agent. QEMU listens on the socket as long as it
    /// runs; the kernel refuses a connection where nothing listens. A connection that breaks later
    /// proves nothing: the agent may have been restarted.
    fn of_connect(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Gone(error),
            _ => Self::from_io(error),
        }
    }
}

impl<'a> Machine<'a> {
    /// The machine below `root`, and guests as `guests` reaches them.
    #[must_use]
    pub fn new(root: &'a Root, guests: &'a dyn Guests) -> Self {
        Self::with_host(root, root, guests)
    }

    /// Machine whose host files are accessed in another way, such as a simulated kernel over a
    /// temporary directory.
    #[must_use]
    pub fn with_host(root: &'a Root, host: &'a dyn HostFiles, guests: &'a dyn Guests) -> Self {
        let (open, silent, silent_systemd) = (RefCell::default(), RefCell::default(), RefCell::default());
        Self { root, host, guests, open, silent, silent_systemd }
    }

    pub(crate) fn root(&self) -> &Root {
        self.root
    }

    pub(crate) fn host(&self) -> &dyn HostFiles {
        self.host
    }

    /// The text of a knob's file.
    pub(crate) fn read(&self, target: &Target) -> Result<String, Fault> {
        if let Some(unit) = target.form.unit() {
            return self.unit(unit);
        }
        match (&target.place, &target.form) {
            (Place::Thread { pid, tid, start }, form) => {
                self.same_thread(*pid, *tid, *start)?;
                if *form == Form::Scheduling {
                    return self.host.scheduling(*pid, *tid).map(|a| a.to_string()).map_err(Fault::from_io);
                }
                self.read_at(&Place::Host, &target.path)
            }
            (_, form) if form.is_group() => match self.host.identity(&target.path) {
                Ok(_) => Ok(PRESENT.to_owned()),
                Err(e) => match Fault::from_io(e) {
                    Fault::Gone(_) => Ok(ABSENT.to_owned()),
                    fault => Err(fault),
                },
            },
            (place, form) => {
                self.same_vector(form)?;
                self.read_at(place, &target.path).map_err(|fault| fault.of_target(target))
            }
        }
    }

    /// Checks that an interrupt's number still names the vector of the journal. As with threads the
    /// number may be given out again between this check and the next call.
    fn same_vector(&self, form: &Form) -> Result<(), Fault> {
        let Form::Interrupt { vector, inode } = form else { return Ok(()) };
        match self.host.identity(vector).map_err(Fault::from_io)? {
            now if now == *inode => Ok(()),
            _ => {
                let why = format!("{} is another interrupt by now", vector.display());
                Err(Fault::Gone(io::Error::new(io::ErrorKind::NotFound, why)))
            }
        }
    }

    /// Properties of a unit of systemd, as `systemctl show` prints them.
    ///
    /// # Errors
    /// `NotFound` for a unit that systemd does not have; else as `systemctl` reports.
    pub(crate) fn unit(&self, unit: &str) -> Result<String, Fault> {
        // A missing `systemctl` is not a missing unit.
        let not_gone = |e: io::Error| Fault::Io(io::Error::other(format!("systemctl: {e}")));
        let text = self.of_systemd(|| self.host.unit(unit)).map_err(not_gone)?;
        if Unit::new(&text).is_loaded() {
            return Ok(text);
        }
        Err(Fault::Gone(io::Error::new(io::ErrorKind::NotFound, format!("systemd has no unit {unit}"))))
    }

    fn of_systemd<T>(&self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if let Some(why) = self.silent_systemd.borrow().clone() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        call().inspect_err(|e| {
            if e.kind() == io::ErrorKind::TimedOut {
                *self.silent_systemd.borrow_mut() = Some(e.to_string());
            }
        })
    }

    /// Checks that a thread id still names the thread of the journal. The id may be reused between
    /// this check and the next call, because `sched_setattr` takes no file descriptor; as the
    /// kernel assigns ids in sequence, all of them would have to be used up meanwhile.
    pub(crate) fn same_thread(&self, pid: u32, tid: u32, start: u64) -> Result<(), Fault> {
        match self.host.thread_start(pid, tid).map_err(Fault::from_io)? {
            now if now == start => Ok(()),
            _ => Err(Fault::Gone(io::Error::new(io::ErrorKind::NotFound, format!("thread {tid} has ended")))),
        }
    }

    pub(crate) fn read_at(&self, place: &Place, path: &Path) -> Result<String, Fault> {
        match place {
            Place::Host | Place::Thread { .. } => self.host.read(path).map_err(Fault::from_io),
            Place::Guest { agent, .. } => {
                let bytes = self.in_guest(agent, |g| g.read(&path.to_string_lossy()))?;
                String::from_utf8(bytes)
                    .map_err(|e| Fault::Io(io::Error::new(io::ErrorKind::InvalidData, e.to_string())))
            }
        }
    }

    /// Writes to a knob's file.
    pub(crate) fn write(&self, target: &Target, text: &str) -> Result<(), Fault> {
        self.write_file(target, text).map_err(|fault| {
            let Some(status) = resctrl::status(target, &|file| self.host.read(file)) else { return fault };
            let told = |e: io::Error| io::Error::new(e.kind(), format!("{e}; resctrl: {status}"));
            match fault {
                Fault::Gone(e) => Fault::Gone(told(e)),
                Fault::Io(e) => Fault::Io(told(e)),
            }
        })
    }

    fn write_file(&self, target: &Target, text: &str) -> Result<(), Fault> {
        if let Some(unit) = target.form.unit() {
            return self.of_systemd(|| self.host.set_unit(unit, text)).map_err(Fault::Io);
        }
        match &target.place {
            Place::Thread { pid, tid, start } => {
                self.same_thread(*pid, *tid, *start)?;
                self.write_thread(*pid, *tid, &target.form, text)
            }
            Place::Host if target.form.is_group() => match text {
                PRESENT => self.host.make_dir(&target.path).map_err(Fault::from_io),
                _ => self.host.remove_dir(&target.path).map_err(Fault::from_io),
            },
            Place::Host => {
                self.same_vector(&target.form)?;
                self.host.write(&target.path, text).map_err(|e| Fault::from_io(e).of_target(target))
            }
            Place::Guest { agent, .. } => {
                self.in_guest(agent, |g| g.write(&target.path.to_string_lossy(), text.as_bytes()))
            }
        }
    }

    fn write_thread(&self, pid: u32, tid: u32, form: &Form, text: &str) -> Result<(), Fault> {
        let invalid = |e: String| Fault::Io(io::Error::new(io::ErrorKind::InvalidInput, e));
        match form {
            Form::Scheduling => {
                let attr = text.parse::<Attr>().map_err(|e| invalid(e.to_string()))?;
                self.host.set_scheduling(pid, tid, &attr).map_err(Fault::from_io)
            }
            Form::Affinity => {
                let cpus =
                    text::cpu_list(text).ok_or_else(|| invalid(format!("`{text}` is no list of CPUs")))?;
                self.host.set_affinity(pid, tid, &cpus).map_err(Fault::from_io)
            }
            Form::ThreadCgroup { mount, .. } | Form::ResctrlTask { mount } => {
                let below = text.strip_prefix('/').unwrap_or(text);
                let file = mount.join(below).join(TASKS);
                // `ENOENT` here is a missing cgroup, not a missing thread: that just existed.
                self.host.write(&file, &tid.to_string()).map_err(|e| match Fault::from_io(e) {
                    Fault::Gone(e) if e.raw_os_error() != Some(Errno::SRCH.raw_os_error()) => Fault::Io(e),
                    other => other,
                })
            }
            _ => Err(invalid("not a thread's setting".to_owned())),
        }
    }

    fn connect(&self, agent: &AgentAddress) -> Result<Box<dyn GuestFiles>, Fault> {
        if let Some(why) = self.silent.borrow().get(agent) {
            return Err(Fault::Io(io::Error::new(io::ErrorKind::TimedOut, why.clone())));
        }
        self.guests.connect(agent).map_err(|e| {
            self.note_silent(agent, &e);
            Fault::of_connect(e)
        })
    }

    fn note_silent(&self, agent: &AgentAddress, error: &io::Error) {
        if error.kind() == io::ErrorKind::TimedOut {
            self.silent.borrow_mut().insert(agent.clone(), error.to_string());
        }
    }

    fn in_guest<T>(
        &self,
        agent: &AgentAddress,
        action: impl FnOnce(&mut dyn GuestFiles) -> io::Result<T>,
    ) -> Result<T, Fault> {
        let mut open = self.open.borrow_mut();
        if !open.contains_key(agent) {
            open.insert(agent.clone(), self.connect(agent)?);
        }
        let Some(guest) = open.get_mut(agent) else {
            return Err(Fault::Io(io::Error::other("guest connection lost")));
        };
        let result = action(guest.as_mut());
        // After an error the agent's stream may be out of step; a missing file is an ordinary
        // answer.
        if let Some(e) = result.as_ref().err().filter(|e| e.kind() != io::ErrorKind::NotFound) {
            open.remove(agent);
            self.note_silent(agent, e);
        }
        result.map_err(Fault::from_io)
    }
}
