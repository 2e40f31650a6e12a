//! The real kube-apiserver of `demo --kubernetes`, on the node's loopback address, and the objects that it holds.

use super::topology::inside;
use crate::command::{self, cargo, program};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where the programs are.
pub struct Binaries {
    etcd: PathBuf,
    kube_apiserver: PathBuf,
}

/// Builds the programs if they are not there (minutes, the first time), by the crate that the tests build them with.
///
/// # Errors
/// If the build fails.
pub fn binaries(root: &Path) -> Result<Binaries> {
    let mut command = cargo();
    command
        .args(["run", "--quiet", "--locked", "--package", "proxy-tests", "--bin", "envtest-build"])
        .current_dir(root);
    println!("$ {}", command::shown(&command));
    // Progress goes to standard error, the paths to standard output.
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
    if !output.status.success() {
        bail!("kube-apiserver and etcd could not be built; is Go there?");
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let find = |name: &str| {
        let path = text.lines().map(PathBuf::from).find(|path| path.file_name().is_some_and(|n| n == name));
        path.with_context(|| format!("the build did not say where {name} is"))
    };
    Ok(Binaries { etcd: find("etcd")?, kube_apiserver: find("kube-apiserver")? })
}

const SERVER: &str = "https://127.0.0.1:6443";

/// A running API server.
pub struct Api {
    directory: PathBuf,
    token: String,
}

impl Api {
    /// Starts etcd and kube-apiserver and waits until they are ready.
    ///
    /// # Errors
    /// If they do not start, or are not ready within a minute.
    pub fn start(binaries: &Binaries, directory: &Path) -> Result<Self> {
        let at = |name: &str| directory.join(name).display().to_string();
        let token =
            std::fs::read_to_string("/proc/sys/kernel/random/uuid").context("the kernel gives no random UUID")?;
        let api = Self { directory: directory.into(), token: token.trim().to_owned() };
        std::fs::write(at("tokens.csv"), format!("{},admin,admin,system:masters\n", api.token))?;
        command::output(&mut program(
            "openssl",
            ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &at("sa.key")],
        ))?;

        let mut etcd = inside("node", &binaries.etcd);
        etcd.args([
            "--unsafe-no-fsync",
            "--log-level=error",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            &format!("--data-dir={}", at("etcd")),
        ]);
        super::start(&mut etcd, "etcd.log")?;
        let mut apiserver = inside("node", &binaries.kube_apiserver);
        apiserver.args([
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=127.0.0.1",
            "--secure-port=6443",
            "--advertise-address=192.0.2.10",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            &format!("--service-account-key-file={}", at("sa.key")),
            &format!("--service-account-signing-key-file={}", at("sa.key")),
            &format!("--token-auth-file={}", at("tokens.csv")),
            // It makes its own certificate there.
            &format!("--cert-dir={}", at("certificates")),
        ]);
        let mut child = super::start(&mut apiserver, "kube-apiserver.log")?;
        api.write_kubeconfig()?;
        let begun = Instant::now();
        // The namespace comes a moment after the server is ready.
        while !api.request("GET", "/readyz", None).is_ok_and(|text| text == "ok")
            || api.request("GET", "/api/v1/namespaces/default", None).is_err()
        {
            if let Some(status) = child.try_wait()? {
                bail!("kube-apiserver ended ({status}); see {}", at("kube-apiserver.log"));
            }
            if begun.elapsed() > Duration::from_secs(60) {
                bail!("kube-apiserver was not ready within a minute; see {}", at("kube-apiserver.log"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        println!("kube-apiserver is ready after {:.1} s", begun.elapsed().as_secs_f64());
        Ok(api)
    }

    /// The file by which Tandem (and kubectl) finds the server.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    fn certificate(&self) -> PathBuf {
        self.directory.join("certificates/apiserver.crt")
    }

    fn write_kubeconfig(&self) -> Result<()> {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "demo",
            "clusters": [{ "name": "demo", "cluster": { "server": SERVER, "certificate-authority": self.certificate() } }],
            "users": [{ "name": "admin", "user": { "token": self.token } }],
            "contexts": [{ "name": "demo", "context": { "cluster": "demo", "user": "admin" } }],
        });
        std::fs::write(self.kubeconfig(), serde_json::to_string_pretty(&config)?).context("cannot write the kubeconfig")
    }

    /// Creates an object, with its status. The ServiceCIDR is there already: the server made it from its flag.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn create(&self, object: &Value) -> Result<()> {
        if object["kind"] == "ServiceCIDR" {
            return Ok(());
        }
        self.request("POST", &collection(object)?, Some(object))?;
        if let Some(status) = object.get("status") {
            self.request("PATCH", &format!("{}/status", path(object)?), Some(&json!({ "status": status })))?;
        }
        Ok(())
    }

    /// Gives a slice these endpoints.
    ///
    /// # Errors
    /// If the server refuses.
    pub fn replace(&self, slice: &Value) -> Result<()> {
        self.request("PATCH", &path(slice)?, Some(&json!({ "endpoints": slice["endpoints"] }))).map(drop)
    }

    fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<String> {
        let mut command: Command = inside("node", Path::new("curl"));
        command.args(["--silent", "--show-error", "--fail-with-body", "--max-time", "10", "--request", method]);
        command.arg("--cacert").arg(self.certificate());
        command.args(["--header", &format!("Authorization: Bearer {}", self.token)]);
        if let Some(body) = body {
            let form = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
            command.args(["--header", &format!("Content-Type: {form}"), "--data", &body.to_string()]);
        }
        command.arg(format!("{SERVER}{path}"));
        let output = command.stdin(Stdio::null()).output().context("curl cannot be run")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("{method} {path} failed: {} {text}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(text)
    }
}

/// The path under which objects of this kind are.
fn collection(object: &Value) -> Result<String> {
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
    match object["kind"].as_str() {
        Some("Node") => Ok("/api/v1/nodes".into()),
        Some("Service") => Ok(format!("/api/v1/namespaces/{namespace}/services")),
        Some("EndpointSlice") => Ok(format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices")),
        kind => bail!("the demo does not know where the API server keeps a {}", kind.unwrap_or("thing without a kind")),
    }
}

fn path(object: &Value) -> Result<String> {
    let name = object["metadata"]["name"].as_str().context("an object has a name")?;
    Ok(format!("{}/{name}", collection(object)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_has_its_place_in_the_api() {
        let examples = command::workspace_root().unwrap().join("deploy/examples");
        for (file, object) in super::super::manifests::read(&examples).unwrap() {
            if object["kind"] != "ServiceCIDR" {
                assert!(path(&object).is_ok(), "{} {object}", file.display());
            }
        }
        let slice = json!({"kind": "EndpointSlice", "metadata": {"name": "a", "namespace": "b"}});
        assert_eq!(path(&slice).unwrap(), "/apis/discovery.k8s.io/v1/namespaces/b/endpointslices/a");
    }
}
