//! What a change costs.

use super::*;

fn backend(n: u32) -> Backend {
    Backend { address: IpAddr::from(u32::to_be_bytes(0x0a00_0000 + n)), port: 8080, local: n.is_multiple_of(50) }
}

fn view(service: &str, number: u32, backends: Vec<Backend>) -> ServicePortView {
    let name =
        ServicePortName { service: ObjectName::new("default", service), port: "http".into(), protocol: Protocol::Tcp };
    ServicePortView {
        name,
        cluster_ip: IpAddr::from(u32::to_be_bytes(0xac1e_0000 + number)),
        port: 80,
        node_port: 0,
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        source_ranges: None,
        internal_local: false,
        external_local: false,
        affinity_timeout_s: None,
        health_check_node_port: 0,
        has_endpoints: !backends.is_empty(),
        cluster: backends,
        local: Vec::new(),
        serving: Vec::new(),
    }
}

/// A compiler whose views are given one by one, and its kernel.
struct Fed {
    compiler: Compiler,
    kernel: FakeKernel,
}

impl Fed {
    fn new(view: &ServicePortView) -> Self {
        let compiler = Compiler::new(Settings::new(IpFamily::V4));
        let kernel = FakeKernel::new(compiler.table());
        let mut fed = Self { compiler, kernel };
        fed.update(view);
        fed
    }

    fn update(&mut self, view: &ServicePortView) -> Vec<Step> {
        let update = self.compiler.update_views(BTreeSet::from([view.name.service.clone()]), &|_| vec![view.clone()]);
        self.commit(update)
    }

    fn settle(&mut self) -> Vec<Step> {
        let update = self.compiler.settle();
        self.commit(update)
    }

    fn commit(&mut self, update: Update) -> Vec<Step> {
        self.kernel.commit(&update.steps).unwrap();
        assert_same(self.kernel.ruleset().unwrap(), &self.compiler.ruleset());
        update.steps
    }
}

/// Elements added and deleted.
fn elements(steps: &[Step]) -> usize {
    let count = |step: &Step| match &step.op {
        Op::AddElements { elements, .. } => elements.len(),
        Op::DeleteElements { keys, .. } => keys.len(),
        _ => 0,
    };
    steps.iter().map(count).sum()
}

/// Operations on chains, rules and sets.
fn others(steps: &[Step]) -> usize {
    steps.iter().filter(|step| !matches!(step.op, Op::AddElements { .. } | Op::DeleteElements { .. })).count()
}

#[test]
fn an_endpoint_more_or_less_costs_the_same_whatever_their_number() {
    for count in [2, 10, 1000, 20_000] {
        // From the second on, so that none is local: that would be a hairpin element more.
        let backends: Vec<Backend> = (1..=count).map(|n| Backend { local: false, ..backend(n) }).collect();
        let mut fed = Fed::new(&view("a", 1, backends.clone()));

        // The verdict changes to the chain for one endpoint less, and the last takes the first slot.
        let steps = fed.update(&view("a", 1, backends[1..].to_vec()));
        assert_eq!((elements(&steps), others(&steps)), (4, 3), "{count}: {steps:?}");
        // The surplus slot, and the chain that nobody uses.
        let steps = fed.settle();
        assert_eq!((elements(&steps), others(&steps)), (1, 2), "{count}: {steps:?}");

        // The verdict back, and a slot.
        let steps = fed.update(&view("a", 1, backends));
        assert_eq!((elements(&steps), others(&steps)), (3, 3), "{count}: {steps:?}");
    }
}

#[test]
fn growth_before_the_shrink_settled_reuses_the_slot() {
    let backends: Vec<Backend> = (1..=4).map(backend).collect();
    let mut fed = Fed::new(&view("a", 1, backends.clone()));
    fed.update(&view("a", 1, backends[..3].to_vec()));
    let other = (1..=3).chain([9]).map(backend).collect();
    // The verdict back to the chain for four, which is still there; the slot exists with other data.
    let steps = fed.update(&view("a", 1, other));
    assert_eq!((elements(&steps), others(&steps)), (4, 0), "{steps:?}");
    let steps = fed.settle();
    assert_eq!((elements(&steps), others(&steps)), (0, 2), "the chain for three: {steps:?}");
    assert!(!fed.compiler.unsettled());
}

#[test]
fn slots_of_a_service_without_endpoints_stay_until_it_is_settled() {
    let backends: Vec<Backend> = (1..=4).map(backend).collect();
    let mut fed = Fed::new(&view("a", 1, backends.clone()));
    let steps = fed.update(&view("a", 1, Vec::new()));
    assert_eq!((elements(&steps), others(&steps)), (2, 0), "out of service-ips, into no-endpoint-services: {steps:?}");
    assert_eq!(fed.kernel.ruleset().unwrap().elements["slots"].len(), 4);
    // Back in time: its slots are still there.
    let steps = fed.update(&view("a", 1, backends));
    assert_eq!((elements(&steps), others(&steps)), (2, 0), "{steps:?}");
    fed.update(&view("a", 1, Vec::new()));
    let steps = fed.settle();
    assert_eq!((elements(&steps), others(&steps)), (4, 2), "{steps:?}");
    assert!(!fed.kernel.ruleset().unwrap().elements.contains_key("slots"));
}

#[test]
fn a_new_service_is_one_step_per_set() {
    let mut fed = Fed::new(&view("a", 1, (1..=10).map(backend).collect()));
    let steps = fed.update(&view("b", 2, (1..=10).map(backend).collect()));
    // cluster-ips, service-ips, ten slots; the chain for ten exists.
    assert_eq!((elements(&steps), steps.len()), (12, 3), "{steps:?}");
    assert!(steps.iter().all(|step| step.service == Some(ObjectName::new("default", "b"))));
}

#[test]
fn endpoints_beyond_the_limit_are_left_out_and_named() {
    let mut compiler = Compiler::new(Settings::new(IpFamily::V4));
    let views = |name: &ObjectName| {
        let count = if &*name.name == "big" { 70_000 } else { 2 };
        vec![view(&name.name, count, (1..=count).map(backend).collect())]
    };
    let update =
        compiler.update_views([ObjectName::new("default", "big"), ObjectName::new("default", "small")].into(), &views);
    assert_eq!(update.problems.len(), 1);
    assert_eq!(&*update.problems[0].service.name, "big");
    assert!(update.problems[0].message.contains("70000 usable endpoints"), "{}", update.problems[0].message);
    let ruleset = compiler.ruleset();
    assert_eq!(ruleset.elements["slots"].len(), 65_535 + 2);
    assert_eq!(ruleset.elements["service-ips"].len(), 2);
}

#[test]
fn ten_thousand_services_compile_quickly_and_one_more_at_once() {
    const SERVICES: u32 = 10_000;
    let views = |name: &ObjectName| {
        let number: u32 = name.name.parse().unwrap();
        vec![view(&name.name, number, (0..10).map(|i| backend(number * 10 + i)).collect())]
    };
    let all: BTreeSet<ObjectName> = (0..SERVICES).map(|n| ObjectName::new("default", &n.to_string())).collect();
    let mut compiler = Compiler::new(Settings::new(IpFamily::V4));
    let start = Instant::now();
    let update = compiler.update_views(all, &views);
    let first = start.elapsed();
    // ClusterIP, verdict, ten slots, and a hairpin element for every fiftieth endpoint.
    assert_eq!(elements(&update.steps), SERVICES as usize * 12 + SERVICES as usize / 5);
    let start = Instant::now();
    let update = compiler.update_views([ObjectName::new("default", &SERVICES.to_string())].into(), &views);
    let one = start.elapsed();
    assert_eq!(elements(&update.steps), 13);
    println!("first plan of {SERVICES} services: {first:?}; one more: {one:?}");
    // A debug build on busy cores: only what is wrong by orders of magnitude fails here.
    assert!(first.as_secs() < 30 && one.as_millis() < 200);
}
