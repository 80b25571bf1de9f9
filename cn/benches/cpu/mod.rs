//! Processor time: what a thread or the process was charged, so that other work on the machine counts as little as can
//! be.

// Each bench compiles this module for itself and uses a part of it.
#![allow(dead_code, reason = "shared by benches that use different parts")]

use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, and `time` is one.
    let code = unsafe { libc::clock_gettime(id, &raw mut time) };
    assert_eq!(code, 0, "Linux has these clocks");
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).expect("below 10^9"))
}

/// Time that the calling thread spent on a processor.
pub(crate) fn thread_time() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Time that all threads of the process spent on processors.
pub(crate) fn process_time() -> Duration {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Measures the calling thread's processor time.
pub(crate) struct ThreadTime;

impl Measurement for ThreadTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        thread_time()
    }

    fn end(&self, start: Duration) -> Duration {
        thread_time() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}
