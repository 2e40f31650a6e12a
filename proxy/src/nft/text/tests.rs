//! Exact text; that nft(8) takes it is tested where a kernel is (`netlink::tests`).

use super::*;
use crate::nft::object::{BytesBuilder, TableId};

fn small() -> Ruleset {
    let service = |n: u8| BytesBuilder::new().address([10, 96, 0, n].into()).protocol(Protocol::Tcp).port(80);
    let set = |key: &[Field], data| Set {
        key: key.to_vec(),
        data,
        interval: false,
        dynamic_timeout_ms: None,
        size: None,
        comment: None,
        delete_late: false,
    };
    let slots = Set {
        delete_late: true,
        ..set(
            &[Field::Address, Field::Protocol, Field::Port, Field::Random],
            Some(MapData::Value(vec![Field::Address, Field::Port])),
        )
    };
    let endpoint = |n: u8| Some(Data::Value(BytesBuilder::new().address([10, 0, 0, n].into()).port(8080).build()));
    let value = |data| Value { data, comment: None, expires_ms: None };
    let network = Key::range([10, 0, 0, 0].into(), [10, 127, 255, 255].into());
    let range = Key::range([192, 168, 0, 1].into(), [192, 168, 0, 5].into());
    Ruleset {
        table: TableId { family: IpFamily::V4, name: "tandem".into() },
        comment: Some("rules of the Tandem service proxy".to_owned()),
        chains: [
            (
                "nat-output".into(),
                Chain {
                    base: Some(BaseChain { chain_type: ChainType::Nat, hook: Hook::Output, priority: -100 }),
                    comment: None,
                    rules: vec![Rule {
                        exprs: vec![Expr::Verdict(Verdict::Jump("services".into()))],
                        comment: Some("a \"quoted\"\nword".to_owned()),
                    }],
                },
            ),
            ("services".into(), Chain::default()),
        ]
        .into(),
        sets: [
            (
                "affinity-X".into(),
                Set { dynamic_timeout_ms: Some(10_800_500), size: Some(65535), ..set(&[Field::Address], None) },
            ),
            (
                "service-cidrs".into(),
                Set { interval: true, comment: Some("CIDRs".to_owned()), ..set(&[Field::Address], None) },
            ),
            ("service-ips".into(), set(&[Field::Address, Field::Protocol, Field::Port], Some(MapData::Verdict))),
            ("slots".into(), slots),
        ]
        .into(),
        elements: [
            (
                "affinity-X".into(),
                [(Key::single([10, 0, 0, 9].into()), Value { expires_ms: Some(61_000), ..Value::default() })].into(),
            ),
            (
                "service-cidrs".into(),
                [(network, value(None)), (range, value(None)), (Key::range([1; 4].into(), [1; 4].into()), value(None))]
                    .into(),
            ),
            (
                "service-ips".into(),
                [(
                    Key::single(service(1).build()),
                    Value {
                        data: Some(Data::Verdict(Verdict::Goto("services".into()))),
                        comment: Some("shop/web:http".to_owned()),
                        expires_ms: None,
                    },
                )]
                .into(),
            ),
            (
                "slots".into(),
                (0..2).map(|n| (Key::single(service(1).random(n).build()), value(endpoint(n as u8)))).collect(),
            ),
        ]
        .into(),
    }
}

#[test]
fn a_ruleset_reads_as_nft_lists_it() {
    insta::assert_snapshot!(ruleset(&small()));
}

#[test]
fn a_transaction_reads_as_commands() {
    let small = small();
    let mut steps = crate::nft::diff::diff(None, &small).now;
    steps.push(Op::FlushSet("service-ips".into()), None);
    steps.push(
        Op::DeleteElements { set: "slots".into(), keys: small.elements["slots"].keys().cloned().collect() },
        None,
    );
    steps.push(Op::DeleteElements { set: "unknown".into(), keys: vec![Key::single([1, 2, 3, 4].into())] }, None);
    steps.push(Op::FlushChain("services".into()), None);
    steps.push(Op::DeleteSet("service-ips".into()), None);
    steps.push(Op::DestroyTable(TableId { family: IpFamily::V6, name: "kube-proxy".into() }), None);
    insta::assert_snapshot!(transaction(&steps, &BTreeMap::new()));
}
