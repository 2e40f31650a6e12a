//! kube-proxy's nftables tables, `ip kube-proxy` and `ip6 kube-proxy`.

use crate::nft::foreign::{ExpiringAddress, ForeignTables};
use crate::nft::object::{BytesBuilder, Key, Name, Ruleset, TableId, Value};
use proxy_common::IpFamily;
use std::collections::BTreeMap;
use std::io;

/// Name of kube-proxy's table, in both families.
pub const NAME: &str = "kube-proxy";
/// Its affinity sets, and ours, begin like this; the rest of the name is the same too.
const AFFINITY: &str = "affinity-";

/// Its tables that exist.
pub fn find(tables: &mut ForeignTables) -> io::Result<Vec<TableId>> {
    let mut found = Vec::new();
    for family in IpFamily::ALL {
        found.extend(tables.tables(family)?.into_iter().filter(|table| &*table.name == NAME));
    }
    Ok(found)
}

/// The clients that kube-proxy's affinity sets remember, by set.
pub type Remembered = BTreeMap<String, Vec<ExpiringAddress>>;

/// Reads the affinity sets of a table of kube-proxy.
pub fn remembered(tables: &mut ForeignTables, table: &TableId) -> io::Result<Remembered> {
    let mut found = Remembered::new();
    for set in tables.sets(table)?.into_iter().filter(|set| set.starts_with(AFFINITY)) {
        let clients = tables.addresses(table, &set)?;
        found.insert(set, clients);
    }
    Ok(found)
}

/// What to add to our own affinity sets so that clients stay with their endpoints: the clients of each set that `wanted`
/// has too, with the time that they have left. Pure.
///
/// A client's time is cut to the set's timeout, which may be shorter now; clients beyond the set's size are left out, and
/// those without time left too.
#[must_use]
pub fn import(remembered: &Remembered, wanted: &Ruleset) -> BTreeMap<Name, Vec<(Key, Value)>> {
    let mut imports = BTreeMap::new();
    for (name, clients) in remembered {
        let Some((name, set)) = wanted.sets.get_key_value(name.as_str()) else { continue };
        let Some(timeout) = set.dynamic_timeout_ms.filter(|_| name.starts_with(AFFINITY)) else { continue };
        let of_family =
            |client: &&ExpiringAddress| IpFamily::of(client.address) == wanted.table.family && client.expires_ms > 0;
        let elements =
            clients.iter().filter(of_family).take(set.size.map_or(usize::MAX, |size| size as usize)).map(|client| {
                let key = Key { start: BytesBuilder::new().address(client.address).build(), end: None };
                (key, Value { expires_ms: Some(client.expires_ms.min(timeout)), ..Value::default() })
            });
        let elements: Vec<_> = elements.collect();
        if !elements.is_empty() {
            imports.insert(name.clone(), elements);
        }
    }
    imports
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::diff::diff;
    use crate::nft::netlink::Connection;
    use crate::nft::netlink::tests::{in_namespace, nft, sample};
    use crate::nft::object::{Field, Set};
    use crate::nft::transaction::Op;
    use crate::sys::netns::tests::{for_test, sh};

    const SET: &str = "affinity-JO2XBXZR-testing/service/tcp/http__10.180.0.1/80";

    fn wanted(sets: &[(&str, Option<u64>, u32)]) -> Ruleset {
        let set = |timeout, size| Set {
            key: vec![Field::Address],
            data: None,
            interval: false,
            dynamic_timeout_ms: timeout,
            size: Some(size),
            comment: None,
            delete_late: false,
        };
        Ruleset {
            table: TableId { family: IpFamily::V4, name: "tandem".into() },
            comment: None,
            chains: BTreeMap::new(),
            sets: sets.iter().map(|(name, timeout, size)| ((*name).into(), set(*timeout, *size))).collect(),
            elements: BTreeMap::new(),
        }
    }

    fn client(ip: &str, expires_ms: u64) -> ExpiringAddress {
        ExpiringAddress { address: ip.parse().unwrap(), expires_ms }
    }

    #[test]
    fn clients_of_sets_that_we_have_too_are_imported_with_what_is_left_of_their_time() {
        let remembered = Remembered::from([
            (
                SET.into(),
                vec![
                    client("10.0.0.1", 5000),
                    client("10.0.0.2", 20_000_000),
                    client("10.0.0.3", 0),
                    client("fd00::1", 9),
                ],
            ),
            ("affinity-GONE".into(), vec![client("10.0.0.1", 5000)]),
            ("affinity-STATIC".into(), vec![client("10.0.0.1", 5000)]),
            ("cluster-ips".into(), vec![client("10.0.0.1", 5000)]),
        ]);
        let wanted =
            wanted(&[(SET, Some(10_800_000), 100), ("affinity-STATIC", None, 100), ("cluster-ips", Some(1), 100)]);
        let imports = import(&remembered, &wanted);
        assert_eq!(imports.keys().map(|name| &**name).collect::<Vec<_>>(), [SET]);
        let elements: Vec<_> = imports[SET].iter().map(|(key, value)| (&*key.start, value.expires_ms)).collect();
        assert_eq!(elements, [(&[10, 0, 0, 1][..], Some(5000)), (&[10, 0, 0, 2][..], Some(10_800_000))]);
    }

    #[test]
    fn no_more_clients_than_a_set_holds_are_imported() {
        let remembered = Remembered::from([(SET.into(), (1..9).map(|n| client(&format!("10.0.0.{n}"), 5)).collect())]);
        assert_eq!(import(&remembered, &wanted(&[(SET, Some(10_000), 3)]))[SET].len(), 3);
    }

    #[test]
    fn its_tables_are_found_here_and_not_in_another_namespace() {
        let (Some(here), Some(there)) = (for_test(), for_test()) else { return };
        let script = format!(
            "nft 'table ip kube-proxy {{ set {SET} {{ type ipv4_addr; flags dynamic,timeout; timeout 3h; elements = {{ 10.0.0.7 }}; }}
                set cluster-ips {{ type ipv4_addr; elements = {{ 10.0.0.9 }}; }}; }}; table ip6 kube-proxy {{ }}; table ip other {{ }}'"
        );
        // nft 1.0.6 cannot parse a set name with slashes; kube-proxy's names reach the kernel quoted.
        sh(&there, &script.replace(SET, "affinity-JO2XBXZR"));
        let find_in = |netns: &crate::sys::netns::NetNs| {
            let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
            let found = find(&mut tables).unwrap();
            let clients = found.first().map(|table| remembered(&mut tables, table).unwrap());
            (found.iter().map(ToString::to_string).collect::<Vec<_>>(), clients)
        };
        assert_eq!(find_in(&here), (vec![], None));
        let (found, clients) = find_in(&there);
        assert_eq!(found, ["ip kube-proxy", "ip6 kube-proxy"]);
        let clients = clients.unwrap();
        assert_eq!(clients.keys().collect::<Vec<_>>(), ["affinity-JO2XBXZR"]);
        assert_eq!(clients["affinity-JO2XBXZR"][0].address.to_string(), "10.0.0.7");
    }

    #[test]
    fn affinity_of_sets_that_are_wanted_is_imported_in_the_transaction_that_takes_over() {
        in_namespace(|| {
            let theirs = TableId { family: IpFamily::V4, name: NAME.into() };
            let input = "table ip kube-proxy {
                set affinity-X { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 5h; elements = { 10.0.0.1 expires 10m, 10.0.0.2 } }
                set affinity-Y { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 5h; elements = { 10.0.0.1 } }
            }";
            nft(&["-f", "-"], input).unwrap();
            let want = sample(IpFamily::V4);
            let remembered = remembered(&mut ForeignTables::open().unwrap(), &theirs).unwrap();
            let imports = import(&remembered, &want);
            assert_eq!(imports.values().map(Vec::len).sum::<usize>(), 2);
            let mut transaction = diff(None, &want).now;
            for (set, elements) in imports {
                transaction.push(Op::AddElements { set, elements }, None);
            }
            transaction.push(Op::DestroyTable(theirs), None);
            let mut connection = Connection::open().unwrap();
            connection.commit(&transaction).unwrap();
            let have = connection.read(&want.table, true).unwrap().unwrap();
            let minutes: Vec<u64> =
                have.elements["affinity-X"].values().map(|value| value.expires_ms.unwrap().div_ceil(60_000)).collect();
            // Ours lasts three hours.
            assert_eq!(minutes, [10, 180]);
        });
    }
}
