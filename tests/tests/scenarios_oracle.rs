//! Runs the scenarios through the oracle: manifests → model → `lookup`, no kernel involved.
//!
//! Rows about what is remembered (affinity, open connections, conntrack) have no meaning here and are counted as skipped,
//! but the set of endpoints that they allow is compared.

use anyhow::{Context, Result, bail};
use clap::Parser;
use libtest_mimic::{Arguments, Failed, Trial};
use proxy::agent;
use proxy::config::{Config, Flags};
use proxy::model::lookup::Choice;
use proxy::model::{IpFamily, Node, Outcome, Packet, Protocol, ServiceTable, Settings, lookup};
use proxy::source::manifest::{self, FileText};
use proxy_tests::engine::Objects;
use proxy_tests::probe::Proto;
use proxy_tests::runner;
use proxy_tests::scenario::{self, Action, Expect, Scenario, Step, Target};
use proxy_tests::world::NODE_NAME;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    flags: Flags,
}

fn main() -> Result<()> {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for scenario in scenario::load_all()? {
        let scenario = Arc::new(scenario);
        for config in 0..scenario.configs.len() {
            let scenario = scenario.clone();
            trials.push(Trial::test(runner::test_name(&scenario, config), move || {
                if let Some(why) = scenario.not.get("oracle").or(scenario.not.get("tandem")) {
                    println!("SKIP {why}");
                    return Ok(());
                }
                run(&scenario, config).map_err(|e| Failed::from(format!("{e:#}")))
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit()
}

fn run(scenario: &Scenario, config: usize) -> Result<()> {
    let arguments = std::iter::once("tandem").chain(scenario.configs[config].1.iter().map(String::as_str));
    let flags = CommandLine::try_parse_from(arguments).context("flags")?.flags;
    let settings = Config::load(&flags, NODE_NAME)?;
    let mut objects = Objects::default();
    scenario.common_objects().into_iter().for_each(|o| objects.put(o));
    let mut failures = Vec::new();
    // Endpoints that `remove` and `terminate` would pick depend on chance: from there on only the kernel can tell.
    for step in &scenario.steps {
        match step {
            Step::Apply(new) => new.iter().for_each(|o| objects.put(o.clone())),
            Step::Delete(kind, namespace, name) => objects.remove(&(kind.clone(), namespace.clone(), name.clone()))?,
            Step::Remove(_) | Step::Terminate(_) => break,
            Step::Flows(_) => {}
            Step::Probes(rows) => {
                let (table, families) = node(&objects, scenario, &settings)?;
                for row in rows {
                    if row.not.contains("oracle") || row.not.contains("tandem") {
                        continue;
                    }
                    if let Err(e) = check(&table, &families, scenario, row, config) {
                        failures.push(format!("{}: {e:#}", row.id));
                    }
                }
            }
        }
    }
    if failures.is_empty() { Ok(()) } else { bail!("the oracle differs:\n  {}", failures.join("\n  ")) }
}

/// The table after all manifests, and the settings of both families.
fn node(objects: &Objects, scenario: &Scenario, config: &Config) -> Result<(ServiceTable, [Settings; 2])> {
    let file = FileText { name: "objects.yaml".into(), text: Ok(objects.manifests()?) };
    let loaded = manifest::load(vec![file], NODE_NAME, Node::default());
    if let Some(problem) = loaded.problems.iter().find(|p| p.error) {
        bail!("{} {}: {}", problem.location, problem.field, problem.message);
    }
    let mut table = ServiceTable::new();
    loaded.deltas.into_iter().for_each(|delta| table.apply(delta));
    let node = table.node().clone();
    let local: Vec<IpAddr> = scenario.world.local_addresses().into_iter().collect();
    let settings = IpFamily::ALL.map(|family| agent::settings::settings(config, &node, &local, family));
    Ok((table, settings))
}

fn check(
    table: &ServiceTable,
    families: &[Settings; 2],
    scenario: &Scenario,
    row: &scenario::Row,
    config: usize,
) -> Result<()> {
    let Action::Send { from, proto, to, .. } = &row.action else { return Ok(()) };
    let interface = scenario.world.interface(&from.party);
    let packet = Packet {
        interface: interface.as_deref(),
        source: from.address,
        destination: to.ip(),
        protocol: match proto {
            Proto::Tcp => Some(Protocol::Tcp),
            Proto::Udp => Some(Protocol::Udp),
            Proto::Sctp => Some(Protocol::Sctp),
            Proto::Icmp => None,
        },
        port: to.port(),
    };
    let outcome = lookup(table, &families[usize::from(to.is_ipv6())], &packet);
    let local = scenario.world.local_addresses();
    let same = match (&row.expect[config], &outcome) {
        (Expect::Reject, Outcome::Reject) | (Expect::Drop, Outcome::Drop) | (Expect::Untouched, Outcome::NotOurs) => {
            true
        }
        (Expect::Forward(targets) | Expect::Sticky { targets, .. }, Outcome::Forward { choices, .. }) => {
            // A packet to an address of the node itself has no postrouting hook: what the oracle says of it is not seen.
            let seen = |c: &Choice| c.masquerade && !local.contains(&c.backend.address);
            let choices: BTreeSet<Target> = choices
                .iter()
                .map(|c| Target { address: SocketAddr::new(c.backend.address, c.backend.port), masquerade: seen(c) })
                .collect();
            *targets == choices
        }
        _ => false,
    };
    if same { Ok(()) } else { bail!("expected {:?}, the oracle says {outcome:?}", row.expect[config]) }
}
