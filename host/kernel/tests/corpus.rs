//! Every input that a fuzzer found worth keeping, played again through the same functions
//! (`fuzz/`).

#[path = "../../../fuzz/src/kernel.rs"]
mod kernel;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn kernel() {
    replay("kernel", kernel::play);
}
