//! Replays the inputs that a fuzzer kept, through the fuzzed functions (`fuzz/`).

#[path = "../../../fuzz/src/kernel.rs"]
mod kernel;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn kernel() {
    replay("kernel", kernel::play);
}
