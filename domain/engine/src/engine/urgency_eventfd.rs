//! The eventfd that a VM's urgent completions signal.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;

use rtvirtio_sched::Class;

use super::uring::{CompletionToken, Uring};

/// Notifies a program of completed real-time requests, or of urgent frames to a port, before the
/// guest is notified: the program raises the guest's vCPUs.
#[derive(Debug, Default)]
pub(crate) struct UrgencyEventfd {
    eventfd: Option<Arc<OwnedFd>>,
    /// Whether real-time requests completed since the last signal.
    is_due: bool,
    signals: u64,
}

impl UrgencyEventfd {
    /// Replaces the eventfd. Returns the previous one: the engine's thread does not close it.
    pub fn replace(&mut self, eventfd: Option<Arc<OwnedFd>>) -> Option<Arc<OwnedFd>> {
        std::mem::replace(&mut self.eventfd, eventfd)
    }

    /// Notes the class of a completed request.
    pub fn note(&mut self, class: Class) {
        self.is_due |= class == Class::RealTime;
    }

    /// Signals the eventfd, if it is due.
    pub fn signal(&mut self, ring: &mut Uring) -> io::Result<()> {
        if std::mem::take(&mut self.is_due) {
            if let Some(eventfd) = &self.eventfd {
                self.signals += 1;
                ring.signal_eventfd(eventfd.as_raw_fd(), CompletionToken::Ignored)?;
            }
        }
        Ok(())
    }

    /// Number of signals; `None` without an eventfd.
    pub fn signals(&self) -> Option<u64> {
        self.eventfd.as_ref().map(|_| self.signals)
    }
}
