//! Runs the scenarios with the real kube-proxy at a real API server: the proof that what they expect is true.
//!
//! One kube-proxy at a time, since all share one API server.

use libtest_mimic::{Arguments, Failed, Trial};
use proxy_tests::apiserver::ApiServer;
use proxy_tests::engine::{AtApiServer, Program};
use proxy_tests::envtest::{self, Binaries};
use proxy_tests::{netns, runner, scenario};
use std::sync::{Arc, Mutex};

type Shared = Arc<Mutex<Option<(Binaries, ApiServer)>>>;

fn main() -> anyhow::Result<()> {
    let mut arguments = Arguments::from_args();
    // They share one API server, and their objects claim the same addresses.
    arguments.test_threads = Some(1);
    let missing = netns::missing().or_else(envtest::missing);
    let shared: Shared = Arc::default();
    let mut trials = Vec::new();
    for scenario in scenario::load_all()? {
        let scenario = Arc::new(scenario);
        for config in 0..scenario.configs.len() {
            let (scenario, missing, shared) = (scenario.clone(), missing.clone(), shared.clone());
            let name = runner::test_name(&scenario, config);
            let trial = Trial::test(name, move || {
                if let Some(why) = missing.as_deref().or(scenario.not.get("kube-proxy").map(String::as_str)) {
                    println!("SKIP {why}");
                    return Ok(());
                }
                let mut shared = shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                run(&scenario, config, &mut shared).map_err(|e| Failed::from(format!("{e:#}")))
            });
            trials.push(trial);
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    conclusion.exit()
}

fn run(scenario: &scenario::Scenario, config: usize, shared: &mut Option<(Binaries, ApiServer)>) -> anyhow::Result<()> {
    if shared.is_none() {
        let binaries = envtest::binaries()?;
        let api = ApiServer::start(&binaries)?;
        *shared = Some((binaries, api));
    }
    let (binaries, api) = shared.as_ref().expect("filled above");
    let mut engine = AtApiServer::new(Program::KubeProxy, api, binaries, &scenario.configs[config].1)?;
    let summary = runner::run(scenario, config, &mut engine)?;
    println!("{}: {} rows agree{}", scenario.name, summary.rows, skips(&summary.skipped));
    Ok(())
}

fn skips(rows: &[String]) -> String {
    if rows.is_empty() { String::new() } else { format!(", SKIP {}", rows.join(" ")) }
}
