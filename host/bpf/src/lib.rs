//! Small programs for the kernel (RFC 9669), without a compiler or a library: [`Assembler`] makes
//! their instructions, [`Btf`] knows where members are in the running kernel's structures,
//! [`attach`] loads them, and [`Mapping`] is memory that they share with this process.

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

/// Where the kernel shows the type information of itself (`vmlinux`) and of its modules.
pub const TYPES: &str = "/sys/kernel/btf";
