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
