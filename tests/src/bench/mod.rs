//! Benchmarks of Tandem beside the real kube-proxy: on the same objects in a real API server, by real connections.

pub mod churn;
pub mod cluster;
pub mod connect;
pub mod knock;
pub mod lane;
pub mod machine;
pub mod numbers;
pub mod proc;
pub mod running;
pub mod scale;
pub mod sync;
pub mod table;
