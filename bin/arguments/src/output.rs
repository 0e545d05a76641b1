//! Lines that a program prints. `println!` and `eprintln!` panic when nobody reads or the disk of
//! the log is full, in the middle of what the program does.

use std::io::{self, Write as _};

/// Prints text on standard output. Who reads no further, as in `rtvirtio plan | head`, is no error.
///
/// # Errors
/// When standard output cannot be written.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes a line to standard error, in one piece. One that cannot be written is lost: there is
/// nobody left to hear of it.
pub fn complain(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
