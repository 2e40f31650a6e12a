//! What holds for every Service.

use crate::model::{EndpointSlice, IpFamily, resolve, strategies};
use proptest::prelude::*;
use std::sync::Arc;

proptest! {
    #[test]
    fn the_order_of_slices_does_not_matter(
        service in strategies::service(),
        slices in proptest::collection::btree_map(strategies::service_name(), strategies::slice(), 0..6),
        node in strategies::node(),
        settings in strategies::settings(IpFamily::V4),
    ) {
        let mut slices: Vec<Arc<EndpointSlice>> = slices
            .into_iter()
            .map(|(name, slice)| Arc::new(EndpointSlice { name, service: service.name.clone(), ..slice }))
            .collect();
        let forward = resolve(&service, &slices, &node, &settings);
        slices.reverse();
        prop_assert_eq!(forward, resolve(&service, &slices, &node, &settings));
    }

    #[test]
    fn lists_hold_together(
        service in strategies::service(),
        slices in proptest::collection::vec(strategies::slice(), 0..6),
        node in strategies::node(),
        settings in strategies::family().prop_flat_map(strategies::settings),
    ) {
        let slices: Vec<Arc<EndpointSlice>> = slices
            .into_iter()
            .map(|slice| Arc::new(EndpointSlice { service: service.name.clone(), ..slice }))
            .collect();
        for view in resolve(&service, &slices, &node, &settings) {
            for list in [&view.cluster, &view.local, &view.serving] {
                let text: Vec<String> = list.iter().map(|backend| backend.socket_address().to_string()).collect();
                prop_assert!(text.windows(2).all(|pair| pair[0] < pair[1]), "sorted, each once: {:?}", text);
                prop_assert!(list.iter().all(|backend| IpFamily::of(backend.address) == settings.family));
            }
            prop_assert!(view.local.iter().all(|backend| backend.local));
            prop_assert!(view.has_endpoints || view.reachable().is_empty());
            // The cluster list, where it is used, is empty only if no endpoint is usable anywhere.
            if !view.internal_local || view.externally_accessible() {
                prop_assert_eq!(view.has_endpoints, !view.cluster.is_empty());
            }
            if let Some(ranges) = &view.source_ranges {
                prop_assert!(!ranges.is_empty());
                prop_assert!(ranges.iter().all(|net| net.prefix_len() > 0 && IpFamily::of(net.addr()) == settings.family));
                prop_assert!(ranges.windows(2).all(|pair| pair[0].broadcast() < pair[1].network()), "disjoint: {:?}", ranges);
            }
        }
    }
}
