//! Guests' settings files, reached through the QEMU guest agent.

use std::io;
use std::time::{Duration, Instant};

use rtvirtio_apply::{GuestFiles, Guests};
use rtvirtio_vmm::{AgentAddress, GuestAgent, VmmError};

pub use rtvirtio_vmm::WaitLimit;

/// Timeout of an agent's answer: a guest under emulation, busy with I/O, answers slowly.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);
/// A settings file is at most a page (`Documentation/filesystems/sysfs.rst`).
const LARGEST: usize = 4096;

/// Connects to agents by their addresses.
pub struct GuestAgents;

/// Like [`GuestAgents`], with a [`WaitLimit`] for waits for agents alone: silent agents are waited
/// for until the same time, however many they are, and each only for a moment after it.
pub struct AgentsInTime {
    until: Instant,
}

impl AgentsInTime {
    /// Waits for agents for this time from now on, all together.
    #[must_use]
    pub fn lasting(time: Duration) -> Self {
        Self { until: Instant::now() + time }
    }
}

/// Files of one guest. With `until` each command ends by then, or soon after.
struct Files {
    agent: GuestAgent,
    until: Option<Instant>,
}

fn connect(agent: &AgentAddress, until: Option<Instant>) -> io::Result<Box<dyn GuestFiles>> {
    let _limit = until.map(WaitLimit::until);
    let agent = GuestAgent::reach(agent, AGENT_TIMEOUT).map_err(io_error)?;
    Ok(Box::new(Files { agent, until }))
}

impl Guests for GuestAgents {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        connect(agent, None)
    }
}

impl Guests for AgentsInTime {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        connect(agent, Some(self.until))
    }
}

impl GuestFiles for Files {
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>> {
        let _limit = self.until.map(WaitLimit::until);
        self.agent.read_file(path, LARGEST).map_err(io_error)
    }

    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let _limit = self.until.map(WaitLimit::until);
        self.agent.write_file(path, bytes).map_err(io_error)
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn several_silent_agents_share_one_time() {
        // Guests whose QEMU listens, and in which no agent runs.
        let agents = AgentsInTime::lasting(Duration::ZERO);
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let listen = |name: &str| (dir.path().join(name), UnixListener::bind(dir.path().join(name)).unwrap());
        for (path, _listener) in ["a", "b"].map(listen) {
            let e = agents.connect(&AgentAddress::Socket(path)).err().unwrap();
            assert!(e.kind() == io::ErrorKind::TimedOut && e.to_string().contains("within 500 ms"), "{e}");
        }
        // Nor longer where what plans and applies for the call asks them.
        let _limit = WaitLimit::lasting(Duration::ZERO);
        let path = dir.path().join("c");
        let _listener = UnixListener::bind(&path).unwrap();
        let e = GuestAgents.connect(&AgentAddress::Socket(path)).err().unwrap();
        assert!(e.kind() == io::ErrorKind::TimedOut && e.to_string().contains("within 500 ms"), "{e}");
    }
}
