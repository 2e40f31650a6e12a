//! Names of the objects that a service port with ClientIP affinity has for itself: kube-proxy's scheme, so that its
//! affinity sets can be recognised and taken over.
//!
//! kube-proxy v1.37: `servicePortChainNameBase`, `servicePortEndpointChainNameBase` and `hashAndTruncate` of `pkg/proxy/nftables`.

use crate::model::{ObjectName, Protocol, ServicePortName};
use crate::nft::object::Name;
use data_encoding::BASE32;
use sha2::{Digest, Sha256};
use std::fmt;
use std::net::IpAddr;

/// What an object of a service port is for; its name begins with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// Chain: balances over the cluster list.
    Service,
    /// Chain: balances over the local list.
    Local,
    /// Chain: masquerades, then balances over the cluster list.
    External,
    /// Chain: remembers the client and translates to one endpoint.
    Endpoint,
    /// Set: clients that an endpoint remembers.
    Affinity,
}

/// `service-`, `local-`, `external-`, `endpoint-`, `affinity-`
impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Prefix::Service => "service-",
            Prefix::Local => "local-",
            Prefix::External => "external-",
            Prefix::Endpoint => "endpoint-",
            Prefix::Affinity => "affinity-",
        })
    }
}

/// Longest name without its prefix, in bytes; longer ones are cut (kube-proxy v1.37, `maxNameLength` less the prefix).
const LONGEST: usize = 240;
/// What replaces the end of a name that was cut.
const ELLIPSIS: &str = "...";

/// `HASH-BASE`, cut to the permitted length. The hash is over the whole base, so names that were cut stay distinct.
fn hashed(base: &str) -> String {
    let hash = BASE32.encode(&Sha256::digest(base.as_bytes()));
    let mut name = format!("{}-{base}", &hash[..8]);
    if name.len() > LONGEST {
        name.truncate(name.floor_char_boundary(LONGEST - ELLIPSIS.len()));
        name.push_str(ELLIPSIS);
    }
    name
}

/// `namespace/name/protocol/port-name`
fn service_base(service: &ObjectName, protocol: Protocol, port: &str) -> String {
    format!("{service}/{}/{port}", protocol.name())
}

/// The name of a service port without its prefix: `HASH-namespace/name/protocol/port-name`.
#[must_use]
pub fn service_port(name: &ServicePortName) -> String {
    hashed(&service_base(&name.service, name.protocol, &name.port))
}

/// The name of an endpoint of a service port without its prefix: `HASH-namespace/name/protocol/port-name__address/port`.
#[must_use]
pub fn endpoint(name: &ServicePortName, address: IpAddr, port: u16) -> String {
    let base = service_base(&name.service, name.protocol, &name.port);
    // nft takes no ':' in the name of an object.
    let address = address.to_string().replace(':', ".");
    hashed(&format!("{base}__{address}/{port}"))
}

/// A whole name.
#[must_use]
pub fn prefixed(prefix: Prefix, name: &str) -> Name {
    format!("{prefix}{name}").into()
}

/// Longest comment of a rule or element in bytes: with its final zero it fills `NFTNL_UDATA_COMMENT_MAXLEN` (libnftnl: 128).
pub const LONGEST_COMMENT: usize = 127;

/// `namespace/name:port`, cut to what the kernel's user data holds.
#[must_use]
pub fn comment(name: &ServicePortName) -> String {
    let mut comment = name.to_string();
    comment.truncate(comment.floor_char_boundary(LONGEST_COMMENT));
    comment
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(namespace: &str, name: &str, port: &str) -> ServicePortName {
        ServicePortName { service: ObjectName::new(namespace, name), port: port.into(), protocol: Protocol::Tcp }
    }

    #[test]
    fn service_port_names_are_those_of_kube_proxy() {
        for (namespace, name, port_name, hash) in [
            ("ns1", "svc1", "p80", "ULMVA6XW"),
            ("ns2", "svc2", "p80", "42NFTM6N"),
            ("ns3", "svc3", "p80", "4AT6LBPK"),
            ("ns4", "svc4", "p80", "LAUZTJTB"),
            ("ns5", "svc5", "p80", "HVFWP5L3"),
            ("ns2", "svc2", "p8080", "MHHHYRWA"),
            ("testing", "service", "http", "P4ZYZVCF"),
            ("testing", "service", "https", "LZBRENCP"),
            ("ns1", "svc1", "", "6KJ5P52A"),
            ("default", "kubernetes", "https", "2QRHZV4L"),
        ] {
            assert_eq!(
                service_port(&port(namespace, name, port_name)),
                format!("{hash}-{namespace}/{name}/tcp/{port_name}")
            );
        }
    }

    #[test]
    fn endpoint_names_are_those_of_kube_proxy() {
        let http = port("testing", "service", "http");
        let p80 = port("ns5", "svc5", "p80");
        for (name, address, expected) in [
            (&http, "10.180.0.1", "JO2XBXZR-testing/service/tcp/http__10.180.0.1/80"),
            (&http, "10.180.0.2", "5S6H3H22-testing/service/tcp/http__10.180.0.2/80"),
            (&p80, "10.180.0.3", "GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80"),
            (&p80, "fd00:10:180::3", "5HFFSBBM-ns5/svc5/tcp/p80__fd00.10.180..3/80"),
        ] {
            assert_eq!(endpoint(name, address.parse().unwrap(), 80), expected);
        }
        // An address that no canonical text shortens like this, but the hash is known.
        let base = "testing/service/tcp/http__fd80.abcd.12..a1b2.c3d4.e5f6.9999/80";
        assert_eq!(hashed(base), format!("U7E2ET36-{base}"));
    }

    #[test]
    fn a_long_name_is_cut_and_fits_the_kernel() {
        let long = port(&"n".repeat(100), &"s".repeat(200), "p");
        let name = prefixed(Prefix::Affinity, &service_port(&long));
        assert_eq!(name.len(), "affinity-".len() + 240);
        assert!(name.ends_with("nssss...") || name.ends_with("sss..."));
        let other = port(&"n".repeat(100), &"s".repeat(200), "q");
        assert_ne!(service_port(&long), service_port(&other));
    }

    #[test]
    fn a_name_is_cut_between_characters() {
        let long = port(&"ü".repeat(200), "s", "p");
        assert!(service_port(&long).len() <= 240);
        assert!(comment(&long).len() <= LONGEST_COMMENT);
    }
}
