//! A process's QUIC endpoint: one UDP socket on which it calls and is called.
//!
//! ```text
//!   connect(addr, role, alpn) ──► handshake, peer's role checked ──► Connection
//!   socket ──► acceptor task ──► handshakes, side by side, bounded ──► queue, bounded ──► accept()
//! ```
//!
//! The transport profile goes by the peer's address ([`Profile`]): between processes of one host large datagrams and a
//! constant window, over a network path MTU discovery and a fair congestion controller.
//!
//! Invariant: a connection that leaves this module is mutually authenticated, and its [`PeerIdentity`] is the one in
//! the peer's verified certificate.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use quinn::congestion::{Controller, ControllerFactory, CubicConfig};
use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use quinn::{
    AsyncUdpSocket, Connection, ConnectionError, EndpointConfig, Incoming, MtuDiscoveryConfig, ServerConfig,
    TokioRuntime, TransportConfig, TransportErrorCode, UdpPoller, VarInt,
};
use rustls::pki_types::CertificateDer;
use tokio::io::Interest;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::Sleep;

use super::shape::Link;
use super::tls::{Identity, PeerIdentity, SERVER_NAME, TlsError, identity_of};
use crate::wire::Role;

/// UDP payload between processes of one host: as large as pays (larger stalls at start-up).
pub const LOOPBACK_MTU: u16 = 60_000;
/// What a loopback connection falls back to at worst. quinn pads its first packets to this size, and their headers
/// have 14 bits for a length (it panics above).
const LOOPBACK_MTU_MIN: u16 = 16_000;
const _: () = assert!(LOOPBACK_MTU_MIN < 1 << 14);
/// Largest datagram tried on a network: the largest of which ten fit into one GSO send (65,507 bytes).
const NETWORK_MTU_MAX: u16 = 6_500;
/// Largest UDP payload that is received: one receive buffer takes any datagram, and any run of datagrams that the
/// kernel has joined (GRO), without one of them being cut.
const RECEIVE_BYTES_MAX: u16 = 65_527;
/// Bytes in flight on loopback: the application bounds them, not the window.
const LOOPBACK_WINDOW: u64 = 1 << 30;
/// Start of the congestion window on a network.
const NETWORK_WINDOW: u64 = 4 << 20;
const STREAM_WINDOW: u32 = 16 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;
const SEND_WINDOW: u64 = 32 << 20;
/// Socket buffers that are asked for, in bytes.
const SOCKET_BUFFER: usize = 32 << 20;
/// Streams that a peer may have open at once.
const STREAMS_MAX: u32 = 1_024;
/// Connections that wait to be accepted.
const ACCEPT_QUEUE: usize = 256;
/// Bytes of a peer's reason for closing that are kept.
const REASON_BYTES_MAX: usize = 256;
/// Time that [`Endpoint::close`] gives peers to hear of it.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Application close codes.
pub mod close {
    use quinn::VarInt;

    /// The process, or its user of the connection, is done.
    pub const DONE: VarInt = VarInt::from_u32(0);
    /// The peer's role may not do this.
    pub const FORBIDDEN: VarInt = VarInt::from_u32(1);
    /// No room for another connection.
    pub const BUSY: VarInt = VarInt::from_u32(2);
    /// The peer broke the protocol.
    pub const PROTOCOL: VarInt = VarInt::from_u32(3);
}

/// Protocol spoken on a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Alpn {
    /// Verbs: [`crate::verbs::quic`].
    Verbs,
    /// Control plane and clients: [`super::rpc`].
    Rpc,
}

impl Alpn {
    const ALL: [Self; 2] = [Self::Verbs, Self::Rpc];

    /// The protocol's name in the handshake.
    pub const fn as_bytes(self) -> &'static [u8] {
        match self {
            Self::Verbs => b"shine-verbs/1",
            Self::Rpc => b"shine-rpc/1",
        }
    }
}

/// How connections are tuned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Profile {
    /// By the peer's address.
    #[default]
    ByAddress,
    /// As on loopback, always.
    Loopback,
    /// As over a network, always.
    Network,
}

/// Options of an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Million bits per second that the process may send, and receive; 0 means no bound. A software bound for
    /// experiments.
    pub link_mbit: u64,
    /// Silence after which a connection is lost.
    pub idle_timeout: Duration,
    /// Interval of keep-alives, well below the idle timeout.
    pub keep_alive: Duration,
    /// Longest handshake, in either role.
    pub handshake_timeout: Duration,
    /// Handshakes of callers under way at once; beyond, the oldest is given up.
    pub handshakes_max: usize,
    /// Whether others may connect.
    pub serves: bool,
    /// How connections are tuned.
    pub profile: Profile,
}

impl Default for EndpointOptions {
    fn default() -> Self {
        Self {
            link_mbit: 0,
            idle_timeout: Duration::from_secs(2),
            keep_alive: Duration::from_millis(500),
            handshake_timeout: Duration::from_secs(3),
            handshakes_max: 128,
            serves: true,
            profile: Profile::ByAddress,
        }
    }
}

/// Why there is no endpoint, or no connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The socket cannot be had.
    #[error("listening on {listen}: {why}")]
    Bind {
        /// Address that was asked for.
        listen: SocketAddr,
        /// What the system said.
        why: io::Error,
    },
    /// The identity cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Nobody answered, or the handshake failed.
    #[error("connecting to {expected} at {addr}: {why}")]
    Connect {
        /// Peer's address.
        addr: SocketAddr,
        /// Role that was expected there.
        expected: Role,
        /// What happened.
        why: String,
    },
    /// One side did not accept the other's certificate: waiting does not help.
    #[error("connecting to {expected} at {addr}: {why}")]
    Refused {
        /// Peer's address.
        addr: SocketAddr,
        /// Role that was expected there.
        expected: Role,
        /// What was wrong with it.
        why: String,
    },
    /// Somebody else answered.
    #[error("{addr} is {found}: expected role {expected}")]
    WrongRole {
        /// Peer's address.
        addr: SocketAddr,
        /// Who answered.
        found: PeerIdentity,
        /// Role that was expected there.
        expected: Role,
    },
    /// The endpoint was closed.
    #[error("the endpoint is closed")]
    Closed,
}

/// One UDP socket for all that a process calls and is called by. Clones share it.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    quinn: quinn::Endpoint,
    identity: Identity,
    local_addr: SocketAddr,
    options: EndpointOptions,
    transports: Transports,
    clients: [Arc<QuicClientConfig>; Alpn::ALL.len()],
    link: Option<Arc<Link>>,
    accepted: tokio::sync::Mutex<mpsc::Receiver<Accepted>>,
    /// Owns the handshakes under way; ends when the endpoint closes.
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

/// A connection with who called, and for what.
type Accepted = (Connection, PeerIdentity, Alpn);

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("identity", self.inner.identity.peer())
            .field("local_addr", &self.inner.local_addr)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Binds `listen` (port 0: any). Needs a tokio runtime.
    ///
    /// # Errors
    /// If the socket cannot be bound, or the identity cannot be used.
    pub fn bind(
        listen: SocketAddr,
        identity: Identity,
        options: EndpointOptions,
    ) -> Result<Self, EndpointError> {
        let bind = |why| EndpointError::Bind { listen, why };
        let socket = std::net::UdpSocket::bind(listen).map_err(bind)?;
        socket.set_nonblocking(true).map_err(bind)?;
        enlarge_buffers(&socket);
        let link = (options.link_mbit > 0).then(|| Arc::new(Link::new(options.link_mbit)));
        let socket = Arc::new(Socket::new(socket, link.clone()).map_err(bind)?);
        let local_addr = socket.io.local_addr().map_err(bind)?;

        let transports = Transports::new(&options);
        let mut config = EndpointConfig::default();
        config.max_udp_payload_size(RECEIVE_BYTES_MAX).expect("within the bounds of QUIC");
        let quinn = quinn::Endpoint::new_with_abstract_socket(config, None, socket, Arc::new(TokioRuntime))
            .map_err(bind)?;

        let [verbs, rpc] = Alpn::ALL.map(|alpn| client_config(&identity, alpn));
        let clients = [Arc::new(verbs?), Arc::new(rpc?)];

        let (accepted_tx, accepted) = mpsc::channel(ACCEPT_QUEUE);
        let mut acceptor = None;
        if options.serves {
            let servers = Servers::new(&identity, &transports)?;
            quinn.set_server_config(Some((*servers.network).clone()));
            let (quinn, options) = (quinn.clone(), options.clone());
            acceptor = Some(tokio::spawn(accept_all(quinn, servers, options, accepted_tx)));
        }
        Ok(Self {
            inner: Arc::new(Inner {
                quinn,
                identity,
                local_addr,
                options,
                transports,
                clients,
                link,
                accepted: tokio::sync::Mutex::new(accepted),
                acceptor: Mutex::new(acceptor),
            }),
        })
    }

    /// Connects to the process at `addr`, which must show a certificate of role `expected`.
    ///
    /// # Errors
    /// By the handshake timeout, with who or what was found at `addr`. A peer that refuses *us* does so after this
    /// has returned: the first use of the connection then fails, and [`why`] says the reason.
    pub async fn connect(
        &self,
        addr: SocketAddr,
        expected: Role,
        alpn: Alpn,
    ) -> Result<Connection, EndpointError> {
        let inner = &*self.inner;
        let failed = |why: String| EndpointError::Connect { addr, expected, why };
        let mut config = quinn::ClientConfig::new(inner.clients[alpn as usize].clone());
        config.transport_config(inner.transports.to(addr.ip()));
        let connecting = match inner.quinn.connect_with(config, addr, SERVER_NAME) {
            Ok(connecting) => connecting,
            Err(quinn::ConnectError::EndpointStopping) => return Err(EndpointError::Closed),
            Err(other) => return Err(failed(other.to_string())),
        };
        let limit = inner.options.handshake_timeout;
        let connection = match tokio::time::timeout(limit, connecting).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(ConnectionError::TimedOut)) | Err(_) => {
                return Err(failed("no answer: is the process running, and reachable from here?".into()));
            }
            Ok(Err(error)) if is_refusal(&error) => {
                return Err(EndpointError::Refused { addr, expected, why: why(&error) });
            }
            Ok(Err(error)) => return Err(failed(why(&error))),
        };
        let found = peer_identity(&connection).map_err(|e| failed(e.to_string()))?;
        if found.role != expected {
            connection.close(close::FORBIDDEN, b"another role was expected");
            return Err(EndpointError::WrongRole { addr, found, expected });
        }
        Ok(connection)
    }

    /// The next connection that a peer has made, with who it is and what it wants to speak; `None` once the endpoint
    /// is closed.
    pub async fn accept(&self) -> Option<(Connection, PeerIdentity, Alpn)> {
        self.inner.accepted.lock().await.recv().await
    }

    /// Address of the socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr
    }

    /// Own identity.
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// The shaped link, if there is one.
    pub fn link(&self) -> Option<&Arc<Link>> {
        self.inner.link.as_ref()
    }

    /// Closes all connections, tells the peers, and refuses new ones. Returns once they know, or after a second.
    pub async fn close(&self) {
        self.inner.quinn.close(close::DONE, b"the process is leaving");
        let acceptor = self.inner.acceptor.lock().take();
        if let Some(acceptor) = acceptor {
            // Ends by itself: the closed endpoint yields no more callers.
            let _ = acceptor.await;
        }
        let _ = tokio::time::timeout(CLOSE_TIME, self.inner.quinn.wait_idle()).await;
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.quinn.close(close::DONE, b"the process is leaving");
    }
}

/// Who is at the other end.
///
/// # Errors
/// If the certificate names no process: it was issued by the cluster's CA, but not by `shine ca issue`.
pub fn peer_identity(connection: &Connection) -> Result<PeerIdentity, TlsError> {
    let chain = connection
        .peer_identity()
        .and_then(|any| any.downcast::<Vec<CertificateDer<'static>>>().ok())
        .ok_or_else(|| TlsError::NoIdentity("the peer showed none".into()))?;
    identity_of(chain.first().ok_or_else(|| TlsError::NoIdentity("the peer showed none".into()))?)
}

/// Why a connection ended, in words that a user can act on.
pub fn why(error: &ConnectionError) -> String {
    match error {
        ConnectionError::TransportError(e) => match alert(e.code) {
            Some(alert) => format!("refused the peer's certificate or protocol: {}", said(alert, &e.reason)),
            None => format!("transport error: {e}"),
        },
        ConnectionError::ConnectionClosed(e) => match alert(e.error_code) {
            Some(alert) => {
                format!("the peer refused us: {}", said(alert, &peers_words(&e.reason)))
            }
            None if e.error_code == TransportErrorCode::CONNECTION_REFUSED => {
                "the peer takes no connections now (it is stopping, or has too many)".into()
            }
            None => format!("the peer closed: {} {}", e.error_code, peers_words(&e.reason)),
        },
        ConnectionError::ApplicationClosed(e) => {
            format!("the peer closed: {}", peers_words(&e.reason))
        }
        ConnectionError::TimedOut => "nothing was heard from the peer".into(),
        ConnectionError::Reset => "the peer no longer knows the connection (it was restarted)".into(),
        ConnectionError::LocallyClosed => "it was closed on this side".into(),
        other => other.to_string(),
    }
}

/// What a peer gives as its reason, as far as it is worth keeping: it may be as long as a datagram.
fn peers_words(reason: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(&reason[..reason.len().min(REASON_BYTES_MAX)])
}

/// Whether a connection ended because one side did not accept the other's certificate or protocol.
pub fn is_refusal(error: &ConnectionError) -> bool {
    match error {
        ConnectionError::TransportError(e) => alert(e.code).is_some(),
        ConnectionError::ConnectionClosed(e) => alert(e.error_code).is_some(),
        _ => false,
    }
}

/// The TLS alert in a code, if it is one.
fn alert(code: TransportErrorCode) -> Option<u8> {
    let code = u64::from(code);
    (0x100..0x200).contains(&code).then_some(code as u8)
}

fn said(alert: u8, reason: &str) -> String {
    let what = match alert {
        42 | 43 => "bad certificate",
        45 => "certificate expired",
        46 => "certificate not acceptable",
        48 => "certificate of another CA: both sides need certificates of one cluster CA",
        116 => "no certificate was shown",
        120 => "no protocol in common: are both sides of one version?",
        _ => "handshake failed",
    };
    if reason.is_empty() {
        format!("{what} (TLS alert {alert})")
    } else {
        format!("{what} (TLS alert {alert}: {reason})")
    }
}

// ------------------------------------------------------------------------------------------------ accepting

/// What callers are answered with, by where they call from.
struct Servers {
    loopback: Arc<ServerConfig>,
    network: Arc<ServerConfig>,
    profile: Profile,
}

impl Servers {
    fn new(identity: &Identity, transports: &Transports) -> Result<Self, TlsError> {
        let tls = identity.server_config(&Alpn::ALL.map(Alpn::as_bytes))?;
        let crypto = QuicServerConfig::try_from(tls).map_err(|e| TlsError::Tls(e.to_string()))?;
        let mut config = ServerConfig::with_crypto(Arc::new(crypto));
        // Profiles go by address: a peer that moves makes a new connection.
        config.migration(false);
        config.max_incoming(1_024).incoming_buffer_size(256 << 10).incoming_buffer_size_total(8 << 20);
        let with = |transport: &Arc<TransportConfig>| {
            let mut config = config.clone();
            config.transport_config(transport.clone());
            Arc::new(config)
        };
        Ok(Self {
            loopback: with(&transports.loopback),
            network: with(&transports.network),
            profile: transports.profile,
        })
    }
}

/// Takes callers in until the endpoint closes. Handshakes run side by side, so that a slow one delays no other.
async fn accept_all(
    quinn: quinn::Endpoint,
    servers: Servers,
    options: EndpointOptions,
    accepted: mpsc::Sender<Accepted>,
) {
    let most = options.handshakes_max.max(1);
    let mut handshakes = JoinSet::new();
    // Those under way, the oldest first.
    let mut order: VecDeque<AbortHandle> = VecDeque::new();
    while let Some(incoming) = quinn.accept().await {
        while handshakes.try_join_next().is_some() {}
        // When crowded, callers first prove that they receive at their address: forged ones cannot.
        let crowded = handshakes.len() > most / 2;
        if crowded && incoming.may_retry() && !incoming.remote_address_validated() {
            let _ = incoming.retry();
            continue;
        }
        while handshakes.len() >= most {
            // Who means it is done in a few round trips: the oldest is the likeliest to be stalling.
            order.retain(|handshake| !handshake.is_finished());
            if let Some(oldest) = order.pop_front() {
                tracing::warn!(peer = %incoming.remote_address(), "too many handshakes at once, gave up the oldest");
                oldest.abort();
            }
            let _ = handshakes.join_next().await;
        }
        let remote = incoming.remote_address();
        let config = match is_loopback(servers.profile, remote.ip()) {
            true => servers.loopback.clone(),
            false => servers.network.clone(),
        };
        let (accepted, limit) = (accepted.clone(), options.handshake_timeout);
        let handshake = handshakes.spawn(async move {
            let shaken = tokio::time::timeout(limit, shake_hands(incoming, config)).await;
            match shaken.unwrap_or_else(|_| Err("it took too long".into())) {
                Ok(caller) => match accepted.try_send(caller) {
                    Ok(()) => {}
                    Err(mpsc::error::TrySendError::Full((connection, peer, _))) => {
                        tracing::warn!(%peer, %remote, "too many connections wait to be served, closed one");
                        connection.close(close::BUSY, b"too many connections wait to be served");
                    }
                    Err(mpsc::error::TrySendError::Closed(_)) => {}
                },
                Err(why) => tracing::warn!(%remote, why, "handshake failed"),
            }
        });
        if order.len() >= most {
            order.retain(|handshake| !handshake.is_finished());
        }
        order.push_back(handshake);
    }
    handshakes.shutdown().await;
}

async fn shake_hands(incoming: Incoming, config: Arc<ServerConfig>) -> Result<Accepted, String> {
    let connection = incoming.accept_with(config).map_err(|e| why(&e))?.await.map_err(|e| why(&e))?;
    let protocol = connection
        .handshake_data()
        .and_then(|any| any.downcast::<HandshakeData>().ok())
        .and_then(|data| data.protocol);
    let alpn = Alpn::ALL.into_iter().find(|alpn| Some(alpn.as_bytes()) == protocol.as_deref());
    match (peer_identity(&connection), alpn) {
        (Ok(peer), Some(alpn)) => Ok((connection, peer, alpn)),
        (Err(error), _) => {
            connection.close(close::FORBIDDEN, b"the certificate names no process of a shine cluster");
            Err(error.to_string())
        }
        (_, None) => {
            connection.close(close::PROTOCOL, b"unknown protocol");
            Err("it speaks no protocol of ours".into())
        }
    }
}

fn client_config(identity: &Identity, alpn: Alpn) -> Result<QuicClientConfig, TlsError> {
    let tls = identity.client_config(&[alpn.as_bytes()])?;
    QuicClientConfig::try_from(tls).map_err(|e| TlsError::Tls(e.to_string()))
}

// ----------------------------------------------------------------------------------------------- transport

fn is_loopback(profile: Profile, peer: IpAddr) -> bool {
    match profile {
        Profile::ByAddress => peer.to_canonical().is_loopback(),
        Profile::Loopback => true,
        Profile::Network => false,
    }
}

struct Transports {
    loopback: Arc<TransportConfig>,
    network: Arc<TransportConfig>,
    profile: Profile,
}

impl Transports {
    fn new(options: &EndpointOptions) -> Self {
        let common = || {
            let mut t = TransportConfig::default();
            t.max_idle_timeout(Some(options.idle_timeout.try_into().expect("an idle timeout is seconds")))
                .keep_alive_interval(Some(options.keep_alive))
                .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
                .receive_window(VarInt::from_u32(CONNECTION_WINDOW))
                .send_window(SEND_WINDOW)
                .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS_MAX))
                .max_concurrent_uni_streams(VarInt::from_u32(0))
                .datagram_receive_buffer_size(None);
            t
        };
        let mut loopback = common();
        loopback
            .initial_mtu(LOOPBACK_MTU)
            // Full socket buffers can look like a black hole, and what is given up then is given up for good.
            .min_mtu(LOOPBACK_MTU_MIN)
            .mtu_discovery_config(None)
            .enable_segmentation_offload(false)
            .initial_rtt(Duration::from_millis(50))
            .congestion_controller_factory(Arc::new(ConstantWindow));
        let mut discovery = MtuDiscoveryConfig::default();
        discovery.upper_bound(NETWORK_MTU_MAX);
        let mut cubic = CubicConfig::default();
        cubic.initial_window(NETWORK_WINDOW);
        let mut network = common();
        network
            .initial_mtu(1_200)
            .mtu_discovery_config(Some(discovery))
            .congestion_controller_factory(Arc::new(cubic));
        Self { loopback: Arc::new(loopback), network: Arc::new(network), profile: options.profile }
    }

    fn to(&self, peer: IpAddr) -> Arc<TransportConfig> {
        if is_loopback(self.profile, peer) { self.loopback.clone() } else { self.network.clone() }
    }
}

/// A congestion controller that controls nothing: inside one host there is no path to share, and the window also
/// sets quinn's pacer, which nothing else turns off. Must exceed the MTU, or the connection hangs.
#[derive(Clone, Copy, Debug)]
struct ConstantWindow;

const _: () = assert!(LOOPBACK_WINDOW > LOOPBACK_MTU as u64);

impl ControllerFactory for ConstantWindow {
    fn build(self: Arc<Self>, _now: Instant, _current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Self)
    }
}

impl Controller for ConstantWindow {
    fn on_congestion_event(&mut self, _now: Instant, _sent: Instant, _persistent: bool, _lost_bytes: u64) {}

    fn on_mtu_update(&mut self, _new_mtu: u16) {}

    fn window(&self) -> u64 {
        LOOPBACK_WINDOW
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(*self)
    }

    fn initial_window(&self) -> u64 {
        LOOPBACK_WINDOW
    }

    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any> {
        self
    }
}

// -------------------------------------------------------------------------------------------------- socket

/// Asks for large socket buffers, beyond the system's bound where the process may.
fn enlarge_buffers(socket: &std::net::UdpSocket) {
    use rustix::net::sockopt;
    if sockopt::set_socket_recv_buffer_size_force(socket, SOCKET_BUFFER).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(socket, SOCKET_BUFFER);
    }
    if sockopt::set_socket_send_buffer_size_force(socket, SOCKET_BUFFER).is_err() {
        let _ = sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER);
    }
    // The kernel reports twice what it grants.
    let granted = sockopt::socket_recv_buffer_size(socket).unwrap_or(0) / 2;
    if granted < SOCKET_BUFFER / 8 {
        tracing::warn!(
            granted_bytes = granted,
            wanted_bytes = SOCKET_BUFFER,
            "small receive buffer, bursts will be lost: raise it with `sysctl -w net.core.rmem_max={SOCKET_BUFFER}`",
        );
    }
}

/// The UDP socket under quinn. It differs from quinn's own in two things: it reports no receive segments, since the
/// receive buffer is quinn's `payload × segments × 32` and would be 134 MB (one of its 64 KiB parts takes any run that
/// the kernel joins, see [`RECEIVE_BYTES_MAX`]); and it obeys a [`Link`].
struct Socket {
    io: tokio::net::UdpSocket,
    state: UdpSocketState,
    link: Option<Arc<Link>>,
    /// Wakes the endpoint's driver, the only receiver, when the link opens again.
    opens: Mutex<Pin<Box<Sleep>>>,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("io", &self.io).field("link", &self.link).finish_non_exhaustive()
    }
}

impl Socket {
    fn new(socket: std::net::UdpSocket, link: Option<Arc<Link>>) -> io::Result<Self> {
        let state = UdpSocketState::new((&socket).into())?;
        let opens = Mutex::new(Box::pin(tokio::time::sleep(Duration::ZERO)));
        Ok(Self { io: tokio::net::UdpSocket::from_std(socket)?, state, link, opens })
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(WritePoller { socket: self, opens: None, writable: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if let Some(link) = &self.link {
            // Another connection may have taken the tokens since `poll_writable`.
            let now = tokio::time::Instant::now();
            if link.send.shut_until(now).is_some() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.io.try_io(Interest::WRITABLE, || self.state.send((&self.io).into(), transmit))?;
            let bytes = transmit.contents.len();
            let datagrams = transmit.segment_size.map_or(1, |segment| bytes.div_ceil(segment.max(1)));
            link.send.pass(bytes as u64, datagrams as u64, now);
            return Ok(());
        }
        self.io.try_io(Interest::WRITABLE, || self.state.send((&self.io).into(), transmit))
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [io::IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut batch = bufs.len().min(meta.len());
        if let Some(link) = &self.link {
            while let Some(opens_at) = link.receive.shut_until(tokio::time::Instant::now()) {
                let mut opens = self.opens.lock();
                opens.as_mut().reset(opens_at);
                ready!(opens.as_mut().poll(cx));
            }
            // One buffer at a time, so that the debt is at most one.
            batch = 1;
        }
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            let received = self.io.try_io(Interest::READABLE, || {
                self.state.recv((&self.io).into(), &mut bufs[..batch], &mut meta[..batch])
            });
            // Errors of single datagrams (unreachable peers) are QUIC's to notice.
            let Ok(count) = received else { continue };
            if let Some(link) = &self.link {
                let now = tokio::time::Instant::now();
                for one in &meta[..count] {
                    link.receive.pass(one.len as u64, one.len.div_ceil(one.stride.max(1)) as u64, now);
                }
            }
            return Poll::Ready(Ok(count));
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        1
    }
}

type Writable = Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>;

/// Waits, for one connection, until the link is open and the socket takes a datagram.
struct WritePoller {
    socket: Arc<Socket>,
    opens: Option<Pin<Box<Sleep>>>,
    /// Only while the socket is full: the usual case costs no allocation.
    writable: Option<Writable>,
}

impl fmt::Debug for WritePoller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WritePoller").finish_non_exhaustive()
    }
}

impl UdpPoller for WritePoller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(link) = &this.socket.link {
            while let Some(opens_at) = link.send.shut_until(tokio::time::Instant::now()) {
                let opens = this.opens.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(opens_at)));
                opens.as_mut().reset(opens_at);
                ready!(opens.as_mut().poll(cx));
            }
        }
        if this.writable.is_none() {
            if let Poll::Ready(result) = pin!(this.socket.io.writable()).poll(cx) {
                return Poll::Ready(result);
            }
            let socket = this.socket.clone();
            this.writable = Some(Box::pin(async move { socket.io.writable().await }));
        }
        let result = ready!(this.writable.as_mut().expect("set above").as_mut().poll(cx));
        this.writable = None;
        Poll::Ready(result)
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::DATAGRAM_OVERHEAD;
    use super::super::tls::{ClusterCa, wall_clock};
    use super::*;

    fn any_port() -> SocketAddr {
        "127.0.0.1:0".parse().unwrap()
    }

    fn endpoint(ca: &ClusterCa, role: Role, name: &str) -> Endpoint {
        endpoint_with(ca, role, name, EndpointOptions::default())
    }

    fn endpoint_with(ca: &ClusterCa, role: Role, name: &str, options: EndpointOptions) -> Endpoint {
        Endpoint::bind(any_port(), ca.identity(role, name).unwrap(), options).unwrap()
    }

    /// Sends `bytes` from `from` to `to` over a stream of their own and back a single byte.
    async fn transfer(from: &Connection, to: &Connection, bytes: usize) {
        let send = async {
            let (mut send, mut recv) = from.open_bi().await.unwrap();
            send.write_all(&vec![7; bytes]).await.unwrap();
            send.finish().unwrap();
            assert_eq!(recv.read_to_end(1).await.unwrap(), [1]);
        };
        let receive = async {
            let (mut send, mut recv) = to.accept_bi().await.unwrap();
            assert_eq!(recv.read_to_end(bytes).await.unwrap().len(), bytes);
            send.write_all(&[1]).await.unwrap();
            send.finish().unwrap();
        };
        tokio::join!(send, receive);
    }

    #[tokio::test]
    async fn both_sides_learn_who_the_other_is_and_the_mtu_stays() {
        let ca = ClusterCa::ephemeral().unwrap();
        let (mn, cn) = (endpoint(&ca, Role::Mn, "mn-0"), endpoint(&ca, Role::Cn, "cn-3"));
        for alpn in Alpn::ALL {
            let (called, accepted) = tokio::join!(cn.connect(mn.local_addr(), Role::Mn, alpn), mn.accept());
            let (called, (accepted, peer, spoken)) = (called.unwrap(), accepted.unwrap());
            assert_eq!((peer.role, &*peer.name, spoken), (Role::Cn, "cn-3", alpn));
            assert_eq!(&*peer_identity(&called).unwrap().name, "mn-0");
            transfer(&called, &accepted, 32 << 20).await;
            transfer(&accepted, &called, 8 << 20).await;
            for connection in [&called, &accepted] {
                let stats = connection.stats();
                assert_eq!(stats.path.current_mtu, LOOPBACK_MTU);
                assert_eq!(stats.path.black_holes_detected, 0);
                assert_eq!(stats.path.cwnd, LOOPBACK_WINDOW);
            }
        }
        cn.close().await;
        mn.close().await;
        assert!(mn.accept().await.is_none());
    }

    #[tokio::test]
    async fn the_network_profile_discovers_its_mtu() {
        let ca = ClusterCa::ephemeral().unwrap();
        let options = || EndpointOptions { profile: Profile::Network, ..Default::default() };
        let mn = endpoint_with(&ca, Role::Mn, "mn-0", options());
        let cn = endpoint_with(&ca, Role::Cn, "cn-0", options());
        let (called, accepted) =
            tokio::join!(cn.connect(mn.local_addr(), Role::Mn, Alpn::Verbs), mn.accept());
        let (called, accepted) = (called.unwrap(), accepted.unwrap().0);
        transfer(&called, &accepted, 8 << 20).await;
        let mtu = called.stats().path.current_mtu;
        assert!((1_200..=NETWORK_MTU_MAX).contains(&mtu), "{mtu}");
    }

    #[tokio::test]
    async fn loopback_is_recognised_in_every_spelling() {
        let spellings = ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"];
        assert!(spellings.iter().all(|ip| is_loopback(Profile::ByAddress, ip.parse().unwrap())));
        let others = ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1", "0.0.0.0"];
        assert!(!others.iter().any(|ip| is_loopback(Profile::ByAddress, ip.parse().unwrap())));
        // A socket for both families, called over IPv4. Hosts without IPv6 have nothing to try.
        let ca = ClusterCa::ephemeral().unwrap();
        let identity = ca.identity(Role::Mn, "mn-0").unwrap();
        let Ok(mn) = Endpoint::bind("[::]:0".parse().unwrap(), identity, EndpointOptions::default()) else {
            return;
        };
        let cn = endpoint(&ca, Role::Cn, "cn-0");
        let at = SocketAddr::from(([127, 0, 0, 1], mn.local_addr().port()));
        let (called, accepted) = tokio::join!(cn.connect(at, Role::Mn, Alpn::Verbs), mn.accept());
        let (called, accepted) = (called.unwrap(), accepted.unwrap().0);
        transfer(&called, &accepted, 1 << 20).await;
        assert_eq!(called.stats().path.current_mtu, LOOPBACK_MTU);
        assert_eq!(accepted.stats().path.current_mtu, LOOPBACK_MTU);
    }

    #[tokio::test]
    async fn a_peer_of_another_role_is_refused_by_name() {
        let ca = ClusterCa::ephemeral().unwrap();
        let (oracle, cn) = (endpoint(&ca, Role::Oracle, "o-1"), endpoint(&ca, Role::Cn, "cn-0"));
        let error = cn.connect(oracle.local_addr(), Role::Mn, Alpn::Verbs).await.unwrap_err().to_string();
        assert!(error.contains("oracle 'o-1'") && error.contains("expected role mn"), "{error}");
    }

    #[tokio::test]
    async fn a_client_cannot_pose_as_a_server() {
        let ca = ClusterCa::ephemeral().unwrap();
        let (user, cn) = (endpoint(&ca, Role::Client, "u"), endpoint(&ca, Role::Cn, "cn-0"));
        let error = cn.connect(user.local_addr(), Role::Client, Alpn::Rpc).await.unwrap_err().to_string();
        assert!(error.contains("certificate"), "{error}");
    }

    #[tokio::test]
    async fn another_clusters_peers_are_refused_on_both_sides() {
        let (ours, theirs) = (ClusterCa::ephemeral().unwrap(), ClusterCa::ephemeral().unwrap());
        let (mn, stranger) = (endpoint(&ours, Role::Mn, "mn-0"), endpoint(&theirs, Role::Cn, "cn-0"));
        let error = stranger.connect(mn.local_addr(), Role::Mn, Alpn::Rpc).await.unwrap_err().to_string();
        assert!(error.contains("one cluster CA") && error.contains(&mn.local_addr().to_string()), "{error}");
        // A stranger that trusts us, but whom we did not certify.
        let mut forged = theirs.identity(Role::Cn, "cn-0").unwrap();
        forged.trust_instead(&ours.identity(Role::Cn, "x").unwrap());
        let forger = Endpoint::bind(any_port(), forged, EndpointOptions::default()).unwrap();
        let said = refusal(&forger, &mn).await;
        assert!(said.contains("the peer refused us") && said.contains("another CA"), "{said}");
        // Neither disturbs a proper peer, and neither was handed out.
        let cn = endpoint(&ours, Role::Cn, "proper");
        let (called, accepted) = tokio::join!(cn.connect(mn.local_addr(), Role::Mn, Alpn::Rpc), mn.accept());
        assert!(called.is_ok());
        assert_eq!(&*accepted.unwrap().1.name, "proper");
    }

    #[tokio::test]
    async fn an_expired_certificate_is_refused() {
        let ca = ClusterCa::ephemeral().unwrap();
        let (now, hour) = (wall_clock(), Duration::from_secs(3600));
        let late = ca.identity_between(Role::Cn, "late", now - 2 * hour, now - hour).unwrap();
        let late = Endpoint::bind(any_port(), late, EndpointOptions::default()).unwrap();
        let mn = endpoint(&ca, Role::Mn, "mn-0");
        let said = refusal(&late, &mn).await;
        assert!(said.contains("the peer refused us") && said.contains("expired"), "{said}");
        let error = mn.connect(late.local_addr(), Role::Cn, Alpn::Rpc).await.unwrap_err().to_string();
        assert!(error.contains("expired"), "{error}");
    }

    /// Why `to` refuses `from`, as `from` hears it: at once, or on the first use of the connection.
    async fn refusal(from: &Endpoint, to: &Endpoint) -> String {
        match from.connect(to.local_addr(), Role::Mn, Alpn::Rpc).await {
            Ok(connection) => why(&connection.closed().await),
            Err(error) => error.to_string(),
        }
    }

    #[tokio::test]
    async fn nobody_there_is_an_error_that_says_so() {
        let ca = ClusterCa::ephemeral().unwrap();
        let options = EndpointOptions { handshake_timeout: Duration::from_millis(100), ..Default::default() };
        let cn = endpoint_with(&ca, Role::Cn, "cn-0", options);
        // Bound and never read: the port is taken, and nobody speaks QUIC there.
        let silent = std::net::UdpSocket::bind(any_port()).unwrap();
        let addr = silent.local_addr().unwrap();
        let error = cn.connect(addr, Role::Mn, Alpn::Verbs).await.unwrap_err().to_string();
        assert!(error.contains("no answer") && error.contains(&addr.to_string()), "{error}");
        cn.close().await;
        assert!(matches!(cn.connect(addr, Role::Mn, Alpn::Verbs).await, Err(EndpointError::Closed)));
    }

    /// A relay that lets callers speak and never be answered, so that their handshakes stay half open at `to`.
    /// Counts what came back from there.
    async fn mute_relay(to: SocketAddr) -> (SocketAddr, JoinHandle<()>) {
        let front = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
        let addr = front.local_addr().unwrap();
        let task = tokio::spawn(async move {
            let mut buf = vec![0; 65_536];
            loop {
                let (len, _) = front.recv_from(&mut buf).await.unwrap();
                // A port of its own for every datagram: each one is a caller of its own to the server.
                let back = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
                back.send_to(&buf[..len], to).await.unwrap();
            }
        });
        (addr, task)
    }

    #[tokio::test]
    async fn half_open_handshakes_and_noise_do_not_keep_others_out() {
        let ca = ClusterCa::ephemeral().unwrap();
        let options = EndpointOptions { handshakes_max: 8, ..Default::default() };
        let mn = endpoint_with(&ca, Role::Mn, "mn-0", options);
        let (relay, relay_task) = mute_relay(mn.local_addr()).await;
        let hasty = EndpointOptions { handshake_timeout: Duration::from_millis(200), ..Default::default() };
        let strangers: Vec<_> =
            (0..4).map(|i| endpoint_with(&ca, Role::Cn, &format!("cn-{i}"), hasty.clone())).collect();
        let attempts = strangers.iter().map(|s| s.connect(relay, Role::Mn, Alpn::Verbs));
        let noise = tokio::net::UdpSocket::bind(any_port()).await.unwrap();
        for len in [0, 1, 20, 1_200, 1_500, 60_000, 65_000] {
            for byte in [0x00, 0x40, 0xc0, 0xff] {
                noise.send_to(&vec![byte; len], mn.local_addr()).await.unwrap();
            }
        }
        for result in futures_util::future::join_all(attempts).await {
            assert!(result.is_err());
        }
        let cn = endpoint(&ca, Role::Cn, "proper");
        let (called, accepted) =
            tokio::join!(cn.connect(mn.local_addr(), Role::Mn, Alpn::Verbs), mn.accept());
        let (called, (accepted, peer, _)) = (called.unwrap(), accepted.unwrap());
        assert_eq!(&*peer.name, "proper");
        transfer(&called, &accepted, 1 << 20).await;
        relay_task.abort();
    }

    /// A relay that passes `datagrams` of a caller's to `to`, and all answers, and then no more.
    async fn stalling_relay(to: SocketAddr, datagrams: usize) -> (SocketAddr, JoinHandle<()>) {
        let (front, back) = (
            tokio::net::UdpSocket::bind(any_port()).await.unwrap(),
            tokio::net::UdpSocket::bind(any_port()).await.unwrap(),
        );
        let addr = front.local_addr().unwrap();
        let passing = async move {
            let (mut forth, mut answer) = (vec![0; 65_536], vec![0; 65_536]);
            let (mut passed, mut caller) = (0, None);
            while passed < datagrams {
                tokio::select! {
                    got = front.recv_from(&mut forth) => {
                        let (len, from) = got.unwrap();
                        back.send_to(&forth[..len], to).await.unwrap();
                        (passed, caller) = (passed + 1, Some(from));
                    }
                    got = back.recv_from(&mut answer) => {
                        let (len, _) = got.unwrap();
                        front.send_to(&answer[..len], caller.unwrap()).await.unwrap();
                    }
                }
            }
        };
        (addr, tokio::spawn(passing))
    }

    #[tokio::test]
    async fn callers_that_stall_with_a_proven_address_do_not_keep_others_out() {
        const MOST: usize = 4;
        let ca = ClusterCa::ephemeral().unwrap();
        // Longer than this test: waiting for them is no way out.
        let patient = Duration::from_secs(600);
        let options =
            EndpointOptions { handshakes_max: MOST, handshake_timeout: patient, ..Default::default() };
        let mn = endpoint_with(&ca, Role::Mn, "mn-0", options.clone());
        let staller = endpoint_with(&ca, Role::Cn, "cn-0", options);
        let mut stalling = Vec::new();
        for turn in 0..2 * MOST {
            // Once it is crowded, the first datagram is answered with a demand for proof, which the second gives.
            let datagrams = if turn <= MOST / 2 { 1 } else { 2 };
            let (relay, passing) = stalling_relay(mn.local_addr(), datagrams).await;
            let staller = staller.clone();
            stalling.push(tokio::spawn(async move { staller.connect(relay, Role::Mn, Alpn::Rpc).await }));
            passing.await.unwrap();
        }
        let cn = endpoint(&ca, Role::Cn, "proper");
        let (called, accepted) = tokio::join!(cn.connect(mn.local_addr(), Role::Mn, Alpn::Rpc), mn.accept());
        called.unwrap();
        assert_eq!(&*accepted.unwrap().1.name, "proper");
        stalling.iter().for_each(JoinHandle::abort);
    }

    #[tokio::test]
    async fn a_shaped_process_keeps_to_its_rate() {
        const MBIT: u64 = 200;
        const BYTES: u64 = 4 << 20;
        let ca = ClusterCa::ephemeral().unwrap();
        let shaped = EndpointOptions { link_mbit: MBIT, ..Default::default() };
        let (mn, cn) = (endpoint(&ca, Role::Mn, "mn-0"), endpoint_with(&ca, Role::Cn, "cn-0", shaped));
        let start = Instant::now();
        // Two connections share the one bucket of each direction.
        for _ in 0..2 {
            let (called, accepted) =
                tokio::join!(cn.connect(mn.local_addr(), Role::Mn, Alpn::Verbs), mn.accept());
            let (called, accepted) = (called.unwrap(), accepted.unwrap().0);
            transfer(&called, &accepted, BYTES as usize).await;
            transfer(&accepted, &called, BYTES as usize).await;
            assert_eq!(called.stats().path.current_mtu, LOOPBACK_MTU);
        }
        let link = cn.link().unwrap();
        for gate in [&link.send, &link.receive] {
            let allowed = MBIT as f64 * 125_000.0 * start.elapsed().as_secs_f64();
            let extra = (MBIT * 1_250).max(128 << 10) + 65_527 + DATAGRAM_OVERHEAD;
            let bytes = gate.bytes();
            assert!(bytes >= 2 * BYTES, "everything passed the gate: {bytes}");
            assert!(bytes as f64 <= allowed + extra as f64, "{bytes} bytes passed, {allowed} allowed");
        }
        assert!(mn.link().is_none());
    }
}
