//! The HTTP API of a compute node, in the form of Qdrant's REST API, so that its clients work.
//!
//! ```text
//! TCP ─ (TLS) ─▶ connection ─▶ routes: guard (who, how many) ─▶ body (how much) ─▶ qdrant (what) ─▶ Node
//! ```
//!
//! On loopback it is plain and asks for no key; anywhere else it needs a certificate and a key ([`HttpConfig`]).
//!
//! Invariant: what strangers send cannot make the process grow. Connections, requests at once, the bytes of bodies and
//! answers under way, the length of heads, and the time for each are all bounded.

mod fields;
mod metrics;
mod patience;
mod qdrant;
mod routes;
mod turn;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use shine_common::net::tls::crypto_provider;
use shine_common::verbs::Verbs;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{self, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tracing::{debug, info, warn};

use crate::node::Node;
use patience::Patient;
use routes::App;
use turn::Turn;

/// Most connections, unless told otherwise.
pub const CONNECTIONS_MAX: usize = 512;
/// Shortest time for which a peer is waited for, also when others want its place.
pub const PLACE_TIME_MIN: Duration = Duration::from_secs(1);
/// Time for a TLS handshake.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Bytes that are read ahead of a connection, and so the most of a head.
const BUFFER_BYTES: usize = 64 << 10;
/// Pause after a connection could not be accepted, since the process has too many files open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for answers under way when the node leaves.
const CLOSE_TIME: Duration = Duration::from_secs(2);
/// Bounds of a key's length.
const KEY_CHARS: std::ops::RangeInclusive<usize> = 16..=512;

/// Where and how the API is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Certificate chain and private key, PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// File with the key that requests must carry.
    pub api_key_file: Option<PathBuf>,
    /// How long a peer is waited for.
    pub patience: Patience,
    /// Most connections. One more takes the place of the one whose peer has been waited for longest, and waits until
    /// there is such a one.
    pub connections_max: usize,
}

/// How long a peer is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Time for the head of a request, and so also for which a connection may idle.
    pub head: Duration,
    /// Time for a body.
    pub body: Duration,
    /// Longest time for which a peer may take nothing of its answer.
    pub write: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let time = Duration::from_secs(30);
        Self { head: time, body: time, write: time }
    }
}

/// Why the API cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HttpError {
    /// The address cannot be had.
    #[error("--http {listen}: {source}")]
    Bind {
        /// The address.
        listen: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// The API, bound to its address.
pub struct Http {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    api_key: Option<String>,
    patience: Patience,
    connections_max: usize,
    url: String,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Http({})", self.url)
    }
}

impl Http {
    /// Binds the address and reads the files.
    ///
    /// # Errors
    /// If one of them is not to be had.
    pub async fn bind(config: &HttpConfig) -> Result<Self, HttpError> {
        let tls = config.tls.as_ref().map(|(cert, key)| acceptor(cert, key)).transpose()?;
        let api_key = config.api_key_file.as_deref().map(read_key).transpose()?;
        let bound = async {
            let listener = TcpListener::bind(config.listen).await?;
            let addr = listener.local_addr()?;
            Ok((listener, addr))
        };
        let (listener, addr) =
            bound.await.map_err(|source| HttpError::Bind { listen: config.listen, source })?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        Ok(Self {
            listener,
            tls,
            api_key,
            patience: config.patience,
            connections_max: config.connections_max,
            url: format!("{scheme}://{addr}"),
        })
    }

    /// Where it is called.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Serves `node` until `stop` is ready; then lets answers under way go out.
    pub async fn serve<V: Verbs>(self, node: Arc<Node<V>>, stop: impl Future<Output = ()>) {
        let app = Arc::new(App::new(node, self.api_key, self.patience.body));
        let router = routes::router(Arc::clone(&app));
        let (close, closing) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut turns: HashMap<task::Id, Arc<Turn>> = HashMap::new();
        let mut stop = pin!(stop);
        info!(url = self.url, "HTTP API");
        loop {
            app.tally.connections.store(connections.len() as u64, Ordering::Relaxed);
            let is_full = connections.len() >= self.connections_max;
            // Those that were asked to leave have no turn any more: one at a time.
            let is_to_wait = is_full && turns.len() == connections.len();
            let looks_again =
                is_to_wait.then(|| longest_awaited(&turns).map_or_else(Instant::now, |(_, since)| since));
            let accepted = tokio::select! {
                () = &mut stop => break,
                Some(ended) = connections.join_next_with_id() => {
                    turns.remove(&ended.map_or_else(|failed| failed.id(), |(id, ())| id));
                    continue;
                }
                () = sleep_until(looks_again.map(|since| since + PLACE_TIME_MIN)) => {
                    if let Some((id, since)) = longest_awaited(&turns)
                        && since.elapsed() >= PLACE_TIME_MIN
                        && let Some(turn) = turns.remove(&id)
                    {
                        turn.end();
                        app.tally.evicted.add(1);
                    }
                    continue;
                }
                accepted = self.listener.accept(), if !is_full => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (tls, router) = (self.tls.clone(), router.clone());
                    let (patience, closing) = (self.patience, closing.clone());
                    let turn = Arc::new(Turn::new());
                    let served = connection(stream, tls, router, patience, closing, Arc::clone(&turn));
                    let ends = Arc::clone(&turn);
                    let task = connections.spawn(async move {
                        let outcome = tokio::select! {
                            outcome = served => outcome,
                            () = ends.ended() => Err("another takes its place".into()),
                        };
                        if let Err(error) = outcome {
                            debug!(%peer, error, "HTTP connection ended");
                        }
                    });
                    turns.insert(task.id(), turn);
                }
                Err(error) => {
                    warn!(%error, "accepting an HTTP connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        close.send_replace(true);
        let all = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(CLOSE_TIME, all).await.is_err() {
            debug!("HTTP connections were cut off");
        }
    }
}

/// The connection whose peer has been waited for longest, with since when.
fn longest_awaited(turns: &HashMap<task::Id, Arc<Turn>>) -> Option<(task::Id, Instant)> {
    let awaited = turns.iter().filter_map(|(id, turn)| Some((*id, turn.peers_since()?)));
    awaited.min_by_key(|(_, since)| *since)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

async fn connection(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    router: Router,
    patience: Patience,
    closing: watch::Receiver<bool>,
    turn: Arc<Turn>,
) -> Result<(), String> {
    // An answer that waits for a full segment would wait for the peer's next request.
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let stream = Patient::new(stream, patience.write, Arc::clone(&turn));
    match tls {
        None => exchange(stream, router, patience.head, closing, turn).await,
        Some(tls) => match tokio::time::timeout(HANDSHAKE_TIME, tls.accept(stream)).await {
            Ok(Ok(stream)) => exchange(stream, router, patience.head, closing, turn).await,
            Ok(Err(error)) => Err(format!("TLS: {error}")),
            Err(_) => Err("TLS: no handshake in time".into()),
        },
    }
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    head_time: Duration,
    mut closing: watch::Receiver<bool>,
    turn: Arc<Turn>,
) -> Result<(), String> {
    let router = TowerToHyperService::new(router);
    let service = service_fn(|mut request: hyper::Request<Incoming>| {
        turn.is_ours();
        request.extensions_mut().insert(Arc::clone(&turn));
        let (answering, turn) = (router.call(request), Arc::clone(&turn));
        async move {
            let answer = answering.await;
            turn.is_peers();
            answer
        }
    });
    let exchange = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_time)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut exchange = pin!(exchange);
    tokio::select! {
        ended = &mut exchange => return ended.map_err(|error| error.to_string()),
        _ = closing.wait_for(|is_closing| *is_closing) => exchange.as_mut().graceful_shutdown(),
    }
    exchange.await.map_err(|error| error.to_string())
}

fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, HttpError> {
    let wrong = |path: &Path, why: String| HttpError::File { path: path.to_owned(), why };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(|certificates| certificates.collect::<Result<Vec<_>, _>>())
        .map_err(|error| wrong(cert, format!("not a chain of certificates in PEM: {error}")))?;
    if chain.is_empty() {
        return Err(wrong(cert, "no certificate in it: expected a chain of them in PEM".into()));
    }
    let secret = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| wrong(key, format!("not a private key in PEM: {error}")))?;
    let mut config = ServerConfig::builder_with_provider(crypto_provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(cert, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| wrong(cert, format!("does not go with {}: {error}", key.display())))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn read_key(path: &Path) -> Result<String, HttpError> {
    let wrong = |why: String| HttpError::File { path: path.to_owned(), why };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let key = text.trim();
    if !KEY_CHARS.contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong(format!(
            "not a key: expected {} to {} visible ASCII characters, such as `openssl rand -hex 32` prints",
            KEY_CHARS.start(),
            KEY_CHARS.end()
        )));
    }
    Ok(key.to_owned())
}
