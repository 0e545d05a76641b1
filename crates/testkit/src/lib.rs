//! What the tests of several crates share: skipping by name.

use std::io::Write;

/// Says by name that a test does not run here, and why, on a line that `make test` counts.
///
/// # Panics
/// With `RTVIRTIO_NO_SKIP` set, as in CI, where nothing may skip.
pub fn skip(test: &str, why: &str) {
    assert!(std::env::var_os("RTVIRTIO_NO_SKIP").is_none(), "{test} may not skip here: {why}");
    // Straight to standard error: the test runner hides what a passing test prints. A closed one hides the skip, nothing more.
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {why}");
}
