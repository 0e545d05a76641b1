//! Replays the inputs that a fuzzer kept, through the fuzzed functions (`fuzz/`).

#[path = "../../../fuzz/src/agent.rs"]
mod agent;
#[path = "../../../fuzz/src/libvirt.rs"]
mod libvirt;
#[path = "../../../fuzz/src/peer.rs"]
mod peer;
#[path = "../../../fuzz/src/qmp.rs"]
mod qmp;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

use replay::replay;

#[test]
fn agent() {
    replay("agent", agent::play);
}

#[test]
fn libvirt() {
    replay("libvirt", libvirt::play);
}

#[test]
fn qmp() {
    replay("qmp", qmp::play);
}
