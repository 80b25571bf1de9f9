//! The compute node over in-process memory nodes: real verbs and real leases, no network.

mod faults;
mod graph;
mod load;
mod node;
mod support;
