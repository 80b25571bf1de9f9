//! The oracle: who is in the cluster, which memory node hosts which region, which collections there are.
//!
//! [`state`] decides, purely; [`store`] keeps what was decided; [`serve`] is the edge: calls, leases, watchers; and
//! [`config`] what a process is told at its start.

#![forbid(unsafe_code)]

pub mod config;
pub mod serve;
pub mod state;
pub mod store;
