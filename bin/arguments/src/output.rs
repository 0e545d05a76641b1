//! Lines that a program prints. `println!` and `eprintln!` panic on a closed pipe or a full disk,
//! in the middle of what the program does.

use std::io::{self, Write as _};

/// Prints text on standard output. A closed pipe, as in `rtvirtio plan | head`, is no error.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes a line to standard error by one write(2). A failure is ignored: there is no other place
/// to report it.
pub fn print_error(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}
