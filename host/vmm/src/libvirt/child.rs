//! Runs one `virsh` process, with limits on its output.

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use rtvirtio_kernel::child::{Output, Running, read};

use super::Access;
use crate::VmmError;
use crate::wire::Deadline;

const VIRSH: &str = "virsh";
/// Text that virsh prints before the reason when there is no connection (`virshReconnect()` in
/// `tools/virsh.c`).
const NOT_REACHED: &str = "failed to connect to the hypervisor";
/// Largest part of its messages that is read, in bytes.
pub(super) const ERROR_LIMIT: usize = 64 * 1024;

pub(super) fn run(
    uri: &str,
    args: &[&str],
    access: Access,
    limit: usize,
    timeout: Duration,
) -> Result<Vec<u8>, VmmError> {
    let peer = || format!("libvirt {uri}");
    let operation = || args.first().copied().unwrap_or_default().to_owned();
    let failed = |source| VmmError::Io { peer: peer(), operation: operation(), source };
    let deadline = Deadline::after(timeout);
    let mut child =
        Running::for_call(&mut command(uri, args, access)).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => VmmError::NoVirsh,
            _ => failed(source),
        })?;
    let stdout = read(child.0.stdout.take(), limit).map_err(failed)?;
    let stderr = read(child.0.stderr.take(), ERROR_LIMIT).map_err(failed)?;
    let wait = |from: &Output| {
        let late = || deadline.passed(&peer(), &operation());
        let output = from.wait(deadline.left().unwrap_or_default()).ok_or_else(late)?;
        output.and_then(|read| read).map_err(failed)
    };
    let out = wait(&stdout)?;
    if out.len() > limit {
        return Err(VmmError::TooLarge { peer: peer(), operation: operation(), limit });
    }
    let errors = wait(&stderr)?;
    // Both pipes are closed, so it is ending.
    let status = child.0.wait().map_err(failed)?;
    if status.success() {
        return Ok(out);
    }
    Err(failure(uri, &operation(), &errors))
}

/// Error of a virsh that failed, from its output.
pub(super) fn failure(uri: &str, operation: &str, errors: &[u8]) -> VmmError {
    let (peer, message) = (format!("libvirt {uri}"), message(errors));
    if String::from_utf8_lossy(errors).contains(NOT_REACHED) {
        return VmmError::NoLibvirt { peer, message };
    }
    VmmError::Libvirt { peer, operation: operation.to_owned(), message }
}

pub(super) fn command(uri: &str, args: &[&str], access: Access) -> Command {
    let mut command = Command::new(VIRSH);
    command.args(["--quiet", "--connect", uri]);
    if access == Access::Read {
        command.arg("--readonly");
    }
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Messages are compared, and a log on standard error would be taken for a message.
    command.env("LC_ALL", "C").env_remove("LANGUAGE");
    for name in
        ["LIBVIRT_DEBUG", "LIBVIRT_LOG_FILTERS", "LIBVIRT_LOG_OUTPUTS", "VIRSH_DEBUG", "VIRSH_LOG_FILE"]
    {
        command.env_remove(name);
    }
    command
}

/// Last error that virsh prints, without the prefix `error:`.
fn message(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let errors: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("error: ")).collect();
    match errors.last() {
        Some(last) => (*last).to_owned(),
        None => text.trim().to_owned(),
    }
}
