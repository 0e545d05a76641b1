//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

#[path = "../../../fuzz/src/answers.rs"]
mod answers;
#[path = "../../../fuzz/src/json.rs"]
mod json;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn answers() {
    replay("answers", answers::play);
}
