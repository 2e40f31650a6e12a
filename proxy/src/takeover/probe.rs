//! Asks kube-proxy's health and metrics ports whether a kube-proxy answers there.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// `metricsBindAddress`'s default port; `GET /proxyMode` answers with the mode.
pub const METRICS_PORT: u16 = 10_249;
/// `healthzBindAddress`'s default port; `GET /healthz` answers with times in JSON.
pub const HEALTHZ_PORT: u16 = 10_256;
/// How long one port may take for everything.
const TIMEOUT: Duration = Duration::from_secs(1);
/// An answer longer than this is not kube-proxy's.
const LONGEST: u64 = 8 << 10;
/// Tandem serves the same paths with the same bodies. Its listeners must say `Server: tandem` (or `tandem/VERSION`), so that
/// another Tandem, such as the one that this one replaces, is not taken for kube-proxy.
pub const SERVER: &str = "tandem";

/// A kube-proxy answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Where.
    pub address: SocketAddr,
    /// What it said, in words.
    pub what: String,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.what)
    }
}

/// Asks both ports on both loopback addresses, in the network namespace of the calling thread (so of the runtime's threads).
/// `ours` are ports that this process serves itself; they are left out. Takes at most a second.
pub async fn probe(ours: &[u16]) -> Option<Answer> {
    let requests = [(METRICS_PORT, "/proxyMode"), (HEALTHZ_PORT, "/healthz")];
    let addresses = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let targets = requests.iter().filter(|(port, _)| !ours.contains(port));
    let asked = targets.flat_map(|(port, path)| addresses.map(|ip| ask(SocketAddr::new(ip, *port), path)));
    futures::future::join_all(asked).await.into_iter().flatten().next()
}

async fn ask(address: SocketAddr, path: &str) -> Option<Answer> {
    let response = tokio::time::timeout(TIMEOUT, get(address, path)).await.ok()?.ok()?;
    Some(Answer { address, what: recognise(path, &response)? })
}

/// HTTP/1.0, so the answer ends with the connection and is not chunked.
async fn get(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nUser-Agent: tandem\r\n\r\n").as_bytes())
        .await?;
    let mut response = String::new();
    stream.take(LONGEST).read_to_string(&mut response).await?;
    Ok(response)
}

/// What a response says if it is kube-proxy's.
fn recognise(path: &str, response: &str) -> Option<String> {
    let (head, body) = response.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status = lines.next()?.split(' ').nth(1)?;
    let header = |line: &str| {
        line.split_once(':').map(|(name, value)| (name.trim().to_lowercase(), value.trim().to_lowercase()))
    };
    if lines.filter_map(header).any(|(name, value)| name == "server" && value.split('/').next() == Some(SERVER)) {
        return None;
    }
    let body = body.trim();
    match path {
        "/proxyMode" => {
            (status == "200" && ["iptables", "ipvs", "nftables"].contains(&body)).then(|| format!("mode {body}"))
        }
        _ => {
            // 503 = not healthy, and running all the same.
            let json: serde_json::Value = serde_json::from_str(body).ok()?;
            let known = ["200", "503"].contains(&status)
                && json.get("lastUpdated").is_some()
                && json.get("currentTime").is_some();
            known.then(|| "health check".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netns::NetNs;
    use crate::sys::netns::tests::for_test;
    use std::io::{Read, Write};
    use std::time::Instant;

    const HEALTHY: &str = r#"{"lastUpdated": "2026-01-01 00:00:00 +0000 UTC","currentTime": "2026-01-01 00:00:01 +0000 UTC", "nodeEligible": true}"#;

    fn response(status: &str, headers: &str, body: &str) -> String {
        format!("HTTP/1.0 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
    }

    #[test]
    fn answers_of_kube_proxy_are_told_from_others() {
        let ok = |body| response("200 OK", "Content-Type: text/plain; charset=utf-8\r\n", body);
        for mode in ["iptables", "ipvs", "nftables"] {
            assert_eq!(recognise("/proxyMode", &ok(mode)), Some(format!("mode {mode}")));
        }
        let healthz = recognise("/healthz", &ok(HEALTHY));
        assert_eq!(healthz.as_deref(), Some("health check"));
        assert_eq!(recognise("/healthz", &response("503 Service Unavailable", "", HEALTHY)), healthz);
        for (path, other) in [
            ("/proxyMode", ok("<html>iptables</html>")),
            ("/proxyMode", response("404 Not Found", "", "iptables")),
            ("/proxyMode", response("200 OK", "Server: tandem/0.1.0\r\n", "nftables")),
            ("/healthz", response("200 OK", "server: Tandem\r\n", HEALTHY)),
            ("/healthz", ok("ok")),
            ("/healthz", ok(r#"{"status": "up"}"#)),
            ("/healthz", response("500 Oops", "", HEALTHY)),
            ("/healthz", String::new()),
        ] {
            assert_eq!(recognise(path, &other), None, "{path} {other}");
        }
    }

    /// Serves `response` to everybody at `port` inside `netns`, until the test process ends.
    fn serve(netns: &NetNs, address: &str, response: Option<String>) {
        let listener = netns.run(|| std::net::TcpListener::bind(address)).unwrap().unwrap();
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                if let Some(response) = &response {
                    let _ = stream.read(&mut [0; 1024]);
                    let _ = stream.write_all(response.as_bytes());
                } else {
                    held.push(stream); // never answers
                }
            }
        });
    }

    fn probe_in(netns: &NetNs, ours: &[u16]) -> Option<Answer> {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        netns.run(|| runtime().block_on(probe(ours))).unwrap()
    }

    #[test]
    fn it_is_found_here_and_not_in_another_namespace() {
        let (Some(here), Some(there)) = (for_test(), for_test()) else { return };
        serve(&there, "0.0.0.0:10249", Some(response("200 OK", "", "nftables")));
        assert_eq!(probe_in(&here, &[]), None);
        let found = probe_in(&there, &[]).unwrap();
        assert_eq!(found.to_string(), "127.0.0.1:10249 (mode nftables)");
        assert_eq!(probe_in(&there, &[METRICS_PORT]), None, "our own port is left out");
        serve(&here, "[::1]:10256", Some(response("200 OK", "", HEALTHY)));
        assert_eq!(probe_in(&here, &[]).unwrap().to_string(), "[::1]:10256 (health check)");
    }

    #[test]
    fn a_port_that_never_answers_costs_a_second() {
        let Some(netns) = for_test() else { return };
        serve(&netns, "127.0.0.1:10249", None);
        let start = Instant::now();
        assert_eq!(probe_in(&netns, &[]), None);
        let taken = start.elapsed();
        assert!(taken >= Duration::from_millis(900) && taken < Duration::from_secs(5), "{taken:?}");
    }
}
