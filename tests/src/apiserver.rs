//! The real kube-apiserver with its etcd, in a namespace of their own, and a client that applies objects.

use crate::envtest::Binaries;
use crate::netns::Netns;
use crate::process::{Process, eventually};
use crate::relay::Relay;
use anyhow::{Context, Result, bail};
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Service networks of the API server, as in the scenarios.
pub const SERVICE_CIDRS: &str = "172.30.0.0/16,fd00:10:96::/112";

const SECURE: &str = "127.0.0.1:6443";
/// Address of the API server for nodes that [`ApiServer::link`] joins with it.
const LINKED: &str = "192.0.2.1:6443";
const ADMIN_TOKEN: &str = "test-admin";
const PROXY_TOKEN: &str = "test-kube-proxy";

/// Who a kubeconfig speaks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// Group system:masters.
    Admin,
    /// `system:kube-proxy`, that has the ClusterRole `system:node-proxier` and nothing else.
    Proxy,
}

/// The administrator's access to the API server from inside its namespace: no relay is in the way.
#[derive(Clone, Debug)]
pub struct Access {
    namespace: PathBuf,
    kubeconfig: String,
}

impl Access {
    /// Runs `f` with a client on a thread and a runtime of its own in the server's namespace.
    ///
    /// # Errors
    /// Those of `f`, and that there is no runtime.
    ///
    /// # Panics
    /// If `f` does.
    pub fn run<T, F>(&self, f: impl FnOnce(Client) -> F + Send) -> Result<T>
    where
        T: Send,
        F: Future<Output = Result<T>>,
    {
        let work = || {
            crate::netns::enter(&self.namespace);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async { f(client(&self.kubeconfig).await?).await })
        };
        std::thread::scope(|scope| match scope.spawn(work).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

/// A running control plane; ends with its value.
pub struct ApiServer {
    ns: Netns,
    dir: tempfile::TempDir,
    binaries: Binaries,
    etcd: Option<Process>,
    apiserver: Option<Process>,
    /// For `client`, which is outside the namespace.
    _relay: Relay,
    runtime: tokio::runtime::Runtime,
    client: Client,
    namespaces: std::cell::RefCell<BTreeSet<String>>,
    /// Number of the next link.
    links: std::cell::Cell<u8>,
}

impl ApiServer {
    /// Starts etcd and kube-apiserver and waits until it is ready (about two seconds).
    ///
    /// # Errors
    /// A process does not start or does not become ready; the message has its last log lines.
    pub fn start(binaries: &Binaries) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix(&directory_prefix()).tempdir()?;
        write_credentials(dir.path())?;
        let ns = Netns::new("api")?;
        let relay = Relay::start(None, "127.0.0.1:0".parse()?, &ns.path(), SECURE.parse()?)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let config = kubeconfig_text(dir.path(), relay.address(), User::Admin)?;
        let client = runtime.block_on(client(&config))?;
        let mut server = Self {
            ns,
            dir,
            binaries: binaries.clone(),
            etcd: None,
            apiserver: None,
            _relay: relay,
            runtime,
            client,
            namespaces: std::cell::RefCell::new(["default".to_string()].into()),
            links: std::cell::Cell::new(1),
        };
        server.start_etcd()?;
        server.start_apiserver()?;
        Ok(server)
    }

    fn start_etcd(&mut self) -> Result<()> {
        let mut command = self.ns.command(&self.binaries.etcd);
        command.arg("--data-dir").arg(self.dir.path().join("etcd")).args([
            "--unsafe-no-fsync",
            "--log-level=error",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        ]);
        self.etcd = Some(Process::start("etcd", command, &self.dir.path().join("etcd.log"))?);
        Ok(())
    }

    /// Starts kube-apiserver (again) on the kept data.
    ///
    /// # Errors
    /// It does not become ready within a minute.
    pub fn start_apiserver(&mut self) -> Result<()> {
        let dir = self.dir.path();
        let file = |name: &str| dir.join(name).display().to_string();
        let mut command = self.ns.command(&self.binaries.kube_apiserver);
        command.args([
            "--etcd-servers=http://127.0.0.1:2379".to_string(),
            "--bind-address=0.0.0.0".into(),
            "--secure-port=6443".into(),
            "--advertise-address=192.0.2.1".into(),
            "--endpoint-reconciler-type=none".into(),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--service-cluster-ip-range={SERVICE_CIDRS}"),
            // The rows of kube-proxy's own tests use node ports from 3000 on.
            "--service-node-port-range=3000-32767".into(),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            format!("--service-account-key-file={}", file("sa.pub")),
            format!("--service-account-signing-key-file={}", file("sa.key")),
            format!("--token-auth-file={}", file("tokens.csv")),
            "--authorization-mode=RBAC".into(),
            "--profiling=false".into(),
            "--enable-priority-and-fairness=false".into(),
            "--disable-admission-plugins=ServiceAccount".into(),
            "--shutdown-delay-duration=0s".into(),
        ]);
        self.apiserver = Some(Process::start("kube-apiserver", command, &self.dir.path().join("kube-apiserver.log"))?);
        let ready = eventually("kube-apiserver is ready", Duration::from_secs(60), || {
            let apiserver = self.apiserver.as_mut().expect("started above");
            if !apiserver.running() {
                return Some(Err(anyhow::anyhow!("kube-apiserver ended: {}", apiserver.log_tail())));
            }
            let client = self.client.clone();
            let ready = self.runtime.block_on(async {
                let request = http::Request::get("/readyz").body(Vec::new()).ok()?;
                tokio::time::timeout(Duration::from_secs(2), client.request_text(request)).await.ok()?.ok()
            });
            // RBAC's default roles and the namespace come with post-start hooks, which /readyz waits for.
            (ready.as_deref() == Some("ok")).then_some(Ok(()))
        });
        match ready {
            Ok(result) => result,
            Err(e) => {
                let log = |p: &Option<Process>| p.as_ref().map(Process::log_tail).unwrap_or_default();
                bail!("{e:#}\n{}\n{}", log(&self.apiserver), log(&self.etcd))
            }
        }
    }

    /// Ends kube-apiserver; etcd and its data stay.
    pub fn stop_apiserver(&mut self) {
        if let Some(mut apiserver) = self.apiserver.take() {
            apiserver.kill();
        }
    }

    /// Makes the API server reachable at 127.0.0.1:6443 in the namespace `ns` while the relay lives.
    ///
    /// # Errors
    /// The port is taken there.
    pub fn reach_from(&self, ns: &Netns) -> Result<Relay> {
        Relay::start(Some(&ns.path()), SECURE.parse()?, &self.ns.path(), SECURE.parse()?)
    }

    /// Joins the namespace `ns` with the server's by a link of their own (device `api` there), without a relay in between: for
    /// measurements. The link goes with `ns`. Use [`ApiServer::linked_kubeconfig`] there.
    ///
    /// # Errors
    /// `ns` has such a link already.
    pub fn link(&self, ns: &Netns) -> Result<()> {
        let n = self.links.get();
        self.links.set(n.checked_add(1).context("too many links")?);
        let node = format!("198.18.0.{n}");
        let server = LINKED.parse::<SocketAddr>()?.ip();
        self.ns.ip(&format!("link add link{n} type veth peer name api netns {}\nlink set link{n} up", ns.name()))?;
        ns.ip(&format!("addr add {node}/32 dev api\nlink set api up\nroute add {server} dev api src {node}"))?;
        self.ns.ip(&format!("addr replace {server}/32 dev lo\nroute add {node} dev link{n} src {server}"))
    }

    /// Writes a kubeconfig for use where [`ApiServer::reach_from`] made the server reachable.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn kubeconfig(&self, user: User) -> Result<PathBuf> {
        self.write_kubeconfig("", SECURE, user)
    }

    /// Writes a kubeconfig for use where [`ApiServer::link`] made the server reachable.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn linked_kubeconfig(&self, user: User) -> Result<PathBuf> {
        self.write_kubeconfig("linked-", LINKED, user)
    }

    fn write_kubeconfig(&self, prefix: &str, address: &str, user: User) -> Result<PathBuf> {
        let path = self.dir.path().join(format!("{prefix}{user:?}.kubeconfig").to_lowercase());
        std::fs::write(&path, kubeconfig_text(self.dir.path(), address.parse()?, user)?)?;
        Ok(path)
    }

    /// The administrator's access for threads of their own.
    ///
    /// # Errors
    /// None that the test's own credentials can cause.
    pub fn access(&self) -> Result<Access> {
        let kubeconfig = kubeconfig_text(self.dir.path(), SECURE.parse()?, User::Admin)?;
        Ok(Access { namespace: self.ns.path(), kubeconfig })
    }

    /// Applies objects in order (server-side apply), with their status; makes missing namespaces.
    ///
    /// # Errors
    /// The API server refuses one; the message has its reason.
    pub fn apply(&self, objects: &[Value]) -> Result<()> {
        for object in objects {
            self.apply_one(object).with_context(|| describe(object))?;
        }
        Ok(())
    }

    fn apply_one(&self, object: &Value) -> Result<()> {
        let kind = text(object, "/kind").context("no kind")?;
        let name = text(object, "/metadata/name").context("no metadata.name")?;
        let api = self.api(kind, text(object, "/metadata/namespace"))?;
        let params = PatchParams::apply("tandem-tests").force();
        self.runtime.block_on(async {
            let mut spec = object.clone();
            if let Some(map) = spec.as_object_mut() {
                map.remove("status");
            }
            api.patch(name, &params, &Patch::Apply(&spec)).await?;
            if let Some(status) = object.get("status") {
                // A merge: server-side apply refuses two addresses of one type in a Node.
                api.patch_status(name, &PatchParams::default(), &Patch::Merge(&json!({ "status": status }))).await?;
            }
            anyhow::Ok(())
        })
    }

    /// Deletes one object; that it is gone already is no error.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn delete(&self, kind: &str, namespace: Option<&str>, name: &str) -> Result<()> {
        let api = self.api(kind, namespace)?;
        match self.runtime.block_on(api.delete(name, &DeleteParams::default())) {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(e) => Err(e).with_context(|| format!("delete {kind} {name}")),
        }
    }

    /// Deletes every Service (but `kubernetes`), EndpointSlice and Node: a clean cluster for the next scenario.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn clear(&self) -> Result<()> {
        for kind in ["Service", "EndpointSlice", "Node"] {
            let resource = resource(kind)?;
            let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
            let list = self.runtime.block_on(api.list(&ListParams::default()))?;
            for object in list.items {
                let (name, namespace) = (object.metadata.name.unwrap_or_default(), object.metadata.namespace);
                if (kind, name.as_str()) != ("Service", "kubernetes") {
                    self.delete(kind, namespace.as_deref(), &name)?;
                }
            }
        }
        Ok(())
    }

    fn api(&self, kind: &str, namespace: Option<&str>) -> Result<Api<DynamicObject>> {
        let resource = resource(kind)?;
        if matches!(kind, "Node" | "ServiceCIDR" | "Namespace") {
            return Ok(Api::all_with(self.client.clone(), &resource));
        }
        let namespace = namespace.unwrap_or("default");
        if self.namespaces.borrow_mut().insert(namespace.to_string()) {
            let all: Api<DynamicObject> = Api::all_with(self.client.clone(), &self::resource("Namespace")?);
            let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
            self.runtime.block_on(all.patch(
                namespace,
                &PatchParams::apply("tandem-tests").force(),
                &Patch::Apply(&object),
            ))?;
        }
        Ok(Api::namespaced_with(self.client.clone(), namespace, &resource))
    }

    /// Last log lines of the server.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.apiserver.as_ref().map(Process::log_tail).unwrap_or_default()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop_apiserver();
        self.etcd.take();
    }
}

fn directory_prefix() -> String {
    format!("tandem-api-{}-", std::process::id())
}

/// Removes the data of the API servers of this process, for one that is told to end: destructors do not run then.
pub fn remove_own_data() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&directory_prefix()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// A client of who `kubeconfig` (text) speaks for. Call it inside a runtime.
///
/// # Errors
/// The text is not a kubeconfig.
pub async fn client(kubeconfig: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig)?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn resource(kind: &str) -> Result<ApiResource> {
    let (group, version) = match kind {
        "Service" | "Node" | "Namespace" | "Event" => ("", "v1"),
        "EndpointSlice" => ("discovery.k8s.io", "v1"),
        "ServiceCIDR" => ("networking.k8s.io", "v1"),
        _ => bail!("the tests know no kind {kind}"),
    };
    Ok(ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind)))
}

fn text<'a>(object: &'a Value, pointer: &str) -> Option<&'a str> {
    object.pointer(pointer).and_then(Value::as_str)
}

fn describe(object: &Value) -> String {
    let part = |p| text(object, p).unwrap_or("?");
    format!("{} {}/{}", part("/kind"), text(object, "/metadata/namespace").unwrap_or("default"), part("/metadata/name"))
}

fn write_credentials(dir: &Path) -> Result<()> {
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::new(Vec::new())?;
    ca.distinguished_name.push(rcgen::DnType::CommonName, "test-ca");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_cert = ca.self_signed(&ca_key)?;
    let issuer = Issuer::new(ca, ca_key);
    let server_key = KeyPair::generate()?;
    let server =
        CertificateParams::new(vec!["127.0.0.1".to_string(), "localhost".to_string(), "192.0.2.1".to_string()])?;
    let server_cert = server.signed_by(&server_key, &issuer)?;
    let account_key = KeyPair::generate()?;
    std::fs::write(dir.join("ca.crt"), ca_cert.pem())?;
    std::fs::write(dir.join("server.crt"), server_cert.pem())?;
    std::fs::write(dir.join("server.key"), server_key.serialize_pem())?;
    std::fs::write(dir.join("sa.key"), account_key.serialize_pem())?;
    std::fs::write(dir.join("sa.pub"), account_key.public_key_pem())?;
    std::fs::write(
        dir.join("tokens.csv"),
        format!("{ADMIN_TOKEN},admin,admin,\"system:masters\"\n{PROXY_TOKEN},system:kube-proxy,proxy,\n"),
    )?;
    Ok(())
}

fn kubeconfig_text(dir: &Path, server: SocketAddr, user: User) -> Result<String> {
    let token = match user {
        User::Admin => ADMIN_TOKEN,
        User::Proxy => PROXY_TOKEN,
    };
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "test", "cluster": { "server": format!("https://{server}"), "certificate-authority": dir.join("ca.crt") } }],
        "users": [{ "name": "test", "user": { "token": token } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        "current-context": "test",
    });
    Ok(serde_json::to_string_pretty(&config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_api_server_takes_services_with_their_status() {
        if let Some(why) = crate::netns::missing().or_else(crate::envtest::missing) {
            println!("SKIP {why}");
            return;
        }
        let mut api = ApiServer::start(&crate::envtest::binaries().unwrap()).unwrap();
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "ns1", "name": "web" },
            "spec": { "type": "LoadBalancer", "clusterIP": "172.30.0.41", "ports": [{ "port": 80, "nodePort": 3001 }] },
            "status": { "loadBalancer": { "ingress": [{ "ip": "1.2.3.4" }] } },
        });
        api.apply(std::slice::from_ref(&service)).unwrap();
        let services = |api: &ApiServer| {
            let all: Api<DynamicObject> =
                Api::namespaced_with(api.client.clone(), "ns1", &resource("Service").unwrap());
            api.runtime.block_on(all.list(&ListParams::default())).unwrap().items
        };
        assert_eq!(services(&api)[0].data.pointer("/status/loadBalancer/ingress/0/ip"), Some(&json!("1.2.3.4")));
        api.stop_apiserver();
        assert!(api.apply(&[service]).is_err(), "a stopped server does not answer");
        api.start_apiserver().unwrap();
        assert_eq!(services(&api).len(), 1, "its data is kept");
        api.clear().unwrap();
        assert!(services(&api).is_empty());
    }
}
