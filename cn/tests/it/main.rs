//! The compute node over real memory nodes in this process: mostly without a network, and in [`quic`] with one.

mod faults;
mod graph;
mod load;
mod node;
mod quic;
mod support;
