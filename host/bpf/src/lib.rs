//! BPF programs (RFC 9669) without a compiler or a library: [`Assembler`] makes their instructions,
//! [`Btf`] finds the offsets of members in the running kernel's structures, [`attach`] loads them,
//! and [`Mapping`] is memory that they share with this process.

mod assembler;
mod btf;
mod kernel;
mod mapping;
mod ring;

pub use assembler::{Assembler, Helper, If, Register, Width};
pub use btf::{Btf, BtfError};
pub use kernel::{Place, array, attach, hash, module, remove, update};
pub use mapping::Mapping;
pub use ring::Ring;

/// Directory with the type information of the kernel (`vmlinux`) and of its modules.
pub const TYPES: &str = "/sys/kernel/btf";
