#![no_main]
//! See `src/journal.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::journal::play(data));
