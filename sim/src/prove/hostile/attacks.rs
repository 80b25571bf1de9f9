//! What is done to a port, kind by kind, and how it ends.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use quinn::congestion::CubicConfig;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, Connection, ConnectionError, EndpointConfig, RecvStream, SendStream, TransportConfig,
    TransportErrorCode,
};
use rand::rngs::SmallRng;
use rand::{Rng as _, RngExt as _, SeedableRng as _};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use shine_common::net::endpoint::{Alpn, Endpoint, EndpointError, EndpointOptions};
use shine_common::net::tls::{ClusterCa, SERVER_NAME, crypto_provider};
use shine_common::wire::{self, Fault, MESSAGE_MAX, PROTOCOL_VERSION, Role};
use tokio::net::{TcpStream, UdpSocket};

use super::{Port, http, initial};

/// Longest wait for the end of one hostile connection.
const STRIKE_TIME: Duration = Duration::from_secs(10);
/// Datagrams of one burst of noise.
const BURST: usize = 8;
/// Streams that are opened and left, on one connection.
const STREAMS: usize = 900;
/// Longest answer that is read.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// How an attempt ends that must not end so.
pub(super) const LET_IN: &str = "LET IN";
/// How an attempt ends that goes on.
const LEFT_OPEN: &str = "left open";

macro_rules! kinds {
    ($($kind:ident $name:literal,)+) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Kind {
            $($kind,)+
        }

        impl Kind {
            pub(super) fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }
        }
    };
}

kinds! {
    // On sockets of QUIC, of whoever can reach them.
    Noise "random datagrams",
    FalseInitial "broken Initials",
    SealedInitial "sealed Initials with junk",
    HalfOpen "handshake half open",
    CutOff "handshake cut off later",
    OtherCa "certificate of another CA",
    NoCertificate "no certificate",
    UnknownAlpn "unknown protocol",
    // Of members.
    WrongRole "verbs with the wrong role",
    RandomStream "random bytes on a stream",
    CutFrame "frame cut short",
    TooLarge "frame over the limit",
    HugeThenSilence "huge length, then silence",
    ManyStreams "streams opened and left",
    // HTTP.
    RandomBytes "random bytes",
    SlowHead "half a head",
    HalfBody "half a body",
    HugeLength "huge content-length",
    HugeHead "huge head",
    BadChunks "chunks of bad length",
    TlsHello "TLS hello",
    Left "connected, then silence",
    Pipelined "pipelined junk",
}

pub(super) const KINDS_QUIC: [Kind; 14] = [
    Kind::Noise,
    Kind::FalseInitial,
    Kind::SealedInitial,
    Kind::HalfOpen,
    Kind::CutOff,
    Kind::OtherCa,
    Kind::NoCertificate,
    Kind::UnknownAlpn,
    Kind::WrongRole,
    Kind::RandomStream,
    Kind::CutFrame,
    Kind::TooLarge,
    Kind::HugeThenSilence,
    Kind::ManyStreams,
];

/// Those that take a place come twice.
pub(super) const KINDS_HTTP: [Kind; 12] = [
    Kind::RandomBytes,
    Kind::Left,
    Kind::SlowHead,
    Kind::HugeLength,
    Kind::HalfBody,
    Kind::HugeHead,
    Kind::Left,
    Kind::BadChunks,
    Kind::SlowHead,
    Kind::TlsHello,
    Kind::HalfBody,
    Kind::Pipelined,
];

/// A connection that was left open: it ends when this is dropped.
#[derive(Debug)]
pub(super) enum Held {
    Udp { _socket: UdpSocket },
    Quic { _connection: Connection, _streams: Vec<(SendStream, RecvStream)> },
    Tcp { _stream: TcpStream },
}

type Struck = (String, Option<Held>);

/// What attackers have: certificates good and bad, and endpoints to call from.
#[derive(Debug)]
pub(super) struct Arms {
    seed: u64,
    raw: quinn::Endpoint,
    proper: ClientConfig,
    other_ca: ClientConfig,
    no_certificate: ClientConfig,
    unknown_alpn: ClientConfig,
    client: Endpoint,
    cn: Endpoint,
}

impl Arms {
    pub(super) fn new(ca: &ClusterCa, seed: u64) -> anyhow::Result<Self> {
        let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut endpoint = EndpointConfig::default();
        endpoint.max_udp_payload_size(65_527)?;
        let socket = std::net::UdpSocket::bind(any_port)?;
        let raw = quinn::Endpoint::new(endpoint, None, socket, Arc::new(quinn::TokioRuntime))?;
        let rpc = [Alpn::Rpc.as_bytes()];
        let proper = ca.identity(Role::Client, "insider")?.client_config(&rpc)?;
        let mut other_ca = ClusterCa::ephemeral()?.identity(Role::Cn, "cn-0")?.client_config(&rpc)?;
        other_ca.dangerous().set_certificate_verifier(Arc::new(AnyServer));
        let mut no_certificate = rustls::ClientConfig::builder_with_provider(crypto_provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyServer))
            .with_no_client_auth();
        no_certificate.alpn_protocols = vec![Alpn::Rpc.as_bytes().to_vec()];
        let unknown_alpn = ca.identity(Role::Cn, "cn-0")?.client_config(&[b"h3"])?;
        let [proper, other_ca, no_certificate, unknown_alpn] =
            [proper, other_ca, no_certificate, unknown_alpn].map(quic);
        let member = |role| {
            let options = EndpointOptions { serves: false, ..EndpointOptions::default() };
            Endpoint::bind(any_port, ca.identity(role, "insider")?, options)
                .context("an endpoint of an insider")
        };
        Ok(Self {
            seed,
            raw,
            proper: proper?,
            other_ca: other_ca?,
            no_certificate: no_certificate?,
            unknown_alpn: unknown_alpn?,
            client: member(Role::Client)?,
            cn: member(Role::Cn)?,
        })
    }

    /// Makes attempt number `at`; how it ended, and what was left open of it.
    pub(super) async fn strike(&self, at: u64, port: &Port, kind: Kind) -> Struck {
        let mut rng = SmallRng::seed_from_u64(self.seed ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let attempt = async {
            if port.is_http {
                self.strike_http(port.addr, kind, &mut rng).await
            } else {
                self.strike_quic(port, kind, &mut rng).await
            }
        };
        match tokio::time::timeout(STRIKE_TIME, attempt).await {
            Ok(Ok(struck)) => struck,
            Ok(Err(end)) => (end, None),
            Err(_) => ("given up by us".into(), None),
        }
    }

    async fn strike_quic(&self, port: &Port, kind: Kind, rng: &mut SmallRng) -> Result<Struck, String> {
        let verbs = port.role == Role::Mn && rng.random_bool(0.5);
        match kind {
            Kind::Noise | Kind::FalseInitial | Kind::SealedInitial => {
                let socket = udp_to(port.addr).await?;
                for _ in 0..BURST {
                    let datagram = match kind {
                        Kind::FalseInitial => initial::false_initial(rng),
                        Kind::SealedInitial => initial::sealed_initial(rng),
                        _ => {
                            let most = if rng.random_bool(0.1) { 65_000 } else { 1_500 };
                            let bytes = rng.random_range(0..most);
                            random(rng, bytes)
                        }
                    };
                    socket.send(&datagram).await.map_err(said)?;
                }
                Ok(("sent".into(), None))
            }
            Kind::HalfOpen => self.cut_off(port.addr, 1).await,
            Kind::CutOff => self.cut_off(port.addr, rng.random_range(2..=3)).await,
            Kind::OtherCa => self.stranger(port.addr, &self.other_ca).await,
            Kind::NoCertificate => self.stranger(port.addr, &self.no_certificate).await,
            Kind::UnknownAlpn => self.stranger(port.addr, &self.unknown_alpn).await,
            Kind::WrongRole => {
                // Memory nodes serve verbs, but not to clients; others serve none.
                let caller = if port.role == Role::Mn { &self.client } else { &self.cn };
                let connection = connect(caller, port, Alpn::Verbs).await?;
                Ok((end_of(&connection.closed().await), None))
            }
            Kind::RandomStream => {
                let bytes = rng.random_range(1..4_096);
                let bytes = random(rng, bytes);
                self.send_and_hear(port, verbs, &bytes).await
            }
            Kind::CutFrame => {
                let bytes = if verbs { verbs_head(1, 500) } else { rpc_head(1_000) };
                self.send_and_hear(port, verbs, &[&bytes[..], &[7; 10]].concat()).await
            }
            Kind::TooLarge => {
                let bytes = if verbs { verbs_head(1, 1 << 30) } else { rpc_head(MESSAGE_MAX as u32 + 1) };
                self.send_and_hear(port, verbs, &bytes).await
            }
            Kind::HugeThenSilence => {
                let connection = connect(&self.client, port, Alpn::Rpc).await?;
                let (mut send, recv) = connection.open_bi().await.map_err(|error| end_of(&error))?;
                let bytes = [&rpc_head(MESSAGE_MAX as u32)[..], &[7; 64 << 10]].concat();
                send.write_all(&bytes).await.map_err(said)?;
                let held = Held::Quic { _connection: connection, _streams: vec![(send, recv)] };
                Ok((LEFT_OPEN.into(), Some(held)))
            }
            Kind::ManyStreams => {
                let connection = connect(&self.client, port, Alpn::Rpc).await?;
                let mut streams = Vec::with_capacity(STREAMS);
                for _ in 0..STREAMS {
                    let (mut send, recv) = connection.open_bi().await.map_err(|error| end_of(&error))?;
                    send.write_all(b"S").await.map_err(said)?;
                    streams.push((send, recv));
                }
                let held = Held::Quic { _connection: connection, _streams: streams };
                Ok((LEFT_OPEN.into(), Some(held)))
            }
            other => unreachable!("{other:?} is for HTTP"),
        }
    }

    /// Begins a handshake through a relay that passes `datagrams` of the caller's, and then none.
    async fn cut_off(&self, to: SocketAddr, datagrams: usize) -> Result<Struck, String> {
        let front = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(said)?;
        let back = udp_to(to).await?;
        let at = front.local_addr().map_err(said)?;
        let _connecting = self.raw.connect_with(self.proper.clone(), at, SERVER_NAME).map_err(said)?;
        let (mut forth, mut answer) = (vec![0; 65_536], vec![0; 65_536]);
        let (mut passed, mut caller) = (0, None);
        while passed < datagrams {
            tokio::select! {
                got = front.recv_from(&mut forth) => {
                    let (bytes, from) = got.map_err(said)?;
                    back.send(&forth[..bytes]).await.map_err(said)?;
                    (passed, caller) = (passed + 1, Some(from));
                }
                got = back.recv(&mut answer) => {
                    let bytes = got.map_err(said)?;
                    if let Some(caller) = caller {
                        front.send_to(&answer[..bytes], caller).await.map_err(said)?;
                    }
                }
            }
        }
        Ok((LEFT_OPEN.into(), Some(Held::Udp { _socket: back })))
    }

    /// A caller that must be refused. Anything that is answered to it is too much.
    async fn stranger(&self, to: SocketAddr, config: &ClientConfig) -> Result<Struck, String> {
        let connecting = self.raw.connect_with(config.clone(), to, SERVER_NAME).map_err(said)?;
        // Our side may be done before the other has judged us.
        let connection = connecting.await.map_err(|error| end_of(&error))?;
        let asking = async {
            let (mut send, mut recv) = connection.open_bi().await.ok()?;
            send.write_all(&rpc_head(0)).await.ok()?;
            send.finish().ok()?;
            recv.read_to_end(ANSWER_BYTES_MAX).await.ok()
        };
        match asking.await {
            Some(_) => Ok((LET_IN.into(), None)),
            None => Ok((end_of(&connection.closed().await), None)),
        }
    }

    /// A member that sends `bytes` and hears what becomes of it.
    async fn send_and_hear(&self, port: &Port, verbs: bool, bytes: &[u8]) -> Result<Struck, String> {
        let (caller, alpn) = if verbs { (&self.cn, Alpn::Verbs) } else { (&self.client, Alpn::Rpc) };
        let connection = connect(caller, port, alpn).await?;
        let (mut send, mut recv) = connection.open_bi().await.map_err(|error| end_of(&error))?;
        let heard = async {
            // It may be refused before all of it is sent.
            let _ = send.write_all(bytes).await;
            let _ = send.finish();
            recv.read_to_end(ANSWER_BYTES_MAX).await
        };
        let end = match heard.await {
            Ok(answer) => answered(&answer),
            Err(_) => end_of(&connection.closed().await),
        };
        Ok((end, None))
    }

    async fn strike_http(&self, to: SocketAddr, kind: Kind, rng: &mut SmallRng) -> Result<Struck, String> {
        const POST: &str = "POST /collections/besieged/points/query HTTP/1.1\r\nhost: localhost\r\n";
        let (bytes, is_left_open) = match kind {
            Kind::RandomBytes => {
                let bytes = rng.random_range(1..4_096);
                (random(rng, bytes), false)
            }
            Kind::SlowHead => (POST.as_bytes()[..rng.random_range(1..POST.len())].to_vec(), true),
            Kind::HalfBody => (format!("{POST}content-length: 10000\r\n\r\n{{\"query\": [").into(), true),
            Kind::HugeLength => (format!("{POST}content-length: 1000000000000000\r\n\r\n{{").into(), false),
            Kind::HugeHead => {
                let line = format!("x-{}: {}\r\n", rng.random::<u32>(), "a".repeat(1_000));
                (format!("{POST}{}\r\n", line.repeat(1_000)).into(), false)
            }
            Kind::BadChunks => {
                let length = if rng.random_bool(0.5) { "fffffffffffffffff" } else { "-1" };
                (format!("{POST}transfer-encoding: chunked\r\n\r\n{length}\r\n{{}}").into(), false)
            }
            Kind::TlsHello => {
                let hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
                ([&hello[..], &random(rng, 501)].concat(), false)
            }
            Kind::Left => (Vec::new(), true),
            Kind::Pipelined => {
                let request = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";
                ([request.repeat(50).as_bytes(), &random(rng, 100)].concat(), false)
            }
            other => unreachable!("{other:?} is for QUIC"),
        };
        let mut stream = TcpStream::connect(to).await.map_err(|error| format!("{:?}", error.kind()))?;
        if is_left_open {
            http::send(&mut stream, &bytes).await?;
            return Ok((LEFT_OPEN.into(), Some(Held::Tcp { _stream: stream })));
        }
        let end = http::exchange(&mut stream, &bytes).await.map(|answer| http::statuses(&answer));
        Ok((end.unwrap_or_else(|broke| broke), None))
    }
}

fn random(rng: &mut SmallRng, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    rng.fill_bytes(&mut out);
    out
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

async fn udp_to(to: SocketAddr) -> Result<UdpSocket, String> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(said)?;
    socket.connect(to).await.map_err(said)?;
    Ok(socket)
}

async fn connect(caller: &Endpoint, port: &Port, alpn: Alpn) -> Result<Connection, String> {
    let connected = caller.connect(port.addr, port.role, alpn).await;
    connected.map_err(|error| match error {
        EndpointError::Refused { .. } => "refused".into(),
        EndpointError::Connect { .. } => "not connected".into(),
        other => other.to_string(),
    })
}

/// Head of a call's frame ([`shine_common::net::rpc`]).
fn rpc_head(length: u32) -> Vec<u8> {
    [&b"SHRP"[..], &PROTOCOL_VERSION.to_le_bytes(), &[0; 4], &length.to_le_bytes()].concat()
}

/// Head of a verbs frame ([`shine_common::verbs::frame`]) of `kind` that claims `length` bytes.
fn verbs_head(kind: u8, length: u32) -> Vec<u8> {
    [&length.to_le_bytes()[..], &[kind], &[0; 4]].concat()
}

/// What an answer to a call is.
fn answered(answer: &[u8]) -> String {
    match (answer.get(8), answer.get(16..)) {
        (Some(1), _) => "answered".into(),
        (Some(2), Some(body)) => match wire::decode::<Fault>(body) {
            Ok(fault) => format!("fault {:?}", fault.code),
            Err(_) => "a fault that cannot be read".into(),
        },
        (Some(3), _) => "other version".into(),
        _ => format!("{} bytes", answer.len()),
    }
}

fn end_of(error: &ConnectionError) -> String {
    let of = |code: TransportErrorCode| match u64::from(code) {
        alert @ 0x100..0x200 => format!("refused, TLS alert {}", alert - 0x100),
        _ if code == TransportErrorCode::CONNECTION_REFUSED => "refused, busy".into(),
        other => format!("closed, QUIC error {other:#x}"),
    };
    match error {
        ConnectionError::TransportError(error) => of(error.code),
        ConnectionError::ConnectionClosed(close) => of(close.error_code),
        ConnectionError::ApplicationClosed(close) => format!("closed with {}", close.error_code),
        ConnectionError::TimedOut => "nothing heard".into(),
        other => other.to_string(),
    }
}

/// Tuned as a member's connection on loopback: the server answers with datagrams of that size.
fn quic(tls: rustls::ClientConfig) -> anyhow::Result<ClientConfig> {
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    // With a window below the datagram's size nothing would ever leave.
    let mut congestion = CubicConfig::default();
    congestion.initial_window(1 << 20);
    let mut transport = TransportConfig::default();
    transport
        .congestion_controller_factory(Arc::new(congestion))
        .initial_mtu(60_000)
        .min_mtu(16_000)
        .mtu_discovery_config(None)
        .enable_segmentation_offload(false)
        .max_idle_timeout(Some(Duration::from_secs(2).try_into()?));
    config.transport_config(Arc::new(transport));
    Ok(config)
}

/// Believes every server: what an attacker wants is to be believed.
#[derive(Debug)]
struct AnyServer;

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        crypto_provider().signature_verification_algorithms.supported_schemes()
    }
}
