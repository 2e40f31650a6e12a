//! Test harness of Tandem: network namespaces, servers and probes in them, scenario files, and the real Kubernetes
//! binaries. What a test expects is written in scenario files or in the test; this crate only builds worlds and observes.

pub mod apiserver;
pub mod bench;
pub mod cluster;
pub mod conformance;
pub mod engine;
pub mod envtest;
pub mod netns;
pub mod packet;
pub mod probe;
pub mod process;
pub mod relay;
pub mod runner;
pub mod scenario;
pub mod server;
pub mod traffic;
pub mod world;

/// Makes this process remove its namespaces and data when a signal ends it, since destructors do not run then. For programs.
///
/// # Errors
/// There is a handler already.
pub fn clean_up_when_interrupted() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        eprintln!("\ninterrupted: removing what was made");
        netns::remove_own();
        apiserver::remove_own_data();
        std::process::exit(130);
    })?;
    Ok(())
}
