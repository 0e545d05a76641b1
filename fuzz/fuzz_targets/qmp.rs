#![no_main]
//! See `src/qmp.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::qmp::play(data));
