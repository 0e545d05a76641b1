//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

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
