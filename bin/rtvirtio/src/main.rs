//! rtvirtio command line.
fn main() {}
