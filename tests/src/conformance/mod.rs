//! Conformance: random states of a cluster, the real kube-proxy and Tandem side by side, and every difference between them.

pub mod flows;
pub mod live_table;
pub mod mutation;
pub mod pair;
pub mod report;
pub mod volley;
