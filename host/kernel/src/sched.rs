//! Scheduling attributes of a thread: `sched_getattr(2)`, `sched_setattr(2)`, and the reasons why
//! the kernel refuses them.
//!
//! Attributes have one canonical text (`fifo 97 reset-on-fork`), so that they can be journaled and
//! compared.

mod refusal;
mod throttled;

use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use refusal::{CAP_SYS_NICE, Refusal, explain};
pub use throttled::{Throttled, settle};

/// Scheduling policy of a thread (sched(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// `SCHED_OTHER`: the fair class.
    Other,
    /// `SCHED_FIFO`: runs until it blocks or a higher priority is ready.
    Fifo,
    /// `SCHED_RR`: as FIFO, in turns with threads of equal priority.
    Rr,
    /// `SCHED_BATCH`: fair, woken later.
    Batch,
    /// `SCHED_IDLE`: least share of the fair class.
    Idle,
    /// `SCHED_DEADLINE`: earliest deadline first with a budget.
    Deadline,
    /// `SCHED_EXT`: a scheduler loaded as BPF.
    Ext,
}

/// Names as `chrt` prints them, and the kernel's numbers (`include/uapi/linux/sched.h`).
const POLICIES: [(Policy, &str, u32); 7] = [
    (Policy::Other, "other", 0),
    (Policy::Fifo, "fifo", 1),
    (Policy::Rr, "rr", 2),
    (Policy::Batch, "batch", 3),
    (Policy::Idle, "idle", 5),
    (Policy::Deadline, "deadline", 6),
    (Policy::Ext, "ext", 7),
];

impl Policy {
    /// Policy with the kernel's number, as in field 41 of `/proc/PID/stat`.
    #[must_use]
    pub fn of_number(number: u32) -> Option<Self> {
        POLICIES.iter().find(|p| p.2 == number).map(|p| p.0)
    }

    /// Number of the kernel, such as 1 for `SCHED_FIFO`.
    #[must_use]
    pub fn number(self) -> u32 {
        POLICIES.iter().find(|p| p.0 == self).map_or(0, |p| p.2)
    }

    /// Name as `chrt` prints it: `fifo`, `other`, ...
    #[must_use]
    pub fn name(self) -> &'static str {
        POLICIES.iter().find(|p| p.0 == self).map_or("other", |p| p.1)
    }

    /// Whether a thread of this policy runs before every fair one: FIFO, RR or DEADLINE.
    #[must_use]
    pub fn is_real_time(self) -> bool {
        matches!(self, Self::Fifo | Self::Rr | Self::Deadline)
    }
}

/// Parameters of `SCHED_DEADLINE`, in nanoseconds: `runtime` in each `period`, used up within
/// `deadline` of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reservation {
    /// Budget of one period.
    pub runtime: u64,
    /// Time from the start of the period by which the budget is granted.
    pub deadline: u64,
    /// Length of a period.
    pub period: u64,
}

/// Attributes that `sched_setattr(2)` sets, without the utilisation clamps, which stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attr {
    /// Scheduling policy of the thread.
    pub policy: Policy,
    /// Nice value, -20 to 19; acts under the fair policies only.
    pub nice: i32,
    /// 1 to 99 under FIFO and RR, else 0.
    pub priority: u32,
    /// Parameters under DEADLINE; `None` otherwise.
    pub reservation: Option<Reservation>,
    /// Time slice of a fair thread in nanoseconds, where the kernel has one for each thread (Linux
    /// 6.12); 0 for the kernel's default.
    pub slice: u64,
    /// Children start with `SCHED_OTHER` and nice 0 instead of inheriting
    /// (`SCHED_FLAG_RESET_ON_FORK`).
    pub reset_on_fork: bool,
    /// Other flags of a DEADLINE thread: `SCHED_FLAG_RECLAIM`, `SCHED_FLAG_DL_OVERRUN`.
    pub flags: u64,
}

const RESET_ON_FORK: u64 = 1;
/// RECLAIM and DL_OVERRUN, the two that the kernel reports back (`SCHED_DL_FLAGS`).
const DEADLINE_FLAGS: u64 = 0x02 | 0x04;

/// Least runtime that the kernel accepts (`DL_SCALE`) in a period so long that its share rounds to
/// 0 of 2^20 (`to_ratio()`).
const RELEASED: Reservation = Reservation { runtime: 1024, deadline: 2_000_000_000, period: 2_000_000_000 };

impl Attr {
    /// `SCHED_OTHER` with this nice value.
    #[must_use]
    pub fn other(nice: i32) -> Self {
        Self {
            policy: Policy::Other,
            nice,
            priority: 0,
            reservation: None,
            slice: 0,
            reset_on_fork: false,
            flags: 0,
        }
    }

    /// `SCHED_FIFO`. Children are reset: a worker that such a thread starts must not inherit its
    /// priority by accident.
    #[must_use]
    pub fn fifo(priority: u32) -> Self {
        Self { policy: Policy::Fifo, priority, reset_on_fork: true, ..Self::other(0) }
    }

    /// `SCHED_DEADLINE` with the deadline at the period's end. Children are reset, because the
    /// kernel refuses `fork` otherwise.
    #[must_use]
    pub fn deadline(runtime: u64, period: u64) -> Self {
        let reservation = Some(Reservation { runtime, deadline: period, period });
        Self { policy: Policy::Deadline, reservation, reset_on_fork: true, ..Self::other(0) }
    }

    /// Attributes with a reservation that takes no bandwidth; `None` for other policies. [`set`]
    /// uses them when a thread leaves DEADLINE.
    #[must_use]
    pub fn released(&self) -> Option<Self> {
        let reservation = self.reservation.map(|_| RELEASED)?;
        Some(Self { reservation: Some(reservation), ..*self })
    }

    /// Whether these attributes, read from a thread, are the result of setting `wanted`: the time
    /// slice counts only when one was asked for, and the nice value only of a fair thread. The
    /// kernel keeps that of others, and reports 0 (`get_params()` in `kernel/sched/syscalls.c`).
    #[must_use]
    pub fn is(&self, wanted: &Self) -> bool {
        let slice = if wanted.slice == 0 { 0 } else { self.slice };
        let nice = if wanted.policy.is_real_time() { wanted.nice } else { self.nice };
        Self { slice, nice, ..*self } == *wanted
    }

    fn to_raw(self) -> libc::sched_attr {
        let reservation = self.reservation.unwrap_or(Reservation { runtime: 0, deadline: 0, period: 0 });
        libc::sched_attr {
            // 48 bytes: SCHED_ATTR_SIZE_VER0, without the utilisation clamps.
            size: u32::try_from(size_of::<libc::sched_attr>()).unwrap_or(48),
            sched_policy: self.policy.number(),
            sched_flags: if self.reset_on_fork { RESET_ON_FORK } else { 0 } | self.flags,
            sched_nice: self.nice,
            sched_priority: self.priority,
            sched_runtime: if self.reservation.is_some() { reservation.runtime } else { self.slice },
            sched_deadline: reservation.deadline,
            sched_period: reservation.period,
        }
    }

    fn of_raw(raw: &libc::sched_attr) -> io::Result<Self> {
        let policy = Policy::of_number(raw.sched_policy).ok_or_else(|| {
            let text =
                format!("scheduling policy {} is not known; please report this kernel", raw.sched_policy);
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
        let deadline = policy == Policy::Deadline;
        Ok(Self {
            policy,
            nice: raw.sched_nice,
            priority: raw.sched_priority,
            reservation: deadline.then_some(Reservation {
                runtime: raw.sched_runtime,
                deadline: raw.sched_deadline,
                period: raw.sched_period,
            }),
            slice: if policy.is_real_time() { 0 } else { raw.sched_runtime },
            reset_on_fork: raw.sched_flags & RESET_ON_FORK != 0,
            flags: if deadline { raw.sched_flags & DEADLINE_FLAGS } else { 0 },
        })
    }
}

impl fmt::Display for Attr {
    /// Text: `other nice 0`, `fifo 97 reset-on-fork`, `deadline 4000000/20000000/20000000`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.policy.name())?;
        match (self.policy, self.reservation) {
            (Policy::Fifo | Policy::Rr, _) => write!(f, " {}", self.priority)?,
            (_, Some(r)) => write!(f, " {}/{}/{}", r.runtime, r.deadline, r.period)?,
            _ => {}
        }
        // A real-time thread keeps its nice value for when it is fair again.
        if !self.policy.is_real_time() || self.nice != 0 {
            write!(f, " nice {}", self.nice)?;
        }
        if self.slice != 0 {
            write!(f, " slice {}", self.slice)?;
        }
        if self.reset_on_fork {
            write!(f, " reset-on-fork")?;
        }
        if self.flags != 0 {
            write!(f, " flags {}", self.flags)?;
        }
        Ok(())
    }
}

/// Text that is not one of [`Attr`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a scheduling policy with its parameters, such as `fifo 97` or `other nice 0`")]
pub struct BadAttr {
    text: String,
}

impl FromStr for Attr {
    type Err = BadAttr;

    fn from_str(text: &str) -> Result<Self, BadAttr> {
        parse(text).ok_or_else(|| BadAttr { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<Attr> {
    let mut words = text.split_whitespace();
    let name = words.next()?;
    let policy = POLICIES.iter().find(|p| p.1 == name)?.0;
    let mut attr = Attr { policy, ..Attr::other(0) };
    match policy {
        Policy::Fifo | Policy::Rr => {
            attr.priority = words.next()?.parse().ok().filter(|p| (1..=99).contains(p))?;
        }
        Policy::Deadline => {
            let mut parts = words.next()?.split('/').map(|p| p.parse::<u64>().ok());
            let (runtime, deadline, period) = (parts.next()??, parts.next()??, parts.next()??);
            if parts.next().is_some() {
                return None;
            }
            attr.reservation = Some(Reservation { runtime, deadline, period });
        }
        _ => {}
    }
    while let Some(word) = words.next() {
        match word {
            "nice" => attr.nice = words.next()?.parse().ok().filter(|n| (-20..=19).contains(n))?,
            "slice" => attr.slice = words.next()?.parse().ok()?,
            "reset-on-fork" => attr.reset_on_fork = true,
            "flags" => attr.flags = words.next()?.parse().ok().filter(|f| f & !DEADLINE_FLAGS == 0)?,
            _ => return None,
        }
    }
    Some(attr)
}

/// Reads the attributes of a thread of this machine.
///
/// # Errors
/// `ESRCH` when it is gone.
pub fn get(tid: u32) -> io::Result<Attr> {
    let mut raw = Attr::other(0).to_raw();
    // SAFETY: `raw` is a live sched_attr of the size given; the kernel writes no more than that.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            tid as libc::pid_t,
            &raw mut raw,
            size_of::<libc::sched_attr>(),
            0,
        )
    };
    if result == 0 { Attr::of_raw(&raw) } else { Err(io::Error::last_os_error()) }
}

/// Sets the attributes of a thread of this machine. A fair thread gets back the time slice of
/// `attr` where the kernel shows another after its policy was set.
///
/// A thread that leaves DEADLINE gives its bandwidth back first. The kernel would do so when the
/// thread next blocks, and so never for one that is asleep already: seen on Linux 6.1 and 6.18,
/// `switched_from_dl()` in `kernel/sched/deadline.c`. Bandwidth lost in this way stays lost when
/// the thread ends, until the CPU sets change, and the next reservation is refused. Killed between
/// the two calls, the thread has [`Attr::released`]. A thread that is throttled never runs again
/// under a next reservation that comes too soon: [`settle`] before a program ends.
///
/// # Errors
/// As `sched_setattr(2)`: `EPERM`, `EBUSY` when DEADLINE bandwidth is used up, `ESRCH` when the
/// thread is gone; [`explain`] finds the cause.
pub fn set(tid: u32, attr: &Attr) -> io::Result<()> {
    let mut first = *attr;
    // Asking for a slice makes it the thread's own for good; most threads have the default, which
    // need not be set.
    first.slice = 0;
    let before = get(tid)?;
    match (before.reservation, attr.reservation) {
        (None, Some(wanted)) => throttled::enter(tid, wanted, &first, &before)?,
        (Some(held), None) => throttled::leave(tid, held, &first, &before)?,
        _ => set_raw(tid, &first)?,
    }
    if attr.slice != 0 && !attr.policy.is_real_time() && get(tid)?.slice != attr.slice {
        set_raw(tid, attr)?;
    }
    Ok(())
}

fn set_raw(tid: u32, attr: &Attr) -> io::Result<()> {
    let raw = attr.to_raw();
    // SAFETY: `raw` is a live sched_attr that holds its own size; the kernel only reads it.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, tid as libc::pid_t, &raw const raw, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests;
