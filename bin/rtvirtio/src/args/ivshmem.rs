//! The command line of `ivshmem`.

use std::path::PathBuf;

use clap::Args;

/// `ivshmem`.
#[derive(Args, Debug)]
pub struct IvshmemArgs {
    /// The socket of the VM's device; its memory is SOCKET.page, so a directory in memory is best
    pub socket: PathBuf,
}
