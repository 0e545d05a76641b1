//! Commands that an agent allows: distributions disable those that run programs or access files.

use serde::Deserialize;

use super::{GuestAgent, SMALL_REPLY};
use crate::VmmError;

/// Commands that are needed to read and set a guest's knobs and to run tasks in it.
pub const NEEDED: [&str; 7] = [
    "guest-exec",
    "guest-exec-status",
    "guest-file-open",
    "guest-file-read",
    "guest-file-write",
    "guest-file-flush",
    "guest-file-close",
];

/// Class of the error for a command that is disabled, or that the agent does not know.
pub(super) const NOT_FOUND: &str = "CommandNotFound";

#[derive(Deserialize)]
struct Info {
    supported_commands: Vec<Command>,
}

#[derive(Deserialize)]
struct Command {
    name: String,
    enabled: bool,
}

impl GuestAgent {
    /// Commands among `needed` that are not enabled.
    pub(super) fn not_enabled<'n>(&mut self, needed: &[&'n str]) -> Result<Vec<&'n str>, VmmError> {
        let info: Info = self.call("guest-info", None, SMALL_REPLY)?;
        let enabled = |name: &str| info.supported_commands.iter().any(|c| c.enabled && c.name == name);
        Ok(needed.iter().copied().filter(|name| !enabled(name)).collect())
    }

    /// Checks that the commands `needed` are enabled.
    ///
    /// # Errors
    /// [`VmmError::Disabled`] with the disabled ones; an error of the connection. An agent that
    /// does not list its commands (`guest-info` itself is disabled) passes: each command then fails
    /// by itself.
    pub fn require(&mut self, needed: &[&str]) -> Result<(), VmmError> {
        let missing = match self.not_enabled(needed) {
            Err(VmmError::Disabled { .. }) => return Ok(()),
            missing => missing?,
        };
        if missing.is_empty() {
            return Ok(());
        }
        Err(VmmError::Disabled { peer: self.link.peer().into(), commands: missing.join(", ") })
    }
}
