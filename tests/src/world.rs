//! The world around one node: its namespace, pods of its own, another node with pods, clients outside, and a sink.
//!
//! ```text
//!   outside (clients) ── eth0 ┐            ┌ veth-… ── pod, one namespace each
//!   remote (node, pods) ─ eth1 ┤   node    ├ veth-… ── pod
//!   sink (everything else) eth2┘           └ …
//! ```
//!
//! The node routes all that it does not know to the sink, where every address is local and every server answers: so a
//! packet that is neither translated nor refused is observed, too. The remote side has no way but through the node, so that
//! replies always pass it. Every interface of the node has an address of its own: a masqueraded packet shows by which
//! interface it left.

use crate::netns::Netns;
use crate::server::{Arrivals, Server};
use anyhow::{Context, Result};
use ipnet::IpNet;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Name of the node in every world.
pub const NODE_NAME: &str = "test-node";
/// Name of the other node.
pub const REMOTE_NODE_NAME: &str = "remote-node";

/// Addresses of the node's side of each link, by what is behind it. They are all local addresses of the node.
pub mod link {
    use super::{Ipv4Addr, Ipv6Addr};

    /// Towards the remote node, /24 and /64; the remote side ends in 3.
    pub const REMOTE: (Ipv4Addr, Ipv6Addr) =
        (Ipv4Addr::new(192, 168, 2, 2), Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 2));
    /// Towards every pod of the node.
    pub const POD: (Ipv4Addr, Ipv6Addr) =
        (Ipv4Addr::new(192, 168, 3, 2), Ipv6Addr::new(0x2001, 0xdb8, 3, 0, 0, 0, 0, 2));
    /// Towards the sink, /24 and /64; the sink's side ends in 3.
    pub const SINK: (Ipv4Addr, Ipv6Addr) =
        (Ipv4Addr::new(192, 168, 4, 2), Ipv6Addr::new(0x2001, 0xdb8, 4, 0, 0, 0, 0, 2));
    /// The router that the outside clients are behind, on the node's uplink.
    pub const OUTSIDE: (Ipv4Addr, Ipv6Addr) =
        (Ipv4Addr::new(192, 168, 5, 3), Ipv6Addr::new(0x2001, 0xdb8, 5, 0, 0, 0, 0, 3));
    /// Towards the outside: an address of the uplink beside the node's own ones.
    pub const UPLINK: (Ipv4Addr, Ipv6Addr) =
        (Ipv4Addr::new(192, 168, 5, 2), Ipv6Addr::new(0x2001, 0xdb8, 5, 0, 0, 0, 0, 2));
}

/// A named set of addresses: a pod, or one of the parties on the remote or the outer side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Party {
    /// Name by which probes call it.
    pub name: String,
    /// Name of the node's interface; pods only.
    pub device: Option<String>,
    /// Its addresses; probes use the first of the destination's family.
    pub addresses: Vec<IpAddr>,
}

/// What a world consists of.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct WorldSpec {
    /// Addresses of the node on its uplink, with prefix length; the first of each family is its node IP.
    pub node: Vec<IpNet>,
    /// Addresses on the node's loopback device, for instance a load balancer address that is local.
    pub loopback: Vec<IpAddr>,
    /// Pods of this node.
    pub pods: Vec<Party>,
    /// Pods and host addresses beyond the remote node.
    pub remote: Vec<Party>,
    /// Clients outside the cluster.
    pub outside: Vec<Party>,
}

impl WorldSpec {
    /// The node's addresses on its uplink without prefix lengths.
    #[must_use]
    pub fn node_addresses(&self) -> Vec<IpAddr> {
        self.node.iter().map(IpNet::addr).collect()
    }

    /// Every local address of the node, of both families, loopback ones of the system included.
    #[must_use]
    pub fn local_addresses(&self) -> BTreeSet<IpAddr> {
        let mut all: BTreeSet<IpAddr> =
            self.node_addresses().into_iter().chain(self.loopback.iter().copied()).collect();
        for (v4, v6) in [link::REMOTE, link::POD, link::SINK, link::UPLINK] {
            all.extend([IpAddr::V4(v4), IpAddr::V6(v6)]);
        }
        all.extend([IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]);
        all
    }

    /// The party called `name`.
    #[must_use]
    pub fn party(&self, name: &str) -> Option<&Party> {
        self.pods.iter().chain(&self.remote).chain(&self.outside).find(|p| p.name == name)
    }

    /// The node's interface by which packets of the party `name` enter; `None` for the node itself.
    #[must_use]
    pub fn interface(&self, name: &str) -> Option<String> {
        if let Some(index) = self.pods.iter().position(|p| p.name == name) {
            return Some(device(&self.pods[index], index));
        }
        if self.remote.iter().any(|p| p.name == name) {
            return Some("eth1".into());
        }
        self.outside.iter().any(|p| p.name == name).then(|| "eth0".into())
    }

    /// The source address that a packet to `destination` shows once it is masqueraded; `None` = the node itself or unknown.
    #[must_use]
    pub fn masquerade_addresses(&self, destination: IpAddr) -> Option<BTreeSet<IpAddr>> {
        if self.local_addresses().contains(&destination) {
            return None;
        }
        let has = |parties: &[Party]| parties.iter().any(|p| p.addresses.contains(&destination));
        let pick = |(v4, v6): (Ipv4Addr, Ipv6Addr)| {
            if destination.is_ipv4() { IpAddr::V4(v4) } else { IpAddr::V6(v6) }
        };
        if has(&self.pods) {
            return Some([pick(link::POD)].into());
        }
        if has(&self.remote) {
            return Some([pick(link::REMOTE)].into());
        }
        if has(&self.outside) {
            // The uplink has several addresses of the same scope; which one is the kernel's choice.
            let mut all: BTreeSet<IpAddr> = self.node_addresses().into_iter().collect();
            all.insert(pick(link::UPLINK));
            return Some(all);
        }
        Some([pick(link::SINK)].into())
    }
}

fn device(pod: &Party, index: usize) -> String {
    pod.device.clone().unwrap_or_else(|| format!("veth{index}"))
}

/// A running world. Namespaces and servers end with it.
#[derive(Debug)]
pub struct World {
    /// What it was made from.
    pub spec: WorldSpec,
    /// What arrived at its servers.
    pub arrivals: Arrivals,
    servers: Vec<Server>,
    /// The node.
    pub node: Netns,
    pods: Vec<Netns>,
    remote: Netns,
    outside: Netns,
    sink: Netns,
}

impl World {
    /// Builds the namespaces and starts servers on `ports` in all of them.
    ///
    /// # Errors
    /// A tool or a socket refuses.
    pub fn new(spec: WorldSpec, ports: &BTreeSet<u16>) -> Result<Self> {
        let node = Netns::new("node")?;
        let (remote, outside, sink) = (Netns::new("remote")?, Netns::new("outside")?, Netns::new("sink")?);
        node.sysctl(&[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv6/conf/all/forwarding", "1"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
            // Clients and endpoints behind one interface are wanted here, hints about shorter ways are not.
            ("net/ipv4/conf/all/send_redirects", "0"),
            ("net/ipv4/conf/default/send_redirects", "0"),
        ])?;
        let pods = spec.pods.iter().map(|p| Netns::new(&p.name)).collect::<Result<Vec<_>>>()?;

        let mut n = String::new();
        for (dev, peer) in [("eth0", &outside), ("eth1", &remote), ("eth2", &sink)] {
            writeln!(n, "link add {dev} type veth peer name eth0 netns {}", peer.name())?;
        }
        for address in &spec.node {
            writeln!(n, "addr add {address} dev eth0{}", nodad(address.addr()))?;
        }
        for (dev, (v4, v6)) in [("eth0", link::UPLINK), ("eth1", link::REMOTE), ("eth2", link::SINK)] {
            writeln!(n, "addr add {v4}/24 dev {dev}\naddr add {v6}/64 dev {dev} nodad\nlink set {dev} up")?;
        }
        for address in &spec.loopback {
            writeln!(n, "addr add {address} dev lo{}", nodad(*address))?;
        }
        for (index, (pod, ns)) in spec.pods.iter().zip(&pods).enumerate() {
            let dev = device(pod, index);
            writeln!(n, "link add {dev} type veth peer name eth0 netns {}", ns.name())?;
            writeln!(
                n,
                "addr add {}/32 dev {dev}\naddr add {}/128 dev {dev} nodad\nlink set {dev} up",
                link::POD.0,
                link::POD.1
            )?;
            for address in &pod.addresses {
                writeln!(n, "route add {address} dev {dev}")?;
            }
        }
        for (parties, via, dev) in
            [(&spec.outside, link::OUTSIDE, "eth0"), (&spec.remote, far_side(link::REMOTE), "eth1")]
        {
            for address in parties.iter().flat_map(|p| &p.addresses) {
                writeln!(n, "route add {address} via {} dev {dev}", pick(via, *address))?;
            }
        }
        let sink_side = far_side(link::SINK);
        writeln!(n, "route add default via {} dev eth2\nroute add default via {} dev eth2", sink_side.0, sink_side.1)?;
        node.ip(&n)?;

        for (pod, ns) in spec.pods.iter().zip(&pods) {
            let mut p = String::from("link set eth0 up\n");
            for address in &pod.addresses {
                writeln!(p, "addr add {address} dev eth0{}", nodad(*address))?;
            }
            if pod.addresses.iter().any(IpAddr::is_ipv4) {
                writeln!(p, "route add {} dev eth0\nroute add default via {} dev eth0", link::POD.0, link::POD.0)?;
            }
            if pod.addresses.iter().any(IpAddr::is_ipv6) {
                writeln!(p, "route add {} dev eth0\nroute add default via {} dev eth0", link::POD.1, link::POD.1)?;
            }
            ns.ip(&p)?;
        }
        for (ns, parties, own, gateway) in [
            (&outside, spec.outside.as_slice(), link::OUTSIDE, link::UPLINK),
            (&remote, spec.remote.as_slice(), far_side(link::REMOTE), link::REMOTE),
            (&sink, &[], sink_side, link::SINK),
        ] {
            let mut p = String::from("link set eth0 up\n");
            writeln!(p, "addr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad", own.0, own.1)?;
            for address in parties.iter().flat_map(|p| &p.addresses) {
                writeln!(p, "addr add {address} dev lo{}", nodad(*address))?;
            }
            writeln!(p, "route add default via {} dev eth0\nroute add default via {} dev eth0", gateway.0, gateway.1)?;
            ns.ip(&p)?;
        }
        // Every address is local to the sink, but those that it sends answers to. In the table `local`, because the kernel
        // takes a source address for its own only if that table says so (`__ip_dev_find`).
        let mut s = format!(
            "route add {0}/24 dev eth0 table local\nroute add {1}/64 dev eth0 table local\n",
            net4(link::SINK),
            net6(link::SINK)
        );
        let links =
            [link::REMOTE, link::POD, link::UPLINK].into_iter().flat_map(|(v4, v6)| [IpAddr::V4(v4), IpAddr::V6(v6)]);
        let parties = spec.pods.iter().chain(&spec.remote).chain(&spec.outside).flat_map(|p| p.addresses.clone());
        let all: BTreeSet<IpAddr> =
            parties.chain(spec.node_addresses()).chain(spec.loopback.iter().copied()).chain(links).collect();
        for address in all {
            writeln!(s, "route add {address} via {} dev eth0 table local", pick(link::SINK, address))?;
        }
        s.push_str("route add local 0.0.0.0/0 dev lo table local\nroute add local ::/0 dev lo table local");
        sink.ip(&s)?;
        // A remote endpoint may reach itself through the node: its own address as a source from outside.
        remote.sysctl(&[
            ("net/ipv4/conf/all/accept_local", "1"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/conf/default/rp_filter", "0"),
            ("net/ipv4/conf/eth0/rp_filter", "0"),
        ])?;

        let arrivals = Arrivals::default();
        let mut servers = Vec::new();
        for (name, ns) in [("node", &node), ("remote", &remote), ("outside", &outside), ("sink", &sink)]
            .into_iter()
            .chain(spec.pods.iter().map(|p| p.name.as_str()).zip(&pods))
        {
            servers
                .push(Server::start(&ns.path(), name, ports, &arrivals).with_context(|| format!("server in {name}"))?);
        }
        Ok(Self { spec, arrivals, servers, node, pods, remote, outside, sink })
    }

    /// The namespace of the party `name`; `node` and `sink` too.
    #[must_use]
    pub fn netns(&self, name: &str) -> Option<&Netns> {
        match name {
            "node" => return Some(&self.node),
            "sink" => return Some(&self.sink),
            _ => {}
        }
        if let Some(index) = self.spec.pods.iter().position(|p| p.name == name) {
            return self.pods.get(index);
        }
        if self.spec.remote.iter().any(|p| p.name == name) {
            return Some(&self.remote);
        }
        self.spec.outside.iter().any(|p| p.name == name).then_some(&self.outside)
    }

    /// Number of servers that run.
    #[must_use]
    pub fn servers(&self) -> usize {
        self.servers.len()
    }
}

fn nodad(address: IpAddr) -> &'static str {
    if address.is_ipv6() { " nodad" } else { "" }
}

fn pick((v4, v6): (Ipv4Addr, Ipv6Addr), like: IpAddr) -> IpAddr {
    if like.is_ipv4() { v4.into() } else { v6.into() }
}

fn net4((v4, _): (Ipv4Addr, Ipv6Addr)) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(v4) & !0xff)
}

fn net6((_, v6): (Ipv4Addr, Ipv6Addr)) -> Ipv6Addr {
    Ipv6Addr::from(u128::from(v6) & !u128::from(u64::MAX))
}

fn far_side((v4, v6): (Ipv4Addr, Ipv6Addr)) -> (Ipv4Addr, Ipv6Addr) {
    (Ipv4Addr::from(u32::from(v4) + 1), Ipv6Addr::from(u128::from(v6) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::{Proto, Seen, once};
    use std::time::Duration;

    fn party(name: &str, addresses: &[&str]) -> Party {
        Party { name: name.into(), device: None, addresses: addresses.iter().map(|a| a.parse().unwrap()).collect() }
    }

    #[test]
    fn everything_in_a_world_reaches_everything_and_refusals_are_told_apart() {
        if let Some(why) = crate::netns::missing() {
            println!("SKIP {why}");
            return;
        }
        let spec = WorldSpec {
            node: vec!["192.168.0.2/24".parse().unwrap(), "2001:db8::1/64".parse().unwrap()],
            loopback: vec!["1.2.3.4".parse().unwrap()],
            pods: vec![party("pod", &["10.0.0.2", "fd00:10::2"]), party("web", &["10.180.0.1", "fd00:10::3"])],
            remote: vec![party("far", &["10.180.1.1", "fd00:10:1::1"])],
            outside: vec![party("ext", &["203.0.113.2", "2600:5200::1"])],
        };
        let world = World::new(spec, &[80].into()).unwrap();
        let timeout = Duration::from_secs(3);
        let places = [
            ("pod", "10.0.0.2", "fd00:10::2"),
            ("web", "10.180.0.1", "fd00:10::3"),
            ("far", "10.180.1.1", "fd00:10:1::1"),
            ("ext", "203.0.113.2", "2600:5200::1"),
            ("node", "192.168.0.2", "2001:db8::1"),
            ("sink", "8.8.8.8", "2600::8"),
        ];
        for (from, source4, source6) in &places[..5] {
            for (to, target4, target6) in &places {
                for proto in [Proto::Tcp, Proto::Udp, Proto::Sctp, Proto::Icmp] {
                    for (source, target) in [(source4, target4), (source6, target6)] {
                        let (source, target): (IpAddr, IpAddr) = (source.parse().unwrap(), target.parse().unwrap());
                        let ns = world.netns(from).unwrap();
                        let seen = ns.run(|| once(proto, source, (target, 80).into(), timeout, &world.arrivals));
                        let answer = match &seen {
                            Seen::Answer(answer) => answer,
                            // An INIT has no server that would answer it.
                            Seen::OneWay(answer) if proto == Proto::Sctp => answer,
                            _ => panic!("{from} -> {to} {proto} {target}: {seen}"),
                        };
                        assert_eq!(answer.local.ip(), target, "{from} -> {to} {proto}");
                        assert_eq!(answer.peer.ip(), source, "{from} -> {to} {proto}");
                    }
                }
            }
        }
        // The refusals, by rules of our own, in each of the three hooks that see such traffic.
        let rules = "table inet t {
            chain f { type filter hook forward priority 0; th dport 81 reject; th dport 82 drop; meta l4proto { icmp, ipv6-icmp } ip daddr 8.8.8.9 reject; ip6 daddr 2600::9 reject; tcp dport 83 reject with tcp reset; }
            chain o { type filter hook output priority 0; th dport 81 reject; th dport 82 drop; ip daddr 8.8.8.9 reject; tcp dport 83 reject with tcp reset; }
        }";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        world.node.output(&["nft", "-f", file.path().to_str().unwrap()]).unwrap();
        let short = Duration::from_millis(300);
        for (from, source4, source6) in &places[..5] {
            for proto in [Proto::Tcp, Proto::Udp, Proto::Sctp] {
                for (source, target) in [(source4, "8.8.8.8"), (source6, "2600::8")] {
                    let (source, target): (IpAddr, IpAddr) = (source.parse().unwrap(), target.parse().unwrap());
                    let ns = world.netns(from).unwrap();
                    let start = std::time::Instant::now();
                    let seen = ns.run(|| once(proto, source, (target, 81).into(), timeout, &world.arrivals));
                    assert!(seen.is_port_unreachable(), "{from} {proto} {target}: {seen}");
                    assert!(
                        start.elapsed() < Duration::from_millis(900),
                        "{from} {proto} {target}: {:?}",
                        start.elapsed()
                    );
                    if matches!(*from, "pod" | "node") {
                        let seen = ns.run(|| once(proto, source, (target, 82).into(), short, &world.arrivals));
                        assert_eq!(seen, Seen::Nothing, "{from} {proto} {target}");
                    }
                }
            }
        }
        let ns = world.netns("pod").unwrap();
        let seen = ns.run(|| {
            once(Proto::Tcp, "10.0.0.2".parse().unwrap(), "8.8.8.8:83".parse().unwrap(), timeout, &world.arrivals)
        });
        assert_eq!(seen, Seen::Reset);
        let seen = ns.run(|| {
            once(Proto::Icmp, "10.0.0.2".parse().unwrap(), "8.8.8.9:0".parse().unwrap(), timeout, &world.arrivals)
        });
        assert!(seen.is_port_unreachable(), "{seen}");
        let seen = ns.run(|| {
            once(Proto::Icmp, "fd00:10::2".parse().unwrap(), "[2600::9]:0".parse().unwrap(), timeout, &world.arrivals)
        });
        assert!(seen.is_port_unreachable(), "{seen}");
    }
}
