//! Transport of the commands of both clients, QMP and the guest agent.

use crate::VmmError;
use crate::libvirt::DomainLink;
use crate::wire::Wire;

/// Socket of QEMU, or libvirt, which has that socket open.
#[derive(Debug)]
pub(crate) enum Link {
    Socket(Wire),
    Libvirt(DomainLink),
}

impl Link {
    /// Name of the other side, for errors.
    pub(crate) fn peer(&self) -> &str {
        match self {
            Self::Socket(wire) => wire.peer(),
            Self::Libvirt(link) => link.peer(),
        }
    }

    /// Error of an answer to `operation` that is not understood.
    pub(crate) fn protocol(&self, operation: &str, detail: impl Into<String>) -> VmmError {
        VmmError::Protocol { peer: self.peer().into(), operation: operation.into(), detail: detail.into() }
    }

    /// Number of bytes that were read and not yet used.
    #[cfg(test)]
    pub(crate) fn buffered(&self) -> usize {
        match self {
            Self::Socket(wire) => wire.buffered(),
            Self::Libvirt(_) => 0,
        }
    }
}
