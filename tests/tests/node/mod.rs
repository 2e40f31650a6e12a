//! A node with one client and four backends, and the `tandem` binary on it: what the tests in this folder share.
#![allow(dead_code, reason = "each test file uses a part of it")]

use anyhow::{Context, Result, bail};
use proxy_tests::engine::tandem_binary;
use proxy_tests::netns::{self, Netns};
use proxy_tests::probe::{Flow, Proto, Seen, once};
use proxy_tests::process::{Process, eventually};
use proxy_tests::server::Answer;
use proxy_tests::world::{NODE_NAME, Party, World, WorldSpec};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Where the backends listen, TCP and UDP.
pub const PORT: u16 = 8080;
/// How long an answer may take on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Where `tandem` serves metrics when a kube-proxy has the usual port.
pub const METRICS: &str = "127.0.0.1:10250";

/// Prints why tests that need namespaces cannot run here.
#[must_use]
pub fn skipped() -> bool {
    let missing = netns::missing();
    if let Some(why) = &missing {
        println!("SKIP {why}");
    }
    missing.is_some()
}

/// Address of the client's pod number `n`; it has several.
#[must_use]
pub fn client(n: u8) -> IpAddr {
    IpAddr::from([10, 0, 1, n])
}

/// Address of the backend that is called `web1`, `web2`…
#[must_use]
pub fn backend(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 2, n)
}

/// A world with the pod `client` (addresses 1 to 8) and the pods `web1` to `web4`.
///
/// # Errors
/// A tool or a socket refuses.
pub fn world() -> Result<World> {
    let pod = |name: &str, addresses: Vec<IpAddr>| Party { name: name.into(), device: None, addresses };
    let mut pods = vec![pod("client", (1..=8).map(client).collect())];
    pods.extend((1..=4).map(|n| pod(&format!("web{n}"), vec![backend(n).into()])));
    let spec = WorldSpec { node: vec!["192.168.0.2/24".parse()?], pods, ..WorldSpec::default() };
    World::new(spec, &[PORT].into())
}

/// A Service with TCP and UDP port 80 at `address`, and its slice with `backends`.
#[must_use]
pub fn service(name: &str, address: &str, backends: &[u8]) -> [Value; 2] {
    let port = |protocol: &str| json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": 80, "targetPort": PORT });
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "test", "name": name },
        "spec": { "clusterIP": address, "ports": [port("TCP"), port("UDP")] },
    });
    [service, slice(name, &backends.iter().map(|n| backend(*n)).collect::<Vec<_>>())]
}

/// The slice of a Service made by [`service`].
#[must_use]
pub fn slice(name: &str, addresses: &[Ipv4Addr]) -> Value {
    let port = |protocol: &str| json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": PORT });
    let endpoint =
        |address: &Ipv4Addr| json!({ "addresses": [address], "nodeName": NODE_NAME, "conditions": { "ready": true } });
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "namespace": "test", "name": format!("{name}-1"), "labels": { "kubernetes.io/service-name": name } },
        "addressType": "IPv4", "ports": [port("TCP"), port("UDP")],
        "endpoints": addresses.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

/// [`service`] with ClientIP affinity.
#[must_use]
pub fn sticky(name: &str, address: &str, backends: &[u8]) -> [Value; 2] {
    let [mut service, slice] = service(name, address, backends);
    service["spec"]["sessionAffinity"] = json!("ClientIP");
    [service, slice]
}

/// Tells an answer from anything else, which is an error with words.
///
/// # Errors
/// No answer.
pub fn answered(seen: Seen) -> Result<Answer> {
    match seen {
        Seen::Answer(answer) => Ok(answer),
        other => bail!("{other}"),
    }
}

/// One TCP connection from the client's address `from` to `to`, port 80.
///
/// # Errors
/// No answer.
pub fn ask(world: &World, from: u8, to: &str) -> Result<Answer> {
    let destination: SocketAddr = (to.parse::<IpAddr>()?, 80).into();
    let ns = world.netns("client").context("client")?;
    let seen = ns.run(|| once(Proto::Tcp, client(from), destination, PATIENCE, &world.arrivals));
    answered(seen).with_context(|| format!("client {from} to {to}"))
}

/// Long flows of the client to `to`: TCP ones, then as many UDP ones.
///
/// # Errors
/// One cannot be opened.
pub fn open_flows(world: &World, to: &str, count: usize) -> Result<Vec<(Flow, Answer)>> {
    let destination: SocketAddr = (to.parse::<IpAddr>()?, 80).into();
    let ns = world.netns("client").context("client")?;
    ns.run(|| {
        let mut flows = Vec::new();
        for _ in 0..count {
            flows.push(Flow::tcp(client(1), destination, PATIENCE));
        }
        for _ in 0..count {
            flows.push(Flow::udp(client(1), destination, PATIENCE, &world.arrivals));
        }
        flows.into_iter().map(|flow| flow.map_err(|seen| anyhow::anyhow!("flow to {to}: {seen}"))).collect()
    })
}

/// Sends on each flow again: the same server has to answer.
///
/// # Errors
/// One flow is broken or has moved.
pub fn check_flows(world: &World, flows: &[(Flow, Answer)]) -> Result<()> {
    for (number, (flow, first)) in flows.iter().enumerate() {
        let answer = answered(flow.again(PATIENCE, &world.arrivals)).with_context(|| format!("flow {number}"))?;
        anyhow::ensure!(answer == *first, "flow {number} was answered by {first}, now by {answer}");
    }
    Ok(())
}

/// What `tandem` reads its objects from.
pub enum Source<'a> {
    /// `--manifests`: the folder of the [`Tandem`], written by [`Tandem::write`].
    Manifests,
    /// `--kubeconfig`
    Kubeconfig(&'a Path),
}

/// A `tandem` process on a node; it can be started again.
pub struct Tandem {
    dir: tempfile::TempDir,
    flags: Vec<String>,
    process: Option<Process>,
}

impl Tandem {
    /// One that has not been started.
    ///
    /// # Errors
    /// No temporary folder.
    pub fn new(flags: &[&str]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        std::fs::create_dir(dir.path().join("manifests"))?;
        Ok(Self { dir, flags: flags.iter().map(ToString::to_string).collect(), process: None })
    }

    /// Replaces the manifest file `name` in one step.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, name: &str, objects: &[Value]) -> Result<()> {
        let partial = self.dir.path().join("partial");
        let documents: Vec<String> = objects.iter().map(ToString::to_string).collect();
        std::fs::write(&partial, documents.join("\n---\n"))?;
        std::fs::rename(partial, self.dir.path().join("manifests").join(name))?;
        Ok(())
    }

    /// Starts the process.
    ///
    /// # Errors
    /// The binary is missing.
    pub fn start(&mut self, node: &Netns, source: &Source<'_>) -> Result<()> {
        let mut command = node.command(tandem_binary()?);
        match source {
            Source::Manifests => command.arg("--manifests").arg(self.dir.path().join("manifests")),
            Source::Kubeconfig(file) => command.arg("--kubeconfig").arg(file),
        };
        command.arg(format!("--hostname-override={NODE_NAME}")).arg("--run-dir").arg(self.run_dir());
        command.arg(format!("--metrics-bind-address={METRICS}")).args(&self.flags);
        self.process = Some(Process::start("tandem", command, &self.dir.path().join("log"))?);
        Ok(())
    }

    fn run_dir(&self) -> std::path::PathBuf {
        self.dir.path().join("run")
    }

    /// The process.
    ///
    /// # Panics
    /// If it was not started.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("started")
    }

    /// All that it has logged, over all starts.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// The status file.
    #[must_use]
    pub fn status(&self) -> Option<Value> {
        serde_json::from_slice(&std::fs::read(self.run_dir().join("status.json")).ok()?).ok()
    }

    /// `tandem status`: its text and whether it ended well.
    ///
    /// # Errors
    /// The binary is missing.
    pub fn status_command(&self, node: &Netns) -> Result<(String, bool)> {
        let output = node.command(tandem_binary()?).arg("status").arg("--run-dir").arg(self.run_dir()).output()?;
        Ok((String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success()))
    }

    /// Waits until the process has synced IPv4 once.
    ///
    /// # Errors
    /// It ended, or it takes more than 30 seconds.
    pub fn await_synced(&mut self) -> Result<()> {
        let pid = self.process().pid();
        let synced = eventually("tandem has synced", Duration::from_secs(30), || {
            if !self.process().running() {
                return Some(false);
            }
            let status = self.status()?;
            (status["pid"] == pid && status["families"]["IPv4"]["lastSync"].is_u64()).then_some(true)
        });
        match synced {
            Ok(true) => Ok(()),
            Ok(false) => bail!("tandem ended: {}", self.process().log_tail()),
            Err(error) => bail!("{error}\n{}", self.process().log_tail()),
        }
    }

    /// The value of a metric.
    ///
    /// # Errors
    /// The listener does not answer, or has no such line.
    pub fn metric(&self, node: &Netns, name: &str) -> Result<f64> {
        let text = node.run(|| -> Result<String> {
            let mut stream = TcpStream::connect(METRICS)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        Ok(line.with_context(|| format!("no {name} in\n{text}"))?.parse()?)
    }

    /// How often the tables have been repaired, both families.
    #[must_use]
    pub fn repairs(&self) -> u64 {
        let status = self.status().unwrap_or_default();
        ["IPv4", "IPv6"].iter().filter_map(|family| status["families"][family]["repairs"].as_u64()).sum()
    }
}

/// `nft monitor` in a node's namespace.
pub struct Watch {
    process: Process,
    dir: tempfile::TempDir,
}

impl Watch {
    /// Starts it, and waits until it sees changes.
    ///
    /// # Errors
    /// `nft` refuses.
    pub fn start(node: &Netns) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut command = node.command("nft");
        command.arg("monitor");
        let process = Process::start("nft monitor", command, &dir.path().join("log"))?;
        let watch = Self { process, dir };
        // nft starts by reading all rules, and begins anew if they change meanwhile: so the pauses grow.
        let mut pause = Duration::from_millis(50);
        eventually("nft monitor sees changes", Duration::from_secs(60), || {
            node.output(&["nft", "add table ip watch; delete table ip watch"]).ok()?;
            std::thread::sleep(pause);
            pause *= 2;
            watch.text().contains("watch").then_some(())
        })?;
        Ok(watch)
    }

    /// All that it has printed.
    #[must_use]
    pub fn text(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Changes of the table `tandem` so far, one line each, and how many transactions `tandem` has committed.
    #[must_use]
    pub fn seen(&self) -> (Vec<String>, usize) {
        let text = self.text();
        let changes =
            text.lines().filter(|l| l.contains(" tandem ") || l.ends_with(" tandem")).map(String::from).collect();
        (changes, text.lines().filter(|l| l.starts_with("# new generation") && l.contains("(tandem)")).count())
    }

    /// Process id of the monitor.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }
}

/// How long `check` takes to give true.
///
/// # Errors
/// Longer than `limit`.
pub fn timed(what: &str, limit: Duration, mut check: impl FnMut() -> bool) -> Result<Duration> {
    let start = Instant::now();
    eventually(what, limit, || check().then_some(()))?;
    Ok(start.elapsed())
}
