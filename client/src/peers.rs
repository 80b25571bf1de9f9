//! The compute nodes that a client may ask, and which to ask next. No I/O; time is handed in.
//!
//! Calls go round-robin over the nodes that answer. A node that was lost or fell silent is asked last; from time to
//! time one call tries it again, so that a node that was merely slow comes back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use shine_common::ids::Incarnation;
use shine_common::wire::{ClusterMap, MemberState, Role};

/// First time that a failing node is left alone, in milliseconds; doubled at every further failure.
const AVOID_MS_MIN: u64 = 500;
/// Longest time that a failing node is left alone.
const AVOID_MS_MAX: u64 = 16_000;

/// One life of a compute node. All times are milliseconds on the client's own clock.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) addr: SocketAddr,
    incarnation: Incarnation,
    /// Whether the map says that its lease runs.
    up: bool,
    /// When it last answered anything.
    heard_ms: AtomicU64,
    /// Until when it is asked last; 0 while it answers.
    avoid_until_ms: AtomicU64,
    /// Failures since it last answered.
    failures: AtomicU32,
}

impl Peer {
    pub(crate) fn new(name: String, addr: SocketAddr, incarnation: Incarnation, up: bool) -> Self {
        Self {
            name,
            addr,
            incarnation,
            up,
            heard_ms: AtomicU64::new(0),
            avoid_until_ms: AtomicU64::new(0),
            failures: AtomicU32::new(0),
        }
    }

    /// The node answered, be it with a fault.
    pub(crate) fn answered(&self, now_ms: u64) {
        self.heard_ms.fetch_max(now_ms, Ordering::Relaxed);
        self.avoid_until_ms.store(0, Ordering::Relaxed);
        self.failures.store(0, Ordering::Relaxed);
    }

    /// The node was lost, could not be reached, or fell silent.
    pub(crate) fn failed(&self, now_ms: u64) {
        let before = self.failures.fetch_add(1, Ordering::Relaxed).min(16);
        let avoid = (AVOID_MS_MIN << before).min(AVOID_MS_MAX);
        self.avoid_until_ms.store(now_ms + avoid, Ordering::Relaxed);
    }

    /// Whether nothing came from the node since `since_ms`.
    pub(crate) fn silent_since(&self, since_ms: u64) -> bool {
        self.heard_ms.load(Ordering::Relaxed) < since_ms
    }

    /// Whether to ask it in turn.
    fn is_eligible(&self) -> bool {
        self.up && self.avoid_until_ms.load(Ordering::Relaxed) == 0
    }

    /// Whether its time of being left alone has ended. Says so to one caller only: that call is the trial.
    fn is_due_for_trial(&self, now_ms: u64) -> bool {
        let until = self.avoid_until_ms.load(Ordering::Relaxed);
        let next = now_ms + AVOID_MS_MIN;
        (1..=now_ms).contains(&until)
            && self.avoid_until_ms.compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.name.is_empty() {
            write!(f, "{}", self.addr)
        } else {
            write!(f, "{} ({})", self.name, self.addr)
        }
    }
}

/// The present compute nodes.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    all: ArcSwap<Vec<Arc<Peer>>>,
    turn: AtomicUsize,
}

impl Peers {
    /// A fixed set.
    pub(crate) fn of(peers: Vec<Peer>) -> Self {
        Self {
            all: ArcSwap::from_pointee(peers.into_iter().map(Arc::new).collect()),
            turn: AtomicUsize::new(0),
        }
    }

    /// Takes the compute nodes of `map`. A node whose life goes on keeps what is known of it.
    pub(crate) fn update(&self, map: &ClusterMap) {
        let old = self.all.load();
        let mut all = Vec::new();
        for member in map.members.iter().filter(|m| m.role == Role::Cn) {
            let Ok(addr) = member.addr.parse() else {
                tracing::warn!(name = member.name, addr = member.addr, "compute node has no usable address");
                continue;
            };
            let up = member.state == MemberState::Up;
            let known = old.iter().find(|p| {
                p.name == member.name && p.addr == addr && p.incarnation == member.incarnation && p.up == up
            });
            all.push(match known {
                Some(peer) => Arc::clone(peer),
                None => Arc::new(Peer::new(member.name.clone(), addr, member.incarnation, up)),
            });
        }
        self.all.store(Arc::new(all));
    }

    /// Every node once, in the order in which one call shall ask them.
    pub(crate) fn order(&self, now_ms: u64) -> Vec<Arc<Peer>> {
        let all = self.all.load();
        if all.is_empty() {
            return Vec::new();
        }
        let start = self.turn.fetch_add(1, Ordering::Relaxed) % all.len();
        let turn = all[start..].iter().chain(&all[..start]);
        let (eligible, mut avoided): (Vec<_>, Vec<_>) = turn.cloned().partition(|peer| peer.is_eligible());
        // A node on trial goes first, or it would never be asked while the others answer.
        let mut order = Vec::with_capacity(all.len());
        if let Some(at) = avoided.iter().position(|peer| peer.is_due_for_trial(now_ms)) {
            order.push(avoided.remove(at));
        }
        order.extend(eligible);
        order.extend(avoided);
        order
    }

    /// All nodes, by name.
    pub(crate) fn all(&self) -> Arc<Vec<Arc<Peer>>> {
        self.all.load_full()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shine_common::ids::Epoch;
    use shine_common::wire::Member;

    fn member(name: &str, port: u16, life: u64, state: MemberState) -> Member {
        Member {
            name: name.into(),
            role: Role::Cn,
            addr: format!("127.0.0.1:{port}"),
            incarnation: Incarnation(life),
            state,
        }
    }

    fn map(members: Vec<Member>) -> ClusterMap {
        ClusterMap { epoch: Epoch(1), members, ..ClusterMap::default() }
    }

    fn names(peers: &Peers, now_ms: u64) -> Vec<String> {
        peers.order(now_ms).iter().map(|p| p.name.clone()).collect()
    }

    fn three() -> Peers {
        let peers = Peers::default();
        peers.update(&map(["a", "b", "c"].iter().map(|n| member(n, 1, 1, MemberState::Up)).collect()));
        peers
    }

    #[test]
    fn calls_go_round() {
        let peers = three();
        let firsts: Vec<_> = (0..6).map(|_| names(&peers, 0)[0].clone()).collect();
        assert_eq!(firsts, ["a", "b", "c", "a", "b", "c"]);
        assert!(Peers::default().order(0).is_empty());
    }

    #[test]
    fn a_failing_node_is_asked_last_and_tried_again_by_one_call_at_a_time() {
        let peers = three();
        peers.all()[0].failed(100);
        for now in [100, 300, 599] {
            assert_eq!(names(&peers, now)[2], "a", "at {now}");
        }
        let tries = (0..6).filter(|_| names(&peers, 600)[0] == "a").count();
        assert_eq!(tries, 1, "one call tries it");
        peers.all()[0].failed(700);
        assert_eq!(names(&peers, 1_650)[2], "a", "and waits longer after the second failure");
        peers.all()[0].answered(1_700);
        let firsts = (0..3).filter(|_| names(&peers, 1_700)[0] == "a").count();
        assert_eq!(firsts, 1);
    }

    #[test]
    fn a_node_that_is_down_is_asked_last() {
        let peers = Peers::default();
        peers.update(&map(vec![member("a", 1, 1, MemberState::Down), member("b", 2, 1, MemberState::Up)]));
        for _ in 0..4 {
            assert_eq!(names(&peers, 0), ["b", "a"]);
        }
    }

    #[test]
    fn what_is_known_of_a_node_ends_with_its_life() {
        let peers = three();
        peers.all()[1].failed(0);
        peers.update(&map(vec![member("b", 1, 1, MemberState::Up), member("c", 1, 1, MemberState::Up)]));
        assert_eq!(names(&peers, 1), ["c", "b"]);
        peers.update(&map(vec![member("b", 1, 2, MemberState::Up), member("c", 1, 1, MemberState::Up)]));
        let firsts: Vec<_> = (0..2).map(|_| names(&peers, 1)[0].clone()).collect();
        assert!(firsts.contains(&"b".to_owned()));
    }

    #[test]
    fn silence_is_counted_from_the_question() {
        let peers = three();
        let peer = &peers.all()[0];
        assert!(peer.silent_since(10));
        peer.answered(20);
        assert!(!peer.silent_since(10));
        assert!(peer.silent_since(21));
    }
}
