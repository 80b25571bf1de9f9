//! The search of HNSW (Alg. 2 and 5 of the paper; Alg. 1's descent for inserts) as a machine without I/O.
//!
//! The machine says what it wants and is fed; whoever drives it decides where lists and vectors come from:
//!
//! ```text
//! reset ─ step ─▶ Vectors (the entry point) ─ feed_distance ─ step ─┐
//!        ┌──────────────────────────────────────────────────────────┘
//!        ├─▶ Lists       feed_list for each of `wanted_lists`, in order, then step
//!        ├─▶ Vectors     feed_distance for each of `wanted_vectors`, in any order, then step
//!        ├─▶ LevelDone   on levels up to the dense one: `results` are the level's, then step
//!        └─▶ Done        `results` are the answer
//! ```
//!
//! Levels above the dense one are walked greedily (ef = 1), the others with `ef`; each level starts from all results
//! of the one above.
//!
//! Invariant (strict order): candidates are ordered by (distance, [`NodeId`]) and a round is absorbed in list order
//! once all of it is there, so the results depend on the graph and the query alone, never on arrival order.
//!
//! The textbook's two heaps are one sorted pool here: a candidate that fell out of the nearest `ef` is farther than
//! all of them, so the textbook stops before it would expand it; the next to expand is the nearest of the pool that
//! was not expanded yet, and the level ends when there is none.

use std::cmp::Ordering;

use shine_common::ids::NodeId;
use shine_common::layout::EntryPoint;

use super::visited::Visited;

/// How much wider a beam is that follows one without enough live records.
pub(crate) const BEAM_GROWTH: usize = 4;

/// A node at a distance from the query. Ordered by (distance, node).
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Order-preserving bits of the distance << 32 | node.
    key: u64,
    upper: u32,
    expanded: bool,
}

/// Key of a vector that could not be had. No node has it: node numbers stay below u32::MAX.
const MISSING: u64 = u64::MAX;

/// Zeroes compare equal and NaN is farther than everything, whatever its sign.
#[inline]
fn key_of(distance: f32, node: NodeId) -> u64 {
    let order = if distance.is_nan() {
        u32::MAX
    } else {
        let bits = (distance + 0.0).to_bits();
        if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
    };
    u64::from(order) << 32 | u64::from(node.0)
}

impl Candidate {
    /// `node` at `distance`; `upper` is the index of its level-1 list, 0 where that does not matter.
    #[inline]
    pub fn new(distance: f32, node: NodeId, upper: u32) -> Self {
        Self { key: key_of(distance, node), upper, expanded: false }
    }

    /// The distance; NaN where it was one.
    #[inline]
    pub fn distance(&self) -> f32 {
        let order = (self.key >> 32) as u32;
        f32::from_bits(if order >> 31 == 1 { order & !(1 << 31) } else { !order })
    }

    /// The node.
    #[inline]
    pub fn node(&self) -> NodeId {
        NodeId(self.key as u32)
    }

    /// Index of the node's level-1 list, if it was found above level 0.
    #[inline]
    pub fn upper(&self) -> u32 {
        self.upper
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}
impl Eq for Candidate {}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key.cmp(&other.key)
    }
}

/// A neighbour list that the machine wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListRef {
    /// Whose list.
    pub node: NodeId,
    /// On which level.
    pub level: u8,
    /// Index of the node's level-1 list: the wanted one is at `upper + level − 1`. Without meaning on level 0.
    pub upper: u32,
}

/// What the machine needs next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The lists in [`Search::wanted_lists`].
    Lists,
    /// The distances of [`Search::wanted_vectors`].
    Vectors,
    /// Nothing: this level, the dense one or below, is finished, and [`Search::results`] are its own.
    LevelDone(u8),
    /// Nothing: the search is finished.
    Done,
}

/// Work done since [`Search::reset`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SearchStats {
    /// Expansions, on any level.
    pub hops: u32,
    /// Distances fed.
    pub distances: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Start,
    AwaitLists,
    AwaitVectors,
    LevelDone,
    Done,
}

/// A search, to be used again and again: [`Self::reset`] keeps the buffers, and nothing allocates once they are as
/// large as the queries need.
#[derive(Debug)]
pub struct Search<V> {
    visited: V,
    entry: ListRef,
    ef: usize,
    dense_level: u8,
    level: u8,
    phase: Phase,
    /// The nearest found on this level, sorted; at most `ef`, or 1 above the dense level.
    pool: Vec<Candidate>,
    /// Everything before it in the pool is expanded.
    cursor: usize,
    wanted_lists: Vec<ListRef>,
    lists_fed: usize,
    wanted_vectors: Vec<NodeId>,
    wanted_uppers: Vec<u32>,
    /// One per wanted vector, in the same order.
    keys: Vec<u64>,
    vectors_fed: usize,
    stats: SearchStats,
}

impl<V: Visited> Search<V> {
    /// A machine at rest: [`Self::step`] says [`Step::Done`] until the first [`Self::reset`].
    pub fn new(visited: V) -> Self {
        Self {
            visited,
            entry: ListRef { node: NodeId(0), level: 0, upper: 0 },
            ef: 1,
            dense_level: 0,
            level: 0,
            phase: Phase::Done,
            pool: Vec::new(),
            cursor: 0,
            wanted_lists: Vec::new(),
            lists_fed: 0,
            wanted_vectors: Vec::new(),
            wanted_uppers: Vec::new(),
            keys: Vec::new(),
            vectors_fed: 0,
            stats: SearchStats::default(),
        }
    }

    /// Begins a search from `entry`, whose level-1 list has index `entry_upper` (0 if its level is 0), with `ef` on
    /// `dense_level` and below: 0 for a query, the new node's level for an insert.
    ///
    /// # Panics
    /// If `ef` is zero; every way in checks that first.
    pub fn reset(&mut self, entry: EntryPoint, entry_upper: u32, ef: usize, dense_level: u8) {
        assert!(ef > 0, "ef is at least 1");
        self.entry = ListRef { node: entry.node, level: entry.level, upper: entry_upper };
        self.ef = ef;
        self.dense_level = dense_level;
        self.level = entry.level;
        self.phase = Phase::Start;
        self.pool.clear();
        self.cursor = 0;
        self.wanted_lists.clear();
        self.lists_fed = 0;
        self.clear_wanted_vectors();
        self.visited.reset();
        self.visited.insert(entry.node);
        self.stats = SearchStats::default();
    }

    /// Goes on as far as what was fed allows.
    ///
    /// # Panics
    /// If something wanted was not fed.
    pub fn step(&mut self) -> Step {
        match self.phase {
            Phase::Start => {
                self.want(self.entry.node, self.entry.upper);
                self.phase = Phase::AwaitVectors;
                return Step::Vectors;
            }
            Phase::AwaitLists => {
                assert_eq!(
                    self.lists_fed,
                    self.wanted_lists.len(),
                    "every wanted list is fed before the next step"
                );
                self.wanted_lists.clear();
                if !self.wanted_vectors.is_empty() {
                    self.phase = Phase::AwaitVectors;
                    return Step::Vectors;
                }
            }
            Phase::AwaitVectors => {
                assert_eq!(
                    self.vectors_fed,
                    self.keys.len(),
                    "every wanted vector is fed before the next step"
                );
                self.absorb();
            }
            Phase::LevelDone => {
                if self.level == 0 {
                    self.phase = Phase::Done;
                    return Step::Done;
                }
                self.descend();
            }
            Phase::Done => return Step::Done,
        }
        self.advance()
    }

    /// The lists wanted by [`Step::Lists`].
    #[inline]
    pub fn wanted_lists(&self) -> &[ListRef] {
        &self.wanted_lists
    }

    /// The vectors wanted by [`Step::Vectors`]. Each at most once a level.
    #[inline]
    pub fn wanted_vectors(&self) -> &[NodeId] {
        &self.wanted_vectors
    }

    /// Feeds the `at`-th wanted list: (node, upper index) of each entry, the index without meaning on level 0.
    /// A list that cannot be had is fed empty. The driver answers for nodes being in range.
    ///
    /// # Panics
    /// If lists are not fed in the order of [`Self::wanted_lists`], each once.
    #[inline]
    pub fn feed_list<I>(&mut self, at: usize, entries: I)
    where
        I: IntoIterator<Item = (NodeId, u32), IntoIter: ExactSizeIterator>,
    {
        assert!(
            self.phase == Phase::AwaitLists && at == self.lists_fed && at < self.wanted_lists.len(),
            "lists are fed in order, each once"
        );
        self.lists_fed += 1;
        // Without a branch on what was met before: that is a coin toss, and a wrong guess costs half a distance.
        let entries = entries.into_iter();
        let mut end = self.wanted_vectors.len();
        let room = end + entries.len();
        self.wanted_vectors.resize(room, NodeId(0));
        self.wanted_uppers.resize(room, 0);
        for (node, upper) in entries {
            (self.wanted_vectors[end], self.wanted_uppers[end]) = (node, upper);
            end += usize::from(self.visited.insert(node));
        }
        self.wanted_vectors.truncate(end);
        self.wanted_uppers.truncate(end);
        self.keys.resize(end, MISSING);
    }

    /// Feeds the distance of the `at`-th wanted vector. NaN is farther than everything.
    #[inline]
    pub fn feed_distance(&mut self, at: usize, distance: f32) {
        self.keys[at] = key_of(distance, self.wanted_vectors[at]);
        self.vectors_fed += 1;
        self.stats.distances += 1;
    }

    /// Feeds all wanted vectors, for who has them at hand: `distance` is asked for each in order, with all of them and
    /// its place, so that it can look ahead.
    #[inline]
    pub fn feed_distances(&mut self, mut distance: impl FnMut(&[NodeId], usize) -> f32) {
        for at in 0..self.keys.len() {
            self.keys[at] = key_of(distance(&self.wanted_vectors, at), self.wanted_vectors[at]);
        }
        self.vectors_fed = self.keys.len();
        self.stats.distances += self.keys.len() as u32;
    }

    /// Says that the `at`-th wanted vector cannot be had: the node is passed over.
    pub fn feed_missing(&mut self, at: usize) {
        self.keys[at] = MISSING;
        self.vectors_fed += 1;
    }

    /// The nearest found on the current level, nearest first; the answer after [`Step::Done`]. May be fewer than
    /// `ef`, and none if the entry point was missing.
    #[inline]
    pub fn results(&self) -> &[Candidate] {
        &self.pool
    }

    /// The list that would be wanted next if nothing nearer turned up: a hint for prefetching.
    #[inline]
    pub fn likely_next(&self) -> Option<ListRef> {
        let next = self.pool[self.cursor..].iter().find(|candidate| !candidate.expanded)?;
        Some(ListRef { node: next.node(), level: self.level, upper: next.upper })
    }

    /// Work done since the last reset.
    pub fn stats(&self) -> SearchStats {
        self.stats
    }

    #[inline]
    fn want(&mut self, node: NodeId, upper: u32) {
        self.wanted_vectors.push(node);
        self.wanted_uppers.push(upper);
        self.keys.push(MISSING);
    }

    fn clear_wanted_vectors(&mut self) {
        self.wanted_vectors.clear();
        self.wanted_uppers.clear();
        self.keys.clear();
        self.vectors_fed = 0;
    }

    fn limit(&self) -> usize {
        if self.level > self.dense_level { 1 } else { self.ef }
    }

    fn absorb(&mut self) {
        let limit = self.limit();
        for (key, upper) in self.keys.iter().zip(&self.wanted_uppers) {
            if *key == MISSING {
                continue;
            }
            if self.pool.len() == limit {
                if *key > self.pool[limit - 1].key {
                    continue;
                }
                self.pool.pop();
            }
            let at = self.pool.partition_point(|candidate| candidate.key < *key);
            self.pool.insert(at, Candidate { key: *key, upper: *upper, expanded: false });
            self.cursor = self.cursor.min(at);
        }
        self.clear_wanted_vectors();
    }

    /// Expands the nearest candidate that was not, or finishes the level (and greedy levels below it).
    fn advance(&mut self) -> Step {
        loop {
            while self.pool.get(self.cursor).is_some_and(|candidate| candidate.expanded) {
                self.cursor += 1;
            }
            if let Some(next) = self.pool.get_mut(self.cursor) {
                next.expanded = true;
                self.cursor += 1;
                self.stats.hops += 1;
                self.wanted_lists.push(ListRef { node: next.node(), level: self.level, upper: next.upper });
                self.lists_fed = 0;
                self.phase = Phase::AwaitLists;
                return Step::Lists;
            }
            if self.level <= self.dense_level {
                self.phase = Phase::LevelDone;
                return Step::LevelDone(self.level);
            }
            self.descend();
        }
    }

    /// Starts the level below from the results of this one.
    fn descend(&mut self) {
        self.level -= 1;
        self.cursor = 0;
        self.visited.reset();
        for candidate in &mut self.pool {
            candidate.expanded = false;
            self.visited.insert(candidate.node());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::super::visited::{DenseVisited, SparseVisited};
    use super::*;

    /// Any directed graph: not what a builder makes, but what a search may meet. `lists[level]` has the nodes of that
    /// level.
    #[derive(Debug, Clone)]
    struct Graph {
        lists: Vec<BTreeMap<u32, Vec<u32>>>,
        /// Distance from the query; `None` where the vector cannot be had.
        distances: Vec<Option<f32>>,
        entry: u32,
    }

    impl Graph {
        fn entry_point(&self) -> EntryPoint {
            EntryPoint { node: NodeId(self.entry), level: (self.lists.len() - 1) as u8 }
        }
    }

    /// SEARCH-LAYER as printed in the paper (Alg. 2), its sets searched one by one.
    fn search_layer(
        graph: &Graph,
        entries: &[u32],
        ef: usize,
        level: usize,
        hops: &mut u32,
        asked: &mut u32,
    ) -> Vec<u32> {
        let key = |node: &u32| (graph.distances[*node as usize].unwrap(), *node);
        let nearest = |set: &HashSet<u32>| {
            set.iter().copied().min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap()).unwrap()
        };
        let furthest = |set: &HashSet<u32>| {
            set.iter().copied().max_by(|a, b| key(a).partial_cmp(&key(b)).unwrap()).unwrap()
        };
        let mut visited: HashSet<u32> = entries.iter().copied().collect();
        let mut candidates = visited.clone();
        let mut found = visited.clone();
        while !candidates.is_empty() {
            let c = nearest(&candidates);
            candidates.remove(&c);
            if key(&c) > key(&furthest(&found)) {
                break;
            }
            *hops += 1;
            for e in graph.lists[level].get(&c).into_iter().flatten().copied() {
                if !visited.insert(e) {
                    continue;
                }
                if graph.distances[e as usize].is_none() {
                    continue;
                }
                *asked += 1;
                if found.len() < ef || key(&e) < key(&furthest(&found)) {
                    candidates.insert(e);
                    found.insert(e);
                    if found.len() > ef {
                        let f = furthest(&found);
                        found.remove(&f);
                    }
                }
            }
        }
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort_by(|a, b| key(a).partial_cmp(&key(b)).unwrap());
        found
    }

    /// Results of every dense level, top first, and the work.
    type Trace = (Vec<(u8, Vec<u32>)>, SearchStats);

    fn textbook(graph: &Graph, ef: usize, dense_level: u8) -> Trace {
        let mut stats = SearchStats::default();
        let mut levels = Vec::new();
        let mut entries = Vec::new();
        if graph.distances[graph.entry as usize].is_some() {
            entries.push(graph.entry);
            stats.distances = 1;
        }
        for level in (0..graph.lists.len()).rev() {
            let dense = level <= usize::from(dense_level);
            let ef = if dense { ef } else { 1 };
            entries = search_layer(graph, &entries, ef, level, &mut stats.hops, &mut stats.distances);
            if dense {
                levels.push((level as u8, entries.clone()));
            }
        }
        (levels, stats)
    }

    /// An upper index that can be told: the machine must hand back the one it was fed.
    fn upper_of(node: u32) -> u32 {
        node * 3 + 1
    }

    fn drive<V: Visited>(search: &mut Search<V>, graph: &Graph, ef: usize, dense_level: u8) -> Trace {
        search.reset(graph.entry_point(), upper_of(graph.entry), ef, dense_level);
        let mut levels = Vec::new();
        let nodes = |search: &Search<V>| search.results().iter().map(|c| c.node().0).collect::<Vec<_>>();
        loop {
            match search.step() {
                Step::Lists => {
                    assert!(!search.wanted_lists().is_empty());
                    for at in 0..search.wanted_lists().len() {
                        let want = search.wanted_lists()[at];
                        assert!(want.level == 0 || want.upper == upper_of(want.node.0), "{want:?}");
                        let list = graph.lists[usize::from(want.level)].get(&want.node.0);
                        let list = list.map_or(&[][..], Vec::as_slice);
                        search.feed_list(at, list.iter().map(|n| (NodeId(*n), upper_of(*n))));
                    }
                }
                Step::Vectors => {
                    assert!(!search.wanted_vectors().is_empty());
                    // Backwards: the order of arrival must not matter.
                    for at in (0..search.wanted_vectors().len()).rev() {
                        match graph.distances[search.wanted_vectors()[at].0 as usize] {
                            Some(distance) => search.feed_distance(at, distance),
                            None => search.feed_missing(at),
                        }
                    }
                }
                Step::LevelDone(level) => levels.push((level, nodes(search))),
                Step::Done => {
                    assert_eq!(levels.last(), Some(&(0, nodes(search))), "the answer is level 0's");
                    assert_eq!(search.step(), Step::Done, "done stays done");
                    return (levels, search.stats());
                }
            }
        }
    }

    /// Few nodes and few distances: ties, duplicates, self-links, cycles and dead ends are everywhere. Upper lists
    /// may be those of nodes that are not on the level (a stale index).
    fn graphs() -> impl Strategy<Value = Graph> {
        (1u32..30, 1usize..4).prop_flat_map(|(nodes, levels)| {
            let lists = prop::collection::btree_map(
                0..nodes,
                prop::collection::vec(0..nodes, 0..8),
                0..nodes as usize + 1,
            );
            let distance = prop_oneof![
                12 => (0u8..8).prop_map(|d| Some(f32::from(d) - 4.0)),
                1 => Just(None)
            ];
            (prop::collection::vec(lists, levels), prop::collection::vec(distance, nodes as usize), 0..nodes)
                .prop_map(|(lists, distances, entry)| Graph { lists, distances, entry })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn equals_the_textbook(graph in graphs(), ef in 1usize..40, dense_level in 0u8..4) {
            let expected = textbook(&graph, ef, dense_level);
            let mut search = Search::new(SparseVisited::new());
            prop_assert_eq!(&drive(&mut search, &graph, ef, dense_level), &expected);
            prop_assert_eq!(&drive(&mut search, &graph, ef, dense_level), &expected, "a reset forgets everything");
            let mut dense = Search::new(DenseVisited::new(graph.distances.len()));
            prop_assert_eq!(&drive(&mut dense, &graph, ef, dense_level), &expected);
        }

        #[test]
        fn candidates_are_ordered_by_distance_then_node(a in any::<f32>(), b in any::<f32>(), m in any::<u32>(), n in any::<u32>()) {
            let (x, y) = (Candidate::new(a, NodeId(m), 0), Candidate::new(b, NodeId(n), 0));
            prop_assert_eq!(x.node(), NodeId(m));
            prop_assert!(x.distance() == a || a.is_nan() && x.distance().is_nan());
            prop_assert_eq!(x.cmp(&y), a.partial_cmp(&b).unwrap().then(m.cmp(&n)));
        }
    }

    #[test]
    fn odd_distances_have_a_place() {
        let order = |d: f32| Candidate::new(d, NodeId(5), 0);
        assert_eq!(order(0.0), order(-0.0));
        assert!(order(f32::NEG_INFINITY) < order(f32::MIN) && order(f32::MAX) < order(f32::INFINITY));
        assert!(order(f32::NAN) > order(f32::INFINITY) && order(-f32::NAN) > order(f32::INFINITY));
        assert!(order(f32::NAN).distance().is_nan());
    }

    #[test]
    fn nan_neither_stops_a_search_nor_wins_it() {
        let lists = vec![BTreeMap::from([(0, vec![1, 2]), (1, vec![3])])];
        let distances = vec![Some(9.0), Some(f32::NAN), Some(2.0), Some(1.0)];
        let graph = Graph { lists, distances, entry: 0 };
        let (levels, _) = drive(&mut Search::new(SparseVisited::new()), &graph, 4, 0);
        assert_eq!(levels, [(0, vec![3, 2, 0, 1])]);
    }

    #[test]
    fn one_node_is_its_own_answer() {
        let graph = Graph { lists: vec![BTreeMap::new()], distances: vec![Some(1.0)], entry: 0 };
        let (levels, stats) = drive(&mut Search::new(DenseVisited::new(1)), &graph, 10, 0);
        assert_eq!((levels, stats), (vec![(0, vec![0])], SearchStats { hops: 1, distances: 1 }));
    }

    #[test]
    fn a_hint_names_the_next_list() {
        let graph = Graph {
            lists: vec![BTreeMap::from([(0, vec![1, 2])])],
            distances: vec![Some(5.0), Some(4.0), Some(3.0)],
            entry: 0,
        };
        let mut search = Search::new(SparseVisited::new());
        search.reset(graph.entry_point(), 0, 3, 0);
        assert_eq!((search.step(), search.likely_next()), (Step::Vectors, None));
        search.feed_distance(0, 5.0);
        assert_eq!(search.step(), Step::Lists);
        search.feed_list(0, [(NodeId(1), 0), (NodeId(2), 0)]);
        assert_eq!((search.step(), search.likely_next()), (Step::Vectors, None));
        search.feed_distance(0, 4.0);
        search.feed_distance(1, 3.0);
        assert_eq!(search.step(), Step::Lists);
        assert_eq!(search.wanted_lists(), [ListRef { node: NodeId(2), level: 0, upper: 0 }]);
        assert_eq!(search.likely_next().map(|l| l.node), Some(NodeId(1)));
    }

    #[test]
    #[should_panic(expected = "every wanted vector is fed")]
    fn a_forgotten_vector_is_a_driver_bug() {
        let mut search = Search::new(SparseVisited::new());
        search.reset(EntryPoint { node: NodeId(0), level: 0 }, 0, 1, 0);
        search.step();
        search.step();
    }
}
