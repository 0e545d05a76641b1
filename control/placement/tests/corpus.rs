//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

#[path = "../../../fuzz/src/json.rs"]
mod json;
#[path = "../../../fuzz/src/placement.rs"]
mod placement;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn placement() {
    replay("placement", placement::play);
}
