//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

#[path = "../../../fuzz/src/fleet.rs"]
mod fleet;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn fleet() {
    replay("fleet", fleet::play);
}
