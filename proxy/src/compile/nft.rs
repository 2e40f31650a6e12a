//! The nftables plan of one family.

use crate::model::{ObjectName, ServiceTable, Settings};
use crate::nft::object::Ruleset;
use crate::nft::transaction::Step;

/// Something that could not be programmed as asked: which object, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The Service.
    pub service: ObjectName,
    /// In words for an operator.
    pub message: String,
}

/// What one update asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Operations for one transaction, in order.
    pub steps: Vec<Step>,
    /// Objects that could not be programmed as asked.
    pub problems: Vec<Problem>,
}

/// Keeps the plan of one family and turns changes of the service map into operations.
#[derive(Debug)]
pub struct Compiler {
    settings: Settings,
}

impl Compiler {
    /// A compiler with an empty plan.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { settings }
    }
    /// Takes over the slot order of a table that the kernel already holds, so that the first plan keeps what is right. Call before the first `update`.
    pub fn adopt(&mut self, kernel: &Ruleset) {
        let _ = kernel;
    }
    /// Replaces the settings. All services are compiled anew; what does not change costs no operation.
    pub fn set_settings(&mut self, table: &ServiceTable, settings: Settings) -> Update {
        let _ = table;
        self.settings = settings;
        Update::default()
    }
    /// Compiles `changed` services (all that claim the same frontends included).
    pub fn update<'a>(&mut self, table: &ServiceTable, changed: impl IntoIterator<Item = &'a ObjectName>) -> Update {
        let _ = (table, changed.into_iter().count());
        Update::default()
    }
    /// The set of service CIDRs changed.
    pub fn update_service_cidrs(&mut self, table: &ServiceTable) -> Update {
        let _ = table;
        Update::default()
    }
    /// Whether [`Compiler::settle`] has something to do.
    #[must_use]
    pub fn unsettled(&self) -> bool {
        false
    }
    /// Removes what the last updates left for packets in flight (surplus slots, unused chains). Call at least one second after the transaction of the last update.
    pub fn settle(&mut self) -> Update {
        Update::default()
    }
    /// Leaves a service out of the plan (its old rules go) until its object changes: the kernel refused it.
    pub fn quarantine(&mut self, table: &ServiceTable, service: &ObjectName) -> Update {
        let _ = (table, service);
        Update::default()
    }
    /// The whole plan as it should be in the kernel now, what waits for `settle` included.
    #[must_use]
    pub fn ruleset(&self) -> Ruleset {
        unreachable!("to be written")
    }
}
