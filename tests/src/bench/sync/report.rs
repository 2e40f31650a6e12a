//! What was measured, and how the two compare.

use crate::bench::machine::Machine;
use crate::bench::numbers::Spread;
use crate::bench::table::{Format, Table};
use crate::cluster::Program;
use crate::engine::tandem_binary;
use crate::envtest::KUBERNETES_VERSION;
use crate::netns;
use anyhow::Result;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::process::Command;

/// A measured value. In the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Seconds from the start of the process until the last Service has answered.
    Cold,
    /// Seconds until the program has all objects.
    List,
    /// Seconds that its first syncs took.
    Sync,
    /// Of these, all but the kernel's part.
    Compile,
    /// Of these, the kernel's part.
    Kernel,
    /// CPU seconds of the program and its children until it rests.
    ColdCpu,
    /// Seconds from the start of the process, with rules in place, until a change made meanwhile is served.
    Restart,
    /// Connections to a Service that did not change that failed meanwhile.
    Lost,
    /// Milliseconds from the start of the write of a Service to its first answer.
    Added,
    /// The same from the end of the write.
    AddedAfterReturn,
    /// Milliseconds from the start of the write until the last connection that still went to a removed endpoint.
    Removed,
    /// Resident MiB at rest after the cold start.
    Memory,
    /// The same after a longer time without any change.
    IdleMemory,
    /// Highest resident MiB until the rest after the cold start.
    PeakMemory,
    /// Highest resident MiB of any child process until then.
    ChildMemory,
    /// Highest resident MiB of the process that was started with rules in place.
    RestartPeakMemory,
}

impl Measure {
    /// Digits behind the point.
    fn precision(self) -> usize {
        match self {
            Measure::Cold | Measure::List | Measure::Sync | Measure::Compile | Measure::Kernel => 2,
            Measure::ColdCpu | Measure::Restart => 2,
            Measure::Added | Measure::AddedAfterReturn | Measure::Removed => 1,
            Measure::Lost => 0,
            Measure::Memory | Measure::IdleMemory | Measure::PeakMemory => 0,
            Measure::ChildMemory | Measure::RestartPeakMemory => 0,
        }
    }

    /// Those that a ratio may be asserted of.
    fn compared(self) -> bool {
        matches!(self, Measure::Cold | Measure::Restart | Measure::Added | Measure::Removed | Measure::Memory)
    }
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Measure::Cold => "cold start to the last answer, s",
            Measure::List => "  of that: all objects are there after, s",
            Measure::Sync => "  of that: first syncs, both families, s",
            Measure::Compile => "    outside the kernel, s",
            Measure::Kernel => "    in the kernel, s",
            Measure::ColdCpu => "CPU time of the cold start, s",
            Measure::Restart => "restart with rules, until a change is served, s",
            Measure::Lost => "  connections lost meanwhile",
            Measure::Added => "one Service added: write to first answer, ms",
            Measure::AddedAfterReturn => "  from the return of the write, ms",
            Measure::Removed => "one endpoint removed: write to last wrong answer, ms",
            Measure::Memory => "resident memory at rest, MiB",
            Measure::IdleMemory => "  left idle, MiB",
            Measure::PeakMemory => "  peak of the cold start, MiB",
            Measure::ChildMemory => "  peak of a child process, MiB",
            Measure::RestartPeakMemory => "  peak of the restart, MiB",
        })
    }
}

/// The values of one program.
#[derive(Clone, Debug, Serialize)]
pub struct Values {
    /// Median, smallest, largest.
    pub spread: Spread,
    /// 90th percentile.
    pub p90: f64,
    /// All, as they came.
    pub all: Vec<f64>,
}

/// One measure at one size.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Size of the cluster.
    pub services: usize,
    /// What was measured.
    pub measure: Measure,
    /// The real kube-proxy's.
    pub kube_proxy: Option<Values>,
    /// Tandem's.
    pub tandem: Option<Values>,
    /// Median of kube-proxy divided by that of Tandem.
    pub ratio: Option<f64>,
}

/// All that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Endpoints of each Service.
    pub endpoints: usize,
    /// Visits of each program to each size.
    pub rounds: usize,
    /// What it ran on.
    pub machine: Machine,
    /// The programs.
    pub versions: Vec<String>,
    /// The measures.
    pub rows: Vec<Row>,
    #[serde(skip)]
    samples: BTreeMap<(usize, Measure, &'static str), Vec<f64>>,
}

impl Report {
    pub(super) fn new(endpoints: usize, rounds: usize, machine: Machine) -> Result<Self> {
        let first_line = |command: &mut Command| -> Result<String> {
            Ok(netns::run(command)?.lines().next().unwrap_or_default().trim().to_string())
        };
        let versions = vec![
            first_line(Command::new(tandem_binary()?).arg("--version"))?,
            format!("kube-proxy {KUBERNETES_VERSION} with {}", first_line(Command::new("nft").arg("--version"))?),
        ];
        Ok(Self { endpoints, rounds, machine, versions, rows: Vec::new(), samples: BTreeMap::new() })
    }

    pub(super) fn add(&mut self, services: usize, program: Program, measure: Measure, values: Vec<f64>) {
        self.samples.entry((services, measure, program.name())).or_default().extend(values);
        let values = |program: Program| {
            let all = self.samples.get(&(services, measure, program.name()))?;
            let mut sorted = all.clone();
            sorted.sort_by(f64::total_cmp);
            let p90 = sorted[(sorted.len() * 9).div_ceil(10) - 1];
            Some(Values { spread: Spread::of(all), p90, all: all.clone() })
        };
        let (kube_proxy, tandem) = (values(Program::KubeProxy), values(Program::Tandem));
        let ratio = kube_proxy.as_ref().zip(tandem.as_ref()).map(|(k, t)| k.spread.median / t.spread.median);
        let ratio = ratio.filter(|ratio| ratio.is_finite());
        let row = Row { services, measure, kube_proxy, tandem, ratio };
        self.rows.retain(|old| (old.services, old.measure) != (services, measure));
        self.rows.push(row);
        self.rows.sort_by_key(|row| (row.services, row.measure));
    }

    /// The row of a measure.
    #[must_use]
    pub fn row(&self, services: usize, measure: Measure) -> Option<&Row> {
        self.rows.iter().find(|row| (row.services, row.measure) == (services, measure))
    }

    /// The measures in which Tandem needs more than `times` what kube-proxy needs, in words.
    #[must_use]
    pub fn above(&self, times: f64) -> Vec<String> {
        let above = |row: &&Row| row.measure.compared() && row.ratio.is_some_and(|ratio| ratio * times < 1.0);
        let text = |row: &Row| {
            let median = |values: &Option<Values>| values.as_ref().map_or(f64::NAN, |v| v.spread.median);
            let (tandem, kube_proxy) = (median(&row.tandem), median(&row.kube_proxy));
            format!("{} at {} services: Tandem {tandem:.3}, kube-proxy {kube_proxy:.3}", row.measure, row.services)
        };
        self.rows.iter().filter(above).map(text).collect()
    }

    /// The report for people.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        let mut text = format!(
            "From the API server to packets: median (smallest–largest) of {} rounds, {} endpoints per Service.\n{}; {}\n",
            self.rounds,
            self.endpoints,
            self.machine,
            self.versions.join(", ")
        );
        let mut sizes: Vec<usize> = self.rows.iter().map(|row| row.services).collect();
        sizes.dedup();
        for services in sizes {
            let mut table =
                Table::new(&[&format!("{services} Services"), "kube-proxy", "Tandem", "kube-proxy : Tandem"]);
            for row in self.rows.iter().filter(|row| row.services == services) {
                let cell = |values: &Option<Values>| values.as_ref().map_or("–".into(), |v| shown(row.measure, v));
                let ratio = row.ratio.map_or("–".to_string(), |ratio| format!("{ratio:.1}"));
                table.row(vec![row.measure.to_string(), cell(&row.kube_proxy), cell(&row.tandem), ratio]);
            }
            text.push_str(&format!("\n{}", table.render(format)));
        }
        text
    }
}

fn shown(measure: Measure, values: &Values) -> String {
    let p = measure.precision();
    match values.all.len() {
        1 => format!("{:.p$}", values.spread.median),
        // A percentile says something only of more values than rounds have.
        10.. => format!("{:.p$}, p90 {:.p$}", values.spread, values.p90),
        _ => format!("{:.p$}", values.spread),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let machine =
            Machine { cpus: 2, cpu: String::new(), memory_mib: 1024, kernel: "6.1".into(), date: "2026-01-31".into() };
        Report { endpoints: 10, rounds: 2, machine, versions: Vec::new(), rows: Vec::new(), samples: BTreeMap::new() }
    }

    #[test]
    fn rows_are_medians_of_all_rounds_and_their_ratio() {
        let mut report = report();
        for seconds in [10.0, 30.0, 20.0] {
            report.add(1000, Program::KubeProxy, Measure::Cold, vec![seconds]);
            report.add(1000, Program::Tandem, Measure::Cold, vec![seconds / 10.0]);
        }
        report.add(1000, Program::Tandem, Measure::List, vec![0.5]);
        let row = report.row(1000, Measure::Cold).unwrap();
        assert_eq!((row.kube_proxy.as_ref().unwrap().spread.median, row.ratio), (20.0, Some(10.0)));
        let text = report.render(Format::Markdown);
        assert!(text.contains("| 20.00 (10.00–30.00) | 2.00 (1.00–3.00) |"), "{text}");
        assert!(text.contains("0.50"), "{text}");
    }

    #[test]
    fn what_is_slower_than_allowed_is_named() {
        let mut report = report();
        report.add(10, Program::KubeProxy, Measure::Added, vec![10.0]);
        report.add(10, Program::Tandem, Measure::Added, vec![25.0]);
        assert_eq!(report.above(3.0), Vec::<String>::new());
        assert_eq!(report.above(2.0).len(), 1);
        report.add(10, Program::KubeProxy, Measure::AddedAfterReturn, vec![1.0]);
        report.add(10, Program::Tandem, Measure::AddedAfterReturn, vec![25.0]);
        assert_eq!(report.above(2.0).len(), 1, "only what is compared");
    }
}
