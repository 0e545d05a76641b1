//! Address of a guest's agent.

use std::fmt;
use std::path::PathBuf;

use rtvirtio_kernel::ProcessId;
use serde::{Deserialize, Serialize};

/// Host's end of a guest agent's channel. It can be stored: a record of changes in a guest leads
/// back to this guest, and not to a later start of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AgentAddress {
    /// A UNIX socket on which QEMU listens.
    Socket(PathBuf),
    /// A channel that libvirt has open.
    Libvirt(LibvirtAgent),
}

/// Agent of a libvirt VM, in one start of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LibvirtAgent {
    pub uri: String,
    pub uuid: String,
    /// Process of QEMU in this start.
    pub process: ProcessId,
}

impl From<PathBuf> for AgentAddress {
    fn from(socket: PathBuf) -> Self {
        Self::Socket(socket)
    }
}

impl From<&str> for AgentAddress {
    fn from(socket: &str) -> Self {
        Self::Socket(socket.into())
    }
}

impl fmt::Display for AgentAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "{}", path.display()),
            Self::Libvirt(agent) => write!(f, "of domain {} ({})", agent.uuid, agent.uri),
        }
    }
}
