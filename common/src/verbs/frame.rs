//! The bytes of verbs on a lane: frames, one request or one answer each. Knows no socket and no clock.
//!
//! ```text
//! frame     length u32 (of what follows) │ kind u8 │ request id u32 │ body
//!
//! to the memory node                            from it
//!   HELLO    magic, version, whom, who            WELCOME  session u32, lease ms u32
//!   READ     groups to the end of the frame       DATA     items' bytes, back to back
//!   WRITE    count varint, parts, bytes           DONE
//!   COMPARE_SWAP, FETCH_ADD  place, words         WORD     the word before
//!   ALIVE    session u32                          FLAG     0 or 1
//!   SEND     message                              REFUSED  code u8, fields
//!   PING                                          MESSAGE  message (id 0)
//!   CREDIT   bytes of messages taken, varint (id 0, no answer)
//!
//! READ group     region u16 │ length × 2 + is wide, varint │ epoch varint │ count varint │ count × item
//!   item           offset / 8 as u32; wide (above 32 GiB, or odd): offset as u64
//! WRITE part     place │ length varint
//! place          region u16 │ epoch varint │ offset varint
//! ```
//!
//! All integers are little-endian; a varint is LEB128, at most 10 bytes. An item of a gather thus costs 4 bytes, a
//! group about 12, a frame 9.
//!
//! Invariant: whatever bytes come in, decoding ends in a value within the limits of [`super`] or in a
//! [`FrameError`]; no length is trusted before it is checked against its kind's bound.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::collections::VecDeque;
use std::sync::Arc;

use super::{
    BATCH_BYTES_MAX, BATCH_ITEMS_MAX, MESSAGE_BYTES_MAX, ReadBatch, ReadGroup, VerbError, WordAt, WriteBatch,
    WritePart,
};
use crate::ids::{Epoch, Incarnation, RegionId, RemotePtr, SessionId};
use crate::wire::PROTOCOL_VERSION;

/// Bytes in front of a frame's body.
pub const HEADER_BYTES: usize = 9;
/// First word of a HELLO.
const MAGIC: u64 = u64::from_le_bytes(*b"SHINEVRB");
/// Most bytes of one READ item with a group of its own.
const READ_ITEM_BYTES_MAX: usize = 2 + 5 + 10 + 3 + 8;
/// Most bytes of one WRITE part, its data aside.
const WRITE_PART_BYTES_MAX: usize = 2 + 10 + 7 + 4;
/// Chunks of one frame that are kept as they come; of more, the last half of this number is copied together if they are
/// small.
const CHUNKS_MAX: usize = 64;
/// Bytes of a chunk, on average, below which they are: a chunk may keep a whole datagram in memory.
const CHUNK_BYTES_MIN: usize = 512;
/// Most bytes of a text in a frame.
const TEXT_BYTES_MAX: usize = 1024;

/// What a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Opens a session.
    Hello = 1,
    /// Gather.
    Read = 2,
    /// Scatter.
    Write = 3,
    /// COMPARE_SWAP.
    CompareSwap = 4,
    /// FETCH_ADD.
    FetchAdd = 5,
    /// Asks whether a session's lease runs.
    Alive = 6,
    /// Message to the memory node's processor.
    Send = 7,
    /// Renews the lease and does nothing.
    Ping = 8,
    /// Makes room for further MESSAGEs.
    Credit = 9,
    /// Answers HELLO.
    Welcome = 65,
    /// Answers READ.
    Data = 66,
    /// Answers WRITE, SEND and PING.
    Done = 67,
    /// Answers COMPARE_SWAP and FETCH_ADD.
    Word = 68,
    /// Answers ALIVE.
    Flag = 69,
    /// Answers anything with a refusal.
    Refused = 70,
    /// Message from the memory node.
    Message = 71,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Hello,
            2 => Self::Read,
            3 => Self::Write,
            4 => Self::CompareSwap,
            5 => Self::FetchAdd,
            6 => Self::Alive,
            7 => Self::Send,
            8 => Self::Ping,
            9 => Self::Credit,
            65 => Self::Welcome,
            66 => Self::Data,
            67 => Self::Done,
            68 => Self::Word,
            69 => Self::Flag,
            70 => Self::Refused,
            71 => Self::Message,
            _ => return None,
        })
    }

    /// Longest body of a frame of this kind.
    fn body_max(self) -> usize {
        match self {
            Self::Read => BATCH_ITEMS_MAX * READ_ITEM_BYTES_MAX,
            Self::Write => 3 + BATCH_ITEMS_MAX * WRITE_PART_BYTES_MAX + BATCH_BYTES_MAX,
            Self::Data => BATCH_BYTES_MAX,
            Self::Send | Self::Message => MESSAGE_BYTES_MAX,
            Self::Hello | Self::Refused => 64 + TEXT_BYTES_MAX,
            _ => 64,
        }
    }
}

/// Bytes that are not a frame, or not one that belongs here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FrameError {
    /// A kind that this version does not know.
    #[error("a frame of unknown kind {0}")]
    UnknownKind(u8),
    /// Shorter than its own head, or longer than its kind may be.
    #[error("a frame of {bytes} bytes, of kind {kind}")]
    BadLength {
        /// Length that the frame claims.
        bytes: usize,
        /// Its kind.
        kind: u8,
    },
    /// The body ends too early, goes on too long, or has a value that is not allowed.
    #[error("a {kind:?} frame with a bad {field}")]
    BadBody {
        /// Kind of the frame.
        kind: Kind,
        /// What is bad.
        field: &'static str,
    },
    /// A frame that has no business on this side, or at this time.
    #[error("an unexpected {0:?} frame")]
    Unexpected(Kind),
    /// An answer to a request that is not there.
    #[error("a {kind:?} frame as answer to request {id:#x}, which does not wait for one")]
    NotAsked {
        /// Kind of the frame.
        kind: Kind,
        /// Request that it names.
        id: u32,
    },
    /// More streams than a session has lanes.
    #[error("more lanes than a session may have")]
    TooManyLanes,
    /// The other side ended a lane in the middle of a frame.
    #[error("a stream that ends within a frame")]
    CutShort,
}

/// A whole frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// Which request it makes or answers.
    pub id: u32,
    /// What follows.
    pub body: Bytes,
}

impl Frame {
    /// Bytes that it took on the wire.
    pub fn wire_bytes(&self) -> u32 {
        (HEADER_BYTES + self.body.len()) as u32
    }
}

/// Makes frames of a stream's chunks. A frame that lies in one chunk is lent from it; another is copied together
/// once.
#[derive(Debug, Default)]
pub struct Assembler {
    chunks: VecDeque<Bytes>,
    bytes: usize,
    /// Kind, id and body length of the frame under way, once its head is there and checked.
    head: Option<(Kind, u32, usize)>,
}

impl Assembler {
    /// Takes the next bytes of the stream.
    pub fn push(&mut self, chunk: Bytes) {
        if !chunk.is_empty() {
            self.bytes += chunk.len();
            self.chunks.push_back(chunk);
        }
    }

    /// The next whole frame, if all of it has come.
    ///
    /// # Errors
    /// If the bytes are no frame. The stream cannot be used further.
    #[inline]
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let (kind, id, len) = match self.head {
            Some(head) => head,
            None if self.bytes < HEADER_BYTES => return Ok(None),
            None => {
                let head = self.take_head()?;
                *self.head.insert(head)
            }
        };
        if self.bytes < len {
            self.compact();
            return Ok(None);
        }
        self.head = None;
        Ok(Some(Frame { kind, id, body: self.take(len) }))
    }

    /// Whether the stream may end here.
    pub fn is_between_frames(&self) -> bool {
        self.bytes == 0 && self.head.is_none()
    }

    fn take_head(&mut self) -> Result<(Kind, u32, usize), FrameError> {
        let mut head = self.take(HEADER_BYTES);
        let bytes = head.get_u32_le() as usize;
        let byte = head.get_u8();
        let kind = Kind::from_byte(byte).ok_or(FrameError::UnknownKind(byte))?;
        let len = bytes.checked_sub(HEADER_BYTES - 4).filter(|len| *len <= kind.body_max());
        let len = len.ok_or(FrameError::BadLength { bytes, kind: byte })?;
        Ok((kind, head.get_u32_le(), len))
    }

    /// Lets go of datagrams that a peer has sent for the sake of a few bytes each.
    fn compact(&mut self) {
        if self.chunks.len() <= CHUNKS_MAX {
            return;
        }
        // From the end: what was copied together before is not copied again before as much has come.
        let first = self.chunks.len() - CHUNKS_MAX / 2;
        let bytes: usize = self.chunks.range(first..).map(Bytes::len).sum();
        if bytes < CHUNKS_MAX / 2 * CHUNK_BYTES_MIN {
            let mut whole = BytesMut::with_capacity(bytes);
            self.chunks.drain(first..).for_each(|chunk| whole.put_slice(&chunk));
            self.chunks.push_back(whole.freeze());
        }
    }

    /// The next `len` bytes, which have come.
    #[inline]
    fn take(&mut self, len: usize) -> Bytes {
        self.bytes -= len;
        match self.chunks.front_mut() {
            Some(front) if front.len() > len => front.split_to(len),
            Some(front) if front.len() == len => self.chunks.pop_front().expect("there is a front"),
            _ => self.take_across(len),
        }
    }

    fn take_across(&mut self, len: usize) -> Bytes {
        let mut whole = BytesMut::with_capacity(len);
        while whole.len() < len {
            let front = self.chunks.front_mut().expect("the bytes have come");
            let part = front.len().min(len - whole.len());
            whole.put_slice(&front[..part]);
            front.advance(part);
            if front.is_empty() {
                self.chunks.pop_front();
            }
        }
        whole.freeze()
    }
}

// -------------------------------------------------------------------------------------------------- encoding

/// Writes one frame: its head, then what `body` appends.
#[inline]
fn put_frame(out: &mut BytesMut, kind: Kind, id: u32, body: impl FnOnce(&mut BytesMut)) {
    let start = out.len();
    out.reserve(HEADER_BYTES + 64);
    put_head(out, kind, id, 0);
    body(out);
    let len = (out.len() - start - 4) as u32;
    debug_assert!(len as usize - 5 <= kind.body_max(), "{kind:?} of {len} bytes");
    out[start..start + 4].copy_from_slice(&len.to_le_bytes());
}

/// Writes the head of a frame whose body of `len` bytes follows.
#[inline]
pub fn put_head(out: &mut BytesMut, kind: Kind, id: u32, len: usize) {
    out.put_u32_le((HEADER_BYTES - 4 + len) as u32);
    out.put_u8(kind as u8);
    out.put_u32_le(id);
}

/// Writes a frame without a body.
pub fn put_empty(out: &mut BytesMut, kind: Kind, id: u32) {
    put_head(out, kind, id, 0);
}

/// Writes SEND or MESSAGE.
pub fn put_message(out: &mut BytesMut, kind: Kind, id: u32, message: &[u8]) {
    out.reserve(HEADER_BYTES + message.len());
    put_head(out, kind, id, message.len());
    out.put_slice(message);
}

/// Writes WORD.
pub fn put_word(out: &mut BytesMut, id: u32, word: u64) {
    put_head(out, Kind::Word, id, 8);
    out.put_u64_le(word);
}

/// Writes FLAG.
pub fn put_flag(out: &mut BytesMut, id: u32, flag: bool) {
    put_head(out, Kind::Flag, id, 1);
    out.put_u8(flag.into());
}

/// Writes ALIVE.
pub fn put_alive(out: &mut BytesMut, id: u32, session: SessionId) {
    put_head(out, Kind::Alive, id, 4);
    out.put_u32_le(session.0);
}

/// Writes CREDIT.
pub fn put_credit(out: &mut BytesMut, bytes: u64) {
    put_frame(out, Kind::Credit, 0, |out| put_varint(out, bytes));
}

/// Writes READ.
pub fn put_read(out: &mut BytesMut, id: u32, batch: &ReadBatch) {
    put_frame(out, Kind::Read, id, |out| {
        let mut offsets = batch.offsets();
        for group in batch.groups() {
            let (of_group, rest) = offsets.split_at(group.count as usize);
            offsets = rest;
            let is_wide = of_group.iter().any(|offset| offset % 8 != 0 || offset / 8 > u64::from(u32::MAX));
            out.reserve(READ_ITEM_BYTES_MAX + of_group.len() * if is_wide { 8 } else { 4 });
            out.put_u16_le(group.region.0);
            put_varint(out, u64::from(group.len) << 1 | u64::from(is_wide));
            put_varint(out, group.epoch.0);
            put_varint(out, u64::from(group.count));
            if is_wide {
                of_group.iter().for_each(|offset| out.put_u64_le(*offset));
            } else {
                of_group.iter().for_each(|offset| out.put_u32_le((offset / 8) as u32));
            }
        }
    });
}

/// Writes WRITE.
pub fn put_write(out: &mut BytesMut, id: u32, batch: &WriteBatch) {
    put_frame(out, Kind::Write, id, |out| {
        out.reserve(10 + batch.len() * WRITE_PART_BYTES_MAX + batch.data().len());
        put_varint(out, batch.len() as u64);
        for part in batch.parts() {
            put_place(out, WordAt { at: part.at, epoch: part.epoch });
            put_varint(out, u64::from(part.len));
        }
        out.put_slice(batch.data());
    });
}

/// Writes COMPARE_SWAP.
pub fn put_compare_swap(out: &mut BytesMut, id: u32, word: WordAt, expected: u64, new: u64) {
    put_frame(out, Kind::CompareSwap, id, |out| {
        put_place(out, word);
        out.put_u64_le(expected);
        out.put_u64_le(new);
    });
}

/// Writes FETCH_ADD.
pub fn put_fetch_add(out: &mut BytesMut, id: u32, word: WordAt, add: u64) {
    put_frame(out, Kind::FetchAdd, id, |out| {
        put_place(out, word);
        out.put_u64_le(add);
    });
}

/// What a compute node says first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Version of the protocol that it speaks.
    pub version: u32,
    /// Life of the memory node that it wants.
    pub incarnation: Incarnation,
    /// Name of the memory node that it wants.
    pub mn: String,
}

/// Writes HELLO.
///
/// # Panics
/// If the name is longer than any that a certificate carries.
pub fn put_hello(out: &mut BytesMut, hello: &Hello) {
    assert!(hello.mn.len() <= TEXT_BYTES_MAX, "names of members are short");
    put_frame(out, Kind::Hello, 0, |out| {
        out.put_u64_le(MAGIC);
        out.put_u32_le(hello.version);
        out.put_u64_le(hello.incarnation.0);
        out.put_slice(hello.mn.as_bytes());
    });
}

/// Writes WELCOME.
pub fn put_welcome(out: &mut BytesMut, session: SessionId, lease_ms: u32) {
    put_frame(out, Kind::Welcome, 0, |out| {
        out.put_u32_le(session.0);
        out.put_u32_le(lease_ms);
    });
}

/// Writes REFUSED.
///
/// # Panics
/// If the error is none that a memory node answers with.
pub fn put_refused(out: &mut BytesMut, id: u32, refusal: &VerbError) {
    put_frame(out, Kind::Refused, id, |out| match refusal {
        VerbError::StaleEpoch { region, named, current } => {
            put_epochs(out, 1, *region, *named, *current);
        }
        VerbError::EpochAhead { region, named, current } => {
            put_epochs(out, 2, *region, *named, *current);
        }
        VerbError::RegionLost { region } => {
            out.put_u8(3);
            out.put_u16_le(region.0);
        }
        VerbError::NoSuchRegion { region } => {
            out.put_u8(4);
            out.put_u16_le(region.0);
        }
        VerbError::OutOfBounds { at, len, region_bytes } => {
            out.put_u8(5);
            out.put_u64_le(at.to_word());
            out.put_u64_le(*len);
            out.put_u64_le(*region_bytes);
        }
        VerbError::Misaligned { at, len } => {
            out.put_u8(6);
            out.put_u64_le(at.to_word());
            out.put_u64_le(*len);
        }
        VerbError::LeaseExpired { .. } => out.put_u8(7),
        VerbError::MessageRefused { why, .. } => {
            out.put_u8(8);
            out.put_slice(clip(why).as_bytes());
        }
        // Sizes are checked by the decoder; losses and deadlines are for the caller's side to find.
        other => unreachable!("a host does not answer with: {other}"),
    });
}

fn put_epochs(out: &mut BytesMut, code: u8, region: RegionId, named: Epoch, current: Epoch) {
    out.put_u8(code);
    out.put_u16_le(region.0);
    out.put_u64_le(named.0);
    out.put_u64_le(current.0);
}

fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

fn put_place(out: &mut BytesMut, word: WordAt) {
    out.put_u16_le(word.at.region().0);
    put_varint(out, word.epoch.0);
    put_varint(out, word.at.offset());
}

fn put_varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

// -------------------------------------------------------------------------------------------------- decoding

/// Reads a body from its front.
struct Reader<'a> {
    kind: Kind,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(kind: Kind, rest: &'a [u8]) -> Self {
        Self { kind, rest }
    }

    fn bad(&self, field: &'static str) -> FrameError {
        FrameError::BadBody { kind: self.kind, field }
    }

    #[inline]
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], FrameError> {
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.bad(field))?;
        self.rest = rest;
        Ok(*array)
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, FrameError> {
        self.array::<1>(field).map(|[byte]| byte)
    }

    fn u16(&mut self, field: &'static str) -> Result<u16, FrameError> {
        self.array(field).map(u16::from_le_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, FrameError> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, FrameError> {
        self.array(field).map(u64::from_le_bytes)
    }

    #[inline]
    fn varint(&mut self, field: &'static str) -> Result<u64, FrameError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8(field)?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return Err(self.bad(field));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.bad(field))
    }

    fn varint_to(&mut self, max: u64, field: &'static str) -> Result<u64, FrameError> {
        self.varint(field).and_then(|value| if value <= max { Ok(value) } else { Err(self.bad(field)) })
    }

    fn place(&mut self) -> Result<WordAt, FrameError> {
        let region = RegionId(self.u16("region")?);
        let epoch = Epoch(self.varint("epoch")?);
        let offset = self.varint_to(RemotePtr::OFFSET_MAX, "offset")?;
        Ok(WordAt { at: RemotePtr::new(region, offset), epoch })
    }

    fn take(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], FrameError> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or_else(|| self.bad(field))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn end(self) -> Result<(), FrameError> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.bad("end")) }
    }
}

/// A decoded gather; kept from one request to the next for its capacity.
#[derive(Debug, Default)]
pub struct ReadRequest {
    /// Groups in order.
    pub groups: Vec<ReadGroup>,
    /// Offsets of all items in order.
    pub offsets: Vec<u64>,
    /// Bytes of the answer's data.
    pub reply_bytes: usize,
}

impl ReadRequest {
    /// Decodes the body of a READ over what was there before.
    ///
    /// # Errors
    /// If the body is not a gather within the limits.
    pub fn decode(&mut self, body: &[u8]) -> Result<(), FrameError> {
        self.groups.clear();
        self.offsets.clear();
        self.reply_bytes = 0;
        let mut reader = Reader::new(Kind::Read, body);
        while !reader.rest.is_empty() {
            let region = RegionId(reader.u16("region")?);
            let len_and_form = reader.varint_to(u64::from(u32::MAX) << 1 | 1, "length")?;
            let (len, is_wide) = ((len_and_form >> 1) as u32, len_and_form & 1 == 1);
            let epoch = Epoch(reader.varint("epoch")?);
            let room = (BATCH_ITEMS_MAX - self.offsets.len()) as u64;
            let count = reader.varint_to(room, "number of items")?;
            let bytes = u64::from(len) * count;
            if count == 0 || bytes > (BATCH_BYTES_MAX - self.reply_bytes) as u64 {
                return Err(reader.bad(if count == 0 { "number of items" } else { "number of bytes" }));
            }
            if is_wide {
                let (items, _) = reader.take(8 * count as usize, "items")?.as_chunks::<8>();
                for item in items {
                    let offset = u64::from_le_bytes(*item);
                    if offset > RemotePtr::OFFSET_MAX {
                        return Err(reader.bad("offset"));
                    }
                    self.offsets.push(offset);
                }
            } else {
                let (items, _) = reader.take(4 * count as usize, "items")?.as_chunks::<4>();
                self.offsets.extend(items.iter().map(|item| 8 * u64::from(u32::from_le_bytes(*item))));
            }
            self.groups.push(ReadGroup { region, epoch, len, count: count as u32 });
            self.reply_bytes += bytes as usize;
        }
        Ok(())
    }
}

/// A decoded WRITE: its parts go to `parts`, its data is what remains of the body.
///
/// # Errors
/// If the body is not a WRITE within the limits.
pub fn decode_write<'a>(body: &'a [u8], parts: &mut Vec<WritePart>) -> Result<&'a [u8], FrameError> {
    parts.clear();
    let mut reader = Reader::new(Kind::Write, body);
    let count = reader.varint_to(BATCH_ITEMS_MAX as u64, "number of parts")?;
    let mut bytes = 0;
    for _ in 0..count {
        let WordAt { at, epoch } = reader.place()?;
        let len = reader.varint_to((BATCH_BYTES_MAX - bytes) as u64, "length")? as u32;
        bytes += len as usize;
        parts.push(WritePart { at, epoch, len });
    }
    let data = reader.take(bytes, "data")?;
    reader.end()?;
    Ok(data)
}

/// Decodes COMPARE_SWAP: the word, what is expected, what shall be.
///
/// # Errors
/// If the body is none.
pub fn decode_compare_swap(body: &[u8]) -> Result<(WordAt, u64, u64), FrameError> {
    let mut reader = Reader::new(Kind::CompareSwap, body);
    let decoded = (reader.place()?, reader.u64("word")?, reader.u64("word")?);
    reader.end().map(|()| decoded)
}

/// Decodes FETCH_ADD: the word, and what to add.
///
/// # Errors
/// If the body is none.
pub fn decode_fetch_add(body: &[u8]) -> Result<(WordAt, u64), FrameError> {
    let mut reader = Reader::new(Kind::FetchAdd, body);
    let decoded = (reader.place()?, reader.u64("word")?);
    reader.end().map(|()| decoded)
}

/// Decodes ALIVE.
///
/// # Errors
/// If the body is none.
pub fn decode_alive(body: &[u8]) -> Result<SessionId, FrameError> {
    let mut reader = Reader::new(Kind::Alive, body);
    let session = SessionId(reader.u32("session")?);
    reader.end().map(|()| session)
}

/// Decodes CREDIT.
///
/// # Errors
/// If the body is none.
pub fn decode_credit(body: &[u8]) -> Result<u64, FrameError> {
    let mut reader = Reader::new(Kind::Credit, body);
    let bytes = reader.varint("bytes")?;
    reader.end().map(|()| bytes)
}

/// Checks that a body is empty.
///
/// # Errors
/// If it is not.
pub fn decode_empty(kind: Kind, body: &[u8]) -> Result<(), FrameError> {
    Reader::new(kind, body).end()
}

/// Decodes WORD.
///
/// # Errors
/// If the body is none.
pub fn decode_word(body: &[u8]) -> Result<u64, FrameError> {
    let mut reader = Reader::new(Kind::Word, body);
    let word = reader.u64("word")?;
    reader.end().map(|()| word)
}

/// Decodes FLAG.
///
/// # Errors
/// If the body is none.
pub fn decode_flag(body: &[u8]) -> Result<bool, FrameError> {
    let mut reader = Reader::new(Kind::Flag, body);
    let flag = match reader.u8("flag")? {
        0 => false,
        1 => true,
        _ => return Err(reader.bad("flag")),
    };
    reader.end().map(|()| flag)
}

/// Decodes HELLO. The version is for the caller to judge: whatever follows it may differ in another.
///
/// # Errors
/// If the body is none.
pub fn decode_hello(body: &[u8]) -> Result<Hello, FrameError> {
    let mut reader = Reader::new(Kind::Hello, body);
    if reader.u64("magic")? != MAGIC {
        return Err(reader.bad("magic"));
    }
    let version = reader.u32("version")?;
    if version != PROTOCOL_VERSION {
        return Ok(Hello { version, incarnation: Incarnation(0), mn: String::new() });
    }
    let incarnation = Incarnation(reader.u64("incarnation")?);
    let mn = std::str::from_utf8(reader.rest).map_err(|_| reader.bad("name"))?.to_owned();
    Ok(Hello { version, incarnation, mn })
}

/// Decodes WELCOME: the session, and its lease in milliseconds.
///
/// # Errors
/// If the body is none.
pub fn decode_welcome(body: &[u8]) -> Result<(SessionId, u32), FrameError> {
    let mut reader = Reader::new(Kind::Welcome, body);
    let session = SessionId(reader.u32("session")?);
    let lease_ms = reader.u32("lease")?;
    if session.0 == 0 || lease_ms == 0 {
        return Err(reader.bad("lease"));
    }
    reader.end().map(|()| (session, lease_ms))
}

/// Decodes REFUSED, as said by `peer`.
///
/// # Errors
/// If the body is none.
pub fn decode_refused(body: &[u8], peer: &Arc<str>) -> Result<VerbError, FrameError> {
    let mut reader = Reader::new(Kind::Refused, body);
    let refusal = match reader.u8("code")? {
        code @ (1 | 2) => {
            let region = RegionId(reader.u16("region")?);
            let (named, current) = (Epoch(reader.u64("epoch")?), Epoch(reader.u64("epoch")?));
            if code == 1 {
                VerbError::StaleEpoch { region, named, current }
            } else {
                VerbError::EpochAhead { region, named, current }
            }
        }
        3 => VerbError::RegionLost { region: RegionId(reader.u16("region")?) },
        4 => VerbError::NoSuchRegion { region: RegionId(reader.u16("region")?) },
        5 => VerbError::OutOfBounds {
            at: RemotePtr::from_word(reader.u64("address")?),
            len: reader.u64("length")?,
            region_bytes: reader.u64("size")?,
        },
        6 => VerbError::Misaligned {
            at: RemotePtr::from_word(reader.u64("address")?),
            len: reader.u64("length")?,
        },
        7 => VerbError::LeaseExpired { peer: Arc::clone(peer) },
        8 => {
            let text = reader.take(reader.rest.len(), "text")?;
            let why = std::str::from_utf8(text).map_err(|_| reader.bad("text"))?.to_owned();
            VerbError::MessageRefused { peer: Arc::clone(peer), why }
        }
        _ => return Err(reader.bad("code")),
    };
    reader.end().map(|()| refusal)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// The frames in `bytes`, cut into chunks of the given lengths, used in turn.
    fn frames(bytes: &[u8], cuts: &[usize]) -> Result<Vec<Frame>, FrameError> {
        let mut assembler = Assembler::default();
        let (mut rest, mut frames) = (bytes, Vec::new());
        for cut in cuts.iter().cycle() {
            let (chunk, after) = rest.split_at((*cut).clamp(1, rest.len().max(1)).min(rest.len()));
            rest = after;
            assembler.push(Bytes::copy_from_slice(chunk));
            while let Some(frame) = assembler.next_frame()? {
                frames.push(frame);
            }
            if rest.is_empty() {
                break;
            }
        }
        Ok(frames)
    }

    /// A chunk keeps the datagram that it came in: a peer that sends large ones with a byte of a frame in each must not
    /// make us keep them all.
    #[test]
    fn a_frame_that_comes_in_crumbs_keeps_few_chunks() {
        const BYTES: usize = 100_000;
        let mut whole = BytesMut::new();
        put_message(&mut whole, Kind::Send, 1, &(0..BYTES).map(|at| at as u8).collect::<Vec<_>>());
        let whole = whole.freeze();
        for crumb in [1, 7, 500] {
            let (mut assembler, mut rest) = (Assembler::default(), whole.clone());
            let frame = loop {
                assembler.push(rest.split_to(crumb.min(rest.len())));
                if let Some(frame) = assembler.next_frame().unwrap() {
                    break frame;
                }
                let most = CHUNKS_MAX + 1 + assembler.bytes / CHUNK_BYTES_MIN;
                assert!(assembler.chunks.len() <= most, "{} chunks", assembler.chunks.len());
            };
            assert_eq!(frame.body, whole[HEADER_BYTES..]);
        }
    }

    fn one(bytes: &[u8]) -> Frame {
        let mut all = frames(bytes, &[bytes.len()]).unwrap();
        assert_eq!((all.len(), all[0].wire_bytes() as usize), (1, bytes.len()));
        all.remove(0)
    }

    /// Every decoder, over one body: none may panic.
    fn decode_all(body: &[u8]) {
        let peer: Arc<str> = "mn".into();
        let mut read = ReadRequest::default();
        if read.decode(body).is_ok() {
            let counted: usize = read.groups.iter().map(|g| g.count as usize).sum();
            assert_eq!(counted, read.offsets.len());
            assert!(read.reply_bytes <= BATCH_BYTES_MAX && counted <= BATCH_ITEMS_MAX);
        }
        let mut parts = Vec::new();
        if let Ok(data) = decode_write(body, &mut parts) {
            assert_eq!(parts.iter().map(|p| p.len as usize).sum::<usize>(), data.len());
            assert!(data.len() <= BATCH_BYTES_MAX && parts.len() <= BATCH_ITEMS_MAX);
        }
        let _ = (decode_compare_swap(body), decode_fetch_add(body), decode_alive(body), decode_credit(body));
        let _ = (decode_word(body), decode_flag(body), decode_hello(body), decode_welcome(body));
        if let Ok(refusal) = decode_refused(body, &peer) {
            assert!(refusal.is_refusal());
        }
    }

    fn place() -> impl Strategy<Value = (u16, u64, u64)> {
        // Offsets and epochs of every magnitude, aligned or not.
        (any::<u16>(), (0u32..64, any::<u64>()), (0u32..48, any::<u64>())).prop_map(
            |(region, (e, epoch), (o, offset))| (region, epoch >> e, (offset & RemotePtr::OFFSET_MAX) >> o),
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn read_requests_survive(
            items in vec((place(), prop_oneof![Just(100u32), Just(136), 0u32..5000]), 0..60),
            same in 1usize..8,
            cuts in vec(1usize..300, 1..5),
            id: u32,
        ) {
            let mut batch = ReadBatch::new();
            for ((region, epoch, offset), len) in &items {
                for i in 0..same as u64 {
                    let offset = (offset + 8 * i).min(RemotePtr::OFFSET_MAX);
                    batch.push(RemotePtr::new(RegionId(*region), offset), Epoch(*epoch), *len);
                }
            }
            let mut out = BytesMut::new();
            put_read(&mut out, id, &batch);
            put_empty(&mut out, Kind::Ping, 5);
            let frames = frames(&out, &cuts).unwrap();
            prop_assert_eq!(frames.len(), 2);
            prop_assert_eq!((frames[0].kind, frames[0].id), (Kind::Read, id));
            let mut request = ReadRequest::default();
            request.decode(&frames[0].body).unwrap();
            prop_assert_eq!(&request.groups[..], batch.groups());
            prop_assert_eq!(&request.offsets[..], batch.offsets());
            prop_assert_eq!(request.reply_bytes, batch.reply_bytes());
        }

        #[test]
        fn write_requests_survive(items in vec((place(), vec(any::<u8>(), 0..100)), 0..40), id: u32) {
            let mut batch = WriteBatch::new();
            for ((region, epoch, offset), bytes) in &items {
                batch.push(RemotePtr::new(RegionId(*region), *offset), Epoch(*epoch), bytes);
            }
            let mut out = BytesMut::new();
            put_write(&mut out, id, &batch);
            let mut parts = Vec::new();
            let frame = one(&out);
            prop_assert_eq!(decode_write(&frame.body, &mut parts).unwrap(), batch.data());
            prop_assert_eq!(&parts[..], batch.parts());
        }

        #[test]
        fn words_survive((region, epoch, offset) in place(), a: u64, b: u64) {
            let word = WordAt { at: RemotePtr::new(RegionId(region), offset), epoch: Epoch(epoch) };
            let mut out = BytesMut::new();
            put_compare_swap(&mut out, 1, word, a, b);
            prop_assert_eq!(decode_compare_swap(&one(&out).body), Ok((word, a, b)));
            out.clear();
            put_fetch_add(&mut out, 1, word, a);
            prop_assert_eq!(decode_fetch_add(&one(&out).body), Ok((word, a)));
            out.clear();
            put_credit(&mut out, a);
            prop_assert_eq!(decode_credit(&one(&out).body), Ok(a));
            out.clear();
            put_word(&mut out, 1, b);
            prop_assert_eq!(decode_word(&one(&out).body), Ok(b));
        }

        #[test]
        fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..600), cuts in vec(1usize..64, 1..4)) {
            let _ = frames(&bytes, &cuts);
            decode_all(&bytes);
        }

        // Bytes that look right at first: small varints, few kinds, plausible lengths.
        #[test]
        fn nearly_right_bytes_never_panic(
            body in vec(prop_oneof![0u8..8, Just(0x80), Just(0xff), any::<u8>()], 0..200),
            kind in prop_oneof![1u8..10, 65u8..72],
            extra in -3i32..4,
        ) {
            let mut bytes = BytesMut::new();
            bytes.put_u32_le((body.len() as i32 + 5 + extra).max(0) as u32);
            bytes.put_u8(kind);
            bytes.put_u32_le(9);
            bytes.put_slice(&body);
            let _ = frames(&bytes, &[7, 100]);
            decode_all(&body);
        }

        #[test]
        fn a_cut_or_changed_request_is_refused_or_another(
            items in vec((place(), 0u32..500), 1..20), at: prop::sample::Index, flip in 1u8..,
        ) {
            let mut batch = ReadBatch::new();
            for ((region, epoch, offset), len) in &items {
                batch.push(RemotePtr::new(RegionId(*region), *offset), Epoch(*epoch), *len);
            }
            let mut out = BytesMut::new();
            put_read(&mut out, 1, &batch);
            let body = &out[HEADER_BYTES..];
            let mut request = ReadRequest::default();
            let cut = at.index(body.len());
            if request.decode(&body[..cut]).is_ok() {
                prop_assert!(request.offsets.len() < batch.len(), "a prefix has fewer items");
            }
            let mut changed = body.to_vec();
            changed[cut] ^= flip;
            if request.decode(&changed).is_ok() {
                let same = request.groups == batch.groups() && request.offsets == batch.offsets();
                // LEB128 has several forms of one number; no other change may go unseen.
                prop_assert!(!same || flip & 0x80 != 0);
            }
            decode_all(&changed);
        }
    }

    #[test]
    fn lengths_are_judged_before_the_bytes_come() {
        for (kind, max) in [
            (Kind::Read, BATCH_ITEMS_MAX * READ_ITEM_BYTES_MAX),
            (Kind::Data, BATCH_BYTES_MAX),
            (Kind::Send, MESSAGE_BYTES_MAX),
            (Kind::Ping, 64),
        ] {
            for (len, is_good) in [(max, true), (max + 1, false), (u32::MAX as usize - 5, false)] {
                let mut head = BytesMut::new();
                put_head(&mut head, kind, 1, len);
                let mut assembler = Assembler::default();
                assembler.push(head.freeze());
                let bytes = len + 5;
                let expected =
                    if is_good { Ok(None) } else { Err(FrameError::BadLength { bytes, kind: kind as u8 }) };
                assert_eq!(assembler.next_frame(), expected, "{kind:?} of {len}");
                assert!(!is_good || !assembler.is_between_frames());
            }
        }
        let mut short = BytesMut::from(&[4, 0, 0, 0, 8, 0, 0, 0, 0][..]);
        assert_eq!(frames(&short, &[20]), Err(FrameError::BadLength { bytes: 4, kind: 8 }));
        short[4] = 200;
        assert_eq!(frames(&short, &[20]), Err(FrameError::UnknownKind(200)));
    }

    #[test]
    fn limits_of_a_batch_are_limits_of_its_frame() {
        let gather = |count: u64, len: u32| {
            let mut body = BytesMut::new();
            body.put_u16_le(1);
            put_varint(&mut body, u64::from(len) << 1);
            put_varint(&mut body, 1);
            put_varint(&mut body, count);
            body.put_bytes(0, 4 * count as usize);
            ReadRequest::default().decode(&body)
        };
        let (items, bytes) = (BATCH_ITEMS_MAX as u64, BATCH_BYTES_MAX as u32);
        assert_eq!((gather(items, 64), gather(1, bytes), gather(1, 0)), (Ok(()), Ok(()), Ok(())));
        let bad = |field| Err(FrameError::BadBody { kind: Kind::Read, field });
        assert_eq!(gather(items + 1, 1), bad("number of items"));
        assert_eq!(gather(0, 8), bad("number of items"));
        assert_eq!(gather(1, bytes + 1), bad("number of bytes"));
        assert_eq!(gather(items, 65), bad("number of bytes"));
        // A length that no allocation may follow: the items are not there.
        let mut body = BytesMut::new();
        body.put_u16_le(1);
        put_varint(&mut body, 2);
        put_varint(&mut body, 1);
        put_varint(&mut body, items);
        assert_eq!(ReadRequest::default().decode(&body), bad("items"));
    }

    #[test]
    fn refusals_survive() {
        let peer: Arc<str> = "mn-3".into();
        let (region, named, current) = (RegionId(7), Epoch(1 << 40), Epoch(u64::MAX));
        let at = RemotePtr::new(region, 48);
        for refusal in [
            VerbError::StaleEpoch { region, named, current },
            VerbError::EpochAhead { region, named, current },
            VerbError::RegionLost { region },
            VerbError::NoSuchRegion { region },
            VerbError::OutOfBounds { at, len: u64::MAX, region_bytes: 1 << 47 },
            VerbError::Misaligned { at, len: 3 },
            VerbError::LeaseExpired { peer: Arc::clone(&peer) },
            VerbError::MessageRefused { peer: Arc::clone(&peer), why: "no".into() },
        ] {
            let mut out = BytesMut::new();
            put_refused(&mut out, 3, &refusal);
            assert_eq!(decode_refused(&one(&out).body, &peer), Ok(refusal));
        }
        let long = VerbError::MessageRefused { peer: Arc::clone(&peer), why: "é".repeat(1000) };
        let mut out = BytesMut::new();
        put_refused(&mut out, 3, &long);
        let why = "é".repeat(512);
        assert_eq!(decode_refused(&one(&out).body, &peer), Ok(VerbError::MessageRefused { peer, why }));
    }

    #[test]
    fn greetings_survive_and_another_version_is_told() {
        let hello = Hello { version: PROTOCOL_VERSION, incarnation: Incarnation(99), mn: "mn-0".into() };
        let mut out = BytesMut::new();
        put_hello(&mut out, &hello);
        assert_eq!(decode_hello(&one(&out).body), Ok(hello.clone()));
        out.clear();
        put_hello(&mut out, &Hello { version: 7, ..hello });
        assert_eq!(decode_hello(&one(&out).body).unwrap().version, 7);
        out.clear();
        put_welcome(&mut out, SessionId(5), 3000);
        assert_eq!(decode_welcome(&one(&out).body), Ok((SessionId(5), 3000)));
    }

    /// The budget of a query: 2,140 vectors of 100 bytes and 125 lists of 136, in 250 rounds over 3 memory nodes.
    /// Every other round reads one list from one of them; the rest read vectors from all three, from two regions
    /// each.
    #[test]
    fn a_query_costs_what_the_budget_says() {
        // Epochs start at the milliseconds since 1970: six bytes.
        let epoch = Epoch(1_800_000_000_000);
        let (mut bytes, mut vectors) = (0, 0);
        let mut cost = |batch: &ReadBatch| {
            let mut out = BytesMut::new();
            put_read(&mut out, 1, batch);
            bytes += out.len() + HEADER_BYTES + batch.reply_bytes();
        };
        for round in 0..125u64 {
            let mut list = ReadBatch::new();
            list.push(RemotePtr::new(RegionId(1), 4096 * round), epoch, 136);
            cost(&list);
            for mn in 0..3u16 {
                let mut batch = ReadBatch::new();
                for region in 0..2 {
                    for i in 0..3 {
                        if vectors < 2140 {
                            batch.push(
                                RemotePtr::new(RegionId(2 * mn + region), 8 * (round + i)),
                                epoch,
                                100,
                            );
                            vectors += 1;
                        }
                    }
                }
                cost(&batch);
            }
        }
        assert_eq!(vectors, 2140);
        assert!(bytes <= 270_000, "{bytes} bytes");
    }
}
