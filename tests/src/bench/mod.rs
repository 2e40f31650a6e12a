//! Benchmarks of Tandem beside the real kube-proxy: on the same objects in a real API server, by real connections.

pub mod cluster;
