//! One family's side of the agent: keeps the kernel's table equal to the plan.
//!
//! The only place that joins the compiler (pure) and the netlink connection. After any error the kernel is read back and
//! the difference is applied, so that a failed sync leaves the old rules working and the next one starts from the truth.

use crate::compile::elements;
use crate::compile::nft::{Compiler, Problem, Update};
use crate::compile::service::Front;
use crate::conntrack::Frontend;
use crate::model::table::Changes;
use crate::model::{IpFamily, ObjectName, Protocol, ServiceTable, Settings};
use crate::nft::diff::{Difference, diff_elements};
use crate::nft::foreign::ForeignTables;
use crate::nft::netlink::{Class, Connection, Error};
use crate::nft::object::{Name, Ruleset, TableId};
use crate::nft::transaction::{Op, Step, Transaction};
use crate::takeover::tables::{self, Remembered};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long a packet in flight may still use what an update replaced (surplus slots, chains).
pub const SETTLE_AFTER: Duration = Duration::from_secs(1);

/// Services that the kernel refuses in one sync before the sync gives up.
const REFUSALS_MAX: usize = 64;

/// What a successful sync did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Operations committed.
    pub steps: usize,
    /// The kernel was read back.
    pub full: bool,
    /// kube-proxy's table was removed in the same transaction.
    pub took_over: bool,
    /// How long the kernel took: to commit, and to tell what it holds.
    pub kernel: Duration,
}

/// The kernel as an engine sees it.
pub trait Kernel {
    /// Commits all of a transaction or nothing.
    ///
    /// # Errors
    /// The kernel's answer.
    fn commit(&mut self, transaction: &Transaction) -> Result<(), Error>;
    /// Reads a table with its elements, those of dynamic sets only if asked; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel's answer.
    fn read(&mut self, table: &TableId, dynamic: bool) -> Result<Option<Ruleset>, Error>;
    /// The clients that kube-proxy's table remembers; `None` if the table does not exist.
    ///
    /// # Errors
    /// The kernel's answer.
    fn kube_proxy(&mut self, table: &TableId) -> Result<Option<Remembered>, Error>;
}

impl Kernel for Connection {
    fn commit(&mut self, transaction: &Transaction) -> Result<(), Error> {
        Connection::commit(self, transaction)
    }
    fn read(&mut self, table: &TableId, dynamic: bool) -> Result<Option<Ruleset>, Error> {
        Connection::read(self, table, dynamic)
    }
    fn kube_proxy(&mut self, table: &TableId) -> Result<Option<Remembered>, Error> {
        let look = || {
            let mut tables = ForeignTables::open()?;
            if !tables::find(&mut tables)?.contains(table) {
                return Ok(None);
            }
            tables::remembered(&mut tables, table).map(Some)
        };
        look().map_err(|source| Error {
            what: format!("read table {table}"),
            service: None,
            step: None,
            element: None,
            class: Class::Retry,
            source,
        })
    }
}

/// Keeps one family's table.
pub struct Engine<K = Connection> {
    id: TableId,
    settings: Settings,
    compiler: Compiler,
    kernel: K,
    /// Whether the compiler has been given the whole service map once.
    compiled: bool,
    /// Whether a sync has succeeded since start.
    started: bool,
    /// Whether the kernel holds the plan as far as we know.
    in_step: bool,
    /// When what a full sync found and nobody wants goes.
    sweep_at: Option<Instant>,
    /// When what was marked goes.
    settle_at: Option<Instant>,
    problems: BTreeMap<ObjectName, Vec<String>>,
    /// Where the table that was found at start sent UDP traffic.
    inherited: Vec<Frontend>,
    /// Time spent in the kernel during this sync.
    in_kernel: Duration,
}

impl<K: Kernel> Engine<K> {
    /// An engine that has done nothing yet.
    pub fn new(table: &str, settings: Settings, kernel: K) -> Self {
        Self {
            id: TableId { family: settings.family, name: table.into() },
            compiler: Compiler::new(settings.clone()),
            settings,
            kernel,
            compiled: false,
            started: false,
            in_step: false,
            sweep_at: None,
            settle_at: None,
            problems: BTreeMap::new(),
            inherited: Vec::new(),
            in_kernel: Duration::ZERO,
        }
    }

    /// The family.
    #[must_use]
    pub fn family(&self) -> IpFamily {
        self.settings.family
    }

    /// The settings in force.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The connection to the kernel.
    #[must_use]
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// UDP frontends of the table that was found at start, once: flows to those that nobody serves now are stale.
    pub fn take_inherited(&mut self) -> Vec<Frontend> {
        std::mem::take(&mut self.inherited)
    }

    /// The next sync reads the kernel back.
    pub fn mark_dirty(&mut self) {
        self.in_step = false;
    }

    /// When [`Engine::settle`] should run next.
    #[must_use]
    pub fn settle_at(&self) -> Option<Instant> {
        [self.settle_at, self.sweep_at].into_iter().flatten().min()
    }

    /// Services that could not be programmed as asked, with the reasons.
    #[must_use]
    pub fn problems(&self) -> &BTreeMap<ObjectName, Vec<String>> {
        &self.problems
    }

    /// Brings the kernel in step with `table`. `changes` is what changed since the last call; `settings` replace the old ones if they differ.
    ///
    /// # Errors
    /// The kernel's answer. The old rules stay in force, and the next call starts by reading the kernel back.
    pub fn sync(
        &mut self,
        table: &ServiceTable,
        changes: &Changes,
        settings: &Settings,
        now: Instant,
    ) -> Result<Report, Error> {
        self.in_kernel = Duration::ZERO;
        let report = self.bring_in_step(table, changes, settings, now)?;
        Ok(Report { kernel: self.in_kernel, ..report })
    }

    fn bring_in_step(
        &mut self,
        table: &ServiceTable,
        changes: &Changes,
        settings: &Settings,
        now: Instant,
    ) -> Result<Report, Error> {
        self.settle(now)?;
        let updates = self.compile(table, changes, settings);
        if self.in_step {
            match self.commit_updates(updates) {
                Ok(committed) => {
                    if committed > 0 {
                        self.settle_later(now);
                    }
                    return Ok(Report { steps: committed, ..Report::default() });
                }
                Err(refused) => {
                    let (transaction, error) = *refused;
                    self.in_step = false;
                    self.handle(table, &transaction, error)?;
                }
            }
        }
        self.full(table, now)
    }

    /// Compares the kernel with the plan and lists what it would take to repair it, in nft's words; empty = no difference.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub fn verify(&mut self) -> Result<Vec<String>, Error> {
        if !self.compiled {
            return Ok(Vec::new());
        }
        let have = self.read()?;
        let mut sets = have.as_ref().map_or_else(Default::default, |have| have.sets.clone());
        let Difference { mut now, late } = self.difference(have);
        // What a full sync left for the sweep is no drift.
        if self.sweep_at.is_none() {
            now.steps.extend(late.steps);
        }
        if now.is_empty() {
            return Ok(Vec::new());
        }
        sets.extend(self.compiler.definitions().sets);
        Ok(crate::nft::text::transaction(&now, &sets).lines().map(str::to_owned).collect())
    }

    /// Removes what the last syncs left for packets in flight.
    ///
    /// # Errors
    /// The kernel's answer; the next sync reads the kernel back.
    pub fn settle(&mut self, now: Instant) -> Result<(), Error> {
        let due = |at: &mut Option<Instant>| at.take_if(|at| *at <= now).is_some();
        if due(&mut self.settle_at) {
            let update = self.compiler.settle_marked();
            if self.in_step {
                self.commit(update.steps)?;
            }
            self.settle_later(now);
        }
        if self.in_step && due(&mut self.sweep_at) {
            let have = self.read().inspect_err(|_| self.in_step = false)?;
            let Difference { now, late } = self.difference(have);
            self.commit(now.steps)?;
            self.commit(late.steps)?;
        }
        Ok(())
    }

    /// The plan without its elements, in the table that is asked for: the compiler knows one name only.
    fn definitions(&self) -> Ruleset {
        Ruleset { table: self.id.clone(), ..self.compiler.definitions() }
    }

    /// What turns a table into the plan.
    fn difference(&self, have: Option<Ruleset>) -> Difference {
        diff_elements(have, &self.definitions(), |each| self.compiler.elements(each))
    }

    /// Compiles the whole service map, which the first update does by itself.
    fn compile_all(&mut self, table: &ServiceTable) {
        let update = self.compiler.update(table, []);
        self.compiled = true;
        self.note(update.problems);
    }

    /// Turns what changed into updates, in the order in which they must be committed.
    fn compile(&mut self, table: &ServiceTable, changes: &Changes, settings: &Settings) -> Vec<Update> {
        if !self.compiled {
            if self.settings != *settings {
                self.settings = settings.clone();
                self.compiler = Compiler::new(settings.clone());
            }
            return Vec::new();
        }
        let mut updates = Vec::new();
        if self.settings != *settings || changes.node {
            self.settings = settings.clone();
            updates.push(self.compiler.set_settings(table, settings.clone()));
        }
        if changes.service_cidrs {
            updates.push(self.compiler.update_service_cidrs(table));
        }
        updates.push(self.compiler.update(table, &changes.services));
        for update in &updates {
            // Whatever was compiled anew is judged anew, those included that lost or won a contested address.
            for name in changes.services.iter().chain(&update.compiled) {
                self.problems.remove(name);
            }
        }
        for update in &mut updates {
            self.note(std::mem::take(&mut update.problems));
        }
        updates
    }

    /// Commits updates one after the other, each in one transaction, or in two where chains must exist before elements lead to them.
    /// Returns how many operations there were.
    fn commit_updates(&mut self, updates: Vec<Update>) -> Result<usize, Box<(Transaction, Error)>> {
        let mut committed = 0;
        for Update { mut steps, prepare, .. } in updates {
            let rest = steps.split_off(prepare);
            for steps in [steps, rest].into_iter().filter(|steps| !steps.is_empty()) {
                let transaction = Transaction { table: self.id.clone(), steps };
                if let Err(error) = self.send(&transaction) {
                    return Err(Box::new((transaction, error)));
                }
                committed += transaction.steps.len();
            }
        }
        Ok(committed)
    }

    /// Reads the kernel back and applies the difference.
    fn full(&mut self, table: &ServiceTable, now: Instant) -> Result<Report, Error> {
        self.in_step = false;
        for _ in 0..REFUSALS_MAX {
            let have = self.read()?;
            if !self.compiled {
                match &have {
                    Some(have) => {
                        self.compiler.adopt(have);
                        self.inherited = udp_frontends(have);
                    }
                    None => self.compiler.adopt(&Ruleset::empty(self.id.clone())),
                }
                self.compile_all(table);
            }
            let chains = have.as_ref().map(|have| have.chains.keys().cloned().collect::<BTreeSet<_>>());
            let Difference { now: mut transaction, late } = self.difference(have);
            let took_over = self.take_over(&mut transaction)?;
            let steps = transaction.steps.len();
            if let Some(first) = chains.and_then(|chains| split_new_chains(&chains, &mut transaction))
                && let Err(error) = self.send(&first)
            {
                self.handle(table, &first, error)?;
                continue;
            }
            match self.send(&transaction) {
                Ok(()) => {
                    self.in_step = true;
                    self.started = true;
                    self.sweep_at = (!late.is_empty()).then_some(now + SETTLE_AFTER);
                    self.settle_later(now);
                    return Ok(Report { steps, full: true, took_over, ..Report::default() });
                }
                Err(error) => self.handle(table, &transaction, error)?,
            }
        }
        Err(gave_up(format!("{}: the kernel refused {REFUSALS_MAX} services in a row", self.id)))
    }

    /// Adds the removal of kube-proxy's table, and the import of its affinity records, to the first transaction, the one that
    /// brings ours up. A table that comes back later belongs to a running kube-proxy, which is not this engine's business.
    fn take_over(&mut self, transaction: &mut Transaction) -> Result<bool, Error> {
        if self.started {
            return Ok(false);
        }
        let id = TableId { family: self.family(), name: tables::NAME.into() };
        let Some(remembered) = self.kernel.kube_proxy(&id)? else { return Ok(false) };
        for (set, elements) in tables::import(&remembered, &self.definitions()) {
            transaction.push(Op::AddElements { set, elements }, None);
        }
        transaction.push(Op::DeleteTable(id), None);
        Ok(true)
    }

    fn send(&mut self, transaction: &Transaction) -> Result<(), Error> {
        let started = Instant::now();
        let result = self.kernel.commit(transaction);
        self.in_kernel += started.elapsed();
        result
    }

    fn read(&mut self) -> Result<Option<Ruleset>, Error> {
        let started = Instant::now();
        let result = self.kernel.read(&self.id, false);
        self.in_kernel += started.elapsed();
        result
    }

    fn commit(&mut self, steps: Vec<Step>) -> Result<(), Error> {
        if steps.is_empty() {
            return Ok(());
        }
        let result = self.send(&Transaction { table: self.id.clone(), steps });
        if result.is_err() {
            self.in_step = false;
        }
        result
    }

    /// Decides what an error means: a refused service is left out, a wrong picture is read back (both: go on), the rest is the caller's.
    fn handle(&mut self, table: &ServiceTable, transaction: &Transaction, error: Error) -> Result<(), Error> {
        match error.class {
            Class::Object => {
                let Some(service) = self.refused(transaction, &error) else { return Err(error) };
                let message = format!(
                    "{service}: left out of table {} until it changes: the kernel refused it ({error}); correct the Service or its endpoints",
                    self.id
                );
                tracing::error!(%service, "{message}");
                let update = self.compiler.quarantine(table, &service);
                self.problems.entry(service).or_default().push(message);
                self.note(update.problems);
                Ok(())
            }
            Class::Resync => {
                tracing::info!(table = %self.id, "reading the kernel back: {error}");
                Ok(())
            }
            Class::Retry | Class::Fatal => Err(error),
        }
    }

    /// The Service that a refused step was for: as the step says, else by what it was about.
    fn refused(&self, transaction: &Transaction, error: &Error) -> Option<ObjectName> {
        if error.service.is_some() {
            return error.service.clone();
        }
        if let Some((set, key)) = &error.element {
            return self.compiler.owner(set, Some(key)).cloned();
        }
        match &transaction.steps.get(error.step?)?.op {
            Op::AddChain { name, .. } | Op::AddSet { name, .. } | Op::AddRule { chain: name, .. } => {
                self.compiler.owner(name, None).cloned()
            }
            Op::AddElements { set, elements } if elements.len() == 1 => {
                self.compiler.owner(set, Some(&elements[0].0)).cloned()
            }
            _ => None,
        }
    }

    fn note(&mut self, problems: impl IntoIterator<Item = Problem>) {
        for problem in problems {
            tracing::error!(service = %problem.service, family = %self.family(), "{}", problem.message);
            self.problems.entry(problem.service).or_default().push(problem.message);
        }
    }

    /// Begins the second after which what is left for packets in flight now may go.
    fn settle_later(&mut self, now: Instant) {
        if self.settle_at.is_none() && self.compiler.unsettled() {
            self.compiler.mark();
            self.settle_at = Some(now + SETTLE_AFTER);
        }
    }
}

/// Takes what makes new chains out of a transaction for a table that serves packets already: `Update::prepare` says why. `None` = there
/// is nothing to take, or it depends on what the transaction deletes.
fn split_new_chains(have: &BTreeSet<Name>, transaction: &mut Transaction) -> Option<Transaction> {
    let new = |name: &Name| !have.contains(name);
    let replaced = |step: &Step| match &step.op {
        Op::DeleteSet(_) | Op::DeleteChain(_) => true,
        Op::AddChain { name, base, .. } => base.is_some() && new(name),
        _ => false,
    };
    if transaction.steps.iter().any(replaced) {
        return None;
    }
    let makes = |step: &Step| match &step.op {
        Op::AddSet { .. } => true,
        Op::AddChain { name, .. } | Op::AddRule { chain: name, .. } => new(name),
        _ => false,
    };
    let (first, rest): (Vec<Step>, Vec<Step>) = transaction.steps.drain(..).partition(makes);
    transaction.steps = rest;
    let chains = first.iter().any(|step| matches!(step.op, Op::AddChain { .. }));
    if !chains {
        transaction.steps.splice(0..0, first);
        return None;
    }
    Some(Transaction { table: transaction.table.clone(), steps: first })
}

/// Where the service maps of a table take UDP traffic.
fn udp_frontends(ruleset: &Ruleset) -> Vec<Frontend> {
    let udp = |front| match front {
        Front::Address(ip, Protocol::Udp, port) => Some(Frontend::Address(ip, port)),
        Front::NodePort(Protocol::Udp, port) => Some(Frontend::NodePort(ruleset.table.family, port)),
        _ => None,
    };
    elements::fronts(ruleset).filter_map(udp).collect()
}

fn gave_up(what: String) -> Error {
    let source = std::io::Error::other("correct the services that are named above");
    Error { what, service: None, step: None, element: None, class: Class::Retry, source }
}

/// The plan of `table` from nothing; no kernel is asked.
#[must_use]
pub fn plan(name: &str, settings: &Settings, table: &ServiceTable) -> Ruleset {
    let mut compiler = Compiler::new(settings.clone());
    compiler.update(table, []);
    Ruleset { table: TableId { family: settings.family, name: name.into() }, ..compiler.ruleset() }
}

#[cfg(test)]
mod tests;
