//! The real Kubernetes binaries: found, or built from the Go module proxy by the modules in `tests/envtest`.

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The release that the modules pin.
pub const KUBERNETES_VERSION: &str = "1.37.2";

const KUBERNETES_MOD: &str = include_str!("../envtest/kubernetes/go.mod");
const KUBERNETES_SUM: &str = include_str!("../envtest/kubernetes/go.sum");
const ETCD_MOD: &str = include_str!("../envtest/etcd/go.mod");
const ETCD_SUM: &str = include_str!("../envtest/etcd/go.sum");

/// Where the binaries are.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// etcd
    pub etcd: PathBuf,
    /// kube-apiserver
    pub kube_apiserver: PathBuf,
    /// kube-proxy; absent from the usual KUBEBUILDER_ASSETS, then taken from the cache.
    pub kube_proxy: PathBuf,
}

/// (module folder, package, binary, linker flags)
fn recipe() -> [(&'static str, &'static str, &'static str, String); 3] {
    let version = "k8s.io/component-base/version";
    let mut parts = KUBERNETES_VERSION.split('.');
    let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let kubernetes = format!(
        "-s -w -X {version}.gitVersion=v{KUBERNETES_VERSION} -X {version}.gitMajor={major} -X {version}.gitMinor={minor} -X {version}.gitTreeState=clean"
    );
    [
        ("etcd", "go.etcd.io/etcd/server/v3", "etcd", "-s -w".to_string()),
        ("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver", "kube-apiserver", kubernetes.clone()),
        ("kubernetes", "k8s.io/kubernetes/cmd/kube-proxy", "kube-proxy", kubernetes),
    ]
}

/// The folder in which built binaries are kept: below `XDG_CACHE_HOME`, named by version and recipe.
///
/// # Errors
/// Neither `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache_dir() -> Result<PathBuf> {
    let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) if !home.is_empty() => PathBuf::from(home).join(".cache"),
        _ => bail!("neither XDG_CACHE_HOME nor HOME is set: no place for the Kubernetes binaries"),
    };
    let mut hash = Sha256::new();
    for text in [KUBERNETES_MOD, KUBERNETES_SUM, ETCD_MOD, ETCD_SUM] {
        hash.update(text);
    }
    for (_, _, _, flags) in recipe() {
        hash.update(flags);
    }
    let digest: String = hash.finalize().iter().take(6).map(|b| format!("{b:02x}")).collect();
    Ok(base.join("tandem").join(format!("envtest-{KUBERNETES_VERSION}-{digest}")))
}

/// Why the binaries are not there and cannot be built; `None` = they can be had.
#[must_use]
pub fn missing() -> Option<String> {
    if find().is_ok_and(|found| found.is_some()) || go().is_some() {
        return None;
    }
    Some("kube-apiserver, etcd and kube-proxy are not built, and there is no Go toolchain to build them".into())
}

/// Finds the binaries: `KUBEBUILDER_ASSETS`, then the cache. `None` = one is missing.
///
/// # Errors
/// `KUBEBUILDER_ASSETS` is set but names a folder without kube-apiserver or etcd.
pub fn find() -> Result<Option<Binaries>> {
    let cache = cache_dir()?;
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    if let Some(dir) = &assets {
        for name in ["etcd", "kube-apiserver"] {
            if !dir.join(name).is_file() {
                bail!("KUBEBUILDER_ASSETS={} has no {name}", dir.display());
            }
        }
    }
    let place = |name: &str| {
        let candidates = assets.iter().chain(std::iter::once(&cache));
        candidates.map(|dir| dir.join(name)).find(|path| path.is_file())
    };
    Ok(match (place("etcd"), place("kube-apiserver"), place("kube-proxy")) {
        (Some(etcd), Some(kube_apiserver), Some(kube_proxy)) => Some(Binaries { etcd, kube_apiserver, kube_proxy }),
        _ => None,
    })
}

/// Finds the binaries, or builds what is missing (several minutes the first time; progress goes to standard error).
///
/// # Errors
/// No Go toolchain, no module proxy, or a build error.
pub fn binaries() -> Result<Binaries> {
    if let Some(found) = find()? {
        return Ok(found);
    }
    let cache = cache_dir()?;
    std::fs::create_dir_all(&cache).with_context(|| cache.display().to_string())?;
    // Test processes that start together build once.
    let lock = File::create(cache.join(".lock"))?;
    lock.lock().context("lock of the cache")?;
    if find()?.is_none() {
        build(&cache)?;
    }
    find()?.context("built, but not found")
}

fn go() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    dirs.push("/usr/local/go/bin".into());
    dirs.into_iter().map(|dir| dir.join("go")).find(|go| go.is_file())
}

fn build(cache: &Path) -> Result<()> {
    let go = go().context("Go (https://go.dev/dl/) is needed to build kube-apiserver, kube-proxy and etcd")?;
    let modules = Path::new(env!("CARGO_MANIFEST_DIR")).join("envtest");
    for (module, package, binary, flags) in recipe() {
        let target = cache.join(binary);
        if target.is_file() {
            continue;
        }
        eprintln!(
            "envtest: building {binary} {} (minutes, once)",
            if module == "etcd" { "" } else { KUBERNETES_VERSION }
        );
        let start = std::time::Instant::now();
        let partial = cache.join(format!(".{binary}.partial"));
        let status = Command::new(&go)
            .current_dir(modules.join(module))
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-trimpath")
            .args(["build", "-ldflags", &flags, "-o"])
            .arg(&partial)
            .arg(package)
            .stdin(Stdio::null())
            .status()
            .with_context(|| go.display().to_string())?;
        if !status.success() {
            bail!("go build {package} in {}: {status}", modules.join(module).display());
        }
        std::fs::rename(&partial, &target)?;
        eprintln!("envtest: {binary} built in {:.0} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}
