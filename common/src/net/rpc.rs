//! Calls of the control plane and of clients: one bidirectional stream per call.
//!
//! ```text
//! frame   0        4          8       9         12       16
//!         | "SHRP" | version  | kind  | 0 0 0   | length | body: length bytes, rkyv     (integers little-endian)
//!
//! caller ── frame(request) ─────────────────────────► handler
//! caller ◄── frame(answer | fault | other version) ── handler
//! ```
//!
//! A call ends by its deadline, always. A caller that drops its call, or is gone, cancels the handler.
//!
//! Invariant: no body is read before its header was checked, no more than [`MESSAGE_MAX`] bytes are ever held for
//! one, memory for it grows with the bytes that have really come, and all requests that a process is being sent take no
//! more than `REQUESTS_KIB_MAX` together.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::{Connection, ReadError, RecvStream, SendStream, VarInt, WriteError};
use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::JoinSet;

use super::endpoint::{self, Alpn, Endpoint, EndpointError, why};
use super::tls::PeerIdentity;
use crate::wire::{self, BadMessage, Fault, FaultCode, MESSAGE_MAX, PROTOCOL_VERSION, Role};

const MAGIC: u32 = u32::from_le_bytes(*b"SHRP");
const HEADER_BYTES: usize = 16;
/// Calls of one connection that are handled at once; more wait in the transport, within its windows.
pub const CALLS_MAX: usize = 256;
/// Longest time from the start of a request to its last byte.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// Longest time that an answer may take to leave.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);
/// Room that is made for a body at once; beyond it, room follows the bytes.
const BODY_STEP: usize = 64 << 10;
/// Memory for requests that are on their way in, all callers together, in KiB; more are refused.
const REQUESTS_KIB_MAX: usize = 256 << 10;
const _: () = assert!(REQUESTS_KIB_MAX << 10 >= 16 * MESSAGE_MAX);
static REQUESTS_ROOM: Semaphore = Semaphore::const_new(REQUESTS_KIB_MAX);

/// A value that crosses the wire: anything that rkyv encodes and can validate.
pub trait Message: Sized + Send + Sync + 'static {
    /// The encoded form.
    fn to_wire(&self) -> AlignedVec;

    /// Checks and decodes.
    ///
    /// # Errors
    /// [`BadMessage`] if the bytes are not a well-formed `Self`.
    fn from_wire(bytes: &[u8]) -> Result<Self, BadMessage>;
}

impl<T> Message for T
where
    T: Archive + Send + Sync + 'static,
    T: for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, rancor::Error>>,
    T::Archived: for<'a> CheckBytes<HighValidator<'a, rancor::Error>>
        + Deserialize<T, HighDeserializer<rancor::Error>>,
{
    fn to_wire(&self) -> AlignedVec {
        wire::encode(self)
    }

    fn from_wire(bytes: &[u8]) -> Result<Self, BadMessage> {
        wire::decode(bytes)
    }
}

// --------------------------------------------------------------------------------------------------- frames

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum Kind {
    Request = 0,
    Answer = 1,
    Fault = 2,
    /// The receiver speaks another version: its own is in the header, there is no body.
    OtherVersion = 3,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Header {
    version: u32,
    kind: Kind,
    length: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
enum BadFrame {
    #[error("{0:#010x} in place of the magic number")]
    Magic(u32),
    #[error("protocol version {theirs}, ours is {PROTOCOL_VERSION}")]
    Version { theirs: u32 },
    #[error("an unknown kind of frame ({0:#010x})")]
    Kind(u32),
    #[error("a message of {0} bytes: at most {MESSAGE_MAX}")]
    TooLarge(u32),
}

impl Header {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&self.version.to_le_bytes());
        out[8] = self.kind as u8;
        out[12..16].copy_from_slice(&self.length.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, BadFrame> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let (magic, version, kind, length) = (word(0), word(4), word(8), word(12));
        if magic != MAGIC {
            return Err(BadFrame::Magic(magic));
        }
        // Before anything that another version may have changed.
        if version != PROTOCOL_VERSION {
            return Err(BadFrame::Version { theirs: version });
        }
        let kind = match kind {
            0 => Kind::Request,
            1 => Kind::Answer,
            2 => Kind::Fault,
            3 => Kind::OtherVersion,
            other => return Err(BadFrame::Kind(other)),
        };
        if length as usize > MESSAGE_MAX {
            return Err(BadFrame::TooLarge(length));
        }
        Ok(Self { version, kind, length })
    }
}

#[derive(Debug)]
enum ReceiveError {
    Frame(BadFrame),
    /// The stream ended before the frame did.
    Cut,
    /// Too much is on its way in.
    NoRoom,
    /// The peer gave the stream up, or the connection is gone.
    Lost(String),
}

/// Memory that is taken from a store as a body comes in, and given back with this.
struct Room<'a> {
    /// Without one there is no bound but the message's own.
    store: Option<&'a Semaphore>,
    taken: Option<SemaphorePermit<'a>>,
    bytes: usize,
}

impl<'a> Room<'a> {
    fn of(store: Option<&'a Semaphore>) -> Self {
        Self { store, taken: None, bytes: 0 }
    }

    /// Makes sure that there is room for `bytes` in all.
    fn reach(&mut self, bytes: usize) -> Result<(), ReceiveError> {
        let Some(store) = self.store.filter(|_| bytes > self.bytes) else { return Ok(()) };
        let kib = (bytes - self.bytes).div_ceil(1024);
        let more = store.try_acquire_many(kib as u32).map_err(|_| ReceiveError::NoRoom)?;
        match &mut self.taken {
            Some(taken) => taken.merge(more),
            None => self.taken = Some(more),
        }
        self.bytes += kib * 1024;
        Ok(())
    }
}

/// The next frame. Its body takes room in `store` while it comes in.
async fn receive(
    stream: &mut RecvStream,
    store: Option<&Semaphore>,
) -> Result<(Kind, Vec<u8>), ReceiveError> {
    let mut header = [0; HEADER_BYTES];
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match stream.read(&mut header[filled..]).await {
            Ok(Some(more)) => filled += more,
            Ok(None) => return Err(ReceiveError::Cut),
            Err(e) => return Err(ReceiveError::Lost(read_error(&e))),
        }
    }
    let header = Header::decode(&header).map_err(ReceiveError::Frame)?;
    let length = header.length as usize;
    let mut room = Room::of(store);
    room.reach(length.min(BODY_STEP))?;
    let mut body = Vec::with_capacity(length.min(BODY_STEP));
    while body.len() < length {
        match stream.read_chunk(length - body.len(), true).await {
            Ok(Some(chunk)) => {
                room.reach(body.len() + chunk.bytes.len())?;
                body.extend_from_slice(&chunk.bytes);
            }
            Ok(None) => return Err(ReceiveError::Cut),
            Err(e) => return Err(ReceiveError::Lost(read_error(&e))),
        }
    }
    Ok((header.kind, body))
}

async fn transmit(stream: &mut SendStream, kind: Kind, body: &[u8]) -> Result<(), WriteError> {
    assert!(body.len() <= MESSAGE_MAX, "sizes are checked before a frame is made");
    let header = Header { version: PROTOCOL_VERSION, kind, length: body.len() as u32 };
    stream.write_all(&header.encode()).await?;
    stream.write_all(body).await?;
    stream.finish()?;
    Ok(())
}

fn read_error(error: &ReadError) -> String {
    match error {
        ReadError::ConnectionLost(e) => why(e),
        ReadError::Reset(_) => "the peer gave the call up".into(),
        other => other.to_string(),
    }
}

// --------------------------------------------------------------------------------------------------- server

/// Answers calls of one kind.
pub trait Handler: Send + Sync + 'static {
    /// What is asked.
    type Request: Message;
    /// What is answered.
    type Response: Message;

    /// Answers one call. Dropped at any await if the caller has given up.
    fn handle(
        &self,
        peer: &PeerIdentity,
        request: Self::Request,
    ) -> impl Future<Output = Result<Self::Response, Fault>> + Send;
}

/// Serves one connection until it ends; at most [`CALLS_MAX`] calls at once. All handlers have ended when this
/// returns.
pub async fn serve<H: Handler>(connection: Connection, peer: PeerIdentity, handler: Arc<H>) {
    serve_within(connection, peer, handler, &REQUESTS_ROOM).await;
}

async fn serve_within<H: Handler>(
    connection: Connection,
    peer: PeerIdentity,
    handler: Arc<H>,
    room: &'static Semaphore,
) {
    let slots = Arc::new(Semaphore::new(CALLS_MAX));
    let mut calls = JoinSet::new();
    let ended = loop {
        let slot = slots.clone().acquire_owned().await.expect("the semaphore is never closed");
        let (send, recv) = match connection.accept_bi().await {
            Ok(stream) => stream,
            Err(ended) => break ended,
        };
        while let Some(done) = calls.try_join_next() {
            report_panic(&peer, done);
        }
        let (peer, handler) = (peer.clone(), handler.clone());
        calls.spawn(async move {
            answer(&peer, &*handler, send, recv, room).await;
            drop(slot);
        });
    };
    tracing::debug!(%peer, why = why(&ended), "connection ended");
    calls.shutdown().await;
}

fn report_panic(peer: &PeerIdentity, done: Result<(), tokio::task::JoinError>) {
    if let Err(error) = done
        && error.is_panic()
    {
        tracing::error!(%peer, %error, "a handler panicked");
    }
}

async fn answer<H: Handler>(
    peer: &PeerIdentity,
    handler: &H,
    mut send: SendStream,
    mut recv: RecvStream,
    room: &Semaphore,
) {
    let request = match tokio::time::timeout(REQUEST_TIME_MAX, receive(&mut recv, Some(room))).await {
        Ok(request) => request,
        Err(_) => Err(ReceiveError::Lost("the request did not come to its end".into())),
    };
    let stopped = send.stopped();
    let outcome = match request {
        Ok((Kind::Request, body)) => match H::Request::from_wire(&body) {
            Ok(request) => {
                drop(body);
                tokio::select! {
                    outcome = handler.handle(peer, request) => outcome,
                    // The caller has dropped the call, or is gone: nobody waits for the answer.
                    _ = stopped => return,
                }
            }
            Err(bad) => Err(Fault::new(FaultCode::BadRequest, bad.to_string())),
        },
        Ok((kind, _)) => Err(Fault::new(FaultCode::BadRequest, format!("{kind:?} in place of a request"))),
        Err(ReceiveError::Frame(BadFrame::Version { theirs })) => {
            tracing::warn!(%peer, theirs, ours = PROTOCOL_VERSION, "refused a call of another protocol version");
            let _ = tokio::time::timeout(ANSWER_TIME_MAX, transmit(&mut send, Kind::OtherVersion, &[])).await;
            return;
        }
        Err(ReceiveError::Frame(bad)) => {
            tracing::warn!(%peer, %bad, "refused a call");
            Err(Fault::new(FaultCode::BadRequest, bad.to_string()))
        }
        Err(ReceiveError::NoRoom) => {
            tracing::warn!(%peer, "too many large requests at once, refused one");
            let message = "too many large requests at once: try again, or another node";
            Err(Fault::new(FaultCode::Overloaded, message))
        }
        Err(ReceiveError::Cut) => Err(Fault::new(FaultCode::BadRequest, "the request was cut short")),
        Err(ReceiveError::Lost(why)) => {
            tracing::debug!(%peer, why, "a call was given up");
            return;
        }
    };
    let (kind, body) = match outcome.map(|response| response.to_wire()) {
        Ok(body) if body.len() <= MESSAGE_MAX => (Kind::Answer, body),
        Ok(body) => {
            let message =
                format!("the answer has {} bytes, at most {MESSAGE_MAX} fit: ask for less", body.len());
            (Kind::Fault, wire::encode(&Fault::new(FaultCode::BadRequest, message)))
        }
        Err(fault) => (Kind::Fault, wire::encode(&fault)),
    };
    match tokio::time::timeout(ANSWER_TIME_MAX, transmit(&mut send, kind, &body)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%peer, %error, "an answer found no taker"),
        Err(_) => {
            tracing::warn!(%peer, "a caller does not take its answer");
            let _ = send.reset(VarInt::from_u32(1));
        }
    }
}

// --------------------------------------------------------------------------------------------------- caller

/// Why a call has no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RpcError {
    /// The peer answered with a fault.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// No connection could be made, so that nothing was sent.
    #[error("{why}")]
    Connect {
        /// What happened, with the address.
        why: String,
    },
    /// The peer did not accept our certificate, or we not the peer's: nothing was done, and waiting does not help.
    #[error("{why}")]
    Refused {
        /// What was wrong, with the address.
        why: String,
    },
    /// The connection or the call broke; the peer may or may not have acted.
    #[error("call to {peer} at {addr} broke: {why}")]
    Transport {
        /// The peer.
        peer: PeerIdentity,
        /// Its address.
        addr: SocketAddr,
        /// What happened.
        why: String,
    },
    /// No answer by the deadline; the peer may or may not have acted.
    #[error("no answer from {peer} at {addr} by the deadline")]
    DeadlineExceeded {
        /// The peer.
        peer: PeerIdentity,
        /// Its address.
        addr: SocketAddr,
    },
    /// The two programs are of different versions.
    #[error(
        "{peer} at {addr} speaks protocol version {theirs}, this program {ours}: run one version everywhere"
    )]
    OtherVersion {
        /// The peer.
        peer: PeerIdentity,
        /// Its address.
        addr: SocketAddr,
        /// Its version.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// The peer broke the protocol.
    #[error("{peer} at {addr} sent {what}")]
    Protocol {
        /// The peer.
        peer: PeerIdentity,
        /// Its address.
        addr: SocketAddr,
        /// What was wrong.
        what: String,
    },
    /// The request does not fit; nothing was sent.
    #[error("a request of {bytes} bytes: at most {max}")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The bound.
        max: usize,
    },
}

impl RpcError {
    /// Whether the peer has certainly not acted on the request.
    pub fn is_unsent(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. } | Self::Refused { .. } | Self::TooLarge { .. } | Self::OtherVersion { .. }
        )
    }

    /// Whether another process of the same role may do better.
    pub fn is_transport(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::Refused { .. }
                | Self::Transport { .. }
                | Self::DeadlineExceeded { .. }
                | Self::OtherVersion { .. }
                | Self::Protocol { .. }
        )
    }
}

impl From<RpcError> for Fault {
    fn from(error: RpcError) -> Self {
        let code = match &error {
            RpcError::Fault(fault) => return fault.clone(),
            RpcError::Connect { .. }
            | RpcError::Refused { .. }
            | RpcError::Transport { .. }
            | RpcError::OtherVersion { .. } => FaultCode::Unavailable,
            RpcError::DeadlineExceeded { .. } => FaultCode::DeadlineExceeded,
            RpcError::Protocol { .. } => FaultCode::Corrupt,
            RpcError::TooLarge { .. } => FaultCode::BadRequest,
        };
        Self::new(code, error.to_string())
    }
}

/// Calls one process. Clones share the connection.
pub struct RpcClient<Req, Resp> {
    connection: Connection,
    peer: PeerIdentity,
    types: PhantomData<fn(Req) -> Resp>,
}

impl<Req, Resp> Clone for RpcClient<Req, Resp> {
    fn clone(&self) -> Self {
        Self { connection: self.connection.clone(), peer: self.peer.clone(), types: PhantomData }
    }
}

impl<Req, Resp> fmt::Debug for RpcClient<Req, Resp> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RpcClient").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl<Req: Message, Resp: Message> RpcClient<Req, Resp> {
    /// Connects to the process of role `role` at `addr`.
    ///
    /// # Errors
    /// [`RpcError::Connect`] or [`RpcError::Refused`], by the endpoint's handshake timeout or `deadline`, whichever is
    /// first.
    pub async fn connect(
        endpoint: &Endpoint,
        addr: SocketAddr,
        role: Role,
        deadline: Instant,
    ) -> Result<Self, RpcError> {
        let connecting = endpoint.connect(addr, role, Alpn::Rpc);
        let connection = tokio::time::timeout_at(deadline.into(), connecting)
            .await
            .map_err(|_| RpcError::Connect {
                why: format!("connecting to {role} at {addr}: no answer by the deadline"),
            })?
            .map_err(|e: EndpointError| match e {
                EndpointError::Refused { .. } => RpcError::Refused { why: e.to_string() },
                other => RpcError::Connect { why: other.to_string() },
            })?;
        Self::on(connection)
    }

    /// Calls over a connection made with [`Alpn::Rpc`].
    ///
    /// # Errors
    /// [`RpcError::Connect`] if the peer's certificate names nobody.
    pub fn on(connection: Connection) -> Result<Self, RpcError> {
        let peer =
            endpoint::peer_identity(&connection).map_err(|e| RpcError::Connect { why: e.to_string() })?;
        Ok(Self { connection, peer, types: PhantomData })
    }

    /// Who is called.
    pub fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    /// Where it is.
    pub fn addr(&self) -> SocketAddr {
        self.connection.remote_address()
    }

    /// Whether the connection is gone: make another.
    pub fn is_lost(&self) -> bool {
        self.connection.close_reason().is_some()
    }

    /// Ends the connection and every call on it.
    pub fn close(&self) {
        self.connection.close(endpoint::close::DONE, b"done");
    }

    /// Makes one call. Dropping the future cancels it.
    ///
    /// # Errors
    /// By `deadline`.
    pub async fn call(&self, request: &Req, deadline: Instant) -> Result<Resp, RpcError> {
        let body = request.to_wire();
        if body.len() > MESSAGE_MAX {
            return Err(RpcError::TooLarge { bytes: body.len(), max: MESSAGE_MAX });
        }
        match tokio::time::timeout_at(deadline.into(), self.exchange(&body)).await {
            Ok(Err(broke @ RpcError::Transport { .. })) => Err(self.refusal().unwrap_or(broke)),
            Ok(outcome) => outcome,
            Err(_) => Err(RpcError::DeadlineExceeded { peer: self.peer.clone(), addr: self.addr() }),
        }
    }

    /// Why the peer did not accept us, if that is what ended the connection: it says so after we have connected.
    fn refusal(&self) -> Option<RpcError> {
        let ended = self.connection.close_reason().filter(endpoint::is_refusal)?;
        Some(RpcError::Refused { why: format!("{} at {}: {}", self.peer, self.addr(), why(&ended)) })
    }

    async fn exchange(&self, body: &[u8]) -> Result<Resp, RpcError> {
        let broke = |why: String| RpcError::Transport { peer: self.peer.clone(), addr: self.addr(), why };
        let sent = |what: String| RpcError::Protocol { peer: self.peer.clone(), addr: self.addr(), what };
        let (mut send, mut recv) = self.connection.open_bi().await.map_err(|e| broke(why(&e)))?;
        match transmit(&mut send, Kind::Request, body).await {
            // A peer that refuses the request stops the stream and says why in its answer.
            Ok(()) | Err(WriteError::Stopped(_)) => {}
            Err(WriteError::ConnectionLost(e)) => return Err(broke(why(&e))),
            Err(other) => return Err(broke(other.to_string())),
        }
        match receive(&mut recv, None).await {
            Ok((Kind::Answer, body)) => Resp::from_wire(&body).map_err(|bad| sent(bad.to_string())),
            Ok((Kind::Fault, body)) => match Fault::from_wire(&body) {
                Ok(fault) => Err(RpcError::Fault(fault)),
                Err(bad) => Err(sent(bad.to_string())),
            },
            Ok((kind, _)) => Err(sent(format!("{kind:?} in place of an answer"))),
            Err(ReceiveError::Frame(BadFrame::Version { theirs })) => Err(RpcError::OtherVersion {
                peer: self.peer.clone(),
                addr: self.addr(),
                theirs,
                ours: PROTOCOL_VERSION,
            }),
            Err(ReceiveError::Frame(bad)) => Err(sent(bad.to_string())),
            Err(ReceiveError::Cut) => Err(broke("it ended without a whole answer".into())),
            Err(ReceiveError::NoRoom) => unreachable!("answers are not received within a store"),
            Err(ReceiveError::Lost(why)) => Err(broke(why)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::sync::{mpsc, oneshot};

    use super::super::endpoint::EndpointOptions;
    use super::super::tls::ClusterCa;
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    /// Echoes; some texts ask for something else.
    struct Echo {
        /// Told when a call of "wait" begins; then when its future is dropped.
        events: mpsc::Sender<&'static str>,
    }

    struct TellWhenDropped<'a>(&'a mpsc::Sender<&'static str>);
    impl Drop for TellWhenDropped<'_> {
        fn drop(&mut self) {
            let _ = self.0.try_send("dropped");
        }
    }

    impl Handler for Echo {
        type Request = (String, Vec<u8>);
        type Response = (String, Vec<u8>);

        async fn handle(
            &self,
            peer: &PeerIdentity,
            (text, bytes): Self::Request,
        ) -> Result<Self::Response, Fault> {
            match text.as_str() {
                "who" => Ok((peer.to_string(), bytes)),
                "fault" => Err(Fault::new(FaultCode::NotFound, "no such thing")),
                "large" => Ok((text, vec![0; MESSAGE_MAX + 1])),
                "panic" => panic!("a handler that panics, on purpose"),
                "wait" => {
                    let _tell = TellWhenDropped(&self.events);
                    let _ = self.events.try_send("began");
                    std::future::pending().await
                }
                _ => Ok((text, bytes)),
            }
        }
    }

    type EchoClient = RpcClient<(String, Vec<u8>), (String, Vec<u8>)>;

    struct Pair {
        client: EchoClient,
        events: mpsc::Receiver<&'static str>,
        served: oneshot::Receiver<()>,
        _endpoints: [Endpoint; 2],
    }

    async fn pair() -> Pair {
        pair_within(&REQUESTS_ROOM).await
    }

    async fn pair_within(room: &'static Semaphore) -> Pair {
        let ca = ClusterCa::ephemeral().unwrap();
        let bind = |role, name| {
            let identity = ca.identity(role, name).unwrap();
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), identity, EndpointOptions::default()).unwrap()
        };
        let (server, caller) = (bind(Role::Oracle, "o"), bind(Role::Cn, "cn-0"));
        let (events_tx, events) = mpsc::channel(8);
        let (served_tx, served) = oneshot::channel();
        let accepting = server.clone();
        tokio::spawn(async move {
            let (connection, peer, _) = accepting.accept().await.unwrap();
            serve_within(connection, peer, Arc::new(Echo { events: events_tx }), room).await;
            let _ = served_tx.send(());
        });
        let client = EchoClient::connect(&caller, server.local_addr(), Role::Oracle, soon()).await.unwrap();
        Pair { client, events, served, _endpoints: [server, caller] }
    }

    fn ask(text: &str) -> (String, Vec<u8>) {
        (text.to_owned(), vec![1, 2, 3])
    }

    #[tokio::test]
    async fn calls_are_answered_side_by_side_and_up_to_the_largest_message() {
        let pair = pair().await;
        assert_eq!(pair.client.call(&ask("who"), soon()).await.unwrap().0, "cn 'cn-0'");
        let texts: Vec<String> = (0..2 * CALLS_MAX).map(|i| i.to_string()).collect();
        let calls = texts.iter().map(|text| async { pair.client.call(&ask(text), soon()).await.unwrap().0 });
        assert_eq!(futures_util::future::join_all(calls).await, texts);
        let overhead = ("big".to_owned(), Vec::<u8>::new()).to_wire().len() + 8;
        let large = ("big".to_owned(), vec![5; MESSAGE_MAX - overhead]);
        assert_eq!(pair.client.call(&large, soon()).await.unwrap(), large);
        let over = ("big".to_owned(), vec![5; MESSAGE_MAX + 1]);
        assert!(matches!(pair.client.call(&over, soon()).await, Err(RpcError::TooLarge { .. })));
    }

    #[tokio::test]
    async fn faults_panics_and_large_answers_are_errors_and_the_connection_goes_on() {
        let pair = pair().await;
        let Err(RpcError::Fault(fault)) = pair.client.call(&ask("fault"), soon()).await else {
            panic!("no fault")
        };
        assert_eq!((fault.code, fault.message.as_str()), (FaultCode::NotFound, "no such thing"));
        let Err(RpcError::Fault(fault)) = pair.client.call(&ask("large"), soon()).await else {
            panic!("no fault")
        };
        assert!(fault.message.contains("ask for less"), "{fault}");
        let error = pair.client.call(&ask("panic"), soon()).await.unwrap_err();
        assert!(
            matches!(error, RpcError::Transport { .. }) && error.to_string().contains("oracle 'o'"),
            "{error}"
        );
        assert!(pair.client.call(&ask("still there"), soon()).await.is_ok());
    }

    #[tokio::test]
    async fn requests_that_do_not_come_to_their_end_take_no_more_than_their_room() {
        static ROOM: Semaphore = Semaphore::const_new(1_024);
        let pair = pair_within(&ROOM).await;
        let header = Header { version: PROTOCOL_VERSION, kind: Kind::Request, length: 4 << 20 }.encode();
        let mut stalling = Vec::new();
        for _ in 0..8 {
            let (mut send, recv) = pair.client.connection.open_bi().await.unwrap();
            let sending = async {
                let _ = send.write_all(&header).await;
                // More than its share; it stops where it is refused.
                let _ = send.write_all(&vec![0; 512 << 10]).await;
            };
            sending.await;
            stalling.push((send, recv));
        }
        // One of them is told, so all room is taken.
        let told = stalling.iter_mut().map(|(_, recv)| Box::pin(receive(recv, None)));
        let (told, ..) = futures_util::future::select_all(told).await;
        let Ok((Kind::Fault, body)) = told else { panic!("no fault: {told:?}") };
        assert_eq!(Fault::from_wire(&body).unwrap().code, FaultCode::Overloaded);
        drop(stalling);
        // What they took is given back once they are gone; a caller is told to come again, and does.
        let large = ("large enough".to_owned(), vec![5; 900 << 10]);
        loop {
            match pair.client.call(&large, soon()).await {
                Ok(answer) => break assert_eq!(answer, large),
                Err(RpcError::Fault(fault)) => assert_eq!(fault.code, FaultCode::Overloaded),
                Err(other) => panic!("{other}"),
            }
        }
    }

    #[tokio::test]
    async fn a_deadline_ends_the_call_and_cancels_the_handler() {
        let mut pair = pair().await;
        let error =
            pair.client.call(&ask("wait"), Instant::now() + Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, RpcError::DeadlineExceeded { .. }), "{error}");
        assert_eq!(pair.events.recv().await, Some("began"));
        assert_eq!(pair.events.recv().await, Some("dropped"));
        // The same for a caller that goes away.
        let client = pair.client.clone();
        let call = tokio::spawn(async move { client.call(&ask("wait"), soon()).await });
        assert_eq!(pair.events.recv().await, Some("began"));
        pair.client.close();
        assert_eq!(pair.events.recv().await, Some("dropped"));
        pair.served.await.unwrap();
        assert!(matches!(call.await.unwrap(), Err(RpcError::Transport { .. })));
        assert!(pair.client.is_lost());
    }

    /// Sends raw bytes as a request and returns what comes back.
    async fn raw(client: &EchoClient, bytes: &[u8]) -> Result<(Kind, Vec<u8>), ReceiveError> {
        let (mut send, mut recv) = client.connection.open_bi().await.unwrap();
        let _ = send.write_all(bytes).await;
        let _ = send.finish();
        receive(&mut recv, None).await
    }

    #[tokio::test]
    async fn broken_requests_are_refused_in_words() {
        let pair = pair().await;
        let header = |version, kind, length| Header { version, kind, length }.encode().to_vec();
        let fault = |outcome: Result<(Kind, Vec<u8>), ReceiveError>| match outcome {
            Ok((Kind::Fault, body)) => Fault::from_wire(&body).unwrap().message,
            other => panic!("no fault: {other:?}"),
        };
        let refused =
            raw(&pair.client, &header(PROTOCOL_VERSION, Kind::Request, MESSAGE_MAX as u32 + 1)).await;
        assert!(fault(refused).contains("at most"));
        let refused = raw(&pair.client, &header(PROTOCOL_VERSION, Kind::Answer, 0)).await;
        assert!(fault(refused).contains("in place of a request"));
        let refused = raw(&pair.client, b"GET / HTTP/1.1\r\n\r\n").await;
        assert!(fault(refused).contains("magic"));
        let mut cut = header(PROTOCOL_VERSION, Kind::Request, 1000);
        cut.extend_from_slice(&[0; 10]);
        assert!(fault(raw(&pair.client, &cut).await).contains("cut short"));
        let mut nonsense = header(PROTOCOL_VERSION, Kind::Request, 10);
        nonsense.extend_from_slice(&[0xff; 10]);
        assert!(fault(raw(&pair.client, &nonsense).await).contains("10 bytes are not a valid"));
        let other = raw(&pair.client, &header(PROTOCOL_VERSION + 1, Kind::Request, 0)).await;
        assert!(matches!(other, Ok((Kind::OtherVersion, body)) if body.is_empty()));
        assert!(pair.client.call(&ask("still there"), soon()).await.is_ok());
    }

    #[tokio::test]
    async fn a_peer_of_another_version_is_named_with_both_versions() {
        let ca = ClusterCa::ephemeral().unwrap();
        let bind = |role, name| {
            let identity = ca.identity(role, name).unwrap();
            Endpoint::bind("127.0.0.1:0".parse().unwrap(), identity, EndpointOptions::default()).unwrap()
        };
        let (server, caller) = (bind(Role::Oracle, "o"), bind(Role::Cn, "cn-0"));
        let answers = tokio::spawn({
            let server = server.clone();
            async move {
                let (connection, ..) = server.accept().await.unwrap();
                let answer = |version, kind, length| Header { version, kind, length }.encode().to_vec();
                for bytes in [
                    answer(PROTOCOL_VERSION + 6, Kind::OtherVersion, 0),
                    answer(PROTOCOL_VERSION, Kind::Request, 0),
                    answer(PROTOCOL_VERSION, Kind::Answer, MESSAGE_MAX as u32 + 1),
                    answer(PROTOCOL_VERSION, Kind::Answer, 3),
                    b"short".to_vec(),
                ] {
                    let (mut send, _recv) = connection.accept_bi().await.unwrap();
                    send.write_all(&bytes).await.unwrap();
                    send.finish().unwrap();
                    let _ = send.stopped().await;
                }
                connection.closed().await;
            }
        });
        let client = EchoClient::connect(&caller, server.local_addr(), Role::Oracle, soon()).await.unwrap();
        let mut errors = Vec::new();
        for _ in 0..5 {
            errors.push(client.call(&ask("x"), soon()).await.unwrap_err());
        }
        let text = errors[0].to_string();
        assert!(
            matches!(errors[0], RpcError::OtherVersion { theirs, .. } if theirs == PROTOCOL_VERSION + 6),
            "{text}"
        );
        assert!(errors[0].is_unsent() && text.contains("run one version"), "{text}");
        assert!(matches!(errors[1], RpcError::Protocol { .. }), "{}", errors[1]);
        assert!(matches!(errors[2], RpcError::Protocol { .. }), "{}", errors[2]);
        assert!(matches!(errors[3], RpcError::Transport { .. }), "{}", errors[3]);
        assert!(matches!(errors[4], RpcError::Transport { .. }), "{}", errors[4]);
        client.close();
        answers.await.unwrap();
    }

    proptest! {
        #[test]
        fn any_header_is_taken_or_refused_and_survives_the_way(bytes in any::<[u8; HEADER_BYTES]>(), own in any::<bool>()) {
            let mut bytes = bytes;
            if own {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[4..8].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
                bytes[9..12].fill(0);
            }
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.length as usize <= MESSAGE_MAX);
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = wire::OracleRequest::from_wire(&bytes);
            let _ = wire::OracleResponse::from_wire(&bytes);
            let _ = wire::CnRequest::from_wire(&bytes);
            let _ = wire::CnResponse::from_wire(&bytes);
            let _ = Fault::from_wire(&bytes);
        }
    }
}
