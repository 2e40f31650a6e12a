//! Command line flags with kube-proxy's names, defaults and spellings.

use super::{Raw, parse_duration};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// kube-proxy's default for `--metrics-bind-address`, with its default port.
pub(super) const METRICS_BIND_ADDRESS: &str = "127.0.0.1:10249";

/// Flags of every command that needs the node's settings.
#[derive(Clone, Debug, clap::Args)]
pub struct Flags {
    /// Directory of manifests (YAML or JSON) to serve instead of what an API server says
    #[arg(long, value_name = "DIR", help_heading = "Source")]
    pub manifests: Option<PathBuf>,
    /// Path of a kubeconfig file; without it in-cluster credentials are used
    #[arg(long, value_name = "FILE", default_value = "", help_heading = "Source", hide_default_value = true)]
    pub kubeconfig: String,
    /// Address of the API server; overrides the kubeconfig
    #[arg(long, value_name = "URL", help_heading = "Source")]
    pub master: Option<String>,
    /// Path of a KubeProxyConfiguration file; flags that it covers are then ignored
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of this node, if it is not the host's name
    #[arg(long, value_name = "NAME")]
    pub hostname_override: Option<String>,
    /// CIDR of the cluster's pods: one, or one of each family separated by a comma
    #[arg(long, value_name = "CIDRS")]
    pub cluster_cidr: Option<String>,
    /// How local pod traffic is detected: ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix
    #[arg(long, value_name = "MODE", default_value = "", hide_default_value = true)]
    pub detect_local_mode: String,
    /// Bridge interface of the pods, for BridgeInterface
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub pod_bridge_interface: String,
    /// Prefix of the pods' interface names, for InterfaceNamePrefix
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    pub pod_interface_name_prefix: String,
    /// CIDRs or keywords (primary, localhost, all) of the addresses that accept NodePorts; default primary
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub nodeport_addresses: Vec<String>,
    /// Masquerade all traffic to ClusterIPs
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false", default_missing_value = "true", hide_default_value = true, value_parser = parse_bool)]
    pub masquerade_all: bool,
    /// Bit of the packet mark that asks for masquerade, 0 to 31
    #[arg(long, value_name = "BIT", default_value_t = 14, alias = "iptables-masquerade-bit")]
    pub masquerade_bit: i64,
    /// Retry interval after a failed sync
    #[arg(long, value_name = "DURATION", default_value = "30s", alias = "iptables-sync-period", value_parser = parse_duration)]
    pub sync_period: Duration,
    /// Shortest time between two syncs [default: four times what the last one took, at most 1s]
    #[arg(long, value_name = "DURATION", alias = "iptables-min-sync-period", value_parser = parse_duration)]
    pub min_sync_period: Option<Duration>,
    /// Feature gates as NAME=true or NAME=false, separated by commas; AllowServiceExternalIPs acts, others are accepted
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_gate)]
    pub feature_gates: Vec<(String, bool)>,
    /// IP or IP:port where /metrics is served; empty = nowhere
    #[arg(long, value_name = "ADDRESS", default_value = METRICS_BIND_ADDRESS)]
    pub metrics_bind_address: String,
    /// Directory for the agent's status file
    #[arg(long, value_name = "DIR", default_value = "/run/tandem", help_heading = "Tandem")]
    pub run_dir: PathBuf,
    /// Name of the nftables tables
    #[arg(long, value_name = "NAME", default_value = "tandem", help_heading = "Tandem")]
    pub table: String,
    /// Clients that each endpoint of a ClientIP service remembers at most
    #[arg(long, value_name = "N", default_value_t = 65535, help_heading = "Tandem", value_parser = clap::value_parser!(u32).range(1..))]
    pub affinity_clients_max: u32,
    /// Log level as kube-proxy's: 0 to 3 info, 4 and 5 debug, 6 and more trace
    #[arg(short = 'v', long = "v", value_name = "LEVEL", default_value_t = 0)]
    pub v: u8,
}

impl Flags {
    pub(super) fn raw(&self) -> Raw {
        Raw {
            kubeconfig: self.kubeconfig.clone(),
            hostname_override: String::new(),
            cluster_cidr: self.cluster_cidr.clone(),
            detect_local_mode: self.detect_local_mode.clone(),
            bridge_interface: self.pod_bridge_interface.clone(),
            interface_name_prefix: self.pod_interface_name_prefix.clone(),
            node_port_addresses: self.nodeport_addresses.clone(),
            masquerade_all: self.masquerade_all,
            masquerade_bit: self.masquerade_bit,
            sync_period: self.sync_period,
            min_sync_period: self.min_sync_period,
            metrics_bind_address: self.metrics_bind_address.clone(),
            feature_gates: self.feature_gates.iter().cloned().collect(),
            conntrack: super::ConntrackConfig::default(),
        }
    }
}

/// Go's `strconv.ParseBool`.
fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// `NAME=BOOL`
fn parse_gate(text: &str) -> Result<(String, bool), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=true or NAME=false"))?;
    Ok((name.trim().to_owned(), parse_bool(value.trim())?))
}

/// Dashes and underscores are interchangeable in the names of flags, as in every Kubernetes component.
pub fn normalise(args: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    args.into_iter()
        .map(|arg| match arg.to_str() {
            Some(text) if text.starts_with("--") => {
                let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
                let name = name.replace('_', "-");
                value.map_or_else(|| name.clone(), |v| format!("{name}={v}")).into()
            }
            _ => arg,
        })
        .collect()
}
