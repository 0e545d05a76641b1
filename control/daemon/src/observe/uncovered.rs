//! I/O on which no setting in force acts, scanned in a thread of its own: a file on a server that
//! does not answer holds up this thread only.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rtvirtio_kernel::Root;
use rtvirtio_workflow::Dirs;
use rtvirtio_workflow::covered::{self, InForce};
use serde::Serialize;

use super::coverage::Coverage;
use crate::error::DaemonError;
use crate::linux::RunningVm;
use crate::lock::lock;

/// Shortest interval of scans: disks come and go seldom.
const LEAST_EVERY: Duration = Duration::from_secs(10);
/// A scan that takes longer is reported: it waits for a file system.
const LONGEST_LOOK: Duration = Duration::from_secs(10);

/// I/O of VMs on which no setting in force acts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct UncoveredObservation {
    /// Start of the scan.
    #[serde(skip)]
    pub at: Option<Instant>,
    /// Each part, of settings of plans, limits and weights.
    pub all: Vec<InForce>,
    /// Whether a scan has ended.
    #[serde(skip)]
    pub has_looked: bool,
    /// Reason why the list is not known, or not complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unseen: Option<String>,
    /// Age of the scan, in seconds; `None` before the first.
    pub looked_s: Option<f64>,
}

impl UncoveredObservation {
    /// Scans once, as `rtvirtio status` does.
    #[must_use]
    pub fn scan(dirs: &Dirs) -> Self {
        let mut out = Self { at: Some(Instant::now()), has_looked: true, ..Self::default() };
        for dir in [&dirs.state, &dirs.held_plan()] {
            match covered::uncovered(dir) {
                Ok(found) => out.all.extend(found),
                Err(e) => out.unseen = Some(format!("{e:#}")),
            }
        }
        out
    }

    /// Sets the age; a scan that is overdue is reported as unseen.
    #[must_use]
    pub(crate) fn aged(mut self, now: Instant, every: Duration) -> Self {
        let age = self.at.map(|at| now.saturating_duration_since(at));
        self.looked_s = age.filter(|_| self.has_looked).map(|age| age.as_secs_f64());
        if !self.has_looked {
            self.unseen = Some("it has not been checked yet".to_owned());
        }
        if let Some(age) = age.filter(|age| *age > every.max(LEAST_EVERY) + LONGEST_LOOK) {
            let why = format!("last checked {} s ago: a file system may not answer", age.as_secs());
            self.unseen = Some(match self.unseen.take().filter(|_| self.has_looked) {
                Some(before) => format!("{why}; before: {before}"),
                None => why,
            });
        }
        self
    }
}

/// Scans periodically until the sender is dropped: settings in force, and the disks of the VMs that
/// run.
pub(crate) fn watch(
    dirs: Dirs,
    every: Duration,
    running: impl Fn() -> Vec<Arc<RunningVm>> + Send + 'static,
    (into, coverage): (Arc<Mutex<UncoveredObservation>>, Arc<Mutex<Coverage>>),
) -> Result<Sender<()>, DaemonError> {
    let (sender, end) = channel::<()>();
    // Until the first scan ends, age is counted from here.
    lock(&into).at = Some(Instant::now());
    let run = move || {
        loop {
            let seen = UncoveredObservation::scan(&dirs);
            *lock(&into) = seen;
            let until = Instant::now() + every.max(LEAST_EVERY) + LONGEST_LOOK;
            let scanned = Coverage::scan(&running(), &Root::default(), until);
            *lock(&coverage) = scanned;
            if !matches!(end.recv_timeout(every.max(LEAST_EVERY)), Err(RecvTimeoutError::Timeout)) {
                return;
            }
        }
    };
    let spawned = std::thread::Builder::new().name("uncovered".to_owned()).spawn(run);
    let path = PathBuf::from("uncovered");
    spawned.map_err(|source| DaemonError::Io { action: "start the thread", path, source })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_force_is_nothing_uncovered_and_an_old_look_is_none() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        let seen = UncoveredObservation::scan(&dirs);
        assert_eq!((seen.all.len(), &seen.unseen), (0, &None));
        let at = seen.at.unwrap();
        let every = Duration::from_secs(1);
        let fresh = seen.clone().aged(at + Duration::from_secs(19), every);
        assert_eq!((fresh.unseen, fresh.looked_s), (None, Some(19.0)));
        let old = seen.aged(at + Duration::from_secs(21), every);
        assert!(old.unseen.unwrap().contains("last checked 21 s ago"));
        let never = UncoveredObservation::default().aged(at, every);
        assert_eq!((never.looked_s, never.unseen.is_some()), (None, true));
        let begun = UncoveredObservation { at: Some(at), ..UncoveredObservation::default() };
        let begun = begun.aged(at + Duration::from_secs(3), every);
        assert_eq!(begun.looked_s, None);
        assert_eq!(begun.unseen.unwrap(), "it has not been checked yet");
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_nothing() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        std::fs::write(&dirs.state, "no directory").unwrap();
        assert!(UncoveredObservation::scan(&dirs).unseen.is_some());
    }
}
