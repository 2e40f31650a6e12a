//! Against the kernel, in a network namespace of their own; they print SKIP where that is not allowed.

use super::*;
use crate::nft::expr::{Direction, Expr, Load};
use crate::nft::object::{BaseChain, BytesBuilder, ChainType, Data, Field, Hook, MapData, Rule, Verdict};
use proxy_common::Protocol;
use std::net::IpAddr;
use std::process::Command;

/// Runs `test` on a thread of its own in a new network namespace.
pub(super) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(move || {
        if let Err(errno) = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET) {
            println!("SKIP: no network namespace of our own: {errno}");
            return;
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Runs nft(8) in the namespace of this thread.
fn nft(arguments: &[&str], input: &str) -> Result<String, String> {
    use std::io::Write;
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("nft is installed where the tests run as root");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() { Ok(String::from_utf8(output.stdout).unwrap()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn ip(family: IpFamily, n: u8) -> IpAddr {
    if family == IpFamily::V4 { [10, 0, 0, n].into() } else { [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)].into() }
}

fn set(key: &[Field], data: Option<MapData>) -> Set {
    Set { key: key.to_vec(), data, interval: false, dynamic_timeout_ms: None, size: None, comment: None, delete_late: false }
}

fn value(data: Option<Data>, comment: Option<&str>) -> Value {
    Value { data, comment: comment.map(str::to_owned), expires_ms: None }
}

/// A ruleset with every expression and every shape of a set.
pub(super) fn sample(family: IpFamily) -> Ruleset {
    use Field::{Address as A, Port as S, Protocol as P, Random as R};
    use Load::{DestinationAddress, DestinationPort, L4Protocol, Random, SourceAddress};
    let goto = |chain: &str| Data::Verdict(Verdict::Goto(chain.into()));
    let address = |n| BytesBuilder::new().address(ip(family, n));
    let service = |n, port| address(n).protocol(Protocol::Tcp).port(port);
    let mut ruleset = Ruleset {
        table: TableId { family, name: "tandem".into() },
        comment: Some("rules of the Tandem service proxy".to_owned()),
        chains: BTreeMap::new(),
        sets: BTreeMap::new(),
        elements: BTreeMap::new(),
    };
    let mut add = |name: &str, set: Set, elements: Vec<(Key, Value)>| {
        ruleset.sets.insert(name.into(), set);
        if !elements.is_empty() {
            ruleset.elements.insert(name.into(), elements.into_iter().collect());
        }
    };
    add("cluster-ips", Set { comment: Some("Active ClusterIPs".to_owned()), ..set(&[A], None) }, vec![
        (Key::single(address(1).build()), value(None, Some("ns/one"))),
        (Key::single(address(2).build()), value(None, None)),
    ]);
    add("protocols", set(&[P], None), vec![(Key::single([6].into()), value(None, None))]);
    add("ports", Set { size: Some(100), ..set(&[S], None) }, vec![(Key::single([0, 80].into()), value(None, None))]);
    let networks = if family == IpFamily::V4 {
        vec![("0.0.0.0", "0.255.255.255"), ("10.0.0.0", "10.127.255.255"), ("10.128.0.0", "10.255.255.255"), ("192.168.1.1", "192.168.1.1"), ("224.0.0.0", "255.255.255.255")]
    } else {
        vec![("::", "::ffff"), ("fd00::", "fd00::ffff"), ("fd00::1:0", "fd00::1:ffff"), ("fd01::1", "fd01::1"), ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")]
    };
    let of = |text: &str| BytesBuilder::new().address(text.parse().unwrap());
    add("service-cidrs", Set { interval: true, ..set(&[A], None) }, networks.iter().map(|(start, end)| {
        (Key::range(of(start).build(), of(end).build()), value(None, Some("network")))
    }).collect());
    add("firewall-sources", Set { interval: true, ..set(&[A, P, S, A], None) }, networks.iter().map(|(start, end)| {
        let key = |text: &str| service(9, 443).address(text.parse().unwrap()).build();
        (Key::range(key(start), key(end)), value(None, None))
    }).collect());
    add("hairpin-connections", set(&[A, A, P, S], None), vec![
        (Key::single(address(1).address(ip(family, 1)).protocol(Protocol::Udp).port(53).build()), value(None, None)),
    ]);
    add("service-ips", set(&[A, P, S], Some(MapData::Verdict)), vec![
        (Key::single(service(1, 80).build()), value(Some(goto("endpoints-3")), Some("ns/one:http"))),
        (Key::single(service(2, 80).build()), value(Some(Data::Verdict(Verdict::Drop)), None)),
        (Key::single(service(3, 80).build()), value(Some(Data::Verdict(Verdict::Jump("empty".into()))), None)),
        (Key::single(service(4, 80).build()), value(Some(Data::Verdict(Verdict::Accept)), None)),
        (Key::single(service(5, 80).build()), value(Some(Data::Verdict(Verdict::Return)), Some(&"é".repeat(63)))),
    ]);
    add("service-nodeports", set(&[P, S], Some(MapData::Verdict)), vec![
        (Key::single(BytesBuilder::new().protocol(Protocol::Sctp).port(30000).build()), value(Some(goto("endpoints-3")), None)),
    ]);
    let endpoint = |n, port| Some(Data::Value(address(n).port(port).build()));
    add("slots", Set { comment: Some("endpoints".to_owned()), ..set(&[A, P, S, R], Some(MapData::Value(vec![A, S]))) }, (0..30).map(|n| {
        (Key::single(service(1, 80).random(n).build()), value(endpoint(n as u8, 8080), None))
    }).collect());
    add("nodeport-slots", set(&[P, S, R], Some(MapData::Value(vec![A, S]))), vec![
        (Key::single(BytesBuilder::new().protocol(Protocol::Udp).port(30001).random(1).build()), value(endpoint(7, 53), Some("x"))),
    ]);
    add("affinity-X", Set { dynamic_timeout_ms: Some(10_800_000), size: Some(65535), ..set(&[A], None) }, vec![]);

    let mut chain = |name: &str, base: Option<(ChainType, Hook, i32)>, rules: Vec<Vec<Expr>>| {
        let base = base.map(|(chain_type, hook, priority)| BaseChain { chain_type, hook, priority });
        let comment = (name == "empty").then(|| "nothing here".to_owned());
        let rules = rules.into_iter().enumerate().map(|(n, exprs)| Rule { exprs, comment: (n == 0).then(|| format!("first of {name}")) }).collect();
        ruleset.chains.insert(name.into(), Chain { base, comment, rules });
    };
    let jump = |chain: &str| Expr::Verdict(Verdict::Jump(chain.into()));
    let to = |chain: &str| Expr::Verdict(Verdict::Goto(chain.into()));
    chain("nat-prerouting", Some((ChainType::Nat, Hook::Prerouting, -100)), vec![vec![jump("services")]]);
    chain("nat-output", Some((ChainType::Nat, Hook::Output, -100)), vec![vec![jump("services")]]);
    chain("nat-postrouting", Some((ChainType::Nat, Hook::Postrouting, 100)), vec![vec![jump("masquerading")]]);
    chain("filter-input", Some((ChainType::Filter, Hook::Input, -110)), vec![vec![Expr::CtStateNew, jump("checks")]]);
    chain("filter-forward", Some((ChainType::Filter, Hook::Forward, 0)), vec![vec![Expr::Counter, Expr::CtStateNew, jump("checks")]]);
    chain("filter-postrouting-mark", Some((ChainType::Filter, Hook::Postrouting, 101)), vec![vec![Expr::MarkHas(0x4000), Expr::MarkToggle(0x4000)]]);
    chain("empty", None, vec![]);
    let network = |direction, text: &str, negate| Expr::InNetwork { direction, network: text.parse().unwrap(), negate };
    let texts = if family == IpFamily::V4 {
        ["10.0.0.0/8", "10.0.0.0/9", "10.1.2.3/32", "0.0.0.0/0", "127.0.0.0/8", "172.16.0.0/12"]
    } else {
        ["fd00::/16", "fd00::/61", "fd00::1/128", "::/0", "::1/128", "fd00:1:2::/48"]
    };
    let all: Vec<Load> = vec![DestinationAddress, L4Protocol, DestinationPort];
    let with = |more: &[Load]| all.iter().copied().chain(more.iter().copied()).collect::<Vec<_>>();
    chain("checks", None, vec![
        vec![Expr::InSet { loads: with(&[SourceAddress]), set: "firewall-sources".into(), negate: true }, Expr::Verdict(Verdict::Drop)],
        vec![Expr::InSet { loads: vec![DestinationAddress], set: "cluster-ips".into(), negate: false }, Expr::Reject],
        vec![Expr::InSet { loads: vec![DestinationAddress], set: "service-cidrs".into(), negate: false }, Expr::Verdict(Verdict::Drop)],
        vec![Expr::InSet { loads: vec![L4Protocol], set: "protocols".into(), negate: false }, Expr::Verdict(Verdict::Accept)],
        vec![Expr::InSet { loads: vec![DestinationPort], set: "ports".into(), negate: false }, Expr::Verdict(Verdict::Return)],
        vec![network(Direction::Source, texts[0], false), network(Direction::Destination, texts[1], true), Expr::Verdict(Verdict::Accept)],
        vec![network(Direction::Source, texts[2], true), network(Direction::Source, texts[3], false), Expr::Verdict(Verdict::Accept)],
        vec![network(Direction::Destination, texts[5], false), Expr::Verdict(Verdict::Accept)],
    ]);
    chain("services", None, vec![
        vec![Expr::InputInterface { name: "cali".into(), prefix: true, negate: true }, Expr::MarkSet(0x4000)],
        vec![Expr::InputInterface { name: "cbr0".into(), prefix: false, negate: false }, Expr::MarkSet(0x8000_0000)],
        vec![Expr::InputInterface { name: "fifteen-bytes-x".into(), prefix: false, negate: true }, Expr::MarkSet(1)],
        vec![Expr::VerdictMap { loads: all.clone(), map: "service-ips".into() }],
        vec![
            Expr::FibLocal(Direction::Destination),
            network(Direction::Destination, texts[4], true),
            Expr::VerdictMap { loads: vec![L4Protocol, DestinationPort], map: "service-nodeports".into() },
        ],
        vec![Expr::FibLocal(Direction::Source), Expr::MarkSet(0x4000)],
        vec![Expr::OneIn(2), to("endpoint")],
        vec![Expr::OneIn(1), to("endpoints-3")],
        vec![Expr::L4Proto(Protocol::Udp), to("nodeport-endpoints-3")],
    ]);
    chain("endpoints-3", None, vec![vec![Expr::DnatMap { loads: with(&[Random(3)]), map: "slots".into() }]]);
    chain("nodeport-endpoints-3", None, vec![
        vec![Expr::DnatMap { loads: vec![L4Protocol, DestinationPort, Random(3)], map: "nodeport-slots".into() }],
    ]);
    chain("endpoint", None, vec![
        vec![Expr::UpdateSet("affinity-X".into())],
        vec![Expr::L4Proto(Protocol::Sctp), Expr::Dnat { address: ip(family, 77), port: 8080 }],
    ]);
    chain("masquerading", None, vec![
        vec![Expr::MarkHas(0x4000), Expr::MarkToggle(0x4000), Expr::Verdict(Verdict::Goto("masquerade-connection".into()))],
        vec![
            Expr::CtStatusDnat,
            Expr::InSet { loads: vec![SourceAddress, DestinationAddress, L4Protocol, DestinationPort], set: "hairpin-connections".into(), negate: false },
            to("masquerade-connection"),
        ],
    ]);
    chain("masquerade-connection", None, vec![
        vec![Expr::L4Proto(Protocol::Tcp), Expr::Masquerade { ports: Some((32768, 65535)) }],
        vec![Expr::Masquerade { ports: None }],
    ]);
    ruleset
}

fn create(ruleset: &Ruleset) -> Transaction {
    let mut transaction = Transaction::new(ruleset.table.clone());
    transaction.push(Op::AddTable { comment: ruleset.comment.clone() }, None);
    for (name, set) in &ruleset.sets {
        transaction.push(Op::AddSet { name: name.clone(), set: set.clone() }, None);
    }
    for (name, chain) in &ruleset.chains {
        transaction.push(Op::AddChain { name: name.clone(), base: chain.base, comment: chain.comment.clone() }, None);
    }
    for (name, chain) in &ruleset.chains {
        for rule in &chain.rules {
            transaction.push(Op::AddRule { chain: name.clone(), rule: rule.clone() }, None);
        }
    }
    for (set, elements) in &ruleset.elements {
        let elements = elements.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        transaction.push(Op::AddElements { set: set.clone(), elements }, None);
    }
    transaction
}

fn list(table: &TableId) -> String {
    let family = if table.family == IpFamily::V4 { "ip" } else { "ip6" };
    nft(&["list", "table", family, &table.name], "").unwrap()
}

#[test]
fn what_is_committed_is_read_back() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        for family in IpFamily::ALL {
            let want = sample(family);
            assert_eq!(connection.read(&want.table, false).unwrap(), None);
            connection.commit(&create(&want)).unwrap();
            let have = connection.read(&want.table, false).unwrap().unwrap();
            assert_eq!(have.chains, want.chains);
            assert_eq!(have.sets, want.sets);
            for (name, elements) in &want.elements {
                assert_eq!(&have.elements[name], elements, "{name}");
            }
            assert_eq!(have, want);
        }
    });
}

#[test]
fn nft_lists_and_loads_what_is_committed() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        for family in IpFamily::ALL {
            let want = sample(family);
            connection.commit(&create(&want)).unwrap();
            let first = list(&want.table);
            nft(&["flush", "ruleset"], "").unwrap();
            nft(&["-f", "-"], &first).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(list(&want.table), first);
            let have = connection.read(&want.table, false).unwrap().unwrap();
            assert_eq!(have, want);
        }
    });
}
