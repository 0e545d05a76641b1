//! `rtvirtio ivshmem`.

use std::process::ExitCode;

use rtvirtio_console::Ui;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::keep::Server;

use crate::args::IvshmemArgs;

pub fn run(args: &IvshmemArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let socket = std::path::absolute(&args.socket)?;
    let mut server = Server::bind(&socket)?;
    ui.step(&format!("listening at {}", socket.display()));
    loop {
        // A QEMU that disconnects early must not delay its next start.
        match server.serve_one(&|| ui.is_cancelled()) {
            Ok(true) => ui.step("a QEMU has its memory and doorbell"),
            Ok(false) => return Ok(ExitCode::SUCCESS),
            Err(e) => ui.warn(&e.to_string()),
        }
    }
}
