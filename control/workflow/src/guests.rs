//! Guests' settings files, reached through the QEMU guest agent.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rtvirtio_apply::{GuestFiles, Guests};
use rtvirtio_vmm::{AgentAddress, GuestAgent, VmmError};

/// Timeout of an agent's answer: a guest under emulation, busy with I/O, answers slowly.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for all agents of one call that has a time limit of its own, however many are silent.
const ALL_AGENTS: Duration = Duration::from_secs(25);
/// Timeout of each agent once that time is over: one that is well answers sooner.
const LEAST: Duration = Duration::from_millis(500);
/// A settings file is at most a page (`Documentation/filesystems/sysfs.rst`).
const LARGEST: usize = 4096;

/// Connects to agents by their addresses.
pub struct GuestAgents;

/// Like [`GuestAgents`], for one call that has a time limit of its own: the first silent agent is
/// waited for as long, and all together only a little longer.
#[derive(Default)]
pub struct AgentsInTime {
    /// Time for connections, and for answers that did not come.
    spent: Rc<Cell<Duration>>,
}

impl AgentsInTime {
    /// Timeout of the next connection.
    fn timeout(&self) -> Duration {
        ALL_AGENTS.saturating_sub(self.spent.get()).clamp(LEAST, AGENT_TIMEOUT)
    }
}

struct Files(GuestAgent);

/// Files of a guest, for a call that has a time limit.
struct FilesInTime {
    files: Files,
    spent: Rc<Cell<Duration>>,
}

impl Guests for GuestAgents {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let agent = GuestAgent::reach(agent, AGENT_TIMEOUT).map_err(io_error)?;
        Ok(Box::new(Files(agent)))
    }
}

impl Guests for AgentsInTime {
    fn connect(&self, agent: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
        let begin = Instant::now();
        let reached = GuestAgent::reach(agent, self.timeout());
        self.spent.set(self.spent.get() + begin.elapsed());
        let files = Files(reached.map_err(io_error)?);
        Ok(Box::new(FilesInTime { files, spent: Rc::clone(&self.spent) }))
    }
}

impl FilesInTime {
    fn counted<T>(&mut self, action: impl FnOnce(&mut Files) -> io::Result<T>) -> io::Result<T> {
        let begin = Instant::now();
        let done = action(&mut self.files);
        if done.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::TimedOut) {
            self.spent.set(self.spent.get() + begin.elapsed());
        }
        done
    }
}

impl GuestFiles for FilesInTime {
    fn read(&mut self, path: &str) -> io::Result<Vec<u8>> {
        self.counted(|files| files.read(path))
    }

    fn write(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.counted(|files| files.write(path, bytes))
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn several_silent_agents_share_one_time() {
        let agents = AgentsInTime::default();
        let after = |spent: u64| {
            agents.spent.set(Duration::from_secs(spent));
            agents.timeout()
        };
        assert_eq!(after(0), AGENT_TIMEOUT);
        assert_eq!(after(20), Duration::from_secs(5));
        assert_eq!(after(25), LEAST);
        assert_eq!(after(26), LEAST);
        // Guests whose QEMU listens, and in which no agent runs.
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let listen = |name: &str| (dir.path().join(name), UnixListener::bind(dir.path().join(name)).unwrap());
        for (path, _listener) in ["a", "b"].map(listen) {
            let before = agents.spent.get();
            let e = agents.connect(&AgentAddress::Socket(path)).err().unwrap();
            assert!(e.kind() == io::ErrorKind::TimedOut && e.to_string().contains("within 500 ms"), "{e}");
            assert!(agents.spent.get() > before);
        }
    }
}
