#![no_main]
//! See `src/libvirt.rs`.

libfuzzer_sys::fuzz_target!(|data: &[u8]| rtvirtio_fuzz::libvirt::play(data));
