//! The caller's end: [`Verbs`] on lanes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::task::JoinSet;

use super::super::frame::{self, Assembler, Frame, FrameError, Hello, Kind};
use super::super::host::{check_message_size, check_read_size, check_write_size};
use super::super::{FrameBytes, ReadBatch, ReadReply, VerbError, Verbs, WordAt, WriteBatch};
use super::{
    LARGE_CALL_BYTES, MESSAGE_OVERHEAD, MESSAGE_WINDOW, Sink, Source, WINDOW_BYTES, WINDOW_UNIT, cost,
};
use crate::ids::SessionId;

/// Capacity with which a lane's out buffer starts.
const OUT_BYTES: usize = 64 << 10;
/// A call that has no deadline of its own.
const NEVER: u64 = u64::MAX;

/// Why a memory node did not open a session.
#[derive(Debug, thiserror::Error)]
pub enum GreetError {
    /// The stream ended or broke; the transport knows why.
    #[error("{0}")]
    Lost(String),
    /// The answer is no answer to a greeting.
    #[error("the peer sent {0}")]
    Frame(#[from] FrameError),
}

/// Says HELLO on a session's first lane and takes the WELCOME: the session and its lease.
///
/// # Errors
/// If the lane is lost or the answer is wrong. A memory node that refuses closes the connection.
pub async fn greet(
    sink: &mut impl Sink,
    source: &mut impl Source,
    assembler: &mut Assembler,
    hello: &Hello,
) -> Result<(SessionId, Duration), GreetError> {
    let mut out = BytesMut::new();
    frame::put_hello(&mut out, hello);
    sink.send(out.freeze()).await.map_err(GreetError::Lost)?;
    loop {
        if let Some(frame) = assembler.next_frame()? {
            if frame.kind != Kind::Welcome {
                return Err(FrameError::Unexpected(frame.kind).into());
            }
            let (session, lease_ms) = frame::decode_welcome(&frame.body)?;
            return Ok((session, Duration::from_millis(lease_ms.into())));
        }
        match source.next().await.map_err(GreetError::Lost)? {
            Some(chunk) => assembler.push(chunk),
            None => return Err(GreetError::Lost("the peer ended the stream".into())),
        }
    }
}

/// A session on lanes.
pub struct FramedVerbs {
    shared: Arc<Shared>,
    /// Reader and writer of each lane, and the housekeeper; they end with this value.
    _tasks: JoinSet<()>,
}

impl std::fmt::Debug for FramedVerbs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FramedVerbs")
            .field("peer", &self.shared.peer)
            .field("session", &self.shared.session)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}

/// Tells the transport that the peer broke the protocol, and how.
type Closer = Box<dyn Fn(&str) + Send + Sync>;

struct Shared {
    peer: Arc<str>,
    session: SessionId,
    lanes: Box<[Lane]>,
    window: Semaphore,
    /// Keeps the order of SENDs; waiters are served first come, first served.
    sends: tokio::sync::Mutex<()>,
    started: Instant,
    /// When a frame was last received, and when a verb was last begun: nanoseconds after `started`.
    heard_ns: AtomicU64,
    spoke_ns: AtomicU64,
    /// The moment for which the housekeeper has set its alarm, at the latest.
    alarm_ns: AtomicU64,
    alarm_moved: Notify,
    is_ping_out: AtomicBool,
    /// Set before any caller is told, never cleared.
    is_over: AtomicBool,
    over: Mutex<Option<VerbError>>,
    inbox: Mutex<Inbox>,
    inbox_changed: Notify,
    close: Closer,
}

#[derive(Default)]
struct Lane {
    state: Mutex<LaneState>,
    has_output: Notify,
}

#[derive(Default)]
struct LaneState {
    /// Frames that the writer has not taken yet.
    out: BytesMut,
    calls: CallTable,
    /// Why no call is taken any more.
    over: Option<VerbError>,
}

#[derive(Default)]
struct Inbox {
    messages: VecDeque<Bytes>,
    /// Cost of what is here.
    bytes: usize,
    /// Cost of what was taken since credit was last given.
    taken: usize,
}

/// What answers a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expect {
    Data { bytes: usize },
    Done,
    Word,
    Flag,
}

#[derive(Debug)]
enum Answer {
    Data(Bytes),
    Done,
    Word(u64),
    Flag(bool),
}

/// One call. It leaves the table when it is neither on the wire nor awaited.
#[derive(Debug)]
struct Call {
    expect: Expect,
    deadline_ns: u64,
    /// Window units that it holds while it is in the table.
    cost: u32,
    request_bytes: u32,
    is_on_wire: bool,
    is_awaited: bool,
    is_ping: bool,
    waker: Option<Waker>,
    outcome: Option<Result<(Answer, FrameBytes), VerbError>>,
}

/// Calls by request id: slot in the low 16 bits, generation in the high ones, so that an answer never finds a later
/// call in its slot.
#[derive(Debug, Default)]
struct CallTable {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

#[derive(Debug)]
struct Slot {
    generation: u16,
    call: Option<Call>,
}

impl CallTable {
    fn insert(&mut self, call: Call) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = u16::try_from(self.slots.len()).expect("the window bounds calls on the wire to 4,096");
            self.slots.push(Slot { generation: 0, call: None });
            slot
        });
        let entry = &mut self.slots[usize::from(slot)];
        entry.call = Some(call);
        u32::from(entry.generation) << 16 | u32::from(slot)
    }

    #[inline]
    fn get(&mut self, id: u32) -> Option<&mut Call> {
        let entry = self.slots.get_mut(usize::from(id as u16))?;
        if u32::from(entry.generation) == id >> 16 { entry.call.as_mut() } else { None }
    }

    /// Removes a call that is neither on the wire nor awaited. Returns the window units that it gives back.
    #[inline]
    fn remove_if_done(&mut self, id: u32) -> usize {
        let entry = &mut self.slots[usize::from(id as u16)];
        let Some(done) = entry.call.take_if(|call| !call.is_on_wire && !call.is_awaited) else { return 0 };
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(id as u16);
        done.cost as usize
    }

    fn ids(&self) -> Vec<u32> {
        let used = self.slots.iter().enumerate().filter(|(_, entry)| entry.call.is_some());
        used.map(|(slot, entry)| u32::from(entry.generation) << 16 | slot as u32).collect()
    }
}

/// Waits for the outcome of a call that is in its lane's table.
struct Reply<'a> {
    shared: &'a Shared,
    lane: &'a Lane,
    id: u32,
    is_taken: bool,
}

impl Future for Reply<'_> {
    type Output = Result<(Answer, FrameBytes), VerbError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (lane, id) = (self.lane, self.id);
        let mut state = lane.state.lock();
        let call = state.calls.get(id).expect("an awaited call stays in the table");
        match call.outcome.take() {
            Some(outcome) => {
                call.is_awaited = false;
                let freed = state.calls.remove_if_done(id);
                drop(state);
                self.shared.give_back(freed);
                self.is_taken = true;
                Poll::Ready(outcome)
            }
            None => {
                match &mut call.waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    none => *none = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
        }
    }
}

impl Drop for Reply<'_> {
    fn drop(&mut self) {
        if self.is_taken {
            return;
        }
        let mut state = self.lane.state.lock();
        let call = state.calls.get(self.id).expect("an awaited call stays in the table");
        call.is_awaited = false;
        call.waker = None;
        call.outcome = None;
        let freed = state.calls.remove_if_done(self.id);
        drop(state);
        self.shared.give_back(freed);
    }
}

impl FramedVerbs {
    /// Runs `session` on `lanes`, the first of which has been greeted on with `assembler`. Must be called on the
    /// runtime that shall carry the lanes. `close` tells the transport why the connection must end.
    ///
    /// # Panics
    /// If there is no lane.
    pub fn start<S: Sink, R: Source>(
        peer: Arc<str>,
        (session, lease): (SessionId, Duration),
        lanes: Vec<(S, R)>,
        assembler: Assembler,
        close: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        assert!(!lanes.is_empty(), "a session has a lane");
        let shared = Arc::new(Shared {
            peer,
            session,
            lanes: lanes.iter().map(|_| Lane::default()).collect(),
            window: Semaphore::new(WINDOW_BYTES / WINDOW_UNIT),
            sends: tokio::sync::Mutex::new(()),
            started: Instant::now(),
            heard_ns: AtomicU64::new(0),
            spoke_ns: AtomicU64::new(0),
            alarm_ns: AtomicU64::new(0),
            alarm_moved: Notify::new(),
            is_ping_out: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            over: Mutex::new(None),
            inbox: Mutex::default(),
            inbox_changed: Notify::new(),
            close: Box::new(close),
        });
        let mut tasks = JoinSet::new();
        let mut assembler = Some(assembler);
        for (at, (sink, source)) in lanes.into_iter().enumerate() {
            let assembler = assembler.take().unwrap_or_default();
            tasks.spawn(write_lane(Arc::clone(&shared), at, sink));
            tasks.spawn(read_lane(Arc::clone(&shared), at, source, assembler));
        }
        tasks.spawn(keep_house(Arc::clone(&shared), lease / 4));
        Self { shared, _tasks: tasks }
    }

    /// Calls on the wire: sent or about to be, and not answered.
    pub fn in_flight(&self) -> usize {
        let on_wire = |lane: &Lane| {
            let state = lane.state.lock();
            state
                .calls
                .slots
                .iter()
                .flat_map(|slot| &slot.call)
                .filter(|call| call.is_on_wire && !call.is_ping)
                .count()
        };
        self.shared.lanes.iter().map(on_wire).sum()
    }
}

impl Shared {
    fn now_ns(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.started).as_nanos() as u64
    }

    fn late(&self) -> VerbError {
        let silent_ns = self.now_ns(Instant::now()).saturating_sub(self.heard_ns.load(Ordering::Relaxed));
        VerbError::DeadlineExceeded { peer: Arc::clone(&self.peer), silent_ms: silent_ns / 1_000_000 }
    }

    fn check_over(&self) -> Result<(), VerbError> {
        if !self.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(self.over.lock().clone().expect("the reason is set before the flag"))
    }

    /// Waits for `cost` units of the window.
    async fn room(&self, cost: u32, deadline: Instant) -> Result<SemaphorePermit<'_>, VerbError> {
        if let Ok(permit) = self.window.try_acquire_many(cost) {
            return Ok(permit);
        }
        match tokio::time::timeout_at(deadline.into(), self.window.acquire_many(cost)).await {
            Ok(Ok(permit)) => Ok(permit),
            // The window closes when the session is over.
            Ok(Err(_)) => {
                Err(self.check_over().expect_err("a closed window belongs to a session that is over"))
            }
            Err(_) => Err(self.late()),
        }
    }

    #[inline]
    fn give_back(&self, units: usize) {
        if units > 0 {
            self.window.add_permits(units);
        }
    }

    /// One call: waits for room, puts the request into a lane's buffer, waits for the answer.
    #[inline]
    async fn call(
        &self,
        bytes: usize,
        expect: Expect,
        deadline: Instant,
        encode: impl FnOnce(&mut BytesMut, u32),
    ) -> Result<(Answer, FrameBytes), VerbError> {
        let lane = if bytes > LARGE_CALL_BYTES { self.lanes.last() } else { self.lanes.first() };
        self.begin(lane.expect("a session has a lane"), bytes, expect, deadline, encode).await?.await
    }

    #[inline]
    async fn begin<'a>(
        &'a self,
        lane: &'a Lane,
        bytes: usize,
        expect: Expect,
        deadline: Instant,
        encode: impl FnOnce(&mut BytesMut, u32),
    ) -> Result<Reply<'a>, VerbError> {
        self.check_over()?;
        let now = Instant::now();
        if now >= deadline {
            return Err(self.late());
        }
        let cost = cost(bytes);
        let permit = self.room(cost, deadline).await?;
        let deadline_ns = self.now_ns(deadline);
        let id = self.put(lane, expect, deadline_ns, cost, true, encode)?;
        permit.forget();
        self.spoke_ns.store(self.now_ns(now), Ordering::Relaxed);
        self.set_alarm(deadline_ns);
        Ok(Reply { shared: self, lane, id, is_taken: false })
    }

    /// Enters a call and its frame into a lane.
    #[inline]
    fn put(
        &self,
        lane: &Lane,
        expect: Expect,
        deadline_ns: u64,
        cost: u32,
        is_awaited: bool,
        encode: impl FnOnce(&mut BytesMut, u32),
    ) -> Result<u32, VerbError> {
        let mut state = lane.state.lock();
        if let Some(over) = &state.over {
            return Err(over.clone());
        }
        let id = state.calls.insert(Call {
            expect,
            deadline_ns,
            cost,
            request_bytes: 0,
            is_on_wire: true,
            is_awaited,
            is_ping: !is_awaited,
            waker: None,
            outcome: None,
        });
        if state.out.capacity() == 0 {
            state.out.reserve(OUT_BYTES);
        }
        let before = state.out.len();
        encode(&mut state.out, id);
        let request_bytes = (state.out.len() - before) as u32;
        state.calls.get(id).expect("just inserted").request_bytes = request_bytes;
        drop(state);
        if before == 0 {
            lane.has_output.notify_one();
        }
        Ok(id)
    }

    #[inline]
    fn set_alarm(&self, at_ns: u64) {
        if at_ns < self.alarm_ns.load(Ordering::Relaxed)
            && at_ns < self.alarm_ns.fetch_min(at_ns, Ordering::AcqRel)
        {
            self.alarm_moved.notify_one();
        }
    }

    /// Takes all frames that are whole.
    fn take_frames(
        &self,
        lane: &Lane,
        assembler: &mut Assembler,
        wakers: &mut Vec<Waker>,
    ) -> Result<(), FrameError> {
        let (mut freed, mut expired) = (0, None::<VerbError>);
        let mut state = lane.state.lock();
        let outcome = loop {
            match assembler.next_frame() {
                Ok(Some(frame)) if frame.kind == Kind::Message => {
                    if let Err(error) = self.take_message(frame) {
                        break Err(error);
                    }
                }
                Ok(Some(frame)) => match self.take_answer(&mut state.calls, frame, wakers, &mut expired) {
                    Ok(units) => freed += units,
                    Err(error) => break Err(error),
                },
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        drop(state);
        self.give_back(freed);
        for waker in wakers.drain(..) {
            waker.wake();
        }
        if let Some(expired) = expired {
            self.refuse_new_calls(&expired);
        }
        outcome
    }

    /// Gives an answer to its call. Returns the window units that are free again since nobody waits for it.
    #[inline]
    fn take_answer(
        &self,
        calls: &mut CallTable,
        frame: Frame,
        wakers: &mut Vec<Waker>,
        expired: &mut Option<VerbError>,
    ) -> Result<usize, FrameError> {
        let (kind, id) = (frame.kind, frame.id);
        let not_asked = FrameError::NotAsked { kind, id };
        let call = calls.get(id).filter(|call| call.is_on_wire).ok_or(not_asked)?;
        let reply_bytes = frame.wire_bytes();
        let answer = match (kind, call.expect) {
            (Kind::Data, Expect::Data { bytes }) if frame.body.len() == bytes => Ok(Answer::Data(frame.body)),
            (Kind::Data, Expect::Data { .. }) => {
                return Err(FrameError::BadBody { kind, field: "length" });
            }
            (Kind::Done, Expect::Done) => {
                frame::decode_empty(kind, &frame.body).map(|()| Ok(Answer::Done))?
            }
            (Kind::Word, Expect::Word) => Ok(Answer::Word(frame::decode_word(&frame.body)?)),
            (Kind::Flag, Expect::Flag) => Ok(Answer::Flag(frame::decode_flag(&frame.body)?)),
            (Kind::Refused, _) => Err(frame::decode_refused(&frame.body, &self.peer)?),
            _ => return Err(not_asked),
        };
        if let Err(error @ VerbError::LeaseExpired { .. }) = &answer {
            *expired = Some(error.clone());
        }
        call.is_on_wire = false;
        if call.is_ping {
            self.is_ping_out.store(false, Ordering::Relaxed);
        }
        if call.is_awaited && call.outcome.is_none() {
            let frames = FrameBytes { request: call.request_bytes, reply: reply_bytes };
            call.outcome = Some(answer.map(|answer| (answer, frames)));
            wakers.extend(call.waker.take());
        }
        Ok(calls.remove_if_done(id))
    }

    fn take_message(&self, frame: Frame) -> Result<(), FrameError> {
        let mut inbox = self.inbox.lock();
        inbox.bytes += frame.body.len() + MESSAGE_OVERHEAD;
        if inbox.bytes > MESSAGE_WINDOW {
            return Err(FrameError::Unexpected(Kind::Message));
        }
        inbox.messages.push_back(frame.body);
        drop(inbox);
        self.inbox_changed.notify_waiters();
        Ok(())
    }

    /// The oldest message, if there is one; makes room for more at the other end.
    fn pop_message(&self) -> Option<Bytes> {
        let mut inbox = self.inbox.lock();
        let message = inbox.messages.pop_front()?;
        let cost = message.len() + MESSAGE_OVERHEAD;
        inbox.bytes -= cost;
        inbox.taken += cost;
        // Half a window at a time, so that few messages cost one credit each and a full window is never stuck.
        let credit = (inbox.taken >= MESSAGE_WINDOW / 2 || inbox.messages.is_empty()).then(|| {
            let taken = inbox.taken;
            inbox.taken = 0;
            taken
        });
        drop(inbox);
        if let Some(credit) = credit {
            let lane = &self.lanes[0];
            frame::put_credit(&mut lane.state.lock().out, credit as u64);
            lane.has_output.notify_one();
        }
        Some(message)
    }

    /// No further call is taken: the lease is over. Those on the wire get answers of their own.
    fn refuse_new_calls(&self, why: &VerbError) {
        let mut over = self.over.lock();
        if over.is_none() {
            *over = Some(why.clone());
        }
        drop(over);
        self.is_over.store(true, Ordering::Release);
        for lane in &self.lanes {
            lane.state.lock().over.get_or_insert_with(|| why.clone());
        }
        self.window.close();
        self.inbox_changed.notify_waiters();
    }

    /// Ends the session: nothing more will be heard from the peer.
    fn end(&self, why: &VerbError) {
        self.refuse_new_calls(why);
        let mut wakers = Vec::new();
        for lane in &self.lanes {
            let mut state = lane.state.lock();
            state.out.clear();
            for id in state.calls.ids() {
                let call = state.calls.get(id).expect("ids of calls that are there");
                call.is_on_wire = false;
                if call.is_awaited && call.outcome.is_none() {
                    call.outcome = Some(Err(why.clone()));
                    wakers.extend(call.waker.take());
                }
                state.calls.remove_if_done(id);
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    fn lost(&self, why: String) -> VerbError {
        VerbError::ConnectionLost { peer: Arc::clone(&self.peer), why }
    }

    /// Ends calls whose deadline has passed; returns the next deadline.
    fn end_late_calls(&self, now_ns: u64) -> u64 {
        let (mut next, mut wakers) = (NEVER, Vec::new());
        for lane in &self.lanes {
            let mut state = lane.state.lock();
            for call in state.calls.slots.iter_mut().flat_map(|slot| &mut slot.call) {
                if !call.is_awaited || call.outcome.is_some() {
                    continue;
                }
                if call.deadline_ns <= now_ns {
                    call.outcome = Some(Err(self.late()));
                    wakers.extend(call.waker.take());
                } else {
                    next = next.min(call.deadline_ns);
                }
            }
        }
        wakers.into_iter().for_each(Waker::wake);
        next
    }

    fn ping(&self) {
        if !self.is_ping_out.swap(true, Ordering::Relaxed) {
            let ping = |out: &mut BytesMut, id| frame::put_empty(out, Kind::Ping, id);
            // An error here is the end of the session, which callers hear of.
            let _ = self.put(&self.lanes[0], Expect::Done, NEVER, 0, false, ping);
        }
    }
}

async fn write_lane(shared: Arc<Shared>, at: usize, mut sink: impl Sink) {
    let lane = &shared.lanes[at];
    loop {
        lane.has_output.notified().await;
        loop {
            let bytes = {
                let mut state = lane.state.lock();
                if state.out.is_empty() {
                    break;
                }
                state.out.split().freeze()
            };
            if let Err(why) = sink.send(bytes).await {
                shared.end(&shared.lost(why));
                return;
            }
        }
    }
}

async fn read_lane(shared: Arc<Shared>, at: usize, mut source: impl Source, mut assembler: Assembler) {
    let lane = &shared.lanes[at];
    let mut wakers = Vec::new();
    loop {
        // First what came behind the WELCOME.
        if let Err(error) = shared.take_frames(lane, &mut assembler, &mut wakers) {
            let what = error.to_string();
            (shared.close)(&what);
            shared.end(&VerbError::Protocol { peer: Arc::clone(&shared.peer), what });
            return;
        }
        match source.next().await {
            Ok(Some(chunk)) => {
                shared.heard_ns.store(shared.now_ns(Instant::now()), Ordering::Relaxed);
                assembler.push(chunk);
            }
            Ok(None) => return shared.end(&shared.lost("the memory node ended the stream".into())),
            Err(why) => return shared.end(&shared.lost(why)),
        }
    }
}

/// Ends late calls, and keeps the lease of an idle session.
async fn keep_house(shared: Arc<Shared>, ping_interval: Duration) {
    let interval_ns = (ping_interval.as_nanos() as u64).max(1);
    loop {
        // Whoever moves the alarm from here on is heard.
        shared.alarm_ns.store(NEVER, Ordering::Release);
        let now_ns = shared.now_ns(Instant::now());
        let next_call = shared.end_late_calls(now_ns);
        let mut next_ping = shared.spoke_ns.load(Ordering::Relaxed).saturating_add(interval_ns);
        if next_ping <= now_ns {
            shared.spoke_ns.store(now_ns, Ordering::Relaxed);
            shared.ping();
            next_ping = now_ns + interval_ns;
        }
        let alarm_ns = next_call
            .min(next_ping)
            .min(shared.alarm_ns.fetch_min(next_call.min(next_ping), Ordering::AcqRel));
        let alarm = shared.started + Duration::from_nanos(alarm_ns);
        tokio::select! {
            () = tokio::time::sleep_until(alarm.into()) => {}
            () = shared.alarm_moved.notified() => {}
        }
    }
}

impl Verbs for FramedVerbs {
    fn peer(&self) -> &Arc<str> {
        &self.shared.peer
    }

    fn session(&self) -> SessionId {
        self.shared.session
    }

    fn is_lost(&self) -> bool {
        self.shared.is_over.load(Ordering::Acquire)
    }

    async fn read(&self, batch: ReadBatch, deadline: Instant) -> Result<ReadReply, VerbError> {
        check_read_size(batch.groups(), batch.len())?;
        let bytes = batch.reply_bytes();
        // What the request takes at most, where its answer is smaller.
        let request_bytes = frame::HEADER_BYTES + 20 * batch.groups().len() + 8 * batch.len();
        let expect = Expect::Data { bytes };
        let encode = |out: &mut BytesMut, id| frame::put_read(out, id, &batch);
        match self.shared.call(bytes.max(request_bytes), expect, deadline, encode).await? {
            (Answer::Data(data), frames) => Ok(ReadReply { data, frames }),
            other => unreachable!("an answer was checked against its call: {other:?}"),
        }
    }

    async fn write(&self, batch: WriteBatch, deadline: Instant) -> Result<FrameBytes, VerbError> {
        check_write_size(batch.parts(), batch.data().len())?;
        let bytes = batch.data().len().max(24 * batch.len());
        let encode = |out: &mut BytesMut, id| frame::put_write(out, id, &batch);
        self.shared.call(bytes, Expect::Done, deadline, encode).await.map(|(_, frames)| frames)
    }

    async fn compare_swap(
        &self,
        word: WordAt,
        expected: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, VerbError> {
        let encode = |out: &mut BytesMut, id| frame::put_compare_swap(out, id, word, expected, new);
        self.shared.call(0, Expect::Word, deadline, encode).await.map(|(answer, _)| answer.word())
    }

    async fn fetch_add(&self, word: WordAt, add: u64, deadline: Instant) -> Result<u64, VerbError> {
        let encode = |out: &mut BytesMut, id| frame::put_fetch_add(out, id, word, add);
        self.shared.call(0, Expect::Word, deadline, encode).await.map(|(answer, _)| answer.word())
    }

    async fn session_alive(&self, session: SessionId, deadline: Instant) -> Result<bool, VerbError> {
        let encode = |out: &mut BytesMut, id| frame::put_alive(out, id, session);
        match self.shared.call(0, Expect::Flag, deadline, encode).await? {
            (Answer::Flag(is_alive), _) => Ok(is_alive),
            other => unreachable!("an answer was checked against its call: {other:?}"),
        }
    }

    async fn send(&self, message: Bytes, deadline: Instant) -> Result<(), VerbError> {
        check_message_size(message.len())?;
        let turn = match self.shared.sends.try_lock() {
            Ok(turn) => turn,
            Err(_) => match tokio::time::timeout_at(deadline.into(), self.shared.sends.lock()).await {
                Ok(turn) => turn,
                Err(_) => return Err(self.shared.late()),
            },
        };
        // All SENDs take one lane, whatever their size: that is what keeps their order.
        let encode = |out: &mut BytesMut, id| frame::put_message(out, Kind::Send, id, &message);
        let lane = &self.shared.lanes[0];
        let sent = self.shared.begin(lane, message.len(), Expect::Done, deadline, encode).await?;
        drop(turn);
        sent.await.map(drop)
    }

    async fn recv(&self, deadline: Instant) -> Result<Bytes, VerbError> {
        loop {
            let changed = self.shared.inbox_changed.notified();
            if let Some(message) = self.shared.pop_message() {
                return Ok(message);
            }
            self.shared.check_over()?;
            if tokio::time::timeout_at(deadline.into(), changed).await.is_err() {
                return Err(self.shared.late());
            }
        }
    }
}

impl Answer {
    fn word(self) -> u64 {
        match self {
            Self::Word(word) => word,
            other => unreachable!("an answer was checked against its call: {other:?}"),
        }
    }
}
