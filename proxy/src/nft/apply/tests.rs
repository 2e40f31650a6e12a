//! Drift of known changes, and the helpers against the kernel.

use super::*;
use crate::nft::netlink::tests::{in_namespace, nft, sample};
use proxy_common::IpFamily;

#[test]
fn every_kind_of_drift_is_named() {
    let want = sample(IpFamily::V4);
    let mut have = want.clone();
    have.chains.remove("endpoint");
    have.chains.insert("theirs".into(), Default::default());
    have.chains.get_mut("nat-output").unwrap().base = None;
    let services = &mut have.chains.get_mut("services").unwrap().rules;
    services.swap(1, 2);
    services.pop();
    have.chains.get_mut("checks").unwrap().rules.push(Default::default());
    have.sets.remove("protocols");
    have.sets.get_mut("ports").unwrap().size = Some(7);
    let elements = have.elements.get_mut("service-ips").unwrap();
    let first = elements.pop_first().unwrap();
    elements.values_mut().next().unwrap().data = first.1.data;
    let mut key = first.0;
    key.start[0] = 11;
    elements.insert(key, Value::default());
    let lines: Vec<String> = drift(Some(&have), &want).iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(lines.join("\n"));
    assert_eq!(drift(None, &want), [Drift::Missing { object: "table ip tandem".to_owned() }]);
    assert_eq!(drift(Some(&want), &want), []);
}

#[test]
fn sync_repairs_what_verify_finds() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        for family in IpFamily::ALL {
            let want = sample(family);
            let mut table = Table::new(&mut connection, want.table.clone());
            assert_eq!(table.verify(&want).unwrap().len(), 1);
            assert!(table.sync(&want).unwrap().is_empty());
            assert_eq!(table.verify(&want).unwrap(), []);

            let name = want.table.to_string();
            nft(&["-f", "-"], &format!("flush chain {name} services\nflush map {name} service-ips\nadd chain {name} theirs\nadd rule {name} empty accept")).unwrap();
            assert_eq!(
                table.verify(&want).unwrap().len(),
                want.chains["services"].rules.len() + want.elements["service-ips"].len() + 2
            );
            let late = table.sync(&want).unwrap();
            assert_eq!(late.steps.len(), 1, "the foreign chain");
            connection.commit(&late).unwrap();
            let mut table = Table::new(&mut connection, want.table.clone());
            assert_eq!(table.verify(&want).unwrap(), []);

            nft(&["-f", "-"], &format!("add rule {name} empty accept")).unwrap();
            table.replace(&want).unwrap();
            assert_eq!(table.verify(&want).unwrap(), []);
        }
    });
}
