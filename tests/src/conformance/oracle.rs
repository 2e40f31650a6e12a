//! What the oracle of the model says of probes.

#![forbid(unsafe_code)]

use super::{Expected, Probe};
use crate::engine::Objects;
use crate::probe::Proto;
use crate::world::{NODE_NAME, WorldSpec};
use clap::Parser;
use proxy::agent::settings::settings;
use proxy::config::{Config, Flags};
use proxy::model::{IpFamily, Node, Oracle, Outcome, Packet, Protocol, ServiceTable, Settings};
use proxy::source::manifest::{self, FileText};
use std::collections::BTreeSet;
use std::net::IpAddr;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    flags: Flags,
}

/// A state as the model sees it.
pub(super) struct View {
    table: ServiceTable,
    families: [Settings; 2],
    local: BTreeSet<IpAddr>,
}

impl View {
    /// Reads the objects of a state.
    ///
    /// # Panics
    /// The state or the flags are not valid, which is a mistake of whoever made them.
    pub(super) fn new(objects: &Objects, flags: &[String], world: &WorldSpec) -> Self {
        let arguments = std::iter::once("tandem").chain(flags.iter().map(String::as_str));
        let flags = CommandLine::try_parse_from(arguments).unwrap_or_else(|e| panic!("flags {flags:?}: {e}")).flags;
        let config = Config::load(&flags, NODE_NAME).unwrap_or_else(|e| panic!("flags {flags:?}: {e}"));
        let text = objects.manifests().expect("JSON objects are written without error");
        let file = FileText { name: "objects.yaml".into(), text: Ok(text) };
        let loaded = manifest::load(vec![file], NODE_NAME, Node::default());
        if let Some(problem) = loaded.problems.iter().find(|p| p.error) {
            panic!("{} {}: {}", problem.location, problem.field, problem.message);
        }
        let mut table = ServiceTable::new();
        loaded.deltas.into_iter().for_each(|delta| table.apply(delta));
        let local = world.local_addresses();
        let host: Vec<IpAddr> = local.iter().copied().collect();
        let families = IpFamily::ALL.map(|family| settings(&config, table.node(), &host, family));
        Self { table, families, local }
    }

    /// Fills in what the oracle expects.
    pub(super) fn expect(&self, probes: &mut [Probe], world: &WorldSpec) {
        let oracles = self.families.each_ref().map(|settings| Oracle::new(&self.table, settings));
        for probe in probes {
            let interface = world.interface(&probe.party);
            let packet = Packet {
                interface: interface.as_deref(),
                source: probe.source,
                destination: probe.to.ip(),
                protocol: protocol(probe.proto),
                port: probe.to.port(),
            };
            probe.expected = match oracles[usize::from(probe.to.is_ipv6())].lookup(&packet) {
                Outcome::Forward { choices, .. } => {
                    // What is delivered to the node itself does not show that it is masqueraded.
                    let seen = |masquerade: bool, ip: &IpAddr| masquerade && !self.local.contains(ip);
                    Expected::Served {
                        endpoints: choices.len(),
                        masqueraded: choices.iter().any(|c| seen(c.masquerade, &c.backend.address)),
                    }
                }
                Outcome::Reject => Expected::Rejected,
                Outcome::Drop => Expected::Dropped,
                Outcome::NotOurs => Expected::Untouched,
            };
        }
    }
}

pub(super) fn protocol(proto: Proto) -> Option<Protocol> {
    match proto {
        Proto::Tcp => Some(Protocol::Tcp),
        Proto::Udp => Some(Protocol::Udp),
        Proto::Sctp => Some(Protocol::Sctp),
        Proto::Icmp => None,
    }
}
