//! Events as entries of systemd's journal, over the datagram socket of its native protocol
//! (systemd, "Native Journal Protocol"): each with fields that can be selected and counted.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use rtvirtio_daemon::{Event, EventKind, word};

/// Path of journald's datagram socket.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Whether an output is a stream of the journal: `named` is `JOURNAL_STREAM`, the device and inode
/// of the stream that systemd has created (systemd.exec(5)).
pub fn is_stream(named: Option<&str>, output: impl AsFd) -> bool {
    let of = |fd: std::os::fd::OwnedFd| File::from(fd).metadata();
    let Ok(data) = output.as_fd().try_clone_to_owned().and_then(of) else { return false };
    named.is_some_and(|named| named == format!("{}:{}", data.dev(), data.ino()))
}

/// Socket for entries, which also reaches a journald that is started later.
#[derive(Debug)]
pub struct Journal {
    datagrams: UnixDatagram,
    socket: PathBuf,
    /// Entries left out because journald was stuck, since the last one that it has taken.
    left_out: Cell<u64>,
}

impl Journal {
    /// Socket for the journal of this host.
    ///
    /// # Errors
    /// When no socket can be created.
    pub fn new() -> io::Result<Self> {
        Self::at(Path::new(SOCKET))
    }

    fn at(socket: &Path) -> io::Result<Self> {
        let datagrams = UnixDatagram::unbound()?;
        // Non-blocking: a stuck journald must not delay the service.
        datagrams.set_nonblocking(true)?;
        Ok(Self { datagrams, socket: socket.to_owned(), left_out: Cell::new(0) })
    }

    /// Writes an event as one entry: `message` for the reader, `setting` if it concerns one. While
    /// journald is stuck entries are left out, and the next one that it takes says how many.
    ///
    /// # Errors
    /// When there is no journald, or the entry is longer than a datagram.
    pub fn write(&self, event: &Event, priority: u8, message: &str, setting: Option<&str>) -> io::Result<()> {
        let left_out = self.left_out.get();
        let sent = match left_out {
            0 => self.send(event, priority, message, setting),
            n => {
                let message = format!("{message} ({n} lines before it were left out: the journal was stuck)");
                self.send(event, priority, &message, setting)
            }
        };
        match sent {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.left_out.set(left_out.saturating_add(1));
                Ok(())
            }
            Err(e) => Err(e),
            Ok(()) => {
                self.left_out.set(0);
                Ok(())
            }
        }
    }

    fn send(&self, event: &Event, priority: u8, message: &str, setting: Option<&str>) -> io::Result<()> {
        let kind = word(&event.kind);
        let priority = priority.to_string();
        let mut fields = vec![
            ("MESSAGE", message),
            ("PRIORITY", &priority),
            ("MESSAGE_ID", message_id(event.kind)),
            ("SYSLOG_IDENTIFIER", env!("CARGO_PKG_NAME")),
            ("RTVIRTIO_EVENT", &kind),
        ];
        fields.extend(event.vm.as_deref().map(|vm| ("RTVIRTIO_VM", vm)));
        fields.extend(setting.map(|setting| ("RTVIRTIO_SETTING", setting)));
        self.datagrams.send_to(&entry(&fields), &self.socket).map(drop)
    }
}

/// Serialises fields; a multi-line value is preceded by its length.
fn entry(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in fields {
        out.extend_from_slice(name.as_bytes());
        if value.contains('\n') {
            out.push(b'\n');
            out.extend_from_slice(&(value.len() as u64).to_le_bytes());
        } else {
            out.push(b'=');
        }
        out.extend_from_slice(value.as_bytes());
        out.push(b'\n');
    }
    out
}

/// Constant id of a kind of event, for `journalctl MESSAGE_ID=...`.
fn message_id(kind: EventKind) -> &'static str {
    match kind {
        EventKind::Started => "15bf5223db8b4f2692dfb971495c38e5",
        EventKind::Changed => "8e1c1e0b6cb84c48b9c06dee75b16e2d",
        EventKind::Failed => "9e0d24f84d4d4f4e878b0d76651bbf8d",
        EventKind::Drift => "d56e5d93944b4f9a83218a63b9e95649",
        EventKind::Refused => "41f33a9ca7f041ca8a14415939d60c3a",
        EventKind::Fault => "4a918104d0e64f029747c344629b9480",
        EventKind::Appeared => "28999a16f7a64c2aa397c2435a4832e4",
        EventKind::Gone => "88464ce7935b47018b4b631359e25fb6",
        EventKind::Waiting => "4e2ef030cf2d462491045d0ed5351ab0",
        EventKind::Note => "f562031db7704d1bb19adb3d792ed3a7",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_event_becomes_an_entry() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("socket");
        let journal = Journal::at(&path).unwrap();
        let vm = Some("plc".to_owned());
        let (time, text, changes) = (String::new(), "not used".to_owned(), Vec::new());
        let event = Event { id: 1, time, kind: EventKind::Changed, vm, text, changes };
        assert!(journal.send(&event, 5, "one", None).is_err());
        let journald = UnixDatagram::bind(&path).unwrap();
        journal.send(&event, 5, "one\ntwo", Some("weight of plc")).unwrap();
        let mut bytes = [0; 1024];
        let n = journald.recv(&mut bytes).unwrap();
        let expected = format!(
            "MESSAGE\n\x07\0\0\0\0\0\0\0one\ntwo\nPRIORITY=5\nMESSAGE_ID={}\nSYSLOG_IDENTIFIER=rtvirtiod\n\
             RTVIRTIO_EVENT=changed\nRTVIRTIO_VM=plc\nRTVIRTIO_SETTING=weight of plc\n",
            message_id(EventKind::Changed)
        );
        assert_eq!(String::from_utf8_lossy(&bytes[..n]), expected);
        // One that is stuck is left at once, and so is one that is gone.
        let stuck = (0..10_000).find_map(|_| journal.send(&event, 5, "one", None).err());
        assert_eq!(stuck.unwrap().kind(), io::ErrorKind::WouldBlock);
        drop(journald);
        assert!(journal.send(&event, 5, "one", None).is_err());
    }

    #[test]
    fn lines_for_a_stuck_journal_are_left_out_and_counted() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("socket");
        let journald = UnixDatagram::bind(&path).unwrap();
        journald.set_nonblocking(true).unwrap();
        let journal = Journal::at(&path).unwrap();
        let (time, text, changes) = (String::new(), String::new(), Vec::new());
        let event = Event { id: 1, time, kind: EventKind::Note, vm: None, text, changes };
        let write = || journal.write(&event, 6, "one", None);
        for _ in 0..10_000 {
            write().unwrap();
            if journal.left_out.get() == 3 {
                break;
            }
        }
        assert_eq!(journal.left_out.get(), 3, "no error, which would lead to standard error");
        let mut bytes = [0; 1024];
        while journald.recv(&mut bytes).is_ok() {}
        write().unwrap();
        let n = journald.recv(&mut bytes).unwrap();
        let entry = String::from_utf8_lossy(&bytes[..n]).into_owned();
        assert!(entry.starts_with("MESSAGE=one (3 lines before it were left out"), "{entry}");
        write().unwrap();
        let n = journald.recv(&mut bytes).unwrap();
        assert!(bytes[..n].starts_with(b"MESSAGE=one\n"));
        drop(journald);
        assert!(write().is_err());
    }

    #[test]
    fn each_kind_has_an_identity_of_its_own() {
        let kinds = [
            EventKind::Started,
            EventKind::Changed,
            EventKind::Failed,
            EventKind::Drift,
            EventKind::Refused,
            EventKind::Fault,
            EventKind::Appeared,
            EventKind::Gone,
            EventKind::Waiting,
            EventKind::Note,
        ];
        let ids: BTreeSet<&str> = kinds.into_iter().map(message_id).collect();
        assert_eq!(ids.len(), kinds.len());
        assert!(ids.iter().all(|id| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit())));
        // The reference lists them.
        let page = rtvirtio_testkit::site::project().join("docs/reference/rtvirtiod-toml.md");
        let page = std::fs::read_to_string(page).unwrap();
        assert!(kinds.into_iter().all(|k| page.contains(&format!(
            "| `{}` | `{}` |",
            word(&k),
            message_id(k)
        ))));
    }

    #[test]
    fn only_the_stream_that_is_named_is_the_journal() {
        let file = tempfile::tempfile().unwrap();
        let data = file.metadata().unwrap();
        let named = format!("{}:{}", data.dev(), data.ino());
        assert!(is_stream(Some(&named), &file));
        assert!(!is_stream(Some("1:2"), &file) && !is_stream(Some(""), &file) && !is_stream(None, &file));
    }
}
