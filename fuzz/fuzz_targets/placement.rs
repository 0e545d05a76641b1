#![no_main]
//! See `src/placement.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::placement::play(data));
