//! Links between processes: mutual TLS, QUIC end points, control-plane calls, membership.
//!
//! Layers, each on those before it: [`tls`] (who is who), [`shape`] (how fast a link is), [`endpoint`] (connections),
//! [`rpc`] (calls), [`membership`] (the oracle's client).

pub mod endpoint;
pub mod membership;
pub mod rpc;
pub mod shape;
pub mod tls;
