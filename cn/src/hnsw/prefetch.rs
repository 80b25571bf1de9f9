//! Asking the processor for memory before it is needed.

/// Cache lines asked for at most: what comes behind them is found by the processor's own stream detection.
const LINES_MAX: usize = 8;

/// Asks for the first lines of `slice`. Changes nothing but speed.
#[inline(always)]
pub(super) fn prefetch<T>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = slice.as_ptr().cast::<i8>();
        for line in 0..size_of_val(slice).div_ceil(64).min(LINES_MAX) {
            // SAFETY: a prefetch reads nothing and never faults; the address is inside the slice, whose size bounds
            // the loop.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.add(line * 64)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}
