//! Objects at a real API server, and the proxies that watch it: any number of them, each in a node of its own.

use crate::apiserver::{ApiServer, User};
use crate::engine::{Key, Objects, await_sentinel, key, sentinel, tandem_binary};
use crate::envtest::Binaries;
use crate::netns::Netns;
use crate::process::Process;
use crate::relay::Relay;
use crate::world::NODE_NAME;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Which program works at the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The real kube-proxy in nftables mode.
    KubeProxy,
    /// `tandem --kubeconfig`
    Tandem,
}

impl Program {
    /// The program on `node`, with what either needs in every test. Tandem keeps its state in `run`.
    ///
    /// # Errors
    /// Tandem is not built.
    pub fn command(self, binaries: &Binaries, node: &Netns, kubeconfig: &Path, run: &Path) -> Result<Command> {
        let mut command = match self {
            Program::KubeProxy => node.command(&binaries.kube_proxy),
            Program::Tandem => node.command(tandem_binary()?),
        };
        command.arg(format!("--kubeconfig={}", kubeconfig.display())).arg(format!("--hostname-override={NODE_NAME}"));
        match self {
            Program::KubeProxy => command.args([
                "--proxy-mode=nftables",
                // Only the initial network namespace may set these.
                "--conntrack-max-per-core=0",
                "--conntrack-min=0",
                "--conntrack-tcp-timeout-established=0",
                "--conntrack-tcp-timeout-close-wait=0",
            ]),
            Program::Tandem => command.arg(format!("--run-dir={}", run.display())),
        };
        Ok(command)
    }

    /// Name of the program, which is also that of its nftables tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Program::KubeProxy => "kube-proxy",
            Program::Tandem => "tandem",
        }
    }
}

/// The objects of a real API server, brought from state to state for the proxies that watch it.
pub struct Cluster<'a> {
    api: &'a ApiServer,
    applied: Objects,
    step: u32,
}

impl<'a> Cluster<'a> {
    /// The API server should hold no objects of others.
    #[must_use]
    pub fn new(api: &'a ApiServer) -> Self {
        Self { api, applied: Objects::default(), step: 0 }
    }

    /// Brings the API server to exactly `objects` and a sentinel; does not wait for a proxy. `watched` = one runs already.
    ///
    /// # Errors
    /// The API server refuses an object.
    pub fn apply(&mut self, objects: &Objects, watched: bool) -> Result<()> {
        self.step += 1;
        let sentinel = sentinel(self.step).0;
        let mut all = objects.clone();
        sentinel.iter().for_each(|o| all.put(o.clone()));
        let gone = self.applied.keys().filter(|k| !all.keys().any(|n| n == *k)).cloned();
        let (gone_slices, gone): (Vec<Key>, Vec<Key>) = gone.partition(|(kind, ..)| kind == "EndpointSlice");
        // A ClusterIP is free again only when its old owner is gone.
        for (kind, namespace, name) in &gone {
            self.api.delete(kind, Some(namespace), name)?;
        }
        let old: Vec<&Value> = self.applied.values().collect();
        // The API server makes the ServiceCIDR of its flags itself.
        let changed = all.values().filter(|o| !old.contains(o) && o["kind"] != "ServiceCIDR").cloned();
        let changed = changed.filter(|o| !sentinel.contains(o));
        let (nodes, mut others): (Vec<Value>, Vec<Value>) = changed.partition(|o| o["kind"] == "Node");
        // An endpoint that moves from slice to slice is in both for a moment, and never in none: whoever is quick would see it go.
        others.sort_by_cached_key(|new| {
            let before = old.iter().find(|o| key(o) == key(new)).map_or(0, |o| endpoints(o));
            new["kind"] != "EndpointSlice" || endpoints(new) <= before
        });
        if !nodes.is_empty() {
            self.api.apply(&nodes)?;
            if watched {
                // Nodes have a watch of their own, which the sentinel says nothing about.
                std::thread::sleep(Duration::from_millis(500));
            }
        }
        self.api.apply(&others)?;
        for (kind, namespace, name) in &gone_slices {
            self.api.delete(kind, Some(namespace), name)?;
        }
        self.api.apply(&sentinel)?;
        self.applied = all;
        Ok(())
    }

    /// Deletes all Services, EndpointSlices and Nodes.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn clear(&mut self) -> Result<()> {
        self.applied = Objects::default();
        self.api.clear()
    }
}

/// kube-proxy v1.37.2, `NewProxyServer`: it may be told of its Node before it has a `NodeManager`, and ends with this in its trace.
const NODE_RACE: &str = "(*NodeManager).OnNodeChange(0x0";
/// It is a matter of microseconds, so it does not happen often.
const RESTARTS_MAX: u32 = 3;

/// How many endpoints a slice has.
fn endpoints(slice: &Value) -> usize {
    slice["endpoints"].as_array().map_or(0, Vec::len)
}

/// A proxy that works at a real API server.
pub struct Proxy<'a> {
    api: &'a ApiServer,
    program: Program,
    binaries: &'a Binaries,
    flags: Vec<String>,
    dir: tempfile::TempDir,
    process: Option<Process>,
    relay: Option<Relay>,
}

impl<'a> Proxy<'a> {
    /// A proxy that is not started yet.
    ///
    /// # Errors
    /// No temporary directory.
    pub fn new(program: Program, api: &'a ApiServer, binaries: &'a Binaries, flags: &[String]) -> Result<Self> {
        let (dir, flags) = (tempfile::tempdir()?, flags.to_vec());
        Ok(Self { api, program, binaries, flags, dir, process: None, relay: None })
    }

    /// Which program it is.
    #[must_use]
    pub fn program(&self) -> Program {
        self.program
    }

    /// Makes the API server reachable from the node.
    ///
    /// # Errors
    /// The port is taken.
    pub fn connect(&mut self, node: &Netns) -> Result<()> {
        if self.relay.is_none() {
            self.relay = Some(self.api.reach_from(node)?);
        }
        Ok(())
    }

    /// Cuts the node off the API server.
    pub fn disconnect(&mut self) {
        self.relay = None;
    }

    /// Starts the program (again).
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&mut self, node: &Netns) -> Result<()> {
        let kubeconfig = self.api.kubeconfig(User::Proxy)?;
        let mut command = self.program.command(self.binaries, node, &kubeconfig, &self.dir.path().join("run"))?;
        // By the name that kube-proxy has for it; Tandem takes it, too.
        command.arg("--iptables-min-sync-period=10ms");
        if self.program == Program::KubeProxy {
            command.arg("-v=2");
        }
        command.args(&self.flags);
        self.process = Some(Process::start(self.program.name(), command, &self.dir.path().join("log"))?);
        Ok(())
    }

    /// The running program.
    pub fn process(&mut self) -> Option<&mut Process> {
        self.process.as_mut()
    }

    /// Ends the program, then its way to the API server.
    pub fn end(&mut self) {
        self.process.take();
        self.relay.take();
    }

    /// Waits until what [`Cluster::apply`] wrote last is in force.
    ///
    /// # Errors
    /// It does not get there, or the program ended.
    pub fn settled(&mut self, node: &Netns, cluster: &Cluster) -> Result<()> {
        for restart in 0.. {
            let process = self.process.as_mut().context("not started")?;
            let Err(error) = await_sentinel(node, self.program.name(), &sentinel(cluster.step).1, process) else {
                return Ok(());
            };
            if restart == RESTARTS_MAX || process.running() || !error.to_string().contains(NODE_RACE) {
                return Err(error);
            }
            println!("kube-proxy fell over its Node at its start; it is started again, as a kubelet would");
            self.start(node)?;
        }
        unreachable!("the loop returns")
    }

    /// The last lines that the program wrote.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.as_ref().map(Process::log_tail).unwrap_or_default()
    }
}
