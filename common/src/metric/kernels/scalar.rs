//! Primitives in plain Rust: 16 lanes in an array. The compiler may vectorise them or not; Rust neither reorders
//! nor fuses float operations, so the bits stay.

type Lanes = [f32; 16];

#[inline]
fn zero() -> Lanes {
    [0.0; 16]
}

#[inline]
fn zip(a: Lanes, b: Lanes, op: impl Fn(f32, f32) -> f32) -> Lanes {
    std::array::from_fn(|lane| op(a[lane], b[lane]))
}

#[inline]
fn add(a: Lanes, b: Lanes) -> Lanes {
    zip(a, b, |x, y| x + y)
}

#[inline]
fn sub(a: Lanes, b: Lanes) -> Lanes {
    zip(a, b, |x, y| x - y)
}

#[inline]
fn mul(a: Lanes, b: Lanes) -> Lanes {
    zip(a, b, |x, y| x * y)
}

#[inline]
fn reduce(mut lanes: Lanes) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

#[inline]
fn load_f32(block: &[u8; 64]) -> Lanes {
    let (elements, _) = block.as_chunks::<4>();
    std::array::from_fn(|lane| f32::from_le_bytes(elements[lane]))
}

#[inline]
fn load_f16(block: &[u8; 32]) -> Lanes {
    let (elements, _) = block.as_chunks::<2>();
    std::array::from_fn(|lane| f16_to_f32(u16::from_le_bytes(elements[lane])))
}

/// What follows the last whole block, zero-padded to a block.
#[inline]
fn padded<const BLOCK: usize>(whole: &[u8]) -> [u8; BLOCK] {
    let (_, tail) = whole.as_chunks::<BLOCK>();
    let mut block = [0; BLOCK];
    block[..tail.len()].copy_from_slice(tail);
    block
}

#[inline]
fn tail_f32(whole: &[u8]) -> Lanes {
    load_f32(&padded(whole))
}

#[inline]
fn tail_f16(whole: &[u8]) -> Lanes {
    load_f16(&padded(whole))
}

/// Widens a half float, exactly. The product rebiases the exponent by 127 − 15 and normalises what was subnormal.
#[inline]
fn f16_to_f32(half: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let magnitude = u32::from(half & 0x7fff) << 13;
    let sign = u32::from(half & 0x8000) << 16;
    let special = u32::from(magnitude >= 0x1f << 23).wrapping_neg() & (0xff << 23);
    f32::from_bits((f32::from_bits(magnitude) * REBIAS).to_bits() | special | sign)
}

float_kernels!(l2_f32, ip_f32, cosine_f32, 64, load_f32, tail_f32);
float_kernels!(l2_f16, ip_f16, cosine_f16, 32, load_f16, tail_f16);

// Sums are exact (`DIMENSION_MAX`); they are written as wrapping ones, since checks against overflow in test builds
// would keep the compiler from vectorising them.

const BLOCK: usize = 32;
type Wide = [i16; BLOCK];

#[inline]
fn zero_bytes() -> i32 {
    0
}

#[inline]
fn add_bytes(a: i32, b: i32) -> i32 {
    a.wrapping_add(b)
}

#[inline]
fn reduce_bytes(sum: i32) -> i32 {
    sum
}

#[inline]
fn load_bytes(block: &[u8; BLOCK]) -> [u8; BLOCK] {
    *block
}

#[inline]
fn tail_bytes(whole: &[u8]) -> [u8; BLOCK] {
    padded(whole)
}

#[inline]
fn widen_u8(bytes: [u8; BLOCK]) -> Wide {
    std::array::from_fn(|at| i16::from(bytes[at]))
}

#[inline]
fn widen_i8(bytes: [u8; BLOCK]) -> Wide {
    std::array::from_fn(|at| i16::from(bytes[at].cast_signed()))
}

#[inline]
fn products(a: Wide, b: Wide) -> i32 {
    let mut sum = 0i32;
    for at in 0..BLOCK {
        sum = sum.wrapping_add(i32::from(a[at]).wrapping_mul(i32::from(b[at])));
    }
    sum
}

#[inline]
fn squares_u8(a: [u8; BLOCK], b: [u8; BLOCK]) -> i32 {
    let (a, b) = (widen_u8(a), widen_u8(b));
    let difference = std::array::from_fn(|at| a[at].wrapping_sub(b[at]));
    products(difference, difference)
}

#[inline]
fn squares_i8(a: [u8; BLOCK], b: [u8; BLOCK]) -> i32 {
    let (a, b) = (widen_i8(a), widen_i8(b));
    let difference = std::array::from_fn(|at| a[at].wrapping_sub(b[at]));
    products(difference, difference)
}

byte_kernels!(l2_u8, ip_u8, cosine_u8, 32, squares_u8, products, widen_u8);
byte_kernels!(l2_i8, ip_i8, cosine_i8, 32, squares_i8, products, widen_i8);

#[cfg(test)]
mod tests {
    #[test]
    fn every_half_float_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (super::f16_to_f32(bits), half::f16::from_bits(bits).to_f32_const());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#06x}");
        }
    }
}
