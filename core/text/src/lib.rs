//! Foreign text made safe for where it is printed.
//!
//! Names of VMs, I/O domains and files come from guests, other users and other tools. A printed
//! command is pasted into a root shell, so each such name in it passes through [`shell_word`] or
//! [`shell_argument`]; a value in an option list of QEMU passes through [`qemu_value`] first.

mod clean;
mod command;

pub use clean::{terminal, terminal_lines, xml};
pub use command::{qemu_value, shell_argument, shell_path, shell_word};
