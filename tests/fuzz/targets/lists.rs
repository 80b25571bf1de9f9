//! libFuzzer on [`shine_fuzz::lists`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shine_fuzz::lists(data));
