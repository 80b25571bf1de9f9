//! As much of HTTP as an attacker and an asker need.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longest answer that is read.
const ANSWER_BYTES_MAX: u64 = 1 << 20;

/// Sends `bytes`.
pub(super) async fn send(stream: &mut TcpStream, bytes: &[u8]) -> Result<(), String> {
    stream.write_all(bytes).await.map_err(|error| format!("{:?}", error.kind()))
}

/// Sends `bytes` and no more, and reads what comes until the other side closes.
pub(super) async fn exchange(stream: &mut TcpStream, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (mut read, mut write) = stream.split();
    let mut answer = Vec::new();
    let mut limited = (&mut read).take(ANSWER_BYTES_MAX);
    let sending = async {
        // It may be refused before all of it is sent.
        let _ = write.write_all(bytes).await;
        let _ = write.shutdown().await;
    };
    let (broke, ()) = tokio::join!(limited.read_to_end(&mut answer), sending);
    match broke {
        Err(error) if answer.is_empty() => Err(format!("{:?}", error.kind())),
        _ => Ok(answer),
    }
}

/// Statuses of all answers in `bytes`, each once.
pub(super) fn statuses(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let all = text.split("HTTP/1.1 ").skip(1).filter_map(|answer| answer.get(..3));
    let found: BTreeSet<_> = all.collect();
    match found.is_empty() {
        true => "closed".into(),
        false => found.into_iter().collect::<Vec<_>>().join(" "),
    }
}

/// Ids and scores of a search, as text, over a connection of its own.
///
/// # Errors
/// What came in place of points.
pub(super) async fn points_near(addr: SocketAddr, collection: &str, body: &str) -> Result<String, String> {
    let mut stream = TcpStream::connect(addr).await.map_err(|error| error.to_string())?;
    let request = format!(
        "POST /collections/{collection}/points/query?timeout=60 HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    send(&mut stream, request.as_bytes()).await?;
    let mut answer = Vec::new();
    let read = (&mut stream).take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await;
    read.map_err(|error| error.to_string())?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| format!("no head in '{answer}'"))?;
    if !head.starts_with("HTTP/1.1 200") {
        return Err(format!("{head}\n{body}"));
    }
    let json: serde_json::Value = serde_json::from_str(body).map_err(|error| format!("{error} in {body}"))?;
    match &json["result"]["points"] {
        serde_json::Value::Array(points) if !points.is_empty() => {
            let point = |point: &serde_json::Value| format!("{}: {}", point["id"], point["score"]);
            Ok(points.iter().map(point).collect::<Vec<_>>().join(", "))
        }
        _ => Err(format!("no points in {body}")),
    }
}
