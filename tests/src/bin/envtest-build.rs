//! Builds kube-apiserver, kube-proxy and etcd if they are missing, and prints where they are.

fn main() -> anyhow::Result<()> {
    let found = proxy_tests::envtest::binaries()?;
    for path in [found.etcd, found.kube_apiserver, found.kube_proxy] {
        println!("{}", path.display());
    }
    Ok(())
}
