//! Asking the processor for memory before it is needed.

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;
/// Cache lines asked for at most: what comes behind them is found by the processor's own stream detection.
pub(super) const LINES_MAX: usize = 8;

/// Cache lines that are asked for where `bytes` are.
pub(super) const fn lines(bytes: usize) -> usize {
    let lines = bytes.div_ceil(LINE_BYTES);
    if lines < LINES_MAX { lines } else { LINES_MAX }
}

/// Asks for the first lines of `slice`, wherever in a line it starts. Changes nothing but speed.
#[inline(always)]
pub(super) fn prefetch<T>(slice: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = slice.as_ptr().cast::<i8>();
        let before = start.addr() % LINE_BYTES;
        let first = start.wrapping_sub(before);
        for line in 0..lines(before + size_of_val(slice)) {
            // SAFETY: a prefetch reads nothing and never faults, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(line * LINE_BYTES)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = slice;
}
