//! Every input that a fuzzer found worth keeping, played again through the same functions (`fuzz/`).

#[path = "../../../fuzz/src/lib.rs"]
mod fuzz;

use std::path::Path;

fn replay(target: &str, play: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "{} has {} inputs", dir.display(), inputs.len());
    for input in &inputs {
        // The name of the input that was last is what a failure needs.
        println!("{}", input.display());
        play(&std::fs::read(input).unwrap());
    }
}

#[test]
fn chain() {
    replay("chain", fuzz::chain::play);
}

#[test]
fn engine() {
    replay("engine", fuzz::engine::play);
}

#[test]
fn messages() {
    replay("messages", fuzz::messages::play);
}

#[test]
fn config() {
    replay("config", fuzz::config::play);
}
