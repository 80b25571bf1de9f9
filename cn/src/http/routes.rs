//! Paths, and what becomes of a request on its way through: who may, how many at once, how much of it is read, and the
//! answer's envelope.
//!
//! Invariant: every answer but plain pages is JSON in Qdrant's form, also where the path, the method or the body is wrong.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream::{self, FuturesUnordered, StreamExt as _, TryStreamExt as _};
use serde::Serialize;
use serde_json::json;
use shine_common::ids::ExternalId;
use shine_common::verbs::Verbs;
use shine_common::wire::{CnRequest, CnResponse, Fault, FaultCode, Role, Target};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::metrics::{self, Tally};
use super::qdrant::{self, Form, Id, Near, Point, Points, ScrollPage, Search};
use super::turn::Turn;
use crate::collection::Collection;
use crate::node::Node;

/// Most requests that are worked on at once; one more is told to come again. One whose body is still on its way does
/// not count: its sender would decide how long.
const REQUESTS_MAX: usize = 256;
/// Largest body, as in Qdrant.
const BODY_BYTES_MAX: usize = 32 << 20;
/// Memory for bodies and answers under way, in KiB.
const MEMORY_KIB_MAX: usize = 256 << 10;
/// What a byte of a body takes: itself in a buffer that grew by doubling, and the vectors made of it.
const BODY_WEIGHT: usize = 4;
/// Bytes of an answer that are handed to its connection at a time.
const PIECE_BYTES: usize = 64 << 10;
/// Bodies above this size are read apart from the threads that search.
const LARGE_BODY_BYTES: usize = 64 << 10;
/// Inserts of one upsert that run at once.
const UPSERT_PARALLEL: usize = 16;
/// Searches or look-ups of one request that run at once.
const QUERY_PARALLEL: usize = 16;

/// What handlers share.
pub(super) struct App<V> {
    node: Arc<Node<V>>,
    api_key: Option<String>,
    body_time: Duration,
    requests: Arc<Semaphore>,
    memory: Arc<Semaphore>,
    pub(super) tally: Tally,
}

/// Why a request gets no result.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    message: String,
}

impl Refusal {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        let status = match fault.code {
            FaultCode::BadRequest => StatusCode::BAD_REQUEST,
            FaultCode::NotFound => StatusCode::NOT_FOUND,
            FaultCode::CollectionExists | FaultCode::IdExists => StatusCode::CONFLICT,
            FaultCode::Forbidden => StatusCode::FORBIDDEN,
            FaultCode::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            FaultCode::RegionFull => StatusCode::INSUFFICIENT_STORAGE,
            FaultCode::Overloaded
            | FaultCode::MemoryNodeLost
            | FaultCode::RegionLost
            | FaultCode::StaleEpoch
            | FaultCode::NoOracle
            | FaultCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            FaultCode::Corrupt | FaultCode::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, message: fault.message }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = json!({ "status": { "error": self.message }, "time": 0.0 }).to_string();
        let mut response =
            (self.status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body)
                .into_response();
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A body, the room that it takes, and its place among those worked on; kept until the request is done.
struct Received {
    bytes: Vec<u8>,
    _room: OwnedSemaphorePermit,
    _running: OwnedSemaphorePermit,
}

impl<V: Verbs> App<V> {
    pub(super) fn new(node: Arc<Node<V>>, api_key: Option<String>, body_time: Duration) -> Self {
        Self {
            node,
            api_key,
            body_time,
            requests: Arc::new(Semaphore::new(REQUESTS_MAX)),
            memory: Arc::new(Semaphore::new(MEMORY_KIB_MAX)),
            tally: Tally::default(),
        }
    }

    fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        Arc::clone(&self.memory).try_acquire_many_owned(kib).map_err(|_| {
            let message = "too many large requests at once: try again, or another compute node";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// A place among the requests that are worked on.
    fn begin(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        Arc::clone(&self.requests).try_acquire_owned().map_err(|_| {
            let message = format!(
                "{REQUESTS_MAX} requests run already, the most that may: try again, or another compute node"
            );
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// Reads a body, as far as it is allowed to go; then the request is one of those that are worked on.
    async fn receive(&self, request: Request) -> Result<Received, Refusal> {
        let turn = request.extensions().get::<Arc<Turn>>().cloned();
        let too_large = || {
            let message =
                format!("the body is too large: expected at most {BODY_BYTES_MAX} bytes; send it in parts");
            Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        let declared = request.headers().get(header::CONTENT_LENGTH);
        let declared = declared.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > BODY_BYTES_MAX as u64) {
            return Err(too_large());
        }
        let mut room = self.room(0)?;
        let mut bytes = Vec::new();
        let mut pieces = request.into_body().into_data_stream();
        let all = async {
            while let Some(piece) = pieces.next().await {
                let piece = piece.map_err(|error| {
                    Refusal::new(StatusCode::BAD_REQUEST, format!("the body broke off: {error}"))
                })?;
                if bytes.len() + piece.len() > BODY_BYTES_MAX {
                    return Err(too_large());
                }
                room.merge(self.room(piece.len() * BODY_WEIGHT)?);
                bytes.extend_from_slice(&piece);
            }
            Ok(())
        };
        if let Some(turn) = &turn {
            turn.is_peers();
        }
        let received = tokio::time::timeout(self.body_time, all).await;
        if let Some(turn) = &turn {
            turn.is_ours();
        }
        match received {
            Ok(outcome) => outcome?,
            Err(_) => {
                let message = format!("the body did not arrive within {:?}", self.body_time);
                return Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, message));
            }
        }
        Ok(Received { bytes, _room: room, _running: self.begin()? })
    }

    /// The answer in its envelope.
    fn answer<T: Serialize>(&self, started: Instant, result: Result<T, Refusal>) -> Response {
        #[derive(Serialize)]
        struct Envelope<T> {
            result: T,
            status: &'static str,
            time: f64,
        }
        let answer = result.and_then(|result| {
            let envelope = Envelope { result, status: "ok", time: started.elapsed().as_secs_f64() };
            let text = serde_json::to_vec(&envelope)
                .map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
            let room = self.room(text.len())?;
            Ok(in_pieces(text.into(), room))
        });
        answer.unwrap_or_else(IntoResponse::into_response)
    }
}

/// A JSON answer that gives its room back once its connection has taken the last piece.
fn in_pieces(text: Bytes, room: OwnedSemaphorePermit) -> Response {
    let length = text.len();
    let pieces = stream::unfold((text, room), |(mut rest, room)| async move {
        let piece = rest.split_to(rest.len().min(PIECE_BYTES));
        (!piece.is_empty()).then_some((Ok::<_, std::convert::Infallible>(piece), (rest, room)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CONTENT_LENGTH, HeaderValue::from(length)),
    ];
    (headers, Body::from_stream(pieces)).into_response()
}

/// All paths.
pub(super) fn router<V: Verbs>(app: Arc<App<V>>) -> Router {
    Router::new()
        .route("/", get(about))
        .route("/livez", get(alive))
        .route("/healthz", get(alive))
        .route("/readyz", get(readyz::<V>))
        .route("/metrics", get(metrics_page::<V>))
        .route("/collections", get(list::<V>))
        .route("/collections/{name}", get(describe::<V>).put(create::<V>).delete(drop_collection::<V>))
        .route("/collections/{name}/exists", get(exists::<V>))
        .route("/collections/{name}/points", post(retrieve::<V>).put(upsert::<V>))
        .route("/collections/{name}/points/{id}", get(retrieve_one::<V>))
        .route("/collections/{name}/points/query", post(query::<V>))
        .route("/collections/{name}/points/query/batch", post(query_batch::<V>))
        .route("/collections/{name}/points/scroll", post(scroll::<V>))
        .route("/collections/{name}/points/count", post(count::<V>))
        .route("/collections/{name}/points/delete", post(delete_points))
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard::<V>))
        .with_state(app)
}

async fn no_path(request: Request) -> Refusal {
    let message = format!(
        "no path {}: expected /collections and below, /metrics, /livez or /readyz",
        request.uri().path()
    );
    Refusal::new(StatusCode::NOT_FOUND, message)
}

async fn no_method(request: Request) -> Refusal {
    let message = format!("{} is not offered for {}", request.method(), request.uri().path());
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

// ---------------------------------------------------------------------------------------------------- guard

/// Lets a request through to its handler, or not; and books it.
async fn guard<V: Verbs>(State(app): State<Arc<App<V>>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let is_page = request.uri().path() == "/readyz";
    let mut response = match admit(&app, &request) {
        Ok(_running) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    };
    let status = response.status();
    let is_json = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if (status.is_client_error() || status.is_server_error()) && !is_json && !is_page {
        // The router's own, such as for a path that is not UTF-8.
        response = Refusal::new(status, status.canonical_reason().unwrap_or("refused")).into_response();
    }
    app.tally.answered(response.status().as_u16(), started.elapsed());
    response
}

fn admit<V: Verbs>(app: &App<V>, request: &Request) -> Result<Option<OwnedSemaphorePermit>, Refusal> {
    // Whoever watches over the process has no key, and asks when it is busy too.
    if matches!(request.uri().path(), "/livez" | "/readyz" | "/healthz") {
        return Ok(None);
    }
    match &app.api_key {
        Some(key) => check_key(request, key)?,
        None => check_local(request)?,
    }
    // What has a body is counted once it is there.
    let has_body = matches!(*request.method(), Method::POST | Method::PUT);
    if request.uri().path() == "/metrics" || has_body {
        return Ok(None);
    }
    app.begin().map(Some)
}

fn check_key(request: &Request, key: &str) -> Result<(), Refusal> {
    let headers = request.headers();
    let bearer = |value: &HeaderValue| value.as_bytes().strip_prefix(b"Bearer ").map(<[u8]>::to_vec);
    let given = headers
        .get("api-key")
        .map(|value| value.as_bytes().to_vec())
        .or_else(|| headers.get(header::AUTHORIZATION).and_then(bearer));
    // As long for a key that is wrong at the end as for one that is wrong at the start.
    let same = |given: &[u8]| {
        given.len() == key.len() && given.iter().zip(key.as_bytes()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
    };
    match given {
        Some(given) if same(&given) => Ok(()),
        Some(_) => Err(Refusal::new(StatusCode::UNAUTHORIZED, "the header api-key is not this node's key")),
        None => Err(Refusal::new(StatusCode::UNAUTHORIZED, "the header api-key is missing")),
    }
}

/// Without a key, a request must be meant for this machine: a page from elsewhere in somebody's browser can reach
/// loopback too, but it says where it comes from, or whom it took loopback for.
fn check_local(request: &Request) -> Result<(), Refusal> {
    let foreign = |what: &str, value: &str| {
        let message = format!("{what} '{value}' is not this machine: without a key only loopback is served");
        Err(Refusal::new(StatusCode::FORBIDDEN, message))
    };
    let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    if let Some(host) = request.headers().get(header::HOST).map(text)
        && !is_loopback(&host)
    {
        return foreign("host", &host);
    }
    if let Some(origin) = request.headers().get(header::ORIGIN).map(text)
        && !origin.split_once("://").is_some_and(|(_, host)| is_loopback(host))
    {
        return foreign("origin", &origin);
    }
    Ok(())
}

fn is_loopback(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return false };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// `?timeout=SECONDS`, as Qdrant has it.
fn timeout(request: &Request) -> Result<Option<Duration>, Refusal> {
    let pairs = request.uri().query().unwrap_or("").split('&');
    match pairs.filter_map(|pair| pair.strip_prefix("timeout=")).next() {
        None => Ok(None),
        Some(text) => match text.parse::<u32>() {
            Ok(seconds) if seconds > 0 => Ok(Some(Duration::from_secs(seconds.into()))),
            _ => Err(Refusal::new(
                StatusCode::BAD_REQUEST,
                format!("timeout: expected a whole number of seconds, at least 1, got '{text}'"),
            )),
        },
    }
}

// ---------------------------------------------------------------------------------------------------- pages

async fn about() -> Response {
    let about = json!({ "title": "shine - vector search engine", "version": env!("CARGO_PKG_VERSION") });
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], about.to_string())
        .into_response()
}

async fn alive() -> &'static str {
    "alive\n"
}

async fn readyz<V: Verbs>(State(app): State<Arc<App<V>>>) -> Response {
    match app.node.readiness() {
        Ok(()) => "ready\n".into_response(),
        Err(fault) => (StatusCode::SERVICE_UNAVAILABLE, format!("{fault}\n")).into_response(),
    }
}

async fn metrics_page<V: Verbs>(State(app): State<Arc<App<V>>>) -> Response {
    let text = metrics::text(&app.node.status(), &app.tally);
    ([(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4"))], text).into_response()
}

// ---------------------------------------------------------------------------------------------- collections

/// What an answer of the node is if it is not of the kind asked for.
fn unexpected(answer: &CnResponse) -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("an answer that was not asked for: {answer:?}"))
}

async fn list<V: Verbs>(State(app): State<Arc<App<V>>>) -> Response {
    let started = Instant::now();
    let result = match app.node.handle(Role::Admin, CnRequest::List).await {
        Ok(CnResponse::Collections(infos)) => {
            let names: Vec<_> = infos.into_iter().map(|info| json!({ "name": info.name })).collect();
            Ok(json!({ "collections": names }))
        }
        Ok(other) => Err(unexpected(&other)),
        Err(fault) => Err(fault.into()),
    };
    app.answer(started, result)
}

async fn describe<V: Verbs>(State(app): State<Arc<App<V>>>, Path(name): Path<String>) -> Response {
    let started = Instant::now();
    let result = match app.node.handle(Role::Admin, CnRequest::Stats { collection: name }).await {
        Ok(CnResponse::Info(info)) => Ok(qdrant::describe(&info)),
        Ok(other) => Err(unexpected(&other)),
        Err(fault) => Err(fault.into()),
    };
    app.answer(started, result)
}

async fn exists<V: Verbs>(State(app): State<Arc<App<V>>>, Path(name): Path<String>) -> Response {
    let started = Instant::now();
    let exists = app.node.exists(&name, started + app.node.limits().deadline).await;
    app.answer(started, exists.map(|exists| json!({ "exists": exists })).map_err(Refusal::from))
}

async fn create<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let body = app.receive(request).await?;
        let spec = qdrant::create(&name, &body.bytes)?;
        app.node.handle(Role::Admin, CnRequest::Create(spec)).await?;
        Ok(true)
    };
    app.answer(started, result.await)
}

/// That there was none is `false`, as in Qdrant: clients delete before they create.
async fn drop_collection<V: Verbs>(State(app): State<Arc<App<V>>>, Path(name): Path<String>) -> Response {
    let started = Instant::now();
    let result = match app.node.handle(Role::Admin, CnRequest::Drop { collection: name }).await {
        Ok(_) => Ok(true),
        Err(fault) if fault.code == FaultCode::NotFound => Ok(false),
        Err(fault) => Err(fault.into()),
    };
    app.answer(started, result)
}

// --------------------------------------------------------------------------------------------------- points

/// A collection that can be worked with, and when the work must be done.
struct Opened<V> {
    collection: Arc<Collection<V>>,
    deadline: Instant,
}

impl<V: Verbs> Opened<V> {
    async fn new(app: &App<V>, name: &str, time: Duration) -> Result<Self, Refusal> {
        let deadline = Instant::now() + time.min(app.node.limits().deadline_max);
        let collection = app.node.open(name, deadline).await?;
        collection.admit_ready()?;
        Ok(Self { collection, deadline })
    }

    /// Reads a body with `read`; a large one apart from the threads that search.
    async fn read<T: Send + 'static>(
        &self,
        body: &mut Received,
        read: impl FnOnce(&Form<'_>, &[u8]) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Refusal> {
        let bytes = std::mem::take(&mut body.bytes);
        let is_large = bytes.len() > LARGE_BODY_BYTES;
        let collection = Arc::clone(&self.collection);
        let read = move || {
            let params = collection.params();
            let form = Form {
                collection: collection.name(),
                dtype: params.dtype,
                metric: params.metric,
                dim: params.dim,
            };
            read(&form, &bytes)
        };
        let result = if is_large {
            tokio::task::spawn_blocking(read).await.map_err(|failure| {
                Refusal::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    format!("reading the body broke off: {failure}"),
                )
            })?
        } else {
            read()
        };
        Ok(result?)
    }
}

async fn upsert<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let time = timeout(&request)?.unwrap_or(app.node.limits().deadline_max);
        let opened = Opened::new(&app, &name, time).await?;
        let mut body = app.receive(request).await?;
        // All are checked before any is stored.
        let rows = opened.read(&mut body, qdrant::upsert).await?;
        let total = rows.len();
        let mut rows = rows.into_iter();
        let mut running = FuturesUnordered::new();
        let (mut stored, mut failed) = (0, None);
        loop {
            while failed.is_none()
                && running.len() < UPSERT_PARALLEL
                && let Some(row) = rows.next()
            {
                let (node, opened) = (&app.node, &opened);
                running.push(async move {
                    let outcome = node.upsert(&opened.collection, row.id, row.vector, opened.deadline).await;
                    (row.id, outcome)
                });
            }
            match running.next().await {
                Some((_, Ok(_))) => stored += 1,
                Some((id, Err(fault))) => failed = failed.or(Some((id, fault))),
                None => break,
            }
        }
        match failed {
            None => Ok(json!({ "operation_id": 0, "status": "completed" })),
            Some((id, fault)) => {
                let Refusal { status, message } = fault.into();
                let message = format!(
                    "point {id}: {message}. {stored} of the {total} points are stored: send the request again"
                );
                Err(Refusal::new(status, message))
            }
        }
    };
    app.answer(started, result.await)
}

async fn delete_points() -> Refusal {
    Refusal::new(StatusCode::NOT_IMPLEMENTED, "points cannot be deleted yet; a collection can")
}

async fn retrieve<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let time = timeout(&request)?.unwrap_or(app.node.limits().deadline_max);
        let opened = Opened::new(&app, &name, time).await?;
        let mut body = app.receive(request).await?;
        let (ids, with_vectors) = opened.read(&mut body, qdrant::retrieve).await?;
        let dtype = opened.collection.params().dtype;
        let found = stream::iter(ids)
            .map(|id| {
                let (app, opened) = (&app, &opened);
                async move {
                    let vector = look_up(app, opened, id).await?;
                    Ok::<_, Refusal>(
                        vector.map(|vector| Point::record(id, dtype, with_vectors.then_some(&vector[..]))),
                    )
                }
            })
            .buffered(QUERY_PARALLEL);
        let points: Vec<Option<Point>> = found.try_collect().await?;
        Ok(points.into_iter().flatten().collect::<Vec<_>>())
    };
    app.answer(started, result.await)
}

async fn retrieve_one<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path((name, id)): Path<(String, String)>,
) -> Response {
    let started = Instant::now();
    let result = async {
        let id: ExternalId = id.parse().map_err(|error: shine_common::ids::BadExternalId| {
            Refusal::new(StatusCode::BAD_REQUEST, error.to_string())
        })?;
        let opened = Opened::new(&app, &name, app.node.limits().deadline).await?;
        let dtype = opened.collection.params().dtype;
        match look_up(&app, &opened, id).await? {
            Some(vector) => Ok(Point::record(id, dtype, Some(&vector))),
            None => {
                let message = format!("collection '{name}' has no point {id}");
                Err(Refusal::new(StatusCode::NOT_FOUND, message))
            }
        }
    };
    app.answer(started, result.await)
}

/// The vector under an id, if there is one.
async fn look_up<V: Verbs>(
    app: &App<V>,
    opened: &Opened<V>,
    id: ExternalId,
) -> Result<Option<Vec<u8>>, Refusal> {
    let collection = opened.collection.name().to_owned();
    let get = CnRequest::Get { collection, id, deadline_ms: millis_left(opened.deadline) };
    match app.node.handle(Role::Client, get).await {
        Ok(CnResponse::Record { vector, .. }) => Ok(Some(vector)),
        Ok(other) => Err(unexpected(&other)),
        Err(fault) if fault.code == FaultCode::NotFound => {
            // The id, or by now the whole collection.
            opened.collection.admit_ready()?;
            Ok(None)
        }
        Err(fault) => Err(fault.into()),
    }
}

fn millis_left(deadline: Instant) -> u32 {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis();
    u32::try_from(left).unwrap_or(u32::MAX).max(1)
}

async fn query<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let time = timeout(&request)?.unwrap_or(app.node.limits().deadline);
        let opened = Opened::new(&app, &name, time).await?;
        let mut body = app.receive(request).await?;
        let search = opened.read(&mut body, qdrant::search).await?;
        points_near(&app, &opened, search).await
    };
    app.answer(started, result.await)
}

async fn query_batch<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let time = timeout(&request)?.unwrap_or(app.node.limits().deadline_max);
        let opened = Opened::new(&app, &name, time).await?;
        let mut body = app.receive(request).await?;
        let searches = opened.read(&mut body, qdrant::searches).await?;
        let answers = stream::iter(searches).map(|search| {
            let (app, opened) = (&app, &opened);
            points_near(app, opened, search)
        });
        answers.buffered(QUERY_PARALLEL).try_collect::<Vec<Points>>().await
    };
    app.answer(started, result.await)
}

async fn points_near<V: Verbs>(app: &App<V>, opened: &Opened<V>, search: Search) -> Result<Points, Refusal> {
    let params = opened.collection.params();
    let k = search.k();
    let (target, itself) = match search.near {
        Near::Vector(vector) => (Target::Vector(vector), None),
        Near::Id(id) => (Target::Id(id), Some(id)),
    };
    let request = CnRequest::Search {
        collection: opened.collection.name().to_owned(),
        target,
        k,
        ef: search.ef.unwrap_or(params.ef_construction),
        deadline_ms: millis_left(opened.deadline),
        with_vectors: search.with_vectors,
    };
    let hits = match app.node.handle(Role::Client, request).await? {
        CnResponse::Hits { hits, .. } => hits,
        other => return Err(unexpected(&other)),
    };
    let points = hits.into_iter().filter(|hit| Some(hit.id) != itself).map(|hit| {
        let score = qdrant::score(params.metric, hit.distance);
        let vector = search.with_vectors.then_some(&hit.vector[..]);
        (score, Point::scored(hit.id, score, params.dtype, vector))
    });
    let points = points
        .skip(search.offset)
        .take(search.limit)
        .filter(|(score, _)| qdrant::passes(params.metric, *score, search.threshold))
        .map(|(_, point)| point)
        .collect();
    Ok(Points { points })
}

async fn scroll<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let time = timeout(&request)?.unwrap_or(app.node.limits().control_deadline);
        let opened = Opened::new(&app, &name, time).await?;
        let mut body = app.receive(request).await?;
        let scroll = opened.read(&mut body, qdrant::scroll).await?;
        let (collection, with_vectors) = (&opened.collection, scroll.with_vectors);
        let page =
            app.node.scroll(collection, scroll.offset, scroll.limit, with_vectors, opened.deadline).await?;
        let dtype = collection.params().dtype;
        let points: Vec<_> = page
            .records
            .iter()
            .map(|record| Point::record(record.id, dtype, with_vectors.then_some(&record.vector[..])))
            .collect();
        Ok(ScrollPage { points, next_page_offset: page.next.map(Id::from) })
    };
    app.answer(started, result.await)
}

async fn count<V: Verbs>(
    State(app): State<Arc<App<V>>>,
    Path(name): Path<String>,
    request: Request,
) -> Response {
    let started = Instant::now();
    let result = async {
        let time = timeout(&request)?.unwrap_or(app.node.limits().control_deadline);
        let opened = Opened::new(&app, &name, time).await?;
        let mut body = app.receive(request).await?;
        let is_exact = opened.read(&mut body, |_, body| qdrant::count(body)).await?;
        Ok(json!({ "count": app.node.count(&opened.collection, is_exact, opened.deadline).await? }))
    };
    app.answer(started, result.await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_told_from_everything_else() {
        for authority in
            ["localhost", "LOCALHOST:6333", "127.0.0.1", "127.0.0.1:6333", "127.9.9.9", "[::1]:6333"]
        {
            assert!(is_loopback(authority), "{authority}");
        }
        for authority in
            ["", "example.org", "127.0.0.1.example.org", "10.0.0.1:6333", "localhost.example.org", "0.0.0.0"]
        {
            assert!(!is_loopback(authority), "{authority}");
        }
    }

    #[test]
    fn a_page_from_elsewhere_is_refused_and_a_tool_on_this_machine_is_not() {
        let request = |headers: &[(&str, &str)]| {
            let mut request = Request::builder().uri("/collections");
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            request.body(Body::empty()).unwrap()
        };
        let local = |headers: &[(&str, &str)]| check_local(&request(headers));
        local(&[("host", "127.0.0.1:6333")]).unwrap();
        local(&[("host", "localhost:6333"), ("origin", "http://localhost:3000")]).unwrap();
        for headers in [
            &[("host", "rebound.example.org:6333")][..],
            &[("host", "127.0.0.1:6333"), ("origin", "https://example.org")][..],
            &[("host", "127.0.0.1:6333"), ("origin", "null")][..],
        ] {
            assert_eq!(local(headers).unwrap_err().status, StatusCode::FORBIDDEN, "{headers:?}");
        }
        let key = "0123456789abcdef";
        let keyed = |headers: &[(&str, &str)]| check_key(&request(headers), key);
        keyed(&[("api-key", key)]).unwrap();
        keyed(&[("authorization", "Bearer 0123456789abcdef")]).unwrap();
        for headers in [&[][..], &[("api-key", "0123456789abcdeF")][..], &[("authorization", key)][..]] {
            assert_eq!(keyed(headers).unwrap_err().status, StatusCode::UNAUTHORIZED, "{headers:?}");
        }
    }

    #[test]
    fn a_timeout_is_a_number_of_seconds() {
        let of = |uri: &str| timeout(&Request::builder().uri(uri).body(Body::empty()).unwrap());
        assert_eq!(of("/x?wait=true").unwrap(), None);
        assert_eq!(of("/x?wait=true&timeout=5").unwrap(), Some(Duration::from_secs(5)));
        for uri in ["/x?timeout=0", "/x?timeout=soon", "/x?timeout="] {
            assert!(of(uri).unwrap_err().message.starts_with("timeout: expected"), "{uri}");
        }
    }
}
