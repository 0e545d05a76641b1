#![no_main]
//! See `src/scheduler.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::scheduler::play(data));
