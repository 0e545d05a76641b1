#![no_main]
//! See `src/chain.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::chain::play(data));
