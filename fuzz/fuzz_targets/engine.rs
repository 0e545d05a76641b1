#![no_main]
//! See `src/engine.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::engine::play(data));
