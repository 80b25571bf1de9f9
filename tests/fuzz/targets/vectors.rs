//! libFuzzer on [`shine_fuzz::vectors`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shine_fuzz::vectors(data));
