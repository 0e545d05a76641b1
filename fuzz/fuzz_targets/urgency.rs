#![no_main]
//! See `src/urgency.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::urgency::play(data));
