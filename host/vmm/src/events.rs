//! Events of QEMU's monitor, over a connection that is kept open.
//!
//! QEMU serves one client at each monitor's socket, and others wait until that one leaves. So a
//! connection that is kept open needs a monitor of its own, which QEMU's command line marks by its
//! chardev, [`EVENTS_CHARDEV`].

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::VmmError;
use crate::lines::Lines;
use crate::qmp::ReplyError;
use crate::wire::{Deadline, Wire};

/// Id of the chardev of a monitor for events: `-chardev socket,id=rtvirtio-events,path=SOCKET,
/// server=on,wait=off -mon chardev=rtvirtio-events,mode=control`.
pub const EVENTS_CHARDEV: &str = "rtvirtio-events";

const OPERATION: &str = "events";
/// Longest event that is parsed, in bytes; a longer one is only counted.
const LINE_LIMIT: usize = 64 << 10;
/// Largest number of reads of one call, each of at most 64 KiB: a socket that is filled faster than
/// it is read must not block the caller.
const MOST_READS: usize = 16;
/// Longest wait for a full listen queue, or for a peer that does not take even one line.
const MOMENT: Duration = Duration::from_millis(20);

/// Events after which a contract may have to be checked (`qapi/*.json` of QEMU). CPUs, devices and
/// threads that are added report none. Excluded are changes of the guest's clock, clients of a
/// display, progress of a migration and the like.
const CONCERN: [&str; 12] = [
    "BLOCK_IO_ERROR",
    "BLOCK_JOB_COMPLETED",
    "DEVICE_DELETED",
    "GUEST_PANICKED",
    "POWERDOWN",
    "RESET",
    "RESUME",
    "SHUTDOWN",
    "STOP",
    "SUSPEND",
    "WAKEUP",
    "WATCHDOG",
];

/// Connection to a monitor for events.
#[derive(Debug)]
pub struct MonitorEvents {
    wire: Wire,
    lines: Lines,
    is_greeted: bool,
}

#[derive(Deserialize)]
struct Message {
    #[serde(rename = "QMP")]
    greeting: Option<IgnoredAny>,
    event: Option<String>,
    error: Option<ReplyError>,
    #[serde(rename = "return")]
    value: Option<IgnoredAny>,
}

impl MonitorEvents {
    /// Connects without waiting: the greeting is answered when it is read.
    ///
    /// # Errors
    /// No such socket, no listener, or a listen queue that is full.
    pub fn connect(socket: &Path) -> Result<Self, VmmError> {
        let wire = Wire::connect("QMP", socket, MOMENT)?;
        Ok(Self { wire, lines: Lines::new(LINE_LIMIT), is_greeted: false })
    }

    /// Process that called listen(2) on the socket; `None` in another PID namespace.
    pub fn listener(&self) -> Result<Option<u32>, VmmError> {
        self.wire.listener()
    }

    /// Number of events that may concern a contract; never waits. The start of the stream counts as
    /// one, because earlier events may have been missed.
    ///
    /// # Errors
    /// The connection is closed, or the peer is no monitor; this value is useless then.
    pub fn read(&mut self) -> Result<u64, VmmError> {
        let mut heard = 0;
        for _ in 0..MOST_READS {
            let Some(bytes) = self.wire.arrived(OPERATION)? else { break };
            for line in self.lines.push(&bytes) {
                heard += u64::from(self.concerns(line.as_deref())?);
            }
        }
        Ok(heard)
    }

    /// Whether a line may concern a contract.
    fn concerns(&mut self, line: Option<&[u8]>) -> Result<bool, VmmError> {
        let Some(line) = line else { return Ok(true) };
        let message: Message =
            serde_json::from_slice(line).map_err(|e| self.wire.protocol(OPERATION, e.to_string()))?;
        if let Some(ReplyError { class, desc }) = message.error {
            let operation = "qmp_capabilities".to_owned();
            return Err(VmmError::Refused { peer: self.wire.peer().to_owned(), operation, class, desc });
        }
        if message.greeting.is_some() {
            if std::mem::replace(&mut self.is_greeted, true) {
                return Err(self.wire.protocol(OPERATION, "a second greeting"));
            }
            let leave_negotiation = b"{\"execute\":\"qmp_capabilities\"}\n";
            self.wire.send(leave_negotiation, Deadline::after(MOMENT), OPERATION)?;
            return Ok(false);
        }
        Ok(message.value.is_some() || message.event.is_some_and(|event| CONCERN.contains(&event.as_str())))
    }
}

impl AsFd for MonitorEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Sends the protocol's first lines, byte by byte where that matters.
    #[test]
    fn only_what_may_concern_a_contract_counts_and_nonsense_ends_it() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let socket = dir.path().join("events");
        let listener = UnixListener::bind(&socket).unwrap();
        let connect = || {
            let events = MonitorEvents::connect(&socket).unwrap();
            let mut qemu = listener.accept().unwrap().0;
            qemu.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n").unwrap();
            (events, qemu)
        };
        let (mut events, mut qemu) = connect();
        assert_eq!(events.listener().unwrap(), Some(std::process::id()));
        assert_eq!(events.read().unwrap(), 0);
        let mut said = [0; 64];
        let n = qemu.read(&mut said).unwrap();
        assert_eq!(&said[..n], b"{\"execute\":\"qmp_capabilities\"}\n");
        assert_eq!(events.read().unwrap(), 0, "it waits for nothing");
        qemu.write_all(b"{\"return\": {}}\r\n{\"event\": \"ST").unwrap();
        assert_eq!(events.read().unwrap(), 1);
        qemu.write_all(b"OP\", \"timestamp\": {}}\r\n{\"event\": \"RTC_CHANGE\"}\r\n").unwrap();
        assert_eq!(events.read().unwrap(), 1);
        qemu.write_all(format!("{{\"event\": \"{}\"}}\r\n", "x".repeat(LINE_LIMIT)).as_bytes()).unwrap();
        assert_eq!(events.read().unwrap(), 1, "too long to be read: anything");
        drop(qemu);
        assert!(events.read().unwrap_err().is_closed());
        for nonsense in ["hello\n", "{\"QMP\":{}}\n", "{\"error\":{\"class\":\"c\",\"desc\":\"d\"}}\n"] {
            let (mut events, mut qemu) = connect();
            qemu.write_all(nonsense.as_bytes()).unwrap();
            let error = events.read().unwrap_err();
            let is_clear = matches!(error, VmmError::Protocol { .. } | VmmError::Refused { .. });
            assert!(is_clear, "{nonsense}: {error}");
        }
    }
}
