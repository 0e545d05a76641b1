//! Replays the fuzzers' corpora through the same functions (`fuzz/`).

#[path = "../../../fuzz/src/bucket.rs"]
mod bucket;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../../fuzz/src/scheduler.rs"]
mod scheduler;

use replay::replay;

#[test]
fn bucket() {
    replay("bucket", bucket::play);
}

#[test]
fn scheduler() {
    replay("scheduler", scheduler::play);
}
