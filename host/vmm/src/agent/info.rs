//! Which commands an agent takes: distributions switch those off that run programs or touch files.

use serde::Deserialize;

use super::{GuestAgent, SMALL_REPLY};
use crate::VmmError;

/// Commands that reading and setting a guest's knobs and running tasks in it take.
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
    /// Those of the commands `needed` that are not enabled.
    pub(super) fn not_enabled<'n>(&mut self, needed: &[&'n str]) -> Result<Vec<&'n str>, VmmError> {
        let info: Info = self.call("guest-info", None, SMALL_REPLY)?;
        let enabled = |name: &str| info.supported_commands.iter().any(|c| c.enabled && c.name == name);
        Ok(needed.iter().copied().filter(|name| !enabled(name)).collect())
    }

    /// Checks that the commands `needed` are enabled.
    ///
    /// # Errors
    /// [`VmmError::Disabled`] with those that are not; the connection's own trouble. An agent that
    /// does not tell (`guest-info` itself is disabled) is asked no further: each command names
    /// itself.
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
