//! Experiments on shine: clusters of real processes on this host, load from one generator, figures that can be
//! reproduced.

#![deny(unsafe_code)]

pub mod cluster;
pub mod graph_cache;
pub mod host;
pub mod inputs;
pub mod local;
pub mod local_cluster;
pub mod loopback;
pub mod progress;
pub mod prove;
pub mod recall;
pub mod report;
pub mod stage;
pub mod svg;
pub mod workload;
