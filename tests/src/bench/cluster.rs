//! A cluster of any size, as objects that look like those of real controllers, and a fast way to bring it into the API server.
//!
//! Every Service is of the plainest kind that all proxies serve alike: type ClusterIP, IPv4 only, one TCP port, no affinity, no
//! traffic policy. Its EndpointSlices are what the EndpointSlice controller of Kubernetes v1.37 would write: at most 100 endpoints
//! each, with its labels, owner reference, trigger time, target references, node names and zones. The API server itself adds the
//! managed fields, because objects are created in the controllers' names.
//!
//! Every endpoint has an address of its own inside [`POD_NETWORK`]: where that network is routed to one server, every endpoint of
//! every Service answers, and the answer says which one it was.

use crate::apiserver::ApiServer;
use crate::envtest::KUBERNETES_VERSION;
use anyhow::{Context, Result, bail};
use kube::Client;
use serde::Deserialize;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Network of all endpoints, as `ip` takes it.
pub const POD_NETWORK: &str = "10.128.0.0/9";
/// Port of every Service.
pub const SERVICE_PORT: u16 = 80;
/// Port of every endpoint.
pub const ENDPOINT_PORT: u16 = 8080;
/// What `--max-endpoints-per-slice` of the kube-controller-manager defaults to.
pub const SLICE_ENDPOINTS: usize = 100;

const FIRST_POD: u32 = u32::from_be_bytes([10, 128, 0, 0]);
const FIRST_SPARE: u32 = u32::from_be_bytes([10, 254, 0, 0]);
const FIRST_SERVICE: u32 = u32::from_be_bytes([172, 30, 2, 0]);
/// Leaves room at both ends of the service network of [`crate::apiserver::SERVICE_CIDRS`].
const SERVICES_MAX: usize = 60_000;
const NAMESPACES: usize = 20;
const NODES: usize = 100;
/// Requests under way at a time: enough to keep two cores of the API server busy.
const THREADS: usize = 2;
const REQUESTS_PER_THREAD: usize = 16;
/// Seconds between two lines about the progress.
const PROGRESS: u64 = 5;

/// What a cluster consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    services: usize,
    endpoints: usize,
}

/// Who writes an object: the API server notes it in the managed fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manager {
    /// A user with kubectl.
    Kubectl,
    /// The EndpointSlice controller.
    Controller,
}

impl Manager {
    fn name(self) -> &'static str {
        match self {
            Manager::Kubectl => "kubectl-create",
            Manager::Controller => "kube-controller-manager",
        }
    }
}

impl Cluster {
    /// A cluster of `services` Services with `endpoints` endpoints each.
    ///
    /// # Errors
    /// More than the networks hold.
    pub fn new(services: usize, endpoints: usize) -> Result<Self> {
        let room = (FIRST_SPARE - FIRST_POD) as usize;
        if services == 0 || services > SERVICES_MAX {
            bail!("{services} services: the service network holds 1 to {SERVICES_MAX}");
        }
        if services.checked_mul(endpoints).is_none_or(|n| n > room) {
            bail!("{services} services with {endpoints} endpoints each: the pod network holds {room} endpoints");
        }
        Ok(Self { services, endpoints })
    }

    /// Number of Services.
    #[must_use]
    pub fn services(&self) -> usize {
        self.services
    }

    /// Endpoints of each Service.
    #[must_use]
    pub fn endpoints(&self) -> usize {
        self.endpoints
    }

    /// ClusterIP of Service `index`; beyond [`Cluster::services`] those of Services that may be added.
    #[must_use]
    pub fn service_ip(&self, index: usize) -> Ipv4Addr {
        Ipv4Addr::from(FIRST_SERVICE + offset(index))
    }

    /// Address of endpoint `number` of Service `index`.
    #[must_use]
    pub fn endpoint_ip(&self, index: usize, number: usize) -> Ipv4Addr {
        Ipv4Addr::from(FIRST_POD + offset(index * self.endpoints + number))
    }

    /// Addresses in [`POD_NETWORK`] that no Service of the cluster has: for endpoints that come later.
    #[must_use]
    pub fn spare_ip(&self, number: usize) -> Ipv4Addr {
        Ipv4Addr::from(FIRST_SPARE + offset(number))
    }

    /// Namespace of Service `index`.
    #[must_use]
    pub fn namespace(&self, index: usize) -> String {
        format!("team-{:02}", index % NAMESPACES)
    }

    /// Name of Service `index`.
    #[must_use]
    pub fn name(&self, index: usize) -> String {
        format!("service-{index:05}")
    }

    /// Name of a slice of Service `index`.
    #[must_use]
    pub fn slice_name(&self, index: usize, slice: usize) -> String {
        format!("{}-{}", self.name(index), suffix(index * 1009 + slice))
    }

    /// Service `index`.
    #[must_use]
    pub fn service(&self, index: usize) -> Value {
        let (name, ip) = (self.name(index), self.service_ip(index));
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "namespace": self.namespace(index), "name": name, "labels": labels(&name) },
            "spec": {
                "type": "ClusterIP", "clusterIP": ip, "clusterIPs": [ip], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
                "selector": { "app.kubernetes.io/name": name },
                "ports": [{ "name": "http", "port": SERVICE_PORT, "protocol": "TCP", "targetPort": "http" }],
            },
        })
    }

    /// The addresses of the endpoints of Service `index`.
    #[must_use]
    pub fn addresses(&self, index: usize) -> Vec<Ipv4Addr> {
        (0..self.endpoints).map(|number| self.endpoint_ip(index, number)).collect()
    }

    /// The slices of Service `index`, which the API server calls `uid`, with endpoints at `addresses`.
    #[must_use]
    pub fn slices(&self, index: usize, uid: &str, addresses: &[Ipv4Addr]) -> Vec<Value> {
        let (namespace, name) = (self.namespace(index), self.name(index));
        let mut all_labels = labels(&name);
        all_labels["endpointslice.kubernetes.io/managed-by"] = "endpointslice-controller.k8s.io".into();
        all_labels["kubernetes.io/service-name"] = name.as_str().into();
        let slice = |(slice, addresses): (usize, &[Ipv4Addr])| {
            let endpoints: Vec<Value> = addresses.iter().map(|ip| endpoint(&namespace, &name, *ip)).collect();
            json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "namespace": namespace, "name": self.slice_name(index, slice), "generateName": format!("{name}-"),
                    "labels": all_labels,
                    "annotations": { "endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z" },
                    "ownerReferences": [{
                        "apiVersion": "v1", "kind": "Service", "name": name, "uid": uid,
                        "controller": true, "blockOwnerDeletion": true,
                    }],
                },
                "addressType": "IPv4",
                "endpoints": endpoints,
                "ports": [{ "name": "http", "port": ENDPOINT_PORT, "protocol": "TCP" }],
            })
        };
        addresses.chunks(SLICE_ENDPOINTS).enumerate().map(slice).collect()
    }

    /// Creates the cluster in the API server; progress goes to standard error. Returns how long it took.
    ///
    /// # Errors
    /// The API server refuses an object, for instance because it exists.
    pub fn load(self, api: &ApiServer) -> Result<Duration> {
        let start = Instant::now();
        let access = api.access()?;
        access.run(|client| async move {
            for index in 0..NAMESPACES {
                let metadata = json!({ "name": self.namespace(index) });
                let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata });
                create(&client, Manager::Kubectl, &object).await?;
            }
            Ok(())
        })?;
        let done = Arc::new(Progress::new(self.services));
        let load = || {
            access.run(|client| async move {
                let mut tasks = tokio::task::JoinSet::new();
                for _ in 0..REQUESTS_PER_THREAD {
                    let (client, done) = (client.clone(), done.clone());
                    tasks.spawn(async move {
                        while let Some(index) = done.next() {
                            self.create_service(&client, index, &self.addresses(index)).await?;
                        }
                        anyhow::Ok(())
                    });
                }
                // The first error ends it: dropping the set drops the other tasks.
                while let Some(ended) = tasks.join_next().await {
                    ended.expect("a task neither panics nor is cancelled")?;
                }
                Ok(())
            })
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(load.clone())).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("load does not panic"))
        })?;
        Ok(start.elapsed())
    }

    /// Creates Service `index` and its slices with endpoints at `addresses`.
    ///
    /// # Errors
    /// The API server refuses one.
    pub async fn create_service(self, client: &Client, index: usize, addresses: &[Ipv4Addr]) -> Result<()> {
        let uid = create(client, Manager::Kubectl, &self.service(index)).await?;
        for slice in self.slices(index, &uid, addresses) {
            create(client, Manager::Controller, &slice).await?;
        }
        Ok(())
    }

    /// Gives Service `index`, which the API server calls `uid`, endpoints at `addresses` instead of those it has; as many slices as before.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn replace_endpoints(self, client: &Client, index: usize, uid: &str, to: &[Ipv4Addr]) -> Result<()> {
        for slice in self.slices(index, uid, to) {
            send(client, "PUT", Manager::Controller, &slice).await?;
        }
        Ok(())
    }

    /// Deletes Service `index`; its slices, too, as the garbage collector would.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn delete_service(self, client: &Client, index: usize, endpoints: usize) -> Result<()> {
        let addresses = vec![self.spare_ip(0); endpoints];
        send(client, "DELETE", Manager::Kubectl, &self.service(index)).await?;
        for slice in self.slices(index, "", &addresses) {
            send(client, "DELETE", Manager::Controller, &slice).await?;
        }
        Ok(())
    }
}

/// Hands out the numbers of Services and tells how far it got.
struct Progress {
    next: AtomicUsize,
    all: usize,
    start: Instant,
    /// Seconds after the start at which to tell next.
    tell: AtomicU64,
}

impl Progress {
    fn new(all: usize) -> Self {
        Self { next: AtomicUsize::new(0), all, start: Instant::now(), tell: AtomicU64::new(PROGRESS) }
    }

    fn next(&self) -> Option<usize> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let (seconds, tell) = (self.start.elapsed().as_secs(), self.tell.load(Ordering::Relaxed));
        if seconds >= tell
            && self.tell.compare_exchange(tell, seconds + PROGRESS, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            eprintln!("cluster: {index} of {} services in the API server after {seconds} s", self.all);
        }
        (index < self.all).then_some(index)
    }
}

fn offset(number: usize) -> u32 {
    u32::try_from(number).expect("Cluster::new limits the numbers")
}

fn labels(name: &str) -> Value {
    json!({
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/part-of": "shop",
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": "web-1.4.2",
    })
}

fn endpoint(namespace: &str, name: &str, ip: Ipv4Addr) -> Value {
    let number = u32::from(ip);
    let node = number as usize % NODES;
    json!({
        "addresses": [ip],
        "conditions": { "ready": true, "serving": true, "terminating": false },
        "nodeName": format!("node-{node:03}"),
        "zone": format!("zone-{}", node % 3),
        "targetRef": {
            "kind": "Pod", "namespace": namespace, "name": format!("{name}-7c5ddbdf54-{}", suffix(number as usize)),
            "uid": format!("{number:08x}-5e1f-4c3a-9d52-0242ac{:06x}", number & 0xff_ffff),
        },
    })
}

/// Five characters, as Kubernetes makes of `generateName`; here always the same ones for a number.
fn suffix(number: usize) -> String {
    let letters = b"bcdfghjklmnpqrstvwxz2456789";
    let mut rest = number as u64;
    (0..5)
        .map(|_| {
            let letter = letters[usize::try_from(rest % letters.len() as u64).expect("less than the letters")];
            rest /= letters.len() as u64;
            char::from(letter)
        })
        .collect()
}

#[derive(Deserialize)]
struct Created {
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    uid: String,
}

/// Creates an object as `manager` and returns its UID. A plain create, as controllers do it.
///
/// # Errors
/// The API server refuses it; the message has its reason.
pub async fn create(client: &Client, manager: Manager, object: &Value) -> Result<String> {
    let answer = send(client, "POST", manager, object).await?;
    Ok(serde_json::from_str::<Created>(&answer)?.metadata.uid)
}

/// One request about an object. The answer's text.
async fn send(client: &Client, method: &str, manager: Manager, object: &Value) -> Result<String> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
    let collection = match text("/kind") {
        "Namespace" => "/api/v1/namespaces".to_string(),
        "Node" => "/api/v1/nodes".to_string(),
        "Service" => format!("/api/v1/namespaces/{namespace}/services"),
        "EndpointSlice" => format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"),
        kind => bail!("no path for the kind {kind:?}"),
    };
    let path = if method == "POST" { collection } else { format!("{collection}/{name}") };
    let body = if method == "DELETE" { Vec::new() } else { serde_json::to_vec(object)? };
    let query = if method == "DELETE" { String::new() } else { format!("?fieldManager={}", manager.name()) };
    let request = http::Request::builder()
        .method(method)
        .uri(format!("{path}{query}"))
        .header("content-type", "application/json")
        .header("user-agent", format!("{}/v{KUBERNETES_VERSION}", manager.name()))
        .body(body)?;
    client.request_text(request).await.with_context(|| format!("{method} {path} {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::User;
    use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};

    #[test]
    fn addresses_of_a_cluster_are_all_different() {
        let cluster = Cluster::new(300, 250).unwrap();
        let mut all: Vec<Ipv4Addr> = (0..300).flat_map(|index| cluster.addresses(index)).collect();
        all.extend((0..300).map(|index| cluster.service_ip(index)));
        all.extend((0..10).map(|number| cluster.spare_ip(number)));
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!((all.len(), count), (count, 300 * 251 + 10));
        assert_eq!(cluster.slices(7, "u", &cluster.addresses(7)).len(), 3, "100, 100 and 50 endpoints");
        assert!(
            Cluster::new(30_000, 10_000).is_err() && Cluster::new(70_000, 1).is_err() && Cluster::new(0, 1).is_err()
        );
    }

    #[test]
    fn a_loaded_cluster_is_in_the_api_server_as_controllers_would_have_written_it() {
        if let Some(why) = crate::netns::missing().or_else(crate::envtest::missing) {
            println!("SKIP {why}");
            return;
        }
        let api = ApiServer::start(&crate::envtest::binaries().unwrap()).unwrap();
        let node = crate::netns::Netns::new("node").unwrap();
        api.link(&node).unwrap();
        let cluster = Cluster::new(50, 150).unwrap();
        cluster.load(&api).unwrap();
        // Through the link and with the rights of a proxy, as the measured programs read it.
        let kubeconfig = std::fs::read_to_string(api.linked_kubeconfig(User::Proxy).unwrap()).unwrap();
        let (services, slices) = node.run(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = crate::apiserver::client(&kubeconfig).await.unwrap();
                let list = async |group: &str, kind: &str| {
                    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
                    Api::<DynamicObject>::all_with(client.clone(), &resource)
                        .list(&ListParams::default())
                        .await
                        .unwrap()
                };
                (list("", "Service").await.items, list("discovery.k8s.io", "EndpointSlice").await.items)
            })
        });
        assert_eq!(services.len(), 51, "and default/kubernetes");
        let slices: Vec<_> =
            slices.into_iter().filter(|s| s.metadata.namespace.as_deref() != Some("default")).collect();
        assert_eq!(slices.len(), 100);
        let service = services.iter().find(|s| s.metadata.name.as_deref() == Some("service-00049")).unwrap();
        assert_eq!(service.data["spec"]["clusterIP"], json!(cluster.service_ip(49)));
        let own: Vec<_> = slices
            .iter()
            .filter(|s| s.metadata.owner_references.as_ref().unwrap()[0].uid == *service.metadata.uid.as_ref().unwrap())
            .collect();
        let mut endpoints: Vec<usize> = own.iter().map(|s| s.data["endpoints"].as_array().unwrap().len()).collect();
        endpoints.sort_unstable();
        assert_eq!(endpoints, [50, 100]);
        let managed = own[0].metadata.managed_fields.as_ref().unwrap();
        assert_eq!(managed[0].manager.as_deref(), Some("kube-controller-manager"));
    }
}
