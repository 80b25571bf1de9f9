//! Verbs over QUIC: a session is one connection with protocol `shine-verbs/1`, its lanes are a few long-lived
//! bidirectional streams.
//!
//! ```text
//!   compute node                                   memory node
//!   connect, TLS: both certificates ─────────────► role must be cn
//!   lane 0: HELLO version, name, incarnation ────► all three must be its own
//!                                    ◄──────────── WELCOME session, lease
//!   lane 0, 1: requests ═════════════════════════► executed on the host, one after another in each lane
//!                                    ◄════════════ answers
//! ```
//!
//! Invariant: verbs are executed for compute nodes only, and a session ends with its connection, for good.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn::{Connection, ConnectionError, ReadError, RecvStream, SendStream, WriteError};
use tokio::task::JoinSet;

use super::frame::{Assembler, FrameError, Hello};
use super::framed::{
    FramedVerbs, GreetError, HelloError, LaneError, Sink, Source, greet, serve_lane, take_hello,
};
use super::host::Host;
use super::{FrameBytes, ReadBatch, ReadReply, VerbError, Verbs, WordAt, WriteBatch};
use crate::ids::{Incarnation, SessionId};
use crate::net::endpoint::{Alpn, Endpoint, EndpointError, close, peer_identity, why};
use crate::net::tls::PeerIdentity;
use crate::wire::{PROTOCOL_VERSION, Role};

/// Lanes that a session opens: one for small calls, one for large ones.
pub const LANES: usize = 2;
/// Lanes that a memory node accepts on one connection.
const LANES_MAX: usize = 8;
/// Chunks taken from a stream at once.
const CHUNKS: usize = 32;
/// Time that a caller has to greet, once it is connected.
const HELLO_TIME: Duration = Duration::from_secs(3);
/// Longest reason given when a connection is closed.
const REASON_BYTES_MAX: usize = 256;

// ---------------------------------------------------------------------------------------------------- streams

/// Receiving half of a stream.
struct QuicSource {
    stream: RecvStream,
    /// Chunks that were taken at once; those before `next` are gone.
    chunks: [Bytes; CHUNKS],
    next: usize,
    count: usize,
}

impl QuicSource {
    fn new(stream: RecvStream) -> Self {
        Self { stream, chunks: std::array::from_fn(|_| Bytes::new()), next: 0, count: 0 }
    }
}

impl Source for QuicSource {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        if self.next == self.count {
            self.count = match self.stream.read_chunks(&mut self.chunks).await {
                Ok(Some(count)) => count,
                Ok(None) => return Ok(None),
                Err(ReadError::ConnectionLost(error)) => return Err(why(&error)),
                Err(other) => return Err(other.to_string()),
            };
            self.next = 0;
        }
        self.next += 1;
        Ok(Some(std::mem::take(&mut self.chunks[self.next - 1])))
    }
}

/// Sending half of a stream.
struct QuicSink(SendStream);

impl Sink for QuicSink {
    async fn send(&mut self, bytes: Bytes) -> Result<(), String> {
        self.0.write_chunk(bytes).await.map_err(|error| match error {
            WriteError::ConnectionLost(error) => why(&error),
            other => other.to_string(),
        })
    }
}

fn close_for(connection: &Connection, code: quinn::VarInt, reason: &str) {
    connection.close(code, &reason.as_bytes()[..reason.floor_char_boundary(REASON_BYTES_MAX)]);
}

// ----------------------------------------------------------------------------------------------- compute node

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No connection.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// Somebody else answers at that address.
    #[error("{addr} is memory node '{found}': expected '{wanted}'")]
    WrongNode {
        /// Address.
        addr: SocketAddr,
        /// Who answered.
        found: Arc<str>,
        /// Who was wanted.
        wanted: Arc<str>,
    },
    /// The memory node refused the session, or the connection broke.
    #[error("no session on {peer} at {addr}: {why}")]
    Refused {
        /// Memory node.
        peer: Arc<str>,
        /// Address.
        addr: SocketAddr,
        /// What it said.
        why: String,
    },
    /// No session by the deadline.
    #[error("no session on {peer} at {addr} by the deadline")]
    DeadlineExceeded {
        /// Memory node.
        peer: Arc<str>,
        /// Address.
        addr: SocketAddr,
    },
}

/// An access session on a memory node across a network. While it exists its lease is kept.
#[derive(Debug)]
pub struct QuicVerbs {
    framed: FramedVerbs,
    connection: Connection,
}

impl QuicVerbs {
    /// Opens a session on memory node `mn`, which must be in the given life. Its tasks run on the present runtime.
    ///
    /// # Errors
    /// By the deadline, with who or what was met at `addr`.
    pub async fn connect(
        endpoint: &Endpoint,
        addr: SocketAddr,
        mn: &str,
        incarnation: Incarnation,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let peer: Arc<str> = mn.into();
        let late = ConnectError::DeadlineExceeded { peer: Arc::clone(&peer), addr };
        let session = Self::open(endpoint, addr, peer, incarnation);
        tokio::time::timeout_at(deadline.into(), session).await.unwrap_or(Err(late))
    }

    async fn open(
        endpoint: &Endpoint,
        addr: SocketAddr,
        peer: Arc<str>,
        incarnation: Incarnation,
    ) -> Result<Self, ConnectError> {
        let connection = endpoint.connect(addr, Role::Mn, Alpn::Verbs).await?;
        let found = peer_identity(&connection).map_err(EndpointError::from)?;
        if *found.name != *peer {
            connection.close(close::DONE, b"another memory node was expected");
            return Err(ConnectError::WrongNode { addr, found: found.name, wanted: peer });
        }
        let refused = |why: String| ConnectError::Refused { peer: Arc::clone(&peer), addr, why };
        let mut lanes = Vec::with_capacity(LANES);
        for _ in 0..LANES {
            let (send, recv) = connection.open_bi().await.map_err(|error| refused(why(&error)))?;
            lanes.push((QuicSink(send), QuicSource::new(recv)));
        }
        let hello = Hello { version: PROTOCOL_VERSION, incarnation, mn: (*peer).to_owned() };
        let mut assembler = Assembler::default();
        let (sink, source) = &mut lanes[0];
        let welcome = match greet(sink, source, &mut assembler, &hello).await {
            Ok(welcome) => welcome,
            Err(GreetError::Frame(error)) => {
                close_for(&connection, close::PROTOCOL, &error.to_string());
                return Err(refused(format!("it sent {error}")));
            }
            Err(other) => return Err(refused(other.to_string())),
        };
        let closer = {
            let connection = connection.clone();
            move |what: &str| close_for(&connection, close::PROTOCOL, what)
        };
        Ok(Self { framed: FramedVerbs::start(peer, welcome, lanes, assembler, closer), connection })
    }

    /// The connection, for its statistics.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Calls under way.
    pub fn in_flight(&self) -> usize {
        self.framed.in_flight()
    }
}

impl Drop for QuicVerbs {
    fn drop(&mut self) {
        self.connection.close(close::DONE, b"the session was given up");
    }
}

impl Verbs for QuicVerbs {
    fn peer(&self) -> &Arc<str> {
        self.framed.peer()
    }

    fn session(&self) -> SessionId {
        self.framed.session()
    }

    fn is_lost(&self) -> bool {
        self.framed.is_lost()
    }

    async fn read(&self, batch: ReadBatch, deadline: Instant) -> Result<ReadReply, VerbError> {
        self.framed.read(batch, deadline).await
    }

    async fn write(&self, batch: WriteBatch, deadline: Instant) -> Result<FrameBytes, VerbError> {
        self.framed.write(batch, deadline).await
    }

    async fn compare_swap(
        &self,
        word: WordAt,
        expected: u64,
        new: u64,
        deadline: Instant,
    ) -> Result<u64, VerbError> {
        self.framed.compare_swap(word, expected, new, deadline).await
    }

    async fn fetch_add(&self, word: WordAt, add: u64, deadline: Instant) -> Result<u64, VerbError> {
        self.framed.fetch_add(word, add, deadline).await
    }

    async fn session_alive(&self, session: SessionId, deadline: Instant) -> Result<bool, VerbError> {
        self.framed.session_alive(session, deadline).await
    }

    async fn send(&self, message: Bytes, deadline: Instant) -> Result<(), VerbError> {
        self.framed.send(message, deadline).await
    }

    async fn recv(&self, deadline: Instant) -> Result<Bytes, VerbError> {
        self.framed.recv(deadline).await
    }
}

// ------------------------------------------------------------------------------------------------ memory node

/// Why a connection was not served to its regular end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Verbs are not for everybody.
    #[error("{0} asked for verbs, which are for compute nodes")]
    Forbidden(PeerIdentity),
    /// No greeting in time.
    #[error("{0} did not greet within {HELLO_TIME:?}")]
    NoHello(PeerIdentity),
    /// A wrong greeting.
    #[error("{peer} was refused: {why}")]
    Hello {
        /// Who.
        peer: PeerIdentity,
        /// Why.
        #[source]
        why: HelloError,
    },
    /// The peer broke the protocol.
    #[error("{peer} sent {what}")]
    Protocol {
        /// Who.
        peer: PeerIdentity,
        /// What.
        #[source]
        what: FrameError,
    },
    /// The connection broke.
    #[error("connection of {peer} lost: {why}")]
    Lost {
        /// Who.
        peer: PeerIdentity,
        /// What the transport said.
        why: String,
    },
}

/// Serves verbs on `connection` until the peer ends it.
///
/// # Errors
/// If it ends otherwise. In any case the connection is closed, with the reason, and the session is over.
pub async fn serve(host: Arc<Host>, connection: Connection, peer: PeerIdentity) -> Result<(), ServeError> {
    if peer.role != Role::Cn {
        let error = ServeError::Forbidden(peer);
        close_for(&connection, close::FORBIDDEN, &error.to_string());
        return Err(error);
    }
    let greeting = async {
        let (send, recv) = match connection.accept_bi().await {
            Ok(lane) => lane,
            Err(error) => return Err(LaneError::Lost(why(&error)).into()),
        };
        let (mut sink, mut source, mut assembler) =
            (QuicSink(send), QuicSource::new(recv), Assembler::default());
        let session = take_hello(&host, &peer.name, &mut sink, &mut source, &mut assembler).await?;
        Ok((session, sink, source, assembler))
    };
    let (session, sink, source, assembler) = match tokio::time::timeout(HELLO_TIME, greeting).await {
        Ok(Ok(greeted)) => greeted,
        Ok(Err(why)) => {
            let code = if matches!(why, HelloError::Open(_)) { close::BUSY } else { close::PROTOCOL };
            close_for(&connection, code, &why.to_string());
            return Err(ServeError::Hello { peer, why });
        }
        Err(_) => {
            let error = ServeError::NoHello(peer);
            close_for(&connection, close::PROTOCOL, &error.to_string());
            return Err(error);
        }
    };
    let mut lanes = JoinSet::new();
    lanes.spawn(serve_lane(Arc::clone(&host), Arc::clone(&session), true, sink, source, assembler));
    let outcome = loop {
        tokio::select! {
            lane = connection.accept_bi() => match lane {
                Ok(_) if lanes.len() >= LANES_MAX => {
                    break Err(LaneError::Frame(FrameError::TooManyLanes));
                }
                Ok((send, recv)) => {
                    let (sink, source) = (QuicSink(send), QuicSource::new(recv));
                    let (host, session) = (Arc::clone(&host), Arc::clone(&session));
                    lanes.spawn(serve_lane(host, session, false, sink, source, Assembler::default()));
                }
                Err(error) => break ended(&error),
            },
            Some(lane) = lanes.join_next() => match lane {
                Ok(Ok(())) => {}
                // What broke the lane broke the connection: its own account is the better one.
                Ok(Err(LaneError::Lost(_))) if connection.close_reason().is_some() => {
                    break ended(&connection.close_reason().expect("just seen"));
                }
                Ok(Err(error)) => break Err(error),
                Err(panicked) => std::panic::resume_unwind(panicked.into_panic()),
            },
        }
    };
    host.end_session(&session);
    lanes.shutdown().await;
    match outcome {
        Ok(()) => Ok(()),
        Err(LaneError::Frame(what)) => {
            close_for(&connection, close::PROTOCOL, &what.to_string());
            Err(ServeError::Protocol { peer, what })
        }
        Err(LaneError::Lost(why)) => {
            connection.close(close::DONE, b"the connection broke");
            Err(ServeError::Lost { peer, why })
        }
    }
}

/// How a connection's end is judged: one that either side closed on purpose is a regular one.
fn ended(error: &ConnectionError) -> Result<(), LaneError> {
    match error {
        ConnectionError::ApplicationClosed(closed) if closed.error_code == close::DONE => Ok(()),
        ConnectionError::LocallyClosed => Ok(()),
        other => Err(LaneError::Lost(why(other))),
    }
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut, BytesMut};
    use parking_lot::Mutex;
    use tokio::task::JoinHandle;

    use super::super::conformance::Backend;
    use super::super::frame::{self, Kind};
    use super::super::framed::window_calls;
    use super::super::host::HostOptions;
    use super::super::memory::{HugePages, RegionMemory};
    use super::*;
    use crate::ids::{Epoch, RegionId, RemotePtr};
    use crate::net::endpoint::EndpointOptions;
    use crate::net::tls::ClusterCa;

    const NAME: &str = "mn-0";
    const LIFE: Incarnation = Incarnation(0x5117e);

    fn any_port() -> SocketAddr {
        "127.0.0.1:0".parse().unwrap()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    /// A memory node on loopback, which notes how each connection ended.
    struct Server {
        endpoint: Endpoint,
        connections: Arc<Mutex<Vec<Connection>>>,
        ends: tokio::sync::mpsc::Receiver<Result<(), ServeError>>,
        _accepting: JoinHandle<()>,
    }

    impl Server {
        fn start(ca: &ClusterCa, host: Arc<Host>) -> Self {
            let identity = ca.identity(Role::Mn, host.name()).unwrap();
            let endpoint = Endpoint::bind(any_port(), identity, EndpointOptions::default()).unwrap();
            let connections = Arc::<Mutex<Vec<Connection>>>::default();
            let (ended, ends) = tokio::sync::mpsc::channel(64);
            let accepting = {
                let (endpoint, connections) = (endpoint.clone(), Arc::clone(&connections));
                tokio::spawn(async move {
                    while let Some((connection, peer, alpn)) = endpoint.accept().await {
                        assert_eq!(alpn, Alpn::Verbs);
                        connections.lock().push(connection.clone());
                        let (host, ended) = (Arc::clone(&host), ended.clone());
                        tokio::spawn(async move {
                            let end = serve(host, connection, peer).await;
                            let _ = ended.send(end).await;
                        });
                    }
                })
            };
            Self { endpoint, connections, ends, _accepting: accepting }
        }
    }

    fn host() -> Arc<Host> {
        let host = Host::new(NAME, LIFE, HostOptions::default());
        let memory = RegionMemory::new(1 << 20, HugePages::Off).unwrap();
        host.add_region(RegionId(1), Epoch(1), Epoch(1), memory).unwrap();
        host
    }

    fn caller(ca: &ClusterCa, role: Role, options: EndpointOptions) -> Endpoint {
        Endpoint::bind(any_port(), ca.identity(role, "caller").unwrap(), options).unwrap()
    }

    /// Every session has an endpoint of its own, so that the server's side of it is known by its address.
    struct Quic {
        ca: ClusterCa,
        servers: Mutex<Vec<(Arc<Host>, Server)>>,
        callers: Mutex<Vec<(Arc<Host>, usize, Endpoint)>>,
    }

    impl Quic {
        fn new() -> Self {
            let ca = ClusterCa::ephemeral().unwrap();
            Self { ca, servers: Mutex::default(), callers: Mutex::default() }
        }
    }

    impl Backend for Quic {
        type Session = QuicVerbs;

        async fn connect(&self, host: &Arc<Host>, client: &str) -> QuicVerbs {
            let addr = {
                let mut servers = self.servers.lock();
                if !servers.iter().any(|(of, _)| Arc::ptr_eq(of, host)) {
                    servers.push((Arc::clone(host), Server::start(&self.ca, Arc::clone(host))));
                }
                let (_, server) = servers.iter().find(|(of, _)| Arc::ptr_eq(of, host)).unwrap();
                server.endpoint.local_addr()
            };
            let identity = self.ca.identity(Role::Cn, client).unwrap();
            let endpoint = Endpoint::bind(any_port(), identity, EndpointOptions::default()).unwrap();
            let verbs =
                QuicVerbs::connect(&endpoint, addr, host.name(), host.incarnation(), soon()).await.unwrap();
            self.callers.lock().push((Arc::clone(host), verbs.connection.stable_id(), endpoint));
            verbs
        }

        async fn cut(&self, session: &QuicVerbs) {
            let callers = self.callers.lock();
            let id = session.connection.stable_id();
            // Ids are used again after a connection is gone: the newest is meant.
            let (host, _, endpoint) = callers.iter().rev().find(|(_, of, _)| *of == id).unwrap();
            let servers = self.servers.lock();
            let (_, server) = servers.iter().find(|(of, _)| Arc::ptr_eq(of, host)).unwrap();
            let connections = server.connections.lock();
            let theirs = connections.iter().find(|c| c.remote_address() == endpoint.local_addr()).unwrap();
            theirs.close(close::BUSY, b"cut");
        }

        fn in_flight(&self, session: &QuicVerbs) -> usize {
            session.in_flight()
        }

        fn window(&self, bytes: usize) -> usize {
            window_calls(bytes)
        }
    }

    verbs_conformance_tests!(Quic::new());

    #[tokio::test]
    async fn who_greets_wrongly_is_told_what_is_wrong() {
        let ca = ClusterCa::ephemeral().unwrap();
        let server = Server::start(&ca, host());
        let addr = server.endpoint.local_addr();
        let cn = caller(&ca, Role::Cn, EndpointOptions::default());
        let error = QuicVerbs::connect(&cn, addr, "mn-1", LIFE, soon()).await.unwrap_err().to_string();
        assert!(error.contains("'mn-0'") && error.contains("expected 'mn-1'"), "{error}");
        let error =
            QuicVerbs::connect(&cn, addr, NAME, Incarnation(9), soon()).await.unwrap_err().to_string();
        assert!(error.contains("restarted") && error.contains(&LIFE.to_string()), "{error}");
        for role in [Role::Client, Role::Admin] {
            let user = caller(&ca, role, EndpointOptions::default());
            let error = QuicVerbs::connect(&user, addr, NAME, LIFE, soon()).await.unwrap_err().to_string();
            assert!(error.contains("verbs, which are for compute nodes"), "{error}");
        }
        assert!(QuicVerbs::connect(&cn, addr, NAME, LIFE, soon()).await.is_ok());
    }

    /// Opens a connection by hand, greets as told, and sends `bytes` on the first lane.
    async fn raw(
        ca: &ClusterCa,
        server: &Server,
        hello: Option<Hello>,
        bytes: &[u8],
    ) -> (Endpoint, Connection, RecvStream) {
        let cn = caller(ca, Role::Cn, EndpointOptions::default());
        let connection = cn.connect(server.endpoint.local_addr(), Role::Mn, Alpn::Verbs).await.unwrap();
        let (mut send, recv) = connection.open_bi().await.unwrap();
        let mut out = BytesMut::new();
        if let Some(hello) = hello {
            frame::put_hello(&mut out, &hello);
        }
        out.put_slice(bytes);
        send.write_all(&out).await.unwrap();
        let _ = send.finish();
        (cn, connection, recv)
    }

    #[tokio::test]
    async fn malformed_frames_close_the_connection_and_say_why() {
        let ca = ClusterCa::ephemeral().unwrap();
        let host = host();
        let mut server = Server::start(&ca, Arc::clone(&host));
        let hello = Hello { version: PROTOCOL_VERSION, incarnation: LIFE, mn: NAME.into() };
        let framed = |kind: Kind, body: &[u8]| {
            let mut out = BytesMut::new();
            frame::put_head(&mut out, kind, 1, body.len());
            out.put_slice(body);
            out
        };
        let oversize = {
            let mut out = BytesMut::new();
            frame::put_head(&mut out, Kind::Send, 1, super::super::MESSAGE_BYTES_MAX + 1);
            out
        };
        let cases = [
            (Some(hello.clone()), BytesMut::from(&b"\x05\0\0\0\xc8\0\0\0\0"[..]), "unknown kind 200"),
            (Some(hello.clone()), oversize, "1048582 bytes"),
            (Some(hello.clone()), framed(Kind::Read, &[1, 0, 0x80]), "Read frame with a bad length"),
            (Some(hello.clone()), framed(Kind::Ping, &[1]), "Ping frame with a bad end"),
            (Some(hello.clone()), framed(Kind::Word, &[0; 8]), "unexpected Word"),
            (Some(hello.clone()), framed(Kind::Credit, &[1]), "Credit frame with a bad bytes"),
            (Some(hello.clone()), BytesMut::from(&[3, 0][..]), "ends within a frame"),
            (Some(Hello { version: 77, ..hello.clone() }), BytesMut::new(), "version 77"),
            (None, framed(Kind::Ping, &[]), "unexpected Ping"),
            (None, framed(Kind::Hello, &[9; 40]), "Hello frame with a bad magic"),
            // Four bytes of length, then the kind: a slash.
            (None, BytesMut::from(&b"GET / HTTP/1.1\r\n\r\n"[..]), "unknown kind 47"),
        ];
        for (hello, bytes, expected) in cases {
            let (_cn, connection, _recv) = raw(&ca, &server, hello, &bytes).await;
            let said = why(&connection.closed().await);
            assert!(said.contains(expected), "{said}: expected {expected}");
            let end = server.ends.recv().await.unwrap().unwrap_err();
            let logged = format!("{end} {}", std::error::Error::source(&end).unwrap());
            assert!(logged.contains(expected) && logged.contains("caller"), "{logged}: expected {expected}");
            assert_eq!(host.session_count(), 0, "its session is over");
        }
        // Others are not disturbed.
        let cn = caller(&ca, Role::Cn, EndpointOptions::default());
        let verbs = QuicVerbs::connect(&cn, server.endpoint.local_addr(), NAME, LIFE, soon()).await.unwrap();
        assert_eq!(verbs.session_alive(verbs.session(), soon()).await, Ok(true));
        drop(verbs);
        assert!(server.ends.recv().await.unwrap().is_ok(), "a session given up is a regular end");
    }

    #[tokio::test]
    async fn a_caller_that_opens_too_many_lanes_is_refused() {
        let ca = ClusterCa::ephemeral().unwrap();
        let server = Server::start(&ca, host());
        let cn = caller(&ca, Role::Cn, EndpointOptions::default());
        let verbs = QuicVerbs::connect(&cn, server.endpoint.local_addr(), NAME, LIFE, soon()).await.unwrap();
        let mut lanes = Vec::new();
        for _ in 0..LANES_MAX + 1 {
            let (mut send, recv) = verbs.connection().open_bi().await.unwrap();
            let mut ping = BytesMut::new();
            frame::put_empty(&mut ping, Kind::Ping, 0);
            let _ = send.write_all(&ping).await;
            lanes.push((send, recv));
        }
        assert!(why(&verbs.connection().closed().await).contains("more lanes"));
    }

    /// A memory node that answers what was not asked.
    #[tokio::test]
    async fn a_peer_that_answers_wrongly_is_a_protocol_error() {
        let ca = ClusterCa::ephemeral().unwrap();
        let at = RemotePtr::new(RegionId(1), 0);
        type Answer<'a> = &'a dyn Fn(&mut BytesMut, u32);
        let answers: [(&str, Answer<'_>); 6] = [
            ("does not wait for one", &|out, id| frame::put_word(out, id + 1, 0)),
            ("does not wait for one", &|out, id| frame::put_word(out, id | 1 << 16, 0)),
            ("does not wait for one", &|out, id| frame::put_flag(out, id, true)),
            ("a Ping frame as answer", &|out, id| frame::put_empty(out, Kind::Ping, id)),
            ("bad code", &|out, id| {
                frame::put_head(out, Kind::Refused, id, 1);
                out.put_u8(77);
            }),
            ("unknown kind", &|out, _| out.put_bytes(0, 20)),
        ];
        for (expected, answer) in answers {
            let identity = ca.identity(Role::Mn, NAME).unwrap();
            let endpoint = Endpoint::bind(any_port(), identity, EndpointOptions::default()).unwrap();
            let cn = caller(&ca, Role::Cn, EndpointOptions::default());
            let rogue = async {
                let (connection, ..) = endpoint.accept().await.unwrap();
                let (mut send, recv) = connection.accept_bi().await.unwrap();
                let (mut source, mut assembler) = (QuicSource::new(recv), Assembler::default());
                let mut welcome = BytesMut::new();
                frame::put_welcome(&mut welcome, SessionId(1), 3_600_000);
                send.write_all(&welcome).await.unwrap();
                loop {
                    if let Some(frame) = assembler.next_frame().unwrap()
                        && frame.kind == Kind::FetchAdd
                    {
                        let mut out = BytesMut::new();
                        answer(&mut out, frame.id);
                        send.write_all(&out).await.unwrap();
                        return why(&connection.closed().await);
                    }
                    assembler.push(source.next().await.unwrap().unwrap());
                }
            };
            let call = async {
                let addr = endpoint.local_addr();
                let verbs = QuicVerbs::connect(&cn, addr, NAME, LIFE, soon()).await.unwrap();
                let word = WordAt { at, epoch: Epoch(1) };
                let error = verbs.fetch_add(word, 1, soon()).await.unwrap_err();
                assert!(verbs.is_lost());
                assert_eq!(verbs.fetch_add(word, 1, soon()).await, Err(error.clone()), "for good");
                error
            };
            let (told, error) = tokio::join!(rogue, call);
            assert!(matches!(error, VerbError::Protocol { .. }), "{error:?}");
            assert!(error.to_string().contains(expected), "{error}: expected {expected}");
            assert!(told.contains(expected), "{told}: expected {expected}");
        }
    }

    /// Relays datagrams between a caller and a memory node until it is told to swallow them.
    async fn relay(to: SocketAddr) -> (SocketAddr, tokio::sync::watch::Sender<bool>, JoinHandle<()>) {
        let (front, back) = (
            tokio::net::UdpSocket::bind(any_port()).await.unwrap(),
            tokio::net::UdpSocket::bind(any_port()).await.unwrap(),
        );
        let addr = front.local_addr().unwrap();
        let (cut, is_cut) = tokio::sync::watch::channel(false);
        let task = tokio::spawn(async move {
            let (mut a, mut b) = (vec![0; 65_536], vec![0; 65_536]);
            let mut caller = None;
            loop {
                tokio::select! {
                    got = front.recv_from(&mut a) => {
                        let (len, from) = got.unwrap();
                        caller = Some(from);
                        if !*is_cut.borrow() {
                            let _ = back.send_to(&a[..len], to).await;
                        }
                    }
                    got = back.recv_from(&mut b) => {
                        let (len, _) = got.unwrap();
                        if !*is_cut.borrow() && let Some(caller) = caller {
                            let _ = front.send_to(&b[..len], caller).await;
                        }
                    }
                }
            }
        });
        (addr, cut, task)
    }

    #[tokio::test]
    async fn a_network_that_goes_silent_is_a_lost_connection_long_before_the_deadline() {
        let ca = ClusterCa::ephemeral().unwrap();
        let host = host();
        let server = Server::start(&ca, Arc::clone(&host));
        let (addr, cut, relay) = relay(server.endpoint.local_addr()).await;
        let options = EndpointOptions {
            idle_timeout: Duration::from_millis(300),
            keep_alive: Duration::from_millis(50),
            ..EndpointOptions::default()
        };
        let cn = caller(&ca, Role::Cn, options);
        let verbs = QuicVerbs::connect(&cn, addr, NAME, LIFE, soon()).await.unwrap();
        let word = WordAt { at: RemotePtr::new(RegionId(1), 8), epoch: Epoch(1) };
        verbs.fetch_add(word, 1, soon()).await.unwrap();
        cut.send(true).unwrap();
        // A deadline before the loss is found out is kept, and the silence is told.
        let short = verbs.fetch_add(word, 1, Instant::now() + Duration::from_millis(40)).await.unwrap_err();
        assert!(matches!(short, VerbError::DeadlineExceeded { silent_ms: 39.., .. }), "{short:?}");
        let far = Instant::now() + Duration::from_secs(3600);
        let (read, recv) = tokio::join!(verbs.fetch_add(word, 1, far), verbs.recv(far));
        for outcome in [read.map(drop), recv.map(drop)] {
            let error = outcome.unwrap_err();
            assert!(
                matches!(&error, VerbError::ConnectionLost { why, .. } if why.contains("nothing was heard")),
                "{error:?}"
            );
        }
        assert!(verbs.is_lost());
        relay.abort();
    }

    /// An idle session keeps its lease by itself.
    #[tokio::test]
    async fn an_idle_session_keeps_its_lease() {
        let ca = ClusterCa::ephemeral().unwrap();
        let options = HostOptions { lease: Duration::from_millis(200), ..HostOptions::default() };
        let host = Host::new(NAME, LIFE, options);
        let server = Server::start(&ca, Arc::clone(&host));
        let cn = caller(&ca, Role::Cn, EndpointOptions::default());
        let verbs = QuicVerbs::connect(&cn, server.endpoint.local_addr(), NAME, LIFE, soon()).await.unwrap();
        // Nothing is called for three leases: this ends by its deadline, not by the lease.
        let waited = verbs.recv(Instant::now() + Duration::from_millis(600)).await;
        assert!(matches!(waited, Err(VerbError::DeadlineExceeded { .. })), "{waited:?}");
        assert_eq!(verbs.session_alive(verbs.session(), soon()).await, Ok(true));
        assert!(!verbs.is_lost());
    }

    /// What a gather reports is what went over the wire as frames.
    #[tokio::test]
    async fn frames_are_counted_in_full() {
        let ca = ClusterCa::ephemeral().unwrap();
        let server = Server::start(&ca, host());
        let cn = caller(&ca, Role::Cn, EndpointOptions::default());
        let verbs = QuicVerbs::connect(&cn, server.endpoint.local_addr(), NAME, LIFE, soon()).await.unwrap();
        let mut batch = ReadBatch::new();
        for i in 0..16 {
            batch.push(RemotePtr::new(RegionId(1), 640 * i), Epoch(1), 640);
        }
        let reply = verbs.read(batch, soon()).await.unwrap();
        // Head 9; group: region 2, length 2, epoch 1, count 1, items 16 × 4.
        assert_eq!(reply.frames, FrameBytes { request: 9 + 6 + 64, reply: 9 + 16 * 640 });
        let mut batch = WriteBatch::new();
        batch.push_word(RemotePtr::new(RegionId(1), 8), Epoch(1), 1);
        // Head 9; count 1; part: region 2, epoch 1, offset 1, length 1; data 8.
        assert_eq!(verbs.write(batch, soon()).await, Ok(FrameBytes { request: 9 + 6 + 8, reply: 9 }));
    }
}
