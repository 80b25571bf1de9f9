//! What does QUIC cost a gather, beyond the TLS that any encrypted transport pays?
//!
//! Estimate: at 60,000-byte datagrams a batch of 16 × 640 bytes is one sixth of a datagram, so AES-GCM over its
//! bytes and one copy on each side dominate, as over TCP + TLS: about 700 ns of CPU a record for client and server
//! together on a 2-core VM, and the same within 15 %. With quinn's defaults the same bytes are nine datagrams.
//!
//! Variants, each a server process and a client in this one, on a current-thread runtime each:
//! - `quic`: verbs over QUIC as the cluster runs them.
//! - `tls`: the baseline: the same codec, checks and interface, over tokio TCP and rustls.
//! - `plain`: hand-written length-prefixed frames over the same TLS, no checks, no interface: shows that the
//!   baseline is no straw man.
//! - `default`: verbs over QUIC with quinn's default settings.
//!
//! Closed loop of 64 batches of 16 records of 640 bytes, at random places of 256 MiB; the first word of each record
//! is checked. CPU is user + system time of the whole process. Nine interleaved rounds; ratios are medians over
//! rounds with a 95 % bootstrap interval. `--seconds S` sets the length of a round's part, `--json FILE` keeps the
//! figures.

use std::io::{BufRead, BufReader, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use shine_common::ids::{Epoch, Incarnation, RegionId, RemotePtr};
use shine_common::net::endpoint::{Endpoint, EndpointOptions};
use shine_common::net::tls::{ClusterCa, Identity};
use shine_common::verbs::frame::{Assembler, Hello};
use shine_common::verbs::framed::{FramedVerbs, Sink, Source, greet, serve_lane, take_hello};
use shine_common::verbs::host::{Host, HostOptions};
use shine_common::verbs::memory::{HugePages, RegionMemory};
use shine_common::verbs::quic::{QuicVerbs, serve};
use shine_common::verbs::{ReadBatch, Verbs};
use shine_common::wire::{PROTOCOL_VERSION, Role};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};

const REGION: RegionId = RegionId(1);
const EPOCH: Epoch = Epoch(300);
const LIFE: Incarnation = Incarnation(1);
const REGION_BYTES: u64 = 256 << 20;
const RECORD_BYTES: u64 = 640;
const RECORDS: u64 = REGION_BYTES / RECORD_BYTES;
const BATCH: usize = 16;
const IN_FLIGHT: usize = 64;
const ROUNDS: usize = 9;
const VARIANTS: [&str; 4] = ["quic", "tls", "plain", "default"];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |flag: &str| args.iter().position(|arg| arg == flag).and_then(|at| args.get(at + 1)).cloned();
    if args.iter().any(|arg| arg == "--test") {
        // `cargo test --benches` only wants to know that it starts.
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let local = tokio::task::LocalSet::new();
    match (value("--serve"), value("--cert-dir")) {
        (Some(variant), Some(dir)) => local.block_on(&runtime, serve_variant(&variant, dir.as_ref())),
        _ => {
            let seconds =
                value("--seconds").map_or(0.7, |text| text.parse().expect("--seconds takes a number"));
            let names = value("--only").map_or(VARIANTS.map(str::to_owned).to_vec(), |list| {
                list.split(',').map(str::to_owned).collect()
            });
            local.block_on(&runtime, compare(&names, seconds, value("--json")));
        }
    }
}

// ------------------------------------------------------------------------------------------------ comparison

/// CPU time of this process so far, in nanoseconds.
fn cpu_ns() -> u64 {
    // SAFETY: getrusage fills the struct it is given; all-zero bytes are a valid rusage.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0, "getrusage of the own process");
        usage
    };
    let ns = |t: libc::timeval| t.tv_sec as u64 * 1_000_000_000 + t.tv_usec as u64 * 1_000;
    ns(usage.ru_utime) + ns(usage.ru_stime)
}

struct Server {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    addr: SocketAddr,
}

impl Server {
    fn start(variant: &str, certs: &std::path::Path) -> Self {
        let program = std::env::current_exe().expect("the bench's own path");
        let mut child = Command::new(program)
            .args(["--serve", variant, "--cert-dir"])
            .arg(certs)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the bench starts itself");
        let commands = child.stdin.take().expect("piped");
        let mut answers = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        answers.read_line(&mut line).expect("the server's address");
        let addr = line.trim().parse().expect("the server prints its address first");
        Self { child, commands, answers, addr }
    }

    fn cpu_ns(&mut self) -> u64 {
        writeln!(self.commands, "cpu").expect("the server runs");
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the server answers");
        line.trim().parse().expect("a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

enum Client {
    Quic(Rc<QuicVerbs>),
    Framed(Rc<FramedVerbs>),
    Plain(Box<PlainClient>),
}

#[derive(Clone, Copy, Default)]
struct Sample {
    records_per_s: f64,
    client_ns: f64,
    server_ns: f64,
}

impl Sample {
    fn cpu_ns(self) -> f64 {
        self.client_ns + self.server_ns
    }
}

async fn compare(names: &[String], seconds: f64, json: Option<String>) {
    let certs = tempfile::tempdir().expect("a temporary folder");
    let identity = write_certs(certs.path());
    let endpoint = Endpoint::bind(any_port(), identity, EndpointOptions::default()).expect("a UDP socket");
    let mut variants = Vec::new();
    for name in names {
        let server = Server::start(name, certs.path());
        let client = connect(name, server.addr, &endpoint, certs.path()).await;
        variants.push((name.as_str(), server, client, Vec::<Sample>::new()));
    }
    let part = Duration::from_secs_f64(seconds);
    for round in 0..=ROUNDS {
        for (_, server, client, samples) in &mut variants {
            // The first round warms up: buffers of a QUIC endpoint are large, and faulted in late.
            let sample = measure(server, client, part).await;
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    println!(
        "gather: {BATCH} records of {RECORD_BYTES} bytes a batch, {IN_FLIGHT} batches in flight; medians of {ROUNDS} rounds of {seconds} s"
    );
    println!(
        "{:<10} {:>12} {:>9} {:>18} {:>18} {:>14}",
        "variant", "records/s", "MB/s", "client ns/record", "server ns/record", "CPU ns/record"
    );
    for (name, _, _, samples) in &variants {
        let of = |f: fn(Sample) -> f64| median(samples.iter().map(|s| f(*s)).collect());
        let rate = of(|s| s.records_per_s);
        println!(
            "{name:<10} {rate:>12.0} {:>9.0} {:>18.0} {:>18.0} {:>14.0}",
            rate * RECORD_BYTES as f64 / 1e6,
            of(|s| s.client_ns),
            of(|s| s.server_ns),
            of(Sample::cpu_ns)
        );
    }
    let samples_of = |name: &str| variants.iter().find(|v| v.0 == name).map(|v| &v.3);
    let mut lines = Vec::new();
    let mut ratio = |title: &str,
                     of: &str,
                     to: &str,
                     f: fn(Sample) -> f64,
                     bound: &str,
                     meets: fn(f64) -> bool| {
        let (Some(of), Some(to)) = (samples_of(of), samples_of(to)) else { return };
        let ratios: Vec<f64> = of.iter().zip(to).map(|(a, b)| f(*a) / f(*b)).collect();
        let (low, high) = bootstrap(&ratios);
        let middle = median(ratios);
        let verdict = if meets(middle) { "met" } else { "MISSED" };
        println!("{title}: {middle:.3} [{low:.3}, {high:.3}], wanted {bound}: {verdict}");
        lines.push(serde_json::json!({"ratio": title, "median": middle, "low": low, "high": high, "wanted": bound, "met": meets(middle)}));
    };
    ratio("CPU per record, quic / tls", "quic", "tls", Sample::cpu_ns, "<= 1.15", |r| r <= 1.15);
    ratio(
        "records per second, quic / default",
        "quic",
        "default",
        |s| s.records_per_s,
        ">= 1.8",
        |r| r >= 1.8,
    );
    ratio("CPU per record, tls / plain", "tls", "plain", Sample::cpu_ns, "<= 1.15", |r| r <= 1.15);
    let mut latencies = Vec::new();
    for (name, _, client, _) in &variants {
        let Some((p50, p99)) = latency(client).await else { continue };
        println!("one record, one at a time, {name}: p50 {p50:.1} us, p99 {p99:.1} us");
        latencies.push(serde_json::json!({"variant": name, "p50_us": p50, "p99_us": p99}));
    }
    if let Some(path) = json {
        let rows: Vec<_> = variants
            .iter()
            .map(|(name, _, _, samples)| {
                let of = |f: fn(Sample) -> f64| samples.iter().map(|s| f(*s)).collect::<Vec<_>>();
                serde_json::json!({
                    "variant": name,
                    "records_per_s": of(|s| s.records_per_s),
                    "client_ns_per_record": of(|s| s.client_ns),
                    "server_ns_per_record": of(|s| s.server_ns),
                })
            })
            .collect();
        let all = serde_json::json!({
            "bench": "gather", "record_bytes": RECORD_BYTES, "batch": BATCH, "in_flight": IN_FLIGHT,
            "round_seconds": seconds, "rows": rows, "ratios": lines, "single_record": latencies,
        });
        std::fs::write(&path, format!("{all:#}\n")).expect("the file for --json can be written");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// 95 % interval of the median, by 2,000 resamples.
fn bootstrap(values: &[f64]) -> (f64, f64) {
    let mut rng = SmallRng::seed_from_u64(7);
    let mut medians: Vec<f64> = (0..2000)
        .map(|_| median((0..values.len()).map(|_| values[rng.random_range(0..values.len())]).collect()))
        .collect();
    medians.sort_by(f64::total_cmp);
    (medians[50], medians[1949])
}

async fn measure(server: &mut Server, client: &mut Client, part: Duration) -> Sample {
    let server_before = server.cpu_ns();
    let (client_before, start) = (cpu_ns(), Instant::now());
    let records = match client {
        Client::Quic(verbs) => gather(verbs, part).await,
        Client::Framed(verbs) => gather(verbs, part).await,
        Client::Plain(plain) => plain.gather(part).await,
    } as f64;
    let elapsed = start.elapsed().as_secs_f64();
    Sample {
        records_per_s: records / elapsed,
        client_ns: (cpu_ns() - client_before) as f64 / records,
        server_ns: (server.cpu_ns() - server_before) as f64 / records,
    }
}

/// Keeps [`IN_FLIGHT`] batches under way for `part`; returns the records read.
async fn gather<V: Verbs>(verbs: &Rc<V>, part: Duration) -> u64 {
    let end = Instant::now() + part;
    let tasks: Vec<_> = (0..IN_FLIGHT as u64)
        .map(|seed| {
            let verbs = Rc::clone(verbs);
            tokio::task::spawn_local(async move {
                let mut rng = SmallRng::seed_from_u64(seed);
                let mut records = 0;
                while Instant::now() < end {
                    records += one_batch(&*verbs, &mut rng, BATCH).await;
                }
                records
            })
        })
        .collect();
    let mut records = 0;
    for task in tasks {
        records += task.await.expect("no task panics");
    }
    records
}

async fn one_batch<V: Verbs>(verbs: &V, rng: &mut SmallRng, count: usize) -> u64 {
    let mut at = [0u64; BATCH];
    let mut batch = ReadBatch::new();
    for record in &mut at[..count] {
        *record = rng.random_range(0..RECORDS);
        batch.push(RemotePtr::new(REGION, *record * RECORD_BYTES), EPOCH, RECORD_BYTES as u32);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    let reply = verbs.read(batch, deadline).await.expect("a legal read");
    check(&at[..count], &reply.data);
    count as u64
}

fn check(records: &[u64], data: &[u8]) {
    for (record, bytes) in records.iter().zip(data.chunks_exact(RECORD_BYTES as usize)) {
        assert_eq!(bytes[..8], (record + 1).to_le_bytes(), "record {record}");
    }
}

async fn latency(client: &Client) -> Option<(f64, f64)> {
    async fn sample<V: Verbs>(verbs: &V) -> (f64, f64) {
        let mut rng = SmallRng::seed_from_u64(1);
        let mut times = Vec::new();
        for i in 0..3000 {
            let start = Instant::now();
            one_batch(verbs, &mut rng, 1).await;
            if i >= 500 {
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        times.sort_by(f64::total_cmp);
        (times[times.len() / 2], times[times.len() * 99 / 100])
    }
    match client {
        Client::Quic(verbs) => Some(sample(&**verbs).await),
        Client::Framed(verbs) => Some(sample(&**verbs).await),
        Client::Plain(_) => None,
    }
}

// -------------------------------------------------------------------------------------------------- identities

fn any_port() -> SocketAddr {
    "127.0.0.1:0".parse().expect("an address")
}

/// Writes certificates for all variants; returns the client's identity for `quic`.
fn write_certs(dir: &std::path::Path) -> Identity {
    let ca = ClusterCa::init(dir.join("ca")).expect("a cluster CA");
    ca.issue(Role::Mn, "mn-0", &[], 1, dir.join("mn")).expect("a certificate");
    ca.issue(Role::Cn, "cn-0", &[], 1, dir.join("cn")).expect("a certificate");
    let own = rcgen::generate_simple_self_signed(["shine".to_owned()]).expect("a self-signed certificate");
    std::fs::write(dir.join("own.der"), own.cert.der()).expect("a writable folder");
    std::fs::write(dir.join("own.key"), own.signing_key.serialize_der()).expect("a writable folder");
    Identity::load(dir.join("cn")).expect("the identity just issued")
}

fn own_certificate(dir: &std::path::Path) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let cert = CertificateDer::from(std::fs::read(dir.join("own.der")).expect("written by the parent"));
    let key = std::fs::read(dir.join("own.key")).expect("written by the parent");
    (cert, PrivateKeyDer::try_from(key).expect("a PKCS#8 key"))
}

fn server_tls(dir: &std::path::Path) -> rustls::ServerConfig {
    let (cert, key) = own_certificate(dir);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_no_client_auth()
        .with_single_cert(vec![cert], key)
        .expect("a valid certificate")
}

fn client_tls(dir: &std::path::Path) -> rustls::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(own_certificate(dir).0).expect("a valid certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

// ------------------------------------------------------------------------------------------------------ server

fn bench_host() -> Arc<Host> {
    let host = Host::new("mn-0", LIFE, HostOptions::default());
    let memory = RegionMemory::new(REGION_BYTES, HugePages::Transparent).expect("256 MiB of memory");
    let mut record = vec![0x5a; RECORD_BYTES as usize];
    for at in 0..RECORDS {
        record[..8].copy_from_slice(&(at + 1).to_le_bytes());
        memory.write(at * RECORD_BYTES, &record);
    }
    host.add_region(REGION, EPOCH, Epoch(1), memory).expect("a new host");
    host
}

async fn serve_variant(variant: &str, certs: &std::path::Path) {
    // Answers the parent's questions about CPU time; ends with the parent.
    std::thread::spawn(|| {
        for line in std::io::stdin().lines() {
            match line.as_deref() {
                Ok("cpu") => println!("{}", cpu_ns()),
                _ => break,
            }
        }
        std::process::exit(0);
    });
    match variant {
        "quic" => {
            let identity = Identity::load(certs.join("mn")).expect("the identity that the parent made");
            let endpoint =
                Endpoint::bind(any_port(), identity, EndpointOptions::default()).expect("a UDP socket");
            let host = bench_host();
            println!("{}", endpoint.local_addr());
            while let Some((connection, peer, _)) = endpoint.accept().await {
                tokio::spawn(serve(Arc::clone(&host), connection, peer));
            }
        }
        "tls" => {
            let listener = TcpListener::bind(any_port()).await.expect("a TCP socket");
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(server_tls(certs)));
            let host = bench_host();
            println!("{}", listener.local_addr().expect("bound"));
            loop {
                let (stream, _) = listener.accept().await.expect("a caller");
                stream.set_nodelay(true).expect("a TCP option");
                let stream = acceptor.accept(stream).await.expect("a TLS handshake");
                tokio::spawn(serve_lanes(Arc::clone(&host), tcp_lane(stream)));
            }
        }
        "plain" => {
            let listener = TcpListener::bind(any_port()).await.expect("a TCP socket");
            let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(server_tls(certs)));
            println!("{}", listener.local_addr().expect("bound"));
            let memory = plain_memory();
            loop {
                let (stream, _) = listener.accept().await.expect("a caller");
                stream.set_nodelay(true).expect("a TCP option");
                let stream = acceptor.accept(stream).await.expect("a TLS handshake");
                tokio::task::spawn_local(serve_plain(Rc::clone(&memory), stream));
            }
        }
        "default" => {
            let crypto = QuicServerConfig::try_from(server_tls(certs)).expect("a QUIC configuration");
            let config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
            let endpoint = quinn::Endpoint::server(config, any_port()).expect("a UDP socket");
            let host = bench_host();
            println!("{}", endpoint.local_addr().expect("bound"));
            while let Some(incoming) = endpoint.accept().await {
                let connection = incoming.await.expect("a QUIC handshake");
                let (send, recv) = connection.accept_bi().await.expect("a lane");
                tokio::spawn(serve_lanes(Arc::clone(&host), (QuinnSink(send), QuinnSource(recv))));
            }
        }
        other => panic!("no such variant: {other}"),
    }
}

async fn serve_lanes<S: Sink, R: Source>(host: Arc<Host>, (mut sink, mut source): (S, R)) {
    let mut assembler = Assembler::default();
    let session = take_hello(&host, "cn-0", &mut sink, &mut source, &mut assembler)
        .await
        .expect("the client greets properly");
    let _ = serve_lane(host, session, true, sink, source, assembler).await;
}

// ------------------------------------------------------------------------------------------------------ client

async fn connect(name: &str, addr: SocketAddr, endpoint: &Endpoint, certs: &std::path::Path) -> Client {
    let server_name = ServerName::try_from("shine").expect("a DNS name");
    let tls = async || {
        let stream = TcpStream::connect(addr).await.expect("a TCP connection");
        stream.set_nodelay(true).expect("a TCP option");
        let connector = tokio_rustls::TlsConnector::from(Arc::new(client_tls(certs)));
        connector.connect(server_name.clone(), stream).await.expect("a TLS handshake")
    };
    match name {
        "quic" => {
            let deadline = Instant::now() + Duration::from_secs(10);
            let verbs = QuicVerbs::connect(endpoint, addr, "mn-0", LIFE, deadline).await.expect("a session");
            Client::Quic(Rc::new(verbs))
        }
        "tls" => Client::Framed(Rc::new(framed(tcp_lane(tls().await)).await)),
        "plain" => Client::Plain(Box::new(PlainClient::new(tls().await))),
        "default" => {
            let crypto = QuicClientConfig::try_from(client_tls(certs)).expect("a QUIC configuration");
            let mut endpoint = quinn::Endpoint::client(any_port()).expect("a UDP socket");
            endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(crypto)));
            let connection =
                endpoint.connect(addr, "shine").expect("a name").await.expect("a QUIC handshake");
            let (send, recv) = connection.open_bi().await.expect("a lane");
            Client::Framed(Rc::new(framed((QuinnSink(send), QuinnSource(recv))).await))
        }
        other => panic!("no such variant: {other}"),
    }
}

async fn framed<S: Sink, R: Source>((mut sink, mut source): (S, R)) -> FramedVerbs {
    let hello = Hello { version: PROTOCOL_VERSION, incarnation: LIFE, mn: "mn-0".into() };
    let mut assembler = Assembler::default();
    let welcome = greet(&mut sink, &mut source, &mut assembler, &hello).await.expect("a session");
    FramedVerbs::start("mn-0".into(), welcome, vec![(sink, source)], assembler, |what| panic!("{what}"))
}

// ------------------------------------------------------------------------------------------------------- lanes

struct QuinnSource(quinn::RecvStream);

impl Source for QuinnSource {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        let chunk = self.0.read_chunk(usize::MAX, true).await.map_err(|error| error.to_string())?;
        Ok(chunk.map(|chunk| chunk.bytes))
    }
}

struct QuinnSink(quinn::SendStream);

impl Sink for QuinnSink {
    async fn send(&mut self, bytes: Bytes) -> Result<(), String> {
        self.0.write_chunk(bytes).await.map_err(|error| error.to_string())
    }
}

/// Bytes that a TCP lane reads at once, at most.
const READ_BYTES: usize = 256 << 10;

struct TcpSource<T> {
    stream: ReadHalf<T>,
    buffer: BytesMut,
}

impl<T: tokio::io::AsyncRead + Send + 'static> Source for TcpSource<T> {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        if self.buffer.capacity() < READ_BYTES / 4 {
            self.buffer.reserve(READ_BYTES);
        }
        let count = self.stream.read_buf(&mut self.buffer).await.map_err(|error| error.to_string())?;
        Ok((count > 0).then(|| self.buffer.split().freeze()))
    }
}

struct TcpSink<T>(WriteHalf<T>);

impl<T: tokio::io::AsyncWrite + Send + 'static> Sink for TcpSink<T> {
    async fn send(&mut self, bytes: Bytes) -> Result<(), String> {
        self.0.write_all(&bytes).await.map_err(|error| error.to_string())?;
        self.0.flush().await.map_err(|error| error.to_string())
    }
}

fn tcp_lane<T>(stream: T) -> (TcpSink<T>, TcpSource<T>)
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + 'static,
{
    let (read, write) = tokio::io::split(stream);
    (TcpSink(write), TcpSource { stream: read, buffer: BytesMut::new() })
}

// ------------------------------------------------------------------------------------------------ plain frames

// Request: length u32, id u32, 16 record numbers u32. Answer: length u32, id u32, 16 records. No lane, no window, no
// deadline, no epoch, no lease, no bounds check: what a program that does only this would send.

const PLAIN_REQUEST: usize = 8 + 4 * BATCH;
const PLAIN_REPLY: usize = 8 + BATCH * RECORD_BYTES as usize;

fn plain_memory() -> Rc<Vec<u8>> {
    let mut memory = vec![0x5a; REGION_BYTES as usize];
    for (at, record) in memory.chunks_exact_mut(RECORD_BYTES as usize).enumerate() {
        record[..8].copy_from_slice(&(at as u64 + 1).to_le_bytes());
    }
    Rc::new(memory)
}

async fn serve_plain(memory: Rc<Vec<u8>>, mut stream: tokio_rustls::server::TlsStream<TcpStream>) {
    let (mut input, mut output) = (BytesMut::with_capacity(READ_BYTES), Vec::with_capacity(READ_BYTES * 2));
    loop {
        input.reserve(READ_BYTES);
        if stream.read_buf(&mut input).await.unwrap_or(0) == 0 {
            return;
        }
        while input.len() >= PLAIN_REQUEST {
            let mut request = input.split_to(PLAIN_REQUEST);
            request.advance(4);
            let id = request.get_u32_le();
            output.extend_from_slice(&(PLAIN_REPLY as u32 - 4).to_le_bytes());
            output.extend_from_slice(&id.to_le_bytes());
            for _ in 0..BATCH {
                let start = request.get_u32_le() as usize * RECORD_BYTES as usize;
                output.extend_from_slice(&memory[start..start + RECORD_BYTES as usize]);
            }
            if output.len() >= READ_BYTES {
                stream.write_all(&output).await.expect("the client reads");
                output.clear();
            }
        }
        if !output.is_empty() {
            stream.write_all(&output).await.expect("the client reads");
            stream.flush().await.expect("the client reads");
            output.clear();
        }
    }
}

struct PlainClient {
    stream: tokio_rustls::client::TlsStream<TcpStream>,
    input: BytesMut,
    output: Vec<u8>,
    asked: [[u64; BATCH]; IN_FLIGHT],
    rng: SmallRng,
}

impl PlainClient {
    fn new(stream: tokio_rustls::client::TlsStream<TcpStream>) -> Self {
        let rng = SmallRng::seed_from_u64(9);
        Self { stream, input: BytesMut::new(), output: Vec::new(), asked: [[0; BATCH]; IN_FLIGHT], rng }
    }

    fn ask(&mut self, id: usize) {
        self.output.extend_from_slice(&(PLAIN_REQUEST as u32 - 4).to_le_bytes());
        self.output.extend_from_slice(&(id as u32).to_le_bytes());
        for record in &mut self.asked[id] {
            *record = self.rng.random_range(0..RECORDS);
            self.output.extend_from_slice(&(*record as u32).to_le_bytes());
        }
    }

    async fn gather(&mut self, part: Duration) -> u64 {
        let end = Instant::now() + part;
        let (mut records, mut under_way) = (0, IN_FLIGHT);
        (0..IN_FLIGHT).for_each(|id| self.ask(id));
        while under_way > 0 {
            if !self.output.is_empty() {
                self.stream.write_all(&self.output).await.expect("the server reads");
                self.stream.flush().await.expect("the server reads");
                self.output.clear();
            }
            self.input.reserve(READ_BYTES);
            assert!(self.stream.read_buf(&mut self.input).await.expect("the server answers") > 0);
            while self.input.len() >= PLAIN_REPLY {
                let mut reply = self.input.split_to(PLAIN_REPLY);
                reply.advance(4);
                let id = reply.get_u32_le() as usize;
                check(&self.asked[id], &reply);
                records += BATCH as u64;
                if Instant::now() < end { self.ask(id) } else { under_way -= 1 }
            }
        }
        records
    }
}
