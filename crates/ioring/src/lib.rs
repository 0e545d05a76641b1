//! A bounded ring between one producer and one consumer, with a flag in each slot.
//!
//! It is the wait-free queue of the I/O-domain paper (Borgioli et al., *An I/O Virtualization Framework With I/O-Related Memory Contention Control for Real-Time Systems*, IEEE TCAD 2022,
//! section III): each slot has a flag that says whether it is full; head and tail are private to their sides, so nothing else is shared. An operation looks at one slot, once, and either
//! does its work or says that it cannot: no loop, no lock, no waiting for the other side, no allocation after [`ring`]. Who is stopped in the middle of an operation delays the slot it is at, and
//! nobody's next operation.
//!
//! ```
//! let (mut tx, mut rx) = rtvirtio_ioring::ring(2);
//! assert!(tx.push("a").is_ok());
//! assert_eq!(tx.push_from(&mut ["b", "c"].into_iter()), 1);
//! assert_eq!(tx.push("d").unwrap_err().0, "d");
//! assert_eq!(rx.pop(), Some("a"));
//! let mut rest = Vec::new();
//! assert_eq!(rx.pop_into(32, |item| rest.push(item)), 1);
//! assert_eq!(rest, ["b"]);
//! ```
//!
//! # Which ring the I/O domain uses
//!
//! `rtrb`, where it needs one (`rtvirtio_iodomain::engine::Trace`), and none between guest and scheduler: see `docs/iod.md`, *Why one thread for a device*. The example `rings` measures both in turn;
//! on two CPUs of an EPYC (Zen 5) under KVM, 256 slots, medians of 11 rounds:
//!
//! | ioring / rtrb | 8 bytes | 56 bytes | 64 bytes | 128 bytes |
//! |---|---|---|---|---|
//! | one core, singly, M/s | 545 / 545 | 288 / 317 | 266 / 160 | 175 / 101 |
//! | one core, by 32, M/s | 542 / 1321 | 314 / 590 | 274 / 433 | 175 / 238 |
//! | two cores, singly, M/s | 99 / 76 | 52 / 50 | 52 / 54 | 37 / 36 |
//! | two cores, by 32, M/s | 132 / 448 | 36 / 238 | 71 / 288 | 48 / 156 |
//! | one way, median, ns | 60 / 65 | 90 / 65 | 85 / 70 | 100 / 80 |
//! | one way, p99, ns | 100 / 95 | 135 / 100 | 130 / 105 | 125 / 110 |
//! | one way, p99.99, ns | 3280 / 3540 | 4647 / 3089 | 5618 / 3310 | 8152 / 5899 |
//!
//! With caches that keep themselves coherent the flag has a price that the paper's uncached memory does not show: to give a slot back, the consumer has to write to each line that it read, where two
//! indices are written once for a batch, and each side looks at the other's only when it has used up what it last saw. Tried to no avail: slots that fill whole cache lines, and looking at the batch's last
//! flag first. What the flags are good for remains: neither side believes anything that the other one keeps, so a corrupt slot is a bad item and never a bad index.
//!
//! # How it is checked
//!
//! The tests compile `ring.rs` a second time over the primitives of `loom`, which then runs every interleaving and every value that the memory model allows, with small rings. That needs no
//! `--cfg loom`: that flag would go to every crate of the build, and a test that has to be asked for is a test that is forgotten. `cargo test` runs them; `RUSTFLAGS='--cfg loom'` does too.

#![cfg_attr(
    test,
    allow(clippy::duplicate_mod, reason = "`modelled` compiles `ring.rs` over other primitives")
)]

mod ring;
mod sync;

#[cfg(test)]
mod modelled;
#[cfg(test)]
mod tests;

pub use ring::{Consumer, Full, Producer, ring};
