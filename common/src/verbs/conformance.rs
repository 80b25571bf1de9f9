//! What every backend of [`Verbs`] must do: the contract of [`super`], as checks that run against any of them.
//!
//! A backend implements [`Backend`] and calls [`run_all`], which runs all properties one after another; backends of
//! this crate use the macro `verbs_conformance_tests`, which makes a test of each. Nothing here measures time:
//! hosts are paused instead of slowed, leases run on a clock moved by hand, and a bound of a minute turns a hang
//! into a failure.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::{FutureExt, join_all};
use parking_lot::Mutex;

use super::host::{Clock, Host, HostOptions, MessageHandler, PushError, Session};
use super::memory::{HugePages, RegionMemory};
use super::{
    BATCH_BYTES_MAX, BATCH_ITEMS_MAX, MESSAGE_BYTES_MAX, ReadBatch, VerbError, Verbs, WordAt, WriteBatch,
};
use crate::ids::{Epoch, Incarnation, RegionId, RemotePtr, SessionId};

/// How the suite reaches a backend.
pub trait Backend: Send + Sync {
    /// Its sessions.
    type Session: Verbs;

    /// Opens a session of `client` on `host`, with a lease that follows the host's clock.
    fn connect(&self, host: &Arc<Host>, client: &str) -> impl Future<Output = Self::Session> + Send;

    /// Breaks the connection under a session, as a network or a dead memory node would.
    fn cut(&self, session: &Self::Session) -> impl Future<Output = ()> + Send;

    /// Calls of the session that are under way: sent or about to be, and not answered.
    fn in_flight(&self, session: &Self::Session) -> usize;

    /// How many calls of `bytes` each, request or reply, may be under way at a time.
    fn window(&self, bytes: usize) -> usize;
}

/// Longest that one property may take before it counts as a hang.
const HANG: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(3);
const REGION_BYTES: u64 = 16 << 20;
const A: RegionId = RegionId(1);
const B: RegionId = RegionId(7);
const CURRENT: Epoch = Epoch(10);
const BORN: Epoch = Epoch(8);

/// A host with two regions and a clock that stands still, and the backend to reach it by.
struct Bench<'a, T> {
    backend: &'a T,
    host: Arc<Host>,
    clock: Clock,
}

impl<'a, T: Backend> Bench<'a, T> {
    fn new(backend: &'a T) -> Self {
        let clock = Clock::manual();
        let options = HostOptions { lease: LEASE, clock: clock.clone(), ..HostOptions::default() };
        let host = Host::new("mn-0", Incarnation(0x5117e), options);
        for id in [A, B] {
            let memory = RegionMemory::new(REGION_BYTES, HugePages::Off).expect("16 MiB of memory");
            host.add_region(id, CURRENT, BORN, memory).expect("a new host has no regions");
        }
        Self { backend, host, clock }
    }

    async fn connect(&self, client: &str) -> T::Session {
        self.backend.connect(&self.host, client).await
    }
}

fn soon() -> Instant {
    Instant::now() + HANG
}

fn at(region: RegionId, offset: u64) -> RemotePtr {
    RemotePtr::new(region, offset)
}

fn word(region: RegionId, offset: u64) -> WordAt {
    WordAt { at: at(region, offset), epoch: CURRENT }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed) >> 32) as u8).collect()
}

fn read_of(items: &[(RegionId, u64, u32)]) -> ReadBatch {
    let mut batch = ReadBatch::new();
    for (region, offset, len) in items {
        batch.push(at(*region, *offset), CURRENT, *len);
    }
    batch
}

fn write_of(items: &[(RegionId, u64, &[u8])]) -> WriteBatch {
    let mut batch = WriteBatch::new();
    for (region, offset, bytes) in items {
        batch.push(at(*region, *offset), CURRENT, bytes);
    }
    batch
}

async fn read_one(verbs: &impl Verbs, region: RegionId, offset: u64, len: u32) -> Bytes {
    verbs.read(read_of(&[(region, offset, len)]), soon()).await.expect("a legal read").data
}

async fn write_one(verbs: &impl Verbs, region: RegionId, offset: u64, bytes: &[u8]) {
    verbs.write(write_of(&[(region, offset, bytes)]), soon()).await.expect("a legal write");
}

type Outcome = Result<(), VerbError>;
type Pending<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// One call of every verb. RECV only ends when a message comes.
fn one_of_each<V: Verbs>(verbs: &V, deadline: Instant) -> Vec<(&'static str, Pending<'_>)> {
    let bytes = [0xab; 8];
    vec![
        ("READ", verbs.read(read_of(&[(A, 64, 100)]), deadline).map(|r| r.map(drop)).boxed()),
        ("WRITE", verbs.write(write_of(&[(A, 8192, &bytes)]), deadline).map(|r| r.map(drop)).boxed()),
        ("COMPARE_SWAP", verbs.compare_swap(word(A, 8192), 0, 1, deadline).map(|r| r.map(drop)).boxed()),
        ("FETCH_ADD", verbs.fetch_add(word(A, 8192), 1, deadline).map(|r| r.map(drop)).boxed()),
        ("session_alive", verbs.session_alive(SessionId(1), deadline).map(|r| r.map(drop)).boxed()),
        ("SEND", verbs.send(Bytes::from_static(b"x"), deadline).map(|r| r.map(drop)).boxed()),
        ("RECV", verbs.recv(deadline).map(|r| r.map(drop)).boxed()),
    ]
}

/// Keeps the messages that come, with their senders.
#[derive(Default)]
struct Collect(Mutex<Vec<(SessionId, Bytes)>>);

impl MessageHandler for Collect {
    fn message(&self, _host: &Host, from: &Arc<Session>, message: Bytes) -> Result<(), String> {
        if message.starts_with(b"bad") {
            return Err("it is bad".into());
        }
        self.0.lock().push((from.id(), message));
        Ok(())
    }
}

// --------------------------------------------------------------------------------------------------- data

/// What was written is read, in the order of the batch, whatever the lengths and however regions alternate.
pub async fn reads_return_what_was_written_in_batch_order<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    assert_eq!(&**verbs.peer(), "mn-0");
    let (a, b) = (pattern(1, 65_536), pattern(2, 65_536));
    verbs.write(write_of(&[(B, 0, &b), (A, 4096, &a)]), soon()).await.unwrap();
    let items: [(RegionId, u64, u32); 10] = [
        (A, 4096, 640),
        (A, 4096 + 640, 640),
        (B, 8, 100),
        (A, 4104, 1),
        (A, 4112, 7),
        (B, 0, 65_536),
        (B, 65_528, 8),
        (A, 4096, 0),
        (A, 4096, 640),
        (A, 4096 + 8, 9),
    ];
    let mut expected = Vec::new();
    for (region, offset, len) in items {
        let (base, bytes) = if region == A { (4096, &a) } else { (0, &b) };
        let start = (offset - base) as usize;
        expected.extend_from_slice(&bytes[start..start + len as usize]);
    }
    assert_eq!(verbs.read(read_of(&items), soon()).await.unwrap().data, expected);
    // The edges of the region, and a batch of nothing.
    let last = REGION_BYTES - 8;
    write_one(&verbs, A, last, &pattern(3, 8)).await;
    assert_eq!(read_one(&verbs, A, last, 8).await, pattern(3, 8));
    assert_eq!(read_one(&verbs, A, last, 5).await, pattern(3, 8)[..5]);
    assert!(verbs.read(ReadBatch::new(), soon()).await.unwrap().data.is_empty());
    verbs.write(WriteBatch::new(), soon()).await.unwrap();
    // Memory that nobody wrote is zero.
    assert_eq!(read_one(&verbs, A, 1 << 20, 4096).await, vec![0; 4096]);
}

/// Offsets that need more than the short form of an address.
pub async fn addresses_above_32_gib_work<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let large = RegionId(9);
    let bytes = (32u64 << 30) + 8192;
    let Ok(memory) = RegionMemory::new(bytes, HugePages::Off) else {
        println!("skipped: this host grants no address space of {bytes} bytes");
        return;
    };
    bench.host.add_region(large, CURRENT, BORN, memory).unwrap();
    let verbs = bench.connect("cn-0").await;
    let ends = [0, 64, (32 << 30) - 8, 32 << 30, (32 << 30) + 8184];
    for (i, offset) in ends.into_iter().enumerate() {
        write_one(&verbs, large, offset, &pattern(i as u64, 8)).await;
    }
    let items = ends.map(|offset| (large, offset, 8));
    let expected: Vec<_> = (0..ends.len()).flat_map(|i| pattern(i as u64, 8)).collect();
    assert_eq!(verbs.read(read_of(&items), soon()).await.unwrap().data, expected);
    assert_eq!(
        verbs.fetch_add(word(large, (32 << 30) + 8184), 0, soon()).await.unwrap().to_le_bytes()[..],
        expected[32..]
    );
}

/// After a WRITE has completed, every session sees all of it.
pub async fn a_completed_write_is_seen_by_every_session<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let (writer, reader) = (bench.connect("cn-0").await, bench.connect("cn-1").await);
    assert_ne!(writer.session(), reader.session());
    for round in 0..100u64 {
        let data = pattern(round, 40_000);
        writer.write(write_of(&[(A, 0, &data[..20_000]), (B, 512, &data[20_000..])]), soon()).await.unwrap();
        let seen = reader.read(read_of(&[(A, 0, 20_000), (B, 512, 20_000)]), soon()).await.unwrap();
        assert_eq!(seen.data, data, "round {round}");
        reader.fetch_add(word(A, 0), 1, soon()).await.unwrap();
        let first = u64::from_le_bytes(data[..8].try_into().unwrap()).wrapping_add(1);
        assert_eq!(read_one(&writer, A, 0, 8).await, first.to_le_bytes()[..]);
    }
}

/// A READ with a WRITE in its middle gets some old and some new words: callers must be ready for it, and this suite
/// shows that the backend lets it through rather than hiding it.
pub async fn long_reads_may_be_torn<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    let (old, new) = (pattern(1, 800), pattern(2, 800));
    write_one(&verbs, A, 0, &old).await;
    let intruder = bench.host.open_session("intruder").unwrap();
    let parts = write_of(&[(A, 0, &new)]);
    bench.host.set_mid_read(Some(Box::new(move |host| {
        host.write(&intruder, parts.parts(), parts.data()).expect("a legal write");
    })));
    let torn = read_one(&verbs, A, 0, 800).await;
    assert_eq!((&torn[..400], &torn[400..]), (&old[..400], &new[400..]));
    bench.host.set_mid_read(None);
    assert_eq!(read_one(&verbs, A, 0, 800).await, new);
}

/// However many write and read at once, an aligned word is always one that somebody wrote.
pub async fn words_are_never_torn<T: Backend>(backend: &T) {
    const WORDS: usize = 64;
    let bench = Bench::new(backend);
    bench.host.set_mid_read(Some(Box::new(|_| std::thread::yield_now())));
    let mut sessions = Vec::new();
    for i in 0..4 {
        sessions.push(bench.connect(&format!("cn-{i}")).await);
    }
    let write = async |verbs: &T::Session, who: u8| {
        for round in 0..60u8 {
            write_one(verbs, A, 0, &[round.wrapping_mul(4).wrapping_add(who); 8 * WORDS]).await;
        }
    };
    let read = async |verbs: &T::Session| {
        for _ in 0..60 {
            let seen = read_one(verbs, A, 0, 8 * WORDS as u32).await;
            for word in seen.chunks_exact(8) {
                assert!(word.iter().all(|byte| *byte == word[0]), "a torn word: {word:?}");
            }
        }
    };
    tokio::join!(write(&sessions[0], 1), write(&sessions[1], 2), read(&sessions[2]), read(&sessions[3]));
}

// ------------------------------------------------------------------------------------------------- atomics

/// FETCH_ADDs of several clients on one word: the sum is exact and no value is handed out twice.
pub async fn fetch_adds_under_contention_hand_out_each_value_once<T: Backend>(backend: &T) {
    const CLIENTS: u64 = 4;
    const CALLS: u64 = 200;
    let bench = Bench::new(backend);
    let mut sessions = Vec::new();
    for i in 0..CLIENTS {
        sessions.push(bench.connect(&format!("cn-{i}")).await);
    }
    let calls =
        sessions.iter().flat_map(|verbs| (0..CALLS).map(|_| verbs.fetch_add(word(A, 128), 3, soon())));
    let befores: BTreeSet<u64> = join_all(calls).await.into_iter().map(Result::unwrap).collect();
    let expected: BTreeSet<u64> = (0..CLIENTS * CALLS).map(|i| 3 * i).collect();
    assert_eq!(befores, expected);
    assert_eq!(sessions[0].fetch_add(word(A, 128), u64::MAX, soon()).await, Ok(3 * CLIENTS * CALLS));
    assert_eq!(
        read_one(&sessions[1], A, 128, 8).await,
        (3 * CLIENTS * CALLS - 1).to_le_bytes()[..],
        "it wraps"
    );
}

/// COMPARE_SWAPs of several clients: one winner, and the losers are told who it is.
pub async fn a_contended_compare_swap_has_one_winner<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let mut sessions = Vec::new();
    for i in 0..4 {
        sessions.push(bench.connect(&format!("cn-{i}")).await);
    }
    for round in 0..40 {
        let lock = word(B, 8 * round);
        let calls =
            sessions.iter().map(|verbs| verbs.compare_swap(lock, 0, verbs.session().0.into(), soon()));
        let befores: Vec<u64> = join_all(calls).await.into_iter().map(Result::unwrap).collect();
        let winners: Vec<usize> = (0..4).filter(|i| befores[*i] == 0).collect();
        assert_eq!(winners.len(), 1, "round {round}: {befores:?}");
        let winner = u64::from(sessions[winners[0]].session().0);
        assert!(befores.iter().all(|before| *before == 0 || *before == winner), "round {round}: {befores:?}");
        assert_eq!(read_one(&sessions[0], B, 8 * round, 8).await, winner.to_le_bytes()[..]);
    }
    // A counter kept by COMPARE_SWAP alone loses nothing.
    let count = async |verbs: &T::Session| {
        let (mut known, mut done) = (0, 0);
        while done < 50 {
            let before = verbs.compare_swap(word(A, 0), known, known + 1, soon()).await.unwrap();
            done += u64::from(before == known);
            known = if before == known { known + 1 } else { before };
        }
    };
    join_all(sessions.iter().map(count)).await;
    assert_eq!(read_one(&sessions[0], A, 0, 8).await, 200u64.to_le_bytes()[..]);
}

// --------------------------------------------------------------------------------- deadlines, loss, pressure

/// A memory node that does not answer: every call ends by its deadline, and the session goes on afterwards.
pub async fn every_call_ends_by_its_deadline<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    bench.host.set_handler(Arc::new(Collect::default()));
    let verbs = bench.connect("cn-0").await;
    bench.host.pause();
    for already_past in [true, false] {
        let deadline = if already_past { Instant::now() } else { Instant::now() + Duration::from_millis(30) };
        let (names, calls): (Vec<_>, Vec<_>) = one_of_each(&verbs, deadline).into_iter().unzip();
        for (name, outcome) in names.into_iter().zip(join_all(calls).await) {
            assert!(matches!(outcome, Err(VerbError::DeadlineExceeded { .. })), "{name}: {outcome:?}");
            assert!(Instant::now() >= deadline, "{name} gave up before its deadline");
        }
    }
    bench.host.resume();
    assert!(!verbs.is_lost());
    write_one(&verbs, A, 0, &pattern(1, 64)).await;
    assert_eq!(read_one(&verbs, A, 0, 64).await, pattern(1, 64));
    // No message comes: RECV too ends.
    let outcome = verbs.recv(Instant::now() + Duration::from_millis(10)).await;
    assert!(matches!(outcome, Err(VerbError::DeadlineExceeded { .. })), "{outcome:?}");
}

/// Futures dropped at every stage: the session goes on, and the window is whole again.
pub async fn dropped_futures_are_harmless<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let collect = Arc::new(Collect::default());
    bench.host.set_handler(Arc::clone(&collect) as Arc<dyn MessageHandler>);
    let verbs = bench.connect("cn-0").await;
    let data = pattern(4, 1000);
    write_one(&verbs, A, 0, &data).await;
    drop(one_of_each(&verbs, soon()));
    bench.host.pause();
    let large = BATCH_BYTES_MAX as u32;
    for _ in 0..3 {
        let mut calls: Vec<_> = (0..backend.window(BATCH_BYTES_MAX) + 3)
            .map(|_| verbs.read(read_of(&[(B, 0, large)]), soon()).boxed())
            .collect();
        for call in &mut calls {
            assert!(call.now_or_never().is_none(), "the host is paused");
        }
        for (name, mut call) in one_of_each(&verbs, soon()) {
            assert!((&mut call).now_or_never().is_none(), "{name}: the host is paused");
        }
    }
    bench.host.resume();
    for _ in 0..20 {
        assert_eq!(read_one(&verbs, A, 0, 1000).await, data);
    }
    // As many again as fit: none of the dropped calls has kept its room.
    let calls = (0..backend.window(BATCH_BYTES_MAX)).map(|_| verbs.read(read_of(&[(B, 0, large)]), soon()));
    assert!(join_all(calls).await.into_iter().all(|outcome| outcome.is_ok()));
    drained(backend, &verbs).await;
    // A dropped RECV takes no message with it.
    {
        let recv = verbs.recv(soon()).boxed();
        let mut recv = recv;
        assert!((&mut recv).now_or_never().is_none());
        bench.host.push(verbs.session(), Bytes::from_static(b"kept")).unwrap();
    }
    assert_eq!(verbs.recv(soon()).await.unwrap(), b"kept"[..]);
}

/// Completes when no call is under way any more.
async fn drained<T: Backend>(backend: &T, verbs: &T::Session) {
    while backend.in_flight(verbs) > 0 {
        tokio::task::yield_now().await;
    }
}

/// A connection that breaks: every call under way, and every later one, ends with an error long before its deadline.
pub async fn a_lost_connection_ends_every_call<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    bench.host.set_handler(Arc::new(Collect::default()));
    let verbs = bench.connect("cn-0").await;
    let other = bench.connect("cn-1").await;
    let far = Instant::now() + 100 * HANG;
    bench.host.pause();
    let large = BATCH_BYTES_MAX as u32;
    let mut calls = one_of_each(&verbs, far);
    for _ in 0..backend.window(BATCH_BYTES_MAX) + 3 {
        calls.push(("READ", verbs.read(read_of(&[(B, 0, large)]), far).map(|r| r.map(drop)).boxed()));
    }
    let (names, mut calls): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
    for call in &mut calls {
        assert!(call.now_or_never().is_none(), "the host is paused");
    }
    let ((), outcomes) = tokio::join!(backend.cut(&verbs), join_all(calls));
    for (name, outcome) in names.iter().zip(outcomes) {
        assert!(matches!(outcome, Err(VerbError::ConnectionLost { .. })), "{name}: {outcome:?}");
    }
    assert!(verbs.is_lost());
    for (name, call) in one_of_each(&verbs, far) {
        let outcome = call.await;
        assert!(matches!(outcome, Err(VerbError::ConnectionLost { .. })), "{name}: {outcome:?}");
    }
    bench.host.resume();
    // Others go on, and find that the lost session is over.
    assert!(!other.is_lost());
    while other.session_alive(verbs.session(), soon()).await.unwrap() {
        tokio::task::yield_now().await;
    }
}

/// A full window makes further calls wait, within bounds; they go on when there is room.
pub async fn a_full_window_waits_and_goes_on<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    for bytes in [BATCH_BYTES_MAX, 8] {
        let window = backend.window(bytes);
        let data = pattern(bytes as u64, bytes);
        write_one(&verbs, A, 0, &data).await;
        drained(backend, &verbs).await;
        bench.host.pause();
        let mut reads: VecDeque<_> =
            (0..window + 5).map(|_| verbs.read(read_of(&[(A, 0, bytes as u32)]), soon()).boxed()).collect();
        for read in &mut reads {
            assert!(read.now_or_never().is_none(), "the host is paused");
        }
        assert_eq!(backend.in_flight(&verbs), window, "calls of {bytes} bytes");
        // Who waits for room waits until its own deadline.
        let late =
            verbs.read(read_of(&[(A, 0, bytes as u32)]), Instant::now() + Duration::from_millis(20)).await;
        assert!(matches!(late, Err(VerbError::DeadlineExceeded { .. })), "{late:?}");
        bench.host.resume();
        for (at, reply) in join_all(reads).await.into_iter().enumerate() {
            assert_eq!(reply.unwrap().data, data, "read {at} of {bytes} bytes");
        }
        assert_eq!(backend.in_flight(&verbs), 0);
    }
}

// -------------------------------------------------------------------------------------------------- limits

/// Batches and messages at the limits pass; one over is refused before anything is sent, and the session goes on.
pub async fn limits_are_reached_and_kept<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let collect = Arc::new(Collect::default());
    bench.host.set_handler(Arc::clone(&collect) as Arc<dyn MessageHandler>);
    let verbs = bench.connect("cn-0").await;
    let too_large = |outcome: Result<(), VerbError>, max: usize| match outcome {
        Err(VerbError::TooLarge { given, max: named, .. }) => assert!(given > max && named == max),
        other => panic!("expected TooLarge with {max}: {other:?}"),
    };

    let most = pattern(6, BATCH_BYTES_MAX);
    write_one(&verbs, A, 0, &most).await;
    assert_eq!(read_one(&verbs, A, 0, BATCH_BYTES_MAX as u32).await, most);
    let over = verbs.read(read_of(&[(A, 0, BATCH_BYTES_MAX as u32), (A, 0, 1)]), soon()).await;
    too_large(over.map(drop), BATCH_BYTES_MAX);
    let over = verbs.write(write_of(&[(A, 0, &most), (B, 0, &most[..8])]), soon()).await;
    too_large(over.map(drop), BATCH_BYTES_MAX);

    // Most items, in one group and in as many groups as items.
    let items: Vec<_> = (0..BATCH_ITEMS_MAX as u64).map(|i| (A, 8 * (i % 5000), 8)).collect();
    let reply = verbs.read(read_of(&items), soon()).await.unwrap();
    for (i, got) in reply.data.chunks_exact(8).enumerate() {
        let from = 8 * (i % 5000);
        assert_eq!(got, &most[from..from + 8], "item {i}");
    }
    let mixed: Vec<_> =
        (0..BATCH_ITEMS_MAX as u64).map(|i| (if i % 2 == 0 { A } else { B }, 8 * i, 8)).collect();
    assert_eq!(verbs.read(read_of(&mixed), soon()).await.unwrap().data.len(), 8 * BATCH_ITEMS_MAX);
    let one_more: Vec<_> = (0..=BATCH_ITEMS_MAX).map(|_| (A, 0, 1)).collect();
    too_large(verbs.read(read_of(&one_more), soon()).await.map(drop), BATCH_ITEMS_MAX);

    let mut parts = WriteBatch::new();
    for i in 0..BATCH_ITEMS_MAX as u64 {
        parts.push_word(at(if i % 2 == 0 { A } else { B }, 8 * i), CURRENT, i + 1);
    }
    verbs.write(parts.clone(), soon()).await.unwrap();
    assert_eq!(read_one(&verbs, B, 8 * 65_535, 8).await, 65_536u64.to_le_bytes()[..]);
    assert_eq!(read_one(&verbs, A, 8 * 65_534, 8).await, 65_535u64.to_le_bytes()[..]);
    parts.push_word(at(A, 0), CURRENT, 7);
    too_large(verbs.write(parts, soon()).await.map(drop), BATCH_ITEMS_MAX);

    let message = Bytes::from(pattern(7, MESSAGE_BYTES_MAX));
    verbs.send(message.clone(), soon()).await.unwrap();
    verbs.send(Bytes::new(), soon()).await.unwrap();
    let got: Vec<_> = collect.0.lock().iter().map(|(_, message)| message.clone()).collect();
    assert_eq!(got, [message.clone(), Bytes::new()]);
    too_large(verbs.send(Bytes::from(pattern(7, MESSAGE_BYTES_MAX + 1)), soon()).await, MESSAGE_BYTES_MAX);
    bench.host.push(verbs.session(), message.clone()).unwrap();
    assert_eq!(verbs.recv(soon()).await.unwrap(), message);
    assert_eq!(read_one(&verbs, A, 8, 8).await.len(), 8, "the session goes on");
}

// ------------------------------------------------------------------------------------------------ messages

/// SENDs arrive in the order in which they were begun, per session; a refused one says why.
pub async fn sends_arrive_in_order<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    let refused = verbs.send(Bytes::from_static(b"nobody"), soon()).await.unwrap_err();
    assert!(matches!(refused, VerbError::MessageRefused { .. }) && refused.is_refusal(), "{refused:?}");
    let collect = Arc::new(Collect::default());
    bench.host.set_handler(Arc::clone(&collect) as Arc<dyn MessageHandler>);
    let other = bench.connect("cn-1").await;
    let text = |i: usize| Bytes::from(format!("{i}{}", ".".repeat(i * 37 % 2000)));
    let sends = (0..400).flat_map(|i| [verbs.send(text(i), soon()), other.send(text(i), soon())]);
    assert!(join_all(sends).await.into_iter().all(|sent| sent.is_ok()));
    let got = collect.0.lock().clone();
    for session in [verbs.session(), other.session()] {
        let mine: Vec<_> = got.iter().filter(|(from, _)| *from == session).map(|(_, m)| m.clone()).collect();
        assert!(mine.iter().cloned().eq((0..400).map(text)), "messages of {session}");
    }
    let refused = verbs.send(Bytes::from_static(b"bad one"), soon()).await;
    assert_eq!(refused, Err(VerbError::MessageRefused { peer: "mn-0".into(), why: "it is bad".into() }));
}

/// Messages to a session come in order; a session that does not take them fills up, and the pusher is told.
pub async fn received_messages_are_ordered_and_bounded<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    let text = |i: usize| Bytes::from(format!("{i}{}", ".".repeat(i * 37 % 2000)));
    let mut pushed = 0;
    let full = loop {
        match bench.host.push(verbs.session(), text(pushed)) {
            Ok(()) => pushed += 1,
            Err(full) => break full,
        }
        assert!(pushed < 100_000, "a session that takes nothing is filled without bound");
    };
    assert_eq!(full, PushError::InboxFull(verbs.session()));
    for i in 0..pushed {
        assert_eq!(verbs.recv(soon()).await.unwrap(), text(i), "message {i} of {pushed}");
    }
    // One that comes while RECV waits.
    let (got, ()) = tokio::join!(verbs.recv(soon()), async {
        tokio::task::yield_now().await;
        bench.host.push(verbs.session(), text(5)).unwrap();
    });
    assert_eq!(got.unwrap(), text(5));
}

// ---------------------------------------------------------------------------------------- epochs and leases

/// Each way to be refused, with what it says, for each verb on memory; nothing is changed by it.
pub async fn refusals_are_exact_and_change_nothing<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    let (region, current) = (A, CURRENT);
    let nowhere = RegionId(1000);
    let region_bytes = REGION_BYTES;
    let named = |epoch| WordAt { at: at(A, 16), epoch: Epoch(epoch) };
    let cases = [
        (named(9), VerbError::StaleEpoch { region, named: Epoch(9), current }),
        (named(7), VerbError::RegionLost { region }),
        (named(11), VerbError::EpochAhead { region, named: Epoch(11), current }),
        (named(u64::MAX), VerbError::EpochAhead { region, named: Epoch(u64::MAX), current }),
        (word(nowhere, 8), VerbError::NoSuchRegion { region: nowhere }),
        (word(A, 12), VerbError::Misaligned { at: at(A, 12), len: 8 }),
        (word(A, REGION_BYTES), VerbError::OutOfBounds { at: at(A, REGION_BYTES), len: 8, region_bytes }),
        (
            word(A, RemotePtr::OFFSET_MAX - 7),
            VerbError::OutOfBounds { at: at(A, RemotePtr::OFFSET_MAX - 7), len: 8, region_bytes },
        ),
    ];
    write_one(&verbs, B, 0, &[1; 8]).await;
    for (target, refusal) in cases {
        assert!(refusal.is_refusal());
        let mut read = read_of(&[(B, 0, 8)]);
        read.push(target.at, target.epoch, 8);
        assert_eq!(verbs.read(read, soon()).await.map(drop), Err(refusal.clone()));
        let mut write = write_of(&[(B, 0, &[2; 8])]);
        write.push_word(target.at, target.epoch, u64::MAX);
        assert_eq!(verbs.write(write, soon()).await.map(drop), Err(refusal.clone()));
        assert_eq!(verbs.compare_swap(target, 0, 5, soon()).await, Err(refusal.clone()));
        assert_eq!(verbs.fetch_add(target, 5, soon()).await, Err(refusal));
    }
    let long = verbs.read(read_of(&[(A, REGION_BYTES - 8, 9)]), soon()).await;
    assert_eq!(
        long.map(drop),
        Err(VerbError::OutOfBounds { at: at(A, REGION_BYTES - 8), len: 9, region_bytes })
    );
    let odd = verbs.write(write_of(&[(B, 0, &[2; 8]), (A, 16, &[2; 12])]), soon()).await;
    assert_eq!(odd.map(drop), Err(VerbError::Misaligned { at: at(A, 16), len: 12 }));
    assert_eq!(read_one(&verbs, B, 0, 8).await, [1; 8][..], "a refused batch writes none of its parts");
    assert_eq!(read_one(&verbs, A, 0, 4096).await, vec![0; 4096]);
    // The region moves on under the session's feet.
    bench.host.set_epoch(A, Epoch(11), BORN).unwrap();
    let stale = VerbError::StaleEpoch { region, named: CURRENT, current: Epoch(11) };
    assert_eq!(verbs.fetch_add(word(A, 16), 1, soon()).await, Err(stale));
    assert_eq!(verbs.fetch_add(named(11), 1, soon()).await, Ok(0));
    bench.host.reset_region(A, Epoch(12), Epoch(12)).unwrap();
    assert_eq!(verbs.fetch_add(named(11), 1, soon()).await, Err(VerbError::RegionLost { region }));
    assert_eq!(verbs.fetch_add(named(12), 1, soon()).await, Ok(0), "emptied");
}

/// A lease is renewed by every verb; once it has run out it is over for good, for that session alone.
pub async fn an_expired_lease_is_final_and_fences<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    bench.host.set_handler(Arc::new(Collect::default()));
    let (holder, waiter) = (bench.connect("cn-0").await, bench.connect("cn-1").await);
    for _ in 0..3 {
        for verb in 0..6 {
            bench.clock.advance(LEASE / 2);
            waiter.fetch_add(word(B, 0), 1, soon()).await.unwrap();
            let (name, call) = one_of_each(&holder, soon()).swap_remove(verb);
            call.await.unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
    // The holder takes a lock and falls asleep.
    let held = u64::from(holder.session().0) << 32 | 1;
    assert_eq!(holder.compare_swap(word(A, 0), 0, held, soon()).await, Ok(0));
    bench.clock.advance(LEASE - Duration::from_nanos(1));
    assert_eq!(waiter.session_alive(holder.session(), soon()).await, Ok(true));
    bench.clock.advance(Duration::from_nanos(1));
    assert_eq!(waiter.session_alive(holder.session(), soon()).await, Ok(false));
    let taken = u64::from(waiter.session().0) << 32 | 1;
    assert_eq!(waiter.compare_swap(word(A, 0), held, taken, soon()).await, Ok(held));
    // It wakes up: nothing that it does has an effect any more.
    for _ in 0..2 {
        for (name, call) in one_of_each(&holder, soon()) {
            let outcome = call.await;
            assert_eq!(outcome, Err(VerbError::LeaseExpired { peer: "mn-0".into() }), "{name}");
        }
    }
    assert!(holder.is_lost() && !waiter.is_lost());
    assert_eq!(read_one(&waiter, A, 0, 8).await, taken.to_le_bytes()[..]);
    // A new session may go on.
    let again = bench.connect("cn-0").await;
    assert_ne!(again.session(), holder.session());
    again.fetch_add(word(A, 8), 1, soon()).await.unwrap();
}

/// Who is alive: itself, another, nobody, one that has gone.
pub async fn session_alive_tells_the_living_from_the_gone<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    let other = bench.connect("cn-1").await;
    assert_eq!(verbs.session_alive(verbs.session(), soon()).await, Ok(true));
    assert_eq!(verbs.session_alive(other.session(), soon()).await, Ok(true));
    for nobody in [SessionId(0), SessionId(u32::MAX)] {
        assert_eq!(verbs.session_alive(nobody, soon()).await, Ok(false));
    }
    let gone = other.session();
    drop(other);
    while verbs.session_alive(gone, soon()).await.unwrap() {
        tokio::task::yield_now().await;
    }
    assert_eq!(verbs.session_alive(gone, soon()).await, Ok(false), "for good");
}

/// Many callers on one session at once, of every verb: each gets its own answer.
pub async fn answers_reach_their_own_callers<T: Backend>(backend: &T) {
    let bench = Bench::new(backend);
    let verbs = bench.connect("cn-0").await;
    let lengths: Vec<u32> = (0..500u64).map(|i| 8 * (1 + (i * i) % 400) as u32).collect();
    let started = AtomicU64::new(0);
    let one = async |i: usize| {
        let (i, len) = (i as u64, lengths[i]);
        let data = pattern(i, len as usize);
        write_one(&verbs, A, 4096 * i, &data).await;
        started.fetch_add(1, Ordering::Relaxed);
        let read = verbs.read(read_of(&[(A, 4096 * i, len), (A, 4096 * i, 3)]), soon());
        let (read, before) = tokio::join!(read, verbs.fetch_add(word(B, 8 * i), i, soon()));
        let mut expected = BytesMut::from(&data[..]);
        expected.extend_from_slice(&data[..3]);
        assert_eq!(read.unwrap().data, expected, "caller {i}");
        assert_eq!(before, Ok(0), "caller {i}");
    };
    join_all((0..500).map(one)).await;
    assert_eq!(started.load(Ordering::Relaxed), 500);
}

macro_rules! properties {
    ($($property:ident),* $(,)?) => {
        /// Names of all properties.
        pub const PROPERTIES: &[&str] = &[$(stringify!($property)),*];

        /// Runs all properties one after another, telling the name of each to `started`.
        ///
        /// # Panics
        /// If the backend breaks one, or hangs.
        pub async fn run_all<T: Backend>(backend: &T, mut started: impl FnMut(&str)) {
            $(
                started(stringify!($property));
                bounded(stringify!($property), $property(backend)).await;
            )*
        }

        /// Makes one test of each property for the backend that the expression makes (in an async context).
        #[cfg(test)]
        macro_rules! verbs_conformance_tests {
            ($backend:expr) => {
                $(
                    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                    async fn $property() {
                        use crate::verbs::conformance;
                        let backend = $backend;
                        conformance::bounded(stringify!($property), conformance::$property(&backend)).await;
                    }
                )*
            };
        }
    };
}

/// Runs one property; a hang is a panic with its name.
///
/// # Panics
/// If the property fails or hangs.
pub async fn bounded(name: &str, property: impl Future<Output = ()>) {
    if tokio::time::timeout(HANG, property).await.is_err() {
        panic!("{name} hangs");
    }
}

properties!(
    reads_return_what_was_written_in_batch_order,
    addresses_above_32_gib_work,
    a_completed_write_is_seen_by_every_session,
    long_reads_may_be_torn,
    words_are_never_torn,
    fetch_adds_under_contention_hand_out_each_value_once,
    a_contended_compare_swap_has_one_winner,
    every_call_ends_by_its_deadline,
    dropped_futures_are_harmless,
    a_lost_connection_ends_every_call,
    a_full_window_waits_and_goes_on,
    limits_are_reached_and_kept,
    sends_arrive_in_order,
    received_messages_are_ordered_and_bounded,
    refusals_are_exact_and_change_nothing,
    an_expired_lease_is_final_and_fences,
    session_alive_tells_the_living_from_the_gone,
    answers_reach_their_own_callers,
);
