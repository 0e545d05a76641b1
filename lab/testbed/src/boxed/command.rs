//! A command in the box, with programs of this host, and the transfer of its results.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_units::Bytes;

use super::{BoxError, BoxImage, BoxOutcome, BoxRun, RUNS, run, tail};
use crate::image::io_at;

/// Guests for which the box has memory: as many as a CPU experiment starts.
const GUESTS: u64 = 2;
/// Time for the script before and after the command.
const AROUND: Duration = Duration::from_secs(120);
/// Working directory of the command in the box.
const PLACE: &str = "/root/results";

/// A command to run in the box.
#[derive(Debug, Clone)]
pub struct BoxCommand<'a> {
    /// Program and arguments. It runs as root, in an empty directory.
    pub words: &'a [String],
    /// Programs of this host in the command's PATH, with the libraries they need.
    pub programs: &'a [PathBuf],
    /// Directory of this host for the files in the command's working directory, 256 MiB at most. It
    /// must be empty, or is made.
    pub results: &'a Path,
    /// Timeout of the command, in whole seconds.
    pub timeout: Duration,
    /// Set to stop the run.
    pub cancel: &'a AtomicBool,
}

/// Runs a command in the box; its lines go to `on_line`. Its files are copied out also when it
/// fails, or is ended (SIGTERM) after its timeout; not where the box itself hangs or dies. Under
/// emulated SVM a guest or the whole box may die by itself (see
/// [`run_with_guests`](super::run_with_guests)): a box that dies is started anew, twice at most; a
/// guest that dies is left to the command. A background process of the command is waited for.
///
/// # Errors
/// [`BoxError`]. A command that fails is an outcome, not an error.
pub fn run_command(
    image: &BoxImage,
    command: &BoxCommand<'_>,
    on_line: &dyn Fn(&str),
) -> Result<BoxOutcome, BoxError> {
    fs::create_dir_all(command.results).map_err(io_at("create", command.results))?;
    let mut there = fs::read_dir(command.results).map_err(io_at("read", command.results))?;
    if there.next().is_some() {
        return Err(BoxError::NotEmpty { path: command.results.to_owned() });
    }
    let line = shlex::try_join(command.words.iter().map(String::as_str)).map_err(|_| BoxError::Word)?;
    // The command prints to no terminal. A tape archive on a disk: the disk's length is no part of
    // it. The script's exit status is that of the command.
    let script = format!(
        "set -o pipefail\nmkdir {PLACE} && cd {PLACE} || exit\ntimeout {} {line} 2>&1 | cat\nstatus=$?\n\
         tar -cf /dev/vdb -C {PLACE} . || echo 'what the command left is cut: it has more than 256 MiB'\nexit $status\n",
        command.timeout.as_secs().max(1)
    );
    let programs: Vec<&Path> = command.programs.iter().map(PathBuf::as_path).collect();
    let dir = tempfile::Builder::new()
        .prefix(&rtvirtio_kernel::ProcessId::prefix("box"))
        .tempdir()
        .map_err(io_at("make a directory in", &std::env::temp_dir()))?;
    let archive = dir.path().join("results.tar");
    let mut asked = BoxRun::new(&script, command.timeout + AROUND);
    asked.programs = &programs;
    asked.memory = Bytes(asked.memory.0 + (GUESTS - 1) * image.guest_memory().0);
    asked.results = Some(&archive);
    asked.cancel = Some(command.cancel);
    let mut out = run(image, &asked, on_line)?;
    for _ in 1..RUNS {
        if out.exit_code.is_some() {
            break;
        }
        on_line(&format!("the box died: once more. Its console ended with:\n{}", tail(&out.console)));
        out = run(image, &asked, on_line)?;
    }
    if out.exit_code.is_some() {
        unpack(&archive, command.results)?;
    }
    Ok(out)
}

fn unpack(archive: &Path, dir: &Path) -> Result<(), BoxError> {
    let mut tar = Command::new("tar");
    // The directory is the user's, with its own mode.
    tar.args(["--extract", "--no-same-owner", "--no-overwrite-dir", "--file"])
        .arg(archive)
        .arg("--directory")
        .arg(dir);
    let out = tar.stdin(Stdio::null()).output().map_err(io_at("run", Path::new("tar")))?;
    if out.status.success() {
        return Ok(());
    }
    Err(BoxError::Results { stderr: String::from_utf8_lossy(&out.stderr).trim().to_owned() })
}
