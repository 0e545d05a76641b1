#![no_main]
//! See `src/fleet.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::fleet::play(data));
