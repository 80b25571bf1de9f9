//! Experiments on shine: clusters of real processes on this host, load from one generator, figures that can be
//! reproduced.

#![deny(unsafe_code)]

pub mod cluster;
pub mod host;
pub mod inputs;
pub mod recall;
pub mod report;
pub mod svg;
pub mod workload;
