//! The memory node's end: executes what comes on a lane.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;

use super::super::frame::{self, Assembler, Frame, FrameError, HEADER_BYTES, Kind, ReadRequest};
use super::super::host::{Host, OpenError, Session};
use super::super::{MESSAGE_BYTES_MAX, WritePart};
use super::{MESSAGE_OVERHEAD, MESSAGE_WINDOW, Sink, Source};
use crate::ids::Incarnation;
use crate::wire::PROTOCOL_VERSION;

/// Answers are sent when the requests at hand are done, or when this many bytes have gathered.
const FLUSH_BYTES: usize = 256 << 10;
/// Size of the buffers that answers are built in.
const ARENA_BYTES: usize = 512 << 10;
/// Such buffers that one lane keeps for use again.
const ARENAS_MAX: usize = 8;

/// Why a lane was given up.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LaneError {
    /// The peer broke the protocol: its connection must be closed.
    #[error("the peer sent {0}")]
    Frame(#[from] FrameError),
    /// The transport broke.
    #[error("{0}")]
    Lost(String),
}

/// Why a greeting was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HelloError {
    /// It is none, or did not come.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// Another version.
    #[error("the caller speaks version {0} of the verbs, this memory node version {PROTOCOL_VERSION}")]
    Version(u32),
    /// Another memory node is wanted.
    #[error("the caller wants memory node '{wanted}', this is '{here}'")]
    WrongNode {
        /// Who is wanted.
        wanted: String,
        /// Who is here.
        here: Arc<str>,
    },
    /// Another life of this memory node is wanted.
    #[error("the caller wants incarnation {wanted} of '{mn}', which has been restarted: this is {here}")]
    WrongIncarnation {
        /// Name.
        mn: Arc<str>,
        /// Life that is wanted.
        wanted: Incarnation,
        /// Life that is here.
        here: Incarnation,
    },
    /// No session can be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// Takes HELLO on a connection's first lane, opens a session for `client`, and answers WELCOME.
///
/// # Errors
/// If the caller greets wrongly or wants somebody else; no session is open then.
pub async fn take_hello(
    host: &Host,
    client: &str,
    sink: &mut impl Sink,
    source: &mut impl Source,
    assembler: &mut Assembler,
) -> Result<Arc<Session>, HelloError> {
    let frame = loop {
        match assembler.next_frame().map_err(LaneError::from)? {
            Some(frame) => break frame,
            None => match source.next().await.map_err(LaneError::Lost)? {
                Some(chunk) => assembler.push(chunk),
                None => return Err(LaneError::Frame(FrameError::CutShort).into()),
            },
        }
    };
    if frame.kind != Kind::Hello {
        return Err(LaneError::Frame(FrameError::Unexpected(frame.kind)).into());
    }
    let hello = frame::decode_hello(&frame.body).map_err(LaneError::from)?;
    if hello.version != PROTOCOL_VERSION {
        return Err(HelloError::Version(hello.version));
    }
    if *hello.mn != **host.name() {
        return Err(HelloError::WrongNode { wanted: hello.mn, here: Arc::clone(host.name()) });
    }
    if hello.incarnation != host.incarnation() {
        let (wanted, here) = (hello.incarnation, host.incarnation());
        return Err(HelloError::WrongIncarnation { mn: Arc::clone(host.name()), wanted, here });
    }
    let session = host.open_session(client)?;
    let lease_ms = u32::try_from(host.lease().as_millis()).unwrap_or(u32::MAX).max(1);
    let mut out = BytesMut::new();
    frame::put_welcome(&mut out, session.id(), lease_ms);
    match sink.send(out.freeze()).await {
        Ok(()) => Ok(session),
        Err(why) => {
            host.end_session(&session);
            Err(LaneError::Lost(why).into())
        }
    }
}

/// Executes the verbs that come on one lane of `session` until the peer ends it. The first lane also carries
/// messages to the peer.
///
/// # Errors
/// If the lane breaks or the peer breaks the protocol.
pub async fn serve_lane(
    host: Arc<Host>,
    session: Arc<Session>,
    is_first: bool,
    mut sink: impl Sink,
    mut source: impl Source,
    assembler: Assembler,
) -> Result<(), LaneError> {
    let mut lane = LaneState {
        host: &host,
        session: &session,
        assembler,
        out: Arena::default(),
        request: ReadRequest::default(),
        parts: Vec::new(),
        messages_out: if is_first { Some(0) } else { None },
    };
    loop {
        // While more is there to do, answers gather.
        while let Some(frame) = lane.assembler.next_frame()? {
            if host.is_paused() {
                lane.flush(&mut sink).await?;
                host.running().await;
            }
            let room = lane.room_for(&frame)?;
            if !lane.out.has_room(room) {
                lane.flush(&mut sink).await?;
                lane.out.make_room(room);
            }
            lane.execute(frame)?;
            if lane.out.bytes.len() >= FLUSH_BYTES {
                lane.flush(&mut sink).await?;
            }
        }
        let next = source.next().now_or_never();
        let chunk = match next {
            Some(chunk) => chunk,
            None => {
                lane.flush(&mut sink).await?;
                tokio::select! {
                    biased;
                    chunk = source.next() => chunk,
                    () = session.message_ready(), if lane.may_send_message() => {
                        lane.take_message();
                        continue;
                    }
                }
            }
        };
        match chunk.map_err(LaneError::Lost)? {
            Some(chunk) => lane.assembler.push(chunk),
            None if lane.assembler.is_between_frames() => return lane.flush(&mut sink).await,
            None => return Err(FrameError::CutShort.into()),
        }
    }
}

struct LaneState<'a> {
    host: &'a Host,
    session: &'a Arc<Session>,
    assembler: Assembler,
    out: Arena,
    request: ReadRequest,
    parts: Vec<WritePart>,
    /// Cost of messages sent and not credited; `None` where the lane carries none.
    messages_out: Option<usize>,
}

impl LaneState<'_> {
    async fn flush(&mut self, sink: &mut impl Sink) -> Result<(), LaneError> {
        if self.out.bytes.is_empty() {
            return Ok(());
        }
        sink.send(self.out.take()).await.map_err(LaneError::Lost)
    }

    /// Bytes that the answer to `frame` may take; decodes a READ.
    fn room_for(&mut self, frame: &Frame) -> Result<usize, FrameError> {
        if frame.kind == Kind::Read {
            self.request.decode(&frame.body)?;
            return Ok(HEADER_BYTES + self.request.reply_bytes.max(64));
        }
        Ok(HEADER_BYTES + 64)
    }

    /// Executes a frame (a READ is decoded already) and appends the answer.
    fn execute(&mut self, frame: Frame) -> Result<(), FrameError> {
        let (host, session, id, out) = (self.host, self.session, frame.id, &mut self.out.bytes);
        let start = out.len();
        let done = match frame.kind {
            Kind::Read => {
                frame::put_head(out, Kind::Data, id, self.request.reply_bytes);
                host.read(session, &self.request.groups, &self.request.offsets, out)
            }
            Kind::Write => {
                let data = frame::decode_write(&frame.body, &mut self.parts)?;
                host.write(session, &self.parts, data).map(|()| frame::put_empty(out, Kind::Done, id))
            }
            Kind::CompareSwap => {
                let (word, expected, new) = frame::decode_compare_swap(&frame.body)?;
                host.compare_swap(session, word, expected, new).map(|before| frame::put_word(out, id, before))
            }
            Kind::FetchAdd => {
                let (word, add) = frame::decode_fetch_add(&frame.body)?;
                host.fetch_add(session, word, add).map(|before| frame::put_word(out, id, before))
            }
            Kind::Alive => {
                let of = frame::decode_alive(&frame.body)?;
                host.session_alive(session, of).map(|is_alive| frame::put_flag(out, id, is_alive))
            }
            Kind::Send => host.message(session, frame.body).map(|()| frame::put_empty(out, Kind::Done, id)),
            Kind::Ping => {
                frame::decode_empty(Kind::Ping, &frame.body)?;
                host.renew(session).map(|()| frame::put_empty(out, Kind::Done, id))
            }
            Kind::Credit => return self.take_credit(frame::decode_credit(&frame.body)?),
            other => return Err(FrameError::Unexpected(other)),
        };
        if let Err(refusal) = done {
            out.truncate(start);
            frame::put_refused(out, id, &refusal);
        }
        Ok(())
    }

    fn take_credit(&mut self, bytes: u64) -> Result<(), FrameError> {
        let out = self.messages_out.as_mut().ok_or(FrameError::Unexpected(Kind::Credit))?;
        let left = usize::try_from(bytes).ok().and_then(|bytes| out.checked_sub(bytes));
        *out = left.ok_or(FrameError::BadBody { kind: Kind::Credit, field: "bytes" })?;
        Ok(())
    }

    /// Whether the next message, however large, fits into what the peer has room for.
    fn may_send_message(&self) -> bool {
        let most = MESSAGE_BYTES_MAX + MESSAGE_OVERHEAD;
        self.messages_out.is_some_and(|out| out + most <= MESSAGE_WINDOW)
    }

    fn take_message(&mut self) {
        if let Some((message, out)) = self.session.take_message().zip(self.messages_out.as_mut()) {
            *out += message.len() + MESSAGE_OVERHEAD;
            frame::put_message(&mut self.out.bytes, Kind::Message, 0, &message);
        }
    }
}

/// Buffers that answers are built in, used again once the transport has let go of them: fresh large allocations
/// would cost a page fault for every 4 KiB of answers.
#[derive(Default)]
struct Arena {
    /// What is being built, with the rest of its buffer behind it.
    bytes: BytesMut,
    /// Whether that buffer is of the size that is kept.
    is_kept: bool,
    used: VecDeque<BytesMut>,
}

impl Arena {
    fn has_room(&self, bytes: usize) -> bool {
        self.bytes.capacity() - self.bytes.len() >= bytes
    }

    /// Makes room for `bytes` more; what was built before has been taken.
    fn make_room(&mut self, bytes: usize) {
        debug_assert!(self.bytes.is_empty(), "a buffer is left between answers");
        let full = std::mem::take(&mut self.bytes);
        if self.is_kept && self.used.len() < ARENAS_MAX {
            self.used.push_back(full);
        }
        self.is_kept = bytes <= ARENA_BYTES;
        self.bytes =
            match self.used.iter_mut().position(|arena| self.is_kept && arena.try_reclaim(ARENA_BYTES)) {
                Some(at) => self.used.swap_remove_front(at).expect("a position inside"),
                None => BytesMut::with_capacity(bytes.max(ARENA_BYTES)),
            };
    }

    fn take(&mut self) -> Bytes {
        self.bytes.split().freeze()
    }
}
