//! What a compute node counts since it started. Every name is declared here, once.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Cumulative counts of one compute node.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: Counter,)+
        }

        impl Counters {
            /// Name and value of every counter.
            pub fn snapshot(&self) -> Vec<(String, u64)> {
                vec![$((stringify!($name).to_owned(), self.$name.get()),)+]
            }
        }
    };
}

/// One count. Only ever read for reports, so no order is asked of it.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

counters! {
    /// Searches that were answered.
    searches,
    /// Inserts that were acknowledged.
    inserts,
    /// Of these, the ones that replaced a record.
    replacements,
    /// Records that were handed out by id.
    gets,
    /// Requests refused since too many were running.
    overloaded,
    /// Requests that ended in any other fault.
    faults,
    /// Expansions of searches, any level.
    hops,
    /// Dependent round trips of searches and inserts.
    rounds,
    /// Records read remotely.
    remote_reads,
    /// Bytes of verbs frames, both directions.
    verb_bytes,
    /// Lists read again since they were torn.
    torn_lists,
    /// Locks that were found held by a living session.
    lock_waits,
    /// Locks taken over from a dead session.
    lock_takeovers,
    /// Ids taken over from an insert whose session is dead.
    id_takeovers,
    /// Sessions opened on memory nodes.
    connects,
    /// Attempts to open one that failed.
    connect_failures,
    /// Sessions given up by this node, since a write under a lock was in doubt or the memory node fell silent.
    sessions_discarded,
    /// Calls repeated under a newer map.
    stale_epochs,
    /// Chunks allocated.
    chunks,
    /// Upper chunks allocated.
    upper_chunks,
    /// Nodes written by loads.
    loaded_nodes,
}
