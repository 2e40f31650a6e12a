//! `--config FILE`: KubeProxyConfiguration v1alpha1, the fields that act in this version.

use super::{ConfigError, ConntrackConfig, Raw, parse_duration};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// A duration that is absent or explicitly zero takes the default, as in kube-proxy v1.37.
fn duration<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    Option::<String>::deserialize(d)?.map(|text| parse_duration(&text).map_err(serde::de::Error::custom)).transpose()
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct KubeProxyConfiguration {
    api_version: String,
    kind: String,
    client_connection: ClientConnection,
    hostname_override: String,
    mode: String,
    iptables: Rules,
    ipvs: Rules,
    nftables: Rules,
    detect_local_mode: String,
    detect_local: DetectLocal,
    #[serde(rename = "clusterCIDR")]
    cluster_cidr: String,
    node_port_addresses: Option<Vec<String>>,
    metrics_bind_address: String,
    feature_gates: BTreeMap<String, bool>,
    conntrack: Conntrack,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct ClientConnection {
    kubeconfig: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Rules {
    masquerade_bit: Option<i64>,
    masquerade_all: bool,
    #[serde(deserialize_with = "duration")]
    sync_period: Option<Duration>,
    #[serde(deserialize_with = "duration")]
    min_sync_period: Option<Duration>,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct DetectLocal {
    bridge_interface: String,
    interface_name_prefix: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Conntrack {
    max_per_core: Option<u32>,
    min: Option<u32>,
    #[serde(deserialize_with = "duration")]
    tcp_established_timeout: Option<Duration>,
    #[serde(deserialize_with = "duration")]
    tcp_close_wait_timeout: Option<Duration>,
}

pub(super) fn load(path: &Path) -> Result<Raw, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
    parse(&text).map_err(|message| ConfigError::Decode { path: path.into(), message })
}

/// Only the first document counts: kube-proxy ignores the others.
pub(super) fn parse(text: &str) -> Result<Raw, String> {
    let first = first_document(text);
    let file: KubeProxyConfiguration = serde_saphyr::from_str(&first).map_err(|e| e.to_string())?;
    if file.kind != "KubeProxyConfiguration" || file.api_version != "kubeproxy.config.k8s.io/v1alpha1" {
        return Err(format!(
            "expected apiVersion kubeproxy.config.k8s.io/v1alpha1, kind KubeProxyConfiguration; found apiVersion {:?}, kind {:?}",
            file.api_version, file.kind
        ));
    }
    let section = match file.mode.as_str() {
        "" | "iptables" => &file.iptables,
        "ipvs" => &file.ipvs,
        "nftables" => &file.nftables,
        other => return Err(format!("mode: {other:?} is none of iptables, ipvs, nftables")),
    };
    // ipvs shares the masquerade settings of the iptables section.
    let masquerade = if file.mode == "nftables" { &file.nftables } else { &file.iptables };
    let set = |value: Option<Duration>, default| value.filter(|d| !d.is_zero()).unwrap_or(default);
    let defaults = ConntrackConfig::default();
    Ok(Raw {
        kubeconfig: file.client_connection.kubeconfig,
        hostname_override: file.hostname_override,
        cluster_cidr: (!file.cluster_cidr.is_empty()).then_some(file.cluster_cidr),
        detect_local_mode: file.detect_local_mode,
        bridge_interface: file.detect_local.bridge_interface,
        interface_name_prefix: file.detect_local.interface_name_prefix,
        node_port_addresses: file.node_port_addresses.unwrap_or_default(),
        masquerade_all: masquerade.masquerade_all,
        masquerade_bit: masquerade.masquerade_bit.unwrap_or(14),
        sync_period: set(section.sync_period, Duration::from_secs(30)),
        min_sync_period: section.min_sync_period.filter(|d| !d.is_zero()),
        metrics_bind_address: if file.metrics_bind_address.is_empty() {
            super::flags::METRICS_BIND_ADDRESS.into()
        } else {
            file.metrics_bind_address
        },
        feature_gates: file.feature_gates,
        conntrack: ConntrackConfig {
            max_per_core: file.conntrack.max_per_core.unwrap_or(defaults.max_per_core),
            min: file.conntrack.min.unwrap_or(defaults.min),
            tcp_established_timeout: file.conntrack.tcp_established_timeout.unwrap_or(defaults.tcp_established_timeout),
            tcp_close_wait_timeout: file.conntrack.tcp_close_wait_timeout.unwrap_or(defaults.tcp_close_wait_timeout),
        },
    })
}

/// The first YAML document that has content.
fn first_document(text: &str) -> String {
    let mut lines = Vec::new();
    for line in text.lines() {
        let separator = line == "---" || line.starts_with("--- ");
        if separator && lines.iter().any(|l: &&str| !l.trim().is_empty() && !l.trim_start().starts_with('#')) {
            break;
        }
        if !separator {
            lines.push(line);
        }
    }
    lines.join("\n")
}
