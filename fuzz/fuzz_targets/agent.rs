#![no_main]
//! See `src/agent.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::agent::play(data));
