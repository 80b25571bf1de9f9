//! The memory node: offers regions of its memory to the cluster and serves verbs on them. It knows nothing of graphs.
//!
//! [`region`] decides, purely, what becomes of its regions when the map changes; [`node`] is the edge: membership,
//! connections, memory; [`config`] what a process is told at its start.

#![forbid(unsafe_code)]

pub mod config;
pub mod node;
pub mod region;
