//! HNSW: the search machine, the selection heuristic and what is built from them.
//!
//! ```text
//! search, select, visited (pure) ◀─ local (a graph in this process) ◀─ build, hnsw_rs_builder ─▶ graph ─▶ graph file
//!            ▲                              ▲
//!            │                              └─ region (remote memory that lies in this process)
//!            └─ insert, and the reader of remote memory
//! ```
//!
//! Every driver (local, remote, insert, bulk builder) runs the one search machine, so that one graph gives the same
//! answers everywhere.

pub mod build;
pub mod graph;
#[cfg(feature = "hnsw_rs")]
pub mod hnsw_rs_builder;
pub mod insert;
pub mod local;
mod prefetch;
pub mod region;
mod repair;
pub mod search;
pub mod select;
pub mod visited;
