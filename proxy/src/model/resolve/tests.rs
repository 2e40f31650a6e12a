use super::*;
use crate::model::strategies;
use proptest::prelude::*;

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
}
