//! Which of the nodes found become neighbours (HNSW Alg. 4).

use shine_common::ids::NodeId;

use super::search::Candidate;

/// Entries that a full list keeps at least when it is chosen anew.
///
/// The heuristic alone, as in hnswlib, cuts a full list of 2·m down to m or so. What it cuts are near nodes, which small
/// beams miss: on the data set glove100 (100,000 rows, m 16) recall@10 at ef 40 is 0.859 with none kept and 0.866 with
/// seven eighths, at 2 % more distances per query; at equal recall there are fewer. Above that share every further link
/// to the node leads to a new choice. On upper levels, where searches are greedy, nothing is gained.
pub fn kept_at_least(level: u8, capacity: usize) -> usize {
    if level == 0 { capacity - capacity / 8 } else { 0 }
}

/// Chooses at most `m` neighbours out of `candidates` (nearest first, no node twice) into `chosen`: first those that
/// pass, nearest first, then others, nearest first, up to `at_least` in all. Returns how many passed.
///
/// A candidate passes if it is no nearer to any node that passed before it than to the node that wants neighbours, so
/// that links point in different directions. Fewer than `m` candidates are all taken untested, as in hnswlib's
/// `getNeighborsByHeuristic2`. `pair_distance` is asked for two candidates, the one under test first.
pub fn heuristic(
    candidates: &[Candidate],
    m: usize,
    at_least: usize,
    mut pair_distance: impl FnMut(NodeId, NodeId) -> f32,
    chosen: &mut Vec<Candidate>,
) -> usize {
    let crowds = |candidate: &Candidate, taken: &Candidate| {
        pair_distance(candidate.node(), taken.node()) < candidate.distance()
    };
    heuristic_by(candidates, m, at_least, crowds, chosen)
}

/// [`heuristic`] for who knows some answers beforehand: `crowds` says whether the second candidate, passed already, is
/// nearer to the first than the node that wants neighbours is.
pub fn heuristic_by(
    candidates: &[Candidate],
    m: usize,
    at_least: usize,
    mut crowds: impl FnMut(&Candidate, &Candidate) -> bool,
    chosen: &mut Vec<Candidate>,
) -> usize {
    debug_assert!(
        candidates.windows(2).all(|pair| pair[0] < pair[1]),
        "candidates come nearest first, each once"
    );
    debug_assert!(at_least <= m, "a list holds what it keeps");
    chosen.clear();
    if candidates.len() < m {
        chosen.extend_from_slice(candidates);
        return 0;
    }
    for candidate in candidates {
        if chosen.len() == m {
            break;
        }
        if !chosen.iter().any(|taken| crowds(candidate, taken)) {
            chosen.push(*candidate);
        }
    }
    let passed = chosen.len();
    for candidate in candidates {
        if chosen.len() >= at_least {
            break;
        }
        if chosen[..passed].binary_search(candidate).is_err() {
            chosen.push(*candidate);
        }
    }
    passed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates at places on a line; the node that wants neighbours sits at 0.
    fn check(places: &[f32], m: usize, at_least: usize, expected: &[f32]) {
        let mut candidates: Vec<_> =
            places.iter().enumerate().map(|(i, x)| Candidate::new(x.abs(), NodeId(i as u32), 7)).collect();
        candidates.sort_unstable();
        let place = |node: NodeId| places[node.0 as usize];
        let mut chosen = vec![Candidate::new(0.0, NodeId(99), 0)];
        let passed = heuristic(&candidates, m, at_least, |a, b| (place(a) - place(b)).abs(), &mut chosen);
        assert!(passed <= chosen.len() && (passed > 0 || candidates.len() < m));
        assert_eq!(chosen.iter().map(|c| place(c.node())).collect::<Vec<_>>(), expected);
        assert!(chosen.iter().all(|c| c.upper() == 7));
    }

    #[test]
    fn links_point_in_different_directions() {
        check(&[1.0, 1.5, 2.0, -3.0], 3, 0, &[1.0, -3.0]);
        check(&[1.0, 1.5, 2.0, -3.0], 1, 0, &[1.0]);
    }

    #[test]
    fn others_fill_up_behind_those_that_pass() {
        check(&[1.0, 1.5, 2.0, -3.0], 4, 2, &[1.0, -3.0]);
        check(&[1.0, 1.5, 2.0, -3.0], 3, 3, &[1.0, -3.0, 1.5]);
        check(&[1.0, 1.5, 2.0, -3.0], 4, 4, &[1.0, -3.0, 1.5, 2.0]);
    }

    #[test]
    fn fewer_than_m_are_all_taken_but_exactly_m_are_weeded() {
        check(&[1.0, 1.5], 3, 0, &[1.0, 1.5]);
        check(&[1.0, 1.5], 2, 0, &[1.0]);
        check(&[], 2, 0, &[]);
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
        heuristic(&candidates, 4, 0, far, &mut chosen);
        assert_eq!(
            chosen,
            candidates[..3],
            "the first three are at 1 from each other, the last is nearer to the first"
        );
        // Copies of the node itself are all at 0 from it and from each other.
        check(&[0.0, 0.0, 0.0, 0.0], 3, 0, &[0.0, 0.0, 0.0]);
    }
}
