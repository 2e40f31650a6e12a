//! What a scenario is run with: Tandem in its two ways, and the real kube-proxy.

use crate::apiserver::ApiServer;
pub use crate::cluster::{Cluster, Program, Proxy};
use crate::envtest::Binaries;
use crate::netns::Netns;
use crate::process::{Process, eventually};
use crate::world::{NODE_NAME, REMOTE_NODE_NAME};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An object's kind, namespace and name.
pub type Key = (String, String, String);

/// The objects that exist, in the order in which they appeared.
#[derive(Clone, Debug, Default)]
pub struct Objects(Vec<(Key, Value)>);

impl Objects {
    /// Adds or replaces an object.
    pub fn put(&mut self, object: Value) {
        let key = key(&object);
        match self.0.iter_mut().find(|(k, _)| *k == key) {
            Some((_, old)) => *old = object,
            None => self.0.push((key, object)),
        }
    }

    /// Removes an object.
    ///
    /// # Errors
    /// It does not exist.
    pub fn remove(&mut self, key: &Key) -> Result<()> {
        let before = self.0.len();
        self.0.retain(|(k, _)| k != key);
        if self.0.len() == before { bail!("no object {key:?} to delete") } else { Ok(()) }
    }

    /// The objects.
    pub fn values(&self) -> impl Iterator<Item = &Value> {
        self.0.iter().map(|(_, o)| o)
    }

    /// Their keys.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.0.iter().map(|(k, _)| k)
    }

    /// The EndpointSlices, to change.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut Value> {
        self.0.iter_mut().filter(|((kind, _, _), _)| kind == "EndpointSlice").map(|(_, o)| o)
    }

    /// All objects as one YAML stream (JSON documents).
    ///
    /// # Errors
    /// None that an object of a scenario can cause.
    pub fn manifests(&self) -> Result<String> {
        let mut text = String::new();
        for object in self.values() {
            text.push_str("---\n");
            text.push_str(&serde_json::to_string(object)?);
            text.push('\n');
        }
        Ok(text)
    }
}

/// Kind, namespace (`default` if none) and name of an object.
#[must_use]
pub fn key(object: &Value) -> Key {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).map(String::from);
    (
        text("/kind").unwrap_or_default(),
        text("/metadata/namespace").unwrap_or_else(|| "default".into()),
        text("/metadata/name").unwrap_or_default(),
    )
}

/// Something that serves the Services of a scenario in the node's namespace.
pub trait Engine {
    /// Name, as scenario files call it: `tandem` or `kube-proxy`.
    fn name(&self) -> &'static str;

    /// Makes the node serve exactly `objects`; returns when that is in force.
    ///
    /// # Errors
    /// It refuses, dies, or does not get there in time; the message has its last log lines.
    fn sync(&mut self, node: &Netns, objects: &Objects) -> Result<()>;

    /// Whether it sees changes (a process that runs on) or only states. Conntrack is reconciled on changes.
    fn sees_changes(&self) -> bool;

    /// Output worth showing after a failure.
    fn log_tail(&self) -> String;

    /// Removes what it left in the node's namespace and checks that nothing stays.
    ///
    /// # Errors
    /// Something stays.
    fn finish(&mut self, node: &Netns) -> Result<()>;
}

/// The `tandem` binary of this build: next to the test executable's folder.
///
/// # Errors
/// It is not built; the message has the command.
pub fn tandem_binary() -> Result<PathBuf> {
    let exe = std::env::current_exe()?;
    for dir in exe.ancestors().skip(1).take(3) {
        let candidate = dir.join("tandem");
        if candidate.is_file() {
            return Ok(candidate);
        }
    }
    bail!("target/debug/tandem is not built: run `cargo build -p proxy --bin tandem` first")
}

/// `tandem sync --once` for each state.
pub struct TandemOnce {
    flags: Vec<String>,
    dir: tempfile::TempDir,
    last: String,
}

impl TandemOnce {
    /// Prepares a directory of manifests.
    ///
    /// # Errors
    /// No temporary directory.
    pub fn new(flags: &[String]) -> Result<Self> {
        Ok(Self { flags: flags.to_vec(), dir: tempfile::tempdir()?, last: String::new() })
    }
}

/// Replaces the one file of a directory of manifests, in one step.
fn write_manifests(dir: &Path, objects: &Objects) -> Result<()> {
    let partial = dir.join(".objects.partial");
    std::fs::write(&partial, objects.manifests()?)?;
    std::fs::rename(&partial, dir.join("objects.yaml"))?;
    Ok(())
}

impl Engine for TandemOnce {
    fn name(&self) -> &'static str {
        "tandem"
    }

    fn sync(&mut self, node: &Netns, objects: &Objects) -> Result<()> {
        write_manifests(self.dir.path(), objects)?;
        let mut command = node.command(tandem_binary()?);
        command
            .args(["sync", "--once", "--manifests"])
            .arg(self.dir.path())
            .arg(format!("--hostname-override={NODE_NAME}"));
        command.arg(format!("--run-dir={}", self.dir.path().join(".run").display())).args(&self.flags);
        let output = command.output()?;
        self.last = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            bail!("{command:?}: {}\n{}", output.status, self.last);
        }
        Ok(())
    }

    fn sees_changes(&self) -> bool {
        false
    }

    fn log_tail(&self) -> String {
        self.last.clone()
    }

    fn finish(&mut self, node: &Netns) -> Result<()> {
        node.output(&[tandem_binary()?.to_str().context("path of tandem")?, "cleanup"])?;
        node.assert_no_table("tandem")
    }
}

/// A Service whose appearance in the kernel says that everything before it is in force, too.
///
/// It is applied last: in both watches (Services and slices), or at the end of the one manifest file.
pub(crate) fn sentinel(step: u32) -> (Vec<Value>, [(&'static str, String); 2]) {
    let name = format!("step-{step}");
    let (v4, v6) = (format!("172.30.255.{step}"), format!("fd00:10:96::ff{step:02x}"));
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "sentinel", "name": name },
        "spec": { "clusterIP": v4, "clusterIPs": [v4, v6], "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack",
            "ports": [{ "port": 1, "protocol": "TCP" }] },
    });
    let slice = |kind: &str, address: String| {
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "namespace": "sentinel", "name": format!("{name}-{}", kind.to_lowercase()), "labels": { "kubernetes.io/service-name": name } },
            "addressType": kind, "ports": [{ "name": "", "port": 1, "protocol": "TCP" }],
            "endpoints": [{ "addresses": [address], "nodeName": REMOTE_NODE_NAME, "conditions": { "ready": true } }],
        })
    };
    let objects =
        vec![slice("IPv4", format!("10.99.255.{step}")), slice("IPv6", format!("fd00:10:99::{step:x}")), service];
    (objects, [("ip", v4), ("ip6", v6)])
}

/// Waits until the sentinel of `step` is in the map `service-ips` of both tables called `table`.
pub(crate) fn await_sentinel(
    node: &Netns,
    table: &str,
    addresses: &[(&'static str, String); 2],
    process: &mut Process,
) -> Result<()> {
    for (family, address) in addresses {
        let arrived = eventually(&format!("{address} in {family} {table}"), Duration::from_secs(20), || {
            if !process.running() {
                return Some(Err(anyhow::anyhow!("it ended")));
            }
            let listed = node.output(&["nft", "list", "map", family, table, "service-ips"]).unwrap_or_default();
            listed.contains(&format!("{address} ")).then_some(Ok(()))
        });
        match arrived {
            Ok(Ok(())) => {}
            Ok(Err(e)) | Err(e) => bail!("{e:#}\n{}", process.log_tail()),
        }
    }
    Ok(())
}

/// A running `tandem --manifests DIR`.
pub struct TandemAgent {
    flags: Vec<String>,
    dir: tempfile::TempDir,
    process: Option<Process>,
    step: u32,
}

impl TandemAgent {
    /// Prepares a directory of manifests; the process starts with the first state.
    ///
    /// # Errors
    /// No temporary directory.
    pub fn new(flags: &[String]) -> Result<Self> {
        Ok(Self { flags: flags.to_vec(), dir: tempfile::tempdir()?, process: None, step: 0 })
    }

    /// Replaces the manifests without waiting for anything.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, objects: &Objects) -> Result<()> {
        write_manifests(self.dir.path(), objects)
    }

    /// The process, to signal it.
    pub fn process(&mut self) -> Option<&mut Process> {
        self.process.as_mut()
    }

    /// Starts it (again) over the present manifests.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&mut self, node: &Netns) -> Result<()> {
        let mut command = node.command(tandem_binary()?);
        command.arg("--manifests").arg(self.dir.path()).arg(format!("--hostname-override={NODE_NAME}"));
        command.arg(format!("--run-dir={}", self.dir.path().join(".run").display())).args(&self.flags);
        self.process = Some(Process::start("tandem", command, &self.dir.path().join(".tandem.log"))?);
        Ok(())
    }
}

impl Engine for TandemAgent {
    fn name(&self) -> &'static str {
        "tandem"
    }

    fn sync(&mut self, node: &Netns, objects: &Objects) -> Result<()> {
        self.step += 1;
        let (sentinel, addresses) = sentinel(self.step);
        let mut all = objects.clone();
        sentinel.into_iter().for_each(|o| all.put(o));
        write_manifests(self.dir.path(), &all)?;
        if self.process.is_none() {
            self.start(node)?;
        }
        await_sentinel(node, "tandem", &addresses, self.process.as_mut().expect("started above"))
    }

    fn sees_changes(&self) -> bool {
        true
    }

    fn log_tail(&self) -> String {
        self.process.as_ref().map(Process::log_tail).unwrap_or_default()
    }

    fn finish(&mut self, node: &Netns) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.stop();
        }
        node.output(&[tandem_binary()?.to_str().context("path of tandem")?, "cleanup"])?;
        node.assert_no_table("tandem")
    }
}

/// One proxy with a real API server of its own.
pub struct AtApiServer<'a> {
    cluster: Cluster<'a>,
    proxy: Proxy<'a>,
}

impl<'a> AtApiServer<'a> {
    /// A proxy that starts with the first state. The API server should hold no objects of others.
    ///
    /// # Errors
    /// No temporary directory.
    pub fn new(program: Program, api: &'a ApiServer, binaries: &'a Binaries, flags: &[String]) -> Result<Self> {
        Ok(Self { cluster: Cluster::new(api), proxy: Proxy::new(program, api, binaries, flags)? })
    }
}

impl AtApiServer<'_> {
    /// See [`Proxy::connect`].
    ///
    /// # Errors
    /// The port is taken.
    pub fn connect(&mut self, node: &Netns) -> Result<()> {
        self.proxy.connect(node)
    }

    /// See [`Proxy::disconnect`].
    pub fn disconnect(&mut self) {
        self.proxy.disconnect();
    }

    /// See [`Proxy::start`].
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&mut self, node: &Netns) -> Result<()> {
        self.proxy.start(node)
    }

    /// The running program.
    pub fn process(&mut self) -> Option<&mut Process> {
        self.proxy.process()
    }

    /// Brings the API server to exactly `objects` and a sentinel; does not wait for the proxy.
    ///
    /// # Errors
    /// The API server refuses an object.
    pub fn apply(&mut self, objects: &Objects) -> Result<()> {
        let watched = self.proxy.process().is_some();
        self.cluster.apply(objects, watched)
    }

    /// Waits until what [`AtApiServer::apply`] wrote last is in force.
    ///
    /// # Errors
    /// It does not get there, or the program ended.
    pub fn settled(&mut self, node: &Netns) -> Result<()> {
        self.proxy.settled(node, &self.cluster)
    }
}

impl Engine for AtApiServer<'_> {
    fn name(&self) -> &'static str {
        self.proxy.program().name()
    }

    fn sync(&mut self, node: &Netns, objects: &Objects) -> Result<()> {
        self.apply(objects)?;
        self.proxy.connect(node)?;
        if self.proxy.process().is_none() {
            self.proxy.start(node)?;
        }
        self.proxy.settled(node, &self.cluster)
    }

    fn sees_changes(&self) -> bool {
        true
    }

    fn log_tail(&self) -> String {
        self.proxy.log_tail()
    }

    fn finish(&mut self, _node: &Netns) -> Result<()> {
        self.proxy.end();
        self.cluster.clear()
    }
}
