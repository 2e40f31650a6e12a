//! What holds for every packet and every table.

use crate::model::strategies;
use crate::model::{IpFamily, NodePortAddresses, Oracle, Outcome, Settings, lookup};
use proptest::prelude::*;

proptest! {
    #[test]
    fn choices_are_endpoints_of_the_owner_sorted_once_each(
        situation in strategies::family().prop_flat_map(|family| strategies::situation(family, 20)),
    ) {
        let strategies::Situation { table, settings, packets } = &situation;
        let oracle = Oracle::new(table, settings);
        let first = packets[0].as_packet();
        prop_assert_eq!(oracle.lookup(&first), lookup(table, settings, &first));
        for packet in packets {
            let outcome = oracle.lookup(&packet.as_packet());
            let Outcome::Forward { service_port, choices } = outcome else { continue };
            let view = oracle.views().iter().find(|view| view.name == service_port).expect("the owner exists");
            prop_assert!(!choices.is_empty());
            prop_assert!(choices.windows(2).all(|pair| pair[0].backend < pair[1].backend));
            let reachable = view.reachable();
            prop_assert!(choices.iter().all(|choice| reachable.contains(&choice.backend)));
            prop_assert_eq!(Some(view.name.protocol), packet.protocol);
        }
    }

    #[test]
    fn what_has_no_service_address_and_no_node_port_is_not_ours(
        table in strategies::table(20),
        mut settings in strategies::settings(IpFamily::V6),
        packet in strategies::packet(IpFamily::V6),
    ) {
        settings.node_port_addresses = NodePortAddresses::Only(Default::default());
        let oracle = Oracle::new(&table, &settings);
        let ours = oracle.views().iter().any(|view| {
            view.cluster_ip == packet.destination
                || view.external_ips.contains(&packet.destination)
                || view.load_balancer_ips.contains(&packet.destination)
        }) || table.service_cidrs(IpFamily::V6).iter().any(|net| net.contains(&packet.destination));
        if !ours {
            prop_assert_eq!(oracle.lookup(&packet.as_packet()), Outcome::NotOurs);
        }
        prop_assert_eq!(Oracle::new(&table, &Settings::new(IpFamily::V4)).lookup(&packet.as_packet()), Outcome::NotOurs);
    }
}
