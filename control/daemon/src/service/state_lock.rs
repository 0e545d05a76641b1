//! Lock for one service on a state directory: two services must not share the journals there,
//! whatever their run directories are.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use rtvirtio_apply::StateDir;
use rtvirtio_kernel::flock;
use rtvirtio_workflow::{Context as _, Dirs};

use crate::error::DaemonError;
use crate::run_dir::runs;

/// Name of the lock in the state directory.
pub(crate) const LOCK: &str = "service.lock";
/// Only root, or who owns the directory, may hold it.
const MODE: u32 = 0o600;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningService {
    /// Process id, as the service has written it.
    pub pid: Option<u32>,
    /// Run directory, as the service has written it.
    pub run: Option<PathBuf>,
}

impl RunningService {
    fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let pid = lines.next().and_then(|line| line.trim().parse().ok());
        Self { pid, run: lines.next().filter(|line| !line.is_empty()).map(PathBuf::from) }
    }

    /// Whether it listens in another run directory than this one.
    #[must_use]
    pub fn is_elsewhere(&self, run: &Path) -> bool {
        self.run.as_deref().is_some_and(|of| of != run)
    }

    /// Process and run directory, in words.
    #[must_use]
    pub fn description(&self) -> String {
        let pid = self.pid.map_or_else(String::new, |pid| format!("process {pid}"));
        let run = self.run.as_ref().map_or_else(String::new, |run| format!("--run-dir {}", run.display()));
        match [pid, run].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>() {
            parts if parts.is_empty() => "rtvirtiod".to_owned(),
            parts => format!("rtvirtiod ({})", parts.join(", ")),
        }
    }
}

/// Takes the lock of a state directory. It ends with the process, however it ends.
pub(super) fn take(dirs: &Dirs) -> Result<File, DaemonError> {
    let dir = StateDir::open_or_create(&dirs.state).map_err(rtvirtio_workflow::Error::from)?;
    let path = dirs.state.join(LOCK);
    let io = |action| {
        let path = path.clone();
        move |source| DaemonError::Io { action, path, source }
    };
    let mut file = dir.open_file(LOCK, MODE).map_err(io("open"))?;
    if !flock::lock(&file).map_err(io("lock"))? {
        let service = read(&mut file).unwrap_or_default().description();
        return Err(DaemonError::RunsOnState { service, path });
    }
    // The content serves messages of other processes only: a full disk must not stop the service.
    let _ = write(&mut file, &dirs.run);
    Ok(file)
}

/// The service that runs on these directories; `None` when none does.
///
/// # Errors
/// When that is unknown.
pub fn running(dirs: &Dirs) -> rtvirtio_workflow::Result<Option<RunningService>> {
    if let Some(dir) = StateDir::find(&dirs.state)? {
        let path = || dirs.state.join(LOCK).display().to_string();
        if dir.exists(LOCK).with_context(path)? {
            let opened = dir.open_file(LOCK, MODE);
            let mut file = opened.with_context(|| format!("cannot open {}: run it with sudo?", path()))?;
            if flock::is_held(&file).with_context(path)? {
                return Ok(Some(read(&mut file).unwrap_or_default()));
            }
        }
    }
    Ok(runs(&dirs.run)?.then(|| RunningService { pid: None, run: Some(dirs.run.clone()) }))
}

fn read(file: &mut File) -> io::Result<RunningService> {
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(RunningService::parse(&text))
}

fn write(file: &mut File, run: &Path) -> io::Result<()> {
    let run = std::path::absolute(run)?;
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}\n{}", std::process::id(), run.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_services_on_one_state_directory_exclude_each_other() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = |state: &str, run: &str| Dirs { state: dir.path().join(state), run: dir.path().join(run) };
        let (one, other) = (dirs("state", "one"), dirs("state", "other"));
        assert_eq!(running(&one).unwrap(), None, "without a directory none runs");
        let held = take(&one).unwrap();
        let refused = take(&other).unwrap_err();
        assert!(matches!(refused, DaemonError::RunsOnState { .. }), "{refused}");
        let pid = format!("process {}", std::process::id());
        assert!(refused.to_string().contains(&pid) && refused.to_string().contains("one"), "{refused}");
        // Each sees it, from whichever run directory it looks.
        let seen = running(&other).unwrap().unwrap();
        assert!(seen.is_elsewhere(&other.run) && !seen.is_elsewhere(&one.run), "{seen:?}");
        take(&dirs("another", "other")).unwrap();
        drop(held);
        assert_eq!(running(&other).unwrap(), None);
        take(&other).unwrap();
    }
}
