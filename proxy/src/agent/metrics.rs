//! Metrics and their HTTP listener.

use crate::model::IpFamily;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// kube-proxy v1.37 repeats a failed bind every five seconds.
const BIND_RETRY: Duration = Duration::from_secs(5);

/// Label `ip_family`: `IPv4` or `IPv6`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByFamily {
    ip_family: String,
}

impl From<IpFamily> for ByFamily {
    fn from(family: IpFamily) -> Self {
        Self { ip_family: family.to_string() }
    }
}

/// A histogram of seconds, from half a millisecond to some 16 s.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 16))
}

/// Seconds by family.
pub type Seconds = Family<ByFamily, Histogram, fn() -> Histogram>;

/// Everything that is counted.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Syncs that ended well.
    pub syncs: Family<ByFamily, Counter>,
    /// Failed syncs; kube-proxy's name.
    pub sync_failures: Family<ByFamily, Counter>,
    /// Unix time of the last good sync; kube-proxy's name.
    pub last_sync: Family<ByFamily, Gauge>,
    /// Duration of syncs, compilation and the kernel's part included; kube-proxy's name.
    pub sync_seconds: Seconds,
    /// The kernel's part of syncs.
    pub kernel_seconds: Seconds,
    /// Repairs after someone else changed our table.
    pub repairs: Family<ByFamily, Counter>,
    /// UDP flows deleted because they contradicted the service map.
    pub conntrack_deleted: Counter,
    /// 1 while a kube-proxy acts in this network namespace.
    pub kube_proxy_running: Gauge,
    /// Signs of a kube-proxy in this network namespace that were reported.
    pub kube_proxy_signs: Counter,
    /// Problems that the source reported: objects, files, the connection to the API server.
    pub source_problems: Counter,
    /// Seconds from the start of the agent to the first complete list of Services and slices; 0 until then.
    pub first_list: Gauge<f64, AtomicU64>,
    /// Services that are not served as asked because the kernel or the plan cannot hold them.
    pub refused_services: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            syncs: Family::default(),
            sync_failures: Family::default(),
            last_sync: Family::default(),
            sync_seconds: Family::new_with_constructor(seconds),
            kernel_seconds: Family::new_with_constructor(seconds),
            repairs: Family::default(),
            conntrack_deleted: Counter::default(),
            kube_proxy_running: Gauge::default(),
            kube_proxy_signs: Counter::default(),
            source_problems: Counter::default(),
            first_list: Gauge::default(),
            refused_services: Gauge::default(),
        }
    }
}

impl Metrics {
    /// A registry with every metric under its name.
    #[must_use]
    pub fn registry(&self) -> Registry {
        let mut r = Registry::default();
        // Counters get the suffix _total from the encoder.
        r.register("tandem_syncs", "Syncs that ended well", self.syncs.clone());
        r.register("tandem_repairs", "Repairs after someone else changed our table", self.repairs.clone());
        r.register(
            "tandem_kube_proxy_running",
            "1 while a kube-proxy acts in this network namespace",
            self.kube_proxy_running.clone(),
        );
        r.register(
            "tandem_kube_proxy_signs",
            "Reported signs of a kube-proxy in this network namespace",
            self.kube_proxy_signs.clone(),
        );
        r.register(
            "tandem_source_problems",
            "Problems with objects, files or the connection to the API server",
            self.source_problems.clone(),
        );
        r.register(
            "tandem_first_list_seconds",
            "Time from start to the first complete list of Services and EndpointSlices; 0 until it is there",
            self.first_list.clone(),
        );
        r.register("tandem_refused_services", "Services that are not served as asked", self.refused_services.clone());
        r.register(
            "kubeproxy_sync_proxy_rules_nftables_sync_failures",
            "Failed nftables transactions",
            self.sync_failures.clone(),
        );
        r.register(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "Unix time of the last successful sync",
            self.last_sync.clone(),
        );
        r.register(
            "kubeproxy_sync_proxy_rules_duration_seconds",
            "Duration of syncs that ended well",
            self.sync_seconds.clone(),
        );
        r.register(
            "tandem_sync_kernel_seconds",
            "The part of a sync that the kernel takes to commit, and to tell what it holds",
            self.kernel_seconds.clone(),
        );
        r.register(
            "tandem_conntrack_deleted_flows",
            "UDP flows deleted because they contradicted the service map",
            self.conntrack_deleted.clone(),
        );
        r
    }
}

/// Serves `/metrics` for ever; a failed bind is logged and tried again.
pub async fn serve(address: SocketAddr, metrics: Metrics) {
    let registry = Arc::new(metrics.registry());
    let app = axum::Router::new().route(
        "/metrics",
        axum::routing::get(move || {
            let registry = Arc::clone(&registry);
            async move {
                let mut body = String::new();
                // Writing to a String cannot fail.
                let _ = prometheus_client::encoding::text::encode(&mut body, &registry);
                (
                    [
                        ("server", crate::takeover::probe::SERVER),
                        ("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
                    ],
                    body,
                )
            }
        }),
    );
    let mut reported = false;
    loop {
        match tokio::net::TcpListener::bind(address).await {
            Ok(listener) => {
                if let Err(error) = axum::serve(listener, app.clone()).await {
                    tracing::error!(%address, "metrics listener: {error}");
                }
            }
            Err(error) => {
                if !reported {
                    tracing::error!(%address, "metrics listener: {error}; trying again every {BIND_RETRY:?}; choose another --metrics-bind-address if something else needs this one");
                    reported = true;
                }
            }
        }
        tokio::time::sleep(BIND_RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kube_proxy_are_kept() {
        let metrics = Metrics::default();
        metrics.sync_failures.get_or_create(&IpFamily::V4.into()).inc();
        metrics.last_sync.get_or_create(&IpFamily::V6.into()).set(7);
        metrics.first_list.set(0.25);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &metrics.registry()).unwrap();
        for line in [
            "kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family=\"IPv4\"} 1",
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"} 7",
            "tandem_kube_proxy_running 0",
            "tandem_first_list_seconds 0.25",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
