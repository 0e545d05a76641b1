//! Guests' settings files, reached through the QEMU guest agent.

use std::io;
use std::time::Duration;

use rtvirtio_apply::{GuestFiles, Guests};
use rtvirtio_vmm::{AgentAddress, GuestAgent, VmmError};

/// Timeout of an agent's answer: a guest under emulation, busy with I/O, answers slowly.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);
/// A settings file is at most a page (`Documentation/filesystems/sysfs.rst`).
const LARGEST: usize = 4096;

/// Connects to agents by their addresses.
pub struct GuestAgents;

struct Files(GuestAgent);

impl Guests for GuestAgents {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let agent = GuestAgent::reach(agent, AGENT_TIMEOUT).map_err(io_error)?;
        Ok(Box::new(Files(agent)))
    }
}

impl GuestFiles for Files {
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>> {
        self.0.read_file(path, LARGEST).map_err(io_error)
    }

    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.write_file(path, bytes).map_err(io_error)
    }
}

/// The kinds that `apply` distinguishes: gone, refused, possibly slow.
fn io_error(error: VmmError) -> io::Error {
    let kind = match &error {
        VmmError::Connect { source, .. } => source.kind(),
        // Of an answer that did not come: QEMU, or only the agent, may have ended.
        VmmError::Closed { .. } => io::ErrorKind::ConnectionReset,
        // Without an agent one was waited for.
        VmmError::Timeout { .. } | VmmError::NoAgent { .. } => io::ErrorKind::TimedOut,
        // The agent reports errors as text only, as of strerror(3).
        VmmError::Refused { desc, .. } if desc.contains("No such file") => io::ErrorKind::NotFound,
        VmmError::Refused { .. } => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
