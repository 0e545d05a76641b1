//! Putting back what the kernel refuses for a moment.

use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Fate, OnConflict, Outcome, Reverted};

use super::put_back;
use crate::error::{Result, one_line};
use crate::guests::WaitLimit;

/// Time for which putting all back waits, all VMs together, until the kernel has dropped its last
/// references to groups: milliseconds on an idle machine, seconds on a busy one.
pub(super) const LAST_REFERENCES: Duration = Duration::from_secs(5);
/// Pause before what was refused is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Puts back, and again what the kernel has refused: for a moment after the threads have left a
/// group it may still count the group's budget, or hold the group in use. `time_left` is the time
/// left for that, where the call's waits have no sooner end.
pub(super) fn put_back_with_retries(
    dir: &Path,
    on_conflict: OnConflict,
    time_left: &mut Duration,
) -> Result<Option<Reverted>> {
    let Some(mut reverted) = put_back(dir, on_conflict)? else { return Ok(None) };
    let is_refused = |of: &Reverted| of.outcomes.iter().any(|o| matches!(o.fate, Fate::Failed { .. }));
    while !reverted.done && is_refused(&reverted) && !WaitLimit::left(*time_left).is_zero() {
        let begin = Instant::now();
        std::thread::sleep(RETRY_INTERVAL);
        let again = put_back(dir, on_conflict);
        *time_left = time_left.saturating_sub(begin.elapsed());
        let goes_on = again_after(&mut reverted, again);
        if !goes_on {
            break;
        }
    }
    Ok(Some(reverted))
}

/// Adds the result of another attempt. Returns whether a further one can be made. What the attempts
/// before have put back is never lost.
fn again_after(reverted: &mut Reverted, again: Result<Option<Reverted>>) -> bool {
    match again {
        Ok(Some(again)) => {
            *reverted = followed_by(std::mem::take(reverted), again);
            true
        }
        Ok(None) => {
            reverted.warnings.push("its journal was removed by another program meanwhile".to_owned());
            false
        }
        Err(e) => {
            reverted.warnings.push(format!("the attempt to put the rest back has failed: {}", one_line(&e)));
            false
        }
    }
}

/// Results of two attempts as one: of each setting the last.
fn followed_by(first: Reverted, again: Reverted) -> Reverted {
    let same = |o: &Outcome, other: &Outcome| o.path == other.path && o.knob == other.knob;
    let (mut outcomes, mut warnings) = (first.outcomes, first.warnings);
    for later in again.outcomes {
        match outcomes.iter_mut().find(|o| same(o, &later)) {
            // In the end it is as it was, whichever attempt has done it.
            Some(known) if matches!(later.fate, Fate::Untouched | Fate::Gone { .. }) => {
                if matches!(known.fate, Fate::Failed { .. } | Fate::Blocked { .. }) {
                    *known = later;
                }
            }
            Some(known) => *known = later,
            None => outcomes.push(later),
        }
    }
    let new = again.warnings.into_iter().filter(|warning| !warnings.contains(warning)).collect::<Vec<_>>();
    warnings.extend(new);
    Reverted { done: again.done, rebooted: again.rebooted, outcomes, warnings }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Kind};

    /// A setting that the first attempt has put back was put back, and one that the second has is
    /// not failed.
    #[test]
    fn of_two_attempts_each_setting_has_the_result_that_counts() {
        let outcome = |knob: &str, fate: Fate| Outcome {
            knob: knob.to_owned(),
            path: format!("/{knob}"),
            old: None,
            fate,
        };
        let restored = |from: &str| Fate::Restored { from: from.to_owned() };
        let refused = || Fate::Failed { error: "it is still in use".to_owned() };
        let first = Reverted {
            outcomes: vec![
                outcome("group", refused()),
                outcome("budget", Fate::Blocked { by: "/group".to_owned() }),
                outcome("policy", restored("fifo 1")),
            ],
            ..Reverted::default()
        };
        let again = Reverted {
            done: true,
            outcomes: vec![
                outcome("group", restored("present")),
                outcome("budget", Fate::Untouched),
                outcome("policy", Fate::Untouched),
            ],
            ..Reverted::default()
        };
        let both = followed_by(first, again);
        let fates: Vec<Fate> = both.outcomes.into_iter().map(|o| o.fate).collect();
        assert!(both.done);
        assert_eq!(fates, [restored("present"), Fate::Untouched, restored("fifo 1")]);
    }

    /// An error of a later attempt leaves the results of those before, each warning once.
    #[test]
    fn what_was_put_back_is_known_after_an_error_too() {
        let refused = Outcome {
            knob: "group".to_owned(),
            path: "/group".to_owned(),
            old: None,
            fate: Fate::Failed { error: "it is still in use".to_owned() },
        };
        let attempt = || Reverted {
            outcomes: vec![refused.clone()],
            warnings: vec!["the disk is full".to_owned()],
            ..Reverted::default()
        };
        let mut reverted = attempt();
        assert!(again_after(&mut reverted, Ok(Some(attempt()))));
        assert_eq!(reverted, attempt());
        assert!(!again_after(&mut reverted, Err(Error::new(Kind::InForce, "it is locked"))));
        assert!(!again_after(&mut reverted, Ok(None)));
        assert_eq!((reverted.done, &reverted.outcomes), (false, &attempt().outcomes));
        assert_eq!(reverted.warnings.len(), 3, "{:?}", reverted.warnings);
        assert!(reverted.warnings[1].contains("it is locked"), "{:?}", reverted.warnings);
    }
}
