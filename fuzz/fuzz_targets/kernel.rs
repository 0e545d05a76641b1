#![no_main]
//! See `src/kernel.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::kernel::play(data));
