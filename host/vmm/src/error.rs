//! Errors between this process and a virtual machine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Failed exchange with QEMU or with the agent in a guest.
///
/// `peer` names the other side and its socket, `operation` the command or step.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The socket could not be reached.
    #[error(
        "cannot connect to {peer}: {source}; is the virtual machine running, and is no other client connected to this socket?"
    )]
    Connect { peer: String, source: io::Error },
    /// A UNIX socket address holds at most 107 bytes (`sun_path` in unix(7)).
    #[error(
        "socket path {path:?} has {len} bytes, the kernel takes at most 107; use a shorter run directory"
    )]
    PathTooLong {
        path: PathBuf,
        /// Length of the path, in bytes.
        len: usize,
    },
    /// Reading or writing the socket failed.
    #[error("{peer}: {operation}: {source}")]
    Io { peer: String, operation: String, source: io::Error },
    /// No (complete) answer in time.
    #[error("{peer}: {operation}: no answer within {} ms; the other side hangs, is paused or is starved of CPU time", waited.as_millis())]
    Timeout { peer: String, operation: String, waited: Duration },
    /// The other side closed the connection: QEMU ended, or ends.
    #[error("{peer}: {operation}: connection closed; the virtual machine has ended or closed the connection")]
    Closed { peer: String, operation: String },
    /// The other side sent more bytes than are kept.
    #[error("{peer}: {operation}: answer is larger than the limit of {limit} bytes; refused")]
    TooLarge { peer: String, operation: String, limit: usize },
    /// The other side sent more items than are examined.
    #[error("{peer}: {operation}: more than {limit} {what}; the connection is closed")]
    TooMany {
        peer: String,
        operation: String,
        /// Kind of the items, such as `drives`.
        what: &'static str,
        limit: usize,
    },
    /// The answer does not follow the protocol.
    #[error("{peer}: {operation}: unexpected answer: {}", shown(detail))]
    Protocol { peer: String, operation: String, detail: String },
    /// Commands that the agent in a guest knows but does not allow: RHEL and its derivatives
    /// disable `guest-exec` and the file commands.
    #[error(
        "{peer} does not allow {commands}: allow them inside the guest, on RHEL and Fedora in /etc/sysconfig/qemu-ga (out of BLOCK_RPCS, or into `--allow-rpcs` of FILTER_RPC_ARGS), \
         elsewhere with `block-rpcs` or `allow-rpcs` in /etc/qemu/qemu-ga.conf, and restart qemu-guest-agent"
    )]
    Disabled {
        peer: String,
        /// Names of the commands, separated by commas.
        commands: String,
    },
    /// The other side understood the command and refused it.
    #[error("{peer}: {operation} was refused: {} ({})", shown(desc), shown(class))]
    Refused {
        peer: String,
        operation: String,
        /// QEMU's error class, such as `CommandNotFound`.
        class: String,
        /// Description from QEMU or the agent.
        desc: String,
    },
    /// libvirt's client is missing.
    #[error(
        "virsh is not installed: VMs of libvirt are reached through it (Debian: apt-get install libvirt-clients)"
    )]
    NoVirsh,
    /// A command of libvirt failed.
    #[error("{peer}: {operation}: {}", shown(message))]
    Libvirt {
        /// Name and URI of the daemon.
        peer: String,
        /// Command of virsh, such as `dumpxml`.
        operation: String,
        message: String,
    },
    /// libvirt's daemon was not reached.
    #[error(
        "{peer} was not reached: {}; is its daemon running (`systemctl status libvirtd`, or virtqemud), and may \
         this user connect to it (root, or a member of the group libvirt)?",
        shown(message)
    )]
    NoLibvirt {
        /// Name and URI of the daemon.
        peer: String,
        message: String,
    },
    /// No agent has its end of libvirt's channel open.
    #[error("{peer}: no guest agent is connected; is the guest up, and does qemu-guest-agent run in it?")]
    NoAgent { peer: String },
    /// The guest has no device that is certainly this disk.
    #[error(
        "{}; give the disk a <serial> in the domain's XML, and restart the domain",
        guest_disk(target, found)
    )]
    GuestDisk {
        /// Name of the disk in libvirt.
        target: String,
        /// Devices of the guest that match.
        found: Vec<String>,
    },
}

fn guest_disk(target: &str, found: &[String]) -> String {
    match found {
        [] => format!("the guest agent reports no disk at the address of {target}"),
        found => format!("the guest's {} could all be {target}", shown(&found.join(", "))),
    }
}

/// Largest number of characters of foreign text in an error.
const MOST_SHOWN: usize = 400;

/// Single line of text from a guest or its QEMU, which may be hostile, for an error or a terminal:
/// control characters are escaped, and text beyond 400 characters is left out.
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
    /// Whether waiting longer might have helped.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, VmmError::Timeout { .. })
    }

    /// Whether the other side is gone: trying again on this connection cannot help.
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
