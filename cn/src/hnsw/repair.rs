//! Makes level 0 of a built graph one piece: every node is reached from the entry point, and reaches it.
//!
//! Building drops links: a node all of whose neighbours found nearer ones ends without a link to it, and a bunch of
//! near copies may keep links among itself alone. A search that starts beside such a node never finds it; one that
//! starts inside such a bunch never leaves it.

use super::graph::{Graph, List, View};
use super::local::drive;
use super::search::Search;
use super::visited::DenseVisited;

/// Rounds at most. The second repairs what a replaced link of the first broke; a third was never seen to be needed.
const ROUNDS_MAX: u32 = 8;

/// What was found and done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Repaired {
    /// Nodes that the entry point did not reach.
    pub(super) orphans: u32,
    /// Nodes that did not reach the entry point.
    pub(super) dead_ends: u32,
    /// Nodes that the entry point still does not reach after the last round.
    pub(super) unreached: u32,
}

impl Repaired {
    /// Writes it down in the graph that was repaired.
    pub(super) fn record(self, graph: &mut Graph) {
        if self.unreached > 0 {
            tracing::warn!(nodes = self.unreached, "some nodes are not reached from the entry point");
        }
        graph.build.orphans_linked = self.orphans;
        graph.unreached = self.unreached;
    }
}

/// Links what is apart; `ef` is the beam of the searches for near nodes. One thread; costs two walks over all links,
/// and a search per node that is linked.
pub(super) fn repair(view: &View<'_>, ef: usize) -> Repaired {
    let mut repaired = Repaired::default();
    let mut finder = Finder { view, ef, search: Search::new(DenseVisited::new(view.graph.rows())) };
    for round in 0..ROUNDS_MAX {
        let orphans = link_orphans(view, &mut finder);
        let dead_ends = link_dead_ends(view, &mut finder);
        if round == 0 {
            (repaired.orphans, repaired.dead_ends) = (orphans, dead_ends);
        }
        if orphans + dead_ends == 0 {
            return repaired;
        }
    }
    repaired.unreached = reached(view.graph).iter().filter(|is_reached| !**is_reached).count() as u32;
    repaired
}

/// Finds near nodes.
struct Finder<'a> {
    view: &'a View<'a>,
    ef: usize,
    search: Search<DenseVisited>,
}

impl Finder<'_> {
    /// A node near `row` that is `joined`: the nearest one `with_room` if there is one, else the nearest. The entry
    /// point if the search meets none.
    fn find(&mut self, row: u32, joined: &[bool], with_room: impl Fn(u32) -> bool) -> u32 {
        let Self { view, ef, search } = self;
        let (mut source, distance) = (**view, view.distance);
        let graph = view.graph;
        search.reset(graph.entry, graph.uppers[graph.entry.node.0 as usize], *ef, 0);
        let query = view.vectors.row(row as usize);
        let Ok(()) = drive(&mut source, distance, search, query, |_, _| {});
        let near = || search.results().iter().map(|c| c.node().0).filter(|node| joined[*node as usize]);
        near().find(|node| with_room(*node)).or_else(|| near().next()).unwrap_or(graph.entry.node.0)
    }
}

fn has_room(list: List<'_>) -> bool {
    list.len() < list.capacity()
}

/// Place of the farthest neighbour in a list that is not empty.
fn farthest(view: &View<'_>, node: u32, list: List<'_>) -> usize {
    let distance = |at: &usize| view.distance(node, list.at(*at));
    (0..list.len()).max_by(|a, b| distance(a).total_cmp(&distance(b))).expect("a full list has entries")
}

/// Marks all that `from` leads to.
fn flood<'a, I: Iterator<Item = u32> + 'a>(from: u32, marked: &mut [bool], next: impl Fn(u32) -> I) {
    let mut open = vec![from];
    marked[from as usize] = true;
    while let Some(node) = open.pop() {
        for neighbour in next(node) {
            if !marked[neighbour as usize] {
                marked[neighbour as usize] = true;
                open.push(neighbour);
            }
        }
    }
}

/// Which nodes the entry point leads to on level 0.
fn reached(graph: &Graph) -> Vec<bool> {
    let mut reached = vec![false; graph.rows()];
    flood(graph.entry.node.0, &mut reached, |node| graph.base.get(node as usize).iter());
    reached
}

/// Gives every node that the entry point does not reach a link from a near one that it does reach. Returns how many
/// such nodes there were.
fn link_orphans(view: &View<'_>, finder: &mut Finder<'_>) -> u32 {
    let graph = view.graph;
    let base = |node: u32| graph.base.get(node as usize);
    let mut reached = reached(graph);
    let orphans: Vec<_> = (0..graph.rows() as u32).filter(|row| !reached[*row as usize]).collect();
    for orphan in &orphans {
        if reached[*orphan as usize] {
            continue; // by another that was linked meanwhile
        }
        let from = finder.find(*orphan, &reached, |node| has_room(base(node)));
        if has_room(base(from)) {
            base(from).push(*orphan);
        } else {
            // The orphan steps between: from → far becomes from → orphan → far, so that nothing gets lost. Whatever the
            // orphan gives up for it was not reached through the orphan.
            let at = farthest(view, from, base(from));
            let far = base(from).at(at);
            base(from).set(at, *orphan);
            let own = base(*orphan);
            if !own.iter().any(|node| node == far) {
                if has_room(own) {
                    own.push(far);
                } else {
                    own.set(farthest(view, *orphan, own), far);
                }
            }
        }
        flood(*orphan, &mut reached, |node| base(node).iter());
    }
    orphans.len() as u32
}

/// Gives every node that does not reach the entry point a link to a near one that does, or that of a node that it
/// reaches. Returns how many such nodes there were.
fn link_dead_ends(view: &View<'_>, finder: &mut Finder<'_>) -> u32 {
    let graph = view.graph;
    let base = |node: u32| graph.base.get(node as usize);
    let rows = graph.rows();
    // Links turned round: those to `node` come from `sources[starts[node]..starts[node + 1]]`.
    let mut starts = vec![0u32; rows + 1];
    for row in 0..rows {
        for to in graph.base.get(row).iter() {
            starts[to as usize + 1] += 1;
        }
    }
    for row in 0..rows {
        starts[row + 1] += starts[row];
    }
    let mut sources = vec![0u32; starts[rows] as usize];
    let mut next = starts.clone();
    for row in 0..rows {
        for to in graph.base.get(row).iter() {
            sources[next[to as usize] as usize] = row as u32;
            next[to as usize] += 1;
        }
    }
    let into = |node: u32| {
        sources[starts[node as usize] as usize..starts[node as usize + 1] as usize].iter().copied()
    };
    let mut joined = vec![false; rows];
    flood(graph.entry.node.0, &mut joined, into);
    let dead_ends: Vec<_> = (0..rows as u32).filter(|row| !joined[*row as usize]).collect();
    // A node with room loses nothing by a link; usually one of a bunch has room, and all others reach it.
    for may_replace in [false, true] {
        for dead_end in &dead_ends {
            let own = base(*dead_end);
            if joined[*dead_end as usize] || !(may_replace || has_room(own)) {
                continue;
            }
            let to = finder.find(*dead_end, &joined, |_| true);
            if has_room(own) {
                own.push(to);
            } else {
                own.set(farthest(view, *dead_end, own), to);
            }
            flood(*dead_end, &mut joined, into);
        }
    }
    dead_ends.len() as u32
}
