//! Replays the inputs that a fuzzer kept, through the fuzzed functions (`fuzz/`).

#[path = "../../../fuzz/src/journal.rs"]
mod journal;
#[path = "../../../fuzz/src/json.rs"]
mod json;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn journal() {
    replay("journal", journal::play);
}
