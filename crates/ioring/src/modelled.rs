//! The same ring over `loom`'s primitives: every interleaving of small rings, and every value that the memory model lets a load see.
//!
//! `loom` itself fails a run in which two threads touch a value at once or without an order between them (a torn or an early read), in which a value is freed twice, or in which something leaks.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};

use loom::thread;

mod sync {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::sync::atomic::{AtomicBool, Ordering, fence};

    pub(super) type Shared<T> = loom::sync::Arc<[T]>;

    pub(super) fn share<T>(slots: Vec<T>) -> Shared<T> {
        loom::sync::Arc::from_std(slots.into())
    }

    pub(super) fn sides<T>(slots: &Shared<T>) -> usize {
        loom::sync::Arc::strong_count(slots)
    }
}

#[allow(dead_code, reason = "the models need a part of the interface")]
#[path = "ring.rs"]
mod ring;

use ring::{Consumer, Producer, ring};

/// An item that knows whether it is whole, and counts how many live: below zero at the end is one dropped twice, above is a leak.
struct Item {
    id: u32,
    inverse: u32,
    /// What `loom` also watches: freed exactly once.
    _track: loom::alloc::Track<()>,
    live: Arc<AtomicIsize>,
}

impl Item {
    fn new(id: u32, live: &Arc<AtomicIsize>) -> Self {
        live.fetch_add(1, Ordering::Relaxed);
        Self { id, inverse: !id, _track: loom::alloc::Track::new(()), live: Arc::clone(live) }
    }

    fn read(self) -> u32 {
        assert_eq!(self.id, !self.inverse, "a torn item");
        self.id
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        self.live.fetch_sub(1, Ordering::Relaxed);
    }
}

fn model(run: impl Fn(&Arc<AtomicIsize>) + Send + Sync + 'static) {
    loom::model(move || {
        let live = Arc::new(AtomicIsize::new(0));
        run(&live);
        assert_eq!(live.load(Ordering::Relaxed), 0, "items leaked or dropped twice");
    });
}

fn push_until_there_is_room(tx: &mut Producer<Item>, mut item: Item) {
    while let Err(full) = tx.push(item) {
        item = full.0;
        thread::yield_now();
    }
}

fn pop_until_there_is_one(rx: &mut Consumer<Item>) -> u32 {
    loop {
        if let Some(item) = rx.pop() {
            return item.read();
        }
        thread::yield_now();
    }
}

/// Every item comes once, whole and in order, whichever side is faster: the ring is full and empty in turn, and goes around.
fn all_come(capacity: usize, n: u32) {
    model(move |live| {
        let (mut tx, mut rx) = ring(capacity);
        let theirs = Arc::clone(live);
        let producer = thread::spawn(move || {
            for id in 0..n {
                push_until_there_is_room(&mut tx, Item::new(id, &theirs));
            }
        });
        for id in 0..n {
            assert_eq!(pop_until_there_is_one(&mut rx), id);
        }
        producer.join().unwrap();
        assert!(rx.pop().is_none());
    });
}

#[test]
fn one_slot() {
    all_come(1, 3);
}

#[test]
fn two_slots() {
    all_come(2, 4);
}

/// Nobody waits: what is refused comes back whole, what is taken comes out in order, the rest is dropped by whoever goes last.
#[test]
fn refused_taken_and_left() {
    for capacity in 1..=3 {
        model(move |live| {
            let (mut tx, mut rx) = ring(capacity);
            let theirs = Arc::clone(live);
            let producer = thread::spawn(move || {
                let mut taken = Vec::new();
                for id in 0..4 {
                    match tx.push(Item::new(id, &theirs)) {
                        Ok(()) => taken.push(id),
                        Err(full) => assert_eq!(full.0.read(), id),
                    }
                }
                taken
            });
            let out: Vec<u32> = (0..2).filter_map(|_| rx.pop().map(Item::read)).collect();
            let early = rx.is_empty();
            // The producer may still be at work, or gone: either side may be the one that frees what is left.
            drop(rx);
            let taken = producer.join().unwrap();
            assert_eq!(out, taken[..out.len()], "lost, doubled or out of order");
            assert!(taken.len() >= capacity.min(4) && (early || taken.len() > out.len()));
        });
    }
}

/// Batches are as good as single items.
#[test]
fn batches() {
    model(|live| {
        let (mut tx, mut rx) = ring(2);
        let theirs = Arc::clone(live);
        let producer = thread::spawn(move || {
            let mut items = (0..3).map(|id| Item::new(id, &theirs)).collect::<Vec<_>>().into_iter();
            let n = tx.push_from(&mut items);
            assert!(n >= 2 && items.len() == 3 - n, "an item was asked for without a place for it");
            n
        });
        let mut out = Vec::new();
        let n = rx.pop_into(2, |item| out.push(item.read()));
        let pushed = producer.join().unwrap();
        assert!(n <= pushed);
        rx.pop_into(9, |item| out.push(item.read()));
        assert_eq!(out, (0..pushed as u32).collect::<Vec<_>>());
    });
}

/// The last item is not missed: when the producer is gone and the ring is empty after that, all was seen.
#[test]
fn the_end_is_seen_after_the_last_item() {
    model(|live| {
        let (mut tx, mut rx) = ring(2);
        let theirs = Arc::clone(live);
        let producer = thread::spawn(move || {
            for id in 0..2 {
                assert!(tx.push(Item::new(id, &theirs)).is_ok());
            }
        });
        let mut out = Vec::new();
        loop {
            let gone = rx.is_alone();
            rx.pop_into(2, |item| out.push(item.read()));
            if gone {
                break;
            }
            thread::yield_now();
        }
        assert_eq!(out, [0, 1]);
        producer.join().unwrap();
    });
}

/// What says that there is room, or an item, is right until this side itself acts.
#[test]
fn room_and_items_do_not_go_away() {
    model(|live| {
        let (mut tx, mut rx) = ring(1);
        let theirs = Arc::clone(live);
        let producer = thread::spawn(move || {
            for id in 0..2 {
                if !tx.is_full() {
                    assert!(tx.push(Item::new(id, &theirs)).is_ok());
                }
            }
        });
        for _ in 0..2 {
            if !rx.is_empty() {
                assert!(rx.pop().is_some());
            }
        }
        producer.join().unwrap();
    });
}
