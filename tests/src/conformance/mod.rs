//! Conformance: random states of a cluster, the real kube-proxy and Tandem side by side, and every difference between them.

pub mod pair;
pub mod volley;
