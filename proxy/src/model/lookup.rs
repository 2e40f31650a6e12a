//! The ORACLE: what must happen to the first packet of a new connection.
//!
//! It follows a packet through the hooks as kube-proxy v1.37 arranges them: the source range firewall on the original
//! destination; the translation (mark, service addresses, NodePorts); then, for what was not translated, the checks that refuse
//! connections to service ports without endpoints and to ClusterIPs. It is written to be read, not to be fast: a packet walks over all
//! service ports.
//!
//! Affinity is state of a running node: the oracle names the endpoints that are allowed, whoever is remembered.
//! An endpoint that is itself a service address, or a port of this node that is a NodePort without endpoints, is listed as a choice although
//! the kernel refuses the translated packet; Kubernetes supports no such endpoints.

use super::detector::LocalDetector;
use super::name::ServicePortName;
use super::node::Settings;
use super::node_ports::NodePortAddresses;
use super::resolve::{Backend, ServicePortView, resolve};
use super::table::ServiceTable;
use ipnet::IpNet;
use proxy_common::{IpFamily, Protocol};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// The first packet of a new connection, as the node's stack sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The interface by which it enters; `None` = made by a process of the node itself (output hook).
    pub interface: Option<&'a str>,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Transport protocol; `None` = another IP protocol, ICMP included.
    pub protocol: Option<Protocol>,
    /// Destination port; 0 if the protocol has none.
    pub port: u16,
}

/// An endpoint that may be chosen, and whether the packet's source is rewritten if it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Choice {
    /// The endpoint.
    pub backend: Backend,
    /// Source is rewritten to the address of the interface by which the packet leaves. A packet that came in from elsewhere and
    /// is delivered to this node itself leaves by none, so its source stays.
    pub masquerade: bool,
}

/// What happens to the packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Sent to one of these endpoints, uniformly at random (or to the one that affinity remembers).
    Forward {
        /// The service port that serves it.
        service_port: ServicePortName,
        /// The endpoints that are allowed, sorted; never empty.
        choices: Vec<Choice>,
    },
    /// Rejected with ICMP (ICMPv6) port unreachable.
    Reject,
    /// Dropped silently.
    Drop,
    /// Neither translated nor rejected nor dropped by us.
    NotOurs,
}

/// Says what happens to `packet` given everything in `table`. Who asks more than once makes an [`Oracle`].
#[must_use]
pub fn lookup(table: &ServiceTable, settings: &Settings, packet: &Packet<'_>) -> Outcome {
    Oracle::new(table, settings).lookup(packet)
}

/// Everything that decides about packets of one family, resolved once.
#[derive(Clone, Debug)]
pub struct Oracle<'a> {
    settings: &'a Settings,
    /// Ordered by name: the first of equal claims to a frontend is the one that stands.
    views: Vec<ServicePortView>,
    /// The ClusterIP of every service port, with or without endpoints.
    cluster_ips: BTreeSet<IpAddr>,
    service_cidrs: Vec<IpNet>,
}

/// What an address, protocol and port stand for.
#[derive(Clone, Copy)]
struct Frontend<'v> {
    view: &'v ServicePortView,
    /// VIP, external IP or NodePort: the external traffic policy applies, else the internal one.
    external: bool,
    /// Source ranges apply.
    vip: bool,
}

impl<'a> Oracle<'a> {
    /// Resolves all Services of `table` for the family of `settings`.
    #[must_use]
    pub fn new(table: &ServiceTable, settings: &'a Settings) -> Self {
        let mut views: Vec<ServicePortView> = table
            .services()
            .flat_map(|service| resolve(service, &table.slices(&service.name), table.node(), settings))
            .collect();
        views.sort_by(|a, b| a.name.cmp(&b.name));
        Self {
            settings,
            cluster_ips: views.iter().map(|view| view.cluster_ip).collect(),
            service_cidrs: table.service_cidrs(settings.family),
            views,
        }
    }

    /// All service ports of the family, ordered by name.
    #[must_use]
    pub fn views(&self) -> &[ServicePortView] {
        &self.views
    }

    /// Says what happens to `packet`. A packet of the other family is not ours.
    #[must_use]
    pub fn lookup(&self, packet: &Packet<'_>) -> Outcome {
        if IpFamily::of(packet.destination) != self.settings.family {
            return Outcome::NotOurs;
        }
        let frontend = self.frontend(packet);
        if frontend.is_some_and(|frontend| firewalled(frontend, packet)) {
            return Outcome::Drop;
        }
        self.translation(frontend, packet).or_else(|| self.refusal(frontend, packet)).unwrap_or(Outcome::NotOurs)
    }

    /// The service port that owns the packet's destination address and port. A ClusterIP belongs to the Service that has it; of
    /// several equal claims the smallest name's stands.
    fn frontend(&self, packet: &Packet<'_>) -> Option<Frontend<'_>> {
        let destination = packet.destination;
        let mut at_port =
            self.views.iter().filter(|view| Some(view.name.protocol) == packet.protocol && view.port == packet.port);
        let own = at_port.clone().find(|view| view.cluster_ip == destination);
        own.map(|view| Frontend { view, external: false, vip: false }).or_else(|| {
            at_port.find_map(|view| {
                let vip = view.load_balancer_ips.contains(&destination);
                (vip || view.external_ips.contains(&destination)).then_some(Frontend { view, external: true, vip })
            })
        })
    }

    /// The service port that owns the packet's destination port as a NodePort, if the address accepts NodePort traffic.
    fn node_port(&self, packet: &Packet<'_>) -> Option<Frontend<'_>> {
        let accepts = match &self.settings.node_port_addresses {
            NodePortAddresses::All => self.is_local(packet.destination) && !packet.destination.is_loopback(),
            NodePortAddresses::Only(addresses) => addresses.contains(&packet.destination),
        };
        let owns = |view: &&ServicePortView| {
            Some(view.name.protocol) == packet.protocol && view.node_port == packet.port && view.node_port != 0
        };
        let view = self.views.iter().find(owns).filter(|_| accepts)?;
        Some(Frontend { view, external: true, vip: false })
    }

    /// What the nat chains do; `None` = nothing.
    fn translation(&self, frontend: Option<Frontend<'_>>, packet: &Packet<'_>) -> Option<Outcome> {
        let masquerade = self.masquerades_cluster_ip(packet);
        match frontend {
            // A service address that is served is never looked up as a NodePort, whether or not a rule of it translates.
            Some(frontend) if is_served(frontend) => self.endpoints(frontend, packet, masquerade),
            _ => {
                let frontend = self.node_port(packet).filter(|frontend| is_served(*frontend))?;
                self.endpoints(frontend, packet, masquerade)
            }
        }
    }

    /// The rule before all services: connections to ClusterIPs whose source is not local (or all) are masqueraded, since a
    /// client outside of the pod network could not be answered otherwise.
    fn masquerades_cluster_ip(&self, packet: &Packet<'_>) -> bool {
        let from_elsewhere = self.settings.detector != LocalDetector::None && !self.is_from_local_pod(packet);
        self.cluster_ips.contains(&packet.destination) && (self.settings.masquerade_all || from_elsewhere)
    }

    /// Chooses the endpoint list by the traffic policy; `None` if the policy leaves nobody.
    fn endpoints(&self, frontend: Frontend<'_>, packet: &Packet<'_>, masquerade: bool) -> Option<Outcome> {
        let view = frontend.view;
        let (list, masquerade) = match frontend.external {
            false if view.internal_local => (&view.local, masquerade),
            false => (&view.cluster, masquerade),
            // Any endpoint may answer, perhaps one elsewhere, whose reply has to come back through this node.
            true if !view.external_local => (&view.cluster, true),
            // Short-circuits: policy Local is for clients outside; pods and the node itself reach every endpoint.
            true if self.is_from_local_pod(packet) => (&view.cluster, masquerade),
            true if self.is_local(packet.source) => (&view.cluster, true),
            // The client's address is kept.
            true => (&view.local, masquerade),
        };
        self.forward(view, list, packet, masquerade)
    }

    fn forward(
        &self,
        view: &ServicePortView,
        list: &[Backend],
        packet: &Packet<'_>,
        masquerade: bool,
    ) -> Option<Outcome> {
        let choice = |&backend: &Backend| {
            let wanted = masquerade || self.is_hairpin(packet.source, backend, view.name.protocol);
            Choice { backend, masquerade: wanted && self.passes_postrouting(packet, backend) }
        };
        let mut choices: Vec<Choice> = list.iter().map(choice).collect();
        choices.sort_unstable();
        (!choices.is_empty()).then(|| Outcome::Forward { service_port: view.name.clone(), choices })
    }

    /// An endpoint that would talk to itself without noticing: its own address is the source. Only endpoints of this node
    /// count, and any service port may have brought them into the set.
    fn is_hairpin(&self, source: IpAddr, backend: Backend, protocol: Protocol) -> bool {
        let known =
            |list: &[Backend]| list.iter().any(|b| b.local && b.address == backend.address && b.port == backend.port);
        source == backend.address
            && self
                .views
                .iter()
                .any(|view| view.name.protocol == protocol && (known(&view.cluster) || known(&view.local)))
    }

    /// A packet from elsewhere to an endpoint on an address of this node goes to input, where nothing is masqueraded.
    fn passes_postrouting(&self, packet: &Packet<'_>, backend: Backend) -> bool {
        packet.interface.is_none() || !self.is_local(backend.address)
    }

    /// What the filter chains do with a packet that was not translated; `None` = nothing.
    fn refusal(&self, frontend: Option<Frontend<'_>>, packet: &Packet<'_>) -> Option<Outcome> {
        let service_endpoints_check = || frontend.and_then(missing_endpoints);
        let node_port_endpoints_check = || self.node_port(packet).and_then(missing_endpoints);
        // The path ends on this node: input hook. Else forward hook, or output hook if it begins here.
        let delivered = self.is_local(packet.destination);
        let sent = packet.interface.is_none();
        let on_the_way = || service_endpoints_check().or_else(|| self.cluster_ips_check(packet.destination));
        let at_the_end = || node_port_endpoints_check().or_else(service_endpoints_check);
        // A connection of the node to itself passes output, then input.
        let first = if sent || !delivered { on_the_way() } else { None };
        first.or_else(|| if delivered { at_the_end() } else { None })
    }

    /// The guards around ClusterIPs: ports that nobody serves, every protocol included, and addresses that nobody has.
    fn cluster_ips_check(&self, destination: IpAddr) -> Option<Outcome> {
        if self.cluster_ips.contains(&destination) {
            return Some(Outcome::Reject);
        }
        self.service_cidrs.iter().any(|net| net.contains(&destination)).then_some(Outcome::Drop)
    }

    /// What the detector says. No detector: nothing is known to be local.
    fn is_from_local_pod(&self, packet: &Packet<'_>) -> bool {
        match &self.settings.detector {
            LocalDetector::None => false,
            LocalDetector::Cidr(net) => net.contains(&packet.source),
            // Packets that the node makes itself have no input interface.
            LocalDetector::Interface(name) => packet.interface == Some(&**name),
            LocalDetector::InterfacePrefix(prefix) => packet.interface.is_some_and(|name| name.starts_with(&**prefix)),
        }
    }

    /// What `fib … type local` says. All of 127.0.0.0/8 is local, not only the address on `lo`.
    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.settings.local_addresses.contains(&address)
    }
}

/// The source range firewall. It sees packets before translation, from wherever they come.
fn firewalled(frontend: Frontend<'_>, packet: &Packet<'_>) -> bool {
    let ranges = frontend.view.source_ranges.as_ref().filter(|_| frontend.vip);
    ranges.is_some_and(|ranges| !ranges.iter().any(|net| net.contains(&packet.source)))
}

/// The policy that applies to the frontend is Local, and no endpoint is on this node.
fn lacks_local_endpoints(frontend: Frontend<'_>) -> bool {
    let local_only = if frontend.external { frontend.view.external_local } else { frontend.view.internal_local };
    local_only && frontend.view.local.is_empty()
}

/// Whether the nat chains know the frontend. An external one is known also without local endpoints, because of its short-circuits.
fn is_served(frontend: Frontend<'_>) -> bool {
    frontend.view.has_endpoints && (frontend.external || !lacks_local_endpoints(frontend))
}

/// Without any endpoint the client is told at once; if others have endpoints, it is kept waiting, since a load balancer will
/// soon send it elsewhere.
fn missing_endpoints(frontend: Frontend<'_>) -> Option<Outcome> {
    if !frontend.view.has_endpoints {
        return Some(Outcome::Reject);
    }
    lacks_local_endpoints(frontend).then_some(Outcome::Drop)
}

#[cfg(test)]
mod tests;
