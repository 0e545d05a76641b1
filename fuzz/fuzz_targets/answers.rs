#![no_main]
//! See `src/answers.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::answers::play(data));
