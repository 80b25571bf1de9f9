//! Primitives for AVX-512 (F, BW, VL): 16 lanes in one register, tails by masked loads.
//!
//! Everything here is compiled for CPUs with these features; [`super::detect`] says whether this one has them. Whole
//! blocks are loaded by transmuting arrays, as in [`super::avx2`].

use std::arch::x86_64::*;
use std::mem::transmute;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn zero() -> __m512 {
    _mm512_setzero_ps()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn sub(a: __m512, b: __m512) -> __m512 {
    _mm512_sub_ps(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn mul(a: __m512, b: __m512) -> __m512 {
    _mm512_mul_ps(a, b)
}

/// Not `_mm512_reduce_add_ps`, whose order is its own.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn reduce(lanes: __m512) -> f32 {
    let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes)));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_f32(block: &[u8; 64]) -> __m512 {
    // SAFETY: any 64 bytes are 16 floats.
    unsafe { transmute::<[u8; 64], __m512>(*block) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn tail_f32(whole: &[u8]) -> __m512 {
    let (_, tail) = whole.as_chunks::<64>();
    let mask = (1u16 << (tail.len() / 4)) - 1;
    // SAFETY: the tail holds the floats that the mask lets through (fewer than 16), and no others are touched.
    unsafe { _mm512_maskz_loadu_ps(mask, tail.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_f16(block: &[u8; 32]) -> __m512 {
    // SAFETY: any 32 bytes are a register.
    _mm512_cvtph_ps(unsafe { transmute::<[u8; 32], __m256i>(*block) })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn tail_f16(whole: &[u8]) -> __m512 {
    let (_, tail) = whole.as_chunks::<32>();
    let mask = (1u16 << (tail.len() / 2)) - 1;
    // SAFETY: the tail holds the elements that the mask lets through (fewer than 16), and no others are touched.
    _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, tail.as_ptr().cast()) })
}

float_kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    l2_f32,
    ip_f32,
    cosine_f32,
    64,
    load_f32,
    tail_f32
);
float_kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    l2_f16,
    ip_f16,
    cosine_f16,
    32,
    load_f16,
    tail_f16
);

/// 64 bytes as 16-bit numbers. Which element lands where differs by type but not between two vectors of one type.
#[derive(Clone, Copy)]
struct Wide {
    one: __m512i,
    other: __m512i,
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn zero_bytes() -> __m512i {
    _mm512_setzero_si512()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn add_bytes(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(a, b)
}

/// Exact in any order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn reduce_bytes(sum: __m512i) -> i32 {
    _mm512_reduce_add_epi32(sum)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn load_bytes(block: &[u8; 64]) -> __m512i {
    // SAFETY: any 64 bytes are a register.
    unsafe { transmute::<[u8; 64], __m512i>(*block) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn tail_bytes(whole: &[u8]) -> __m512i {
    let (_, tail) = whole.as_chunks::<64>();
    let mask = (1u64 << tail.len()) - 1;
    // SAFETY: the tail holds the bytes that the mask lets through (fewer than 64), and no others are touched.
    unsafe { _mm512_maskz_loadu_epi8(mask, tail.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn widen_u8(bytes: __m512i) -> Wide {
    let zero = _mm512_setzero_si512();
    Wide { one: _mm512_unpacklo_epi8(bytes, zero), other: _mm512_unpackhi_epi8(bytes, zero) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn widen_i8(bytes: __m512i) -> Wide {
    Wide {
        one: _mm512_cvtepi8_epi16(_mm512_castsi512_si256(bytes)),
        other: _mm512_cvtepi8_epi16(_mm512_extracti64x4_epi64::<1>(bytes)),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn products(a: Wide, b: Wide) -> __m512i {
    _mm512_add_epi32(_mm512_madd_epi16(a.one, b.one), _mm512_madd_epi16(a.other, b.other))
}

/// |a − b| of bytes fits a byte, signed or not; widened, it is squared as a pair sum below 2^17.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn squares_u8(a: __m512i, b: __m512i) -> __m512i {
    let difference = widen_u8(_mm512_sub_epi8(_mm512_max_epu8(a, b), _mm512_min_epu8(a, b)));
    products(difference, difference)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn squares_i8(a: __m512i, b: __m512i) -> __m512i {
    let difference = widen_u8(_mm512_sub_epi8(_mm512_max_epi8(a, b), _mm512_min_epi8(a, b)));
    products(difference, difference)
}

byte_kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    l2_u8,
    ip_u8,
    cosine_u8,
    64,
    squares_u8,
    products,
    widen_u8
);
byte_kernels!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    l2_i8,
    ip_i8,
    cosine_i8,
    64,
    squares_i8,
    products,
    widen_i8
);
