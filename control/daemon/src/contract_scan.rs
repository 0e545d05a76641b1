//! Contract files read in a thread of its own: a file on a server that does not answer holds up
//! its reader, in the kernel and for ever. It is left out after a time, and the others are read.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use rtvirtio_kernel::detached::Detached;
use rtvirtio_spec::HostSpec;

/// Time for one file, or for the list of the directory: those of a disk answer within milliseconds.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Part of this time for one while another does not answer: most likely both wait for one server.
const SHORTER: u32 = 4;
/// Multiple of this time for one call of [`Reader::read`]; the next call goes on.
const CALL: u32 = 2;

/// Reason why a file is not used that does not answer.
const NO_ANSWER: &str = "it does not answer: is its server unreachable? What is in force for its VMs stays";

/// Whether a file of the directory is a contract by its name: editors and package managers leave
/// `.x.toml.swp`, `x.toml.dpkg-new`.
pub(crate) fn is_contract_name(name: &OsStr) -> bool {
    !name.as_encoded_bytes().starts_with(b".") && Path::new(name).extension().is_some_and(|e| e == "toml")
}

/// Files to be read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Asked {
    /// The directory of contract files.
    pub dir: PathBuf,
    /// Spec files besides the directory.
    pub more: Vec<PathBuf>,
    /// Files as last read; `None` where all are to be read.
    pub known: Option<Vec<Stamp>>,
}

/// File attributes by which a change is detected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    path: PathBuf,
    /// Whether the file did not answer, so that the rest is not known.
    is_silent: bool,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn unknown(path: &Path, is_silent: bool) -> Self {
        let path = path.to_owned();
        Self { path, is_silent, inode: 0, bytes: 0, modified: (0, 0), changed: (0, 0) }
    }

    fn read(path: &Path) -> Self {
        match fs::metadata(path) {
            Ok(data) => Self {
                path: path.to_owned(),
                is_silent: false,
                inode: data.ino(),
                bytes: data.len(),
                modified: (data.mtime(), data.mtime_nsec()),
                changed: (data.ctime(), data.ctime_nsec()),
            },
            Err(_) => Self::unknown(path, false),
        }
    }
}

/// Contents of a file, or the reason why it is not used.
pub(crate) type FileResult = (PathBuf, Result<HostSpec, String>);

/// Files as they were found.
#[derive(Debug)]
pub(crate) struct Scan {
    /// Attributes of each file.
    pub stamps: Vec<Stamp>,
    /// Reasons why the directory could not be read.
    pub unread: Vec<String>,
    /// Every file with its contents; `None` where nothing has changed.
    pub files: Option<Vec<FileResult>>,
}

/// Message of the reading thread.
#[derive(Debug)]
enum ReaderMessage {
    /// The thread turns to this path.
    At(PathBuf),
    /// The thread has read all.
    Done(Scan),
}

/// Files to be read, and paths to be left out.
type Request = (Asked, BTreeSet<PathBuf>);

/// Thread that scans once for each request.
#[derive(Debug)]
struct Worker {
    requests: Sender<Request>,
    messages: Detached<ReaderMessage>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let (requests, asked) = channel::<Request>();
        let run = move |messages: &Sender<ReaderMessage>| {
            for (asked, silent) in asked {
                // Fails where the thread is not waited for any more.
                let Some(scan) = scan(&asked, &silent, messages) else { return };
                let _ = messages.send(ReaderMessage::Done(scan));
            }
        };
        Ok(Self { requests, messages: Detached::start("contracts", run)? })
    }
}

/// Reads contract files within a time.
#[derive(Debug)]
pub(crate) struct Reader {
    /// Time for one file.
    pub timeout: Duration,
    /// Thread for the next scan, or the one under way.
    worker: Option<Worker>,
    /// Path at which the scan under way is, and since when; `None` without one.
    at: Option<(PathBuf, Instant)>,
    /// Paths that did not answer, each with its thread, which waits still: none is asked twice.
    silent: BTreeMap<PathBuf, Detached<ReaderMessage>>,
    /// Reason why no thread reads.
    refused: Option<String>,
}

impl Default for Reader {
    fn default() -> Self {
        Self { timeout: READ_TIMEOUT, worker: None, at: None, silent: BTreeMap::new(), refused: None }
    }
}

impl Reader {
    /// Reads the files; `None` while they are being read, or cannot be.
    pub fn read(&mut self, asked: &Asked) -> Option<Scan> {
        // A thread that goes on, or has ended, had an answer.
        self.silent.retain(|_, thread| thread.wait(Duration::ZERO).is_none());
        let until = Instant::now() + CALL * self.timeout;
        loop {
            let timeout = self.timeout / if self.silent.is_empty() { 1 } else { SHORTER };
            let (Some(worker), Some((at, since))) = (&self.worker, &mut self.at) else {
                self.begin(asked)?;
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            match worker.messages.wait(timeout.saturating_sub(since.elapsed()).min(left)) {
                Some(Ok(ReaderMessage::At(path))) => (*at, *since) = (path, Instant::now()),
                Some(Ok(ReaderMessage::Done(scan))) => {
                    self.at = None;
                    return Some(scan);
                }
                None if since.elapsed() >= timeout => {
                    if let (Some(worker), Some((at, _))) = (self.worker.take(), self.at.take()) {
                        self.silent.insert(at, worker.messages);
                    }
                }
                None => return None,
                // The thread has panicked; the next call begins anew.
                Some(Err(_)) => {
                    (self.worker, self.at) = (None, None);
                    return None;
                }
            }
            if left.is_zero() {
                return None;
            }
        }
    }

    fn begin(&mut self, asked: &Asked) -> Option<()> {
        let started = self.worker.take().map_or_else(Worker::start, Ok);
        self.refused = started.as_ref().err().map(io::Error::to_string);
        let worker = started.ok()?;
        // Fails where the thread has ended, which its messages tell.
        let _ = worker.requests.send((asked.clone(), self.silent.keys().cloned().collect()));
        (self.worker, self.at) = (Some(worker), Some((asked.dir.clone(), Instant::now())));
        Some(())
    }

    /// Reason why contracts are as last read, for clients.
    pub fn problem(&self) -> Option<String> {
        let stays = "contracts are as last read, and what is in force stays";
        if let Some(why) = &self.refused {
            return Some(format!("contract files cannot be read, so {stays}: {why}"));
        }
        let (at, _) = self.at.as_ref()?;
        Some(format!("contract files are being read still, at {}: {stays}", at.display()))
    }
}

/// Reads the files but the silent ones; `None` once the result is not waited for.
fn scan(asked: &Asked, silent: &BTreeSet<PathBuf>, messages: &Sender<ReaderMessage>) -> Option<Scan> {
    let at = |path: &Path| messages.send(ReaderMessage::At(path.to_owned())).ok();
    let (mut paths, mut unread) = (Vec::new(), Vec::new());
    if silent.contains(&asked.dir) {
        unread.push(NO_ANSWER.to_owned());
    } else {
        at(&asked.dir)?;
        match fs::read_dir(&asked.dir) {
            Ok(entries) => {
                for entry in entries {
                    match entry {
                        Ok(entry) => paths.push(entry.path()),
                        Err(e) => unread.push(e.to_string()),
                    }
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => unread.push(e.to_string()),
        }
    }
    paths.retain(|path| path.file_name().is_some_and(is_contract_name));
    paths.sort();
    paths.extend(asked.more.iter().cloned());
    let mut stamps = Vec::new();
    for path in &paths {
        let is_silent = silent.contains(path);
        if !is_silent {
            at(path)?;
        }
        stamps.push(if is_silent { Stamp::unknown(path, true) } else { Stamp::read(path) });
    }
    // An unreadable directory is read at every call, and never taken for empty.
    if asked.known.as_ref() == Some(&stamps) && unread.is_empty() {
        return Some(Scan { stamps, unread, files: None });
    }
    let mut files = Vec::new();
    for path in paths {
        let spec = if silent.contains(&path) {
            Err(NO_ANSWER.to_owned())
        } else {
            at(&path)?;
            rtvirtio_files::load_spec(&path).map_err(|e| e.to_string())
        };
        files.push((path, spec));
    }
    Some(Scan { stamps, unread, files: Some(files) })
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::HANG;

    use super::*;

    fn spec(vm: &str) -> String {
        format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{vm}\"\npid = 7\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        )
    }

    fn read(reader: &mut Reader, asked: &Asked) -> Scan {
        let mut found = None;
        rtvirtio_testkit::site::wait_for("the end of a scan", || {
            found = reader.read(asked);
            found.is_some()
        });
        found.unwrap()
    }

    #[test]
    fn files_that_are_as_before_are_not_read_again() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        fs::write(dir.path().join("a.toml"), spec("plc")).unwrap();
        let mut asked = Asked { dir: dir.path().to_owned(), ..Asked::default() };
        let mut reader = Reader::default();
        let first = read(&mut reader, &asked);
        assert_eq!((first.stamps.len(), first.files.unwrap().len()), (1, 1));
        assert_eq!(reader.problem(), None);
        asked.known = Some(first.stamps);
        assert!(read(&mut reader, &asked).files.is_none());
    }

    /// The thread of a scan is held up as by a file that does not answer.
    #[test]
    fn a_path_without_an_answer_is_left_out_until_its_thread_is_back() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            fs::write(at(&format!("{name}.toml")), spec(name)).unwrap();
        }
        let asked = Asked { dir: dir.path().to_owned(), ..Asked::default() };
        let (thread, held_up) = channel();
        let run = move |messages: &Sender<ReaderMessage>| {
            let _ = held_up.iter().try_for_each(|message| messages.send(message));
        };
        let since = Instant::now().checked_sub(READ_TIMEOUT).unwrap();
        let worker = Worker { requests: channel().0, messages: Detached::start("test", run).unwrap() };
        let at_a = Some((at("a.toml"), since));
        let mut reader = Reader { worker: Some(worker), at: at_a, ..Reader::default() };
        assert!(reader.problem().unwrap().contains("a.toml"));
        let scan = read(&mut reader, &asked);
        let files = scan.files.unwrap();
        assert!(files[0].1.as_ref().unwrap_err().contains("does not answer"), "{files:?}");
        assert!(scan.stamps[0].is_silent);
        // The thread has an answer, and turns to the next file.
        thread.send(ReaderMessage::At(at("b.toml"))).unwrap();
        let asked = Asked { known: Some(scan.stamps), ..asked };
        rtvirtio_testkit::site::wait_for("its contents", || {
            let files = reader.read(&asked).and_then(|scan| scan.files);
            files.is_some_and(|files| files[0].1.is_ok())
        });
        let ends = || thread.send(ReaderMessage::At(at("b.toml"))).is_err();
        rtvirtio_testkit::site::wait_for("its end", ends);
    }

    /// A thread that ends after two scans, as by a panic.
    #[test]
    fn scans_share_a_thread_and_one_that_has_ended_is_replaced() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let asked = Asked { dir: dir.path().to_owned(), ..Asked::default() };
        let (requests, asked_for) = channel::<Request>();
        let run = move |messages: &Sender<ReaderMessage>| {
            for (asked, silent) in asked_for.iter().take(2) {
                let scan = scan(&asked, &silent, messages).unwrap();
                let _ = messages.send(ReaderMessage::Done(scan));
            }
        };
        let worker = Worker { requests, messages: Detached::start("test", run).unwrap() };
        let mut reader = Reader { worker: Some(worker), timeout: HANG, ..Reader::default() };
        for is_scanned in [true, true, false, true] {
            assert_eq!(reader.read(&asked).is_some(), is_scanned);
            assert_eq!((reader.problem(), reader.worker.is_some()), (None, is_scanned));
        }
    }
}
