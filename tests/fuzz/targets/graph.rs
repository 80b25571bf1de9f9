//! libFuzzer on [`shine_fuzz::graph`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| shine_fuzz::graph(data));
