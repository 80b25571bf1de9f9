//! What every shine process shares: ids, the layout of remote memory, metrics, verbs, wire messages, data sets.
//!
//! Imports go one way: `common <- {cn, mn, oracle} <- sim <- tests`. The modules [`ids`], [`layout`], [`metric`] and
//! [`wire`] are pure: they know no socket, file, clock, thread or global randomness.

pub mod config;
pub mod dataset;
pub mod graph_file;
pub mod ids;
pub mod layout;
pub mod log_limit;
pub mod metric;
pub mod net;
pub mod verbs;
pub mod wire;
