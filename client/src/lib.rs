//! Asynchronous client of a shine cluster.
//!
//! A [`Client`] learns the compute nodes from an oracle and keeps learning; it spreads calls over them and moves on to
//! another when one is lost, silent or overloaded, within the call's deadline. Calls take `&self` and may be in flight
//! in any number; clones share connections.
//!
//! ```no_run
//! use shine_client::{Client, ClientOptions, SearchOptions, value};
//! use shine_common::net::tls::Identity;
//! use shine_common::wire::Target;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let identity = Identity::load(".shine/certs/admin")?;
//! let client = Client::connect(&["127.0.0.1:7000".parse()?], identity, ClientOptions::default()).await?;
//!
//! let words = client.stats("words").await?;
//! let query = value::encode(&vec![0.0; words.dimension as usize], words.dtype, words.dimension as usize)?;
//! let options = SearchOptions { k: 5, ef: 120, ..SearchOptions::default() };
//! for hit in client.search("words", Target::Vector(query), &options).await?.hits {
//!     println!("{} at {}", hit.id, hit.distance);
//! }
//! client.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! Invariant: a call that fails says by type whether it may have had an effect ([`ClientError::outcome_is_unknown`]),
//! and nothing is ever done twice.

#![forbid(unsafe_code)]

mod client;
mod courier;
mod error;
mod insert;
mod link;
mod load;
mod peers;
pub mod value;

pub use client::{
    Answer, CheckProgress, Client, ClientOptions, ClusterStatus, Inserted, NodeReport, Record, SearchOptions,
};
pub use error::ClientError;
pub use load::{LoadOptions, LoadProgress};
