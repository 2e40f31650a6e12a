//! Packets, aimed at the frontends of a table.

use super::*;
use crate::model::{Oracle, Packet, ServicePortView};

/// A [`Packet`] that owns its interface name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedPacket {
    /// The interface by which it enters; `None` = made by the node itself.
    pub interface: Option<Arc<str>>,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Transport protocol; `None` = another one.
    pub protocol: Option<Protocol>,
    /// Destination port.
    pub port: u16,
}

impl OwnedPacket {
    /// The same packet, borrowed, as `lookup` takes it.
    #[must_use]
    pub fn as_packet(&self) -> Packet<'_> {
        Packet {
            interface: self.interface.as_deref(),
            source: self.source,
            destination: self.destination,
            protocol: self.protocol,
            port: self.port,
        }
    }
}

/// Where a packet comes from: its interface and source.
fn origin(family: IpFamily) -> impl Strategy<Value = (Option<Arc<str>>, IpAddr)> {
    let pod = (one_of(&["pod0", "pod1"]).prop_map(Some), select(endpoint_addresses(family)));
    let outside = (Just(Some(Arc::from("eth0"))), select(outside_clients(family)));
    let node = (Just(None), select(local_addresses(family)));
    // A spoofed address, or a VIP whose holder connects to itself.
    let vip = (Just(Some(Arc::from("eth0"))), select(external_addresses(family)));
    prop_oneof![3 => pod, 3 => outside, 2 => node, 1 => vip]
}

/// A packet of `family` at an address that may be a frontend, or next to one; from a pod, the node or outside.
pub fn packet(family: IpFamily) -> impl Strategy<Value = OwnedPacket> {
    let destination = prop_oneof![
        4 => select(cluster_ips(family)),
        3 => select(external_addresses(family)),
        3 => select(local_addresses(family)),
        1 => select(endpoint_addresses(family)),
        1 => Just(numbered(family, "172.30.9.", "fd00:10:96::9", 9)),
    ];
    let usual = select(USUAL_PORTS.to_vec());
    let port = prop_oneof![
        6 => usual.clone().prop_map(|(_, protocol, port, _)| (Some(protocol), port)),
        3 => usual.prop_map(|(_, protocol, _, node_port)| (Some(protocol), node_port)),
        2 => (protocol().prop_map(Some), select(PORTS.to_vec())),
        1 => Just((None, 0)),
    ];
    (origin(family), destination, port).prop_map(|((interface, source), destination, (protocol, port))| OwnedPacket {
        interface,
        source,
        destination,
        protocol,
        port,
    })
}

/// A packet at a frontend of `views`, often from one of its endpoints; sometimes any packet of `family`.
pub fn packet_to(views: &[ServicePortView], family: IpFamily) -> BoxedStrategy<OwnedPacket> {
    let packets: Vec<BoxedStrategy<OwnedPacket>> = views.iter().map(|view| packet_to_view(view, family)).collect();
    if packets.is_empty() {
        return packet(family).boxed();
    }
    prop_oneof![4 => select(packets).prop_flat_map(|packet| packet), 1 => packet(family)].boxed()
}

fn packet_to_view(view: &ServicePortView, family: IpFamily) -> BoxedStrategy<OwnedPacket> {
    let service_addresses =
        [view.cluster_ip].into_iter().chain(view.load_balancer_ips.clone()).chain(view.external_ips.clone());
    let mut frontends: Vec<(IpAddr, u16)> = service_addresses.map(|address| (address, view.port)).collect();
    if view.node_port != 0 {
        frontends.extend(local_addresses(family).into_iter().take(2).map(|address| (address, view.node_port)));
    }
    let reachable: Vec<IpAddr> = view.reachable().into_iter().map(|backend| backend.address).collect();
    let origin = if reachable.is_empty() {
        origin(family).boxed()
    } else {
        let endpoint = (Just(Some(Arc::from("pod0"))), select(reachable));
        prop_oneof![3 => origin(family), 1 => endpoint].boxed()
    };
    let protocol = Some(view.name.protocol);
    (origin, select(frontends))
        .prop_map(move |((interface, source), (destination, port))| OwnedPacket {
            interface,
            source,
            destination,
            protocol,
            port,
        })
        .boxed()
}

/// A table, the settings of one family, and packets at its frontends.
#[derive(Clone, Debug)]
pub struct Situation {
    /// Up to 40 changes old; no change is pending.
    pub table: ServiceTable,
    /// Settings of the family.
    pub settings: Settings,
    /// Packets of the family.
    pub packets: Vec<OwnedPacket>,
}

/// A situation of `family` with this many packets.
pub fn situation(family: IpFamily, packets: usize) -> impl Strategy<Value = Situation> {
    (table(40), settings(family)).prop_flat_map(move |(table, settings)| {
        let to = packet_to(Oracle::new(&table, &settings).views(), family);
        vec(to, packets).prop_map(move |packets| Situation {
            table: table.clone(),
            settings: settings.clone(),
            packets,
        })
    })
}
