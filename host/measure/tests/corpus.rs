//! Replays the inputs that a fuzzer kept, through the fuzzed functions (`fuzz/`).

#[path = "../../../fuzz/src/fio.rs"]
mod fio;
#[path = "../../../fuzz/src/json.rs"]
mod json;
#[path = "../../../fuzz/src/profile.rs"]
mod profile;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn fio() {
    replay("fio", fio::play);
}

#[test]
fn profile() {
    replay("profile", profile::play);
}
