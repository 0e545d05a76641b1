//! The priority field of a guest's requests, and the limits on its use.
//!
//! Linux's virtio-blk driver fills the field after the request's type with the request's I/O
//! priority: class in bits 13 to 15 (1 real-time, 2 best effort, 3 idle), since 6.5 a hint in bits
//! 3 to 12, level in bits 0 to 2 with 0 the most important (`include/uapi/linux/ioprio.h`). The
//! virtio specification reserves the field, and its legacy section reverses the order; so it is
//! read only where the configuration declares a Linux guest.

use serde::{Deserialize, Serialize};

/// Number of levels in a class.
pub const LEVELS: u8 = 8;

/// Linux's I/O classes, the most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Served before all others of its VM, with a reservation of its own.
    RealTime,
    /// Linux's default class, `IOPRIO_CLASS_BE`.
    BestEffort,
    /// Served when the VM has no other requests.
    Idle,
}

/// Class and level; smaller is more important.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority {
    /// Class of the request, compared first.
    pub class: Class,
    /// Level within the class, 0 to 7, 0 the most important.
    pub level: u8,
}

impl Priority {
    /// Best effort, level 4: Linux's priority of a task of nice 0.
    pub const NORMAL: Self = Self { class: Class::BestEffort, level: 4 };

    /// Real-time, level 4, the middle of its class.
    pub const URGENT: Self = Self { class: Class::RealTime, level: 4 };
}

impl Default for Priority {
    fn default() -> Self {
        Self::NORMAL
    }
}

/// Interpretation of a VM's priorities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityRule {
    /// Whether the guest's field is read.
    pub read: bool,
    /// Priority of requests without one (0), and of all when the field is not read.
    pub default: Priority,
    /// The highest class that the guest may use.
    pub ceiling: Class,
}

impl Default for PriorityRule {
    fn default() -> Self {
        Self { read: false, default: Priority::NORMAL, ceiling: Class::RealTime }
    }
}

impl PriorityRule {
    /// Priority of a request whose header has `field`. Every value is allowed: an unknown class
    /// counts as none.
    #[must_use]
    pub fn decode(&self, field: u32) -> Priority {
        let class = match (field >> 13) & 7 {
            1 => Class::RealTime,
            2 => Class::BestEffort,
            3 => Class::Idle,
            _ => return self.default,
        };
        if !self.read {
            return self.default;
        }
        Priority { class: class.max(self.ceiling), level: (field & 7) as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINUX: PriorityRule =
        PriorityRule { read: true, default: Priority::NORMAL, ceiling: Class::RealTime };

    #[test]
    fn linux_values_are_decoded() {
        assert_eq!(LINUX.decode(1 << 13), Priority { class: Class::RealTime, level: 0 });
        assert_eq!(LINUX.decode(2 << 13 | 7), Priority { class: Class::BestEffort, level: 7 });
        assert_eq!(LINUX.decode(3 << 13), Priority { class: Class::Idle, level: 0 });
        assert_eq!(LINUX.decode(0), Priority::NORMAL);
    }

    #[test]
    fn hints_and_foreign_bits_do_not_change_it() {
        // Hints are bits 3 to 12; a guest may set bits above 15 too.
        assert_eq!(LINUX.decode(1 << 13 | 0x1ff8 | 2), Priority { class: Class::RealTime, level: 2 });
        assert_eq!(LINUX.decode(0xffff_0000 | 2 << 13 | 3), Priority { class: Class::BestEffort, level: 3 });
        // Classes 4 to 7 do not exist.
        assert_eq!(LINUX.decode(5 << 13), Priority::NORMAL);
    }

    #[test]
    fn the_ceiling_holds_and_an_unread_field_counts_as_none() {
        let rule = PriorityRule { ceiling: Class::BestEffort, ..LINUX };
        assert_eq!(rule.decode(1 << 13), Priority { class: Class::BestEffort, level: 0 });
        assert_eq!(rule.decode(3 << 13 | 5), Priority { class: Class::Idle, level: 5 });
        let rule = PriorityRule { read: false, default: Priority::URGENT, ..LINUX };
        assert_eq!(rule.decode(3 << 13), Priority::URGENT);
    }
}
