//! Lenient parsing of addresses and networks, as kube-proxy reads them.
//!
//! kube-proxy v1.37 parses with `k8s.io/utils/net` `ParseIPSloppy` and `ParseCIDRSloppy`: numbers of an IPv4 address may have
//! leading zeros, which are read as decimal. Everything is written back in canonical form.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Parses an address; blanks around it are ignored, IPv4 numbers may have leading zeros, and an IPv4-mapped IPv6 address is the
/// IPv4 address in it. `None` if it is not an address.
#[must_use]
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    if text.contains(':') {
        let address: Ipv6Addr = match text.parse() {
            Ok(address) => address,
            // The IPv4 tail of a mixed notation may have leading zeros too.
            Err(_) => {
                let (head, tail) = text.rsplit_once(':')?;
                format!("{head}:{}", parse_v4(tail)?).parse().ok()?
            }
        };
        return Some(address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4));
    }
    parse_v4(text).map(IpAddr::V4)
}

/// Whether `text` is an address only by leniency: it has a number with leading zeros, which other programs read as octal.
#[must_use]
pub fn is_sloppy_ip(text: &str) -> bool {
    text.trim().parse::<IpAddr>().is_err() && parse_ip(text).is_some()
}

/// Parses `ADDRESS/LENGTH` with the same leniency and reduces it to its network. `None` if it is not one.
#[must_use]
pub fn parse_cidr(text: &str) -> Option<IpNet> {
    let (address, length) = text.trim().split_once('/')?;
    if length.is_empty() || length.len() > 3 || !length.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let length: u8 = length.parse().ok()?;
    let net = if address.contains(':') {
        IpNet::V6(Ipv6Net::new(address.parse().ok()?, length).ok()?)
    } else {
        IpNet::V4(Ipv4Net::new(parse_v4(address)?, length).ok()?)
    };
    Some(net.trunc())
}

/// Why traffic cannot be sent to `address` as an endpoint or an external IP: the check of the API server
/// (`ValidateEndpointIP`), with all of multicast refused. `None` if it is fine.
#[must_use]
pub fn unusable(address: IpAddr) -> Option<&'static str> {
    let (unspecified, loopback, link_local, multicast) = match address {
        IpAddr::V4(a) => (a.is_unspecified(), a.is_loopback(), a.is_link_local(), a.is_multicast() || a.is_broadcast()),
        IpAddr::V6(a) => (a.is_unspecified(), a.is_loopback(), a.is_unicast_link_local(), a.is_multicast()),
    };
    if unspecified {
        Some("must not be the unspecified address")
    } else if loopback {
        Some("must not be a loopback address")
    } else if link_local {
        Some("must not be a link-local address")
    } else if multicast {
        Some("must not be a multicast or broadcast address")
    } else {
        None
    }
}

fn parse_v4(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0_u8; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let part = parts.next()?;
        if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let digits = part.trim_start_matches('0');
        *octet = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    }
    parts.next().is_none().then(|| Ipv4Addr::from(octets))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_leniently_and_written_canonically() {
        for (text, expected) in [
            ("172.30.0.041", Some("172.30.0.41")),
            (" 10.0.0.1 ", Some("10.0.0.1")),
            ("010.000.00.09", Some("10.0.0.9")),
            ("2001:DB8:0::1", Some("2001:db8::1")),
            ("::ffff:10.1.2.3", Some("10.1.2.3")),
            ("::ffff:10.1.2.03", Some("10.1.2.3")),
            ("10.244.1.300", None),
            ("10.1.2", None),
            ("10.1.2.3.4", None),
            ("10.1.2.+3", None),
            ("", None),
            ("fe80::1%eth0", None),
        ] {
            assert_eq!(parse_ip(text).map(|ip| ip.to_string()).as_deref(), expected, "{text:?}");
        }
        assert!(is_sloppy_ip("10.0.0.01"));
        assert!(!is_sloppy_ip("10.0.0.1"));
        assert!(!is_sloppy_ip("10.0.0.x"));
    }

    #[test]
    fn networks_are_reduced() {
        for (text, expected) in [
            (" 10.1.2.0/28", Some("10.1.2.0/28")),
            ("10.1.2.3/28", Some("10.1.2.0/28")),
            ("010.1.2.3/8", Some("10.0.0.0/8")),
            ("2001:db8::1/32", Some("2001:db8::/32")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("10.1.2.3", None),
            ("10.1.2.3/33", None),
            ("10.1.2.3/", None),
            ("10.1.2.3/+8", None),
            ("nonsense/8", None),
        ] {
            assert_eq!(parse_cidr(text).map(|net| net.to_string()).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn special_addresses_are_unusable_as_endpoints() {
        for text in
            ["0.0.0.0", "127.0.0.1", "169.254.1.1", "224.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "ff02::1"]
        {
            assert!(unusable(text.parse().unwrap()).is_some(), "{text}");
        }
        for text in ["10.0.0.1", "2001:db8::1", "fd00::1"] {
            assert_eq!(unusable(text.parse().unwrap()), None, "{text}");
        }
    }
}
