//! The ring beside a queue of the standard library, and under two real threads.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use proptest::prelude::*;

use crate::ring;

#[derive(Clone, Debug)]
enum Step {
    Push,
    PushMany(usize),
    Pop,
    PopMany(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => Just(Step::Push),
        1 => (0usize..9).prop_map(Step::PushMany),
        3 => Just(Step::Pop),
        1 => (0usize..9).prop_map(Step::PopMany),
    ];
    prop::collection::vec(step, 0..if cfg!(miri) { 20 } else { 200 })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 512 }, failure_persistence: None, ..ProptestConfig::default() })]

    /// It takes, refuses and gives as a bounded `VecDeque` does, and frees each item once.
    #[test]
    fn like_a_bounded_deque(capacity in 0usize..6, steps in steps()) {
        let (mut tx, mut rx) = ring(capacity);
        let mut model = VecDeque::new();
        let (mut next, all) = (0u64, Rc::new(()));
        let mut item = || { next += 1; (next, Rc::clone(&all)) };
        for step in steps {
            match step {
                Step::Push => {
                    let new = item();
                    let full = model.len() == capacity;
                    prop_assert_eq!(tx.is_full(), full);
                    match tx.push(new.clone()) {
                        Ok(()) => model.push_back(new),
                        Err(back) => prop_assert!(full && back.0.0 == new.0),
                    }
                }
                Step::PushMany(n) => {
                    let new: Vec<_> = (0..n).map(|_| item()).collect();
                    let mut items = new.iter().cloned();
                    let room = n.min(capacity - model.len());
                    prop_assert_eq!(tx.push_from(&mut items), room);
                    prop_assert_eq!(items.len(), n - room);
                    model.extend(new.into_iter().take(room));
                }
                Step::Pop => {
                    prop_assert_eq!(rx.is_empty(), model.is_empty());
                    prop_assert_eq!(rx.pop(), model.pop_front());
                }
                Step::PopMany(most) => {
                    let mut out = Vec::new();
                    let n = rx.pop_into(most, |i| out.push(i));
                    let expected: Vec<_> = model.drain(..most.min(model.len())).collect();
                    prop_assert_eq!(n, out.len());
                    prop_assert_eq!(out, expected);
                }
            }
            prop_assert_eq!(Rc::strong_count(&all), 1 + 2 * model.len());
        }
        drop((tx, rx));
        prop_assert_eq!(Rc::strong_count(&all), 1 + model.len());
    }
}

struct Counted {
    words: [u64; 16],
    live: Arc<AtomicIsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Two threads, singly and in batches, some of it left behind: order, whole items, none lost, none twice.
#[test]
fn two_threads() {
    let n = if cfg!(miri) { 300 } else { 400_000 };
    for capacity in [1, 2, 7, 256] {
        let live = Arc::new(AtomicIsize::new(0));
        let (mut tx, mut rx) = ring(capacity);
        let theirs = Arc::clone(&live);
        let producer = std::thread::spawn(move || {
            let make = |id: u64| {
                theirs.fetch_add(1, Ordering::Relaxed);
                Counted { words: [id; 16], live: Arc::clone(&theirs) }
            };
            let mut id = 0;
            while id < n {
                let batch = 1 + id % 5;
                if batch == 1 {
                    let mut item = make(id);
                    while let Err(full) = tx.push(item) {
                        item = full.0;
                        std::thread::yield_now();
                    }
                    id += 1;
                } else {
                    id += tx.push_from(&mut (id..n.min(id + batch)).map(make)) as u64;
                    if tx.is_full() {
                        std::thread::yield_now();
                    }
                }
            }
        });
        let mut expected = 0;
        let mut check = |item: &Counted| {
            assert!(item.words.iter().all(|w| *w == expected), "{:?} at {expected}", item.words);
            expected += 1;
            expected
        };
        // The last ones stay in the ring.
        let leave = (capacity as u64).min(3);
        let mut seen = 0;
        while seen < n - leave {
            let most = 1 + (seen % 3) as usize;
            let most = most.min((n - leave - seen) as usize);
            if rx.pop_into(most, |item| seen = check(&item)) == 0 {
                std::thread::yield_now();
            }
        }
        producer.join().unwrap();
        assert!(rx.is_alone());
        assert_eq!(live.load(Ordering::Relaxed), leave as isize);
        drop(rx);
        assert_eq!(live.load(Ordering::Relaxed), 0);
    }
}

/// An iterator or a receiver that panics loses at most the item it had in hand.
#[test]
fn panics_on_the_way() {
    let quiet = |f: &mut dyn FnMut()| {
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err());
    };
    let (mut tx, mut rx) = ring(4);
    quiet(&mut || {
        tx.push_from(&mut (0..4).map(|i| if i == 2 { panic!("meant") } else { Box::new(i) }));
    });
    quiet(&mut || {
        rx.pop_into(4, |item| assert!(*item > 0, "meant"));
    });
    assert_eq!(tx.push_from(&mut (10..20).map(Box::new)), 3);
    let mut out = Vec::new();
    rx.pop_into(9, |item| out.push(*item));
    assert_eq!(out, [1, 10, 11, 12]);
}

/// It goes to another thread with what it carries, and what may not go stays.
#[test]
fn sides_can_be_sent() {
    fn sent<T: Send + Sync>(_: &T) {}
    // A `Cell` may move between threads but not be looked at by two of them: that is all the ring needs.
    let (tx, rx) = ring::<std::cell::Cell<u8>>(1);
    sent(&tx);
    sent(&rx);
}
