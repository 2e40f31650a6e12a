//! Changes of a cluster over time.

#![forbid(unsafe_code)]

use super::chance::Chance;
use super::objects::{Cluster, Endpoint, Kind, Service, Slice, SlicePorts};
use super::places::Place;
use super::random::{self, Hints, Mood, ZONES};
use std::collections::BTreeSet;

/// Services at most.
const MOST: usize = 40;

/// Changes `cluster` a few times and says how.
pub(super) fn evolve(cluster: &mut Cluster, chance: &mut Chance) -> Vec<String> {
    let mut what = Vec::new();
    if cluster.zone.is_none() && !chance.one_in(4) {
        cluster.zone = Some(ZONES[0]);
        what.push(format!("the node is in {}", ZONES[0]));
    }
    let wanted = what.len() + chance.between(4, 12);
    // Some draws change nothing: they find nothing of their kind.
    for _ in 0..200 {
        if what.len() == wanted {
            break;
        }
        what.extend(change(cluster, chance));
    }
    cluster.untangle();
    what
}

fn change(cluster: &mut Cluster, chance: &mut Chance) -> Option<String> {
    match chance.below(30) {
        0 | 1 if cluster.services.len() < MOST => {
            random::add(cluster, chance);
            return cluster.services.last().map(|s| format!("{} is new", s.object_name()));
        }
        2 | 3 if cluster.services.len() > 16 => {
            let index = chance.below(cluster.services.len());
            if cluster.services[index].pinned {
                return None;
            }
            let gone = cluster.services.remove(index);
            return Some(format!("{} is gone", gone.object_name()));
        }
        4 => {
            let zone = *chance.pick(&[None, Some(ZONES[0]), Some(ZONES[1])]);
            if zone == cluster.zone {
                return None;
            }
            cluster.zone = zone;
            return Some(zone.map_or("the node has no zone".into(), |zone| format!("the node is in {zone}")));
        }
        _ => {}
    }
    let mut next_node_port = cluster.next_node_port;
    let count = cluster.services.len();
    let service = cluster.services.get_mut(chance.below(count)).filter(|s| !s.pinned)?;
    let how = if chance.one_in(2) {
        change_service(service, &mut next_node_port, chance)
    } else {
        change_endpoints(service, chance)
    };
    cluster.next_node_port = next_node_port;
    how
}

fn change_service(service: &mut Service, next_node_port: &mut u16, chance: &mut Chance) -> Option<String> {
    let name = service.object_name();
    if service.kind == Kind::ExternalName {
        return None;
    }
    let how = match chance.below(12) {
        0 | 1 if service.has_cluster_ip() => {
            let kind = *chance.pick(&[Kind::ClusterIp, Kind::NodePort, Kind::LoadBalancer]);
            if kind == service.kind {
                return None;
            }
            service.kind = kind;
            format!("turns {kind:?}")
        }
        2 => {
            let before = service.ports.len();
            random::add_port(service, next_node_port, chance);
            if service.ports.len() == before {
                return None;
            }
            "has one more port".into()
        }
        3 if service.ports.len() > 1 => {
            service.ports.remove(chance.below(service.ports.len()));
            "has one port less".into()
        }
        4 => {
            let index = chance.below(service.ports.len());
            let (port, protocol) = (service.ports[index].port + 1000, service.ports[index].protocol);
            if service.ports.iter().any(|p| (p.port, p.protocol) == (port, protocol)) || port > 10_000 {
                return None;
            }
            service.ports[index].port = port;
            // The API server lets two ports of a new NodePort Service share a NodePort only if their numbers are the same.
            let node_port = service.ports[index].node_port;
            if service.ports.iter().filter(|p| p.node_port == node_port).count() > 1 {
                service.ports[index].node_port = *next_node_port;
                *next_node_port += 1;
            }
            format!("serves at {port}")
        }
        5 => {
            service.internal_local = !service.internal_local;
            format!("has the internal policy Local: {}", service.internal_local)
        }
        6 => {
            service.external_local = !service.external_local;
            format!("has the external policy Local: {}", service.external_local)
        }
        7 => {
            service.ranges = if chance.one_in(3) { Vec::new() } else { random::ranges(chance) };
            format!("has the source ranges {:?}", service.ranges)
        }
        8 => {
            service.affinity = match service.affinity {
                Some(_) if chance.one_in(2) => None,
                _ => Some(random::timeout(chance)),
            };
            format!("has the affinity {:?}", service.affinity)
        }
        9 => {
            service.external_ips = random::external_ips(service.number, chance);
            "has other external IPs".into()
        }
        10 => {
            service.ingress = random::ingress(service.number, chance);
            "has other load balancer addresses".into()
        }
        11 if chance.one_in(2) => {
            service.other_proxy = !service.other_proxy;
            format!("belongs to another proxy: {}", service.other_proxy)
        }
        _ => return None,
    };
    Some(format!("{name} {how}"))
}

fn change_endpoints(service: &mut Service, chance: &mut Chance) -> Option<String> {
    let name = service.object_name();
    if service.kind == Kind::ExternalName || service.slices.is_empty() {
        return None;
    }
    let places: Vec<Place> = service
        .slices
        .iter()
        .flat_map(|s| &s.endpoints)
        .map(|e| e.place)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    let some = |chance: &mut Chance| {
        let n = chance.between(1, places.len().clamp(1, 4));
        chance.some(&places, n)
    };
    let draw = chance.below(10);
    if places.is_empty() && (2..=6).contains(&draw) {
        return None;
    }
    let how = match draw {
        0 | 1 => {
            let new: Vec<Place> = (0..chance.between(1, 3))
                .map(|_| match chance.below(3) {
                    0 => Place::Pod(u16::try_from(chance.below(4)).expect("small")),
                    1 => Place::RemotePod(u16::try_from(chance.below(24)).expect("small")),
                    _ => *chance.pick(&[Place::Host, Place::RemoteHost(0), Place::RemoteHost(1)]),
                })
                .filter(|place| !places.contains(place))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect();
            if new.is_empty() {
                return None;
            }
            let new: Vec<Endpoint> =
                new.into_iter().map(|place| random::endpoint(place, Mood::Ready, Hints::None, chance)).collect();
            let count = new.len();
            for family in service.families.clone() {
                let slice = service.slices.iter_mut().find(|s| is_own(s) && s.family == Some(family))?;
                slice.endpoints.extend(new.clone());
            }
            format!("has {count} more endpoints")
        }
        2 | 3 => {
            let gone = some(chance);
            each(service, |all| all.retain(|e| !gone.contains(&e.place)));
            format!("loses {} endpoints", gone.len())
        }
        4 | 5 => {
            let ending = some(chance);
            let mood = *chance.pick(&[Mood::Draining, Mood::NotReady]);
            set(service, &ending, mood, chance);
            format!("has {} endpoints that end", ending.len())
        }
        6 => {
            let back = some(chance);
            set(service, &back, Mood::Ready, chance);
            format!("has {} endpoints that are ready", back.len())
        }
        7 => {
            let hints = Hints::any(chance);
            random::align(service, hints, chance);
            format!("has hints: {hints:?}")
        }
        8 => {
            // The second half of a slice moves into a slice of its own.
            let index = (0..service.slices.len())
                .find(|i| is_own(&service.slices[*i]) && service.slices[*i].endpoints.len() > 1)?;
            let half = service.slices[index].endpoints.len() / 2;
            let endpoints = service.slices[index].endpoints.split_off(half);
            let number = service.next_slice;
            service.next_slice += 1;
            let moved = Slice { number, endpoints, ..service.slices[index].clone() };
            service.slices.push(moved);
            "has a slice that was split".into()
        }
        _ => {
            // The last of two slices of a kind goes into the first.
            let (into, from) = (0..service.slices.len()).rev().find_map(|from| {
                let kind = |s: &Slice| (s.family, s.ports, s.headless_label);
                let (earlier, rest) = service.slices.split_at(from);
                let into = earlier.iter().position(|s| is_own(s) && kind(s) == kind(&rest[0]))?;
                Some((into, from))
            })?;
            let slice = service.slices.remove(from);
            service.slices[into].endpoints.extend(slice.endpoints);
            "has slices that were merged".into()
        }
    };
    Some(format!("{name} {how}"))
}

/// A slice that may serve the Service.
fn is_own(slice: &Slice) -> bool {
    matches!(slice.ports, SlicePorts::Plus(_)) && slice.family.is_some() && !slice.headless_label
}

fn each(service: &mut Service, change: impl Fn(&mut Vec<Endpoint>)) {
    service.slices.iter_mut().for_each(|slice| change(&mut slice.endpoints));
}

/// Sets the conditions of these endpoints, the same in all slices.
fn set(service: &mut Service, places: &[Place], mood: Mood, chance: &mut Chance) {
    for place in places {
        let [ready, serving, terminating] = mood.conditions(chance);
        for endpoint in service.slices.iter_mut().flat_map(|s| &mut s.endpoints).filter(|e| e.place == *place) {
            *endpoint = Endpoint { ready, serving, terminating, ..endpoint.clone() };
        }
    }
}
