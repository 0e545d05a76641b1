//! Lines on standard error; those about one VM within a rate limit.
//!
//! A QEMU can repeat a refused message without end, which must not fill the log. Each VM has a
//! limit of its own, whichever thread handles its messages: a noisy VM does not silence others.

use std::cell::RefCell;
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that may be written at once.
const BURST: u32 = 20;
/// Longest text, in characters.
const MAX_CHARS: usize = 500;
/// Interval at which another line is admitted.
const INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Limit {
    left: u32,
    since: Instant,
    suppressed: u64,
}

impl Limit {
    /// Admits a line; returns the number of lines suppressed since the last one.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let earned = now.saturating_duration_since(self.since).as_secs() / INTERVAL.as_secs();
        if earned > 0 {
            self.left = BURST.min(self.left.saturating_add(u32::try_from(earned).unwrap_or(BURST)));
            self.since = now;
        }
        if self.left == 0 {
            self.suppressed += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

impl Default for Limit {
    fn default() -> Self {
        Self { left: BURST, since: Instant::now(), suppressed: 0 }
    }
}

thread_local! {
    /// Limit of lines outside of the handling of a VM's messages.
    static LIMIT: RefCell<Limit> = RefCell::new(Limit::default());
    static REFUSALS: RefCell<Option<Arc<Refusals>>> = const { RefCell::new(None) };
}

/// Refusals of messages from one disk's QEMU, for the status, and the limit of its log lines.
#[derive(Debug, Default)]
pub struct Refusals {
    last: Mutex<Option<Refusal>>,
    limit: Mutex<Limit>,
}

/// The last refusal of a disk.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Reason, as in the log.
    pub why: String,
    /// Time of the refusal.
    pub at: Instant,
    /// Number of refusals so far.
    pub count: u64,
}

impl Refusals {
    /// The last refusal; `None` without any.
    #[must_use]
    pub fn last(&self) -> Option<Refusal> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, why: &str) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let count = last.as_ref().map_or(0, |last| last.count) + 1;
        *last = Some(Refusal { why: why.to_owned(), at: Instant::now(), count });
    }
}

/// Counts lines of this thread as refusals of a disk from now on, within its limit.
pub fn keep_refusals(refusals: Arc<Refusals>) {
    REFUSALS.with_borrow_mut(|kept| *kept = Some(refusals));
}

/// Replaces control characters: QEMU controls parts of some texts.
fn printable(text: &str) -> String {
    text.chars().take(MAX_CHARS).map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Writes `rtvirtio-iod: TEXT` by one write(2). A failure, as of a full disk or a closed pipe, is
/// ignored: `eprintln!` would panic, and end a thread that serves guests.
pub fn write_line(text: impl std::fmt::Display) {
    let _ = io::stderr().write_all(format!("rtvirtio-iod: {text}\n").as_bytes());
}

/// Writes `rtvirtio-iod: DISK: TEXT`, within the limit. On the thread of a connection the text
/// counts as a refusal.
pub fn line(disk: &str, text: impl std::fmt::Display) {
    write_limited(disk, &text.to_string(), true);
}

/// Writes a line as [`line()`] does, of something that is no refusal.
pub fn notice(disk: &str, text: impl std::fmt::Display) {
    write_limited(disk, &text.to_string(), false);
}

fn write_limited(disk: &str, text: &str, is_refusal: bool) {
    let text = printable(text);
    let now = Instant::now();
    let admitted = REFUSALS.with_borrow(|kept| match kept {
        Some(kept) => {
            if is_refusal {
                kept.note(&text);
            }
            kept.limit.lock().unwrap_or_else(PoisonError::into_inner).admit(now)
        }
        None => LIMIT.with_borrow_mut(|limit| limit.admit(now)),
    });
    let Some(suppressed) = admitted else { return };
    if suppressed > 0 {
        write_line(format_args!("{disk}: {suppressed} more lines were not written"));
    }
    write_line(format_args!("{disk}: {text}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_no_refusal() {
        let refusals = Arc::new(Refusals::default());
        keep_refusals(Arc::clone(&refusals));
        notice("disk", "all is well");
        assert!(refusals.last().is_none());
        line("disk", "refused");
        assert!(refusals.last().is_some_and(|last| (last.why.as_str(), last.count) == ("refused", 1)));
        // Both are within the disk's limit.
        assert_eq!(refusals.limit.lock().unwrap().left, BURST - 2);
    }

    #[test]
    fn a_burst_and_then_one_at_a_time() {
        let begin = Instant::now();
        let mut limit = Limit { left: BURST, since: begin, suppressed: 0 };
        let written = (0..1_000).filter(|_| limit.admit(begin).is_some()).count();
        assert_eq!(written, 20);
        assert_eq!(limit.admit(begin + INTERVAL), Some(980));
        assert_eq!(limit.admit(begin + INTERVAL), None);
        // Never more than a burst, after any pause.
        let later = begin + INTERVAL * 1_000;
        assert_eq!((0..1_000).filter(|_| limit.admit(later).is_some()).count(), 20);
    }
}
