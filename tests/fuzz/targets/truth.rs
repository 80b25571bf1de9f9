//! libFuzzer on [`shine_fuzz::truth`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shine_fuzz::truth(data));
