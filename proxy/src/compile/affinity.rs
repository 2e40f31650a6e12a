//! Chains and sets of service ports with ClientIP affinity: one dynamic set per endpoint remembers its clients.
//!
//! Names and meaning are kube-proxy v1.37's. The random choice is a list of rules, not an anonymous map: a packet sees the
//! rules of one generation throughout, but the elements of whichever is current.

use super::base::goto;
use super::names::{self, Prefix};
use super::service::{List, PortPlan, Route};
use crate::model::Settings;
use crate::nft::expr::{Expr, Load};
use crate::nft::object::{Chain, Field, Name, Rule, Set};
use std::collections::BTreeMap;

/// The objects of one port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Endpoints' chains; referenced by those in `chains`.
    pub endpoint_chains: BTreeMap<Name, Chain>,
    /// Chains that balance.
    pub chains: BTreeMap<Name, Chain>,
    /// Affinity sets; referenced by the chains.
    pub sets: BTreeMap<Name, Set>,
}

/// The name of the chain to which a frontend goes.
#[must_use]
pub fn chain(port: &PortPlan, list: List, masquerade: bool) -> Name {
    let prefix = match (list, masquerade) {
        (List::Cluster, false) => Prefix::Service,
        (List::Cluster, true) => Prefix::External,
        (List::Local, _) => Prefix::Local,
    };
    names::prefixed(prefix, &names::service_port(&port.name))
}

fn rule(exprs: impl Into<Vec<Expr>>) -> Rule {
    Rule { exprs: exprs.into(), comment: None }
}

fn set(timeout_s: u32, settings: &Settings) -> Set {
    Set {
        key: vec![Field::Address],
        data: None,
        interval: false,
        dynamic_timeout_ms: Some(u64::from(timeout_s) * 1000),
        size: Some(settings.affinity_clients_max),
        comment: None,
        delete_late: false,
    }
}

/// First the endpoint that remembers the client, in the order of the list; else any, each as likely as the others.
fn balance(list: &[(Name, Name)]) -> Vec<Rule> {
    let remembered = list.iter().map(|(chain, set)| {
        rule([Expr::InSet { loads: vec![Load::SourceAddress], set: set.clone(), negate: false }, goto(chain.clone())])
    });
    let chosen = (1..=list.len() as u32).rev().zip(list).map(|(left, (chain, _))| {
        rule(if left == 1 { vec![goto(chain.clone())] } else { vec![Expr::OneIn(left), goto(chain.clone())] })
    });
    remembered.chain(chosen).collect()
}

/// The objects that a port needs; none without affinity.
#[must_use]
pub fn objects(port: &PortPlan, settings: &Settings) -> Objects {
    let mut objects = Objects::default();
    let Some(timeout_s) = port.affinity_timeout_s else { return objects };
    let mut balanced = |list: List| -> Vec<(Name, Name)> {
        // Their lists have no slots, so they stay in the order of the view: which endpoint wins, if several remember a
        // client, does not depend on history.
        let backends = port.list(list).live();
        let mut names = Vec::with_capacity(backends.len());
        for backend in backends {
            let name = names::endpoint(&port.name, backend.address, backend.port);
            let (chain, affinity) =
                (names::prefixed(Prefix::Endpoint, &name), names::prefixed(Prefix::Affinity, &name));
            // The dnat is a rule of its own: a set that is full ends the rule of the update, not the translation.
            let rules = vec![
                rule([Expr::UpdateSet(affinity.clone())]),
                rule([Expr::L4Proto(port.name.protocol), Expr::Dnat { address: backend.address, port: backend.port }]),
            ];
            objects.endpoint_chains.insert(chain.clone(), Chain { rules, ..Chain::default() });
            objects.sets.insert(affinity.clone(), set(timeout_s, settings));
            names.push((chain, affinity));
        }
        names
    };
    let routes = port.routes();
    let used = |wanted: List| {
        routes.iter().any(|(_, _, route)| matches!(route, Route::Balance { list, .. } if *list == wanted))
    };
    let mut chains = BTreeMap::new();
    for list in [List::Cluster, List::Local] {
        if used(list) {
            let rules = balance(&balanced(list));
            chains.insert(chain(port, list, false), Chain { rules, ..Chain::default() });
        }
    }
    if routes.iter().any(|(_, _, route)| matches!(route, Route::Balance { masquerade: true, .. })) {
        let mark =
            Rule { exprs: vec![Expr::MarkSet(settings.masquerade_mark)], comment: Some("masquerade".to_owned()) };
        let rules = vec![mark, rule([goto(chain(port, List::Cluster, false))])];
        chains.insert(chain(port, List::Cluster, true), Chain { rules, ..Chain::default() });
    }
    objects.chains = chains;
    objects
}
