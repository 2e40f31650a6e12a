//! A round: both nodes through all its states, probes and open connections compared in each.

use crate::apiserver::ApiServer;
use crate::conformance::compare::{Care, Judged, compare};
use crate::conformance::flows::{FlowDifference, FlowFate, Flows, Place, is_thorough_clean_up};
use crate::conformance::live_table::LiveTable;
use crate::conformance::mutation::{Breaks, Mutation, Shows};
use crate::conformance::pair::{Pair, Side};
use crate::conformance::report::{Difference, RoundReport, owners, yaml};
use crate::conformance::{Fate, Judgement, Observation, Probe, Round};
use crate::engine::Program;
use crate::envtest::{self, Binaries};
use crate::probe::Proto;
use crate::process::eventually;
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Fewer probes prove too little.
const LEAST_PROBES: usize = 100;
/// Places at which connections are opened before each change.
const FLOW_PLACES: usize = 24;
/// How often a difference of open connections must be seen, each time with new ones over the same change.
const FLOW_LOOKS: u32 = 3;
/// How long Tandem may take to find and repair what an outsider changed.
const REPAIR: Duration = Duration::from_secs(20);

/// What Tandem leaves over for packets in flight, it marks at one sync and removes a second later, and what came meanwhile a
/// second after that: a table that did not change for longer is whole.
const LEFT_OVERS: Duration = Duration::from_millis(2300);

/// A real control plane.
pub struct Lab {
    binaries: Binaries,
    api: ApiServer,
}

impl Lab {
    /// Builds what is missing and starts it.
    ///
    /// # Errors
    /// A program cannot be built or does not start.
    pub fn start() -> Result<Self> {
        let binaries = envtest::binaries()?;
        let api = ApiServer::start(&binaries)?;
        Ok(Self { binaries, api })
    }

    fn pair(&self, subject: Program, round: &Round) -> Result<Pair<'_>> {
        Pair::new(&self.api, &self.binaries, subject, &round.flags, &round.world, &round.ports)
    }

    /// Goes through a round with kube-proxy on one node and `subject` on the other. `say` gets what is being done.
    ///
    /// # Errors
    /// The machinery fails, or a proxy does not follow. Differences are no errors.
    pub fn round(&self, subject: Program, round: &Round, say: &dyn Fn(&str)) -> Result<RoundReport> {
        let begun = Instant::now();
        let mut pair = self.pair(subject, round)?;
        let mut report = RoundReport { seed: round.seed, round: round.number, ..RoundReport::default() };
        let result = states(&mut pair, round, &mut report, say);
        if result.is_err() {
            let dump = dump(&mut pair, round, 0);
            pair.finish()?;
            return Err(result.expect_err("looked at above").context(format!("logs and rules: {}", dump.display())));
        }
        pair.finish()?;
        if report.coverage.probes() < LEAST_PROBES {
            report.missing.push(format!("{} probes, which is less than {LEAST_PROBES}", report.coverage.probes()));
        }
        report.missing.extend(report.coverage.missing().iter().map(|class| format!("no probe: {class}")));
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Goes through a round, breaks Tandem in each of the ways in `mutations` where the state gives cause for it, and
    /// returns what showed each first. Those that did not show are not in the map.
    ///
    /// # Errors
    /// The machinery fails, or the nodes differ before anything is broken.
    pub fn mutated(
        &self,
        round: &Round,
        mutations: &[&'static Mutation],
        say: &dyn Fn(&str),
    ) -> Result<BTreeMap<&'static str, Difference>> {
        let mut pair = self.pair(Program::Tandem, round)?;
        let mut found = BTreeMap::new();
        let mut flows: Option<Flows> = None;
        let result = (|| {
            for (index, state) in round.states.iter().enumerate() {
                let left: Vec<&Mutation> = mutations.iter().copied().filter(|m| !found.contains_key(m.name)).collect();
                if left.is_empty() {
                    break;
                }
                pair.bring(&state.objects)?;
                let clean_up = left.iter().find(|m| matches!(m.breaks, Breaks::CleanUp));
                if let (Some(mutation), Some(flows)) = (clean_up, flows.take()) {
                    say(&format!("state {}: {}", index + 1, mutation.what));
                    if let Some(difference) = restored(&mut pair, round, index, &flows)? {
                        found.insert(mutation.name, difference);
                    }
                }
                let begun = (Instant::now(), essence(&pair)?);
                let probes: Vec<&Probe> = state.probes.iter().collect();
                let before = compare(&pair.worlds, round, state, &probes, Care::FULL);
                if let Some(judged) = before.iter().find(|j| j.is_different()) {
                    let dump = Some(dump(&mut pair, round, index));
                    let difference = Difference { dump, ..describe(round, index, judged) };
                    bail!("the nodes differ before anything is broken:\n{difference}");
                }
                await_whole(&pair, begun)?;
                for mutation in left.iter().filter(|m| matches!(m.breaks, Breaks::Rules(_))) {
                    say(&format!("state {}: {}", index + 1, mutation.what));
                    if let Some(difference) = broken(&mut pair, round, index, mutation)? {
                        found.insert(mutation.name, difference);
                    }
                }
                if clean_up.is_some() && index + 1 < round.states.len() {
                    let udp = places(&before).into_iter().filter(|place| place.proto == Proto::Udp).collect();
                    flows = Some(Flows::open(&pair.worlds, udp));
                }
            }
            Ok(())
        })();
        pair.finish()?;
        result.map(|()| found)
    }
}

fn states(pair: &mut Pair, round: &Round, report: &mut RoundReport, say: &dyn Fn(&str)) -> Result<()> {
    let mut flows: Option<Flows> = None;
    let same_proxy = pair.proxies[0].program() == pair.proxies[1].program();
    let care = Care { same_proxy, ..Care::FULL };
    let count = round.states.len();
    for (index, state) in round.states.iter().enumerate() {
        say(&format!("state {} of {count}: {}", index + 1, state.what.join(", ")));
        pair.bring(&state.objects).with_context(|| format!("state {}", index + 1))?;
        if let Some(flows) = flows.take() {
            say(&format!("state {} of {count}: open connections", index + 1));
            let compared = flows.compare(&pair.worlds);
            report.flows += compared.compared;
            for difference in compared.differences {
                if is_thorough_clean_up(&difference, &state.objects, &pair.worlds) {
                    *report.deliberate.entry("thorough-udp-clean-up".into()).or_default() += 1;
                } else if flow_differs_again(pair, round, index, &difference)? {
                    let dump = Some(dump(pair, round, index));
                    report.differences.push(Difference { dump, ..describe_flow(round, index, &difference) });
                } else {
                    report.passing.push(format!("{difference:?}"));
                }
            }
        }
        say(&format!("state {} of {count}: {} probes", index + 1, state.probes.len()));
        let probes: Vec<&Probe> = state.probes.iter().collect();
        let judged = compare(&pair.worlds, round, state, &probes, care);
        report.states += 1;
        for one in &judged {
            report.coverage.count(one.probe, &one.seen[Side::Reference.index()]);
            report.passing.extend(one.first.clone().filter(|_| !one.is_different()));
            match &one.judgement {
                Judgement::Deliberate(name) => *report.deliberate.entry((*name).into()).or_default() += 1,
                Judgement::Different(_) => {
                    let dump = Some(dump(pair, round, index));
                    report.differences.push(Difference { dump, ..describe(round, index, one) });
                }
                _ => {}
            }
        }
        if index + 1 < count {
            flows = Some(Flows::open(&pair.worlds, places(&judged)));
        }
    }
    Ok(())
}

/// Where connections that are open over the next change tell something: places that were answered, one for each
/// frontend and protocol before a second one.
fn places(judged: &[Judged]) -> Vec<Place> {
    let answered =
        |seen: &Observation| seen.fates().any(|f| matches!(f, Fate::Served { answered: true, .. } | Fate::Untouched));
    let mut by_frontend: BTreeMap<_, Vec<Place>> = BTreeMap::new();
    for one in judged.iter().filter(|j| answered(&j.seen[0]) && answered(&j.seen[1])) {
        let Probe { party, source, proto, to, .. } = one.probe;
        if matches!(proto, Proto::Tcp | Proto::Udp) {
            let place = Place { party: party.clone(), source: *source, proto: *proto, to: *to };
            by_frontend.entry((*proto == Proto::Tcp, *to)).or_default().push(place);
        }
    }
    let mut all = Vec::new();
    // UDP first: those are the ones that a proxy ends.
    for turn in 0.. {
        let some: Vec<Place> = by_frontend.values().filter_map(|places| places.get(turn).cloned()).collect();
        if some.is_empty() || all.len() >= FLOW_PLACES {
            break;
        }
        all.extend(some);
    }
    all.truncate(FLOW_PLACES);
    all
}

/// Makes the change again with new connections; whether they differ each time.
fn flow_differs_again(pair: &mut Pair, round: &Round, index: usize, difference: &FlowDifference) -> Result<bool> {
    for _ in 1..FLOW_LOOKS {
        pair.bring(&round.states[index - 1].objects)?;
        let flows = Flows::open(&pair.worlds, vec![difference.place.clone(); 4]);
        pair.bring(&round.states[index].objects)?;
        if flows.compare(&pair.worlds).differences.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The tables of the subject, comparable.
fn essence(pair: &Pair) -> Result<[Vec<String>; 2]> {
    let node = &pair.worlds[Side::Subject.index()].node;
    Ok([LiveTable::read(node, "ip")?.essence(), LiveTable::read(node, "ip6")?.essence()])
}

/// Waits until the tables, last seen to change as `seen` says, have nothing left over.
fn await_whole(pair: &Pair, (mut since, mut seen): (Instant, [Vec<String>; 2])) -> Result<()> {
    eventually("Tandem's tables do not change any more", REPAIR, || {
        match essence(pair) {
            Ok(now) if now == seen => {}
            Ok(now) => (since, seen) = (Instant::now(), now),
            Err(e) => return Some(Err(e)),
        }
        (since.elapsed() >= LEFT_OVERS).then_some(Ok(()))
    })?
}

/// Puts back what Tandem cleaned up, and looks whether that shows.
fn restored(pair: &mut Pair, round: &Round, index: usize, flows: &Flows) -> Result<Option<Difference>> {
    signal(pair, Signal::SIGSTOP)?;
    let restored = flows.restore_udp(&pair.worlds, Side::Subject);
    let compared = flows.compare(&pair.worlds);
    signal(pair, Signal::SIGCONT)?;
    let kept = |d: &&FlowDifference| !d.fates[0].contains(&FlowFate::Same) && d.fates[1] == [FlowFate::Same].into();
    let first = compared.differences.iter().find(kept).filter(|_| restored > 0);
    Ok(first.map(|difference| describe_flow(round, index, difference)))
}

fn signal(pair: &mut Pair, signal: Signal) -> Result<()> {
    pair.proxies[Side::Subject.index()].process().context("Tandem does not run")?.signal(signal);
    Ok(())
}

fn broken(pair: &mut Pair, round: &Round, index: usize, mutation: &Mutation) -> Result<Option<Difference>> {
    let state = &round.states[index];
    let node = &pair.worlds[Side::Subject.index()].node;
    let read = |family| LiveTable::read(node, family);
    let whole = [read("ip")?, read("ip6")?];
    let commands: String =
        whole.iter().map(|table| mutation.commands(table, &round.world)).collect::<Vec<_>>().join("\n");
    let probes: Vec<&Probe> = state.probes.iter().filter(|p| fits(mutation.shows, p)).collect();
    if commands.trim().is_empty() || probes.is_empty() {
        return Ok(None);
    }
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), &commands)?;
    let path = file.path().to_str().context("path of a temporary file")?;
    node.output(&["nft", "-c", "-f", path]).with_context(|| format!("{}:\n{commands}", mutation.name))?;
    signal(pair, Signal::SIGSTOP)?;
    let node = &pair.worlds[Side::Subject.index()].node;
    let applied = node.output(&["nft", "-f", path]);
    let judged = if applied.is_ok() { compare(&pair.worlds, round, state, &probes, Care::QUICK) } else { Vec::new() };
    let difference = judged.iter().find(|j| j.is_different()).map(|judged| describe(round, index, judged));
    signal(pair, Signal::SIGCONT)?;
    applied.with_context(|| format!("{}:\n{commands}", mutation.name))?;
    let before = whole.map(|table| table.essence());
    eventually(&format!("Tandem repairs {}", mutation.name), REPAIR, || (essence(pair).ok()? == before).then_some(()))
        .with_context(|| pair.proxies[Side::Subject.index()].log_tail())?;
    Ok(difference)
}

fn fits(shows: Shows, probe: &Probe) -> bool {
    match shows {
        Shows::Any => true,
        Shows::V6 => probe.to.is_ipv6(),
        Shows::FromNode => probe.party == "node",
        Shows::NodePort => probe.to.port() >= 3000,
        Shows::ClusterIp => in_service_cidrs(probe),
        Shows::External => !in_service_cidrs(probe),
    }
}

fn in_service_cidrs(probe: &Probe) -> bool {
    let cidrs = crate::apiserver::SERVICE_CIDRS.split(',');
    cidrs.filter_map(|cidr| cidr.parse::<ipnet::IpNet>().ok()).any(|cidr| cidr.contains(&probe.to.ip()))
}

fn repeat(round: &Round) -> String {
    format!("cargo xtask conformance --seed {} --round {}", round.seed, round.number)
}

fn describe(round: &Round, index: usize, judged: &Judged) -> Difference {
    let probe = judged.probe;
    let what = match &judged.judgement {
        Judgement::Different(text) => text.clone(),
        other => format!("{other:?}"),
    };
    Difference {
        state: index + 1,
        probe: probe.to_string(),
        what,
        reference: vec![judged.seen[0].to_string()],
        subject: vec![judged.seen[1].to_string()],
        expected: probe.expected.to_string(),
        objects: owners(&round.states[index].objects, probe.to),
        dump: None,
        repeat: repeat(round),
    }
}

fn describe_flow(round: &Round, index: usize, difference: &FlowDifference) -> Difference {
    let place = &difference.place;
    let fates = |side: Side| {
        let all = difference.fates[side.index()].iter();
        all.map(|fate| format!("{fate:?}").to_lowercase()).collect::<Vec<_>>()
    };
    Difference {
        state: index + 1,
        probe: format!(
            "open {} connection of {} ({}) to {} at {}",
            place.proto, place.party, place.source, place.to, difference.backend
        ),
        what: format!("has another fate over the change: {}", round.states[index].what.join(", ")),
        reference: fates(Side::Reference),
        subject: fates(Side::Subject),
        expected: String::new(),
        objects: format!(
            "# before\n{}---\n# after\n{}",
            owners(&round.states[index - 1].objects, place.to),
            owners(&round.states[index].objects, place.to)
        ),
        dump: None,
        repeat: repeat(round),
    }
}

/// Writes what helps to understand a state; once for each.
fn dump(pair: &mut Pair, round: &Round, index: usize) -> PathBuf {
    let name = format!("tandem-conformance-{}-{}-{}", round.seed, round.number, index + 1);
    let dir = std::env::temp_dir().join(name);
    // What cannot be written is missed by whoever looks for it; the difference is reported all the same.
    let _ = std::fs::create_dir_all(&dir);
    for side in Side::BOTH {
        let who = if side == Side::Reference { "reference" } else { "subject" };
        let rules = pair.worlds[side.index()].node.output(&["nft", "-a", "list", "ruleset"]).unwrap_or_default();
        let _ = std::fs::write(dir.join(format!("{who}.nft")), rules);
        let flows = pair.worlds[side.index()].node.output(&["conntrack", "-L"]).unwrap_or_default();
        let _ = std::fs::write(dir.join(format!("{who}.conntrack")), flows);
        if let Some(process) = pair.proxies[side.index()].process() {
            let _ = std::fs::write(dir.join(format!("{who}.log")), process.log());
        }
    }
    let objects: Vec<String> = round.states[index].objects.values().map(yaml).collect();
    let _ = std::fs::write(dir.join("objects.yaml"), objects.join("---\n"));
    dir
}
