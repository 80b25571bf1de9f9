//! The compute node over real memory nodes in this process: mostly without a network, and in [`quic`] with one.

mod faults;
mod graph;
mod http;
mod load;
mod node;
mod quic;
mod replace;
mod support;
