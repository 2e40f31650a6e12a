//! What a Service means on this node: derived fields and usable endpoints, by the rules of kube-proxy v1.37.

use super::endpoint::{Endpoint, EndpointSlice};
use super::name::ServicePortName;
use super::node::{Node, Settings};
use super::service::{Service, ServicePort, ServiceType, TrafficPolicy};
use super::topology::TopologyMode;
use ipnet::IpNet;
use proxy_common::IpFamily;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// An endpoint address and port that traffic may be sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Backend {
    /// Address of the endpoint.
    pub address: IpAddr,
    /// Port of the endpoint.
    pub port: u16,
    /// Whether it runs on this node.
    pub local: bool,
}

impl Backend {
    /// Address and port without the locality; its text (`ip:port`, IPv6 in brackets) is the order of endpoint lists.
    #[must_use]
    pub fn socket_address(&self) -> SocketAddr {
        SocketAddr::new(self.address, self.port)
    }
}

/// One service port in one family, resolved for this node. Lists are sorted by the text `ip:port`, without duplicates.
///
/// An address:port that several service ports claim belongs to the one that has it as ClusterIP; among equals, and for a NodePort, to
/// the one with the smallest [`ServicePortName`] (namespace first, then name, as the type's order has it); `resolve` sees one Service
/// and cannot know of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePortView {
    /// Namespace, name, port name, protocol.
    pub name: ServicePortName,
    /// ClusterIP of the family.
    pub cluster_ip: IpAddr,
    /// Service port number.
    pub port: u16,
    /// NodePort, 0 = none.
    pub node_port: u16,
    /// External IPs of the family, without duplicates and without the ClusterIP.
    pub external_ips: Vec<IpAddr>,
    /// Load balancer addresses of the family (VIPs), without duplicates and without the ClusterIP. An address may also be
    /// in `external_ips`.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Effective source ranges of the family for the VIPs, aggregated (disjoint, sorted), the VIPs' self-permission
    /// included: if a range holds this node's address, connections from a VIP itself are allowed too, since a connection of
    /// the node to a VIP that is a local address carries the VIP as its source. `None` = not filtered.
    pub source_ranges: Option<Vec<IpNet>>,
    /// Internal traffic policy is Local.
    pub internal_local: bool,
    /// External traffic policy Local is in force: it is set, and the type is LoadBalancer or NodePort, or there are external IPs.
    pub external_local: bool,
    /// ClientIP affinity timeout in seconds.
    pub affinity_timeout_s: Option<u32>,
    /// Health check node port of the Service (type LoadBalancer with external policy Local only), 0 = none.
    pub health_check_node_port: u16,
    /// Cluster list: ready endpoints that the topology allows, else those that are serving while they terminate; empty if
    /// Cluster endpoints are not used.
    pub cluster: Vec<Backend>,
    /// Local list: ready endpoints on this node, else those that are serving while they terminate; topology plays no part.
    /// Empty if Local endpoints are not used.
    pub local: Vec<Backend>,
    /// Some endpoint is usable somewhere, on this node or elsewhere: tells "no endpoint here" (drop) from "none at all" (reject).
    pub has_endpoints: bool,
    /// Every endpoint with serving=true, for conntrack clean-up; policies and topology play no part.
    pub serving: Vec<Backend>,
}

impl ServicePortView {
    /// NodePort, VIP or external IP exists.
    #[must_use]
    pub fn externally_accessible(&self) -> bool {
        self.node_port != 0 || !self.load_balancer_ips.is_empty() || !self.external_ips.is_empty()
    }

    /// Reachable list: the union of the cluster and the local list. Affinity and hairpin are about these endpoints.
    #[must_use]
    pub fn reachable(&self) -> Vec<Backend> {
        let mut all = self.cluster.clone();
        all.extend(self.local.iter().filter(|backend| !self.cluster.contains(backend)));
        sort(&mut all, Backend::socket_address);
        all
    }
}

/// Resolves every port of `service` for the family of `settings`; empty if the Service does not exist in that family.
///
/// `slices` may come in any order and may hold slices of other families and Services, which are left out.
#[must_use]
pub fn resolve(
    service: &Service,
    slices: &[Arc<EndpointSlice>],
    node: &Node,
    settings: &Settings,
) -> Vec<ServicePortView> {
    let Some(cluster_ip) = service.cluster_ip(settings.family) else { return Vec::new() };
    let slices = own_slices(service, slices, settings.family);
    let template = template(service, cluster_ip, settings);
    let mut views: Vec<ServicePortView> = Vec::with_capacity(service.ports.len());
    for port in &service.ports {
        let view = port_view(port, &template, &slices, node);
        // Names are unique in a valid Service. In an invalid one the last port of a name stands, as in kube-proxy's map.
        views.retain(|other| other.name != view.name);
        views.push(view);
    }
    views
}

/// The slices of this Service and family by name. kube-proxy visits them in no fixed order; with one, the same facts always
/// give the same result, whatever order they arrived in.
fn own_slices<'a>(service: &Service, slices: &'a [Arc<EndpointSlice>], family: IpFamily) -> Vec<&'a EndpointSlice> {
    let mut own: Vec<&EndpointSlice> =
        slices.iter().map(AsRef::as_ref).filter(|s| s.family == family && s.service == service.name).collect();
    own.sort_by(|a, b| a.name.cmp(&b.name));
    own
}

/// Everything that the ports of a Service share; port, policies' consequences and endpoints are still missing.
fn template(service: &Service, cluster_ip: IpAddr, settings: &Settings) -> ServicePortView {
    let external_local = external_policy_local(service);
    let load_balancer_ips = addresses(&service.load_balancer_ips, cluster_ip);
    let source_ranges = source_ranges(&service.source_ranges, &load_balancer_ips, settings);
    let external_ips =
        if settings.external_ips_enabled { addresses(&service.external_ips, cluster_ip) } else { Vec::new() };
    ServicePortView {
        name: ServicePortName { service: service.name.clone(), port: "".into(), protocol: proxy_common::Protocol::Tcp },
        cluster_ip,
        port: 0,
        node_port: 0,
        external_ips,
        load_balancer_ips,
        source_ranges,
        internal_local: service.internal_traffic_policy == TrafficPolicy::Local,
        external_local,
        affinity_timeout_s: service.affinity_timeout_s,
        health_check_node_port: if external_local && service.service_type == ServiceType::LoadBalancer {
            service.health_check_node_port
        } else {
            0
        },
        cluster: Vec::new(),
        local: Vec::new(),
        has_endpoints: false,
        serving: Vec::new(),
    }
}

/// eTP=Local means nothing for a Service of type ClusterIP without external IPs, where the API server may leave it set.
fn external_policy_local(service: &Service) -> bool {
    service.external_traffic_policy == TrafficPolicy::Local
        && (service.service_type != ServiceType::ClusterIp || !service.external_ips.is_empty())
}

/// The entries of the ClusterIP's family, each once and without the ClusterIP itself: that one is internal traffic.
fn addresses(all: &[IpAddr], cluster_ip: IpAddr) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for &ip in all {
        if IpFamily::of(ip) == IpFamily::of(cluster_ip) && ip != cluster_ip && !found.contains(&ip) {
            found.push(ip);
        }
    }
    found
}

/// loadBalancerSourceRanges of one family as they take effect; `None` = everybody may connect.
fn source_ranges(ranges: &[IpNet], vips: &[IpAddr], settings: &Settings) -> Option<Vec<IpNet>> {
    let mut own: Vec<IpNet> =
        ranges.iter().filter(|net| IpFamily::of(net.addr()) == settings.family).map(IpNet::trunc).collect();
    if settings.node_ip.is_some_and(|ip| own.iter().any(|net| net.contains(&ip))) {
        own.extend(vips.iter().map(|&vip| IpNet::from(vip)));
    }
    let mut own = IpNet::aggregate(&own);
    own.sort_unstable();
    // No range of this family: not filtered. A /0 among them swallows the others: not filtered either.
    let everybody = own.iter().any(|net| net.prefix_len() == 0);
    (!own.is_empty() && !everybody).then_some(own)
}

fn port_view(
    port: &ServicePort,
    template: &ServicePortView,
    slices: &[&EndpointSlice],
    node: &Node,
) -> ServicePortView {
    let mut view = template.clone();
    view.name.port = Arc::clone(&port.name);
    view.name.protocol = port.protocol;
    view.port = port.port;
    view.node_port = port.node_port;

    let candidates = candidates(port, slices, node);
    view.serving = backends(&candidates, |c| c.endpoint.serving);
    let accessible = view.externally_accessible();
    if !view.internal_local || accessible {
        view.cluster = cluster_list(&candidates, node);
    }
    if view.internal_local || (view.external_local && accessible) {
        view.local = local_list(&candidates);
    }
    // A cluster list, where there is one, is empty only if no endpoint is usable: neither topology nor the fall-back to
    // draining endpoints leaves nobody while somebody is.
    view.has_endpoints = candidates.iter().any(|c| c.usable());
    view
}

/// An endpoint of one service port, after the merge of all slices.
struct Candidate<'a> {
    backend: Backend,
    endpoint: &'a Endpoint,
}

impl Candidate<'_> {
    /// Finishes its work and may still be used if nothing better is there.
    fn draining(&self) -> bool {
        self.endpoint.serving && self.endpoint.terminating
    }

    fn usable(&self) -> bool {
        self.endpoint.ready || self.draining()
    }
}

/// The union of all slices, by `ip:port`. Of several entries with one key the last that is not terminating stands; if all
/// are terminating, the first (kube-proxy's rule: an entry replaces an earlier one unless it is terminating).
fn candidates<'a>(port: &ServicePort, slices: &[&'a EndpointSlice], node: &Node) -> Vec<Candidate<'a>> {
    let mut found: Vec<Candidate<'a>> = Vec::new();
    let mut index: HashMap<(IpAddr, u16), usize> = HashMap::new();
    for slice in slices {
        for slice_port in slice.ports.iter().filter(|p| p.name == port.name && p.protocol == port.protocol) {
            for endpoint in slice.endpoints.iter().filter(|e| IpFamily::of(e.address) == slice.family) {
                let backend =
                    Backend { address: endpoint.address, port: slice_port.port, local: is_local(endpoint, node) };
                let candidate = Candidate { backend, endpoint };
                match index.entry((backend.address, backend.port)) {
                    Entry::Vacant(entry) => {
                        entry.insert(found.len());
                        found.push(candidate);
                    }
                    Entry::Occupied(entry) if !endpoint.terminating => found[*entry.get()] = candidate,
                    Entry::Occupied(_) => {}
                }
            }
        }
    }
    sort(&mut found, |candidate| candidate.backend.socket_address());
    found
}

/// `nodeName` is set and names this node.
fn is_local(endpoint: &Endpoint, node: &Node) -> bool {
    endpoint.node_name.as_ref().is_some_and(|name| !name.is_empty() && *name == node.name)
}

fn cluster_list(candidates: &[Candidate<'_>], node: &Node) -> Vec<Backend> {
    let ready = candidates.iter().filter(|c| c.endpoint.ready).map(|c| c.endpoint);
    let mode = TopologyMode::of(ready, node);
    let list = backends(candidates, |c| c.endpoint.ready && mode.allows(c.endpoint, node));
    if list.is_empty() { backends(candidates, |c| c.draining()) } else { list }
}

fn local_list(candidates: &[Candidate<'_>]) -> Vec<Backend> {
    let list = backends(candidates, |c| c.backend.local && c.endpoint.ready);
    if list.is_empty() { backends(candidates, |c| c.backend.local && c.draining()) } else { list }
}

fn backends(candidates: &[Candidate<'_>], keep: impl Fn(&Candidate<'_>) -> bool) -> Vec<Backend> {
    candidates.iter().filter(|c| keep(c)).map(|c| c.backend).collect()
}

/// By the text `ip:port`, as kube-proxy orders endpoints (so 10.2.2.22:22 comes before 10.2.2.2:22).
fn sort<T>(list: &mut [T], key: impl Fn(&T) -> SocketAddr) {
    if list.len() > 1 {
        list.sort_by_cached_key(|item| key(item).to_string());
    }
}

#[cfg(test)]
mod tests;
