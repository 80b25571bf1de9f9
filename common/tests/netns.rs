//! Verbs over QUIC between two network namespaces: a real path of MTU 1500, with path MTU discovery and a congestion
//! controller, instead of loopback.
//!
//! Needs root and the `ip` command; where either is missing the test says so and passes.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use quinn::Connection;
use shine_common::net::endpoint::{Endpoint, EndpointOptions, close};
use shine_common::net::tls::{ClusterCa, Identity};
use shine_common::verbs::conformance::{Backend, run_all};
use shine_common::verbs::framed::window_calls;
use shine_common::verbs::host::Host;
use shine_common::verbs::quic::{QuicVerbs, serve};
use shine_common::wire::Role;

/// Bytes of an IP packet on the path, and of the UDP payload in it.
const MTU: u16 = 1500;
const UDP_PAYLOAD: u16 = MTU - 28;

/// Two namespaces with a cable between them; gone when dropped.
struct Namespaces {
    names: [String; 2],
}

impl Namespaces {
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let made = Self { names: [format!("shine-a-{id}"), format!("shine-b-{id}")] };
        let [a, b] = &made.names;
        let (left, right) = (format!("sa{id}"), format!("sb{id}"));
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!("link add {left} mtu {MTU} netns {a} type veth peer name {right} mtu {MTU} netns {b}"))?;
        for (name, link, addr) in [(a, &left, "10.77.0.1/24"), (b, &right, "10.77.0.2/24")] {
            ip(&format!("-n {name} addr add {addr} dev {link}"))?;
            ip(&format!("-n {name} link set {link} up"))?;
            ip(&format!("-n {name} link set lo up"))?;
        }
        Ok(made)
    }

    /// Binds an endpoint inside one of the namespaces; its socket stays there, whoever uses it.
    fn bind(&self, at: usize, identity: Identity) -> Endpoint {
        let file = std::fs::File::open(format!("/var/run/netns/{}", self.names[at])).unwrap();
        let addr: SocketAddr = format!("10.77.0.{}:0", at + 1).parse().unwrap();
        let runtime = tokio::runtime::Handle::current();
        // A thread of its own: it never comes back from there.
        let bound = std::thread::spawn(move || {
            // SAFETY: setns takes no pointers; it moves this thread alone, which ends below.
            let moved = unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
            let _guard = runtime.enter();
            Endpoint::bind(addr, identity, EndpointOptions::default()).unwrap()
        });
        bound.join().unwrap()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(args: &str) -> Result<(), String> {
    let done =
        Command::new("ip").args(args.split(' ')).output().map_err(|error| format!("ip {args}: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("ip {args}: {}", String::from_utf8_lossy(&done.stderr).trim()))
}

/// A host, where it is served, and the connections that came in.
type Server = (Arc<Host>, SocketAddr, Arc<Mutex<Vec<Connection>>>);

struct Across {
    namespaces: Namespaces,
    ca: ClusterCa,
    servers: Mutex<Vec<Server>>,
    callers: Mutex<Vec<(Arc<Host>, usize, Endpoint)>>,
}

impl Across {
    fn serve(&self, host: &Arc<Host>) -> SocketAddr {
        let mut servers = self.servers.lock();
        if let Some((_, addr, _)) = servers.iter().find(|(of, ..)| Arc::ptr_eq(of, host)) {
            return *addr;
        }
        let endpoint = self.namespaces.bind(0, self.ca.identity(Role::Mn, host.name()).unwrap());
        let (addr, connections) = (endpoint.local_addr(), Arc::<Mutex<Vec<Connection>>>::default());
        servers.push((Arc::clone(host), addr, Arc::clone(&connections)));
        let host = Arc::clone(host);
        tokio::spawn(async move {
            while let Some((connection, peer, _)) = endpoint.accept().await {
                connections.lock().push(connection.clone());
                tokio::spawn(serve(Arc::clone(&host), connection, peer));
            }
        });
        addr
    }
}

impl Backend for Across {
    type Session = QuicVerbs;

    async fn connect(&self, host: &Arc<Host>, client: &str) -> QuicVerbs {
        let addr = self.serve(host);
        let endpoint = self.namespaces.bind(1, self.ca.identity(Role::Cn, client).unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        let verbs =
            QuicVerbs::connect(&endpoint, addr, host.name(), host.incarnation(), deadline).await.unwrap();
        self.callers.lock().push((Arc::clone(host), verbs.connection().stable_id(), endpoint));
        verbs
    }

    async fn cut(&self, session: &QuicVerbs) {
        let id = session.connection().stable_id();
        let callers = self.callers.lock();
        // Ids are used again after a connection is gone: the newest is meant.
        let (host, _, endpoint) = callers.iter().rev().find(|(_, of, _)| *of == id).unwrap();
        let servers = self.servers.lock();
        let (.., connections) = servers.iter().find(|(of, ..)| Arc::ptr_eq(of, host)).unwrap();
        let connections = connections.lock();
        let theirs = connections.iter().find(|c| c.remote_address() == endpoint.local_addr()).unwrap();
        theirs.close(close::BUSY, b"cut");
    }

    fn in_flight(&self, session: &QuicVerbs) -> usize {
        let path = session.connection().stats().path;
        assert!(path.current_mtu <= UDP_PAYLOAD, "{path:?}");
        session.in_flight()
    }

    fn window(&self, bytes: usize) -> usize {
        window_calls(bytes)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verbs_conform_between_network_namespaces_of_mtu_1500() {
    let namespaces = match Namespaces::new() {
        Ok(namespaces) => namespaces,
        Err(why) => {
            println!("skipped: no network namespaces here ({why})");
            return;
        }
    };
    let ca = ClusterCa::ephemeral().unwrap();
    let across = Across { namespaces, ca, servers: Mutex::default(), callers: Mutex::default() };
    run_all(&across, |property| println!("{property}")).await;
    let mtus: Vec<u16> = across
        .servers
        .lock()
        .iter()
        .flat_map(|(_, _, connections)| {
            connections.lock().iter().map(|c| c.stats().path.current_mtu).collect::<Vec<_>>()
        })
        .collect();
    println!("largest datagrams, by connection: {mtus:?}");
    assert!(mtus.iter().all(|mtu| *mtu <= UDP_PAYLOAD), "{mtus:?}");
    assert!(mtus.iter().any(|mtu| *mtu > 1400), "path MTU discovery found nothing: {mtus:?}");
}
