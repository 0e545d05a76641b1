#![no_main]
//! See `src/net.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::net::play(data));
