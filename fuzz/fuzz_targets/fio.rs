#![no_main]
//! See `src/fio.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::fio::play(data));
