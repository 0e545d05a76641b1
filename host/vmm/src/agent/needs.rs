//! Requirements of tasks that run in a guest.

use super::{GuestAgent, NEEDED};
use crate::VmmError;

/// Paths of fio in common distributions.
const FIO: [&str; 3] = ["/usr/bin/fio", "/usr/local/bin/fio", "/bin/fio"];
/// Bytes of it that are read, as only its existence matters.
const LOOK: usize = 4;

impl GuestAgent {
    /// Missing requirements of tasks that run in the guest, each with the remedy; empty for none.
    /// Starts nothing in the guest.
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
