//! A file on a server that does not answer holds up whatever asks for its attributes, in the kernel
//! and for ever: a thread asks, and is waited for so long.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rtvirtio_kernel::{HostError, Root};

use super::{Machine, Vmm};
use crate::WaitLimit;

/// Attributes that are there come within a millisecond.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Wait while another process is silent: most likely both wait for one server.
const SHORT_PATIENCE: Duration = Duration::from_millis(100);

/// Processes whose files did not answer, while a thread still waits for them: none is asked twice.
static SILENT: Mutex<BTreeSet<(PathBuf, u32)>> = Mutex::new(BTreeSet::new());

/// [`super::machine`] within a time.
pub(super) fn machine(root: &Root, pid: u32, vmm: Vmm) -> Result<Option<Machine>, HostError> {
    let usual = if silent().is_empty() { ANSWER_TIMEOUT } else { SHORT_PATIENCE };
    let patience = WaitLimit::left(usual).max(SHORT_PATIENCE);
    within(patience, root, pid, move |root| super::machine(root, pid, vmm))
}

fn within<T: Send + 'static>(
    patience: Duration,
    root: &Root,
    pid: u32,
    ask: impl FnOnce(&Root) -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    let key = (root.at("/"), pid);
    if silent().contains(&key) {
        return Err(no_answer(pid));
    }
    let (sender, answer) = channel();
    let is_over = Arc::new(AtomicBool::new(false));
    let (of_thread, over, root) = (key.clone(), Arc::clone(&is_over), root.clone());
    let run = move || {
        // There is none to hear it after the time.
        let _ = sender.send(ask(&root));
        let mut silent = silent();
        over.store(true, Ordering::Relaxed);
        silent.remove(&of_thread);
    };
    let spawned = std::thread::Builder::new().name("files".to_owned()).spawn(run);
    spawned.map_err(|source| HostError::Read { path: descriptors(pid), source })?;
    if let Ok(found) = answer.recv_timeout(patience) {
        return found;
    }
    let mut silent = silent();
    if is_over.load(Ordering::Relaxed) {
        // It came just now.
        return answer.try_recv().unwrap_or_else(|_| Err(no_answer(pid)));
    }
    silent.insert(key);
    Err(no_answer(pid))
}

fn silent() -> MutexGuard<'static, BTreeSet<(PathBuf, u32)>> {
    SILENT.lock().unwrap_or_else(PoisonError::into_inner)
}

fn descriptors(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/fd"))
}

fn no_answer(pid: u32) -> HostError {
    let why = "an open file of it does not respond: is its server unreachable?";
    HostError::Read { path: descriptors(pid), source: io::Error::new(io::ErrorKind::TimedOut, why) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_answer_holds_nothing_up_and_is_asked_once() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        let (release, held) = channel::<()>();
        let hang = move |_: &Root| {
            let _ = held.recv();
            Ok(1)
        };
        let error = within(Duration::from_millis(20), &root, 7, hang).unwrap_err();
        assert!(error.to_string().contains("does not respond"), "{error}");
        // While the thread waits, the same process is not asked, and others are.
        let asked = |pid| within(ANSWER_TIMEOUT * 20, &root, pid, |_| Ok(2));
        assert!(asked(7).is_err());
        assert_eq!(asked(8).unwrap(), 2);
        release.send(()).unwrap();
        while silent().contains(&(root.at("/"), 7)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(asked(7).unwrap(), 2);
    }
}
