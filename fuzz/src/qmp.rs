//! QEMU's monitor, where the other side is none ([`peer`] has the input's layout): every command
//! ends in bounded time with an answer or an error with words, and what is kept of the answers is
//! bounded (the fuzzer's memory limit judges that).

use std::time::{Duration, Instant};

use rtvirtio_vmm::{Qmp, VmmError};

use super::peer;

/// Time limit of a command.
const TIMEOUT: Duration = Duration::from_secs(2);
/// More than all commands of an input may take.
const PATIENCE: Duration = Duration::from_secs(24);

/// Asks everything that rtvirtio asks a monitor.
///
/// # Panics
/// When a command does not end in time, or an error has no words.
pub fn play(data: &[u8]) {
    let begin = Instant::now();
    peer::exchange(data, |stream| {
        let mut qmp = match Qmp::from_stream(stream, "fuzz", TIMEOUT) {
            Ok(qmp) => qmp,
            Err(e) => return check_error(&e),
        };
        let _ = qmp.query_status().inspect_err(check_error);
        let _ = qmp.query_kvm().inspect_err(check_error);
        let _ = qmp.query_cpus_fast().inspect_err(check_error);
        let _ = qmp.query_iothreads().inspect_err(check_error);
        let _ =
            qmp.execute("query-block", Some(serde_json::json!({ "flat": true }))).inspect_err(check_error);
        let _ = qmp.quit().inspect_err(check_error);
        assert!(qmp.events_skipped() < 10_000_000);
    });
    assert!(begin.elapsed() < PATIENCE, "the commands took {:?}", begin.elapsed());
}

/// What an error is, from either socket.
pub fn check_error(error: &VmmError) {
    let words = error.to_string();
    // A terminal must not take the other side's words for commands.
    assert!(!words.is_empty() && words.len() < 4_096 && !words.contains(char::is_control), "{words:?}");
    let _ = (error.is_timeout(), error.is_closed());
}
