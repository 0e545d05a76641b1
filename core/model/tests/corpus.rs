//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

#[path = "../../../fuzz/src/json.rs"]
mod json;
#[path = "../../../fuzz/src/learned.rs"]
mod learned;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn learned() {
    replay("learned", learned::play);
}
