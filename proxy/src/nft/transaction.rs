//! A transaction: what is sent to the kernel in one batch, all or nothing.
#![forbid(unsafe_code)]

use super::object::{BaseChain, Key, Name, Rule, Set, TableId, Value};
use crate::model::ObjectName;

/// One change of the kernel's state. Order matters: the kernel processes a batch from first to last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Make sure that the table exists.
    AddTable {
        /// Shown by `nft list`.
        comment: Option<String>,
    },
    /// Delete a table with all that is in it (the transaction's own table or another, as at take-over). Fails if absent.
    DeleteTable(TableId),
    /// Delete a table with all that is in it if it exists (the transaction's own table or another).
    DestroyTable(TableId),
    /// Make sure that the chain exists.
    AddChain {
        /// Chain name.
        name: Name,
        /// Set for a base chain.
        base: Option<BaseChain>,
        /// Shown by `nft list`.
        comment: Option<String>,
    },
    /// Delete all rules of a chain.
    FlushChain(Name),
    /// Delete an empty chain that nothing refers to.
    DeleteChain(Name),
    /// Append a rule.
    AddRule {
        /// Chain name.
        chain: Name,
        /// The rule.
        rule: Rule,
    },
    /// Delete one rule, by the handle that the kernel gave it. For tables of others; ours are changed by flush and add.
    DeleteRule {
        /// Chain name.
        chain: Name,
        /// The kernel's handle.
        handle: u64,
    },
    /// Make sure that the set or map exists.
    AddSet {
        /// Set name.
        name: Name,
        /// Definition.
        set: Set,
    },
    /// Delete a set or map.
    DeleteSet(Name),
    /// Delete all elements of a set.
    FlushSet(Name),
    /// Add elements. Adding one that exists with other data fails; with the same data it changes nothing.
    AddElements {
        /// Set name.
        set: Name,
        /// Elements.
        elements: Vec<(Key, Value)>,
    },
    /// Delete elements; fails if one is absent.
    DeleteElements {
        /// Set name.
        set: Name,
        /// Keys.
        keys: Vec<Key>,
    },
}

/// An operation and the API object that it is made for, so that an error of the kernel can name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What is done.
    pub op: Op,
    /// For which Service; `None` = the fixed part.
    pub service: Option<ObjectName>,
}

/// A batch for one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// The table.
    pub table: TableId,
    /// Steps in order.
    pub steps: Vec<Step>,
}

impl Transaction {
    /// An empty transaction.
    #[must_use]
    pub fn new(table: TableId) -> Self {
        Self { table, steps: Vec::new() }
    }
    /// Appends an operation.
    pub fn push(&mut self, op: Op, service: Option<&ObjectName>) {
        self.steps.push(Step { op, service: service.cloned() });
    }
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}
