//! How quickly a change in the API server reaches the packets of a node, and what that costs: Tandem and the real kube-proxy, one
//! after the other, on the same objects in the same API server, each on a node of its own, by real connections.
//!
//! A visit of one program to one node:
//! 1. cold start: nothing is programmed. From the start of the process until the last Service of the cluster and every
//!    thousandth of the others have answered a connection;
//! 2. it rests, and its memory is looked at;
//! 3. one Service added, again and again: its EndpointSlice is there already, so that one write makes it complete;
//! 4. one endpoint of two removed, again and again: until no connection goes to it any more;
//! 5. it is ended, all endpoints of the last Service are replaced, it starts again with its rules in place: from the start of
//!    the process until a new endpoint has answered.
//!
//! Both run with their default settings: between two syncs lies at least a second (`minSyncPeriod`), so that changes are
//! made with a longer pause in between. The rounds alternate which of the two is first.

mod changes;
mod report;
mod visit;

pub use report::{Measure, Report, Row};

use super::cluster::{Cluster, Manager, create};
use super::lane::NODE;
use super::machine::Machine;
use crate::apiserver::ApiServer;
use crate::cluster::Program;
use crate::envtest;
use crate::world::NODE_NAME;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sizes of the cluster, in Services.
    pub services: Vec<usize>,
    /// Endpoints of each Service.
    pub endpoints: usize,
    /// Visits of each program to each size.
    pub rounds: usize,
    /// Single changes of each kind in each visit.
    pub changes: usize,
    /// How long memory is left alone, beyond the rest after the cold start, before it is looked at once more; zero = it is not.
    pub idle: Duration,
    /// How long anything may take.
    pub limit: Duration,
}

impl Options {
    /// The short form, which shows that every measure comes out.
    #[must_use]
    pub fn quick() -> Self {
        let (services, limit) = (vec![200], Duration::from_secs(60));
        Self { services, endpoints: 5, rounds: 1, changes: 1, idle: Duration::ZERO, limit }
    }
}

/// Measures. Progress goes to standard error.
///
/// # Errors
/// A program or tool is missing, a program ends, or something takes longer than the limit.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(options.rounds > 0 && options.changes > 0, "no rounds or no changes");
    let binaries = envtest::binaries()?;
    let mut report = Report::new(options.endpoints, options.rounds, Machine::this()?)?;
    for &services in &options.services {
        let cluster = Cluster::new(services, options.endpoints)?;
        let api = ApiServer::start(&binaries)?;
        let loaded = load(cluster, &api)?;
        eprintln!(
            "sync: {services} services × {} endpoints loaded into the API server in {:.1} s",
            options.endpoints,
            loaded.as_secs_f64()
        );
        for round in 0..options.rounds {
            let mut programs = [Program::KubeProxy, Program::Tandem];
            programs.rotate_left(round % 2);
            for program in programs {
                eprintln!("sync: {services} services, round {} of {}: {}", round + 1, options.rounds, program.name());
                let samples = visit::visit(program, &binaries, &api, cluster, options)
                    .with_context(|| format!("{} at {services} services", program.name()))?;
                for (measure, values) in samples {
                    report.add(services, program, measure, values);
                }
            }
        }
    }
    Ok(report)
}

/// Brings the cluster and its one real node into the API server, and lets the server list all of it once, so that neither program
/// meets cold caches there.
fn load(cluster: Cluster, api: &ApiServer) -> Result<Duration> {
    let loaded = cluster.load(api)?;
    api.access()?.run(|client| async move {
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE_NAME },
            "spec": { "podCIDR": "10.10.2.0/24" },
            "status": { "addresses": [{ "type": "InternalIP", "address": NODE }] },
        });
        create(&client, Manager::Kubectl, &node).await?;
        for path in ["/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices"] {
            client.request_text(http::Request::get(format!("{path}?resourceVersion=0")).body(Vec::new())?).await?;
        }
        Ok(())
    })?;
    Ok(loaded)
}
