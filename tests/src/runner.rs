//! Runs a scenario in a world with an engine, and compares what is seen with what the file says.

use crate::engine::{Engine, Objects};
use crate::probe::{Flow, Proto, Seen, once};
use crate::process::eventually;
use crate::scenario::{Action, Expect, FlowRow, Row, Scenario, Step, Target};
use crate::server::Answer;
use crate::world::World;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// How long an answer may take. Machines under test load are slow.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long nothing must come back to call it a drop.
const SILENCE: Duration = Duration::from_millis(300);

struct Run<'a> {
    config: usize,
    world: &'a World,
    /// Endpoint that `sticky NAME` or `open NAME` found.
    names: BTreeMap<String, SocketAddr>,
    flows: HashMap<String, Flow>,
    failures: Vec<String>,
    rows: usize,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Rows that were compared.
    pub rows: usize,
    /// Rows that this engine cannot show.
    pub skipped: Vec<String>,
}

/// Runs configuration number `config` of a scenario.
///
/// # Errors
/// The first error of the machinery, or all rows that differ.
pub fn run(scenario: &Scenario, config: usize, engine: &mut dyn Engine) -> Result<Summary> {
    let world = World::new(scenario.world.clone(), &scenario.ports())?;
    let result = run_in(scenario, config, &world, engine);
    let finish = engine.finish(&world.node).context("after the scenario");
    match (result, finish) {
        (Ok(summary), Ok(())) => Ok(summary),
        (Err(e), _) | (_, Err(e)) => Err(e),
    }
}

fn run_in(scenario: &Scenario, config: usize, world: &World, engine: &mut dyn Engine) -> Result<Summary> {
    let mut run = Run { config, world, names: BTreeMap::new(), flows: HashMap::new(), failures: Vec::new(), rows: 0 };
    let mut objects = Objects::default();
    scenario.common_objects().into_iter().for_each(|o| objects.put(o));
    let mut pending = true;
    let mut watched: Vec<&FlowRow> = Vec::new();
    let mut skipped = Vec::new();
    let mut failed_at_sync = None;
    for step in scenario.steps.iter().map(Some).chain([None]) {
        let settles = matches!(step, None | Some(Step::Probes(_) | Step::Flows(_)));
        if settles && pending {
            if let Err(e) = engine.sync(&world.node, &objects) {
                failed_at_sync = Some(e);
                break;
            }
            pending = false;
            run.check_flows(&std::mem::take(&mut watched));
        }
        match step {
            None => {}
            Some(Step::Apply(new)) => {
                new.iter().for_each(|o| objects.put(o.clone()));
                pending = true;
            }
            Some(Step::Delete(kind, namespace, name)) => {
                objects.remove(&(kind.clone(), namespace.clone(), name.clone()))?;
                pending = true;
            }
            Some(Step::Remove(name)) => {
                run.change_endpoint(name, &mut objects, None)?;
                pending = true;
            }
            Some(Step::Terminate(name)) => {
                run.change_endpoint(
                    name,
                    &mut objects,
                    Some(json!({ "ready": false, "serving": true, "terminating": true })),
                )?;
                pending = true;
            }
            Some(Step::Flows(rows)) if engine.sees_changes() => {
                for row in rows {
                    insert_flow(world, row)?;
                }
                watched = rows.iter().collect();
            }
            Some(Step::Flows(rows)) => skipped.extend(rows.iter().map(|r| r.id.clone())),
            Some(Step::Probes(rows)) => {
                for row in rows {
                    if row.not.contains(engine.name()) {
                        skipped.push(row.id.clone());
                    } else {
                        run.row(row);
                    }
                }
            }
        }
    }
    if let Some(e) = &failed_at_sync {
        run.failures.push(format!("{e:#}"));
    }
    if !run.failures.is_empty() {
        let config = &scenario.configs[config].0;
        let rules = world.node.output(&["nft", "list", "ruleset"]).unwrap_or_default();
        let dump =
            std::env::temp_dir().join(format!("tandem-scenario-{}-{config}-{}.nft", scenario.name, engine.name()));
        let kept = std::fs::write(&dump, rules).is_ok();
        let note = if kept { format!("ruleset at the end: {}\n", dump.display()) } else { String::new() };
        bail!(
            "{} of {} rows of {} ({config}) differ with {}:\n  {}\n{note}{}",
            run.failures.len(),
            run.rows,
            scenario.name,
            engine.name(),
            run.failures.join("\n  "),
            engine.log_tail()
        );
    }
    Ok(Summary { rows: run.rows, skipped })
}

impl Run<'_> {
    fn row(&mut self, row: &Row) {
        self.rows += 1;
        let expect = &row.expect[self.config];
        let result = match &row.action {
            Action::Again(name) => self.again(name, expect),
            Action::Send { open, from, proto, to } => {
                self.send(open.as_deref(), &from.party, from.address, *proto, *to, expect)
            }
        };
        if let Err(e) = result {
            self.failures.push(format!("{}: {e:#}", row.id));
        }
    }

    fn send(
        &mut self,
        open: Option<&str>,
        party: &str,
        source: IpAddr,
        proto: Proto,
        to: SocketAddr,
        expect: &Expect,
    ) -> Result<()> {
        let ns = self.world.netns(party).with_context(|| format!("nobody is called {party}"))?;
        let arrivals = &self.world.arrivals;
        if let Some(name) = open {
            let Expect::Forward(targets) = expect else { bail!("open needs endpoints") };
            let opened = ns.run(|| match proto {
                Proto::Tcp => Flow::tcp(source, to, PATIENCE),
                Proto::Udp => Flow::udp(source, to, PATIENCE, arrivals),
                _ => Err(Seen::Other("only TCP and UDP can be kept open".into())),
            });
            let (flow, answer) = opened.map_err(|seen| anyhow::anyhow!("{seen}"))?;
            self.allowed(&answer, source, targets)?;
            self.names.insert(name.into(), answer.local);
            self.flows.insert(name.into(), flow);
            return Ok(());
        }
        let (targets, tries, timeout) = match expect {
            Expect::Forward(t) => (t.len(), 12 + 60 * t.len(), PATIENCE),
            Expect::Sticky { .. } => (1, 10, PATIENCE),
            Expect::Drop => (1, 1, SILENCE),
            _ => (1, 2, PATIENCE),
        };
        // All must be seen, and after that a few more tries must not show another one.
        let at_least = if targets == 1 { 8 } else { 6 * targets };
        let mut seen_targets = BTreeSet::new();
        for attempt in 0..tries {
            let seen = ns.run(|| once(proto, source, to, timeout, arrivals));
            let answer = match (&seen, expect) {
                (seen, Expect::Reject) => {
                    ensure!(seen.is_port_unreachable(), "expected a reject, saw: {seen}");
                    continue;
                }
                (seen, Expect::Drop) => {
                    ensure!(*seen == Seen::Nothing, "expected a drop, saw: {seen}");
                    continue;
                }
                (Seen::Answer(answer) | Seen::OneWay(answer), _) => answer,
                (seen, _) => bail!("expected an answer, saw: {seen} (try {attempt})"),
            };
            match expect {
                Expect::Untouched => {
                    ensure!(answer.local == to && answer.peer.ip() == source, "expected to be left alone, saw: {seen}");
                }
                Expect::Forward(allowed) => {
                    seen_targets.insert(self.allowed(answer, source, allowed)?);
                    if seen_targets.len() == allowed.len() && attempt >= at_least {
                        return Ok(());
                    }
                }
                Expect::Sticky { name, not, targets } => {
                    self.allowed(answer, source, targets)?;
                    let old = not.as_ref().and_then(|n| self.names.get(n));
                    ensure!(old.is_none_or(|old| old.ip() != answer.local.ip()), "still at {}", answer.local);
                    let known = *self.names.entry(name.clone()).or_insert(answer.local);
                    // The same endpoint may answer at another port for another service port.
                    ensure!(known.ip() == answer.local.ip(), "{name} was at {known}, now {}", answer.local);
                }
                _ => bail!("this outcome needs `again`"),
            }
        }
        if let Expect::Forward(allowed) = expect {
            let missing: Vec<_> = allowed.difference(&seen_targets).collect();
            ensure!(missing.is_empty(), "never seen in {tries} tries: {missing:?}");
        }
        Ok(())
    }

    fn again(&mut self, name: &str, expect: &Expect) -> Result<()> {
        let flow = self.flows.get(name).with_context(|| format!("nothing open called {name}"))?;
        let before = self.names[name];
        // After a conntrack entry is deleted the next datagram chooses anew.
        let seen = flow.again(PATIENCE, &self.world.arrivals);
        let Seen::Answer(answer) = &seen else { bail!("expected an answer, saw: {seen}") };
        match expect {
            Expect::Same => ensure!(answer.local == before, "was at {before}, now {}", answer.local),
            Expect::Moved(allowed) => {
                ensure!(answer.local != before, "still at {before}");
                ensure!(allowed.iter().any(|t| t.address == answer.local), "moved to {}", answer.local);
            }
            _ => bail!("`again` expects same or moved"),
        }
        Ok(())
    }

    /// The target that `answer` is, if it is an allowed one with the right source address.
    fn allowed(&self, answer: &Answer, source: IpAddr, allowed: &BTreeSet<Target>) -> Result<Target> {
        let target = allowed.iter().find(|t| t.address == answer.local);
        let target = target.with_context(|| format!("answered by {} at {}", answer.server, answer.local))?;
        let peer = answer.peer.ip();
        if target.masquerade {
            let addresses = self.world.spec.masquerade_addresses(answer.local.ip());
            let addresses = addresses.with_context(|| format!("M cannot be seen at {}", answer.local))?;
            ensure!(
                addresses.contains(&peer),
                "{} saw the source {peer}, which is no masqueraded one {addresses:?}",
                answer.local
            );
            ensure!(peer != source, "{} saw {source} itself: M cannot be told", answer.local);
        } else {
            ensure!(peer == source, "{} saw the source {peer} instead of {source}", answer.local);
        }
        Ok(target.clone())
    }

    fn change_endpoint(&self, name: &str, objects: &mut Objects, conditions: Option<Value>) -> Result<()> {
        let address =
            self.names.get(name).with_context(|| format!("no endpoint called {name} was seen"))?.ip().to_string();
        let mut found = false;
        for slice in objects.slices_mut() {
            let Some(endpoints) = slice["endpoints"].as_array_mut() else { continue };
            let is_it = |e: &Value| e["addresses"][0] == json!(address);
            found |= endpoints.iter().any(is_it);
            match &conditions {
                None => endpoints.retain(|e| !is_it(e)),
                Some(c) => endpoints.iter_mut().filter(|e| is_it(e)).for_each(|e| e["conditions"] = c.clone()),
            }
        }
        ensure!(found, "no slice has {address}");
        Ok(())
    }

    fn check_flows(&mut self, rows: &[&FlowRow]) {
        if rows.is_empty() {
            return;
        }
        self.rows += rows.len();
        let present = |row: &FlowRow| flow_exists(self.world, row);
        for row in rows.iter().filter(|r| !r.kept) {
            if eventually("deleted", PATIENCE, || (!present(row)).then_some(())).is_err() {
                self.failures
                    .push(format!("{}: {} {} -> {} is still there", row.id, row.proto, row.source, row.destination));
            }
        }
        // Time for a deletion that must not come.
        std::thread::sleep(Duration::from_millis(300));
        for row in rows.iter().filter(|r| r.kept) {
            if !present(row) {
                self.failures
                    .push(format!("{}: {} {} -> {} was deleted", row.id, row.proto, row.source, row.destination));
            }
        }
    }
}

fn flow_arguments(row: &FlowRow) -> Vec<String> {
    let mut all = vec!["-p".into(), row.proto.to_string()];
    all.extend(["-s".into(), row.source.ip().to_string(), "-d".into(), row.destination.ip().to_string()]);
    all.extend(["--sport".into(), row.source.port().to_string(), "--dport".into(), row.destination.port().to_string()]);
    all
}

fn insert_flow(world: &World, row: &FlowRow) -> Result<()> {
    let mut argv: Vec<String> = vec!["conntrack".into(), "-I".into()];
    argv.extend(flow_arguments(row));
    argv.extend(["-r".into(), row.reply_source.ip().to_string(), "-q".into(), row.source.ip().to_string()]);
    argv.extend(["--reply-port-src".into(), row.reply_source.port().to_string()]);
    argv.extend(["--reply-port-dst".into(), row.source.port().to_string(), "-t".into(), "600".into()]);
    match row.proto {
        Proto::Tcp => argv.extend(["--state".into(), "ESTABLISHED".into(), "-u".into(), "SEEN_REPLY,ASSURED".into()]),
        Proto::Sctp => {
            argv.extend(["--state", "ESTABLISHED", "--orig-vtag", "1", "--reply-vtag", "2"].map(String::from));
        }
        _ => {}
    }
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    world.node.output(&argv).with_context(|| row.id.clone())?;
    ensure!(flow_exists(world, row), "{}: the entry was not made", row.id);
    Ok(())
}

fn flow_exists(world: &World, row: &FlowRow) -> bool {
    let mut argv: Vec<String> = vec!["conntrack".into(), "-L".into()];
    argv.extend(flow_arguments(row));
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    world.node.output(&argv).is_ok_and(|text| text.contains("src="))
}

/// The scenario's name of a configuration, for test names.
#[must_use]
pub fn test_name(scenario: &Scenario, config: usize) -> String {
    if scenario.configs.len() == 1 {
        scenario.name.clone()
    } else {
        format!("{}::{}", scenario.name, scenario.configs[config].0)
    }
}
