//! Scenario files: objects, steps, packets and what must become of them, in one text file.
//!
//! The format is txtar: a description, then sections that begin with `-- name --`, worked through in order:
//!
//! | section | content |
//! |---|---|
//! | `world` | who exists: `node`, `loopback`, `pod NAME ADDR…`, `remote NAME ADDR…`, `outside NAME ADDR…`, `without ServiceCIDR`, `not ENGINE REASON` |
//! | `flags` or `flags CONFIG` | command line flags of the proxy, added to the common ones; `--flag=` removes one. Several configurations: the scenario runs once for each |
//! | `apply` | YAML objects, created or replaced |
//! | `delete` | `Kind namespace/name`, one a line |
//! | `remove NAME` / `terminate NAME` | the endpoint that `sticky NAME` or `open NAME` found leaves its slices / is not ready, serving, terminating |
//! | `flows` | conntrack entries made before the next change: `id \| udp SRC:PORT -> DST:PORT \| reply source \| kept or deleted` |
//! | `probes` | packets: `id \| source -> proto dst:port \| outcome`, below |
//!
//! A probe's source is a party of the world, `node`, or `party@address`. Outcomes: `reject`, `drop`, `untouched`, or the
//! endpoints that may answer, all of which must be seen: `a:80, b:80 M` or `{a:80, b:80} M` (M = source masqueraded), with
//! names from lines `let NAME = …`. `sticky NAME {…}`: every try is answered by the same one, also when the name comes
//! again; `sticky NAME not OLD {…}`: and not by the one called OLD. `open NAME source -> …` keeps the connection, `again NAME` uses it again and expects `same` or `moved {…}`.
//! With several configurations a line `config A B …` names the outcome columns; `=` repeats the first column. An id may be
//! followed by `!engine` words: engines that cannot show this row.

use crate::probe::Proto;
use crate::world::{NODE_NAME, Party, WorldSpec};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

/// Flags of every scenario: the common ground of kube-proxy's packet tests.
pub const COMMON_FLAGS: [&str; 2] =
    ["--cluster-cidr=10.0.0.0/8,fd00:10::/64", "--nodeport-addresses=192.168.0.2/32,2001:db8::1/128"];

const COMMON_WORLD: [&str; 4] = [
    "node 192.168.0.2/24 192.168.1.2/24 192.168.99.11/32 2001:db8::1/64 2001:db8:1::2/64",
    "pod pod 10.0.0.2 fd00:10::2",
    "outside ext 203.0.113.2 2600:5200::1",
    "outside blk 203.0.113.130 2600:5200:ffff::1",
];

/// A parsed scenario file.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// File name without its ending.
    pub name: String,
    /// Who exists.
    pub world: WorldSpec,
    /// Configurations: name, flags.
    pub configs: Vec<(String, Vec<String>)>,
    /// Engines that cannot run it at all, and why.
    pub not: BTreeMap<String, String>,
    /// Whether the common ServiceCIDR object exists.
    pub service_cidr: bool,
    /// What happens, in order.
    pub steps: Vec<Step>,
}

/// One thing that happens.
#[derive(Clone, Debug)]
pub enum Step {
    /// Objects are created or replaced.
    Apply(Vec<Value>),
    /// An object is deleted: kind, namespace, name.
    Delete(String, String, String),
    /// The endpoint that the name stands for leaves all slices.
    Remove(String),
    /// The endpoint that the name stands for is not ready, serving, terminating.
    Terminate(String),
    /// Conntrack entries are made; they are checked after the next change.
    Flows(Vec<FlowRow>),
    /// Packets.
    Probes(Vec<Row>),
}

/// A conntrack entry and its fate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRow {
    /// Row name.
    pub id: String,
    /// TCP, UDP or SCTP.
    pub proto: Proto,
    /// Original source.
    pub source: SocketAddr,
    /// Original destination.
    pub destination: SocketAddr,
    /// Source of replies: where the flow was translated to.
    pub reply_source: SocketAddr,
    /// Whether the change leaves it alone.
    pub kept: bool,
}

/// A probe and what must become of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Row name.
    pub id: String,
    /// Engines that cannot show this row.
    pub not: BTreeSet<String>,
    /// What is done.
    pub action: Action,
    /// The outcome in each configuration.
    pub expect: Vec<Expect>,
}

/// What a row does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A new connection; kept under the name if there is one.
    Send {
        /// Name to keep it under.
        open: Option<String>,
        /// Who sends, and from which address.
        from: Origin,
        /// What is sent.
        proto: Proto,
        /// Where to; port 0 for ICMP.
        to: SocketAddr,
    },
    /// A kept connection is used again.
    Again(String),
}

/// Who sends a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// A party of the world, or `node`.
    pub party: String,
    /// Source address.
    pub address: IpAddr,
}

/// An endpoint that may answer, and whether it sees a masqueraded source.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The endpoint.
    pub address: SocketAddr,
    /// M
    pub masquerade: bool,
}

/// What must become of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expect {
    /// ICMP port unreachable.
    Reject,
    /// Nothing at all.
    Drop,
    /// It arrives where it was sent to, unchanged.
    Untouched,
    /// One of these answers; over many tries each does.
    Forward(BTreeSet<Target>),
    /// One of these answers, and always the same one: the one that the name stands for, if it does already.
    Sticky {
        /// Name of the endpoint from now on.
        name: String,
        /// Name of an endpoint that it must not be.
        not: Option<String>,
        /// Those allowed.
        targets: BTreeSet<Target>,
    },
    /// The kept connection is answered by the endpoint that answered first.
    Same,
    /// The kept connection is answered by another endpoint, one of these.
    Moved(BTreeSet<Target>),
}

/// All scenario files, in the order of their names.
///
/// # Errors
/// One cannot be read or parsed; the message names file and line.
pub fn load_all() -> Result<Vec<Scenario>> {
    let dir = directory();
    let mut files: Vec<PathBuf> = std::fs::read_dir(&dir)
        .with_context(|| dir.display().to_string())?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "txtar"))
        .collect();
    files.sort();
    files.iter().map(|f| load(f)).collect()
}

/// Where the scenario files are.
#[must_use]
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

/// Reads one scenario file.
///
/// # Errors
/// See [`load_all`].
pub fn load(path: &Path) -> Result<Scenario> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    parse(&name, &text).with_context(|| path.display().to_string())
}

/// A section: name, number of its first line, text.
fn sections(text: &str) -> Vec<(String, usize, String)> {
    let mut all: Vec<(String, usize, String)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if let Some(name) = line.strip_prefix("-- ").and_then(|l| l.trim_end().strip_suffix(" --")) {
            all.push((name.trim().to_string(), number + 2, String::new()));
        } else if let Some((_, _, body)) = all.last_mut() {
            body.push_str(line);
            body.push('\n');
        }
    }
    all
}

/// Lines with content: (number, text without comment).
fn lines(first: usize, body: &str) -> impl Iterator<Item = (usize, &str)> {
    body.lines()
        .enumerate()
        .map(move |(i, l)| (first + i, l.split(" #").next().unwrap_or_default().trim()))
        .filter(|(_, l)| !l.is_empty() && !l.starts_with('#'))
}

/// Parses the text of a scenario file.
///
/// # Errors
/// The first thing that is wrong, with its line.
pub fn parse(name: &str, text: &str) -> Result<Scenario> {
    let mut scenario = Scenario {
        name: name.to_string(),
        world: WorldSpec::default(),
        configs: Vec::new(),
        not: BTreeMap::new(),
        service_cidr: true,
        steps: Vec::new(),
    };
    let sections = sections(text);
    let mut world_lines: Vec<(usize, String)> = Vec::new();
    for (name, first, body) in &sections {
        if name == "world" {
            world_lines.extend(lines(*first, body).map(|(n, l)| (n, l.to_string())));
        }
    }
    world(&mut scenario, &world_lines)?;
    let mut lets = BTreeMap::new();
    for (section, first, body) in &sections {
        let mut words = section.split_whitespace();
        let (kind, argument) = (words.next().unwrap_or_default(), words.next());
        match kind {
            "world" => {}
            "flags" => {
                let extra: Vec<&str> = lines(*first, body).map(|(_, l)| l).collect();
                scenario.configs.push((argument.unwrap_or("base").to_string(), flags(&extra)?));
            }
            "apply" => {
                let objects: Vec<Value> = serde_saphyr::from_multiple(body)
                    .with_context(|| format!("YAML in the section at line {first}"))?;
                scenario.steps.push(Step::Apply(objects.into_iter().filter(|o| !o.is_null()).collect()));
            }
            "delete" => {
                for (line, text) in lines(*first, body) {
                    let (kind, name) =
                        text.split_once(' ').with_context(|| format!("line {line}: Kind namespace/name"))?;
                    let (namespace, name) =
                        name.split_once('/').with_context(|| format!("line {line}: namespace/name"))?;
                    scenario.steps.push(Step::Delete(kind.into(), namespace.into(), name.into()));
                }
            }
            "remove" | "terminate" => {
                let name = argument.with_context(|| format!("line {first}: {kind} NAME"))?.to_string();
                scenario.steps.push(if kind == "remove" { Step::Remove(name) } else { Step::Terminate(name) });
            }
            "flows" => {
                let rows = lines(*first, body).map(|(n, l)| flow(l).with_context(|| format!("line {n}: {l}")));
                scenario.steps.push(Step::Flows(rows.collect::<Result<_>>()?));
            }
            "probes" => {
                if scenario.configs.is_empty() {
                    scenario.configs.push(("base".into(), flags(&[])?));
                }
                let mut columns: Vec<String> = vec![scenario.configs[0].0.clone()];
                let mut rows = Vec::new();
                for (n, line) in lines(*first, body) {
                    let place = || format!("line {n}: {line}");
                    if let Some(rest) = line.strip_prefix("config ") {
                        columns = rest.split_whitespace().map(String::from).collect();
                    } else if let Some(rest) = line.strip_prefix("let ") {
                        let (name, list) = rest.split_once('=').with_context(place)?;
                        let list = targets(list, &lets).with_context(place)?;
                        lets.insert(name.trim().to_string(), list);
                    } else {
                        rows.push(row(line, &columns, &scenario, &lets).with_context(place)?);
                    }
                }
                scenario.steps.push(Step::Probes(rows));
            }
            _ => bail!("line {first}: unknown section {section:?}"),
        }
    }
    if scenario.configs.is_empty() {
        scenario.configs.push(("base".into(), flags(&[])?));
    }
    ensure!(scenario.steps.iter().any(|s| matches!(s, Step::Probes(_) | Step::Flows(_))), "the scenario tests nothing");
    Ok(scenario)
}

fn world(scenario: &mut Scenario, own: &[(usize, String)]) -> Result<()> {
    let common = COMMON_WORLD.iter().map(|l| (0, (*l).to_string()));
    for (number, line) in common.chain(own.iter().cloned()) {
        let place = || format!("line {number}: {line}");
        let mut words = line.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let world = &mut scenario.world;
        match kind {
            "node" => world.node = words.map(str::parse).collect::<Result<_, _>>().with_context(place)?,
            "loopback" => world.loopback = words.map(str::parse).collect::<Result<_, _>>().with_context(place)?,
            "pod" | "remote" | "outside" => {
                let name = words.next().with_context(place)?.to_string();
                let mut party = Party { name, device: None, addresses: Vec::new() };
                for word in words {
                    match word.strip_prefix("dev=") {
                        Some(device) => party.device = Some(device.to_string()),
                        None => party.addresses.push(word.parse().with_context(place)?),
                    }
                }
                // A party of the same name replaces the common one.
                for list in [&mut world.pods, &mut world.remote, &mut world.outside] {
                    list.retain(|p| p.name != party.name);
                }
                match kind {
                    "pod" => world.pods.push(party),
                    "remote" => world.remote.push(party),
                    _ => world.outside.push(party),
                }
            }
            "without" => {
                ensure!(words.next() == Some("ServiceCIDR"), "{}", place());
                scenario.service_cidr = false;
            }
            "not" => {
                let engine = words.next().with_context(place)?.to_string();
                scenario.not.insert(engine, words.collect::<Vec<_>>().join(" "));
            }
            _ => bail!("{}: unknown word {kind:?}", place()),
        }
    }
    Ok(())
}

fn flags(extra: &[&str]) -> Result<Vec<String>> {
    let mut all: Vec<String> = COMMON_FLAGS.iter().map(|f| (*f).to_string()).collect();
    for flag in extra {
        let (name, value) = flag.split_once('=').with_context(|| format!("flag {flag:?}: --name=value"))?;
        all.retain(|f| f.split('=').next() != Some(name));
        if !value.is_empty() {
            all.push((*flag).to_string());
        }
    }
    Ok(all)
}

fn flow(line: &str) -> Result<FlowRow> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [id, tuple, reply, fate] = cells[..] else { bail!("id | proto SRC -> DST | reply source | kept or deleted") };
    let words: Vec<&str> = tuple.split_whitespace().collect();
    let [proto, source, "->", destination] = words[..] else { bail!("proto SRC:PORT -> DST:PORT") };
    Ok(FlowRow {
        id: id.to_string(),
        proto: protocol(proto)?,
        source: source.parse()?,
        destination: destination.parse()?,
        reply_source: reply.parse()?,
        kept: match fate {
            "kept" => true,
            "deleted" => false,
            _ => bail!("kept or deleted, not {fate:?}"),
        },
    })
}

fn protocol(word: &str) -> Result<Proto> {
    Ok(match word {
        "tcp" => Proto::Tcp,
        "udp" => Proto::Udp,
        "sctp" => Proto::Sctp,
        "icmp" => Proto::Icmp,
        _ => bail!("protocol {word:?}"),
    })
}

type Lets = BTreeMap<String, BTreeSet<Target>>;

fn row(line: &str, columns: &[String], scenario: &Scenario, lets: &Lets) -> Result<Row> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    ensure!(cells.len() >= 3, "id | probe | outcome");
    ensure!(cells.len() == 2 + columns.len(), "{} outcomes for the columns {columns:?}", cells.len() - 2);
    let mut id = cells[0].split_whitespace();
    let name = id.next().context("no id")?.to_string();
    let not = id
        .map(|w| w.strip_prefix('!').map(String::from).with_context(|| format!("{w:?} after the id")))
        .collect::<Result<_>>()?;
    let mut expect = Vec::new();
    for (config, _) in &scenario.configs {
        // One column serves all configurations.
        let column = if columns.len() == 1 { 0 } else { columns.iter().position(|c| c == config).context("column")? };
        let cell = if cells[2 + column] == "=" { cells[2] } else { cells[2 + column] };
        expect.push(outcome(cell, lets)?);
    }
    Ok(Row { id: name, not, action: action(cells[1], &scenario.world)?, expect })
}

fn action(text: &str, world: &WorldSpec) -> Result<Action> {
    let mut words: Vec<&str> = text.split_whitespace().collect();
    if let ["again", name] = words[..] {
        return Ok(Action::Again(name.to_string()));
    }
    let open = if words.first() == Some(&"open") {
        let name = words.get(1).context("open NAME")?.to_string();
        words.drain(..2);
        Some(name)
    } else {
        None
    };
    let [from, "->", proto, to] = words[..] else { bail!("source -> proto destination") };
    let proto = protocol(proto)?;
    let to: SocketAddr = match proto {
        Proto::Icmp => SocketAddr::new(to.parse()?, 0),
        _ => to.parse()?,
    };
    let (party, address) = match from.split_once('@') {
        Some((party, address)) => (party, address.parse()?),
        None => {
            let all = if from == "node" {
                world.node_addresses()
            } else {
                world.party(from).with_context(|| format!("nobody is called {from:?}"))?.addresses.clone()
            };
            let like = all.into_iter().find(|a| a.is_ipv4() == to.is_ipv4());
            (from, like.with_context(|| format!("{from} has no address of the family of {to}"))?)
        }
    };
    Ok(Action::Send { open, from: Origin { party: party.to_string(), address }, proto, to })
}

fn outcome(cell: &str, lets: &Lets) -> Result<Expect> {
    let (first, rest) = cell.split_once(' ').unwrap_or((cell, ""));
    Ok(match first {
        "reject" => Expect::Reject,
        "drop" => Expect::Drop,
        "untouched" => Expect::Untouched,
        "same" => Expect::Same,
        "moved" => Expect::Moved(targets(rest, lets)?),
        "sticky" => {
            let (name, list) = rest.split_once(' ').context("sticky NAME {…}")?;
            let (not, list) = match list.strip_prefix("not ") {
                Some(rest) => {
                    rest.split_once(' ').map(|(not, list)| (Some(not.to_string()), list)).context("not NAME {…}")?
                }
                None => (None, list),
            };
            Expect::Sticky { name: name.to_string(), not, targets: targets(list, lets)? }
        }
        _ => Expect::Forward(targets(cell, lets)?),
    })
}

fn targets(text: &str, lets: &Lets) -> Result<BTreeSet<Target>> {
    let mut all = BTreeSet::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (inner, after) = match rest.strip_prefix('{') {
            Some(braced) => braced.split_once('}').context("no closing brace")?,
            None => rest.find([',', ' ']).map_or((rest, ""), |at| rest.split_at(at)),
        };
        let mut group: BTreeSet<Target> = if rest.starts_with('{') {
            targets(inner, lets)?
        } else if let Some(set) = lets.get(inner) {
            set.clone()
        } else {
            let address = inner.parse().with_context(|| format!("{inner:?} is neither address:port nor a name"))?;
            [Target { address, masquerade: false }].into()
        };
        rest = after.trim_start();
        if let Some(after) = rest.strip_prefix('M') {
            group = group.into_iter().map(|t| Target { masquerade: true, ..t }).collect();
            rest = after.trim_start();
        }
        all.extend(group);
        match rest.strip_prefix(',') {
            Some(after) => rest = after.trim_start(),
            None => ensure!(rest.is_empty(), "what is {rest:?}?"),
        }
    }
    ensure!(!all.is_empty(), "no endpoint");
    Ok(all)
}

impl Scenario {
    /// The Node and the ServiceCIDR that exist before the first step; a scenario's own object of the same name replaces them.
    #[must_use]
    pub fn common_objects(&self) -> Vec<Value> {
        let ips: Vec<IpAddr> = self.world.node_addresses();
        let first = |v4: bool| ips.iter().find(|ip| ip.is_ipv4() == v4);
        let addresses: Vec<Value> = [first(true), first(false)]
            .into_iter()
            .flatten()
            .map(|ip| json!({ "type": "InternalIP", "address": ip }))
            .collect();
        let mut all = vec![json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE_NAME }, "status": { "addresses": addresses },
        })];
        if self.service_cidr {
            all.push(json!({
                "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "kubernetes" },
                "spec": { "cidrs": ["172.30.0.0/16", "fd00:10:96::/112"] },
            }));
        }
        all
    }

    /// Every port that a server must listen on for this scenario.
    #[must_use]
    pub fn ports(&self) -> BTreeSet<u16> {
        let mut ports = BTreeSet::new();
        for step in &self.steps {
            let Step::Probes(rows) = step else { continue };
            for row in rows {
                if let Action::Send { to, .. } = &row.action {
                    ports.insert(to.port());
                }
                for expect in &row.expect {
                    if let Expect::Forward(t) | Expect::Sticky { targets: t, .. } | Expect::Moved(t) = expect {
                        ports.extend(t.iter().map(|t| t.address.port()));
                    }
                }
            }
        }
        ports.remove(&0);
        ports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "What it is about.

-- world --
pod e2 10.180.2.1   # local
remote e1 10.180.0.1
not kube-proxy because
-- flags base --
-- flags nd --
--cluster-cidr=
-- apply --
{kind: Service, metadata: {name: a}}
---
{kind: Service, metadata: {name: b}}
-- probes --
config base nd
let all = 10.180.0.1:80, 10.180.2.1:80
J1 | pod -> tcp 172.30.0.41:80 | all | {all} M
J2 !oracle | open c ext -> udp 1.2.3.4:53 | 10.180.0.1:80 M, 10.180.2.1:80 | =
J3 | node@1.2.3.4 -> icmp 172.30.0.41 | reject | drop
J4 | again c | same | moved all
-- delete --
Service ns1/a
-- flows --
U1 | udp 203.0.113.2:1000 -> 1.2.3.4:8000 | 10.240.0.4:9090 | kept
";

    #[test]
    fn a_scenario_is_read() {
        let s = parse("j", TEXT).unwrap();
        assert_eq!(s.world.interface("e2").as_deref(), Some("veth1"));
        assert_eq!(s.world.interface("e1").as_deref(), Some("eth1"));
        assert_eq!(s.configs[1].1, ["--nodeport-addresses=192.168.0.2/32,2001:db8::1/128"]);
        assert_eq!(s.not["kube-proxy"], "because");
        let [Step::Apply(objects), Step::Probes(rows), Step::Delete(..), Step::Flows(flows)] = &s.steps[..] else {
            panic!("{:?}", s.steps)
        };
        assert_eq!(objects.len(), 2);
        let target = |a: &str, masquerade| Target { address: a.parse().unwrap(), masquerade };
        assert_eq!(
            rows[0].expect[0],
            Expect::Forward([target("10.180.0.1:80", false), target("10.180.2.1:80", false)].into())
        );
        assert_eq!(
            rows[0].expect[1],
            Expect::Forward([target("10.180.0.1:80", true), target("10.180.2.1:80", true)].into())
        );
        assert_eq!(
            rows[1].expect[1],
            Expect::Forward([target("10.180.0.1:80", true), target("10.180.2.1:80", false)].into())
        );
        assert!(rows[1].not.contains("oracle"));
        let Action::Send { from, proto, to, .. } = &rows[2].action else { panic!() };
        assert_eq!((from.address.to_string().as_str(), *proto, to.port()), ("1.2.3.4", Proto::Icmp, 0));
        assert_eq!(rows[2].expect, [Expect::Reject, Expect::Drop]);
        assert!(flows[0].kept);
        assert_eq!(s.ports(), [53, 80].into());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (wrong, expected) in [
            ("J1 | pod -> tcp 172.30.0.41:80 | all | nonsense", "line 17"),
            ("J1 | nobody -> tcp 172.30.0.41:80 | all | =", "nobody is called"),
            ("J1 | pod -> tcp 172.30.0.41:80 | all", "outcomes for the columns"),
        ] {
            let text = TEXT.replace("J1 | pod -> tcp 172.30.0.41:80 | all | {all} M", wrong);
            let error = format!("{:#}", parse("j", &text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn every_scenario_file_is_read_and_row_names_are_unique() {
        let mut seen = BTreeSet::new();
        for scenario in load_all().unwrap() {
            for step in &scenario.steps {
                let ids: Vec<&String> = match step {
                    Step::Probes(rows) => rows.iter().map(|r| &r.id).collect(),
                    Step::Flows(rows) => rows.iter().map(|r| &r.id).collect(),
                    _ => continue,
                };
                for id in ids {
                    assert!(seen.insert(id.clone()), "{id} is twice there ({})", scenario.name);
                }
            }
        }
        assert!(!seen.is_empty());
    }
}
