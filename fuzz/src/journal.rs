//! The journal: whatever bytes are in its file, a change is refused with words and the file is
//! kept, and nothing is touched. A journal whose checksum fits although its content was made up is
//! looked at and put back without a panic; what is said to be put back is.
//!
//! Layout of the input: the first byte 0 is followed by the file itself; 1 to 8 by edits of a
//! journal's body in the layout of [`json`], with the checksum of what results; any other by edits
//! of the whole file, three bytes each (place, 2 bytes; what the byte is xored with) and, where the
//! first byte is even, is cut off after the last place.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use rtvirtio_apply::{
    ApplyError, Fate, Form, HostFiles, JOURNAL_FILE, JOURNAL_SCHEMA, Machine, NoGuests, Observer, OnConflict,
    Session, Step, Target, Write, status,
};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::Attr;
use sha2::{Digest as _, Sha256};

use super::json;

/// A knob whose file holds its value and nothing else.
const PLAIN: &str = "/sys/block/vda/queue/nr_requests";
/// Kernel files in memory: a journal that was made up must not reach this machine's.
struct Files(RefCell<BTreeMap<PathBuf, String>>);

impl Files {
    fn new() -> Self {
        let files = [
            ("/proc/sys/kernel/random/boot_id", "6b2f\n"),
            ("/sys/block/vda/queue/scheduler", "[none] bfq\n"),
            (PLAIN, "128\n"),
            ("/sys/block/vda/queue/iosched/timeout_sync", "125\n"),
            ("/sys/fs/cgroup/vm0/io.bfq.weight", "default 100\n8:0 300\n"),
            ("/sys/fs/cgroup/vm0/io.max", "8:0 rbps=max wbps=max riops=max wiops=max\n"),
            ("/sys/fs/cgroup/vm0/cgroup.subtree_control", "io\n"),
            ("/sys/fs/cgroup/blkio/vm0/blkio.throttle.read_iops_device", ""),
        ];
        Self(RefCell::new(files.map(|(path, text)| (path.into(), text.to_owned())).into()))
    }

    fn text(&self, path: &Path) -> io::Result<String> {
        self.0.borrow().get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl HostFiles for Files {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.text(path)
    }

    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        assert!(
            path.is_absolute() && !path.components().any(|c| c == Component::ParentDir),
            "{path:?} is written"
        );
        match self.0.borrow_mut().get_mut(path) {
            Some(text) => {
                // The lines of other devices stay, as in the kernel.
                let dev = value.split_once(' ').map(|(dev, _)| dev.to_owned() + " ");
                let mut kept: String = match dev.filter(|d| d.contains(':')) {
                    Some(dev) => {
                        text.lines().filter(|l| !l.starts_with(&dev)).map(|l| format!("{l}\n")).collect()
                    }
                    None => String::new(),
                };
                kept.push_str(value);
                *text = kept;
                Ok(())
            }
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        let files = self.0.borrow();
        let below = files.keys().filter_map(|p| p.strip_prefix(dir).ok()?.components().next());
        let mut names: Vec<String> = below.map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
        names.dedup();
        if names.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(names) }
    }

    fn identity(&self, path: &Path) -> io::Result<u64> {
        self.list(path).map(|_| 7)
    }

    fn make_dir(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn remove_dir(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn thread_start(&self, pid: u32, _: u32) -> io::Result<u64> {
        if pid == 4242 { Ok(99) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn scheduling(&self, _: u32, _: u32) -> io::Result<Attr> {
        Ok(Attr::fifo(97))
    }

    fn set_scheduling(&self, _: u32, _: u32, _: &Attr) -> io::Result<()> {
        Ok(())
    }
}

fn writes() -> Vec<Write> {
    let host = |path: &str, form| Target::host(path, form);
    let dev = || "8:0".to_owned();
    let max = Form::IoMax { dev: dev(), key: "riops".to_owned() };
    let weight = host("/sys/fs/cgroup/vm0/io.bfq.weight", Form::DeviceWeight { dev: dev() });
    let throttle =
        host("/sys/fs/cgroup/blkio/vm0/blkio.throttle.read_iops_device", Form::Throttle { dev: dev() });
    let timeout = host("/sys/block/vda/queue/iosched/timeout_sync", Form::Jiffies);
    let mut elevator =
        Write::new("elevator of vda", host("/sys/block/vda/queue/scheduler", Form::Elevator), "bfq");
    elevator.side_effects = vec![host(PLAIN, Form::Plain)];
    vec![
        elevator,
        Write::new("timeout_sync of vda", timeout, "8"),
        Write::new("requests of vda", host(PLAIN, Form::Plain), "64"),
        Write::new("weight of vm0", weight, "700"),
        Write::new("cap of vm0", host("/sys/fs/cgroup/vm0/io.max", max), "500"),
        Write::new("cap of vm0 (v1)", throttle, "20"),
        Write::new("thread of vm0", Target::scheduling(4242, 4243, 99), Attr::fifo(97).to_string()),
    ]
}

/// Keeps the journal as it is before the first write.
struct Copying<'a>(&'a Path, &'a mut Vec<u8>);

impl Observer for Copying<'_> {
    fn step(&mut self, step: Step) {
        if step == Step::Journaled {
            *self.1 = std::fs::read(self.0.join(JOURNAL_FILE)).expect("a journal");
        }
    }
}

/// A state directory. Journals are synced to disk: in memory that costs nothing.
fn state_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory")
}

/// Files of journals that were really written: a complete one, and one cut off before the first
/// write.
fn written() -> &'static [Vec<u8>; 2] {
    static WRITTEN: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    WRITTEN.get_or_init(|| {
        let (root, files, dir) = (Root::new("/nowhere"), Files::new(), state_dir());
        let machine = Machine::with_host(&root, &files, &NoGuests);
        let mut cut = Vec::new();
        let session = Session::open(dir.path()).expect("a state directory");
        session.apply(&writes(), &machine, &mut Copying(dir.path(), &mut cut)).expect("a plan in force");
        [std::fs::read(dir.path().join(JOURNAL_FILE)).expect("a journal"), cut]
    })
}

/// The only first line that goes with a body, as the crate's documentation gives it.
fn header(body: &[u8]) -> Vec<u8> {
    let digest = Sha256::new().chain_update(JOURNAL_SCHEMA).chain_update("\n").chain_update(body).finalize();
    let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    format!("{{\"schema\":\"{JOURNAL_SCHEMA}\",\"sha256\":\"{hex}\"}}\n").into_bytes()
}

fn body(file: &[u8]) -> &str {
    let text = std::str::from_utf8(file).expect("text");
    text.split_once('\n').map_or("", |(_, body)| body)
}

/// The file of an input.
fn file(written: &[Vec<u8>], data: &[u8]) -> Vec<u8> {
    match data.split_first() {
        None => Vec::new(),
        Some((0, file)) => file.to_vec(),
        Some((1..=8, _)) => {
            let bodies: Vec<&str> = written.iter().map(|f| body(f)).collect();
            let body = json::document(&bodies, data);
            [header(&body), body].concat()
        }
        Some((kind, edits)) => {
            let mut file = written[usize::from(kind / 2) % written.len()].clone();
            let mut last = file.len();
            for edit in edits.chunks_exact(3).take(16) {
                last = usize::from(u16::from_le_bytes([edit[0], edit[1]])) % file.len();
                file[last] ^= edit[2];
            }
            if kind % 2 == 0 {
                file.truncate(last);
            }
            file
        }
    }
}

/// Looks at a journal, and puts it back.
///
/// # Panics
/// When a changed journal is taken, a refusal has no words or touches anything, or what is said to
/// be put back is not.
pub fn play(data: &[u8]) {
    let (file, dir) = (file(written(), data), state_dir());
    let path = dir.path().join(JOURNAL_FILE);
    std::fs::write(&path, &file).expect("a journal");
    let (root, files) = (Root::new("/nowhere"), Files::new());
    let machine = Machine::with_host(&root, &files, &NoGuests);
    let first = file.iter().position(|b| *b == b'\n').map_or(file.len(), |i| i + 1);
    let fits = file[..first] == header(&file[first..]);
    match status(dir.path(), &machine) {
        Ok(None) => panic!("a journal is there, whatever it holds"),
        Ok(Some(status)) => {
            assert!(fits, "taken although its checksum does not fit");
            assert!(!serde_json::to_string(&status).expect("JSON").is_empty());
        }
        Err(e) => {
            let words = e.to_string();
            assert!(!words.is_empty() && !words.chars().any(|c| c.is_control() && c != '\n'), "{words:?}");
            if let ApplyError::BadJournal { readable, .. } = &e {
                assert!(!serde_json::to_string(readable).expect("JSON").is_empty());
            }
        }
    }
    let on_conflict = [OnConflict::Report, OnConflict::Force, OnConflict::Accept][file.len() % 3];
    let session = Session::open(dir.path()).expect("a state directory");
    let before = files.0.borrow().clone();
    match session.revert(on_conflict, &machine, &mut rtvirtio_apply::Silent) {
        Ok(None) => panic!("a journal is there, whatever it holds"),
        Ok(Some(reverted)) => {
            assert!(fits && !reverted.summary().is_empty());
            assert_eq!(reverted.done, !path.exists(), "{reverted:?}");
            let mut plain = reverted.outcomes.iter().filter(|o| o.path == PLAIN);
            // Two entries for one file would each have a value.
            if let (Some(one), None) = (plain.next(), plain.next()) {
                let put_back =
                    matches!(one.fate, Fate::Restored { .. } | Fate::Untouched) && !reverted.rebooted;
                if let Some(old) = one.old.as_ref().filter(|_| put_back) {
                    let now = files.text(Path::new(PLAIN)).unwrap_or_default();
                    assert!(now.contains(old.trim()), "{now:?} and not {old:?}: {reverted:?}");
                }
            }
        }
        Err(e) => {
            assert!(!e.to_string().is_empty());
            if !fits {
                assert_eq!(std::fs::read(&path).expect("it is kept"), file);
                assert_eq!(*files.0.borrow(), before, "something was touched");
            }
        }
    }
}
