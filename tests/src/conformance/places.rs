//! The world of every round: who has which address.

#![forbid(unsafe_code)]

use super::Position;
use crate::world::{NODE_NAME, Party, REMOTE_NODE_NAME, WorldSpec};
use proxy::model::IpFamily;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Endpoint pods of the node: one namespace and one address of each family each.
pub(super) const LOCAL_PODS: u16 = 4;
/// Endpoint pods of the other node.
pub(super) const REMOTE_PODS: u16 = 24;
/// Addresses of other nodes that serve endpoints with host network.
pub(super) const REMOTE_HOSTS: u16 = 3;

/// Where an endpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// A pod of the node.
    Pod(u16),
    /// The node itself (host network).
    Host,
    /// A pod of another node.
    RemotePod(u16),
    /// Another node itself.
    RemoteHost(u16),
}

impl Place {
    pub(super) fn is_local(self) -> bool {
        matches!(self, Self::Pod(_) | Self::Host)
    }

    /// A name for it: of its party in the world, where it has one of its own.
    pub(super) fn name(self) -> String {
        match self {
            Self::Pod(n) => format!("web{n}"),
            Self::Host => NODE_NAME.into(),
            Self::RemotePod(n) => format!("far{n}"),
            Self::RemoteHost(n) => format!("{REMOTE_NODE_NAME}{n}"),
        }
    }

    pub(super) fn address(self, family: IpFamily) -> IpAddr {
        match self {
            Self::Pod(n) => ip(family, [10, 0, 0], [0xfd00, 0x10, 0, 0, 0, 0, 0], 11 + n),
            Self::Host => node(family),
            Self::RemotePod(n) => ip(family, [10, 0, 1], [0xfd00, 0x10, 0, 0, 0, 0, 1], 1 + n),
            Self::RemoteHost(n) => ip(family, [192, 168, 7], [0x2001, 0xdb8, 7, 0, 0, 0, 0], 1 + n),
        }
    }
}

fn ip(family: IpFamily, v4: [u8; 3], v6: [u16; 7], last: u16) -> IpAddr {
    match family {
        IpFamily::V4 => Ipv4Addr::new(v4[0], v4[1], v4[2], u8::try_from(last).expect("small numbers")).into(),
        IpFamily::V6 => Ipv6Addr::new(v6[0], v6[1], v6[2], v6[3], v6[4], v6[5], v6[6], last).into(),
    }
}

/// The node's own address.
pub(super) fn node(family: IpFamily) -> IpAddr {
    ip(family, [192, 168, 0], [0x2001, 0xdb8, 0, 0, 0, 0, 0], 2)
}

/// Another address of the node on its uplink.
pub(super) fn second_node(family: IpFamily) -> IpAddr {
    ip(family, [192, 168, 1], [0x2001, 0xdb8, 1, 0, 0, 0, 0], 2)
}

/// A load balancer address that is local to the node.
pub(super) fn local_vip(family: IpFamily) -> IpAddr {
    ip(family, [198, 51, 100], [0x2001, 0xdb8, 0xff, 0, 0, 0, 0], 200)
}

/// ClusterIP of the Service with this number.
pub(super) fn cluster_ip(family: IpFamily, number: u16) -> IpAddr {
    ip(family, [172, 30, 1], [0xfd00, 0x10, 0x96, 0, 0, 0, 0], number)
}

/// An address of the service networks that no Service has.
pub(super) fn unallocated(family: IpFamily, number: u16) -> IpAddr {
    match family {
        IpFamily::V4 => ip(family, [172, 30, 77], [0; 7], number),
        IpFamily::V6 => ip(family, [0; 3], [0xfd00, 0x10, 0x96, 0, 0, 0, 0], 0x4d00 + number),
    }
}

/// External IP of the Service with this number; neighbours share one.
pub(super) fn external_ip(family: IpFamily, number: u16) -> IpAddr {
    ip(family, [198, 51, 100], [0x2001, 0xdb8, 0xe, 0, 0, 0, 0], 1 + number / 2)
}

/// An external IP that two Services claim.
pub(super) fn rivalled(family: IpFamily) -> IpAddr {
    ip(family, [198, 51, 100], [0x2001, 0xdb8, 0xe, 0, 0, 0, 0], 190)
}

/// Load balancer address of the Service with this number; neighbours share one.
pub(super) fn vip(family: IpFamily, number: u16) -> IpAddr {
    ip(family, [198, 18, 0], [0x2001, 0xdb8, 0xf, 0, 0, 0, 0], 1 + number / 2)
}

/// An address that has nothing to do with Services.
pub(super) fn unrelated(family: IpFamily) -> IpAddr {
    ip(family, [198, 18, 99], [0x2001, 0xdb8, 0x99, 0, 0, 0, 0], 9)
}

/// Health check NodePort of the Service with this number.
pub(super) fn health_check_port(number: u16) -> u16 {
    31_000 + number
}

fn both(address: impl Fn(IpFamily) -> IpAddr) -> Vec<IpAddr> {
    IpFamily::ALL.into_iter().map(address).collect()
}

/// The world, the same in all rounds.
///
/// Clients of other nodes stand on the uplink beside those outside, not in the namespace of the remote endpoints: an endpoint
/// would answer a client of its own namespace without the node, which then could not translate the answer back.
pub(super) fn world() -> WorldSpec {
    let party = |name: &str, addresses: Vec<IpAddr>| Party { name: name.into(), device: None, addresses };
    let nets = both(node).into_iter().chain(both(second_node));
    let mut pods = vec![party("pod", both(|f| client(Position::Pod, f)))];
    pods.extend((0..LOCAL_PODS).map(Place::Pod).map(|place| party(&place.name(), both(|f| place.address(f)))));
    let remote = (0..REMOTE_PODS).map(Place::RemotePod).chain((0..REMOTE_HOSTS).map(Place::RemoteHost));
    WorldSpec {
        node: nets
            .map(|ip| format!("{ip}/{}", if ip.is_ipv4() { 24 } else { 64 }).parse().expect("an address and a length"))
            .collect(),
        loopback: both(local_vip),
        pods,
        remote: vec![party("far", remote.flat_map(|place| both(|f| place.address(f))).collect())],
        outside: [Position::RemotePod, Position::RemoteNode, Position::Outside, Position::OutsideBlocked]
            .map(|position| party(party_name(position), both(|f| client(position, f))))
            .to_vec(),
    }
}

/// Name of the party at a position that has only one.
pub(super) fn party_name(position: Position) -> &'static str {
    match position {
        Position::Pod => "pod",
        Position::Endpoint => "web0",
        Position::Node | Position::NodeVip => "node",
        Position::RemotePod => "rpod",
        Position::RemoteNode => "rnode",
        Position::Outside => "ext",
        Position::OutsideBlocked => "blk",
    }
}

/// Source address of clients at a position.
pub(super) fn client(position: Position, family: IpFamily) -> IpAddr {
    match position {
        Position::Pod => ip(family, [10, 0, 0], [0xfd00, 0x10, 0, 0, 0, 0, 0], 2),
        Position::Endpoint => Place::Pod(0).address(family),
        Position::Node => node(family),
        Position::NodeVip => local_vip(family),
        Position::RemotePod => ip(family, [10, 0, 2], [0xfd00, 0x10, 0, 0, 0, 0, 2], 2),
        Position::RemoteNode => ip(family, [192, 168, 8], [0x2001, 0xdb8, 8, 0, 0, 0, 0], 4),
        Position::Outside => ip(family, [203, 0, 113], [0x2600, 0x5200, 0, 0, 0, 0, 0], 2),
        Position::OutsideBlocked => ip(family, [203, 0, 113], [0x2600, 0x5200, 0xffff, 0, 0, 0, 0], 130),
    }
}
