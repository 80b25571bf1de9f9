//! What the HTTP API counts, and all counts of the compute node in the text form of Prometheus.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shine_common::wire::NodeStatus;

use crate::counters::Counter;

/// Upper bounds of the classes of durations, in microseconds.
const BOUNDS_US: [u64; 12] =
    [500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 5_000_000];

/// Counts of the HTTP API since the start.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Connections that are open.
    pub(super) connections: AtomicU64,
    /// Connections that made room for others.
    pub(super) evicted: Counter,
    /// Requests by the first digit of their status.
    by_class: [Counter; 6],
    /// Requests by their duration; the last class is open.
    by_duration: [Counter; BOUNDS_US.len() + 1],
    duration_us: Counter,
}

impl Tally {
    /// Books a request that was answered.
    pub(super) fn answered(&self, status: u16, took: Duration) {
        self.by_class[usize::from(status / 100).min(5)].add(1);
        let us = took.as_micros() as u64;
        self.by_duration[BOUNDS_US.partition_point(|bound| *bound < us)].add(1);
        self.duration_us.add(us);
    }
}

/// Counts of a node that go up and down.
const GAUGES: [&str; 2] = ["searches_running", "inserts_running"];

/// The text of `/metrics`.
pub(super) fn text(status: &NodeStatus, tally: &Tally) -> String {
    let mut page = Page(String::new());
    page.is("build_info", "gauge");
    page.value("build_info", &format!("{{version=\"{}\"}}", status.version), 1);
    page.single("uptime_seconds", "gauge", status.uptime_s);
    page.single("map_epoch", "gauge", status.epoch);
    page.single("oracle_reachable", "gauge", u8::from(status.oracle_reachable));
    for (name, value) in &status.counters {
        match name.as_str() {
            name if GAUGES.contains(&name) => page.single(name, "gauge", value),
            name => page.single(&format!("{name}_total"), "counter", value),
        }
    }
    page.single("http_connections", "gauge", tally.connections.load(Ordering::Relaxed));
    page.single("http_connections_evicted_total", "counter", tally.evicted.get());
    page.is("http_requests_total", "counter");
    for (class, count) in tally.by_class.iter().enumerate().skip(1) {
        page.value("http_requests_total", &format!("{{status=\"{class}xx\"}}"), count.get());
    }
    page.is("http_request_duration_seconds", "histogram");
    let mut sum = 0;
    for (i, count) in tally.by_duration.iter().enumerate() {
        sum += count.get();
        let bound = BOUNDS_US.get(i).map_or("+Inf".to_owned(), |us| (*us as f64 / 1e6).to_string());
        page.value("http_request_duration_seconds_bucket", &format!("{{le=\"{bound}\"}}"), sum);
    }
    page.value("http_request_duration_seconds_sum", "", tally.duration_us.get() as f64 / 1e6);
    page.value("http_request_duration_seconds_count", "", sum);
    page.0
}

struct Page(String);

impl Page {
    fn is(&mut self, name: &str, kind: &str) {
        let _ = writeln!(self.0, "# TYPE shine_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "shine_{name}{labels} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, value: impl std::fmt::Display) {
        self.is(name, kind);
        self.value(name, "", value);
    }
}

#[cfg(test)]
mod tests {
    use shine_common::wire::Role;

    use super::*;

    #[test]
    fn every_line_is_one_that_prometheus_reads() {
        let tally = Tally::default();
        tally.answered(200, Duration::from_millis(1));
        tally.answered(404, Duration::from_secs(60));
        let status = NodeStatus {
            name: "cn-0".into(),
            role: Role::Cn,
            version: "0.1.0".into(),
            uptime_s: 3,
            epoch: 7,
            oracle_reachable: true,
            simd: "scalar".into(),
            counters: vec![("searches".into(), 5), ("searches_running".into(), 1)],
        };
        let text = text(&status, &tally);
        for line in [
            "shine_build_info{version=\"0.1.0\"} 1",
            "# TYPE shine_searches_total counter\nshine_searches_total 5",
            "# TYPE shine_searches_running gauge\nshine_searches_running 1",
            "shine_http_requests_total{status=\"2xx\"} 1",
            "shine_http_request_duration_seconds_bucket{le=\"0.0005\"} 0",
            "shine_http_request_duration_seconds_bucket{le=\"0.001\"} 1",
            "shine_http_request_duration_seconds_bucket{le=\"+Inf\"} 2",
            "shine_http_request_duration_seconds_count 2",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let is_sample = |line: &str| {
            line.split(' ').count() == 2 && line.split(' ').nth(1).unwrap().parse::<f64>().is_ok()
        };
        assert!(text.lines().all(|line| line.starts_with("# TYPE ") || is_sample(line)), "{text}");
    }
}
