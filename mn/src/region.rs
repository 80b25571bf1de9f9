//! What a memory node does with its regions when the oracle speaks. Decides; does nothing.
//!
//! Invariant: memory is zeroed before it is served under a `born` that it did not have, so content of one collection
//! is never read as another's.

use shine_common::ids::{Epoch, Incarnation, RegionId};
use shine_common::verbs::host::RegionStatus;
use shine_common::wire::{ClusterMap, RegionGrant, RegionUse, Role};

/// One step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Serve fresh memory as this region.
    Host(RegionGrant),
    /// Stop serving the region.
    GiveUp(RegionId),
    /// Move on to a newer epoch, with the content as it is.
    Move(RegionGrant),
    /// Zero it, and serve it under a newer epoch.
    Zero(RegionGrant),
    /// Tell the oracle that it is zeroed.
    Report(RegionId, Epoch),
}

/// Steps after a join: what is served becomes exactly what was granted.
pub fn after_join(hosted: &[RegionStatus], grants: &[RegionGrant]) -> Vec<Step> {
    let granted = |id| grants.iter().any(|grant| grant.id == id);
    let mut steps: Vec<_> =
        hosted.iter().map(|r| r.id).filter(|id| !granted(*id)).map(Step::GiveUp).collect();
    for grant in grants {
        match hosted.iter().find(|region| region.id == grant.id) {
            None => steps.push(Step::Host(*grant)),
            Some(region) => steps.extend(advance(region, *grant)),
        }
    }
    steps
}

/// Steps after a new map. A map in which this life of the memory node is not a member is not for it: it has been
/// forgotten and joins again, or another has taken its name.
pub fn after_map(hosted: &[RegionStatus], map: &ClusterMap, mn: &str, life: Incarnation) -> Vec<Step> {
    let mut steps = Vec::new();
    if map.member(Role::Mn, mn).is_none_or(|member| member.incarnation != life) {
        return steps;
    }
    for region in hosted {
        let Some(entry) = map.region(region.id).filter(|entry| entry.mn == mn) else { continue };
        let grant = RegionGrant { id: entry.id, epoch: entry.epoch, born: entry.born };
        steps.extend(advance(region, grant));
        if entry.usage == RegionUse::Resetting && entry.epoch >= region.epoch {
            steps.push(Step::Report(entry.id, entry.epoch));
        }
    }
    steps
}

fn advance(region: &RegionStatus, to: RegionGrant) -> Option<Step> {
    if to.epoch <= region.epoch {
        None
    } else if to.born > region.born {
        Some(Step::Zero(to))
    } else {
        Some(Step::Move(to))
    }
}

#[cfg(test)]
mod tests {
    use shine_common::ids::CollectionId;
    use shine_common::verbs::memory::Pages;
    use shine_common::wire::{Member, MemberState, RegionEntry};

    use super::*;

    const LIFE: Incarnation = Incarnation(5);

    fn hosted(id: u16, epoch: u64, born: u64) -> RegionStatus {
        RegionStatus {
            id: RegionId(id),
            epoch: Epoch(epoch),
            born: Epoch(born),
            bytes: 4096,
            pages: Pages::Small,
        }
    }

    fn grant(id: u16, epoch: u64, born: u64) -> RegionGrant {
        RegionGrant { id: RegionId(id), epoch: Epoch(epoch), born: Epoch(born) }
    }

    fn map(life: Incarnation, regions: &[(u16, &str, u64, u64, RegionUse)]) -> ClusterMap {
        let member = Member {
            name: "mn-0".into(),
            role: Role::Mn,
            addr: "127.0.0.1:1".into(),
            incarnation: life,
            state: MemberState::Up,
        };
        let entry = |&(id, mn, epoch, born, usage): &(u16, &str, u64, u64, RegionUse)| RegionEntry {
            id: RegionId(id),
            mn: mn.into(),
            bytes: 4096,
            epoch: Epoch(epoch),
            born: Epoch(born),
            usage,
        };
        ClusterMap {
            epoch: Epoch(100),
            members: vec![member],
            regions: regions.iter().map(entry).collect(),
            collections: Vec::new(),
        }
    }

    #[test]
    fn what_is_granted_is_what_is_served() {
        assert_eq!(
            after_join(&[], &[grant(0, 5, 5), grant(3, 5, 5)]),
            [Step::Host(grant(0, 5, 5)), Step::Host(grant(3, 5, 5))]
        );
        // The same grants again change nothing.
        assert_eq!(after_join(&[hosted(0, 5, 5), hosted(3, 5, 5)], &[grant(0, 5, 5), grant(3, 5, 5)]), []);
        // An oracle that has lost its state deals the ids anew.
        assert_eq!(
            after_join(&[hosted(1, 5, 5), hosted(2, 5, 5)], &[grant(0, 9, 9), grant(1, 9, 9)]),
            [Step::GiveUp(RegionId(2)), Step::Host(grant(0, 9, 9)), Step::Zero(grant(1, 9, 9))]
        );
    }

    #[test]
    fn a_resetting_region_is_zeroed_once_and_reported_until_the_oracle_has_heard() {
        let resetting = map(LIFE, &[(0, "mn-0", 9, 9, RegionUse::Resetting)]);
        let report = Step::Report(RegionId(0), Epoch(9));
        assert_eq!(
            after_map(&[hosted(0, 5, 5)], &resetting, "mn-0", LIFE),
            [Step::Zero(grant(0, 9, 9)), report]
        );
        assert_eq!(after_map(&[hosted(0, 9, 9)], &resetting, "mn-0", LIFE), [report]);
        // A map from before does not undo anything.
        assert_eq!(after_map(&[hosted(0, 10, 10)], &resetting, "mn-0", LIFE), []);
        let free = map(LIFE, &[(0, "mn-0", 9, 9, RegionUse::Free)]);
        assert_eq!(after_map(&[hosted(0, 9, 9)], &free, "mn-0", LIFE), []);
    }

    #[test]
    fn an_epoch_that_moves_without_birth_keeps_the_content() {
        let used = RegionUse::Used(CollectionId(1));
        let moved = map(LIFE, &[(0, "mn-0", 9, 5, used), (1, "mn-1", 9, 9, used)]);
        let steps = after_map(&[hosted(0, 5, 5), hosted(1, 5, 5)], &moved, "mn-0", LIFE);
        assert_eq!(steps, [Step::Move(grant(0, 9, 5))], "and another's regions are not ours to touch");
    }

    #[test]
    fn a_map_of_another_life_is_not_followed() {
        let resetting = map(Incarnation(6), &[(0, "mn-0", 9, 9, RegionUse::Resetting)]);
        assert_eq!(after_map(&[hosted(0, 5, 5)], &resetting, "mn-0", LIFE), []);
        assert_eq!(after_map(&[hosted(0, 5, 5)], &ClusterMap::default(), "mn-0", LIFE), []);
    }
}
