//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

#[path = "../../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../../fuzz/src/urgency.rs"]
mod urgency;

use replay::replay;

#[test]
fn urgency() {
    replay("urgency", urgency::play);
}
