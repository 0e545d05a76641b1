//! Evidence of a failure: state and console of the guest, status and messages of each I/O domain.

use std::fmt;
use std::path::Path;

use rtvirtio_domain_protocol::status::{DiskStatus, PortStatus};
use rtvirtio_testbed::qemu::QemuGuest;
use rtvirtio_workflow::domain::client as iod;
use serde::{Deserialize, Serialize};

use super::measure::control;
use crate::backend::log_end;

/// State of all parts at a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The failure.
    pub what: String,
    /// QEMUs of the guest, and I/O domains.
    pub parts: Vec<Part>,
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        self.parts.iter().try_for_each(|part| write!(f, "\n  {}: {}{}", part.name, part.state, part.log))
    }
}

/// A QEMU or an I/O domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Name in messages.
    pub name: String,
    /// State of the guest in it, or status of the disk.
    pub state: String,
    /// Console from its first fault or near its end, or last messages: indented lines.
    pub log: String,
}

impl Part {
    /// Looks at a QEMU and the guest in it.
    pub(super) fn of_guest(guest: &mut QemuGuest) -> Self {
        let name = format!("QEMU {}", guest.handle().name);
        let (state, log) = guest.examine();
        Self { name, state: state.to_string(), log }
    }

    /// Looks at the I/O domain in a directory.
    pub(super) fn of_domain(side: &Path) -> Self {
        let name = side.file_name().unwrap_or_default().to_string_lossy();
        let state = match iod::ask(&control(side)) {
            Ok(status) => {
                let disks = status.vms.iter().map(describe);
                disks.chain(status.ports.iter().map(describe_port)).collect::<Vec<_>>().join("; ")
            }
            Err(e) => format!("not known: {e:#}"),
        };
        Self { name: format!("I/O domain {name}"), state, log: log_end(side) }
    }
}

fn number(n: Option<u64>) -> String {
    n.map_or_else(|| "unknown".to_owned(), |n| n.to_string())
}

/// Connection and faults of a port.
fn describe_port(port: &PortStatus) -> String {
    format!(
        "port connected: {}, attached: {}, broken {}, frames dropped: {:?}",
        port.connected,
        port.attached,
        number(port.broken),
        port.drops
    )
}

/// Connection and faults of a disk.
pub(super) fn describe(disk: &DiskStatus) -> String {
    let mut text = format!(
        "connected: {}, to process {}, attached: {}; outstanding {}, errors {}, malformed {}, broken {}",
        disk.connected,
        number(disk.peer.map(u64::from)),
        disk.attached,
        number(disk.outstanding),
        number(disk.errors),
        number(disk.malformed),
        number(disk.broken),
    );
    if let Some(error) = &disk.last_error {
        text.push_str(&format!("; last error: {error}"));
    }
    for (why, n) in &disk.refused_requests {
        text.push_str(&format!("; requests refused, {why}: {n}"));
    }
    if let Some(refused) = &disk.refused {
        let (n, ago) = (refused.count, refused.seconds_ago);
        text.push_str(&format!("; messages refused: {n}, the last {ago} s ago: {}", refused.why));
    }
    text
}
