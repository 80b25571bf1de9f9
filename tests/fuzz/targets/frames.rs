//! libFuzzer on [`shine_fuzz::frames`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shine_fuzz::frames(data));
