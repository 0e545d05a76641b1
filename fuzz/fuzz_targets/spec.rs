#![no_main]
//! See `src/spec.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::spec::play(data));
