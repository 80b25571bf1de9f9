//! Load on a cluster, and what came back. The generator is one process beside the cluster's own.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;

/// Longest latency that is told from longer ones: beyond every deadline that a query may have.
const LATENCY_MAX_US: u64 = 600_000_000;

/// Answers of one pass over some queries.
#[derive(Debug)]
pub struct Pass<A> {
    /// Answers in the order of the queries.
    pub answers: Vec<A>,
    /// Latencies in microseconds, as the generator saw them.
    pub latencies: Histogram<u64>,
    /// From the first query sent to the last answer.
    pub wall: Duration,
}

/// Asks every query of `queries` once, in a closed loop: on each of `lanes` (compute nodes), `in_flight` askers send
/// their next query when they have the answer to the last. Query `i` goes to lane `i % lanes`, so all lanes get
/// the same number, whatever their speed. `done` is told after each answer.
///
/// # Errors
/// The first error of `ask`; the others are abandoned then.
pub async fn closed_loop<A, E, F>(
    lanes: usize,
    in_flight: usize,
    queries: std::ops::Range<usize>,
    ask: impl Fn(usize, usize) -> F + Send + Sync + 'static,
    done: impl Fn() + Send + Sync + 'static,
) -> Result<Pass<A>, E>
where
    A: Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<A, E>> + Send,
{
    assert!(lanes > 0 && in_flight > 0, "a loop needs lanes and askers");
    let next: Arc<Vec<AtomicUsize>> =
        Arc::new((0..lanes).map(|lane| AtomicUsize::new(queries.start + lane)).collect());
    let (ask, done) = (Arc::new(ask), Arc::new(done));
    let start = Instant::now();
    let mut askers = JoinSet::new();
    for lane in 0..lanes {
        for _ in 0..in_flight {
            let (next, ask, done, end) =
                (Arc::clone(&next), Arc::clone(&ask), Arc::clone(&done), queries.end);
            askers.spawn(async move {
                let mut answers = Vec::new();
                loop {
                    // Only uniqueness matters: what an asker saw travels with its join.
                    let query = next[lane].fetch_add(lanes, Ordering::Relaxed);
                    if query >= end {
                        return Ok(answers);
                    }
                    let sent = Instant::now();
                    let answer = ask(lane, query).await?;
                    answers.push((query, sent.elapsed(), answer));
                    done();
                }
            });
        }
    }
    let mut collected = Vec::with_capacity(queries.len());
    while let Some(asker) = askers.join_next().await {
        match asker {
            Ok(answers) => collected.extend(answers?),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
    }
    let wall = start.elapsed();
    collected.sort_unstable_by_key(|(query, ..)| *query);
    let mut latencies = Histogram::new_with_bounds(1, LATENCY_MAX_US, 3).expect("constant bounds");
    let answers = collected.into_iter().map(|(_, latency, answer)| {
        latencies.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(LATENCY_MAX_US));
        answer
    });
    Ok(Pass { answers: answers.collect(), latencies, wall })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_query_is_asked_once_and_lanes_share_evenly() {
        let asked = Arc::new(Mutex::new(vec![0; 3]));
        let seen = Arc::clone(&asked);
        let ask = move |lane: usize, query: usize| {
            seen.lock().unwrap()[lane] += 1;
            async move {
                tokio::task::yield_now().await;
                Ok::<_, ()>(query * 2)
            }
        };
        let pass = closed_loop(3, 4, 10..40, ask, || ()).await.unwrap();
        assert_eq!(pass.answers, (10..40).map(|query| query * 2).collect::<Vec<_>>());
        assert_eq!(pass.latencies.len(), 30);
        assert_eq!(*asked.lock().unwrap(), [10, 10, 10]);
    }

    #[tokio::test]
    async fn an_error_ends_the_pass() {
        let ask = |_, query| async move {
            if query == 5 {
                return Err("refused");
            }
            std::future::pending::<()>().await;
            Ok(())
        };
        assert_eq!(closed_loop(2, 3, 0..100, ask, || ()).await.unwrap_err(), "refused");
    }
}
