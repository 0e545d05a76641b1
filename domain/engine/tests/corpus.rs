//! Replays the fuzzers' corpus through the same functions (`fuzz/`).

#[path = "../../../fuzz/src/chain.rs"]
mod chain;
#[path = "../../../fuzz/src/config.rs"]
mod config;
#[path = "../../../fuzz/src/engine.rs"]
mod engine;
#[path = "../../../fuzz/src/inflight.rs"]
mod inflight;
#[path = "../../../fuzz/src/messages.rs"]
mod messages;
#[path = "../../../fuzz/src/net.rs"]
mod net;
#[path = "../../../fuzz/src/qemu.rs"]
mod qemu;
#[path = "../../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../../fuzz/src/rings.rs"]
mod rings;

use replay::replay;

#[test]
fn chain() {
    replay("chain", chain::play);
}

#[test]
fn config() {
    replay("config", config::play);
}

#[test]
fn engine() {
    replay("engine", engine::play);
}

#[test]
fn inflight() {
    replay("inflight", inflight::play);
}

#[test]
fn messages() {
    replay("messages", messages::play);
}

#[test]
fn net() {
    replay("net", net::play);
}
