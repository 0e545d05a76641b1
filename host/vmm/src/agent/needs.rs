//! What a guest lacks for tasks that are run and measured in it.

use super::{GuestAgent, NEEDED};
use crate::VmmError;

/// Where fio lies.
const FIO: [&str; 3] = ["/usr/bin/fio", "/usr/local/bin/fio", "/bin/fio"];
/// Bytes of it that are read: that it is there is what counts.
const LOOK: usize = 4;

impl GuestAgent {
    /// What the guest lacks for tasks that run in it, each with the remedy; empty when nothing.
    /// Starts nothing in the guest.
    ///
    /// # Errors
    /// The agent does not answer, or the connection's own trouble.
    pub fn lacks_for_tasks(&mut self) -> Result<Vec<String>, VmmError> {
        let refused = self.not_enabled(&NEEDED)?;
        let mut lacks = Vec::new();
        if !refused.is_empty() {
            lacks.push(format!(
                "its agent refuses {}: allow them in the guest (`block-rpcs` or `allow-rpcs` in /etc/qemu/qemu-ga.conf, on RHEL \
                 /etc/sysconfig/qemu-ga) and restart the agent there",
                refused.join(", ")
            ));
        }
        if refused.iter().any(|name| name.starts_with("guest-file")) {
            lacks
                .push("whether fio is installed in it is not known, because files cannot be read".to_owned());
        } else if !self.has_any(&FIO)? {
            lacks.push(format!("fio is not installed in it ({}): install it there", FIO.join(", ")));
        }
        Ok(lacks)
    }

    fn has_any(&mut self, paths: &[&str]) -> Result<bool, VmmError> {
        for path in paths {
            match self.read_file(path, LOOK) {
                Ok(_) | Err(VmmError::TooLarge { .. }) => return Ok(true),
                Err(VmmError::Refused { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(false)
    }
}
