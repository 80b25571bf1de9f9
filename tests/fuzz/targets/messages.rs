//! libFuzzer on [`shine_fuzz::messages`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shine_fuzz::messages(data));
