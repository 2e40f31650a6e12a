//! Tables that others made: what a take-over must see and remove, without understanding their rules.
//!
//! Only names, handles and jump targets are read, straight from the attributes, so that no expression, user data or set
//! type of a newer or older tool can make it fail. Safe code.
#![forbid(unsafe_code)]

use super::object::TableId;
use crate::sys::nfnetlink::{self, Message, attribute, attributes, string, text};
use netlink_packet_core::DefaultNla;
use proxy_common::IpFamily;
use std::io;
use std::net::IpAddr;

// uapi/linux/netfilter/nf_tables.h; NFNL_SUBSYS_NFTABLES is 10.
const SUBSYSTEM: u16 = 10 << 8;
const GETTABLE: u16 = SUBSYSTEM | 1;
const GETCHAIN: u16 = SUBSYSTEM | 4;
const DELCHAIN: u16 = SUBSYSTEM | 5;
const GETRULE: u16 = SUBSYSTEM | 7;
const DELRULE: u16 = SUBSYSTEM | 8;
const GETSET: u16 = SUBSYSTEM | 10;
const GETSETELEM: u16 = SUBSYSTEM | 13;
const GETGEN: u16 = SUBSYSTEM | 16;
const NFTA_GEN_ID: u16 = 1;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_CHAIN_HOOK: u16 = 4;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_HANDLE: u16 = 3;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_IMMEDIATE_DATA: u16 = 2;
const NFTA_DATA_VALUE: u16 = 1;
const NFTA_DATA_VERDICT: u16 = 2;
const NFTA_VERDICT_CHAIN: u16 = 2;
const NFTA_SET_TABLE: u16 = 1;
const NFTA_SET_NAME: u16 = 2;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;
const NFTA_SET_ELEM_KEY: u16 = 1;
const NFTA_SET_ELEM_EXPIRATION: u16 = 5;

/// A chain of any table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ForeignChain {
    /// Its table.
    pub table: TableId,
    /// Its name.
    pub name: String,
    /// Whether it is hooked (a base chain).
    pub base: bool,
}

/// A rule that jumps or goes to a chain.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ForeignJump {
    /// The table.
    pub table: TableId,
    /// The chain that holds the rule.
    pub chain: String,
    /// The rule's handle.
    pub handle: u64,
    /// The chain that it leads to.
    pub target: String,
}

/// What is to be deleted, all in one transaction: rules, then the content of the chains, then the chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// Rules in chains that stay.
    pub rules: Vec<ForeignJump>,
    /// Chains that go.
    pub chains: Vec<ForeignChain>,
}

impl Removal {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.chains.is_empty()
    }
}

/// A member of a set of addresses whose members expire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpiringAddress {
    /// The address.
    pub address: IpAddr,
    /// What is left of its time, in ms; 0 if it does not expire.
    pub expires_ms: u64,
}

/// nf_tables of the network namespace in which it was opened.
pub struct ForeignTables {
    connection: nfnetlink::Connection,
}

impl ForeignTables {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        Ok(Self { connection: nfnetlink::Connection::open()? })
    }

    /// The generation of the rule sets of this namespace; every commit of anybody increments it.
    pub fn generation(&mut self) -> io::Result<u32> {
        let answer = self.connection.get(&Message::new(GETGEN, 0, &[]))?;
        let value = attribute(&answer, NFTA_GEN_ID).and_then(|value| value.try_into().ok());
        value
            .map(u32::from_be_bytes)
            .ok_or_else(|| io::Error::other("the kernel did not tell the generation of its rule sets"))
    }

    /// Names of all tables of a family.
    pub fn tables(&mut self, family: IpFamily) -> io::Result<Vec<TableId>> {
        let mut tables = Vec::new();
        self.dump(&Message::new(GETTABLE, number(family), &[]), |bytes| {
            tables.extend(string(bytes, NFTA_TABLE_NAME).map(|name| TableId { family, name: name.into() }));
        })?;
        Ok(tables)
    }

    /// All chains of a family.
    pub fn chains(&mut self, family: IpFamily) -> io::Result<Vec<ForeignChain>> {
        let mut chains = Vec::new();
        self.dump(&Message::new(GETCHAIN, number(family), &[]), |bytes| {
            let (Some(table), Some(name)) = (string(bytes, NFTA_CHAIN_TABLE), string(bytes, NFTA_CHAIN_NAME)) else {
                return;
            };
            let base = attribute(bytes, NFTA_CHAIN_HOOK).is_some();
            chains.push(ForeignChain { table: TableId { family, name: table.into() }, name: name.into(), base });
        })?;
        Ok(chains)
    }

    /// All rules of a table that jump or go to a chain by a plain verdict (verdict maps are not followed).
    pub fn jumps(&mut self, table: &TableId) -> io::Result<Vec<ForeignJump>> {
        let mut jumps = Vec::new();
        let request = Message::new(GETRULE, number(table.family), &[text(NFTA_RULE_TABLE, &table.name)]);
        self.dump(&request, |bytes| {
            // Kernels before 5.1 may ignore the table in the request.
            if string(bytes, NFTA_RULE_TABLE) != Some(&table.name) {
                return;
            }
            let handle =
                attribute(bytes, NFTA_RULE_HANDLE).and_then(|value| value.try_into().ok()).map(u64::from_be_bytes);
            let target = attribute(bytes, NFTA_RULE_EXPRESSIONS).and_then(jump_target);
            let (Some(chain), Some(handle), Some(target)) = (string(bytes, NFTA_RULE_CHAIN), handle, target) else {
                return;
            };
            jumps.push(ForeignJump { table: table.clone(), chain: chain.into(), handle, target });
        })?;
        Ok(jumps)
    }

    /// Names of all sets and maps of a table.
    pub fn sets(&mut self, table: &TableId) -> io::Result<Vec<String>> {
        let mut sets = Vec::new();
        let request = Message::new(GETSET, number(table.family), &[text(NFTA_SET_TABLE, &table.name)]);
        self.dump(&request, |bytes| sets.extend(string(bytes, NFTA_SET_NAME).map(str::to_owned)))?;
        Ok(sets)
    }

    /// Members of a set whose key is one address; members of another shape are skipped.
    pub fn addresses(&mut self, table: &TableId, set: &str) -> io::Result<Vec<ExpiringAddress>> {
        let mut members = Vec::new();
        let named = [text(NFTA_SET_ELEM_LIST_TABLE, &table.name), text(NFTA_SET_ELEM_LIST_SET, set)];
        self.dump(&Message::new(GETSETELEM, number(table.family), &named), |bytes| {
            for element in attributes(attribute(bytes, NFTA_SET_ELEM_LIST_ELEMENTS).unwrap_or_default()) {
                members.extend(expiring_address(element.value()));
            }
        })?;
        Ok(members)
    }

    /// Deletes all that `removal` names, or nothing. `ERESTART` = any rule set changed since `generation`: look again.
    pub fn remove(&mut self, removal: &Removal, generation: u32) -> io::Result<()> {
        let mut messages = Vec::new();
        for rule in &removal.rules {
            let handle = DefaultNla::new(NFTA_RULE_HANDLE, rule.handle.to_be_bytes().to_vec());
            let which = [text(NFTA_RULE_TABLE, &rule.table.name), text(NFTA_RULE_CHAIN, &rule.chain), handle];
            messages.push(Message::new(DELRULE, number(rule.table.family), &which));
        }
        // A chain can go only when no rule leads to it, so all are emptied first.
        for chain in &removal.chains {
            let which = [text(NFTA_RULE_TABLE, &chain.table.name), text(NFTA_RULE_CHAIN, &chain.name)];
            messages.push(Message::new(DELRULE, number(chain.table.family), &which));
        }
        for chain in &removal.chains {
            let which = [text(NFTA_CHAIN_TABLE, &chain.table.name), text(NFTA_CHAIN_NAME, &chain.name)];
            messages.push(Message::new(DELCHAIN, number(chain.table.family), &which));
        }
        self.connection.batch(&messages, Some(generation))?.map_err(|refused| {
            let mut failures = refused.failures;
            if failures.is_empty() { io::Error::other("refused without a reason") } else { failures.swap_remove(0).1 }
        })
    }

    /// A dump that is repeated if the rule sets change while it runs.
    fn dump(&mut self, request: &Message, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        const TRIES: u32 = 10;
        for last in (0..TRIES).map(|n| n + 1 == TRIES) {
            let mut found = Vec::new();
            match self.connection.dump(request, |_, bytes| found.push(bytes.to_vec())) {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) && !last => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    found.iter().for_each(|bytes| each(bytes));
                    break;
                }
            }
        }
        Ok(())
    }
}

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`
fn number(family: IpFamily) -> u8 {
    match family {
        IpFamily::V4 => 2,
        IpFamily::V6 => 10,
    }
}

/// The chain that the last verdict of a rule leads to.
fn jump_target(expressions: &[u8]) -> Option<String> {
    let targets = attributes(expressions).filter_map(|expression| {
        let expression = expression.value();
        (string(expression, NFTA_EXPR_NAME) == Some("immediate")).then_some(())?;
        let data = attribute(attribute(expression, NFTA_EXPR_DATA)?, NFTA_IMMEDIATE_DATA)?;
        string(attribute(data, NFTA_DATA_VERDICT)?, NFTA_VERDICT_CHAIN).map(str::to_owned)
    });
    targets.last()
}

fn expiring_address(element: &[u8]) -> Option<ExpiringAddress> {
    let key = attribute(attribute(element, NFTA_SET_ELEM_KEY)?, NFTA_DATA_VALUE)?;
    let address = match key.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(key).ok()?),
        16 => IpAddr::from(<[u8; 16]>::try_from(key).ok()?),
        _ => return None,
    };
    let expires = attribute(element, NFTA_SET_ELEM_EXPIRATION).and_then(|value| value.try_into().ok());
    Some(ExpiringAddress { address, expires_ms: expires.map_or(0, u64::from_be_bytes) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netns::tests::{for_test, sh};

    fn table(family: IpFamily, name: &str) -> TableId {
        TableId { family, name: name.into() }
    }

    #[test]
    fn tables_chains_jumps_and_sets_of_others_are_listed_by_name() {
        let Some(netns) = for_test() else { return };
        sh(&netns, "nft '
            table ip one {
                set affinity-x { type ipv4_addr; flags dynamic,timeout; timeout 1h; elements = { 10.0.0.1 timeout 1h expires 10m, 10.0.0.2 }; }
                map other { type ipv4_addr . inet_service : verdict; elements = { 10.0.0.1 . 53 : drop }; }
                chain target { counter; }
                chain base { type filter hook input priority 0; tcp dport 80 jump target; udp dport 53 goto target; tcp dport 1 accept; }
            }
            table ip6 two { chain c { }; }'");
        let one = table(IpFamily::V4, "one");
        netns
            .run(|| {
                let mut tables = ForeignTables::open().unwrap();
                assert_eq!(tables.tables(IpFamily::V4).unwrap(), std::slice::from_ref(&one));
                assert_eq!(tables.tables(IpFamily::V6).unwrap(), [table(IpFamily::V6, "two")]);
                let chains = tables.chains(IpFamily::V4).unwrap();
                let chains: Vec<_> = chains.iter().map(|c| (c.name.as_str(), c.base)).collect();
                assert_eq!(chains, [("target", false), ("base", true)]);
                let jumps = tables.jumps(&one).unwrap();
                assert_eq!(jumps.len(), 2);
                assert!(jumps.iter().all(|j| j.chain == "base" && j.target == "target" && j.handle > 0), "{jumps:?}");
                assert_eq!(tables.sets(&one).unwrap(), ["affinity-x", "other"]);
                let members = tables.addresses(&one, "affinity-x").unwrap();
                let ms = |ip: &str| members.iter().find(|m| m.address.to_string() == ip).unwrap().expires_ms;
                assert!((590_000..=600_000).contains(&ms("10.0.0.1")), "{members:?}");
                assert!((3_590_000..=3_600_000).contains(&ms("10.0.0.2")), "{members:?}");
                assert_eq!(tables.addresses(&one, "other").unwrap(), [], "members of another shape are skipped");
            })
            .unwrap();
    }

    #[test]
    fn a_removal_is_atomic_and_refused_if_the_rules_changed_since() {
        let Some(netns) = for_test() else { return };
        sh(&netns, "nft 'table ip t { chain a { }; chain b { jump a; }; chain keep { jump a; counter; }; }'");
        let list = || sh(&netns, "nft list ruleset");
        let before = list();
        let t = table(IpFamily::V4, "t");
        let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
        let chain = |name: &str| ForeignChain { table: t.clone(), name: name.into(), base: false };
        let rules: Vec<_> = tables.jumps(&t).unwrap().into_iter().filter(|jump| jump.chain == "keep").collect();
        let generation = tables.generation().unwrap();
        // Something in it cannot be done: all stays.
        let missing = Removal { rules: rules.clone(), chains: vec![chain("a"), chain("b"), chain("missing")] };
        assert_eq!(tables.remove(&missing, generation).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        let used = Removal { rules: vec![], chains: vec![chain("a"), chain("b")] };
        assert_eq!(tables.remove(&used, generation).unwrap_err().raw_os_error(), Some(libc::EBUSY));
        assert_eq!(list(), before);
        // Someone else commits.
        sh(&netns, "nft add table ip6 x; nft delete table ip6 x");
        let removal = Removal { rules, chains: vec![chain("a"), chain("b")] };
        assert_eq!(tables.remove(&removal, generation).unwrap_err().raw_os_error(), Some(libc::ERESTART));
        assert_eq!(list(), before);
        let generation = tables.generation().unwrap();
        tables.remove(&removal, generation).unwrap();
        assert_eq!(
            list().split_whitespace().collect::<Vec<_>>().join(" "),
            "table ip t { chain keep { counter packets 0 bytes 0 } }"
        );
    }

    #[test]
    fn a_removal_of_thousands_of_chains_leaves_in_one_batch() {
        let Some(netns) = for_test() else { return };
        let mut script = String::from("table ip t {\n");
        for n in 0..5000 {
            script += &format!("chain KUBE-SEP-{n:016} {{ counter; }}\n");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), script + "}\n").unwrap();
        sh(&netns, &format!("nft -f {}", file.path().display()));
        let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
        let chains = tables.chains(IpFamily::V4).unwrap();
        assert_eq!(chains.len(), 5000);
        let generation = tables.generation().unwrap();
        tables.remove(&Removal { rules: vec![], chains }, generation).unwrap();
        assert_eq!(tables.chains(IpFamily::V4).unwrap(), []);
    }
}
