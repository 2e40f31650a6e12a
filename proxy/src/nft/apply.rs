//! One table of the kernel kept equal to a ruleset: replace, synchronise, verify.

use super::diff::{self, Difference, diff};
use super::netlink::{Class, Connection, Error};
use super::object::{Key, Name, Ruleset, Set, TableId, Value};
use super::text;
use super::transaction::{Op, Transaction};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

#[cfg(test)]
mod tests;

/// Tries of a synchronisation that transactions of others overtake.
const SYNC_TRIES: usize = 10;

/// A table and the connection to its kernel.
pub struct Table<'c> {
    connection: &'c mut Connection,
    id: TableId,
}

impl<'c> Table<'c> {
    /// The table `id`, which need not exist.
    pub fn new(connection: &'c mut Connection, id: TableId) -> Self {
        Self { connection, id }
    }

    /// Makes the table anew, whatever is there, in one transaction. Elements of dynamic sets are lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn replace(&mut self, want: &Ruleset) -> Result<(), Error> {
        let mut transaction = Transaction::new(self.id.clone());
        transaction.push(Op::DestroyTable(self.id.clone()), None);
        transaction.steps.extend(diff(None, want).now.steps);
        self.connection.commit(&transaction)
    }

    /// Reads the table, commits what differs, and returns what must be committed at least one second later. The kernel refuses
    /// to commit if anyone changed nftables since the table was read; then it is read again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn sync(&mut self, want: &Ruleset) -> Result<Transaction, Error> {
        for number in 1.. {
            let generation = self.connection.generation()?;
            let have = self.connection.read(&self.id, false)?;
            let Difference { now, late } = diff(have.as_ref(), want);
            match self.connection.commit_at(&now, Some(generation)) {
                Ok(()) => return Ok(late),
                Err(error) if error.class == Class::Resync && number < SYNC_TRIES => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("the loop returns")
    }

    /// What the kernel holds against what is wanted. Empty: equal, but for comments and elements of dynamic sets.
    ///
    /// # Errors
    /// The kernel's.
    pub fn verify(&mut self, want: &Ruleset) -> Result<Vec<Drift>, Error> {
        let have = self.connection.read(&self.id, false)?;
        Ok(drift(have.as_ref(), want))
    }
}

/// One difference between the kernel and the plan, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drift {
    /// The kernel lacks it.
    Missing {
        /// `chain services`, `element … of set …`
        object: String,
    },
    /// The kernel has it, and nobody wants it.
    Surplus {
        /// As in `Missing`.
        object: String,
    },
    /// The kernel has something else.
    Different {
        /// As in `Missing`.
        object: String,
        /// What the kernel has, in words of nft(8).
        have: String,
        /// What is wanted.
        want: String,
    },
}

/// One line.
impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Drift::Missing { object } => write!(f, "{object} is missing"),
            Drift::Surplus { object } => write!(f, "{object} does not belong there"),
            Drift::Different { object, have, want } => write!(f, "{object} is `{have}` and should be `{want}`"),
        }
    }
}

/// All differences between what the kernel holds (`None` = no such table) and what is wanted, in the sense of [`diff`].
#[must_use]
pub fn drift(have: Option<&Ruleset>, want: &Ruleset) -> Vec<Drift> {
    let Some(have) = have else { return vec![Drift::Missing { object: format!("table {}", want.table) }] };
    let mut drifts = Vec::new();
    let names: BTreeSet<&Name> = have.chains.keys().chain(want.chains.keys()).collect();
    for name in names {
        let object = format!("chain {name}");
        match (have.chains.get(name), want.chains.get(name)) {
            (Some(held), Some(wanted)) => {
                if held.base != wanted.base {
                    let words = |base| text::base_chain_or_none(base);
                    drifts.push(Drift::Different {
                        object: object.clone(),
                        have: words(held.base.as_ref()),
                        want: words(wanted.base.as_ref()),
                    });
                }
                for number in 0..held.rules.len().max(wanted.rules.len()) {
                    let object = format!("rule {} of {object}", number + 1);
                    let words = |rule| text::rule(want.table.family, rule);
                    match (held.rules.get(number), wanted.rules.get(number)) {
                        (Some(held), Some(wanted)) if held != wanted => {
                            drifts.push(Drift::Different { object, have: words(held), want: words(wanted) });
                        }
                        (Some(held), None) => {
                            drifts.push(Drift::Surplus { object: format!("{object} `{}`", words(held)) })
                        }
                        (None, Some(wanted)) => {
                            drifts.push(Drift::Missing { object: format!("{object} `{}`", words(wanted)) })
                        }
                        _ => {}
                    }
                }
            }
            (held, _) => drifts.push(one_sided(held.is_some(), object)),
        }
    }
    let names: BTreeSet<&Name> = have.sets.keys().chain(want.sets.keys()).collect();
    for name in names {
        match (have.sets.get(name), want.sets.get(name)) {
            (Some(held), Some(wanted)) if !diff::same_set(held, wanted) => {
                let words = |set| text::set_definition(want.table.family, set);
                drifts.push(Drift::Different { object: format!("set {name}"), have: words(held), want: words(wanted) });
            }
            (Some(_), Some(set)) if set.dynamic_timeout_ms.is_some() => {}
            (Some(_), Some(set)) => element_drift(want, name, set, have.elements.get(name), &mut drifts),
            (held, _) => drifts.push(one_sided(held.is_some(), format!("set {name}"))),
        }
    }
    drifts
}

fn one_sided(held: bool, object: String) -> Drift {
    if held { Drift::Surplus { object } } else { Drift::Missing { object } }
}

fn element_drift(want: &Ruleset, name: &Name, set: &Set, have: Option<&BTreeMap<Key, Value>>, drifts: &mut Vec<Drift>) {
    let words = |key: &Key, value: &Value| {
        text::element(want.table.family, set, key, Some(&Value { expires_ms: None, ..value.clone() }))
    };
    let object = |key: &Key, value: &Value| format!("element {} of set {name}", words(key, value));
    let mut wanted = BTreeSet::new();
    for (key, value) in want.elements.get(name).into_iter().flatten() {
        let key = diff::normal_key(set, key.clone());
        match have.and_then(|have| have.get(&key)) {
            None => drifts.push(Drift::Missing { object: object(&key, value) }),
            Some(held) if held.data != value.data => {
                drifts.push(Drift::Different {
                    object: format!("element of set {name}"),
                    have: words(&key, held),
                    want: words(&key, value),
                });
            }
            Some(_) => {}
        }
        wanted.insert(key);
    }
    for (key, value) in have.into_iter().flatten().filter(|(key, _)| !wanted.contains(*key)) {
        drifts.push(Drift::Surplus { object: object(key, value) });
    }
}
