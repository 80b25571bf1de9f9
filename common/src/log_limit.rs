//! Bounds what any one place in the program writes to the log: whoever can make a process log must not be able to
//! fill its disk, or to spend its time on writing.
//!
//! Each place that logs at `info` or above has a bucket of [`BURST`] lines that fills at [`PER_SECOND`]. What finds it
//! empty is left out, and the next line from there says how many were. Whoever asks for `debug` or `trace` gets all.

use std::collections::HashMap;
use std::fmt;
use std::time::Instant;

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::net::shape::Bucket;

/// Lines that one place may write at once.
pub const BURST: u32 = 50;
/// Lines that it may write per second, in the long run.
pub const PER_SECOND: u32 = 5;

/// A format of events that leaves out what is too much.
#[derive(Debug)]
pub struct Limited<F> {
    inner: F,
    start: Instant,
    places: Mutex<HashMap<Identifier, Place>>,
}

#[derive(Debug)]
struct Place {
    bucket: Bucket,
    left_out: u64,
}

impl Place {
    fn new() -> Self {
        Self { bucket: Bucket::new(PER_SECOND.into(), BURST.into()), left_out: 0 }
    }

    /// Whether a line may be written now, and if so how many were left out before it.
    fn admit(&mut self, now_ns: u64) -> Option<u64> {
        if self.bucket.is_open(now_ns) {
            self.bucket.take(1, now_ns);
            return Some(std::mem::take(&mut self.left_out));
        }
        self.left_out += 1;
        None
    }
}

impl<F> Limited<F> {
    /// Limits what `inner` formats.
    pub fn new(inner: F) -> Self {
        Self { inner, start: Instant::now(), places: Mutex::default() }
    }
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if *event.metadata().level() > Level::INFO {
            return self.inner.format_event(context, writer, event);
        }
        let now_ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let admitted =
            self.places.lock().entry(event.metadata().callsite()).or_insert_with(Place::new).admit(now_ns);
        let Some(left_out) = admitted else { return Ok(()) };
        self.inner.format_event(context, writer.by_ref(), event)?;
        if left_out > 0 {
            writeln!(writer, "    before this line, {left_out} from the same place were left out")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_place_has_a_burst_and_a_rate_and_says_what_it_left_out() {
        let mut place = Place::new();
        let burst = (0..10_000).filter(|_| place.admit(0).is_some()).count();
        assert!((BURST as usize..=BURST as usize + 1).contains(&burst), "{burst}");
        assert_eq!(place.admit(S), Some(10_000 - burst as u64));
        let later = (0..10_000).filter(|_| place.admit(3600 * S).is_some()).count();
        assert!(later <= BURST as usize + 1, "an hour of silence saves up one burst: {later}");
    }

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_flood_from_one_place_hides_no_other() {
        let written = Written::default();
        let writer = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::DEBUG)
            .with_writer(move || writer.clone())
            .map_event_format(Limited::new)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            for turn in 0..1_000 {
                tracing::warn!(turn, "flood");
                tracing::debug!(turn, "detail");
            }
            tracing::info!("another place");
        });
        let text = String::from_utf8(written.0.lock().clone()).unwrap();
        let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
        // A slow machine may have earned some more.
        assert!((BURST as usize..500).contains(&count("flood")), "{}", count("flood"));
        assert_eq!((count("detail"), count("another place")), (1_000, 1));
    }
}
