//! The compute node: searches and extends the graph in the memory of memory nodes, through verbs alone. It holds no
//! part of the graph itself.
//!
//! ```text
//! node (requests, roles) ─▶ query, hnsw::insert, load, check ─▶ reader, id_table, lock, alloc ─▶ collection ─▶ fabric
//! ```

pub mod alloc;
pub mod catalogue;
pub mod check;
pub mod collection;
pub mod config;
pub mod counters;
pub mod fabric;
pub mod hnsw;
pub mod http;
pub mod id_table;
pub mod load;
pub mod lock;
pub mod node;
pub mod query;
pub mod reader;
pub mod scan;
pub mod serve;
