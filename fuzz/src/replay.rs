//! Plays the committed inputs of a target again: what the ordinary test suites do.

use std::path::Path;

/// Plays every input of `fuzz/corpus/TARGET`.
///
/// # Panics
/// When the target does, when an input cannot be read, and for fewer than ten inputs: then the
/// corpus is not there.
pub fn replay(target: &str, play: fn(&[u8])) {
    // Crates lie two folders below the root.
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "{} has {} inputs", dir.display(), inputs.len());
    for input in &inputs {
        // The last name printed is what a failure needs.
        println!("{}", input.display());
        play(&std::fs::read(input).unwrap());
    }
}
