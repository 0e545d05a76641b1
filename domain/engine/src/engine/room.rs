//! Writes that wait for room on the host's file system.
//!
//! A guest whose write fails for want of room may give its file system up. With `on_full = "wait"`
//! such a request keeps its place in the queue instead, and one of a disk's waiting requests is
//! tried again and again; when it succeeds, the others follow. A stopped queue leaves them in the
//! memory of requests in flight, from which the next start takes them.

use std::collections::VecDeque;

use rtvirtio_sched::{Op, Request};
use rtvirtio_units::Nanos;

/// Time between two attempts for a disk.
const RETRY: Nanos = Nanos(250_000_000);
/// Least time between two log entries for a disk: a guest decides how often it writes and discards.
const LOG_INTERVAL: Nanos = Nanos(10_000_000_000);

/// Whether a piece failed for want of room: by an error, or as a short write. A short write for
/// another reason gets that error when it is tried again.
pub fn lacks_room(op: Op, result: i32) -> bool {
    match op {
        Op::Write => result >= 0 || result == -libc::ENOSPC || result == -libc::EDQUOT,
        Op::WriteZeroes => result == -libc::ENOSPC || result == -libc::EDQUOT,
        Op::Read | Op::Flush | Op::Discard => false,
    }
}

/// The requests of a disk that wait for room.
#[derive(Debug, Default)]
pub struct WaitingForRoom {
    requests: VecDeque<Request>,
    /// Tag of the request that is being tried.
    trying: Option<u64>,
    /// Moment of the next attempt.
    retry_at: Nanos,
    /// Since when requests wait.
    since: Option<Nanos>,
    /// Requests that had to wait, each attempt but the first left out.
    total: u64,
    /// Last log entry, and whether it is about the requests that wait now.
    logged_at: Option<Nanos>,
    is_logged: bool,
}

impl WaitingForRoom {
    /// Adds a request that found no room. Returns whether that is to be logged: it is the first
    /// one, after a time with room.
    pub fn add(&mut self, time: Nanos, request: Request, has_waited: bool) -> bool {
        self.total += u64::from(!has_waited);
        if self.trying == Some(request.tag) {
            // The same again: the order of a guest's writes is its own affair.
            self.requests.push_front(request);
            (self.trying, self.retry_at) = (None, Nanos(time.0 + RETRY.0));
            return false;
        }
        self.requests.push_back(request);
        if self.since.is_some() {
            return false;
        }
        (self.since, self.retry_at) = (Some(time), Nanos(time.0 + RETRY.0));
        self.is_logged = self.logged_at.is_none_or(|at| time.0 >= at.0.saturating_add(LOG_INTERVAL.0));
        if self.is_logged {
            self.logged_at = Some(time);
        }
        self.is_logged
    }

    /// Whether the begin of the present time without room is in the log.
    pub fn is_logged(&self) -> bool {
        self.is_logged
    }

    /// The request to try, from that moment on.
    pub fn next(&mut self, time: Nanos) -> Option<Request> {
        if self.trying.is_some() || time < self.retry_at {
            return None;
        }
        let request = self.requests.pop_front()?;
        self.trying = Some(request.tag);
        Some(request)
    }

    /// Moment of the next attempt; `None` while there is none to make.
    pub fn retry_at(&self) -> Option<Nanos> {
        (self.trying.is_none() && !self.requests.is_empty()).then_some(self.retry_at)
    }

    /// A request has ended otherwise. Returns how long there was no room, where this request found
    /// some: all others may be tried then.
    pub fn end(&mut self, time: Nanos, tag: u64, is_success: bool) -> Option<Nanos> {
        self.trying.take_if(|trying| *trying == tag)?;
        if !is_success {
            self.since = self.since.filter(|_| !self.requests.is_empty());
            return None;
        }
        self.since.take().map(|since| Nanos(time.0.saturating_sub(since.0)))
    }

    /// Takes requests away.
    pub fn take(&mut self, mut is_wanted: impl FnMut(&Request) -> bool) -> Vec<Request> {
        let (taken, left) = std::mem::take(&mut self.requests).into_iter().partition(|r| is_wanted(r));
        self.requests = left;
        if self.requests.is_empty() && self.trying.is_none() {
            self.since = None;
        }
        Vec::from(taken)
    }

    /// Forgets all, after the queues are gone.
    pub fn forget(&mut self) {
        *self = Self { total: self.total, logged_at: self.logged_at, ..Self::default() };
    }

    /// Requests that wait now, the one that is being tried included.
    pub fn len(&self) -> usize {
        self.requests.len() + usize::from(self.trying.is_some())
    }

    /// Requests that had to wait so far.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_sched::Priority;

    use super::*;

    fn request(tag: u64) -> Request {
        Request { tag, op: Op::Write, len: 4_096, priority: Priority::NORMAL, arrival: Nanos(tag) }
    }

    #[test]
    fn one_is_tried_and_the_others_follow() {
        let mut room = WaitingForRoom::default();
        assert!(room.add(Nanos(5), request(1), false));
        assert!(!room.add(Nanos(6), request(2), false));
        assert_eq!((room.next(Nanos(7)), room.len()), (None, 2));
        let at = room.retry_at().unwrap();
        assert_eq!(at, Nanos(5 + RETRY.0));
        assert_eq!(room.next(at).unwrap().tag, 1);
        assert_eq!((room.next(Nanos(u64::MAX)), room.retry_at(), room.len()), (None, None, 2));
        // Still none, also for another write of the guest.
        assert!(!room.add(Nanos(at.0 + 1), request(3), false));
        assert!(!room.add(Nanos(at.0 + 2), request(1), true));
        assert_eq!(room.retry_at(), Some(Nanos(at.0 + 2 + RETRY.0)));
        let at = room.retry_at().unwrap();
        assert_eq!(room.next(at).unwrap().tag, 1);
        assert_eq!(room.end(at, 9, true), None, "a write over what is there");
        assert_eq!(room.end(Nanos(at.0 + 5), 1, true), Some(Nanos(at.0)));
        let rest: Vec<u64> = room.take(|_| true).iter().map(|r| r.tag).collect();
        assert_eq!((rest, room.len(), room.total()), (vec![2, 3], 0, 3));
        assert!(!room.add(Nanos(at.0 + 9), request(4), false), "too early for the log");
        assert_eq!((room.len(), room.is_logged()), (1, false));
        room.forget();
        assert!(room.add(Nanos(at.0 + LOG_INTERVAL.0), request(5), false));
    }

    #[test]
    fn one_that_fails_otherwise_lets_the_next_be_tried() {
        let mut room = WaitingForRoom::default();
        room.add(Nanos(0), request(1), false);
        room.add(Nanos(0), request(2), false);
        let at = room.retry_at().unwrap();
        assert_eq!(room.next(at).unwrap().tag, 1);
        assert_eq!(room.end(at, 1, false), None);
        assert_eq!(room.next(at).unwrap().tag, 2);
    }

    #[test]
    fn only_writes_wait() {
        assert!(lacks_room(Op::Write, -libc::ENOSPC) && lacks_room(Op::WriteZeroes, -libc::EDQUOT));
        assert!(lacks_room(Op::Write, 512), "the end of a write found no room");
        assert!(!lacks_room(Op::Write, -libc::EIO) && !lacks_room(Op::Read, -libc::ENOSPC));
        assert!(!lacks_room(Op::Flush, -libc::ENOSPC), "what it lost is lost");
    }
}
