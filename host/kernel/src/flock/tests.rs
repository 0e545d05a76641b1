use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use super::*;

/// A child that is killed and reaped at the end.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sleeper(stdin: Stdio) -> Owned {
    Owned(Command::new("sleep").arg("600").arg0("rtvirtio-iod").stdin(stdin).spawn().unwrap())
}

/// Whether the condition becomes true within a time. A child that another test starts has this
/// process's open files, with their locks, until its `execve`.
fn soon(is_true: impl Fn() -> bool) -> bool {
    (0..500).any(|_| {
        let is_true = is_true();
        if !is_true {
            thread::sleep(PAUSE);
        }
        is_true
    })
}

fn holders(search: &Search) -> Vec<u32> {
    search.holders.iter().map(Process::pid).collect()
}

#[test]
fn the_holder_is_the_process_with_the_locked_open_file() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("held.lock");
    let file = File::create_new(&path).unwrap();
    assert!(lock(&file).unwrap());
    let holder = sleeper(file.into());
    let look = File::open(&path).unwrap();
    // The same file open without the lock, and the same name elsewhere.
    let _reader = sleeper(File::open(&path).unwrap().into());
    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    let other = File::create_new(other.join("held.lock")).unwrap();
    assert!(lock(&other).unwrap());
    let _other = sleeper(other.into());

    assert!(is_held(&look).unwrap() && !lock(&look).unwrap());
    let found = search(&path, &look).unwrap();
    assert!(soon(|| holders(&search(&path, &look).unwrap()) == [holder.0.id()]));
    let mine: Vec<_> =
        found.unknown.iter().filter(|(_, e)| e.kind() != io::ErrorKind::PermissionDenied).collect();
    assert!(mine.is_empty(), "{mine:?}");
    // Also when the name is gone.
    fs::remove_file(&path).unwrap();
    assert!(soon(|| holders(&search(&path, &look).unwrap()) == [holder.0.id()]));

    let process = found.holders.iter().find(|process| process.pid() == holder.0.id()).unwrap();
    assert!(!process.has_ended(Duration::ZERO).unwrap());
    assert!(process.stop(Duration::from_secs(60)).unwrap());
    assert!(process.stop(Duration::ZERO).unwrap(), "one that has ended is no error");
    assert!(soon(|| !is_held(&look).unwrap()));
    assert!(soon(|| holders(&search(&path, &look).unwrap()).is_empty()));
}

#[test]
fn a_lock_that_this_process_holds_is_held_and_found_in_no_other() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("held.lock");
    let file = File::create_new(&path).unwrap();
    assert!(lock(&file).unwrap());
    let look = File::open(&path).unwrap();
    assert!(is_held(&look).unwrap());
    assert!(soon(|| holders(&search(&path, &look).unwrap()).is_empty()));
    drop(file);
    assert!(soon(|| !is_held(&look).unwrap()));
    // A test of the lock leaves none behind.
    let third = File::open(&path).unwrap();
    assert!(lock(&third).unwrap());
}

#[test]
fn only_an_exclusive_flock_counts() {
    assert!(has_lock("pos:\t0\nlock:\t1: FLOCK  ADVISORY  WRITE 77 fe:00:123 0 EOF\n"));
    assert!(!has_lock("pos:\t0\nlock:\t1: FLOCK  ADVISORY  READ 77 fe:00:123 0 EOF\n"));
    assert!(!has_lock("pos:\t0\nlock:\t1: POSIX  ADVISORY  WRITE 77 fe:00:123 0 EOF\n"));
    assert!(!has_lock("pos:\t0\nflags:\t0100000\n"));
}
