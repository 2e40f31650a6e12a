//! Which flows must go. Pure.
#![forbid(unsafe_code)]

use crate::model::{NodePortAddresses, ObjectName, ServicePortName, ServicePortView, Settings};
use proxy_common::{IpFamily, Protocol};
use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// One direction's source or destination: address and port.
pub type Side = SocketAddr;

/// `IPS_DST_NAT`: the destination is translated.
pub const DST_NAT: u32 = 1 << 5;

/// A conntrack entry, as far as it matters here. Ports are 0 for protocols without them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// IP protocol number.
    pub protocol: u8,
    /// Who sent the first packet.
    pub original_source: Side,
    /// Where the first packet was sent to.
    pub original_destination: Side,
    /// Who is expected to answer; differs from `original_destination` if that was translated.
    pub reply_source: Side,
    /// Where the answer is sent to; differs from `original_source` if that was translated.
    pub reply_destination: Side,
    /// `IPS_…` bits of uapi/linux/netfilter/nf_conntrack_common.h.
    pub status: u32,
}

impl Flow {
    /// Whether the destination was rewritten.
    #[must_use]
    pub fn translated(&self) -> bool {
        self.status & DST_NAT != 0 || self.reply_source != self.original_destination
    }
}

/// Something that clients send to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Frontend {
    /// ClusterIP, load balancer address or external IP, with its port.
    Address(IpAddr, u16),
    /// A NodePort, on every address of the family that accepts NodePorts.
    NodePort(IpFamily, u16),
}

/// Counts changes of [`Frontends`]; says up to where a reconcile is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Revision(u64);

/// Who serves a frontend, and with which endpoints. Two services may claim one: as in the rules, a ClusterIP belongs to the service
/// that has it, and among equals the smaller name wins.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Claim {
    /// Not the service's own ClusterIP.
    external: bool,
    name: ServicePortName,
    serving: Arc<BTreeSet<SocketAddr>>,
}

/// The UDP frontends of this node and the endpoints that flows to them may have. Kept up to date service by service, so a
/// change costs what it changes. Both families.
#[derive(Clone, Debug, Default)]
pub struct Frontends {
    /// Never an empty list; ClusterIP first, then by name.
    claims: HashMap<Frontend, Vec<Claim>>,
    /// What each service claims.
    services: HashMap<(ObjectName, IpFamily), Vec<(Frontend, ServicePortName)>>,
    /// Frontends that nobody serves any more and whose flows have not been looked at since.
    gone: HashMap<Frontend, Revision>,
    /// Local addresses that accept NodePorts.
    node_port_addresses: BTreeSet<IpAddr>,
    revision: Revision,
    reconciled: Revision,
}

impl Frontends {
    /// No frontends; nothing to reconcile.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// States all ports of a service in one family, as [`crate::model::resolve()`] returns them; empty = it is gone there.
    /// Ports of other protocols than UDP are left out. Stating the same again is no change.
    pub fn set_service(&mut self, service: &ObjectName, family: IpFamily, views: &[ServicePortView]) {
        let key = (service.clone(), family);
        let mut wanted = Vec::new();
        for view in views.iter().filter(|view| view.name.protocol == Protocol::Udp) {
            let serving = Arc::new(view.serving.iter().map(|b| SocketAddr::new(b.address, b.port)).collect());
            let claim = Claim { external: true, name: view.name.clone(), serving };
            let own = Claim { external: false, ..claim.clone() };
            wanted.push((Frontend::Address(view.cluster_ip, view.port), own));
            let addresses = view.load_balancer_ips.iter().chain(&view.external_ips);
            wanted.extend(addresses.map(|ip| (Frontend::Address(*ip, view.port), claim.clone())));
            if view.node_port != 0 {
                wanted.push((Frontend::NodePort(family, view.node_port), claim));
            }
        }
        let before = self.services.remove(&key).unwrap_or_default();
        let same = before.len() == wanted.len()
            && before.iter().zip(&wanted).all(|((frontend, name), (wanted, claim))| {
                (frontend, name) == (wanted, &claim.name)
                    && self.claims.get(frontend).is_some_and(|list| list.contains(claim))
            });
        if same {
            if !before.is_empty() {
                self.services.insert(key, before);
            }
            return;
        }
        self.revision.0 += 1;
        for (frontend, name) in before {
            if let Some(list) = self.claims.get_mut(&frontend) {
                list.retain(|claim| claim.name != name);
                if list.is_empty() {
                    self.claims.remove(&frontend);
                    self.gone.insert(frontend, self.revision);
                }
            }
        }
        let mut now = Vec::with_capacity(wanted.len());
        for (frontend, claim) in wanted {
            self.gone.remove(&frontend);
            now.push((frontend, claim.name.clone()));
            let list = self.claims.entry(frontend).or_default();
            match list.binary_search_by(|other| (other.external, &other.name).cmp(&(claim.external, &claim.name))) {
                Ok(at) => list[at] = claim,
                Err(at) => list.insert(at, claim),
            }
        }
        if !now.is_empty() {
            self.services.insert(key, now);
        }
    }

    /// States which local addresses accept NodePorts in the family of `settings`. Loopback addresses never do.
    pub fn set_node_addresses(&mut self, settings: &Settings) {
        let accepted = |ip: &IpAddr| match &settings.node_port_addresses {
            NodePortAddresses::All => !ip.is_loopback(),
            NodePortAddresses::Only(addresses) => addresses.contains(ip) && !ip.is_loopback(),
        };
        let others = self.node_port_addresses.iter().filter(|ip| IpFamily::of(**ip) != settings.family).copied();
        let local = match &settings.node_port_addresses {
            NodePortAddresses::All => &settings.local_addresses,
            NodePortAddresses::Only(addresses) => addresses,
        };
        let addresses: BTreeSet<_> = others.chain(local.iter().copied().filter(accepted)).collect();
        if addresses != self.node_port_addresses {
            self.node_port_addresses = addresses;
            self.revision.0 += 1;
        }
    }

    /// Says that `frontend` was served before this process knew it: at a start, rules that were found in the kernel and
    /// that no service of today explains. Its translated flows go. Nothing happens if somebody serves it.
    pub fn add_gone(&mut self, frontend: Frontend) {
        if !self.claims.contains_key(&frontend) && !self.gone.contains_key(&frontend) {
            self.revision.0 += 1;
            self.gone.insert(frontend, self.revision);
        }
    }

    /// Whether something changed since the last reconcile that succeeded. A failed one stays due.
    #[must_use]
    pub fn due(&self) -> bool {
        self.revision > self.reconciled
    }

    /// The present state; to be read before a reconcile and given to [`Self::reconciled`] after it.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.revision
    }

    /// Notes that a reconcile of the state at `revision` succeeded.
    pub fn reconciled(&mut self, revision: Revision) {
        self.reconciled = self.reconciled.max(revision);
        self.gone.retain(|_, since| *since > revision);
    }

    /// Whether there is anything that a flow could contradict. If not, a dump is not worth its cost.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.gone.is_empty()
    }

    /// The families in which there is something to look for.
    #[must_use]
    pub fn families(&self) -> Vec<IpFamily> {
        let of = |frontend: &Frontend| match frontend {
            Frontend::Address(ip, _) => IpFamily::of(*ip),
            Frontend::NodePort(family, _) => *family,
        };
        let has = |family| self.claims.keys().chain(self.gone.keys()).any(|frontend| of(frontend) == family);
        IpFamily::ALL.into_iter().filter(|family| has(*family)).collect()
    }

    /// Whether the kernel must forget this flow:
    ///
    /// * it is UDP, and was sent to a frontend, and its answers are not expected from a serving endpoint of that frontend:
    ///   the endpoint is gone, or the flow began before the frontend existed and is not translated at all; or
    /// * it is UDP, was sent to a frontend that is gone, and is translated.
    ///
    /// Ready, terminating, policies, topology and locality play no part, as in kube-proxy v1.37. A NodePort counts only if
    /// the destination is a local address that accepts NodePorts, so a tunnel that uses the same port number elsewhere is
    /// left alone (kube-proxy compares the number alone, and for that reason skips services without endpoints).
    #[must_use]
    pub fn stale(&self, flow: &Flow) -> bool {
        if flow.protocol != Protocol::Udp as u8 {
            return false;
        }
        let (ip, port) = (flow.original_destination.ip(), flow.original_destination.port());
        let address = Frontend::Address(ip, port);
        let node_port = self.node_port_addresses.contains(&ip).then(|| Frontend::NodePort(IpFamily::of(ip), port));
        // An address of a service that is also a node address is looked up first, as in the rules.
        let candidates = [Some(address), node_port];
        let claim = candidates.iter().flatten().find_map(|frontend| self.claims.get(frontend)?.first());
        match claim {
            Some(claim) => !claim.serving.contains(&flow.reply_source),
            None => flow.translated() && candidates.iter().flatten().any(|frontend| self.gone.contains_key(frontend)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
