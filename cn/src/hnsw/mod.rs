//! HNSW: the search machine, the selection heuristic and what is built from them.
//!
//! [`search`], [`select`] and [`visited`] are pure: no socket, file, clock or thread. Every driver (local, remote,
//! insert, bulk builder) runs that one machine, so that one graph gives the same answers everywhere.

pub mod insert;
pub mod search;
pub mod select;
pub mod visited;
