//! The short form of `cargo xtask bench sync`: that its measures come out, and that none is out of all proportion.

use proxy_tests::bench::sync::{Measure, Options, run};
use proxy_tests::{envtest, netns};

#[test]
fn both_programs_are_measured_from_the_api_server_to_packets() {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return;
    }
    let report = run(&Options::quick()).unwrap();
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
    for measure in [
        Measure::Cold,
        Measure::Sync,
        Measure::ColdCpu,
        Measure::Restart,
        Measure::Lost,
        Measure::Added,
        Measure::AddedAfterReturn,
        Measure::Removed,
        Measure::Memory,
        Measure::PeakMemory,
        Measure::RestartPeakMemory,
    ] {
        let row = report.row(200, measure).unwrap_or_else(|| panic!("{measure} was not measured"));
        let (kube_proxy, tandem) = (row.kube_proxy.as_ref().unwrap(), row.tandem.as_ref().unwrap());
        assert!(!kube_proxy.all.is_empty() && kube_proxy.all.len() == tandem.all.len(), "{row:?}");
    }
    for measure in [Measure::List, Measure::Compile, Measure::Kernel] {
        let row = report.row(200, measure).unwrap_or_else(|| panic!("{measure} was not measured"));
        assert!(row.tandem.as_ref().unwrap().spread.min > 0.0, "{row:?}");
    }
    let child = report.row(200, Measure::ChildMemory).expect("kube-proxy runs nft");
    assert!(child.tandem.is_none(), "Tandem starts no process: {child:?}");
    let lost = report.row(200, Measure::Lost).unwrap().tandem.as_ref().unwrap();
    assert_eq!(lost.spread.max, 0.0, "a restart loses no connection");
    // Very loose: other tests run beside this one, and Tandem may be a debug build.
    assert_eq!(report.above(5.0), Vec::<String>::new());
}
