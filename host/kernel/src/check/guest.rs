//! Whether a guest's kernel passes on the priority class of its tasks' requests.

use super::Finding;

const WHY: &str = "the I/O domain can put a VM's urgent requests first only if its kernel writes their class into each virtio-blk request";

/// Judges a guest by its kernel's release, such as `6.12.9-amd64`, as `uname -r` prints.
///
/// Before 6.0 the class that `ionice` set often did not reach the request; from 6.8 a task without
/// an I/O context counts as if it had no class, also when its scheduling policy is real-time, which
/// was fixed in July 2025 for 6.17 and backported from there (`block/ioprio.c`,
/// `__get_task_ioprio`).
#[must_use]
pub fn guest_priority(guest: &str, release: &str) -> Finding {
    const ID: &str = "guest.ioprio";
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Finding::warn(
            ID,
            format!("{guest}: kernel \"{release}\" is not one of Linux"),
            WHY,
            "do not set guest_priority for it",
        );
    };
    let what = format!("{guest}: Linux {major}.{minor}");
    match (major, minor) {
        (0..=5, _) => Finding::warn(
            ID,
            format!("{what} does not pass on the class of every task"),
            WHY,
            "use a newer kernel in the guest, or asynchronous I/O with a priority of its own in each request",
        ),
        (6, 8..=16) => Finding::warn(
            ID,
            format!(
                "{what} may pass on no class for tasks that never called ioprio_set, real-time ones among them"
            ),
            WHY,
            "start the guest's urgent tasks with `ionice -c1`, or use a kernel of August 2025 or later",
        ),
        _ => Finding::ok(ID, format!("{what} passes on the class of direct and synchronous requests"), WHY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn kernels_by_what_they_send() {
        for (release, level, says) in [
            ("6.1.0-41-cloud-amd64", Level::Ok, "Linux 6.1 passes on"),
            ("6.12.9-amd64", Level::Warn, "never called ioprio_set"),
            ("6.8", Level::Warn, "never called"),
            ("6.17.1", Level::Ok, "passes on"),
            ("5.10.0-28-amd64", Level::Warn, "every task"),
            ("7.0.0-rc1", Level::Ok, "passes on"),
            ("FreeBSD", Level::Warn, "not one of Linux"),
            ("", Level::Warn, "not one of Linux"),
        ] {
            let f = guest_priority("vm", release);
            assert_eq!(f.level, level, "{release}: {f:?}");
            assert!(f.what.contains(says), "{f:?}");
        }
    }
}
