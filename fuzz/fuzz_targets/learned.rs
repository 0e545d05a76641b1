#![no_main]
//! See `src/learned.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::learned::play(data));
