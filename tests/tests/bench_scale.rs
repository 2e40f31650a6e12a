//! The short form of `cargo xtask bench scale`: that its measures come out and changes arrive, not how fast.

use proxy_tests::bench::churn;
use proxy_tests::bench::scale::{Churn, Options, run};
use proxy_tests::bench::table::Format;
use proxy_tests::{envtest, netns};
use std::time::Duration;

#[test]
fn starts_and_steady_changes_are_measured_for_both_proxies() {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return;
    }
    let limit = Duration::from_secs(60);
    let changes = churn::Options { rate: 50, time: Duration::from_secs(2), limit };
    let options = Options { sizes: vec![(20, 2)], added: 1, churn: Some(Churn { size: (20, 2), changes }), limit };
    let report = run(&options).unwrap();
    println!("{}", report.render(Format::Text));
    assert_eq!(report.starts.len(), 2);
    for start in &report.starts {
        assert!(start.seconds.unwrap() > 0.0 && start.cpu_seconds > 0.0 && start.memory_mib.0 > 1.0, "{start:?}");
        assert!(start.added.unwrap().median < 30_000.0, "{start:?}");
    }
    assert_eq!(report.churned.len(), 2);
    for churned in &report.churned {
        let outcome = churned.outcome.as_ref().unwrap();
        assert!(outcome.rate > 1.0 && outcome.probes > 0 && outcome.lost == 0, "{churned:?}");
        assert!(outcome.p50.unwrap() <= outcome.p99.unwrap() && outcome.caught_up.is_some(), "{churned:?}");
        // Several syncs in two seconds, and each takes time.
        assert!(outcome.syncs.unwrap() > 0.0 && outcome.sync.unwrap() > 0.0, "{churned:?}");
    }
}
