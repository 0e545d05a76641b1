//! The agent in a guest, where the guest is hostile ([`peer`] has the input's layout): every
//! command ends in bounded time, a file is never longer than what was asked for, and what is kept
//! of the answers is bounded (the fuzzer's memory limit judges that).

use std::time::{Duration, Instant};

use rtvirtio_vmm::GuestAgent;

use super::peer;
use super::qmp::check_error;

/// Time limit of a command.
const TIMEOUT: Duration = Duration::from_secs(2);
/// More than all commands of an input may take.
const PATIENCE: Duration = Duration::from_secs(24);
/// Most bytes of a file.
const LIMIT: usize = 100_000;

/// Asks everything that rtvirtio asks an agent.
///
/// # Panics
/// When a command does not end in time, gives more than was asked for, or an error has no words.
pub fn play(data: &[u8]) {
    let begin = Instant::now();
    peer::exchange(data, |stream| {
        let mut agent = GuestAgent::from_stream(stream, "fuzz");
        agent.set_timeout(TIMEOUT);
        if let Err(e) = agent.synchronise(TIMEOUT) {
            return check_error(&e);
        }
        assert!(agent.is_in_step());
        match agent.read_file("/sys/block/vda/queue/scheduler", LIMIT) {
            Ok(bytes) => assert!(bytes.len() <= LIMIT),
            Err(e) => check_error(&e),
        }
        let _ = agent.write_file("/sys/block/vda/queue/scheduler", b"none").inspect_err(check_error);
        let _ = agent.exec(&["fio", "--version"], Duration::from_millis(15)).inspect_err(check_error);
        let _ = agent.ping().inspect_err(check_error);
    });
    assert!(begin.elapsed() < PATIENCE, "the commands took {:?}", begin.elapsed());
}
