//! Visits: who asks which address, what must come of it, and the table of what came.

use super::client::{Outcome, Report};
use super::topology::{inside, owner};
use crate::command;
use anyhow::{Context, Result};
use comfy_table::{Cell, Color, Table, presets};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What must come of a visit.
pub enum Expectation {
    /// These endpoints answer, each of them sometimes, and see the visitor as one of these.
    All(&'static [&'static str], &'static [&'static str]),
    /// One of these endpoints answers every time.
    AlwaysSame(&'static [&'static str]),
    /// Refused at once.
    Refused,
    /// Nothing comes.
    Silence,
}

/// Someone who asks an address many times.
pub struct Visit {
    /// In words: the kind of address.
    pub title: &'static str,
    /// Namespace that asks.
    pub from: &'static str,
    /// Address and port.
    pub to: &'static str,
    pub udp: bool,
    pub count: u32,
    pub expect: Expectation,
}

const WEB: &[&str] = &["web-1", "web-2", "web-3"];

/// The visits of the demo. 60 connections miss one of three endpoints once in ten billion runs.
pub const VISITS: [Visit; 10] = [
    Visit {
        title: "ClusterIP, from a pod",
        from: "shell",
        to: "10.96.0.10:80",
        udp: false,
        count: 60,
        expect: Expectation::All(WEB, &["shell"]),
    },
    Visit {
        title: "ClusterIP over IPv6, from a pod",
        from: "shell",
        to: "[fd00:10:96::10]:80",
        udp: false,
        count: 60,
        expect: Expectation::All(WEB, &["shell"]),
    },
    Visit {
        title: "ClusterIP, from the node itself",
        from: "node",
        to: "10.96.0.10:80",
        udp: false,
        count: 60,
        expect: Expectation::All(WEB, &["node"]),
    },
    Visit {
        title: "ClusterIP over UDP, from a pod",
        from: "shell",
        to: "10.96.0.53:53",
        udp: true,
        count: 40,
        expect: Expectation::All(&["dns-1", "dns-2"], &["shell"]),
    },
    Visit {
        title: "ClusterIP with ClientIP affinity",
        from: "shell",
        to: "10.96.0.40:80",
        udp: false,
        count: 40,
        expect: Expectation::AlwaysSame(WEB),
    },
    Visit {
        title: "NodePort, from outside",
        from: "client",
        to: "192.0.2.10:30080",
        udp: false,
        count: 60,
        expect: Expectation::All(WEB, &["node"]),
    },
    Visit {
        title: "LoadBalancer, local policy, from outside",
        from: "client",
        to: "203.0.113.10:80",
        udp: false,
        count: 60,
        expect: Expectation::All(&["web-1", "web-2"], &["client"]),
    },
    Visit {
        title: "LoadBalancer, from a network not let in",
        from: "stranger",
        to: "203.0.113.10:80",
        udp: false,
        count: 2,
        expect: Expectation::Silence,
    },
    Visit {
        title: "Service without endpoints",
        from: "shell",
        to: "10.96.0.99:80",
        udp: false,
        count: 5,
        expect: Expectation::Refused,
    },
    Visit {
        title: "ClusterIP that no Service has",
        from: "shell",
        to: "10.96.0.200:80",
        udp: false,
        count: 2,
        expect: Expectation::Silence,
    },
];

/// What came, and how often.
pub type Outcomes = BTreeMap<Outcome, usize>;

impl Visit {
    /// Asks from inside the namespace, with this very program.
    ///
    /// # Errors
    /// If the client cannot be run.
    pub fn run(&self, program: &Path) -> Result<Outcomes> {
        let mut command = inside(self.from, program);
        command.args(["demo-client", "--to", self.to, "--count", &self.count.to_string()]);
        if self.udp {
            command.arg("--udp");
        }
        let mut outcomes = Outcomes::new();
        for line in command::output(&mut command)?.lines() {
            let report: Report = serde_json::from_str(line).with_context(|| format!("the client printed {line:?}"))?;
            *outcomes.entry(report.outcome).or_default() += 1;
        }
        Ok(outcomes)
    }

    /// Whether that is what must come; if not, why.
    pub fn judge(&self, outcomes: &Outcomes) -> Result<(), String> {
        let total: usize = outcomes.values().sum();
        if total != self.count as usize {
            return Err(format!("{total} of {} outcomes", self.count));
        }
        let only = |wanted: &Outcome| outcomes.keys().all(|outcome| outcome == wanted);
        let mut names = BTreeSet::new();
        for outcome in outcomes.keys() {
            match (&self.expect, outcome) {
                (Expectation::All(endpoints, sources), Outcome::Answered(name, source)) => {
                    if !endpoints.contains(&name.as_str()) {
                        return Err(format!("{name} must not answer"));
                    }
                    if !sources.contains(&owner(source)) {
                        return Err(format!("{name} saw {source} ({}), not {}", owner(source), sources.join(" or ")));
                    }
                    names.insert(name.as_str());
                }
                (Expectation::AlwaysSame(endpoints), Outcome::Answered(name, _)) => {
                    if !endpoints.contains(&name.as_str()) {
                        return Err(format!("{name} must not answer"));
                    }
                    names.insert(name.as_str());
                }
                (Expectation::All(..) | Expectation::AlwaysSame(_), other) => return Err(words(other)),
                (Expectation::Refused, _) if only(&Outcome::Refused) => {}
                (Expectation::Refused, _) => return Err("must be refused".into()),
                (Expectation::Silence, _) if only(&Outcome::Silent) => {}
                (Expectation::Silence, _) => return Err("nothing must come".into()),
            }
        }
        match &self.expect {
            Expectation::All(endpoints, _) if names.len() != endpoints.len() => {
                let missing: Vec<_> = endpoints.iter().filter(|e| !names.contains(**e)).copied().collect();
                Err(format!("{} never answered", missing.join(", ")))
            }
            Expectation::AlwaysSame(_) if names.len() != 1 => {
                Err(format!("{} endpoints answered, not one", names.len()))
            }
            _ => Ok(()),
        }
    }
}

fn words(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Answered(name, _) => name.clone(),
        Outcome::Refused => "refused".into(),
        Outcome::Silent => "no answer".into(),
        Outcome::Broken(why) => why.clone(),
    }
}

/// The table of all visits, one row for each endpoint (and source address) that answered.
pub fn table(rows: &[(&Visit, Outcomes, Result<(), String>)]) -> Table {
    let mut table = plain_table();
    table.set_header(["what", "from", "to", "answer", "times", "source seen", ""]);
    for (visit, outcomes, verdict) in rows {
        let (mark, colour) = match verdict {
            Ok(()) => ("as expected".to_owned(), Color::Green),
            Err(why) => (format!("WRONG: {why}"), Color::Red),
        };
        let mut first = true;
        for (outcome, times) in outcomes {
            let source = match outcome {
                Outcome::Answered(_, source) => format!("{source} ({})", owner(source)),
                _ => String::new(),
            };
            let head = |text: &str| if first { text.to_owned() } else { String::new() };
            table.add_row(vec![
                Cell::new(head(visit.title)),
                Cell::new(head(visit.from)),
                Cell::new(head(visit.to)),
                Cell::new(words(outcome)),
                Cell::new(format!("{times}×")),
                Cell::new(source),
                Cell::new(head(&mark)).fg(colour),
            ]);
            first = false;
        }
    }
    table
}

/// A table of columns without lines.
pub fn plain_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(list: &[(&str, &str, usize)]) -> Outcomes {
        let outcome = |name: &str, source: &str| match name {
            "-" => Outcome::Silent,
            "refused" => Outcome::Refused,
            _ => Outcome::Answered(name.into(), source.into()),
        };
        list.iter().map(|(name, source, times)| (outcome(name, source), *times)).collect()
    }

    fn verdict(title: &str, list: &[(&str, &str, usize)]) -> Result<(), String> {
        VISITS.iter().find(|v| v.title.starts_with(title)).unwrap().judge(&outcomes(list))
    }

    #[test]
    fn all_endpoints_must_answer_and_see_the_right_source() {
        let shell = "10.244.1.20";
        let title = "ClusterIP, from a pod";
        assert!(verdict(title, &[("web-1", shell, 20), ("web-2", shell, 20), ("web-3", shell, 20)]).is_ok());
        assert!(verdict(title, &[("web-1", shell, 30), ("web-2", shell, 30)]).unwrap_err().contains("web-3 never"));
        assert!(verdict(title, &[("web-1", shell, 58), ("web-2", shell, 1), ("web-3", "192.0.2.10", 1)]).is_err());
        assert!(verdict(title, &[("web-1", shell, 58), ("web-2", shell, 1), ("-", "", 1)]).is_err());
        assert!(verdict(title, &[]).is_err());
    }

    #[test]
    fn local_policy_forbids_the_other_node() {
        let client = "192.0.2.100";
        let list = [("web-1", client, 20), ("web-2", client, 20), ("web-3", client, 20)];
        assert!(verdict("LoadBalancer, local", &list).unwrap_err().contains("web-3 must not answer"));
    }

    #[test]
    fn affinity_refusal_and_silence_are_judged() {
        assert!(verdict("ClusterIP with ClientIP", &[("web-2", "x", 40)]).is_ok());
        assert!(verdict("ClusterIP with ClientIP", &[("web-2", "x", 39), ("web-1", "x", 1)]).is_err());
        assert!(verdict("Service without", &[("refused", "", 5)]).is_ok());
        assert!(verdict("Service without", &[("-", "", 5)]).is_err());
        assert!(verdict("LoadBalancer, from a network", &[("-", "", 2)]).is_ok());
        assert!(verdict("LoadBalancer, from a network", &[("web-1", "192.0.2.200", 2)]).is_err());
    }
}
