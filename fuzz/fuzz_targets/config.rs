#![no_main]
//! See `src/config.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::config::play(data));
