//! Ways to break Tandem's rules from outside, one kind each, that a comparison must find out.
//!
//! They are made in the kernel with the `nft` tool while the agent is stopped, so that the product needs no test code and
//! cannot repair them at once.

use crate::conformance::live_table::{LiveElement, LiveTable};
use crate::world::WorldSpec;
use std::collections::BTreeMap;

/// Which probes must show that a kind of rule is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shows {
    /// Any.
    Any,
    /// Those to an address of the node.
    NodePort,
    /// Those to a ServiceCIDR address.
    ClusterIp,
    /// Those to other than ClusterIPs: external addresses, NodePorts.
    External,
    /// IPv6 ones.
    V6,
    /// Those sent by the node itself.
    FromNode,
}

/// A way to break Tandem.
#[derive(Clone, Copy)]
pub struct Mutation {
    /// Name on the command line.
    pub name: &'static str,
    /// What is broken, in words.
    pub what: &'static str,
    /// Where it must show.
    pub shows: Shows,
    /// How it is done.
    pub breaks: Breaks,
}

/// What is broken.
#[derive(Clone, Copy)]
pub enum Breaks {
    /// A table, by commands for `nft`.
    Rules(fn(&LiveTable, &WorldSpec) -> Vec<String>),
    /// The clean-up of UDP connections after a change: what was deleted from conntrack is put back.
    CleanUp,
}

impl Mutation {
    /// What to tell `nft`, one command a line; empty = this table has nothing of the kind.
    #[must_use]
    pub fn commands(&self, table: &LiveTable, world: &WorldSpec) -> String {
        match self.breaks {
            Breaks::Rules(commands) => commands(table, world).join("\n"),
            Breaks::CleanUp => String::new(),
        }
    }
}

/// Every mutation.
pub const ALL: &[Mutation] = &[
    Mutation {
        name: "no-masquerade-mark",
        what: "nothing is marked for masquerade",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            let marks = table.rules().filter(|r| r.has("mangle") && r.mentions("\"|\""));
            marks.map(|r| table.delete_rule(r)).collect()
        }),
    },
    Mutation {
        name: "no-cluster-ip-masquerade",
        what: "traffic from outside the cluster to ClusterIPs is not masqueraded",
        shows: Shows::ClusterIp,
        breaks: Breaks::Rules(|table, _| {
            let mark = table.rules().filter(|r| r.chain == "services" && r.mentions("@cluster-ips"));
            mark.map(|r| table.delete_rule(r)).collect()
        }),
    },
    Mutation {
        name: "masquerade-all",
        what: "all that is translated is masqueraded",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            vec![format!("insert rule {} tandem masquerading ct status dnat goto masquerade-source", table.family)]
        }),
    },
    Mutation {
        name: "no-hairpin",
        what: "an endpoint that reaches itself is not masqueraded",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| non_empty_set(table, "hairpin-connections")),
    },
    Mutation {
        name: "no-endpoint-check",
        what: "external addresses of services without endpoints are not refused",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| non_empty_map(table, "no-endpoint-services")),
    },
    Mutation {
        name: "no-nodeport-endpoint-check",
        what: "NodePorts without endpoints are not refused",
        shows: Shows::NodePort,
        breaks: Breaks::Rules(|table, _| non_empty_map(table, "no-endpoint-nodeports")),
    },
    Mutation {
        name: "drop-for-reject",
        what: "what should be rejected is dropped",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            vec![table.flush_chain("reject-chain"), format!("add rule {} tandem reject-chain drop", table.family)]
        }),
    },
    Mutation {
        name: "reject-for-drop",
        what: "local policies without a local endpoint reject",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            ["no-endpoint-services", "no-endpoint-nodeports"]
                .into_iter()
                .flat_map(|map| {
                    let drops = table.map(map).into_iter().filter(|e| e.data == "drop");
                    drops.map(|e| table.point(map, &e, Some("goto reject-chain"))).collect::<Vec<_>>()
                })
                .collect()
        }),
    },
    Mutation {
        name: "no-cluster-ip-reject",
        what: "ports of ClusterIPs that nobody serves are not rejected",
        shows: Shows::ClusterIp,
        breaks: Breaks::Rules(|table, _| {
            let reject = table.rules().filter(|r| r.chain == "cluster-ips-check" && r.has("reject"));
            reject.map(|r| table.delete_rule(r)).collect()
        }),
    },
    Mutation {
        name: "no-service-cidr-drop",
        what: "unallocated ClusterIPs are not dropped",
        shows: Shows::ClusterIp,
        breaks: Breaks::Rules(|table, _| non_empty_set(table, "service-cidrs")),
    },
    Mutation {
        name: "no-firewall",
        what: "loadBalancerSourceRanges are not applied",
        shows: Shows::External,
        breaks: Breaks::Rules(|table, _| non_empty_map(table, "firewall-ips")),
    },
    Mutation {
        name: "strict-firewall",
        what: "loadBalancerSourceRanges permit nobody",
        shows: Shows::External,
        breaks: Breaks::Rules(|table, _| non_empty_set(table, "firewall-sources")),
    },
    Mutation {
        name: "wrong-endpoint",
        what: "one slot of each list leads to an endpoint of another one",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            let slots = table.map("slots");
            let firsts: Vec<&LiveElement> = first_slots(&slots).collect();
            let other = |e: &LiveElement| firsts.iter().find(|o| !own(&slots, e).contains(&o.data.as_str()));
            firsts.iter().filter_map(|e| Some(table.point("slots", e, Some(&other(e)?.data)))).collect()
        }),
    },
    Mutation {
        name: "unused-endpoint",
        what: "one endpoint of each list is never chosen",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            let slots = table.map("slots");
            first_slots(&slots)
                .filter_map(|e| {
                    let another = own(&slots, e).into_iter().find(|data| *data != e.data)?;
                    Some(table.point("slots", e, Some(another)))
                })
                .collect()
        }),
    },
    Mutation {
        name: "missing-slot",
        what: "one slot of each list is not there",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            let slots = table.map("slots");
            first_slots(&slots).map(|e| table.point("slots", e, None)).collect()
        }),
    },
    Mutation {
        name: "no-nodeports",
        what: "NodePorts are not served",
        shows: Shows::NodePort,
        breaks: Breaks::Rules(|table, _| non_empty_map(table, "service-nodeports")),
    },
    Mutation {
        name: "nodeports-everywhere",
        what: "NodePorts are served on addresses that --nodeport-addresses leaves out",
        shows: Shows::NodePort,
        breaks: Breaks::Rules(|table, world| {
            if !table.sets().any(|set| set == "nodeport-ips") {
                return Vec::new();
            }
            let ours = |a: &&std::net::IpAddr| a.is_ipv4() == (table.family == "ip") && !a.is_loopback();
            let all: Vec<String> = world.local_addresses().iter().filter(ours).map(ToString::to_string).collect();
            vec![format!("add element {} tandem nodeport-ips {{ {} }}", table.family, all.join(", "))]
        }),
    },
    Mutation {
        name: "local-as-cluster",
        what: "external policy Local uses all endpoints",
        shows: Shows::External,
        breaks: Breaks::Rules(|table, _| {
            [("local-ips", "short-circuit-ips"), ("local-nodeports", "short-circuit-nodeports")]
                .into_iter()
                .flat_map(|(local, cluster)| {
                    let targets: BTreeMap<_, _> = table.map(cluster).into_iter().map(|e| (e.key, e.data)).collect();
                    let elements = table.map(local).into_iter();
                    elements
                        .filter_map(|e| Some(table.point(local, &e, Some(targets.get(&e.key)?))))
                        .collect::<Vec<_>>()
                })
                .collect()
        }),
    },
    Mutation {
        name: "no-short-circuit",
        what: "external policy Local holds for this node and its pods, too",
        shows: Shows::External,
        breaks: Breaks::Rules(|table, _| {
            let rules = table.rules().filter(|r| r.mentions("@short-circuit-"));
            rules.map(|r| table.delete_rule(r)).collect()
        }),
    },
    Mutation {
        name: "no-affinity",
        what: "ClientIP affinity is not remembered",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            let remember = table.rules().filter(|r| r.has("set") && r.mentions("@affinity-"));
            let mut all: Vec<String> = remember.map(|r| table.delete_rule(r)).collect();
            all.extend(table.sets().filter(|s| s.starts_with("affinity-")).map(|s| table.flush_set(s)));
            all
        }),
    },
    Mutation {
        name: "no-udp",
        what: "UDP service ports are not served",
        shows: Shows::Any,
        breaks: Breaks::Rules(|table, _| {
            ["service-ips", "service-nodeports"]
                .into_iter()
                .flat_map(|map| {
                    let udp = table.map(map).into_iter().filter(|e| e.key.iter().any(|part| part == "udp"));
                    udp.map(|e| table.point(map, &e, None)).collect::<Vec<_>>()
                })
                .collect()
        }),
    },
    Mutation {
        name: "no-output",
        what: "processes of the node are not served",
        shows: Shows::FromNode,
        breaks: Breaks::Rules(|table, _| vec![table.flush_chain("nat-output")]),
    },
    Mutation {
        name: "no-ipv6",
        what: "the table of IPv6 serves nothing",
        shows: Shows::V6,
        breaks: Breaks::Rules(
            |table, _| if table.family == "ip6" { vec![table.flush_chain("services")] } else { Vec::new() },
        ),
    },
    Mutation {
        name: "stale-udp",
        what: "UDP connections to endpoints that are gone are not ended",
        shows: Shows::Any,
        breaks: Breaks::CleanUp,
    },
];

/// The mutation called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static Mutation> {
    ALL.iter().find(|m| m.name == name)
}

fn non_empty_set(table: &LiveTable, set: &str) -> Vec<String> {
    if table.set_len(set) == 0 { Vec::new() } else { vec![table.flush_set(set)] }
}

fn non_empty_map(table: &LiveTable, map: &str) -> Vec<String> {
    if table.map(map).is_empty() { Vec::new() } else { vec![table.flush_map(map)] }
}

/// The first slot of each list.
fn first_slots(slots: &[LiveElement]) -> impl Iterator<Item = &LiveElement> {
    slots.iter().filter(|e| e.key.last().is_some_and(|n| n == "0"))
}

/// What the slots of the list to which `element` belongs lead to.
fn own<'a>(slots: &'a [LiveElement], element: &LiveElement) -> Vec<&'a str> {
    let list = |e: &LiveElement| e.key[..e.key.len().saturating_sub(1)].to_vec();
    let wanted = list(element);
    slots.iter().filter(|e| list(e) == wanted).map(|e| e.data.as_str()).collect()
}
