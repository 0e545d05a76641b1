//! Replays the committed inputs of a target in the test suites.

use std::path::Path;

/// Inputs of `fuzz/corpus/TARGET.hex`: a line each, in hexadecimal digits.
fn inputs(target: &str) -> Vec<Vec<u8>> {
    // Crates are two folders below the root.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fuzz/corpus/{target}.hex"));
    let text = std::fs::read_to_string(&path).unwrap();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let inputs: Vec<Vec<u8>> =
        text.lines().map(|line| line.as_bytes().chunks(2).map(byte).collect()).collect();
    assert!(inputs.len() >= 10, "{} has {} inputs", path.display(), inputs.len());
    inputs
}

/// Runs every input of a target.
///
/// # Panics
/// The target panics, or the file cannot be read, has something else, or fewer than ten inputs:
/// then the corpus is missing.
pub fn replay(target: &str, mut play: impl FnMut(&[u8])) {
    for (i, input) in inputs(target).iter().enumerate() {
        // On a failure, the last printed line is that of the input.
        println!("fuzz/corpus/{target}.hex:{}", i + 1);
        play(input);
    }
}
