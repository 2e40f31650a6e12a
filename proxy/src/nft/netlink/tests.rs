//! Against the kernel, in a network namespace of their own; they print SKIP where that is not allowed.

use super::monitor::{Event, Monitor};
use super::*;
use crate::nft::diff::{
    Difference, diff,
    tests::{as_read, seeds},
};
use crate::nft::expr::{Direction, Expr, Load};
use crate::nft::object::{BaseChain, BytesBuilder, ChainType, Data, Field, Hook, MapData, Rule, Verdict};
use crate::nft::text;
use proxy_common::Protocol;
use std::net::IpAddr;
use std::process::Command;

/// Runs `test` on a thread of its own in a new network namespace.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
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
pub(crate) fn nft(arguments: &[&str], input: &str) -> Result<String, String> {
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
    if output.status.success() {
        Ok(String::from_utf8(output.stdout).unwrap())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

fn ip(family: IpFamily, n: u8) -> IpAddr {
    if family == IpFamily::V4 { [10, 0, 0, n].into() } else { [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n)].into() }
}

fn set(key: &[Field], data: Option<MapData>) -> Set {
    Set {
        key: key.to_vec(),
        data,
        interval: false,
        dynamic_timeout_ms: None,
        size: None,
        comment: None,
        delete_late: false,
    }
}

fn value(data: Option<Data>, comment: Option<&str>) -> Value {
    Value { data, comment: comment.map(str::to_owned), expires_ms: None }
}

/// A ruleset with every expression and every shape of a set.
pub(crate) fn sample(family: IpFamily) -> Ruleset {
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
    add(
        "cluster-ips",
        Set { comment: Some("Active ClusterIPs".to_owned()), ..set(&[A], None) },
        vec![
            (Key::single(address(1).build()), value(None, Some("ns/one"))),
            (Key::single(address(2).build()), value(None, None)),
        ],
    );
    add("protocols", set(&[P], None), vec![(Key::single([6].into()), value(None, None))]);
    add("ports", Set { size: Some(100), ..set(&[S], None) }, vec![(Key::single([0, 80].into()), value(None, None))]);
    let networks = if family == IpFamily::V4 {
        vec![
            ("0.0.0.0", "0.255.255.255"),
            ("10.0.0.0", "10.127.255.255"),
            ("10.128.0.0", "10.255.255.255"),
            ("192.168.1.1", "192.168.1.1"),
            ("224.0.0.0", "255.255.255.255"),
        ]
    } else {
        vec![
            ("::", "::ffff"),
            ("fd00::", "fd00::ffff"),
            ("fd00::1:0", "fd00::1:ffff"),
            ("fd01::1", "fd01::1"),
            ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ]
    };
    let of = |text: &str| BytesBuilder::new().address(text.parse().unwrap());
    add(
        "service-cidrs",
        Set { interval: true, ..set(&[A], None) },
        networks
            .iter()
            .map(|(start, end)| (Key::range(of(start).build(), of(end).build()), value(None, Some("network"))))
            .collect(),
    );
    add(
        "firewall-sources",
        Set { interval: true, ..set(&[A, P, S, A], None) },
        networks
            .iter()
            .map(|(start, end)| {
                let key = |text: &str| service(9, 443).address(text.parse().unwrap()).build();
                (Key::range(key(start), key(end)), value(None, None))
            })
            .collect(),
    );
    add(
        "hairpin-connections",
        set(&[A, A, P, S], None),
        vec![(
            Key::single(address(1).address(ip(family, 1)).protocol(Protocol::Udp).port(53).build()),
            value(None, None),
        )],
    );
    add(
        "service-ips",
        set(&[A, P, S], Some(MapData::Verdict)),
        vec![
            (Key::single(service(1, 80).build()), value(Some(goto("endpoints-3")), Some("ns/one:http"))),
            (Key::single(service(2, 80).build()), value(Some(Data::Verdict(Verdict::Drop)), None)),
            (Key::single(service(3, 80).build()), value(Some(Data::Verdict(Verdict::Jump("empty".into()))), None)),
            (Key::single(service(4, 80).build()), value(Some(Data::Verdict(Verdict::Accept)), None)),
            (Key::single(service(5, 80).build()), value(Some(Data::Verdict(Verdict::Return)), Some(&"é".repeat(63)))),
        ],
    );
    add(
        "service-nodeports",
        set(&[P, S], Some(MapData::Verdict)),
        vec![(
            Key::single(BytesBuilder::new().protocol(Protocol::Sctp).port(30000).build()),
            value(Some(goto("endpoints-3")), None),
        )],
    );
    let endpoint = |n, port| Some(Data::Value(address(n).port(port).build()));
    add(
        "slots",
        Set { comment: Some("endpoints".to_owned()), ..set(&[A, P, S, R], Some(MapData::Value(vec![A, S]))) },
        (0..30)
            .map(|n| (Key::single(service(1, 80).random(n).build()), value(endpoint(n as u8, 8080), None)))
            .collect(),
    );
    add(
        "nodeport-slots",
        set(&[P, S, R], Some(MapData::Value(vec![A, S]))),
        vec![(
            Key::single(BytesBuilder::new().protocol(Protocol::Udp).port(30001).random(1).build()),
            value(endpoint(7, 53), Some("x")),
        )],
    );
    add("affinity-X", Set { dynamic_timeout_ms: Some(10_800_000), size: Some(65535), ..set(&[A], None) }, vec![]);

    let mut chain = |name: &str, base: Option<(ChainType, Hook, i32)>, rules: Vec<Vec<Expr>>| {
        let base = base.map(|(chain_type, hook, priority)| BaseChain { chain_type, hook, priority });
        let comment = (name == "empty").then(|| "nothing here".to_owned());
        let rules = rules
            .into_iter()
            .enumerate()
            .map(|(n, exprs)| Rule { exprs, comment: (n == 0).then(|| format!("first of {name}")) })
            .collect();
        ruleset.chains.insert(name.into(), Chain { base, comment, rules });
    };
    let jump = |chain: &str| Expr::Verdict(Verdict::Jump(chain.into()));
    let to = |chain: &str| Expr::Verdict(Verdict::Goto(chain.into()));
    chain("nat-prerouting", Some((ChainType::Nat, Hook::Prerouting, -100)), vec![vec![jump("services")]]);
    chain("nat-output", Some((ChainType::Nat, Hook::Output, -100)), vec![vec![jump("services")]]);
    chain("nat-postrouting", Some((ChainType::Nat, Hook::Postrouting, 100)), vec![vec![jump("masquerading")]]);
    chain("filter-input", Some((ChainType::Filter, Hook::Input, -110)), vec![vec![Expr::CtStateNew, jump("checks")]]);
    chain(
        "filter-forward",
        Some((ChainType::Filter, Hook::Forward, 0)),
        vec![vec![Expr::Counter, Expr::CtStateNew, jump("checks")]],
    );
    chain(
        "filter-postrouting-mark",
        Some((ChainType::Filter, Hook::Postrouting, 101)),
        vec![vec![Expr::MarkHas(0x4000), Expr::MarkToggle(0x4000)]],
    );
    chain("empty", None, vec![]);
    let network = |direction, text: &str, negate| Expr::InNetwork { direction, network: text.parse().unwrap(), negate };
    let texts = if family == IpFamily::V4 {
        ["10.0.0.0/8", "10.0.0.0/9", "10.1.2.3/32", "0.0.0.0/0", "127.0.0.0/8", "172.16.0.0/12"]
    } else {
        ["fd00::/16", "fd00::/61", "fd00::1/128", "::/0", "::1/128", "fd00:1:2::/48"]
    };
    let all: Vec<Load> = vec![DestinationAddress, L4Protocol, DestinationPort];
    let with = |more: &[Load]| all.iter().copied().chain(more.iter().copied()).collect::<Vec<_>>();
    chain(
        "checks",
        None,
        vec![
            vec![
                Expr::InSet { loads: with(&[SourceAddress]), set: "firewall-sources".into(), negate: true },
                Expr::Verdict(Verdict::Drop),
            ],
            vec![
                Expr::InSet { loads: vec![DestinationAddress], set: "cluster-ips".into(), negate: false },
                Expr::Reject,
            ],
            vec![
                Expr::InSet { loads: vec![DestinationAddress], set: "service-cidrs".into(), negate: false },
                Expr::Verdict(Verdict::Drop),
            ],
            vec![
                Expr::InSet { loads: vec![L4Protocol], set: "protocols".into(), negate: false },
                Expr::Verdict(Verdict::Accept),
            ],
            vec![
                Expr::InSet { loads: vec![DestinationPort], set: "ports".into(), negate: false },
                Expr::Verdict(Verdict::Return),
            ],
            vec![
                network(Direction::Source, texts[0], false),
                network(Direction::Destination, texts[1], true),
                Expr::Verdict(Verdict::Accept),
            ],
            vec![
                network(Direction::Source, texts[2], true),
                network(Direction::Source, texts[3], false),
                Expr::Verdict(Verdict::Accept),
            ],
            vec![network(Direction::Destination, texts[5], false), Expr::Verdict(Verdict::Accept)],
        ],
    );
    chain(
        "services",
        None,
        vec![
            vec![Expr::InputInterface { name: "cali".into(), prefix: true, negate: true }, Expr::MarkSet(0x4000)],
            vec![
                Expr::InputInterface { name: "cbr0".into(), prefix: false, negate: false },
                Expr::MarkSet(0x8000_0000),
            ],
            vec![
                Expr::InputInterface { name: "fifteen-bytes-x".into(), prefix: false, negate: true },
                Expr::MarkSet(1),
            ],
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
        ],
    );
    chain("endpoints-3", None, vec![vec![Expr::DnatMap { loads: with(&[Random(3)]), map: "slots".into() }]]);
    chain(
        "nodeport-endpoints-3",
        None,
        vec![vec![Expr::DnatMap { loads: vec![L4Protocol, DestinationPort, Random(3)], map: "nodeport-slots".into() }]],
    );
    chain(
        "endpoint",
        None,
        vec![
            vec![Expr::UpdateSet("affinity-X".into())],
            vec![Expr::L4Proto(Protocol::Sctp), Expr::Dnat { address: ip(family, 77), port: 8080 }],
        ],
    );
    chain(
        "masquerading",
        None,
        vec![
            vec![
                Expr::MarkHas(0x4000),
                Expr::MarkToggle(0x4000),
                Expr::Verdict(Verdict::Goto("masquerade-connection".into())),
            ],
            vec![
                Expr::CtStatusDnat,
                Expr::InSet {
                    loads: vec![SourceAddress, DestinationAddress, L4Protocol, DestinationPort],
                    set: "hairpin-connections".into(),
                    negate: false,
                },
                to("masquerade-connection"),
            ],
        ],
    );
    chain(
        "masquerade-connection",
        None,
        vec![
            vec![Expr::L4Proto(Protocol::Tcp), Expr::Masquerade { ports: Some((32768, 65535)) }],
            vec![Expr::Masquerade { ports: None }],
        ],
    );
    ruleset
}

fn create(ruleset: &Ruleset) -> Transaction {
    diff(None, ruleset).now
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

#[test]
fn nft_makes_of_our_text_what_we_make() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        for family in IpFamily::ALL {
            let want = sample(family);
            let transaction = create(&want);
            connection.commit(&transaction).unwrap();
            let ours = list(&want.table);
            for text in [text::ruleset(&want), text::transaction(&transaction, &BTreeMap::new())] {
                nft(&["flush", "ruleset"], "").unwrap();
                nft(&["-f", "-"], &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
                assert_eq!(list(&want.table), ours);
                assert_eq!(connection.read(&want.table, false).unwrap().unwrap(), want);
            }
        }
    });
}

#[test]
fn nft_takes_the_text_of_random_changes() {
    use proptest::strategy::{Strategy, ValueTree};
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let mut next = || seeds().new_tree(&mut runner).unwrap().current();
        let mut have = next();
        nft(&["-f", "-"], &text::ruleset(&have)).unwrap();
        for _ in 0..50 {
            let want = next();
            let Difference { now, late } = diff(Some(&have), &want);
            for text in [text::transaction(&now, &have.sets), text::transaction(&late, &have.sets)] {
                nft(&["-f", "-"], &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
            }
            assert_eq!(connection.read(&want.table, false).unwrap().unwrap(), as_read(&want));
            have = want;
        }
    });
}

fn slots(table: &TableId, count: u32, port: u16) -> Ruleset {
    let mut ruleset = sample(table.family);
    let slot = |n: u32| {
        let key = BytesBuilder::new().address(ip(table.family, 1)).protocol(Protocol::Tcp).port(80).random(n).build();
        let data = BytesBuilder::new().address(ip(table.family, (n % 251) as u8)).port(port).build();
        (Key::single(key), value(Some(Data::Value(data)), None))
    };
    ruleset.elements.insert("slots".into(), (0..count).map(slot).collect());
    ruleset
}

fn sample_table() -> TableId {
    TableId { family: IpFamily::V4, name: "tandem".into() }
}

#[test]
fn twenty_thousand_elements_are_one_transaction() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let want = slots(&sample_table(), 20_000, 8080);
        let before = connection.generation().unwrap();
        connection.commit(&create(&want)).unwrap();
        assert_eq!(connection.generation().unwrap(), before + 1);
        assert_eq!(connection.read(&want.table, false).unwrap().unwrap(), want);
    });
}

#[test]
fn slots_are_flipped_ten_thousand_times() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let (one, two) = (slots(&sample_table(), 10, 1), slots(&sample_table(), 8, 2));
        connection.commit(&create(&one)).unwrap();
        let (there, back) = (diff(Some(&one), &two), diff(Some(&two), &one));
        for _ in 0..5_000 {
            for difference in [&there, &back] {
                connection.commit(&difference.now).unwrap();
                connection.commit(&difference.late).unwrap();
            }
        }
        assert_eq!(connection.read(&one.table, false).unwrap().unwrap(), one);
    });
}

#[test]
fn adding_what_is_there_changes_nothing() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        for family in IpFamily::ALL {
            let want = sample(family);
            connection.commit(&create(&want)).unwrap();
            let mut again = create(&want);
            again.steps.retain(|step| !matches!(step.op, Op::AddRule { .. }));
            connection.commit(&again).unwrap();
            assert_eq!(connection.read(&want.table, false).unwrap().unwrap(), want);
        }
    });
}

#[test]
fn a_refused_step_leaves_nothing_and_is_named() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let want = sample(IpFamily::V4);
        let service = ObjectName::new("shop", "web");
        let bad = |n| (Key::single([10, 9, 9, n].into()), value(None, None));
        for (op, class, words) in [
            (Op::AddChain { name: "x".repeat(300).into(), base: None, comment: None }, Class::Object, "add chain xxx"),
            (
                Op::AddRule { chain: "absent".into(), rule: Rule::default() },
                Class::Resync,
                "add a rule to chain absent of table ip tandem",
            ),
            (Op::DeleteChain("services".into()), Class::Resync, "delete chain services of table ip tandem"),
            (
                // A key that is too long for the set.
                Op::AddElements {
                    set: "cluster-ips".into(),
                    elements: vec![bad(1), (Key::single([1; 8].into()), value(None, None)), bad(2)],
                },
                Class::Object,
                "add element 2 of 3 to set cluster-ips of table ip tandem",
            ),
            (
                Op::AddElements {
                    set: "service-ips".into(),
                    elements: vec![(
                        want.elements["service-ips"].keys().next().unwrap().clone(),
                        value(Some(Data::Verdict(Verdict::Return)), None),
                    )],
                },
                Class::Resync,
                "add element 1 of 1 to set service-ips of table ip tandem",
            ),
            (
                Op::DeleteElements { set: "cluster-ips".into(), keys: vec![bad(1).0] },
                Class::Resync,
                "delete element 1 of 1 from set cluster-ips of table ip tandem",
            ),
        ] {
            let mut transaction = create(&want);
            let step = transaction.steps.len();
            transaction.push(op.clone(), Some(&service));
            transaction.push(Op::AddChain { name: "more".into(), base: None, comment: None }, None);
            let error = connection.commit(&transaction).unwrap_err();
            assert!(error.what.starts_with(words), "{error}");
            assert_eq!(
                (error.service.as_ref(), error.class, error.step),
                (Some(&service), class, Some(step)),
                "{error}"
            );
            assert_eq!(connection.list_tables(IpFamily::V4).unwrap(), Vec::<Name>::new(), "{words}");
        }
    });
}

#[test]
fn the_refused_element_of_many_is_named() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let mut want = slots(&sample_table(), 5000, 8080);
        let elements = want.elements.get_mut("slots").unwrap();
        // Each refused element makes an answer: many more than a small buffer holds.
        for (number, value) in elements.values_mut().enumerate() {
            if number >= 3210 {
                value.data = None;
            }
        }
        let expected = elements.keys().nth(3210).unwrap().clone();
        let error = connection.commit(&create(&want)).unwrap_err();
        assert_eq!(error.element, Some(("slots".into(), expected)), "{error}");
        assert_eq!(connection.read(&want.table, false).unwrap(), None);
        // Ranges are two elements for the kernel.
        let mut want = sample(IpFamily::V4);
        let ranges = want.elements.get_mut("service-cidrs").unwrap();
        let key = ranges.keys().nth(3).unwrap().clone();
        ranges.get_mut(&key).unwrap().data = Some(Data::Verdict(Verdict::Drop));
        let error = connection.commit(&create(&want)).unwrap_err();
        assert_eq!(error.element, Some(("service-cidrs".into(), key)), "{error}");
    });
}

#[test]
fn a_small_receive_buffer_hides_neither_success_nor_the_first_error() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        connection.socket.receive_buffer(4096);
        let want = slots(&sample_table(), 20_000, 8080);
        connection.commit(&create(&want)).unwrap();
        let mut bad = Transaction::new(want.table.clone());
        let service = |n: usize| ObjectName::new("ns", &n.to_string());
        for n in 0..3000 {
            let chain = if n < 37 { "empty" } else { "absent" };
            let rule = Rule { exprs: vec![Expr::Counter], comment: None };
            bad.push(Op::AddRule { chain: chain.into(), rule }, Some(&service(n)));
        }
        let error = connection.commit(&bad).unwrap_err();
        assert_eq!((error.step, error.service, error.class), (Some(37), Some(service(37)), Class::Resync));
        // What is left of the answers does not disturb the next commit.
        let mut good = Transaction::new(want.table.clone());
        good.push(Op::AddChain { name: "more".into(), base: None, comment: None }, None);
        connection.commit(&good).unwrap();
        assert_eq!(connection.read(&want.table, false).unwrap().unwrap().elements, want.elements);
    });
}

#[test]
fn a_set_that_is_full_is_an_object_error() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let mut want = sample(IpFamily::V4);
        want.sets.get_mut("cluster-ips").unwrap().size = Some(1);
        let error = connection.commit(&create(&want)).unwrap_err();
        assert_eq!(error.class, Class::Object, "{error}");
        assert!(error.what.contains("cluster-ips"), "{error}");
    });
}

#[test]
fn a_commit_at_an_old_generation_is_refused() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let want = sample(IpFamily::V4);
        let generation = connection.generation().unwrap();
        connection.commit_at(&create(&want), Some(generation)).unwrap();
        let mut more = Transaction::new(want.table.clone());
        more.push(Op::AddChain { name: "more".into(), base: None, comment: None }, None);
        let error = connection.commit_at(&more, Some(generation)).unwrap_err();
        assert_eq!((error.class, error.source.raw_os_error()), (Class::Resync, Some(85)), "{error}");
        assert_eq!(connection.read(&want.table, false).unwrap().unwrap(), want);
        let generation = connection.generation().unwrap();
        connection.commit_at(&more, Some(generation)).unwrap();
    });
}

#[test]
fn random_changes_are_taken_by_the_kernel() {
    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::TestRunner;
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let mut runner = TestRunner::deterministic();
        let mut next = || seeds().new_tree(&mut runner).unwrap().current();
        let first = next();
        connection.commit(&create(&first)).unwrap();
        let mut have = connection.read(&first.table, false).unwrap().unwrap();
        for number in 0..300 {
            let want = next();
            let Difference { now, late } = diff(Some(&have), &want);
            connection.commit(&now).unwrap_or_else(|error| panic!("{number}: {error}\n{have:#?}\n{now:#?}"));
            connection.commit(&late).unwrap_or_else(|error| panic!("{number}: {error}\n{late:#?}"));
            have = connection.read(&want.table, false).unwrap().unwrap();
            assert_eq!(have, as_read(&want), "{number}");
        }
    });
}

#[test]
fn affinity_is_imported_with_its_remaining_time() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let theirs = TableId { family: IpFamily::V4, name: "kube-proxy".into() };
        let input = "table ip kube-proxy {
            set affinity-JO2XBXZR-testing/service/tcp/http__10.180.0.1/80 { type ipv4_addr; size 65535; flags dynamic,timeout; timeout 3h; elements = { 10.0.0.1 expires 10m, 10.0.0.2 } }
            set other { type ether_addr; elements = { 00:00:00:00:00:01 } }
            chain c { ip daddr { 1.2.3.4, 1.2.3.5 } drop; tcp flags syn drop; }
        }";
        nft(&["-f", "-"], input).unwrap();
        let sets = connection.list_sets(&theirs).unwrap();
        assert!(sets["other"].key.is_empty());
        let (name, set) = sets.iter().find(|(name, _)| name.starts_with("affinity-")).unwrap();
        assert_eq!(set.dynamic_timeout_ms, Some(10_800_000));
        let elements = connection.elements(&theirs, name, set).unwrap();
        let left: Vec<(u8, u64)> =
            elements.iter().map(|(key, value)| (key.start[3], value.expires_ms.unwrap().div_ceil(10_000))).collect();
        assert_eq!(left, [(1, 60), (2, 1080)]);

        let want = sample(IpFamily::V4);
        let mut transaction = create(&want);
        let elements = elements.into_iter().collect();
        transaction.push(Op::AddElements { set: "affinity-X".into(), elements }, None);
        transaction.push(Op::DestroyTable(theirs.clone()), None);
        transaction.push(Op::DestroyTable(TableId { family: IpFamily::V6, name: "never-was".into() }), None);
        connection.commit(&transaction).unwrap();
        assert_eq!(connection.list_tables(IpFamily::V4).unwrap(), std::slice::from_ref(&want.table.name));
        assert_eq!(connection.list_tables(IpFamily::V6).unwrap(), Vec::<Name>::new());
        let have = connection.read(&want.table, true).unwrap().unwrap();
        let left: Vec<u64> =
            have.elements["affinity-X"].values().map(|value| value.expires_ms.unwrap().div_ceil(10_000)).collect();
        assert_eq!(left, [60, 1080]);
        assert!(!connection.read(&want.table, false).unwrap().unwrap().elements.contains_key("affinity-X"));
    });
}

#[test]
fn foreign_rules_and_chains_are_seen_as_differences() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let want = sample(IpFamily::V4);
        connection.commit(&create(&want)).unwrap();
        nft(
            &["-f", "-"],
            "
            add rule ip tandem services tcp flags syn limit rate 5/second accept
            add rule ip tandem services ip daddr { 1.2.3.4, 1.2.3.5 } drop
            add chain ip tandem nat-output { policy accept; }
            add chain ip tandem filter-input { policy drop; }
            add chain ip tandem theirs
            add set ip tandem theirs { type ether_addr; }
        ",
        )
        .unwrap();
        let have = connection.read(&want.table, false).unwrap().unwrap();
        assert_eq!(have.chains["services"].rules.len(), want.chains["services"].rules.len() + 2);
        let Difference { now, late } = diff(Some(&have), &want);
        connection.commit(&now).unwrap();
        connection.commit(&late).unwrap();
        assert_eq!(connection.read(&want.table, false).unwrap().unwrap(), want);
    });
}

#[test]
fn rules_of_others_are_deleted_by_handle() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let filter = TableId { family: IpFamily::V4, name: "filter".into() };
        nft(&["-f", "-"], "table ip filter { chain KUBE-SERVICES { counter; }\n chain INPUT { type filter hook input priority 0; counter accept; jump KUBE-SERVICES; }\n }").unwrap();
        let rules = connection.list_rules(&filter).unwrap();
        let mut transaction = Transaction::new(filter.clone());
        for rule in rules.into_iter().filter(|rule| rule.targets.iter().any(|target| target.starts_with("KUBE-"))) {
            transaction.push(Op::DeleteRule { chain: rule.chain, handle: rule.handle }, None);
        }
        transaction.push(Op::FlushChain("KUBE-SERVICES".into()), None);
        transaction.push(Op::DeleteChain("KUBE-SERVICES".into()), None);
        connection.commit(&transaction).unwrap();
        assert_eq!(connection.list_chains(&filter).unwrap().into_keys().collect::<Vec<_>>(), ["INPUT".into()]);
        assert_eq!(connection.list_rules(&filter).unwrap().len(), 1);
    });
}

#[test]
fn a_connection_can_be_opened_in_another_namespace() {
    in_namespace(|| {
        let mut here = Connection::open().unwrap();
        let namespace = std::fs::File::open("/proc/thread-self/ns/net").unwrap();
        here.commit(&create(&sample(IpFamily::V4))).unwrap();
        std::thread::spawn(move || {
            use std::os::fd::AsFd;
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            assert_eq!(Connection::open().unwrap().list_tables(IpFamily::V4).unwrap(), Vec::<Name>::new());
            let mut there = Connection::open_in(namespace.as_fd()).unwrap();
            assert_eq!(there.list_tables(IpFamily::V4).unwrap(), ["tandem".into()]);
            assert_eq!(Connection::open().unwrap().list_tables(IpFamily::V4).unwrap(), Vec::<Name>::new());
        })
        .join()
        .unwrap();
    });
}

/// Not a test of speed: it prints how long each step takes (`--nocapture`).
#[test]
fn one_hundred_thousand_elements_go_in_one_commit_and_come_back() {
    in_namespace(|| {
        let mut connection = Connection::open().unwrap();
        let want = slots(&sample_table(), 100_000, 8080);
        let transaction = create(&want);
        let start = std::time::Instant::now();
        let batch = encode::encode(&transaction, 1, None).unwrap();
        println!("encode: {:?}, {} bytes, {} messages", start.elapsed(), batch.data.len(), batch.sequence_numbers());
        let start = std::time::Instant::now();
        connection.commit(&transaction).unwrap();
        println!("commit: {:?}", start.elapsed());
        block_on(async {
            let _monitor = Monitor::open().unwrap();
            let mut again = Transaction::new(want.table.clone());
            again.push(Op::DestroyTable(want.table.clone()), None);
            again.steps.extend(transaction.steps.clone());
            let start = std::time::Instant::now();
            connection.commit(&again).unwrap();
            println!("delete and commit again with a listener: {:?}", start.elapsed());
        });
        let start = std::time::Instant::now();
        let have = connection.read(&want.table, false).unwrap().unwrap();
        println!("read: {:?}", start.elapsed());
        let start = std::time::Instant::now();
        assert!(diff(Some(&have), &want).now.is_empty());
        println!("diff: {:?}", start.elapsed());
    });
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// The next event within a second.
async fn event(monitor: &mut Monitor) -> Option<Event> {
    tokio::time::timeout(std::time::Duration::from_millis(500), monitor.next()).await.ok().map(Result::unwrap)
}

#[test]
fn changes_of_others_are_seen_and_our_own_are_not() {
    in_namespace(|| {
        block_on(async {
            let mut connection = Connection::open().unwrap();
            let mut monitor = Monitor::open().unwrap();
            monitor.ignore(connection.port_id());
            let want = sample(IpFamily::V4);
            connection.commit(&create(&want)).unwrap();
            assert_eq!(event(&mut monitor).await, None);

            let mut changed = async |input: &str| {
                nft(&["-f", "-"], input).unwrap();
                match event(&mut monitor).await {
                    Some(Event::Changed(change)) => {
                        assert_eq!(change.program, "nft");
                        assert_ne!(change.process, 0);
                        change.tables.into_iter().map(|table| table.to_string()).collect::<Vec<_>>()
                    }
                    other => panic!("{input}: {other:?}"),
                }
            };
            assert_eq!(changed("delete element ip tandem cluster-ips { 10.0.0.1 }").await, ["ip tandem"]);
            assert_eq!(changed("add rule ip tandem services accept").await, ["ip tandem"]);
            assert_eq!(changed("flush chain ip tandem services").await, ["ip tandem"]);
            assert_eq!(changed("add table ip6 other\nadd table ip other").await, ["ip other", "ip6 other"]);
            assert_eq!(changed("delete table ip tandem").await, ["ip tandem"]);
            assert_eq!(connection.read(&want.table, false).unwrap(), None);
            connection.commit(&create(&want)).unwrap();
            assert_eq!(changed("flush ruleset").await, ["ip other", "ip tandem", "ip6 other"]);
            assert_eq!(event(&mut monitor).await, None);
        });
    });
}

#[test]
fn a_listener_that_left_hears_nothing_until_it_joins() {
    in_namespace(|| {
        block_on(async {
            let mut monitor = Monitor::open().unwrap();
            monitor.leave().unwrap();
            nft(&["add", "table", "ip", "a"], "").unwrap();
            monitor.join().unwrap();
            nft(&["add", "table", "ip", "b"], "").unwrap();
            let Some(Event::Changed(change)) = event(&mut monitor).await else { panic!("no event") };
            assert_eq!(change.tables.into_iter().map(|table| table.name).collect::<Vec<_>>(), ["b".into()]);
            assert_eq!(event(&mut monitor).await, None);
        });
    });
}

#[test]
fn lost_events_ask_for_verification() {
    in_namespace(|| {
        block_on(async {
            let mut connection = Connection::open().unwrap();
            let mut monitor = Monitor::open_with_buffer(4096);
            connection.commit(&create(&slots(&sample_table(), 5000, 1))).unwrap();
            let mut events = Vec::new();
            while let Some(event) = event(&mut monitor).await {
                events.push(event);
            }
            assert!(events.contains(&Event::Verify), "{events:?}");
        });
    });
}
