//! Replays the committed inputs of a target in the test suites.

use std::path::Path;

/// Runs every input of `fuzz/corpus/TARGET`.
///
/// # Panics
/// The target panics, an input cannot be read, or there are fewer than ten inputs: then the corpus
/// is missing.
pub fn replay(target: &str, play: fn(&[u8])) {
    // Crates are two folders below the root.
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
    inputs.sort();
    assert!(inputs.len() >= 10, "{} has {} inputs", dir.display(), inputs.len());
    for input in &inputs {
        // On a failure, the last printed name is the input.
        println!("{}", input.display());
        play(&std::fs::read(input).unwrap());
    }
}
