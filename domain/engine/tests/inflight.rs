//! The table of requests in flight, for all orders of a small queue's requests and a kill between
//! any two stores, over several restarts of the I/O domain.
//!
//! The specification (vhost-user, "Inflight I/O tracking") requires that a restarted back end finds
//! exactly the requests that were fetched and not put into the used ring, in the order in which
//! they were fetched. The used ring's index is the guest's memory; here it is a number.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rtvirtio_engine::inflight::{Inflight, Region};

/// Bytes before the first descriptor, and of each (`inflight.rs` has the layout).
const HEAD: u64 = 16;
const DESC: u64 = 16;

/// One step of an I/O domain with the table, for a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Fetch(u16),
    /// Records the descriptor as the next one to complete.
    PrePut(u16),
    /// The used ring has it: from here on the guest sees the completion.
    Publish(u16),
    PostPut(u16),
    /// The process is killed and restarted.
    Kill,
}

/// A queue of a real region, with the state of the back end and its guest.
struct Model {
    file: File,
    region: Arc<Region>,
    queue: Inflight,
    size: u16,
    used: u16,
    /// Fetched and not published, in order.
    incomplete: Vec<u16>,
    /// The descriptor between [`Step::PrePut`] and [`Step::PostPut`], and whether it was published.
    putting: Option<(u16, bool)>,
}

impl Model {
    fn new(size: u16, used: u16) -> Self {
        let (file, shape) = Region::create(1, size).unwrap();
        let shared = file.try_clone().unwrap();
        let region = Arc::new(Region::open(file, &shape).unwrap());
        let mut queue = region.queue(0).unwrap();
        assert_eq!(queue.recover(used), [0u16; 0]);
        Self { file: shared, region, queue, size, used, incomplete: Vec::new(), putting: None }
    }

    /// Possible next steps. The engine completes one request at a time, each in three steps.
    fn steps(&self) -> Vec<Step> {
        let mut steps = vec![Step::Kill];
        steps.extend((0..self.size).filter(|h| !self.in_flight(*h)).map(Step::Fetch));
        match self.putting {
            None => steps.extend(self.incomplete.iter().map(|h| Step::PrePut(*h))),
            Some((head, false)) => steps.push(Step::Publish(head)),
            Some((head, true)) => steps.push(Step::PostPut(head)),
        }
        steps
    }

    fn in_flight(&self, head: u16) -> bool {
        self.incomplete.contains(&head) || self.putting.is_some_and(|(h, _)| h == head)
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Fetch(head) => {
                self.queue.mark_inflight(head);
                self.incomplete.push(head);
            }
            Step::PrePut(head) => {
                self.queue.pre_put(head);
                self.putting = Some((head, false));
            }
            Step::Publish(head) => {
                self.used = self.used.wrapping_add(1);
                self.incomplete.retain(|h| *h != head);
                self.putting = Some((head, true));
            }
            Step::PostPut(head) => {
                self.queue.post_put(head, self.used);
                self.putting = None;
            }
            Step::Kill => {
                let before = self.bytes();
                assert_eq!(self.region.queue(0).unwrap().recover(self.used), self.incomplete);
                // Killed again in the middle of the recovery: flags are cleared, the used index is
                // not recorded yet.
                let mut torn = self.bytes();
                torn[14..16].copy_from_slice(&before[14..16]);
                self.file.write_all_at(&torn, 0).unwrap();
                self.queue = self.region.queue(0).unwrap();
                assert_eq!(self.queue.recover(self.used), self.incomplete);
                self.putting = None;
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; (HEAD + DESC * u64::from(self.size)) as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// The stores of a step one by one: offset and length, in the order of `inflight.rs`.
    fn stores(step: Step) -> Vec<(u64, u64)> {
        let at = |head: u16| HEAD + DESC * u64::from(head);
        match step {
            Step::Fetch(head) => vec![(at(head) + 8, 8), (at(head), 1)],
            Step::PrePut(head) => vec![(at(head) + 6, 2), (12, 2)],
            Step::PostPut(head) => vec![(at(head), 1), (14, 2)],
            Step::Publish(_) | Step::Kill => Vec::new(),
        }
    }

    /// Kills in the middle of a step: only the first of its stores reached the memory.
    fn check_torn_stores(&self, before: &[u8], step: Step) {
        let after = self.bytes();
        let mut torn = before.to_vec();
        let stores = Self::stores(step);
        for (i, (at, len)) in stores.iter().enumerate() {
            let place = *at as usize..(*at + *len) as usize;
            torn[place.clone()].copy_from_slice(&after[place]);
            let whole = i + 1 == stores.len();
            if whole {
                assert_eq!(torn, after, "{step:?} stores something else");
                break;
            }
            self.file.write_all_at(&torn, 0).unwrap();
            // The flag is the last store of a fetch: until then nothing is in flight.
            let mut open = self.incomplete.clone();
            if let Step::Fetch(head) = step {
                open.retain(|h| *h != head);
            }
            assert_eq!(self.region.queue(0).unwrap().recover(self.used), open, "killed within {step:?}");
        }
        self.file.write_all_at(&after, 0).unwrap();
    }
}

/// Replays a path, its last step torn in all ways, and returns the possible next steps.
fn play(path: &[Step], size: u16, used: u16) -> Vec<Step> {
    let mut model = Model::new(size, used);
    let (last, first) = path.split_last().map_or((None, path), |(l, f)| (Some(*l), f));
    first.iter().for_each(|s| model.apply(*s));
    if let Some(step) = last {
        let before = model.bytes();
        model.apply(step);
        if step != Step::Kill {
            model.check_torn_stores(&before, step);
        }
    }
    model.steps()
}

fn all_orders(path: &mut Vec<Step>, depth: usize, size: u16, used: u16) -> u64 {
    let next = play(path, size, used);
    if path.len() == depth {
        return 1;
    }
    let mut paths = 1;
    for step in next {
        // Two kills in a row test nothing more.
        if step == Step::Kill && path.last().is_none_or(|s| *s == Step::Kill) {
            continue;
        }
        path.push(step);
        paths += all_orders(path, depth, size, used);
        path.pop();
    }
    paths
}

#[test]
fn all_orders_of_two_descriptors() {
    let paths = all_orders(&mut Vec::new(), 11, 2, 0);
    assert!(paths > 10_000, "{paths}");
}

/// The used index wraps around.
#[test]
fn all_orders_of_three_descriptors() {
    let paths = all_orders(&mut Vec::new(), 8, 3, u16::MAX);
    assert!(paths > 10_000, "{paths}");
}
