//! What one Service needs, in few bytes: its frontends, where each leads, and its endpoints in the order of their slots.
//!
//! Elements and chains are derived from it when they are needed (`elements`, `affinity`) and never kept.

use super::claims::Rank;
use super::nft::Problem;
use super::slots::Slots;
use crate::model::{Backend, ObjectName, Protocol, ServicePortName, ServicePortView};
use ipnet::IpNet;
use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;

/// Most endpoints of one list: `numgen` and the slot number are good for 65,536, the comment of the map says `mod 65536`.
pub const MOST_ENDPOINTS: usize = 65_535;

/// Where a connection may be addressed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Front {
    /// ClusterIP, external IP or load balancer address.
    Address(IpAddr, Protocol, u16),
    /// Port of the node's NodePort addresses.
    NodePort(Protocol, u16),
}

/// `172.30.0.41:80/TCP`, `NodePort 30001/TCP`
impl fmt::Display for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Front::Address(IpAddr::V4(ip), protocol, port) => write!(f, "{ip}:{port}/{protocol}"),
            Front::Address(IpAddr::V6(ip), protocol, port) => write!(f, "[{ip}]:{port}/{protocol}"),
            Front::NodePort(protocol, port) => write!(f, "NodePort {port}/{protocol}"),
        }
    }
}

/// Which of the two lists of endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum List {
    /// The cluster list.
    Cluster,
    /// The endpoints on this node.
    Local,
}

/// Where a frontend leads in one of the verdict maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// To one of the endpoints of a list.
    Balance {
        /// The list.
        list: List,
        /// The source is rewritten.
        masquerade: bool,
    },
    /// By the source of the packet: external traffic policy Local.
    ExternalLocal,
    /// Rejected: no endpoint anywhere.
    Reject,
    /// Dropped: endpoints exist, but the policy permits none.
    Drop,
}

/// The verdict maps by what they are asked for; each exists for addresses and for NodePorts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lookup {
    /// `service-ips`, `service-nodeports`
    Service,
    /// `no-endpoint-services`, `no-endpoint-nodeports`
    NoEndpoint,
    /// `short-circuit-ips`, `short-circuit-nodeports`
    ShortCircuit,
    /// `local-ips`, `local-nodeports`
    Local,
}

/// An external IP or load balancer address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct External {
    /// The address.
    pub address: IpAddr,
    /// A load balancer address: subject to source ranges.
    pub filtered: bool,
}

/// One service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortPlan {
    /// Namespace, name, port name, protocol.
    pub name: ServicePortName,
    /// ClusterIP; guarded against unserved ports even if another Service owns the frontend.
    pub cluster_ip: IpAddr,
    /// Service port number.
    pub port: u16,
    /// Whether ClusterIP:port is served for this Service.
    pub serves_cluster_ip: bool,
    /// NodePort, 0 = none.
    pub node_port: u16,
    /// External addresses, without duplicates.
    pub externals: Box<[External]>,
    /// Networks that may reach the filtered addresses; `None` = any.
    pub source_ranges: Option<Box<[IpNet]>>,
    /// Internal traffic policy is Local.
    pub internal_local: bool,
    /// External traffic policy is Local.
    pub external_local: bool,
    /// Whether any endpoint is usable, on whatever node.
    pub has_endpoints: bool,
    /// ClientIP affinity timeout in seconds.
    pub affinity_timeout_s: Option<u32>,
    /// The cluster list.
    pub cluster: Slots,
    /// The local list.
    pub local: Slots,
}

impl PortPlan {
    fn new(view: ServicePortView, problems: &mut Vec<Problem>) -> Self {
        let mut externals: Vec<External> = Vec::with_capacity(view.load_balancer_ips.len() + view.external_ips.len());
        let filtered = view.source_ranges.is_some();
        for (addresses, filtered) in [(&view.load_balancer_ips, filtered), (&view.external_ips, false)] {
            for address in addresses {
                if externals.iter().all(|known| known.address != *address) {
                    externals.push(External { address: *address, filtered });
                }
            }
        }
        let mut list = |backends: Vec<Backend>, kind: &str| {
            let count = backends.len();
            if count > MOST_ENDPOINTS {
                let message = format!(
                    "port {}: {count} {kind} endpoints, but at most {MOST_ENDPOINTS} can be balanced over: the first {MOST_ENDPOINTS} are used; split the Service",
                    view.name
                );
                problems.push(Problem { service: view.name.service.clone(), message });
            }
            Slots::place(&[], &backends[..count.min(MOST_ENDPOINTS)])
        };
        let (cluster, local) = (list(view.cluster, "usable"), list(view.local, "local"));
        Self {
            cluster_ip: view.cluster_ip,
            port: view.port,
            serves_cluster_ip: true,
            node_port: view.node_port,
            externals: externals.into(),
            source_ranges: view.source_ranges.map(Into::into),
            internal_local: view.internal_local,
            external_local: view.external_local,
            has_endpoints: view.has_endpoints,
            affinity_timeout_s: view.affinity_timeout_s,
            name: view.name,
            cluster,
            local,
        }
    }

    fn address(&self, address: IpAddr) -> Front {
        Front::Address(address, self.name.protocol, self.port)
    }

    /// The frontends, ClusterIP first.
    pub fn fronts(&self) -> impl Iterator<Item = Front> {
        let cluster_ip = self.serves_cluster_ip.then(|| self.address(self.cluster_ip));
        let node_port = (self.node_port != 0).then_some(Front::NodePort(self.name.protocol, self.node_port));
        cluster_ip
            .into_iter()
            .chain(self.externals.iter().map(|external| self.address(external.address)))
            .chain(node_port)
    }

    /// As what it claims a frontend of its own.
    fn rank(&self, front: Front) -> Rank {
        if front == self.address(self.cluster_ip) { Rank::ClusterIp } else { Rank::External }
    }

    /// Leaves out the frontends that `keep` refuses.
    fn retain_fronts(&mut self, mut keep: impl FnMut(Front) -> bool) {
        self.serves_cluster_ip = self.serves_cluster_ip && keep(self.address(self.cluster_ip));
        let kept: Vec<External> =
            self.externals.iter().copied().filter(|external| keep(self.address(external.address))).collect();
        if kept.len() < self.externals.len() {
            self.externals = kept.into();
        }
        if self.node_port != 0 && !keep(Front::NodePort(self.name.protocol, self.node_port)) {
            self.node_port = 0;
        }
    }

    /// A list.
    #[must_use]
    pub fn list(&self, list: List) -> &Slots {
        match list {
            List::Cluster => &self.cluster,
            List::Local => &self.local,
        }
    }

    /// A list, to be changed.
    pub fn list_mut(&mut self, list: List) -> &mut Slots {
        match list {
            List::Cluster => &mut self.cluster,
            List::Local => &mut self.local,
        }
    }

    /// Where every frontend leads, in every verdict map in which it is.
    #[must_use]
    pub fn routes(&self) -> Vec<(Front, Lookup, Route)> {
        let mut routes = Vec::with_capacity(2 + self.externals.len());
        let cluster = (self.cluster.count() > 0).then_some(List::Cluster);
        let local = (self.local.count() > 0).then_some(List::Local);
        let unserved = if self.has_endpoints { Route::Drop } else { Route::Reject };
        if self.serves_cluster_ip {
            let front = self.address(self.cluster_ip);
            routes.push(match if self.internal_local { local } else { cluster } {
                Some(list) => (front, Lookup::Service, Route::Balance { list, masquerade: false }),
                None => (front, Lookup::NoEndpoint, unserved),
            });
        }
        for front in self.fronts().skip(usize::from(self.serves_cluster_ip)) {
            if self.external_local {
                // Short-circuits work without a local endpoint; everything else then meets the drop.
                if self.has_endpoints {
                    routes.push((front, Lookup::Service, Route::ExternalLocal));
                }
                for (lookup, list) in [(Lookup::ShortCircuit, cluster), (Lookup::Local, local)] {
                    routes.extend(list.map(|list| (front, lookup, Route::Balance { list, masquerade: false })));
                }
                if local.is_none() {
                    routes.push((front, Lookup::NoEndpoint, unserved));
                }
            } else {
                routes.push(match cluster {
                    Some(list) => (front, Lookup::Service, Route::Balance { list, masquerade: true }),
                    None => (front, Lookup::NoEndpoint, unserved),
                });
            }
        }
        routes
    }

    /// Which frontends have slots of which list. Affinity ports have none: they have chains of their own.
    #[must_use]
    pub fn slotted(&self) -> Vec<(Front, List)> {
        if self.affinity_timeout_s.is_some() {
            return Vec::new();
        }
        let routes = self.routes().into_iter();
        routes
            .filter_map(
                |(front, _, route)| if let Route::Balance { list, .. } = route { Some((front, list)) } else { None },
            )
            .collect()
    }

    /// The filtered addresses.
    pub fn filtered(&self) -> impl Iterator<Item = Front> {
        self.externals.iter().filter(|external| external.filtered).map(|external| self.address(external.address))
    }

    /// Every endpoint of both lists, some twice.
    pub fn reachable(&self) -> impl Iterator<Item = &Backend> {
        self.cluster.live().iter().chain(self.local.live())
    }
}

/// All ports of one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServicePlan {
    /// Ports in the order of their names.
    pub ports: Box<[PortPlan]>,
    /// Frontends that it claims and does not serve: another Service owns them, or it is quarantined.
    pub lost: Box<[(Front, Rank)]>,
}

impl ServicePlan {
    /// The plan of a service as if it owned all its frontends.
    #[must_use]
    pub fn new(views: Vec<ServicePortView>, problems: &mut Vec<Problem>) -> Self {
        let mut ports: Vec<PortPlan> = views.into_iter().map(|view| PortPlan::new(view, problems)).collect();
        ports.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        // The API server permits no two ports with the same number and protocol; manifests and NodePorts might.
        let mut seen = HashSet::new();
        for port in &mut ports {
            let name = port.name.clone();
            port.retain_fronts(|front| {
                let new = seen.insert(front);
                if !new {
                    let message =
                        format!("port {name}: {front} belongs to another port of the same Service: remove one of them");
                    problems.push(Problem { service: name.service.clone(), message });
                }
                new
            });
        }
        Self { ports: ports.into(), lost: Box::default() }
    }

    /// Leaves out the frontends that another Service owns; each is a Problem.
    pub fn lose<'a>(
        &mut self,
        service: &ObjectName,
        owner: impl Fn(Front) -> Option<&'a ObjectName>,
        problems: &mut Vec<Problem>,
    ) {
        let mut lost = std::mem::take(&mut self.lost).into_vec();
        for port in &mut self.ports {
            let name = port.name.clone();
            let cluster_ip = port.address(port.cluster_ip);
            port.retain_fronts(|front| {
                let Some(owner) = owner(front).filter(|owner| *owner != service) else { return true };
                let rank = if front == cluster_ip { Rank::ClusterIp } else { Rank::External };
                if !lost.contains(&(front, rank)) {
                    let message = format!(
                        "port {name}: {front} is served for Service {owner}, which claims it too: change one of them"
                    );
                    problems.push(Problem { service: service.clone(), message });
                    lost.push((front, rank));
                }
                false
            });
        }
        self.lost = lost.into();
    }

    /// The same claims, but nothing is served.
    #[must_use]
    pub fn claims_only(self) -> Self {
        Self { lost: self.claims().collect(), ports: Box::default() }
    }

    /// Every frontend that the Service claims, and as what.
    pub fn claims(&self) -> impl Iterator<Item = (Front, Rank)> {
        let kept = self.ports.iter().flat_map(|port| port.fronts().map(|front| (front, port.rank(front))));
        kept.chain(self.lost.iter().copied())
    }

    /// Whether a list has surplus slots.
    #[must_use]
    pub fn has_surplus(&self) -> bool {
        self.ports.iter().any(|port| port.cluster.has_surplus() || port.local.has_surplus())
    }
}
