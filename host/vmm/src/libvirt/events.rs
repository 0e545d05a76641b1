//! Events of a libvirt daemon's VMs, as `virsh event` prints them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rtvirtio_kernel::child::Running;

use super::child::{self, ERROR_LIMIT};
use super::{Access, STATUS_NAMESPACE};
use crate::VmmError;
use crate::lines::Lines;
use crate::spawn::{Lifetime, spawn};
use crate::wire::Wire;

const OPERATION: &str = "event";
/// The first line shows that the daemon was reached, which `event` alone does not.
const SCRIPT: &str = "uri; event --all --loop";
/// Longest line that is parsed, in bytes; a longer one is only counted.
const LINE_LIMIT: usize = 16 << 10;
/// Largest number of reads of one call, each of at most 64 KiB.
const MOST_READS: usize = 16;
/// Events that affect no contract: of the guest's clock, balloon, display and CD tray.
const NO_CONCERN: [&str; 5] =
    ["balloon-change", "graphics", "memory-device-size-change", "rtc-change", "tray-change"];

/// Process `virsh` that prints events, until this is dropped or this process ends.
#[derive(Debug)]
pub struct DomainEvents {
    uri: String,
    wire: Wire,
    lines: Lines,
    /// Whether the daemon was reached.
    is_connected: bool,
    /// Error lines of virsh.
    errors: Vec<u8>,
    _virsh: Running,
}

/// Summary of the events that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeardOfDomains {
    /// Number of events that may affect a contract. Reaching the daemon counts as one, because
    /// earlier ones may have been missed.
    pub events: u64,
    /// Whether any of them is about a start, a stop or metadata of a VM.
    pub contracts: bool,
}

impl DomainEvents {
    /// Starts virsh for the daemon at this URI, without waiting: [`DomainEvents::read`] shows
    /// whether the daemon is reached.
    ///
    /// # Errors
    /// virsh is not installed, or cannot be started.
    pub fn start(uri: &str) -> Result<Self, VmmError> {
        let peer = format!("libvirt {uri}");
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => VmmError::NoVirsh,
            _ => VmmError::Io { peer: peer.clone(), operation: OPERATION.to_owned(), source },
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let errors = theirs.try_clone().map_err(failed)?;
        let mut command = child::command(uri, &[SCRIPT], Access::Read);
        command.stdout(OwnedFd::from(theirs)).stderr(OwnedFd::from(errors));
        let virsh = Running(spawn(command, Vec::new(), Lifetime::WithParent).map_err(failed)?);
        let (wire, lines, errors) = (Wire::new(ours, peer), Lines::new(LINE_LIMIT), Vec::new());
        Ok(Self { uri: uri.to_owned(), wire, lines, is_connected: false, errors, _virsh: virsh })
    }

    /// Reads the events that have arrived; never waits.
    ///
    /// # Errors
    /// The daemon is not reached or has ended, with libvirt's message. No further events come then.
    pub fn read(&mut self) -> Result<HeardOfDomains, VmmError> {
        // The reason may be in the line after the first error. virsh ends with it, except where it
        // does not notice that the daemon is gone.
        let ends = !self.errors.is_empty();
        let mut heard = HeardOfDomains::default();
        for _ in 0..MOST_READS {
            match self.wire.arrived(OPERATION) {
                Ok(Some(bytes)) => {
                    for line in self.lines.push(&bytes) {
                        self.hear(line.as_deref(), &mut heard);
                    }
                }
                Ok(None) if ends => return Err(self.failure()),
                Ok(None) => break,
                Err(_) => return Err(self.failure()),
            }
        }
        Ok(heard)
    }

    fn hear(&mut self, line: Option<&[u8]>, heard: &mut HeardOfDomains) {
        let line = line.map(String::from_utf8_lossy);
        match line.as_deref().map(parse) {
            // Too long to be parsed: may be any event.
            None | Some(Line::Event { contracts: true }) => {
                heard.events += 1;
                heard.contracts = true;
            }
            Some(Line::Event { contracts: false }) => heard.events += 1,
            Some(Line::Error) => {
                let line = line.unwrap_or_default();
                if self.errors.len() + line.len() < ERROR_LIMIT {
                    self.errors.extend_from_slice(line.as_bytes());
                    self.errors.push(b'\n');
                }
            }
            Some(Line::Other) => {
                let is_uri = line.is_some_and(|line| !line.trim().is_empty());
                if is_uri && !std::mem::replace(&mut self.is_connected, true) {
                    heard.events += 1;
                    heard.contracts = true;
                }
            }
        }
    }

    fn failure(&self) -> VmmError {
        let errors: &[u8] = if self.errors.is_empty() { b"virsh has ended" } else { &self.errors };
        child::failure(&self.uri, OPERATION, errors)
    }
}

impl AsFd for DomainEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// `contracts` where it is about a start or stop of a VM, or about metadata.
    Event {
        contracts: bool,
    },
    Error,
    /// An event without effect, or a further line of an event.
    Other,
}

/// Parses a line of virsh (`tools/virsh-domain-event.c` in libvirt): `event 'lifecycle' for domain
/// 'plc': Started Booted`.
fn parse(line: &str) -> Line {
    if line.starts_with("error: ") {
        return Line::Error;
    }
    let name = line.strip_prefix("event '").and_then(|rest| rest.split_once('\''));
    match name.map(|(name, _)| name) {
        None => Line::Other,
        Some(name) if NO_CONCERN.contains(&name) => Line::Other,
        // The service itself writes the status of contracts.
        Some("metadata-change") if line.trim_end().ends_with(STATUS_NAMESPACE) => Line::Other,
        Some(name) => Line::Event { contracts: matches!(name, "lifecycle" | "metadata-change") },
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    use rtvirtio_testkit::{HANG, Need, has};

    use super::super::CONTRACT_NAMESPACE;
    use super::*;

    #[test]
    fn lines_of_virsh() {
        let event = |contracts| Line::Event { contracts };
        for (line, of) in [
            ("event 'lifecycle' for domain 'plc': Started Booted", event(true)),
            // Before libvirt 7.
            ("event 'lifecycle' for domain plc: Stopped Destroyed", event(true)),
            ("event 'reboot' for domain 'plc'", event(false)),
            ("event 'device-removed' for domain 'a'b': virtio-disk1", event(false)),
            ("event 'rtc-change' for domain 'plc': 3600", Line::Other),
            ("\tcputune.vcpupin0: 1", Line::Other),
            ("event 'graphics' for domain 'plc': connect local[IPv4 x y] remote[IPv4 x y] none", Line::Other),
            ("error: failed to connect to the hypervisor", Line::Error),
            ("", Line::Other),
            ("event '", Line::Other),
        ] {
            assert_eq!(parse(line), of, "{line}");
        }
        let metadata =
            |uri: &str| parse(&format!("event 'metadata-change' for domain 'plc': element {uri}\n"));
        assert_eq!(
            (metadata(CONTRACT_NAMESPACE), metadata(STATUS_NAMESPACE)),
            (event(true), Line::Other),
            "the service's own writes are no news"
        );
    }

    fn end_of(events: &mut DomainEvents) -> VmmError {
        let start = Instant::now();
        loop {
            match events.read() {
                Ok(_) => assert!(start.elapsed() < HANG, "virsh does not end"),
                Err(e) => return e,
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// The test driver is inside virsh, so no daemon is needed.
    #[test]
    fn a_virsh_that_ends_is_an_error_and_none_outlives_its_owner() {
        if !has("events without a daemon", &[Need::Program("virsh")]) {
            return;
        }
        let mut missing =
            DomainEvents::start("qemu+unix:///system?socket=/nonexistent/libvirt-sock").unwrap();
        let error = end_of(&mut missing);
        let VmmError::NoLibvirt { message, .. } = &error else { panic!("{error}") };
        assert!(message.contains("/nonexistent/libvirt-sock"), "the reason is in the second line: {error}");
        let mut events = DomainEvents::start("test:///default").unwrap();
        let start = Instant::now();
        loop {
            match events.read().unwrap() {
                HeardOfDomains { events: 0, contracts: false } => assert!(start.elapsed() < HANG),
                connected => break assert_eq!(connected, HeardOfDomains { events: 1, contracts: true }),
            }
            sleep(Duration::from_millis(5));
        }
        assert_eq!(events.read().unwrap(), HeardOfDomains::default());
        let virsh = rtvirtio_kernel::ProcessId::find(events._virsh.0.id()).unwrap().unwrap();
        events._virsh.0.kill().unwrap();
        let error = end_of(&mut events);
        assert!(
            matches!(&error, VmmError::Libvirt { message, .. } if message == "virsh has ended"),
            "{error}"
        );
        drop(events);
        assert!(!virsh.is_alive());
        let events = DomainEvents::start("test:///default").unwrap();
        let virsh = rtvirtio_kernel::ProcessId::find(events._virsh.0.id()).unwrap().unwrap();
        assert!(virsh.is_alive());
        drop(events);
        assert!(!virsh.is_alive());
    }
}
