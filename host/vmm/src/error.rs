//! What can go wrong between us and a virtual machine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A failed exchange with QEMU or with the agent in a guest.
///
/// `peer` names the other side and its socket, `operation` what was being done.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The socket could not be reached.
    #[error(
        "cannot connect to {peer}: {source}; is the virtual machine running, and is no other client connected to this socket?"
    )]
    Connect {
        /// The other side.
        peer: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A UNIX socket address holds at most 107 bytes (`sun_path` in unix(7)).
    #[error(
        "socket path {path:?} has {len} bytes, the kernel takes at most 107; use a shorter run directory"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
    /// Reading or writing the socket failed.
    #[error("{peer}: {operation}: {source}")]
    Io {
        /// The other side.
        peer: String,
        /// What was being done.
        operation: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// No (complete) answer in time.
    #[error("{peer}: {operation}: no answer within {} ms; the other side hangs, is paused or is starved of CPU time", waited.as_millis())]
    Timeout {
        /// The other side.
        peer: String,
        /// What was being done.
        operation: String,
        /// How long we waited.
        waited: Duration,
    },
    /// The other side closed the connection: QEMU ended, or ends.
    #[error("{peer}: {operation}: connection closed; the virtual machine has ended or dropped us")]
    Closed {
        /// The other side.
        peer: String,
        /// What was being done.
        operation: String,
    },
    /// The other side sent more than we are ready to keep.
    #[error("{peer}: {operation}: answer is larger than the limit of {limit} bytes; refused")]
    TooLarge {
        /// The other side.
        peer: String,
        /// What was being done.
        operation: String,
        /// The limit in bytes.
        limit: usize,
    },
    /// The other side sent more than we are ready to look at.
    #[error("{peer}: {operation}: more than {limit} {what}; the connection is given up")]
    TooMany {
        /// The other side.
        peer: String,
        /// What was being done.
        operation: String,
        /// Of what.
        what: &'static str,
        /// So many are looked at.
        limit: usize,
    },
    /// The answer does not follow the protocol.
    #[error("{peer}: {operation}: unexpected answer: {}", shown(detail))]
    Protocol {
        /// The other side.
        peer: String,
        /// What was being done.
        operation: String,
        /// What is wrong with it.
        detail: String,
    },
    /// Commands that the agent in a guest has, and does not take: RHEL and its kin disable
    /// `guest-exec` and the file commands.
    #[error(
        "{peer} does not allow {commands}: allow them inside the guest, on RHEL and Fedora in /etc/sysconfig/qemu-ga (out of BLOCK_RPCS, or into `--allow-rpcs` of FILTER_RPC_ARGS), \
         elsewhere with `block-rpcs` or `allow-rpcs` in /etc/qemu/qemu-ga.conf, and restart qemu-guest-agent"
    )]
    Disabled {
        /// The agent.
        peer: String,
        /// Their names.
        commands: String,
    },
    /// The other side understood the command and refused it.
    #[error("{peer}: {operation} was refused: {} ({})", shown(desc), shown(class))]
    Refused {
        /// The other side.
        peer: String,
        /// The command.
        operation: String,
        /// QEMU's error class, such as `CommandNotFound`.
        class: String,
        /// QEMU's own words.
        desc: String,
    },
    /// libvirt's client is missing.
    #[error(
        "virsh is not installed: VMs of libvirt are reached through it (Debian: apt-get install libvirt-clients)"
    )]
    NoVirsh,
    /// libvirt could not do it.
    #[error("{peer}: {operation}: {}", shown(message))]
    Libvirt {
        /// The daemon.
        peer: String,
        /// The command of virsh.
        operation: String,
        /// libvirt's own words.
        message: String,
    },
    /// libvirt's daemon was not reached.
    #[error(
        "{peer} was not reached: {}; is its daemon running (`systemctl status libvirtd`, or virtqemud), and may \
         this user connect to it (root, or a member of the group libvirt)?",
        shown(message)
    )]
    NoLibvirt {
        /// The daemon.
        peer: String,
        /// libvirt's own words.
        message: String,
    },
    /// No agent has its end of libvirt's channel open.
    #[error("{peer}: no guest agent is connected; is the guest up, and does qemu-guest-agent run in it?")]
    NoAgent {
        /// The domain's agent.
        peer: String,
    },
    /// The guest has no device that is certainly this disk.
    #[error(
        "{}; give the disk a <serial> in the domain's XML, and restart the domain",
        guest_disk(target, found)
    )]
    GuestDisk {
        /// libvirt's name of the disk.
        target: String,
        /// Devices of the guest that it could be.
        found: Vec<String>,
    },
}

fn guest_disk(target: &str, found: &[String]) -> String {
    match found {
        [] => format!("the guest agent reports no disk at the address of {target}"),
        found => format!("the guest's {} could all be {target}", shown(&found.join(", "))),
    }
}

/// Most characters of the other side's words that an error shows.
const MOST_SHOWN: usize = 400;

/// One line of words of a guest or its QEMU, which may be hostile, for an error or a terminal:
/// control characters are escaped, and what is beyond 400 characters is left out.
#[must_use]
pub fn shown(words: &str) -> String {
    let mut shown = String::new();
    for (i, c) in words.chars().enumerate() {
        if i == MOST_SHOWN {
            shown.push_str("...");
            break;
        }
        if c.is_control() { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

impl VmmError {
    /// True when waiting longer might have helped.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, VmmError::Timeout { .. })
    }

    /// True when the other side is gone: trying again on this connection cannot help.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        match self {
            VmmError::Closed { .. } | VmmError::Connect { .. } => true,
            VmmError::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_hostile_guest_are_no_commands_to_a_terminal() {
        let refused = VmmError::Refused {
            peer: "guest agent vm0".to_owned(),
            operation: "guest-file-open".to_owned(),
            class: "Generic\rError".to_owned(),
            desc: format!("\u{1b}]0;title\u{7}{}", "x".repeat(1 << 20)),
        };
        let text = refused.to_string();
        assert!(text.contains("\\u{1b}]0;title\\u{7}xx") && text.contains("... (Generic\\rError)"), "{text}");
        assert!(text.len() < 1_000 && !text.contains(char::is_control), "{text}");
        let odd = VmmError::Protocol {
            peer: "QMP vm0".to_owned(),
            operation: "greeting".to_owned(),
            detail: "unknown field `\u{1b}[2J`".to_owned(),
        };
        assert!(odd.to_string().ends_with("unknown field `\\u{1b}[2J`"), "{odd}");
    }
}
