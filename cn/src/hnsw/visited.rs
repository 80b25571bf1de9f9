//! Which nodes a search has seen: a tag per node where the number of nodes is known and small enough, a hash set
//! where it is not. Both forget everything in O(1).
//!
//! Invariant: a node is in the set iff its tag equals the current epoch; epochs that wrap wipe the tags.

use shine_common::ids::NodeId;

/// A set of nodes that is emptied often.
pub trait Visited {
    /// Empties the set.
    fn reset(&mut self);
    /// Adds `node`; whether it was new.
    fn insert(&mut self, node: NodeId) -> bool;
}

/// One tag per node: for a graph in local memory.
#[derive(Debug, Clone)]
pub struct DenseVisited {
    tags: Box<[u16]>,
    epoch: u16,
}

impl DenseVisited {
    /// Set over nodes `0..nodes`.
    pub fn new(nodes: usize) -> Self {
        Self { tags: vec![0; nodes].into_boxed_slice(), epoch: 1 }
    }
}

impl Visited for DenseVisited {
    #[inline]
    fn reset(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            self.tags.fill(0);
            self.epoch = 1;
        }
    }

    /// A node outside the graph counts as seen, so that nobody asks for it.
    #[inline]
    fn insert(&mut self, node: NodeId) -> bool {
        match self.tags.get_mut(node.0 as usize) {
            // Stored also where it is there already: who asks has no branch to guess.
            Some(tag) => std::mem::replace(tag, self.epoch) != self.epoch,
            None => false,
        }
    }
}

/// Slots of a new [`SparseVisited`]: what a search of ef 100 needs at m 16.
const SPARSE_SLOTS: usize = 4096;

/// An open-addressing set that grows with what a search really visits: for a graph of any size, far away.
#[derive(Debug, Clone)]
pub struct SparseVisited {
    /// `epoch << 32 | node`; a slot of another epoch is free. The length is a power of two.
    slots: Box<[u64]>,
    epoch: u32,
    len: usize,
}

impl SparseVisited {
    /// An empty set.
    pub fn new() -> Self {
        Self::with_slots(SPARSE_SLOTS)
    }

    fn with_slots(slots: usize) -> Self {
        Self { slots: vec![0; slots].into_boxed_slice(), epoch: 1, len: 0 }
    }

    /// The slot that holds `node`, or the free one where it belongs.
    #[inline]
    fn probe(slots: &[u64], epoch: u32, node: u32) -> usize {
        let mask = slots.len() - 1;
        let mut at = (u64::from(node).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & mask;
        loop {
            let slot = slots[at];
            if (slot >> 32) as u32 != epoch || slot as u32 == node {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    #[cold]
    fn grow(&mut self) {
        let mut larger = vec![0; 2 * self.slots.len()].into_boxed_slice();
        for slot in self.slots.iter().filter(|slot| (**slot >> 32) as u32 == self.epoch) {
            larger[Self::probe(&larger, self.epoch, *slot as u32)] = *slot;
        }
        self.slots = larger;
    }
}

impl Default for SparseVisited {
    fn default() -> Self {
        Self::new()
    }
}

impl Visited for SparseVisited {
    #[inline]
    fn reset(&mut self) {
        self.len = 0;
        self.epoch = self.epoch.wrapping_add(1);
        if self.epoch == 0 {
            self.slots.fill(0);
            self.epoch = 1;
        }
    }

    #[inline]
    fn insert(&mut self, node: NodeId) -> bool {
        let at = Self::probe(&self.slots, self.epoch, node.0);
        let slot = u64::from(self.epoch) << 32 | u64::from(node.0);
        if self.slots[at] == slot {
            return false;
        }
        self.slots[at] = slot;
        self.len += 1;
        // At most half full: probes stay short, and there is always a free slot to end one.
        if 2 * self.len > self.slots.len() {
            self.grow();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn check(mut set: impl Visited, rounds: &[Vec<u32>]) {
        for round in rounds {
            set.reset();
            let mut expected = HashSet::new();
            for node in round {
                assert_eq!(set.insert(NodeId(*node)), expected.insert(*node), "{node} of {round:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn both_kinds_behave_like_a_hash_set(rounds in prop::collection::vec(prop::collection::vec(0u32..500, 0..400), 1..6)) {
            check(DenseVisited::new(500), &rounds);
            // Two slots: growth happens all the time.
            check(SparseVisited::with_slots(2), &rounds);
        }

        #[test]
        fn sparse_takes_any_node(round in prop::collection::vec(any::<u32>(), 0..2000)) {
            check(SparseVisited::with_slots(2), &[round.clone(), round]);
        }
    }

    #[test]
    fn an_epoch_that_wraps_forgets_everything() {
        let mut dense = DenseVisited::new(3);
        assert!(dense.insert(NodeId(1)));
        for _ in 0..usize::from(u16::MAX) {
            dense.reset();
            // Tags of a life ago would read as seen here if the wrap did not wipe them.
            assert!(dense.insert(NodeId(2)));
        }
        assert!(dense.insert(NodeId(1)));

        let mut sparse = SparseVisited::with_slots(8);
        assert!(sparse.insert(NodeId(7)));
        sparse.epoch = u32::MAX;
        sparse.reset();
        assert!(sparse.insert(NodeId(7)));
        assert!(sparse.insert(NodeId(0)), "a slot of zeros is free, not node 0");
    }

    #[test]
    fn dense_takes_no_node_outside_the_graph() {
        let mut dense = DenseVisited::new(3);
        assert!(dense.insert(NodeId(2)));
        assert!(!dense.insert(NodeId(3)));
        assert!(!dense.insert(NodeId(u32::MAX)));
    }
}
