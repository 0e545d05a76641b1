#![no_main]
//! See `src/messages.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::messages::play(data));
