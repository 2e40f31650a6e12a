//! The short form of `cargo xtask bench connect`: that its measures come out, not what they are.

use proxy_tests::bench::connect::{Options, Proto, Target, Through, run};
use proxy_tests::{envtest, netns};
use std::time::Duration;

#[test]
fn first_packets_are_measured_through_both_proxies_and_without() {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return;
    }
    let options =
        Options { services: vec![10], endpoints: 2, rounds: 1, connections: 300, limit: Duration::from_secs(60) };
    let report = run(&options).unwrap();
    for proto in [Proto::Tcp, Proto::Udp] {
        let row = |through, target| report.row(10, proto, through, target).unwrap();
        let plain = row(Through::NoProxy, Target::Pod);
        for target in [Target::Pod, Target::Middle, Target::Last] {
            let (tandem, kube_proxy) = (row(Through::Tandem, target), row(Through::KubeProxy, target));
            for row in [plain, tandem, kube_proxy] {
                // Two context switches and two devices cannot be faster; the limit is that of a machine that hangs.
                assert!(row.p50.median > 1.0 && row.p50.median < 100_000.0, "{row:?}");
                assert!(row.p99.median >= row.p50.median, "{row:?}");
            }
            // Very loose: other tests run beside this one.
            assert!(tandem.p50.median < 2.0 * kube_proxy.p50.median, "{tandem:?}\n{kube_proxy:?}");
        }
    }
    assert_eq!(report.rows.len(), 14);
    println!("{}", serde_json::to_string_pretty(&report).unwrap());
}
