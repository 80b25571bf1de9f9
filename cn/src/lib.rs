//! placeholder

pub mod hnsw;
