//! Initial packets of QUIC, made by hand: rightly sealed with anything in them, and such that only look like ones.

use rand::{Rng, RngExt as _};
use rustls::Side;
use rustls::quic::Version;

/// Smallest datagram that may carry a client's first packet.
const DATAGRAM_BYTES_MIN: usize = 1_200;
const PACKET_NUMBER_BYTES: usize = 4;
const TAG_BYTES: usize = 16;

/// The head of an Initial packet up to its packet number, for `length` bytes from there on (RFC 9000, 17.2.2).
fn head(version: u32, to: &[u8], from: &[u8], token: &[u8], length: usize) -> Vec<u8> {
    // Long form, fixed bit, Initial, a packet number of 4 bytes.
    let mut head = vec![0xc3];
    head.extend(version.to_be_bytes());
    for id in [to, from] {
        head.push(id.len() as u8);
        head.extend(id);
    }
    head.extend(two_bytes(token.len()));
    head.extend(token);
    head.extend(two_bytes(length));
    head
}

fn two_bytes(number: usize) -> [u8; 2] {
    assert!(number < 1 << 14, "two bytes take 14 bits");
    (0x4000 | number as u16).to_be_bytes()
}

fn random(rng: &mut impl Rng, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    rng.fill_bytes(&mut out);
    out
}

/// Looks like an Initial; its seal is broken, and its fields may be too.
pub(super) fn false_initial(rng: &mut impl Rng) -> Vec<u8> {
    let version = if rng.random_bool(0.75) { 1 } else { rng.random() };
    let (to, from) = (rng.random_range(0..=20), rng.random_range(0..=20));
    let (to, from) = (random(rng, to), random(rng, from));
    let token = rng.random_range(0..64);
    let token = random(rng, token);
    let bytes = rng.random_range(DATAGRAM_BYTES_MIN..1_500);
    let mut packet = head(version, &to, &from, &token, bytes);
    let body = random(rng, bytes);
    packet.extend(body);
    match rng.random_range(0..4) {
        // Cut short, a length that lies, a byte changed, or as it is.
        0 => packet.truncate(rng.random_range(1..packet.len())),
        1 => packet.extend(random(rng, 2_000)),
        2 => {
            let at = rng.random_range(0..48);
            packet[at] ^= rng.random_range(1..=255_u8);
        }
        _ => {}
    }
    packet
}

/// A datagram with an Initial that the server can open, with anything in it: frames of random kinds, or handshake
/// bytes at random offsets.
pub(super) fn sealed_initial(rng: &mut impl Rng) -> Vec<u8> {
    let (to, from) = (random(rng, 8), random(rng, 8));
    let mut payload = Vec::new();
    match rng.random_range(0..4) {
        // CRYPTO: offset, length, bytes of no ClientHello.
        0 => {
            payload.extend([0x06, 0x00, 0x44, 0x00]);
            payload.extend(random(rng, 0x400));
        }
        // CRYPTO, far away.
        1 => {
            payload.push(0x06);
            payload.extend((0x8000_0000 | rng.random_range(0..1_u32 << 30)).to_be_bytes());
            payload.extend([0x42, 0x00]);
            payload.extend(random(rng, 0x200));
        }
        // A ClientHello that claims to be long, and stops.
        2 => payload.extend([0x06, 0x00, 0x08, 0x01, 0x00, 0xff, 0xff, 0x03, 0x03, 0, 0]),
        _ => {
            let bytes = rng.random_range(1..1_000);
            payload = random(rng, bytes);
        }
    }
    let length = |payload: &Vec<u8>| PACKET_NUMBER_BYTES + payload.len() + TAG_BYTES;
    let around = head(1, &to, &from, &[], 0).len();
    if around + length(&payload) < DATAGRAM_BYTES_MIN {
        payload.resize(DATAGRAM_BYTES_MIN - around - PACKET_NUMBER_BYTES - TAG_BYTES, 0);
    }
    let mut header = head(1, &to, &from, &[], length(&payload));
    let number_at = header.len();
    header.extend([0; PACKET_NUMBER_BYTES]);
    let suite =
        rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().expect("a suite of TLS 1.3");
    let keys = suite.quic_suite().expect("QUIC has it too").keys(&to, Side::Client, Version::V1).local;
    let tag = keys.packet.encrypt_in_place(0, &header, &mut payload).expect("any payload can be sealed");
    let mut packet = header;
    packet.extend(payload);
    packet.extend(tag.as_ref());
    let sample_at = number_at + 4;
    let sample = packet[sample_at..sample_at + keys.header.sample_len()].to_vec();
    let (first, rest) = packet.split_at_mut(1);
    let number = &mut rest[number_at - 1..number_at - 1 + PACKET_NUMBER_BYTES];
    keys.header.encrypt_in_place(&sample, &mut first[0], number).expect("a sample of the right length");
    packet
}
