#![no_main]
//! See `src/profile.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::profile::play(data));
