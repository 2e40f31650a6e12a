//! Flags and configuration file → one validated [`Config`]. Nothing here talks to the kernel or the network.
//!
//! Precedence as in kube-proxy v1.37: with `--config`, only `--master`, `--hostname-override`, `-v` and Tandem's own flags act beside the file.
#![forbid(unsafe_code)]

mod duration;
mod file;
pub mod flags;

pub use crate::model::DetectLocalMode;
pub use duration::{format_duration, parse_duration};
pub use flags::Flags;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Where objects come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceConfig {
    /// A directory of manifests; no API server is contacted.
    Manifests(PathBuf),
    /// The API server.
    Kubernetes {
        /// Path of a kubeconfig file; `None` = in-cluster credentials.
        kubeconfig: Option<PathBuf>,
        /// Overrides the server address of the kubeconfig.
        master: Option<String>,
    },
}

/// In words, for the log and `tandem status`.
impl fmt::Display for SourceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifests(dir) => write!(f, "manifests in {}", dir.display()),
            Self::Kubernetes { kubeconfig: Some(path), .. } => write!(f, "API server of kubeconfig {}", path.display()),
            Self::Kubernetes { master: Some(master), .. } => write!(f, "API server {master}"),
            Self::Kubernetes { .. } => write!(f, "API server of this cluster"),
        }
    }
}

/// The validated configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Where objects come from.
    pub source: SourceConfig,
    /// Node name: `--hostname-override`, else the host's name; trimmed, lower case.
    pub node_name: String,
    /// How local traffic is detected.
    pub detect_local_mode: DetectLocalMode,
    /// `clusterCIDR`, split at commas.
    pub cluster_cidrs: Vec<ipnet::IpNet>,
    /// `detectLocal.bridgeInterface`
    pub bridge_interface: String,
    /// `detectLocal.interfaceNamePrefix`
    pub interface_name_prefix: String,
    /// `nodePortAddresses`: CIDRs and the keywords `primary`, `localhost`, `all`. Empty became `[primary]`.
    pub node_port_addresses: Vec<String>,
    /// `masqueradeAll`
    pub masquerade_all: bool,
    /// 1 << masqueradeBit
    pub masquerade_mark: u32,
    /// Retry interval after a failed sync.
    pub sync_period: Duration,
    /// Shortest time between two syncs; `None`: as it suits their cost, at most [`MIN_SYNC_PERIOD`].
    pub min_sync_period: Option<Duration>,
    /// Where metrics are served; `None` = nowhere.
    pub metrics_bind_address: Option<std::net::SocketAddr>,
    /// Gate `AllowServiceExternalIPs` (on by default): whether `spec.externalIPs` are served.
    pub external_ips_enabled: bool,
    /// Where the agent writes its status.
    pub run_dir: PathBuf,
    /// Name of the nftables tables.
    pub table: String,
    /// Connection tracking settings.
    pub conntrack: ConntrackConfig,
    /// Clients that one endpoint of a ClientIP service remembers at most.
    pub affinity_clients_max: u32,
}

/// `conntrack` of KubeProxyConfiguration: what Tandem sets at start. Zero = leave alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConntrackConfig {
    /// `maxPerCore`
    pub max_per_core: u32,
    /// `min`
    pub min: u32,
    /// `tcpEstablishedTimeout`
    pub tcp_established_timeout: Duration,
    /// `tcpCloseWaitTimeout`
    pub tcp_close_wait_timeout: Duration,
}

impl Default for ConntrackConfig {
    fn default() -> Self {
        Self {
            max_per_core: 32768,
            min: 131_072,
            tcp_established_timeout: Duration::from_secs(86400),
            tcp_close_wait_timeout: Duration::from_secs(3600),
        }
    }
}

/// Why the configuration was refused; all problems together, as kube-proxy reports them.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("--config {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is no KubeProxyConfiguration.
    #[error("--config {path}: {message}")]
    Decode {
        /// The file.
        path: PathBuf,
        /// Where and why.
        message: String,
    },
    /// Values that are not allowed, each as `field: why`.
    #[error("invalid configuration:\n  {}", .0.join("\n  "))]
    Invalid(Vec<String>),
}

/// Values that come from flags or from the file, not yet validated.
#[derive(Clone, Debug, Default)]
struct Raw {
    kubeconfig: String,
    hostname_override: String,
    cluster_cidr: Option<String>,
    detect_local_mode: String,
    bridge_interface: String,
    interface_name_prefix: String,
    node_port_addresses: Vec<String>,
    masquerade_all: bool,
    masquerade_bit: i64,
    sync_period: Duration,
    min_sync_period: Option<Duration>,
    metrics_bind_address: String,
    feature_gates: BTreeMap<String, bool>,
    conntrack: ConntrackConfig,
}

impl Config {
    /// Reads `--config` if given, applies the flags' precedence and validates everything.
    ///
    /// # Errors
    /// Everything that is wrong, at once; nothing is half applied.
    pub fn load(flags: &Flags, host_name: &str) -> Result<Self, ConfigError> {
        let raw = match &flags.config {
            Some(path) => file::load(path)?,
            None => flags.raw(),
        };
        validate(flags, raw, host_name)
    }
}

/// kube-proxy's default of minSyncPeriod.
pub const MIN_SYNC_PERIOD: Duration = Duration::from_secs(1);

const METRICS_PORT: u16 = 10249;

fn validate(flags: &Flags, raw: Raw, host_name: &str) -> Result<Config, ConfigError> {
    let mut errors = Vec::new();
    let mut check = |field: &str, result: Result<(), String>| {
        if let Err(why) = result {
            errors.push(format!("{field}: {why}"));
        }
    };

    let detect_local_mode = raw.detect_local_mode.parse::<DetectLocalMode>().map_err(|unknown| unknown.to_string());
    check("detectLocalMode", detect_local_mode.as_ref().map(|_| ()).map_err(Clone::clone));
    let detect_local_mode = detect_local_mode.unwrap_or_default();

    let (cluster_cidrs, cidr_result) = parse_cluster_cidrs(raw.cluster_cidr.as_deref());
    if detect_local_mode == DetectLocalMode::ClusterCidr {
        check("clusterCIDR", cidr_result);
    }
    if detect_local_mode == DetectLocalMode::BridgeInterface {
        check("detectLocal.bridgeInterface", interface_name(&raw.bridge_interface, "--pod-bridge-interface"));
    }
    if detect_local_mode == DetectLocalMode::InterfaceNamePrefix {
        check(
            "detectLocal.interfaceNamePrefix",
            interface_name(&raw.interface_name_prefix, "--pod-interface-name-prefix"),
        );
    }
    check("nodePortAddresses", node_port_addresses(&raw.node_port_addresses));
    check(
        "masqueradeBit",
        (0..=31)
            .contains(&raw.masquerade_bit)
            .then_some(())
            .ok_or_else(|| format!("{} is outside 0 to 31", raw.masquerade_bit)),
    );
    check("syncPeriod", (!raw.sync_period.is_zero()).then_some(()).ok_or("must be greater than 0".into()));
    check(
        "minSyncPeriod",
        (raw.min_sync_period.unwrap_or(MIN_SYNC_PERIOD) <= raw.sync_period)
            .then_some(())
            .ok_or("must not be greater than syncPeriod".into()),
    );

    let hostname_override = flags.hostname_override.as_deref().unwrap_or(&raw.hostname_override);
    let node_name = if hostname_override.is_empty() { host_name } else { hostname_override };
    let node_name = node_name.trim().to_lowercase();
    check(
        "hostnameOverride",
        (!node_name.is_empty()).then_some(()).ok_or("the node name is empty: give --hostname-override".into()),
    );

    check(
        "hostnameOverride",
        (!node_name.chars().any(char::is_control))
            .then_some(())
            .ok_or_else(|| format!("{node_name:?} has control characters")),
    );
    let metrics_bind_address = parse_bind_address(&raw.metrics_bind_address, METRICS_PORT);
    check("metricsBindAddress", metrics_bind_address.as_ref().map(|_| ()).map_err(Clone::clone));
    check(
        "table",
        (!flags.table.is_empty()
            && flags.table.len() < 128
            && flags.table.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'))
        .then_some(())
        .ok_or("letters, digits, - and _ only".into()),
    );
    if !errors.is_empty() {
        return Err(ConfigError::Invalid(errors));
    }

    let source = match &flags.manifests {
        Some(dir) => SourceConfig::Manifests(dir.clone()),
        None => SourceConfig::Kubernetes {
            kubeconfig: (!raw.kubeconfig.is_empty()).then(|| raw.kubeconfig.into()),
            master: flags.master.clone().filter(|m| !m.is_empty()),
        },
    };
    Ok(Config {
        source,
        node_name,
        detect_local_mode,
        cluster_cidrs,
        bridge_interface: raw.bridge_interface,
        interface_name_prefix: raw.interface_name_prefix,
        node_port_addresses: if raw.node_port_addresses.is_empty() {
            vec!["primary".into()]
        } else {
            raw.node_port_addresses
        },
        masquerade_all: raw.masquerade_all,
        masquerade_mark: 1 << raw.masquerade_bit,
        sync_period: raw.sync_period,
        min_sync_period: raw.min_sync_period,
        metrics_bind_address: metrics_bind_address.unwrap_or_default(),
        external_ips_enabled: raw.feature_gates.get("AllowServiceExternalIPs").copied().unwrap_or(true),
        run_dir: flags.run_dir.clone(),
        table: flags.table.clone(),
        conntrack: raw.conntrack,
        affinity_clients_max: flags.affinity_clients_max,
    })
}

/// One CIDR, or two of different families; not trimmed. `None` = not given. The list of the valid ones comes back also on error.
fn parse_cluster_cidrs(text: Option<&str>) -> (Vec<ipnet::IpNet>, Result<(), String>) {
    let Some(text) = text else { return (Vec::new(), Ok(())) };
    let mut cidrs = Vec::new();
    for part in text.split(',') {
        match part.parse::<ipnet::IpNet>() {
            Ok(net) => cidrs.push(net.trunc()),
            Err(_) => return (cidrs, Err(format!("{part:?} is no CIDR such as 10.244.0.0/16"))),
        }
    }
    let result = match cidrs.as_slice() {
        [_] => Ok(()),
        [a, b] if a.addr().is_ipv4() != b.addr().is_ipv4() => Ok(()),
        _ => Err(format!("{text:?}: give one CIDR, or one of each family")),
    };
    (cidrs, result)
}

/// Linux refuses interface names of 16 bytes and more (IFNAMSIZ), and nftables every rule that names one.
fn interface_name(name: &str, flag: &str) -> Result<(), String> {
    match name.len() {
        0 => Err(format!("must be given with this detectLocalMode ({flag})")),
        1..=15 => Ok(()),
        _ => Err(format!("{name:?} is longer than the 15 bytes that Linux allows")),
    }
}

/// Keywords that `nodePortAddresses` takes beside CIDRs (kube-proxy v1.37).
const NODE_PORT_KEYWORDS: [&str; 3] = ["primary", "localhost", "all"];

fn node_port_addresses(list: &[String]) -> Result<(), String> {
    for (i, entry) in list.iter().enumerate() {
        let keyword = NODE_PORT_KEYWORDS.contains(&entry.as_str());
        if keyword && list[..i].contains(entry) {
            return Err(format!("[{i}]: {entry:?} is given twice"));
        }
        if !keyword && entry.parse::<ipnet::IpNet>().is_err() {
            return Err(format!("[{i}]: {entry:?} is neither a CIDR nor one of primary, localhost, all"));
        }
    }
    Ok(())
}

/// `IP`, `IP:port`, `[IP]:port`; empty = nothing is bound.
fn parse_bind_address(text: &str, default_port: u16) -> Result<Option<std::net::SocketAddr>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    if let Ok(ip) = text.parse::<std::net::IpAddr>() {
        return Ok(Some((ip, default_port).into()));
    }
    match text.parse::<std::net::SocketAddr>() {
        Ok(address) if address.port() != 0 => Ok(Some(address)),
        _ => Err(format!("{text:?} is no IP or IP:port")),
    }
}

#[cfg(test)]
mod tests;
