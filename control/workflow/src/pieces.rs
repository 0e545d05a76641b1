//! A VM with thousands of threads: those that carry its contract are set first, the others in
//! pieces, so that no other VM waits for all of them.

use std::collections::BTreeSet;

use rtvirtio_apply::{Place, Write};
use rtvirtio_vmm::{Role, Thread};

/// Names one thread for good: its number and its start.
pub type Key = (u32, u64);

/// Threads that a service sets at once.
pub const PIECE: usize = 256;

pub(crate) fn key(t: &Thread) -> Key {
    (t.tid, t.start)
}

/// Order in which threads are taken in: what serves vCPUs, vCPUs, all others.
fn rank(role: &Role) -> u8 {
    match role {
        Role::Emulator | Role::IoThread(_) | Role::Vhost | Role::KvmPit => 0,
        Role::Vcpu(_) => 1,
        _ => 2,
    }
}

/// At most so many of these threads, those that carry a contract first. Where these are more, a
/// half is left to the vCPUs: a VM names its threads as it likes.
pub(crate) fn first_of(mut threads: Vec<&Thread>, most: usize) -> Vec<Thread> {
    if threads.len() <= most {
        return threads.into_iter().cloned().collect();
    }
    threads.sort_by_key(|t| rank(&t.role));
    let count = |of: u8| threads.iter().filter(|t| rank(&t.role) == of).count();
    let (services, vcpus) = (count(0), count(1));
    let of_services = services.min(most.saturating_sub(vcpus.min(most / 2)));
    let first = threads.iter().take(of_services).chain(threads.iter().skip(services));
    first.take(most).map(|t| (*t).clone()).collect()
}

fn thread_of(write: &Write) -> Option<Key> {
    match write.target.place {
        Place::Thread { tid, start, .. } => Some((tid, start)),
        Place::Host | Place::Guest { .. } => None,
    }
}

/// The threads that something is written to.
pub(crate) fn threads_of(writes: &[Write]) -> BTreeSet<Key> {
    writes.iter().filter_map(thread_of).collect()
}

/// Takes the writes of all but the first piece of these threads away, and returns the threads that
/// they are of. Threads that nothing is written to are no part of it.
#[must_use]
pub fn leave_for_later(writes: &mut Vec<Write>, threads: &[Thread], piece: usize) -> BTreeSet<Key> {
    let written = threads_of(writes);
    let candidates = threads.iter().filter(|t| written.contains(&key(t))).collect();
    let first: BTreeSet<Key> = first_of(candidates, piece).iter().map(key).collect();
    // What is written before them, such as their group, keeps its place.
    writes.retain(|w| thread_of(w).is_none_or(|key| first.contains(&key)));
    written.difference(&first).copied().collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rtvirtio_apply::{Form, Target};

    use super::*;

    fn thread(tid: u32, role: Role) -> Thread {
        Thread {
            pid: 1,
            tid,
            start: 5,
            name: String::new(),
            role,
            kernel: false,
            policy: None,
            priority: 0,
            nice: 0,
            reservation: None,
            reset_on_fork: None,
            affinity: "0".to_owned(),
            cgroups: Vec::new(),
            cpu_time: Duration::ZERO,
        }
    }

    fn tids(threads: &[Thread]) -> Vec<u32> {
        threads.iter().map(|t| t.tid).collect()
    }

    #[test]
    fn what_carries_a_contract_comes_first() {
        let roles = [
            Role::AioWorker,
            Role::Vcpu(vec![0]),
            Role::Other,
            Role::Emulator,
            Role::Vcpu(vec![1]),
            Role::IoThread("io0".to_owned()),
        ];
        let threads: Vec<Thread> = (0..).zip(roles).map(|(tid, role)| thread(tid, role)).collect();
        let first = |most| tids(&first_of(threads.iter().collect(), most));
        assert_eq!(first(6), [0, 1, 2, 3, 4, 5], "all of them, as they come");
        assert_eq!(first(5), [3, 5, 1, 4, 0]);
        assert_eq!(first(4), [3, 5, 1, 4]);
        assert_eq!(first(2), [3, 1], "neither kind keeps the other out");
    }

    #[test]
    fn what_is_left_for_later_is_not_written_and_all_else_stays() {
        let threads = [thread(1, Role::AioWorker), thread(2, Role::Vcpu(vec![0])), thread(3, Role::Other)];
        let policy = |tid| Write::new("policy", Target::scheduling(1, tid, 5), "fifo 1");
        let group = Write::new("group", Target::host("/group", Form::Plain), "1");
        let all = vec![group.clone(), policy(1), policy(2)];
        let mut writes = all.clone();
        assert_eq!(leave_for_later(&mut writes, &threads, 2), BTreeSet::new());
        assert_eq!(writes, all);
        assert_eq!(leave_for_later(&mut writes, &threads, 1), BTreeSet::from([(1, 5)]));
        assert_eq!(writes, [group, policy(2)]);
    }
}
