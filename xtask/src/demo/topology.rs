//! The cluster in a box: network namespaces joined by virtual cables.
//!
//! ```text
//!   client 192.0.2.100   stranger 192.0.2.200
//!        └──────┬────────────┘
//!          lan (a switch, 192.0.2.0/24, 2001:db8:2::/64)
//!        ┌──────┴───────────────────┐
//!   node 192.0.2.10 (tandem)   node-2 192.0.2.11
//!    ├ shell 10.244.1.20        ├ web-3 10.244.2.11
//!    ├ web-1 10.244.1.11        └ dns-2 10.244.2.13
//!    ├ web-2 10.244.1.12
//!    └ dns-1 10.244.1.13
//! ```
//!
//! Nothing is made or changed in the machine's own network namespace.

use crate::command::{self, program};
use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const PREFIX: &str = "tandem-demo-";

/// A namespace on the switch: its name, and the last part of its addresses.
pub struct Host {
    pub name: &'static str,
    number: u16,
}

/// A namespace behind a node.
pub struct Pod {
    pub name: &'static str,
    /// Index in [`NODES`].
    node: usize,
    number: u16,
    /// Port and whether UDP, if it serves.
    pub serves: Option<(u16, bool)>,
}

pub const NODES: [Host; 2] = [Host { name: "node", number: 10 }, Host { name: "node-2", number: 11 }];
pub const OUTSIDE: [Host; 2] = [Host { name: "client", number: 100 }, Host { name: "stranger", number: 200 }];
pub const PODS: [Pod; 6] = [
    Pod { name: "shell", node: 0, number: 20, serves: None },
    Pod { name: "web-1", node: 0, number: 11, serves: Some((8080, false)) },
    Pod { name: "web-2", node: 0, number: 12, serves: Some((8080, false)) },
    Pod { name: "dns-1", node: 0, number: 13, serves: Some((5353, true)) },
    Pod { name: "web-3", node: 1, number: 11, serves: Some((8080, false)) },
    Pod { name: "dns-2", node: 1, number: 13, serves: Some((5353, true)) },
];

impl Host {
    fn v4(&self) -> String {
        format!("192.0.2.{}", self.number)
    }
    fn v6(&self) -> String {
        format!("2001:db8:2::{}", self.number)
    }
}

impl Pod {
    fn v4(&self) -> String {
        format!("10.244.{}.{}", self.node + 1, self.number)
    }
    fn v6(&self) -> String {
        format!("fd00:10:244:{}::{}", self.node + 1, self.number)
    }
}

/// Who has an address, in words.
pub fn owner(address: &str) -> &'static str {
    let host = NODES.iter().chain(&OUTSIDE).find(|h| h.v4() == address || h.v6() == address).map(|h| h.name);
    let pod = || PODS.iter().find(|p| p.v4() == address || p.v6() == address).map(|p| p.name);
    match host.or_else(pod) {
        Some(name) => name,
        None if address == "10.244.1.1" || address == "fd00:10:244:1::1" => "node",
        None => "unknown",
    }
}

/// The full name of a namespace.
pub fn namespace(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// A program inside a namespace.
pub fn inside(name: &str, what: &Path) -> Command {
    let mut command = program("ip", ["netns", "exec", &namespace(name)]);
    command.arg(what);
    command
}

/// Makes all namespaces, cables, addresses and routes. `directory` takes the scripts for `ip`.
///
/// # Errors
/// If a command fails.
pub fn build(directory: &Path, verbose: bool) -> Result<()> {
    let hosts: Vec<&Host> = NODES.iter().chain(&OUTSIDE).collect();
    let mut script = String::new();
    for name in ["lan"].into_iter().chain(hosts.iter().map(|h| h.name)).chain(PODS.iter().map(|p| p.name)) {
        writeln!(script, "netns add {}", namespace(name))?;
    }
    batch(None, &script, directory, verbose)?;
    for name in hosts.iter().map(|h| h.name).chain(PODS.iter().map(|p| p.name)) {
        // Else an IPv6 address is not used for a second, while the kernel asks whether someone else has it.
        sysctl(name, &["net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0"], verbose)?;
    }
    script.clear();
    for host in &hosts {
        let (lan, there) = (namespace("lan"), namespace(host.name));
        writeln!(script, "link add {} netns {lan} type veth peer name eth0 netns {there}", host.name)?;
    }
    for pod in &PODS {
        let (node, there) = (namespace(NODES[pod.node].name), namespace(pod.name));
        writeln!(script, "link add {} netns {node} type veth peer name eth0 netns {there}", pod.name)?;
    }
    batch(None, &script, directory, verbose)?;

    let mut lan = "link add lan0 type bridge mcast_snooping 0\nlink set lan0 up\n".to_owned();
    for host in &hosts {
        writeln!(lan, "link set {} master lan0 up", host.name)?;
    }
    batch(Some("lan"), &lan, directory, verbose)?;

    for host in &hosts {
        let mut text = format!(
            "link set lo up\nlink set eth0 up\naddr add {}/24 dev eth0\naddr add {}/64 dev eth0 nodad\n",
            host.v4(),
            host.v6()
        );
        // Where the load balancer's addresses are: the network's routers would know it.
        writeln!(text, "route add 203.0.113.0/24 via {}", NODES[0].v4())?;
        batch(Some(host.name), &text, directory, verbose)?;
    }
    for (index, node) in NODES.iter().enumerate() {
        sysctl(node.name, &NODE_SETTINGS, verbose)?;
        let other = 1 - index;
        let peer = &NODES[other];
        let mut text = format!(
            "route del 203.0.113.0/24\nroute add default via 192.0.2.1\nroute add default via 2001:db8:2::1\n\
             route add 10.244.{n}.0/24 via {}\nroute add fd00:10:244:{n}::/64 via {}\n",
            peer.v4(),
            peer.v6(),
            n = other + 1
        );
        for pod in PODS.iter().filter(|p| p.node == index) {
            let (dev, n) = (pod.name, index + 1);
            writeln!(text, "link set {dev} up\naddr add 10.244.{n}.1/32 dev {dev}")?;
            writeln!(text, "addr add fd00:10:244:{n}::1/128 dev {dev} nodad")?;
            writeln!(text, "route add {} dev {dev}\nroute add {} dev {dev}", pod.v4(), pod.v6())?;
        }
        batch(Some(node.name), &text, directory, verbose)?;
    }
    for pod in &PODS {
        let (v4, v6, n) = (pod.v4(), pod.v6(), pod.node + 1);
        let text = format!(
            "link set lo up\nlink set eth0 up\naddr add {v4}/32 dev eth0\naddr add {v6}/128 dev eth0 nodad\n\
             route add 10.244.{n}.1 dev eth0\nroute add default via 10.244.{n}.1\n\
             route add fd00:10:244:{n}::1 dev eth0\nroute add default via fd00:10:244:{n}::1\n"
        );
        batch(Some(pod.name), &text, directory, verbose)?;
    }
    Ok(())
}

/// Runs lines for `ip`, in a namespace if one is named.
fn batch(name: Option<&str>, script: &str, directory: &Path, verbose: bool) -> Result<()> {
    let file = directory.join(format!("{}.ip", name.unwrap_or("all")));
    std::fs::write(&file, script).with_context(|| format!("cannot write {}", file.display()))?;
    let mut command = Command::new("ip");
    if let Some(name) = name {
        command.args(["-n", &namespace(name)]);
    }
    command.arg("-batch").arg(&file);
    if verbose {
        println!("$ {}\n{script}", command::shown(&command));
    }
    command::output(&mut command).map(drop)
}

/// What an installer of Kubernetes does on a node: it forwards packets, and takes replies by other ways than it would send.
const NODE_SETTINGS: [&str; 3] =
    ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.rp_filter=0"];

fn sysctl(name: &str, settings: &[&str], verbose: bool) -> Result<()> {
    let mut command = inside(name, Path::new("sysctl"));
    command.args(["-q", "-w"]).args(settings);
    if verbose {
        println!("$ {}", command::shown(&command));
    }
    command::output(&mut command).map(drop)
}

/// The demo's namespaces that exist now.
///
/// # Errors
/// If `ip` cannot list them.
pub fn existing() -> Result<Vec<String>> {
    let listed = command::output(&mut program("ip", ["netns", "list"]))?;
    let names = listed.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect())
}

/// Ends what runs in the demo's namespaces and removes them. Goes on over errors and returns the first.
///
/// # Errors
/// If something could not be removed.
pub fn remove() -> Result<()> {
    let namespaces = existing()?;
    let pids = || -> Vec<Pid> {
        namespaces
            .iter()
            .filter_map(|name| command::output(&mut program("ip", ["netns", "pids", name])).ok())
            .flat_map(|text| {
                text.split_whitespace().filter_map(|n| n.parse().ok()).map(Pid::from_raw).collect::<Vec<_>>()
            })
            .collect()
    };
    for (signal, patience) in [(Signal::SIGTERM, Duration::from_secs(3)), (Signal::SIGKILL, Duration::from_secs(2))] {
        for pid in pids() {
            // It may have ended by itself.
            let _ = kill(pid, signal);
        }
        let begun = Instant::now();
        while !pids().is_empty() && begun.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let mut first = Ok(());
    for name in &namespaces {
        let removed = command::output(&mut program("ip", ["netns", "del", name]));
        if first.is_ok() {
            first = removed.map(drop);
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example manifests and this topology must speak of the same addresses.
    #[test]
    fn every_endpoint_of_the_examples_is_a_pod_that_serves_its_port() {
        let root = command::workspace_root().unwrap();
        let mut seen = 0;
        for (_, object) in super::super::manifests::read(&root.join("deploy/examples")).unwrap() {
            if object["kind"] != "EndpointSlice" {
                continue;
            }
            let port = &object["ports"][0];
            for endpoint in object["endpoints"].as_array().unwrap() {
                let address = endpoint["addresses"][0].as_str().unwrap();
                let pod = PODS.iter().find(|p| p.v4() == address || p.v6() == address).expect(address);
                let (number, udp) = pod.serves.expect(address);
                assert_eq!(port["port"], number);
                assert_eq!(port["protocol"], if udp { "UDP" } else { "TCP" });
                let node = ["demo-node", "demo-node-2"][pod.node];
                assert_eq!(endpoint["nodeName"], node);
                seen += 1;
            }
        }
        assert!(seen >= 15, "{seen}");
    }

    #[test]
    fn addresses_have_owners() {
        assert_eq!(owner("192.0.2.100"), "client");
        assert_eq!(owner("fd00:10:244:1::20"), "shell");
        assert_eq!(owner("10.244.1.1"), "node");
        assert_eq!(owner("198.51.100.1"), "unknown");
    }
}
