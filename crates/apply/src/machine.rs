//! The machine that is changed: the host's files, and the files inside guests.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_host::Root;
use rustix::io::Errno;

use crate::target::{Place, Target};

/// Kernel files of the host. [`Root`] is the real one.
pub trait HostFiles {
    /// The whole text of a file.
    ///
    /// # Errors
    /// As the system call says.
    fn read(&self, path: &Path) -> io::Result<String>;
    /// Writes one whole value to a file that exists.
    ///
    /// # Errors
    /// As the system call says.
    fn write(&self, path: &Path, value: &str) -> io::Result<()>;
    /// Names in a directory, sorted.
    ///
    /// # Errors
    /// As the system call says.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// What tells a directory from a later one of the same name.
    ///
    /// # Errors
    /// As the system call says.
    fn identity(&self, path: &Path) -> io::Result<u64>;
}

impl HostFiles for Root {
    fn read(&self, path: &Path) -> io::Result<String> {
        Self::read(self, path).map_err(rtvirtio_host::HostError::into_io)
    }

    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        Self::write(self, path, value).map_err(rtvirtio_host::HostError::into_io)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        Self::list(self, dir).map_err(rtvirtio_host::HostError::into_io)
    }

    fn identity(&self, path: &Path) -> io::Result<u64> {
        self.inode(path).map_err(rtvirtio_host::HostError::into_io)
    }
}

/// Files inside one guest, through its agent.
pub trait GuestFiles {
    /// The whole content of a file.
    ///
    /// # Errors
    /// Kind `NotFound` when the file does not exist in the guest.
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>>;
    /// Writes one whole value to a file that exists.
    ///
    /// # Errors
    /// Kind `InvalidInput` when the guest's kernel refuses the value.
    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()>;
}

/// Connects to guests' agents.
pub trait Guests {
    /// Connects to the agent at a socket.
    ///
    /// # Errors
    /// Kind `NotFound` or `ConnectionRefused` when the guest is gone; any other kind when it may only be slow.
    fn connect(&self, agent: &Path) -> io::Result<Box<dyn GuestFiles>>;
}

/// No guest can be reached: for plans that touch only the host.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoGuests;

impl Guests for NoGuests {
    fn connect(&self, agent: &Path) -> io::Result<Box<dyn GuestFiles>> {
        let text = format!("no way to reach the guest agent {}", agent.display());
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }
}

/// Host and guests together. Connections to guests are made on first use and kept.
pub struct Machine<'a> {
    root: &'a Root,
    host: &'a dyn HostFiles,
    guests: &'a dyn Guests,
    open: RefCell<BTreeMap<PathBuf, Box<dyn GuestFiles>>>,
}

/// Why a knob could not be read or written.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file, or the device, cgroup or guest that it belongs to, is gone.
    Gone(io::Error),
    /// Anything else.
    Io(io::Error),
}

impl Fault {
    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Gone(e) | Self::Io(e) => e,
        }
    }

    fn of(error: io::Error) -> Self {
        let errno = error.raw_os_error();
        let gone = [Errno::NODEV, Errno::NXIO].iter().any(|e| errno == Some(e.raw_os_error()));
        // The connection kinds come from a guest's agent: the guest has ended.
        let ended = [
            io::ErrorKind::NotFound,
            io::ErrorKind::ConnectionRefused,
            io::ErrorKind::ConnectionReset,
            io::ErrorKind::BrokenPipe,
        ];
        if gone || ended.contains(&error.kind()) { Self::Gone(error) } else { Self::Io(error) }
    }
}

impl<'a> Machine<'a> {
    /// The machine below `root`, and guests as `guests` reaches them.
    #[must_use]
    pub fn new(root: &'a Root, guests: &'a dyn Guests) -> Self {
        Self::with_host(root, root, guests)
    }

    /// The same with another way to write host files, such as one that behaves like a kernel over a temporary directory.
    #[must_use]
    pub fn with_host(root: &'a Root, host: &'a dyn HostFiles, guests: &'a dyn Guests) -> Self {
        Self { root, host, guests, open: RefCell::new(BTreeMap::new()) }
    }

    pub(crate) fn root(&self) -> &Root {
        self.root
    }

    pub(crate) fn host(&self) -> &dyn HostFiles {
        self.host
    }

    /// The text of a knob's file.
    pub(crate) fn read(&self, target: &Target) -> Result<String, Fault> {
        self.read_at(&target.place, &target.path)
    }

    /// The text of a file at a place.
    pub(crate) fn read_at(&self, place: &Place, path: &Path) -> Result<String, Fault> {
        match place {
            Place::Host => self.host.read(path).map_err(Fault::of),
            Place::Guest { agent, .. } => {
                let bytes = self.in_guest(agent, |g| g.read(&path.to_string_lossy()))?;
                String::from_utf8(bytes)
                    .map_err(|e| Fault::Io(io::Error::new(io::ErrorKind::InvalidData, e.to_string())))
            }
        }
    }

    /// Writes to a knob's file.
    pub(crate) fn write(&self, target: &Target, text: &str) -> Result<(), Fault> {
        match &target.place {
            Place::Host => self.host.write(&target.path, text).map_err(Fault::of),
            Place::Guest { agent, .. } => {
                self.in_guest(agent, |g| g.write(&target.path.to_string_lossy(), text.as_bytes()))
            }
        }
    }

    fn in_guest<T>(
        &self,
        agent: &Path,
        action: impl FnOnce(&mut dyn GuestFiles) -> io::Result<T>,
    ) -> Result<T, Fault> {
        let mut open = self.open.borrow_mut();
        if !open.contains_key(agent) {
            let guest = self.guests.connect(agent).map_err(Fault::of)?;
            open.insert(agent.to_owned(), guest);
        }
        let Some(guest) = open.get_mut(agent) else {
            return Err(Fault::Io(io::Error::other("guest connection lost")));
        };
        let result = action(guest.as_mut());
        // After an error the agent's stream may be out of step; a missing file is an ordinary answer.
        if result.as_ref().is_err_and(|e| e.kind() != io::ErrorKind::NotFound) {
            open.remove(agent);
        }
        result.map_err(Fault::of)
    }
}
