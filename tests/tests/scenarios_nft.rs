//! Runs the scenarios with the real `tandem` binary in the kernel: real sockets in network namespaces.
//!
//! Scenarios about changes run with the agent (`tandem --manifests`), the others with `tandem sync --once`.

use libtest_mimic::{Arguments, Failed, Trial};
use proxy_tests::engine::{Engine, TandemAgent, TandemOnce, tandem_binary};
use proxy_tests::scenario::{Scenario, Step};
use proxy_tests::{netns, runner, scenario};
use std::sync::Arc;

fn main() -> anyhow::Result<()> {
    let mut arguments = Arguments::from_args();
    // Mostly waiting for silence where a packet must be dropped.
    arguments.test_threads.get_or_insert(4);
    let missing = netns::missing();
    if missing.is_none() {
        tandem_binary()?;
    }
    let mut trials = Vec::new();
    for scenario in scenario::load_all()? {
        let scenario = Arc::new(scenario);
        for config in 0..scenario.configs.len() {
            let (scenario, missing) = (scenario.clone(), missing.clone());
            trials.push(Trial::test(runner::test_name(&scenario, config), move || {
                if let Some(why) = missing.as_deref().or(scenario.not.get("tandem").map(String::as_str)) {
                    println!("SKIP {why}");
                    return Ok(());
                }
                run(&scenario, config).map_err(|e| Failed::from(format!("{e:#}")))
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit()
}

fn run(scenario: &Scenario, config: usize) -> anyhow::Result<()> {
    let flags = &scenario.configs[config].1;
    let changes = |s: &Step| matches!(s, Step::Flows(_) | Step::Remove(_) | Step::Terminate(_));
    let mut engine: Box<dyn Engine> = if scenario.steps.iter().any(changes) {
        Box::new(TandemAgent::new(flags)?)
    } else {
        Box::new(TandemOnce::new(flags)?)
    };
    let summary = runner::run(scenario, config, engine.as_mut())?;
    if !summary.skipped.is_empty() {
        println!("{}: SKIP {}", scenario.name, summary.skipped.join(" "));
    }
    Ok(())
}
