//! Finds the API server.

use ::kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use ::kube::{Client, Config};
use std::path::PathBuf;

/// What the flags and the configuration file say about the API server (`clientConnection.kubeconfig`, `--kubeconfig`,
/// `--master`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiServer {
    /// A kubeconfig file; its current context is used.
    pub kubeconfig: Option<PathBuf>,
    /// URL that overrides the server of the kubeconfig; alone it is used without credentials.
    pub master: Option<String>,
}

/// No client can be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Neither a kubeconfig nor the credentials of a pod.
    #[error(
        "there is no API server to ask and no manifests to read: give --manifests DIR to serve manifests of a directory, or \
         --kubeconfig FILE, or run in a pod with a service account (in-cluster: {0})"
    )]
    Nothing(#[source] InClusterError),
    /// The kubeconfig file cannot be used.
    #[error("cannot use the kubeconfig {}: {source}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: KubeconfigError,
    },
    /// `--master` is not a URL.
    #[error("--master {url:?} is not a URL such as https://192.0.2.1:6443: {message}")]
    Master {
        /// As given.
        url: String,
        /// What is wrong with it.
        message: String,
    },
    /// Certificates or credentials cannot be used.
    #[error("cannot make a client of the API server: {0}")]
    Client(#[source] ::kube::Error),
}

/// Makes a client. Nothing is sent yet: a server that cannot be reached shows later, as an outage.
///
/// # Errors
/// If no server is configured, or the configuration cannot be used.
pub async fn connect(server: &ApiServer) -> Result<Client, ConnectError> {
    Client::try_from(config(server).await?).map_err(ConnectError::Client)
}

/// As client-go's `BuildConfigFromFlags`: the kubeconfig, with its server overridden by `master`; `master` alone; else the
/// credentials of the pod. `KUBECONFIG` and `~/.kube/config` are not read: a node agent does not act for whoever started it.
async fn config(server: &ApiServer) -> Result<Config, ConnectError> {
    let master = server.master.as_deref().filter(|url| !url.is_empty()).map(parse_url).transpose()?;
    match (server.kubeconfig.as_ref().filter(|path| !path.as_os_str().is_empty()), master) {
        (Some(path), master) => {
            let wrap = |source| ConnectError::Kubeconfig { path: path.clone(), source };
            let mut kubeconfig = Kubeconfig::read_from(path).map_err(wrap)?;
            if let Some(master) = &master {
                for cluster in kubeconfig.clusters.iter_mut().filter_map(|cluster| cluster.cluster.as_mut()) {
                    cluster.server = Some(master.to_string());
                }
            }
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(wrap)
        }
        (None, Some(master)) => Ok(Config::new(master)),
        (None, None) => Config::incluster().map_err(ConnectError::Nothing),
    }
}

/// A host and port without a scheme are plain HTTP, as for client-go.
fn parse_url(url: &str) -> Result<http::Uri, ConnectError> {
    let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let wrap = |message: String| ConnectError::Master { url: url.to_owned(), message };
    let uri: http::Uri = full.parse().map_err(|error: http::uri::InvalidUri| wrap(error.to_string()))?;
    if uri.host().is_none_or(str::is_empty) { Err(wrap("no host".to_owned())) } else { Ok(uri) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBECONFIG: &str = "\
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: 'https://192.0.2.1:6443', insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: secret}}]
";

    fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("kubeconfig");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[tokio::test]
    async fn the_kubeconfig_names_the_server_and_master_overrides_it() {
        let (_dir, path) = file(KUBECONFIG);
        for (master, expected) in [
            (None, "https://192.0.2.1:6443/"),
            (Some(""), "https://192.0.2.1:6443/"),
            (Some("https://192.0.2.2:443"), "https://192.0.2.2:443/"),
            (Some("192.0.2.3:8080"), "http://192.0.2.3:8080/"),
        ] {
            let server = ApiServer { kubeconfig: Some(path.clone()), master: master.map(str::to_owned) };
            let config = config(&server).await.unwrap();
            assert_eq!(config.cluster_url.to_string(), expected);
            assert!(connect(&server).await.is_ok());
        }
        let alone =
            config(&ApiServer { kubeconfig: None, master: Some("http://192.0.2.4:8080".to_owned()) }).await.unwrap();
        assert_eq!(alone.cluster_url.to_string(), "http://192.0.2.4:8080/");
    }

    #[tokio::test]
    async fn without_anything_the_error_names_both_choices() {
        if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            println!("SKIP runs in a pod, where credentials exist");
            return;
        }
        let error = connect(&ApiServer::default()).await.err().unwrap().to_string();
        assert!(
            error.contains("--manifests DIR")
                && error.contains("--kubeconfig FILE")
                && error.contains("service account"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn errors_name_what_was_given() {
        let missing = ApiServer { kubeconfig: Some("/nonexistent/kubeconfig".into()), master: None };
        assert!(connect(&missing).await.err().unwrap().to_string().contains("/nonexistent/kubeconfig"));
        let (_dir, path) = file("a: [");
        let broken = ApiServer { kubeconfig: Some(path.clone()), master: None };
        assert!(connect(&broken).await.err().unwrap().to_string().contains(&path.display().to_string()));
        let bad = ApiServer { kubeconfig: None, master: Some("http://".to_owned()) };
        assert!(connect(&bad).await.err().unwrap().to_string().contains("--master"));
    }
}
