//! Limits of a device's use, by what their users ask for.

use crate::{Cause, CauseKind, USED};

/// Program that holds a VM to a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limiter {
    /// The kernel, by a cgroup.
    Kernel,
    /// QEMU, by its throttling of a drive.
    Qemu,
}

/// Users of a limit besides the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherUsers {
    /// No other user: the limit is the VM's own.
    #[default]
    None,
    /// Users whose load is known, as far as they matter.
    Declared,
    /// Users that may ask for more than is known.
    Undeclared,
}

/// Limit of the device's use, against what its users ask for.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// Program that enforces it.
    pub by: Limiter,
    /// File of the limit, or its name in QEMU.
    pub file: String,
    /// Limit per second, in bytes or requests.
    pub value: f64,
    /// Part of it that its program lets through.
    pub passes: f64,
    /// Completed per second by all its users.
    pub used: f64,
    /// Asked for per second by the tasks of its users, as declared, without end for one without a
    /// rate; at least, where other users are undeclared.
    pub asked: f64,
    /// Users besides the VM.
    pub others: OtherUsers,
}

impl Limit {
    /// Whether it is used up, in that share of the window.
    pub(super) fn is_used_up(&self, moving: f64) -> bool {
        self.used >= self.passes * USED * moving
    }

    /// Whether it holds the VM.
    pub(super) fn holds(&self, moving: f64) -> bool {
        self.is_used_up(moving) && self.asked > self.passes
    }

    /// Whether it is used up, and by requests of unknown load: it may hold the VM or not.
    pub(super) fn is_unclear(&self, moving: f64) -> bool {
        self.others == OtherUsers::Undeclared && self.is_used_up(moving) && !self.holds(moving)
    }

    /// Cause, where it holds the VM.
    pub(super) fn cause(&self, moving: f64) -> Option<Cause> {
        let Self { by, file, value, passes, asked, others, .. } = self;
        let users = if *others == OtherUsers::None { "it asks" } else { "it and others below ask" };
        let asked = if asked.is_finite() { format!("{asked:.0}") } else { "as much as it gets".to_owned() };
        let holds =
            if passes < value { format!("lets {passes:.0} through, and holds") } else { "holds".to_owned() };
        let (kind, whose) = match by {
            Limiter::Kernel => (CauseKind::KernelLimit, "its limit"),
            Limiter::Qemu => (CauseKind::QemuThrottle, "QEMU's throttling to"),
        };
        self.holds(moving).then(|| Cause {
            kind,
            share: None,
            evidence: format!("{whose} {value:.0} in {file} {holds} it: {users} for {asked}"),
            remedy: "raise the limit, or lower the rate".to_owned(),
        })
    }
}
