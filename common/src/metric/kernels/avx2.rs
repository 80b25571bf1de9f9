//! Primitives for AVX2 with F16C: 16 lanes in two registers of 8.
//!
//! Everything here is compiled for CPUs with both features; [`super::detect`] says whether this one has them. Whole
//! blocks are loaded by transmuting arrays: as fast as the load intrinsics, and without their checks in test builds.

use std::arch::x86_64::*;
use std::mem::transmute;

#[derive(Clone, Copy)]
struct Lanes {
    low: __m256,
    high: __m256,
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn zero() -> Lanes {
    Lanes { low: _mm256_setzero_ps(), high: _mm256_setzero_ps() }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn add(a: Lanes, b: Lanes) -> Lanes {
    Lanes { low: _mm256_add_ps(a.low, b.low), high: _mm256_add_ps(a.high, b.high) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    Lanes { low: _mm256_sub_ps(a.low, b.low), high: _mm256_sub_ps(a.high, b.high) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn mul(a: Lanes, b: Lanes) -> Lanes {
    Lanes { low: _mm256_mul_ps(a.low, b.low), high: _mm256_mul_ps(a.high, b.high) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn reduce(lanes: Lanes) -> f32 {
    let eight = _mm256_add_ps(lanes.low, lanes.high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_8_floats(bytes: &[u8; 32]) -> __m256 {
    // SAFETY: any 32 bytes are 8 floats.
    unsafe { transmute::<[u8; 32], __m256>(*bytes) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f32(block: &[u8; 64]) -> Lanes {
    let (halves, _) = block.as_chunks::<32>();
    Lanes { low: load_8_floats(&halves[0]), high: load_8_floats(&halves[1]) }
}

/// All ones, then all zeros: a window that starts `8 − n` words in lets n elements through.
static WORD_MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

/// The floats in `bytes` (at most 8), then zeros.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f32_part(bytes: &[u8]) -> __m256 {
    let window =
        WORD_MASKS[8 - bytes.len() / 4..].first_chunk::<8>().expect("a window of 8 in a table of 16");
    // SAFETY: any 8 words are a mask. A masked load touches the elements whose mask is set and no others: those are
    // the first `bytes.len() / 4`.
    unsafe { _mm256_maskload_ps(bytes.as_ptr().cast(), transmute::<[i32; 8], __m256i>(*window)) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn tail_f32(whole: &[u8]) -> Lanes {
    let (_, tail) = whole.as_chunks::<64>();
    match tail.split_first_chunk::<32>() {
        None => Lanes { low: load_f32_part(tail), high: _mm256_setzero_ps() },
        Some((first, rest)) => Lanes { low: load_8_floats(first), high: load_f32_part(rest) },
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_16_bytes(block: &[u8; 16]) -> __m128i {
    // SAFETY: any 16 bytes are a register.
    unsafe { transmute::<[u8; 16], __m128i>(*block) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_f16(block: &[u8; 32]) -> Lanes {
    let (halves, _) = block.as_chunks::<16>();
    Lanes {
        low: _mm256_cvtph_ps(load_16_bytes(&halves[0])),
        high: _mm256_cvtph_ps(load_16_bytes(&halves[1])),
    }
}

/// Byte shuffles: a window that starts n bytes in moves everything n bytes down and fills with zeros.
static SHIFT_DOWN: [u8; 32] = [
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128,
    128, 128, 128, 128, 128, 128,
];

/// The last `bytes` (1 to 15) bytes of `whole`, then zeros.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn last_bytes(whole: &[u8], bytes: usize) -> __m128i {
    debug_assert!((1..16).contains(&bytes) && bytes <= whole.len());
    if let Some(last) = whole.last_chunk::<16>() {
        let window = SHIFT_DOWN[16 - bytes..].first_chunk::<16>().expect("a window of 16 in a table of 32");
        _mm_shuffle_epi8(load_16_bytes(last), load_16_bytes(window))
    } else {
        let mut padded = [0; 16];
        padded[..bytes].copy_from_slice(&whole[whole.len() - bytes..]);
        load_16_bytes(&padded)
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn tail_f16(whole: &[u8]) -> Lanes {
    let (_, tail) = whole.as_chunks::<32>();
    match tail.split_first_chunk::<16>() {
        None => Lanes { low: _mm256_cvtph_ps(last_bytes(whole, tail.len())), high: _mm256_setzero_ps() },
        Some((first, [])) => Lanes { low: _mm256_cvtph_ps(load_16_bytes(first)), high: _mm256_setzero_ps() },
        Some((first, rest)) => Lanes {
            low: _mm256_cvtph_ps(load_16_bytes(first)),
            high: _mm256_cvtph_ps(last_bytes(whole, rest.len())),
        },
    }
}

float_kernels!(
    #[target_feature(enable = "avx2,f16c")]
    l2_f32,
    ip_f32,
    cosine_f32,
    64,
    load_f32,
    tail_f32
);
float_kernels!(
    #[target_feature(enable = "avx2,f16c")]
    l2_f16,
    ip_f16,
    cosine_f16,
    32,
    load_f16,
    tail_f16
);

/// 32 bytes as 16-bit numbers. Which element lands where differs by type but not between two vectors of one type.
#[derive(Clone, Copy)]
struct Wide {
    one: __m256i,
    other: __m256i,
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn zero_bytes() -> __m256i {
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn add_bytes(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn reduce_bytes(sum: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn load_bytes(block: &[u8; 32]) -> __m256i {
    // SAFETY: any 32 bytes are a register.
    unsafe { transmute::<[u8; 32], __m256i>(*block) }
}

/// Zeros, then ones: a window that starts n bytes in lets the last n of 32 bytes through.
static LAST_BYTES: [u8; 64] = {
    let mut masks = [0; 64];
    let mut at = 32;
    while at < 64 {
        masks[at] = 255;
        at += 1;
    }
    masks
};

/// What follows the last whole block, as the last bytes of a register: order is nothing to integer sums.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn tail_bytes(whole: &[u8]) -> __m256i {
    let bytes = whole.len() % 32;
    if let Some(last) = whole.last_chunk::<32>() {
        let window = LAST_BYTES[bytes..].first_chunk::<32>().expect("a window of 32 in a table of 64");
        _mm256_and_si256(load_bytes(last), load_bytes(window))
    } else {
        let mut padded = [0; 32];
        padded[..bytes].copy_from_slice(whole);
        load_bytes(&padded)
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_u8(bytes: __m256i) -> Wide {
    let zero = _mm256_setzero_si256();
    Wide { one: _mm256_unpacklo_epi8(bytes, zero), other: _mm256_unpackhi_epi8(bytes, zero) }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn widen_i8(bytes: __m256i) -> Wide {
    Wide {
        one: _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
        other: _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(bytes)),
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn products(a: Wide, b: Wide) -> __m256i {
    _mm256_add_epi32(_mm256_madd_epi16(a.one, b.one), _mm256_madd_epi16(a.other, b.other))
}

/// |a − b| of bytes fits a byte, signed or not; widened, it is squared as a pair sum below 2^17.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn squares_u8(a: __m256i, b: __m256i) -> __m256i {
    let difference = widen_u8(_mm256_sub_epi8(_mm256_max_epu8(a, b), _mm256_min_epu8(a, b)));
    products(difference, difference)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn squares_i8(a: __m256i, b: __m256i) -> __m256i {
    let difference = widen_u8(_mm256_sub_epi8(_mm256_max_epi8(a, b), _mm256_min_epi8(a, b)));
    products(difference, difference)
}

byte_kernels!(
    #[target_feature(enable = "avx2,f16c")]
    l2_u8,
    ip_u8,
    cosine_u8,
    32,
    squares_u8,
    products,
    widen_u8
);
byte_kernels!(
    #[target_feature(enable = "avx2,f16c")]
    l2_i8,
    ip_i8,
    cosine_i8,
    32,
    squares_i8,
    products,
    widen_i8
);
