use super::*;
use crate::model::fixtures::{port, port_of, service, slice};
use crate::model::{Delta, Protocol};
use crate::nft::fake::FakeKernel;
use crate::nft::object::{BytesBuilder, Key, Name};
use std::io;

/// A kernel that answers as it is told to.
struct TestKernel {
    fake: FakeKernel,
    id: TableId,
    commits: usize,
    /// Names of the chains that each commit added.
    chains_added: Vec<Vec<String>>,
    reads: usize,
    /// Answers to the next commits, first one first.
    errors: Vec<Class>,
    /// This element is refused.
    refuses: Option<(Name, Key)>,
}

impl Kernel for TestKernel {
    fn commit(&mut self, transaction: &Transaction) -> Result<(), Error> {
        self.commits += 1;
        let added = transaction.steps.iter().filter_map(|step| match &step.op {
            Op::AddChain { name, .. } => Some(name.to_string()),
            _ => None,
        });
        self.chains_added.push(added.collect());
        let error = |class, service| Error {
            what: "commit".into(),
            service,
            step: None,
            element: None,
            class,
            source: io::Error::from_raw_os_error(22),
        };
        if !self.errors.is_empty() {
            return Err(error(self.errors.remove(0), None));
        }
        if let Some((set, key)) = &self.refuses
            && let Some(step) = transaction.steps.iter().position(|step| {
                matches!(&step.op, Op::AddElements { set: s, elements } if s == set && elements.iter().any(|(k, _)| k == key))
            })
        {
            let service = transaction.steps[step].service.clone();
            let element = Some((set.clone(), key.clone()));
            return Err(Error { step: Some(step), element, ..error(Class::Object, service) });
        }
        self.fake
            .commit(&transaction.steps)
            .map_err(|refusal| Error { what: refusal.to_string(), ..error(Class::Resync, None) })
    }
    fn read(&mut self, table: &TableId, _dynamic: bool) -> Result<Option<Ruleset>, Error> {
        self.reads += 1;
        Ok(if *table == self.id { self.fake.ruleset().cloned() } else { None })
    }
    fn kube_proxy(&mut self, _table: &TableId) -> Result<Option<Remembered>, Error> {
        Ok(None)
    }
}

struct Bed {
    engine: Engine<TestKernel>,
    table: ServiceTable,
    settings: Settings,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        let id = TableId { family: IpFamily::V4, name: "tandem".into() };
        let fake = FakeKernel::new(id.clone());
        let kernel =
            TestKernel { fake, id, commits: 0, chains_added: Vec::new(), reads: 0, errors: Vec::new(), refuses: None };
        let settings = Settings::new(IpFamily::V4);
        let engine = Engine::new("tandem", settings.clone(), kernel);
        Self { engine, table: ServiceTable::new(), settings, now: Instant::now() }
    }

    /// `ns1/svcN` with this many endpoints.
    fn service(&mut self, n: u8, endpoints: u8) {
        let name = format!("svc{n}");
        let mut object = service(&name, &[&format!("172.30.0.{n}")]);
        object.ports = vec![port("p", 80, 0)];
        self.table.apply(Delta::Service(object));
        let endpoints: Vec<String> = (1..=endpoints).map(|i| format!("10.0.{n}.{i}")).collect();
        let endpoints: Vec<&str> = endpoints.iter().map(String::as_str).collect();
        self.table.apply(Delta::Slice(slice(&name, &name, &[("p", 8080)], &endpoints)));
    }

    fn sync(&mut self) -> Result<Report, Error> {
        let changes = self.table.take_changes();
        self.engine.sync(&self.table, &changes, &self.settings, self.now)
    }

    fn settle(&mut self) {
        self.now += SETTLE_AFTER;
        self.engine.settle(self.now).unwrap();
    }

    fn kernel(&mut self) -> &mut TestKernel {
        &mut self.engine.kernel
    }

    /// Keys in the kernel's map `name`.
    fn count(&self, name: &str) -> usize {
        self.engine.kernel.fake.ruleset().and_then(|r| r.elements.get(name)).map_or(0, BTreeMap::len)
    }

    fn assert_in_step(&mut self) {
        assert_eq!(self.engine.verify().unwrap(), Vec::<String>::new());
    }
}

#[test]
fn first_sync_programs_everything_and_the_next_one_nothing() {
    let mut bed = Bed::new();
    bed.service(1, 3);
    bed.service(2, 1);
    let report = bed.sync().unwrap();
    assert!(report.full && report.steps > 0);
    assert_eq!((bed.count("service-ips"), bed.count("slots")), (2, 4));
    let commits = bed.kernel().commits;
    assert_eq!(bed.sync().unwrap().steps, 0);
    assert_eq!(bed.kernel().commits, commits, "no change, no transaction");
    bed.assert_in_step();
}

#[test]
fn a_change_is_one_small_transaction_without_reading_the_kernel() {
    let mut bed = Bed::new();
    for n in 1..=50 {
        bed.service(n, 10);
    }
    bed.service(51, 9); // the chain for nine endpoints is there
    bed.sync().unwrap();
    let (reads, commits) = (bed.kernel().reads, bed.kernel().commits);
    bed.service(7, 9);
    let report = bed.sync().unwrap();
    assert!(report.steps <= 8 && !report.full, "{report:?}");
    assert_eq!((bed.kernel().reads, bed.kernel().commits), (reads, commits + 1));
    assert_eq!(bed.count("slots"), 509, "the surplus slot stays for packets in flight");
    bed.settle();
    assert_eq!(bed.count("slots"), 508);
    bed.assert_in_step();
}

#[test]
fn a_chain_that_packets_in_flight_may_be_led_to_is_one_transaction_old() {
    let mut bed = Bed::new();
    bed.service(1, 3);
    bed.sync().unwrap();
    let commits = bed.kernel().commits;
    bed.service(1, 2);
    bed.sync().unwrap();
    assert_eq!(bed.kernel().commits, commits + 2);
    let first = &bed.kernel().chains_added[commits];
    assert!(!first.is_empty() && first.iter().all(|name| name.contains("endpoints-2")), "{first:?}");
    assert!(bed.kernel().chains_added[commits + 1].is_empty());
    bed.assert_in_step();
    // The first of the two fails: the rest is not tried, the kernel is read back, nothing is lost.
    bed.kernel().errors = vec![Class::Retry];
    bed.service(1, 4);
    bed.sync().unwrap_err();
    bed.sync().unwrap();
    bed.assert_in_step();
}

#[test]
fn a_failed_sync_keeps_the_old_rules_and_the_next_one_mends_it() {
    let mut bed = Bed::new();
    bed.service(1, 2);
    bed.sync().unwrap();
    let before = bed.kernel().fake.ruleset().cloned();
    bed.service(1, 3);
    bed.service(2, 1);
    bed.kernel().errors = vec![Class::Retry];
    assert_eq!(bed.sync().unwrap_err().class, Class::Retry);
    assert_eq!(bed.kernel().fake.ruleset().cloned(), before);
    let report = bed.sync().unwrap();
    assert!(report.full, "the kernel is read back after an error");
    assert_eq!((bed.count("service-ips"), bed.count("slots")), (2, 4));
    bed.assert_in_step();
}

#[test]
fn a_wrong_picture_is_read_back_within_the_same_sync() {
    let mut bed = Bed::new();
    bed.service(1, 2);
    bed.sync().unwrap();
    bed.kernel().errors = vec![Class::Resync];
    bed.service(1, 4);
    assert!(bed.sync().unwrap().full);
    assert_eq!(bed.count("slots"), 4);
    bed.assert_in_step();
}

#[test]
fn a_refused_service_is_left_out_named_and_tried_again_when_it_changes() {
    let mut bed = Bed::new();
    let bad = ObjectName::new("ns1", "svc2");
    for n in 1..=3 {
        bed.service(n, 2);
    }
    let key = BytesBuilder::new().address("172.30.0.2".parse().unwrap()).protocol(Protocol::Tcp).port(80).build();
    bed.kernel().refuses = Some(("service-ips".into(), Key::single(key)));
    bed.sync().unwrap();
    assert_eq!(bed.count("service-ips"), 2, "the others are served");
    assert!(bed.engine.problems()[&bad][0].contains("ns1/svc2"));
    bed.service(3, 3);
    bed.sync().unwrap();
    assert_eq!(bed.count("service-ips"), 2, "other changes do not bring it back");
    bed.service(2, 3);
    bed.sync().unwrap();
    assert_eq!(bed.count("service-ips"), 2, "its own change is tried, and refused again by an update that names it");
    assert!(bed.engine.problems()[&bad][0].contains("ns1/svc2"));
    bed.kernel().refuses = None;
    bed.service(2, 1);
    bed.sync().unwrap();
    assert_eq!(bed.count("service-ips"), 3);
    assert!(bed.engine.problems().is_empty());
    bed.assert_in_step();
}

#[test]
fn a_table_that_someone_deleted_is_made_again() {
    let mut bed = Bed::new();
    bed.service(1, 2);
    bed.sync().unwrap();
    let id = bed.kernel().id.clone();
    bed.kernel().fake.commit(&[Step { op: Op::DeleteTable(id), service: None }]).unwrap();
    assert!(!bed.engine.verify().unwrap().is_empty());
    bed.engine.mark_dirty();
    bed.sync().unwrap();
    assert_eq!(bed.count("slots"), 2);
    bed.assert_in_step();
}

#[test]
fn a_restart_adopts_the_table_and_changes_only_what_differs() {
    let mut bed = Bed::new();
    for n in 1..=20 {
        bed.service(n, 5);
    }
    bed.sync().unwrap();
    bed.settle();
    let mut next = Bed::new();
    for n in 1..=20 {
        next.service(n, 5);
    }
    next.service(3, 6);
    next.kernel().fake = bed.kernel().fake.clone();
    let report = next.sync().unwrap();
    assert!(report.steps <= 8, "{report:?}");
    let added = &next.kernel().chains_added;
    assert!(added.len() == 2 && !added[0].is_empty() && added[1].is_empty(), "new chains first: {added:?}");
    next.settle();
    next.assert_in_step();
}

#[test]
fn what_an_older_run_left_goes_at_the_sweep() {
    let mut bed = Bed::new();
    bed.service(1, 5);
    bed.service(2, 2);
    bed.sync().unwrap();
    let mut next = Bed::new();
    next.service(2, 2);
    next.kernel().fake = bed.kernel().fake.clone();
    next.sync().unwrap();
    assert_eq!(next.count("service-ips"), 1);
    next.settle();
    assert_eq!(next.count("slots"), 2);
    next.assert_in_step();
}

#[test]
fn udp_frontends_of_an_older_run_are_known_so_that_their_flows_can_go() {
    let mut bed = Bed::new();
    let mut object = service("dns", &["172.30.0.53"]);
    object.ports = vec![port_of("dns", Protocol::Udp, 53, 30053), port("web", 80, 0)];
    bed.table.apply(Delta::Service(object));
    bed.sync().unwrap();
    let mut next = Bed::new();
    next.kernel().fake = bed.kernel().fake.clone();
    next.sync().unwrap();
    let expected = vec![Frontend::Address("172.30.0.53".parse().unwrap(), 53), Frontend::NodePort(IpFamily::V4, 30053)];
    assert_eq!(next.engine.take_inherited(), expected);
    assert!(next.engine.take_inherited().is_empty(), "once");
}

#[test]
fn clean_up_is_not_starved_by_changes_that_never_stop() {
    let mut bed = Bed::new();
    bed.service(1, 9);
    bed.service(2, 2);
    bed.sync().unwrap();
    bed.service(1, 2);
    bed.sync().unwrap();
    assert_eq!(bed.count("slots"), 11, "for packets in flight");
    let mut gone = None;
    for round in 0..30_u8 {
        bed.service(2, if round % 2 == 0 { 1 } else { 2 });
        bed.sync().unwrap();
        bed.now += Duration::from_millis(100);
        if bed.count("slots") <= 4 {
            gone.get_or_insert(round);
        }
    }
    assert!(gone.is_some_and(|round| (9..=20).contains(&round)), "after one second, whatever else changes: {gone:?}");
    bed.settle();
    bed.settle();
    assert_eq!(bed.engine.settle_at(), None, "nothing is left");
    assert_eq!(bed.count("slots"), 4);
    bed.assert_in_step();
}

#[test]
fn what_became_unused_just_now_is_not_taken_by_a_clean_up_that_is_due() {
    let mut bed = Bed::new();
    bed.service(1, 9);
    bed.service(2, 7);
    bed.sync().unwrap();
    bed.service(1, 2);
    bed.sync().unwrap();
    bed.now += SETTLE_AFTER - Duration::from_millis(1);
    bed.service(2, 3);
    bed.sync().unwrap();
    bed.now += Duration::from_millis(1);
    bed.engine.settle(bed.now).unwrap();
    assert_eq!(bed.count("slots"), 2 + 7, "one second old, one millisecond old");
    bed.settle();
    assert_eq!(bed.count("slots"), 2 + 3);
}

#[test]
fn a_sync_a_second_later_cleans_up_first() {
    let mut bed = Bed::new();
    bed.service(1, 9);
    bed.sync().unwrap();
    bed.service(1, 2);
    bed.sync().unwrap();
    assert_eq!(bed.count("slots"), 9);
    bed.now += SETTLE_AFTER;
    bed.service(2, 1);
    bed.sync().unwrap();
    assert_eq!(bed.count("slots"), 3);
}
