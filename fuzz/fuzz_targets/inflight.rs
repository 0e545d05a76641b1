#![no_main]
//! See `src/inflight.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::inflight::play(data));
