#![no_main]
//! See `src/bucket.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::bucket::play(data));
