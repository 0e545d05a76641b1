//! Commands to a VM's monitor and guest agent through libvirt, each by a `virsh` of its own.

use std::sync::Arc;
use std::time::Duration;

use super::{Access, Daemon};
use crate::VmmError;

/// Text that libvirt puts before the message of a guest agent that refused a command
/// (`qemuAgentCheckError()` in `src/qemu/qemu_agent.c`).
const REFUSED: &str = "unable to execute QEMU agent command";
/// Time for virsh beyond libvirt's own time limit for the agent.
const GRACE: Duration = Duration::from_secs(10);

/// Connection to a VM's monitor or agent through libvirt.
#[derive(Clone, Debug)]
pub(crate) struct DomainLink {
    daemon: Arc<dyn Daemon>,
    uuid: String,
    peer: String,
}

impl DomainLink {
    pub(crate) fn new(daemon: Arc<dyn Daemon>, uuid: &str, peer: String) -> Self {
        Self { daemon, uuid: uuid.to_owned(), peer }
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Answer of QEMU to a monitor command, errors included.
    pub(crate) fn monitor(
        &self,
        request: &str,
        operation: &str,
        limit: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, VmmError> {
        let args = ["qemu-monitor-command", self.uuid.as_str(), request];
        self.daemon.call(&args, Access::Write, limit, timeout).map_err(|e| self.named(e, operation))
    }

    /// Answer of the agent to a command. libvirt synchronises with the agent.
    pub(crate) fn agent(
        &self,
        request: &str,
        operation: &str,
        limit: usize,
        timeout: Duration,
    ) -> Result<Vec<u8>, VmmError> {
        // Whole seconds; 0 would be a poll.
        let seconds = timeout.as_millis().div_ceil(1000).max(1).to_string();
        let args = ["qemu-agent-command", "--timeout", seconds.as_str(), self.uuid.as_str(), request];
        let answer = self.daemon.call(&args, Access::Write, limit, timeout + GRACE);
        answer.map_err(|e| self.agent_error(e, operation, timeout))
    }

    fn named(&self, error: VmmError, operation: &str) -> VmmError {
        let (peer, operation) = (self.peer.clone(), operation.to_owned());
        match error {
            VmmError::Libvirt { message, .. } if message.contains("domain is not running") => {
                VmmError::Closed { peer, operation }
            }
            VmmError::Libvirt { message, .. } => VmmError::Libvirt { peer, operation, message },
            VmmError::Timeout { waited, .. } => VmmError::Timeout { peer, operation, waited },
            VmmError::TooLarge { limit, .. } => VmmError::TooLarge { peer, operation, limit },
            other => other,
        }
    }

    /// Maps libvirt's messages about the agent to errors: it has only text for them.
    fn agent_error(&self, error: VmmError, operation: &str, waited: Duration) -> VmmError {
        let VmmError::Libvirt { message, .. } = &error else { return self.named(error, operation) };
        let (peer, operation) = (self.peer.clone(), operation.to_owned());
        if let Some((_, said)) = message.split_once(REFUSED) {
            // `'guest-file-open': failed to open file ...`
            let desc = said.split_once("': ").map_or(said, |(_, desc)| desc).trim().to_owned();
            return VmmError::Refused { peer, operation, class: "GenericError".to_owned(), desc };
        }
        if message.contains("agent is not connected") {
            return VmmError::NoAgent { peer };
        }
        if message.contains("agent")
            && (message.contains("not responding") || message.contains("not available"))
        {
            return VmmError::Timeout { peer, operation, waited };
        }
        self.named(error, &operation)
    }
}
