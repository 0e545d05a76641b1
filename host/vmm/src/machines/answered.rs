//! A file on a server that does not answer holds up whatever asks for its attributes, in the kernel
//! and for ever: a thread asks, and is waited for so long.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_kernel::detached::Hung;
use rtvirtio_kernel::{HostError, Root, WaitLimit};

use super::{Machine, Vmm};

/// Attributes that are there come within a millisecond.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Wait while another process is silent: most likely both wait for one server.
const SHORT_PATIENCE: Duration = Duration::from_millis(100);

/// Processes whose files did not answer, while a thread still waits for them: none is asked twice.
static SILENT: Hung<(PathBuf, u32)> = Hung::none();

/// [`super::machine`] within a time.
pub(super) fn machine(root: &Root, pid: u32, vmm: Vmm) -> Result<Option<Machine>, HostError> {
    let usual = if SILENT.is_empty() { ANSWER_TIMEOUT } else { SHORT_PATIENCE };
    let patience = WaitLimit::left(usual).max(SHORT_PATIENCE);
    within(patience, root, pid, move |root| super::machine(root, pid, vmm))
}

fn within<T: Send + 'static>(
    patience: Duration,
    root: &Root,
    pid: u32,
    ask: impl FnOnce(&Root) -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    let (subject, root) = ((root.at("/"), pid), root.clone());
    SILENT.call("files", subject, patience, move || ask(&root)).unwrap_or_else(|e| {
        let why = "an open file of it does not respond: is its server unreachable?";
        let source = if e.kind() == io::ErrorKind::TimedOut { io::Error::new(e.kind(), why) } else { e };
        Err(HostError::Read { path: format!("/proc/{pid}/fd").into(), source })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

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
        rtvirtio_testkit::site::wait_for("its thread", || asked(7).is_ok_and(|found| found == 2));
    }
}
