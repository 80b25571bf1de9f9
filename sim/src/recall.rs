//! Recall of answers against exact neighbours. Pure.

/// How far an answer may be beyond the true k-th neighbour and still count *by distance*, relative.
pub const DISTANCE_SLACK: f32 = 1e-3;

/// Number of the first `k` answers that are among the true k nearest, by id. `ids` and `truth` hold each id once.
pub fn hits_by_id(ids: &[u64], truth: &[u32], k: usize) -> usize {
    let truth = &truth[..k];
    ids.iter().take(k).filter(|id| u32::try_from(**id).is_ok_and(|id| truth.contains(&id))).count()
}

/// Number of the first `k` answers that are no farther than the true k-th neighbour at `kth`, but for
/// [`DISTANCE_SLACK`]. So a tie on the last place costs nothing. For the inner product, where distances are
/// negative, the slack is on the absolute value.
pub fn hits_by_distance(distances: &[f32], kth: f32, k: usize) -> usize {
    let bound = kth + kth.abs() * DISTANCE_SLACK;
    distances.iter().take(k).filter(|distance| **distance <= bound).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_count_once_and_only_within_k() {
        for (ids, k, expected) in [
            (&[3, 1, 2][..], 3, 3),
            (&[3, 9, 2], 3, 2),
            (&[4, 1], 3, 1),
            (&[1, 2, 3, 4], 2, 2),
            (&[1 << 32 | 1], 3, 0),
            (&[], 3, 0),
        ] {
            assert_eq!(hits_by_id(ids, &[1, 2, 3, 4], k), expected, "{ids:?} at {k}");
        }
    }

    #[test]
    fn a_tie_on_the_last_place_counts_by_distance() {
        assert_eq!(hits_by_distance(&[1.0, 2.0, 2.0019, 2.1], 2.0, 4), 3);
        assert_eq!(hits_by_distance(&[-9.0, -7.0, -6.9931, -6.9], -7.0, 4), 3);
        assert_eq!(hits_by_distance(&[0.0, 0.0, 0.1], 0.0, 2), 2);
    }
}
