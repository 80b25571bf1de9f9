//! Shaping: how fast a process may send and receive, so that a bandwidth-bound cluster can run on one host.
//!
//! One [`Link`] per process, with one token bucket per direction over all its connections. A datagram that is sent,
//! or taken from the kernel, draws tokens for its bytes ([`DATAGRAM_OVERHEAD`] included); while the bucket is in
//! debt the direction is shut. Nothing is dropped here: senders wait, and what was not received yet waits in the
//! socket's buffer, as it would in a switch.
//!
//! Invariant: over any stretch of `t` seconds a direction carries at most `rate * t + burst` bytes plus one datagram.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Bytes of IPv4 and UDP headers, counted for every datagram.
pub const DATAGRAM_OVERHEAD: u64 = 28;
/// Smallest burst: below two large datagrams a late wake-up would cost rate.
const BURST_BYTES_MIN: u64 = 128 << 10;
/// Burst as a time at full rate: timers tick in milliseconds and busy hosts wake late.
const BURST_TIME: Duration = Duration::from_millis(10);
const NS_PER_S: u128 = 1_000_000_000;

/// A token bucket that may be overdrawn by its last taker. Pure: the time is passed in, in nanoseconds from any
/// fixed start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    bytes_per_s: u64,
    /// Time that a full bucket's tokens last at the rate.
    depth_ns: u64,
    /// When all that was taken will have been paid for. The bucket holds `depth_ns - (paid_at_ns - now)`.
    paid_at_ns: u64,
}

impl Bucket {
    /// A full bucket that fills at `bytes_per_s` (at least 1) and holds at most `burst_bytes`.
    pub fn new(bytes_per_s: u64, burst_bytes: u64) -> Self {
        let mut bucket = Self { bytes_per_s: bytes_per_s.max(1), depth_ns: 0, paid_at_ns: 0 };
        bucket.depth_ns = bucket.cost_ns(burst_bytes);
        bucket
    }

    /// When the next taker may come: at or before `now_ns` if the bucket is not empty.
    pub fn opens_at_ns(&self) -> u64 {
        // Strictly more than an empty bucket, so that a burst of 0 still lets one taker through at a time.
        self.paid_at_ns.saturating_sub(self.depth_ns)
    }

    /// Whether the next taker may come.
    pub fn is_open(&self, now_ns: u64) -> bool {
        self.opens_at_ns() <= now_ns
    }

    /// Takes `bytes`, also beyond what is there: the debt shuts the bucket until it is paid.
    pub fn take(&mut self, bytes: u64, now_ns: u64) {
        self.paid_at_ns = self.paid_at_ns.max(now_ns).saturating_add(self.cost_ns(bytes));
    }

    fn cost_ns(&self, bytes: u64) -> u64 {
        let ns = (u128::from(bytes) * NS_PER_S).div_ceil(u128::from(self.bytes_per_s));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}

/// One direction of a link.
#[derive(Debug)]
pub struct Gate {
    start: Instant,
    bucket: Mutex<Bucket>,
    bytes: AtomicU64,
}

impl Gate {
    fn new(bytes_per_s: u64) -> Self {
        let burst =
            u64::try_from(u128::from(bytes_per_s) * BURST_TIME.as_nanos() / NS_PER_S).unwrap_or(u64::MAX);
        Self {
            start: Instant::now(),
            bucket: Mutex::new(Bucket::new(bytes_per_s, burst.max(BURST_BYTES_MIN))),
            bytes: AtomicU64::new(0),
        }
    }

    /// `None` if the gate is open, else when to look again.
    pub fn shut_until(&self, now: Instant) -> Option<Instant> {
        let opens_at_ns = self.bucket.lock().opens_at_ns();
        (opens_at_ns > self.since_start_ns(now)).then(|| self.start + Duration::from_nanos(opens_at_ns))
    }

    /// Lets `datagrams` of together `payload_bytes` through.
    pub fn pass(&self, payload_bytes: u64, datagrams: u64, now: Instant) {
        let bytes = payload_bytes + datagrams * DATAGRAM_OVERHEAD;
        self.bucket.lock().take(bytes, self.since_start_ns(now));
        // A statistic: nothing is ordered by it.
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes let through so far, overhead included.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn since_start_ns(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Both directions of a process's link.
#[derive(Debug)]
pub struct Link {
    /// What the process sends.
    pub send: Gate,
    /// What the process receives.
    pub receive: Gate,
}

impl Link {
    /// A link of `mbit` million bits per second in each direction, at least 1.
    pub fn new(mbit: u64) -> Self {
        let bytes_per_s = mbit.max(1).saturating_mul(1_000_000 / 8);
        Self { send: Gate::new(bytes_per_s), receive: Gate::new(bytes_per_s) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;

    /// Sends as fast as the bucket lets it, waking `late_ns` after each opening; the bytes let through in `for_ns`.
    fn carried(mut bucket: Bucket, datagram: u64, late_ns: u64, for_ns: u64) -> u64 {
        let (mut now, mut bytes) = (0, 0);
        while now < for_ns {
            if bucket.is_open(now) {
                bucket.take(datagram, now);
                bytes += datagram;
            } else {
                now = bucket.opens_at_ns() + late_ns;
            }
        }
        bytes
    }

    #[test]
    fn a_busy_link_carries_its_rate() {
        for mbit in [1, 10, 100, 1000, 10_000] {
            let rate = mbit * 125_000;
            let burst = (rate / 100).max(BURST_BYTES_MIN);
            for datagram in [1_228, 1_480, 60_028] {
                for late_ns in [0, 1_000_000, 5_000_000] {
                    let bytes = carried(Bucket::new(rate, burst), datagram, late_ns, 100 * S);
                    let share = bytes as f64 / (100 * rate) as f64;
                    // The first burst and one datagram are extra, which shows at 1 Mbit/s alone.
                    let extra = (burst + datagram) as f64 / (100 * rate) as f64;
                    assert!(
                        (0.90..=1.0 + extra).contains(&share),
                        "{mbit} Mbit/s, {datagram} B, {late_ns} ns: {share}"
                    );
                    assert!(share <= 1.02, "{mbit} Mbit/s: {share}");
                }
            }
        }
    }

    #[test]
    fn an_idle_link_saves_up_one_burst_and_no_more() {
        let mut bucket = Bucket::new(1_000_000, 10_000);
        bucket.take(1, 0);
        let now = 3600 * S;
        let mut bytes = 0;
        while bucket.is_open(now) {
            bucket.take(1_000, now);
            bytes += 1_000;
        }
        assert_eq!(bytes, 11_000, "burst, and the taker that overdraws it");
    }

    #[test]
    fn debt_shuts_the_gate_until_it_is_paid() {
        let mut bucket = Bucket::new(1_000, 0);
        assert!(bucket.is_open(0));
        bucket.take(500, 0);
        assert_eq!(bucket.opens_at_ns(), S / 2);
        assert!(!bucket.is_open(S / 2 - 1) && bucket.is_open(S / 2));
    }

    #[test]
    fn gate_counts_headers_and_opens_when_its_debt_is_paid() {
        let link = Link::new(8); // 1 MB/s, burst 128 KiB
        let start = link.send.start;
        assert_eq!(link.send.shut_until(start), None);
        link.send.pass(BURST_BYTES_MIN + 1_000_000 - DATAGRAM_OVERHEAD, 1, start);
        assert_eq!(link.send.bytes(), BURST_BYTES_MIN + 1_000_000);
        let until = link.send.shut_until(start).expect("a second of debt");
        assert_eq!(until - start, Duration::from_secs(1));
        assert_eq!(link.receive.shut_until(start), None, "directions are apart");
        assert_eq!(link.send.shut_until(start + Duration::from_secs(1)), None);
    }

    proptest! {
        #[test]
        fn never_more_than_rate_and_burst(
            rate in 1u64..10_000_000_000,
            burst in 0u64..100_000_000,
            steps in proptest::collection::vec((0u64..50_000_000, 1u64..70_000), 1..200),
        ) {
            let mut bucket = Bucket::new(rate, burst);
            let (mut now, mut bytes, mut largest) = (0, 0u128, 0);
            for (wait_ns, datagram) in steps {
                now += wait_ns;
                if bucket.is_open(now) {
                    bucket.take(datagram, now);
                    bytes += u128::from(datagram);
                    largest = largest.max(datagram);
                }
                let allowed = u128::from(rate) * u128::from(now) / NS_PER_S + u128::from(burst + largest);
                // Costs are rounded up and the depth too: by less than a nanosecond's worth of bytes.
                let rounding = u128::from(rate) / NS_PER_S + 1;
                prop_assert!(bytes <= allowed + rounding, "{bytes} > {allowed}");
            }
        }
    }
}
