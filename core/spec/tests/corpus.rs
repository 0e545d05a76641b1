//! Replays the corpus of the fuzz targets through the same functions (`fuzz/`).

#[path = "../../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../../fuzz/src/spec.rs"]
mod spec;

use replay::replay;

#[test]
fn spec() {
    replay("spec", spec::play);
}
