//! Which of the nodes found become neighbours (HNSW Alg. 4).

use shine_common::ids::NodeId;

use super::search::Candidate;

/// What to do with candidates that the heuristic refused while there is room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pruned {
    /// Leave them out, as hnswlib does: lists stay short where the neighbourhood is one tight bunch.
    Drop,
    /// Fill up with the nearest of them (`keepPrunedConnections` of the paper).
    Keep,
}

/// Chooses at most `m` neighbours out of `candidates` (nearest first, no node twice) into `chosen`, nearest first.
///
/// A candidate is taken if it is no nearer to any node taken before it than to the node that wants neighbours, so
/// that links point in different directions. Fewer than `m` candidates are all taken, as in hnswlib's
/// `getNeighborsByHeuristic2`. `pair_distance` is asked for two candidates, the one under test first.
pub fn heuristic(
    candidates: &[Candidate],
    m: usize,
    pruned: Pruned,
    mut pair_distance: impl FnMut(NodeId, NodeId) -> f32,
    chosen: &mut Vec<Candidate>,
) {
    let crowds = |candidate: &Candidate, taken: &Candidate| {
        pair_distance(candidate.node(), taken.node()) < candidate.distance()
    };
    heuristic_by(candidates, m, pruned, crowds, chosen);
}

/// [`heuristic`] for who knows some answers beforehand: `crowds` says whether the second candidate, taken already, is
/// nearer to the first than the node that wants neighbours is.
pub fn heuristic_by(
    candidates: &[Candidate],
    m: usize,
    pruned: Pruned,
    mut crowds: impl FnMut(&Candidate, &Candidate) -> bool,
    chosen: &mut Vec<Candidate>,
) {
    debug_assert!(
        candidates.windows(2).all(|pair| pair[0] < pair[1]),
        "candidates come nearest first, each once"
    );
    chosen.clear();
    if candidates.len() < m {
        chosen.extend_from_slice(candidates);
        return;
    }
    for candidate in candidates {
        if chosen.len() == m {
            return;
        }
        if !chosen.iter().any(|taken| crowds(candidate, taken)) {
            chosen.push(*candidate);
        }
    }
    if pruned == Pruned::Keep {
        let refused = candidates.iter().filter(|c| chosen.binary_search(c).is_err()).take(m - chosen.len());
        let refused: Vec<_> = refused.copied().collect();
        chosen.extend(refused);
        chosen.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates at places on a line; the node that wants neighbours sits at 0.
    fn check(places: &[f32], m: usize, pruned: Pruned, expected: &[f32]) {
        let mut candidates: Vec<_> =
            places.iter().enumerate().map(|(i, x)| Candidate::new(x.abs(), NodeId(i as u32), 7)).collect();
        candidates.sort_unstable();
        let place = |node: NodeId| places[node.0 as usize];
        let mut chosen = vec![Candidate::new(0.0, NodeId(99), 0)];
        heuristic(&candidates, m, pruned, |a, b| (place(a) - place(b)).abs(), &mut chosen);
        assert_eq!(chosen.iter().map(|c| place(c.node())).collect::<Vec<_>>(), expected);
        assert!(chosen.iter().all(|c| c.upper() == 7));
    }

    #[test]
    fn links_point_in_different_directions() {
        check(&[1.0, 1.5, 2.0, -3.0], 3, Pruned::Drop, &[1.0, -3.0]);
        check(&[1.0, 1.5, 2.0, -3.0], 1, Pruned::Drop, &[1.0]);
    }

    #[test]
    fn pruned_ones_fill_up_on_request() {
        check(&[1.0, 1.5, 2.0, -3.0], 3, Pruned::Keep, &[1.0, 1.5, -3.0]);
        check(&[1.0, 1.5, 2.0, -3.0], 4, Pruned::Keep, &[1.0, 1.5, 2.0, -3.0]);
    }

    #[test]
    fn fewer_than_m_are_all_taken_but_exactly_m_are_weeded() {
        check(&[1.0, 1.5], 3, Pruned::Drop, &[1.0, 1.5]);
        check(&[1.0, 1.5], 2, Pruned::Drop, &[1.0]);
        check(&[], 2, Pruned::Drop, &[]);
    }

    #[test]
    fn a_tie_is_taken() {
        // Four corners of a square around the node: neighbouring corners are as near to each other as to it in the
        // largest-coordinate metric, and only strictly nearer ones are refused.
        let corners = [[1.0f32, 1.0], [1.0, -1.0], [-1.0, 1.0], [0.5, 1.0]];
        let mut candidates: Vec<_> = (0..4).map(|i| Candidate::new(1.0, NodeId(i), 0)).collect();
        candidates.sort_unstable();
        let far = |a: NodeId, b: NodeId| {
            let (a, b) = (corners[a.0 as usize], corners[b.0 as usize]);
            (a[0] - b[0]).abs().max((a[1] - b[1]).abs()) / 2.0
        };
        let mut chosen = Vec::new();
        heuristic(&candidates, 4, Pruned::Drop, far, &mut chosen);
        assert_eq!(
            chosen,
            candidates[..3],
            "the first three are at 1 from each other, the last is nearer to the first"
        );
        // Copies of the node itself are all at 0 from it and from each other.
        check(&[0.0, 0.0, 0.0, 0.0], 3, Pruned::Drop, &[0.0, 0.0, 0.0]);
    }
}
