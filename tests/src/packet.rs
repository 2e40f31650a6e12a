//! The few packets that no socket of this kernel makes: SCTP INIT chunks, ICMP echoes, and what ICMP errors quote.

use std::net::IpAddr;

/// CRC32c (Castagnoli), the checksum of SCTP (RFC 9260, appendix A).
#[must_use]
pub fn crc32c(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

/// An SCTP packet with one INIT chunk; `tag` is its initiate tag, by which it is found again behind a translation.
#[must_use]
pub fn sctp_init(source_port: u16, destination_port: u16, tag: u32) -> Vec<u8> {
    let mut p = Vec::with_capacity(32);
    p.extend(source_port.to_be_bytes());
    p.extend(destination_port.to_be_bytes());
    p.extend(0u32.to_be_bytes()); // verification tag: 0 with INIT
    p.extend(0u32.to_be_bytes()); // checksum, below
    p.extend([1, 0]); // INIT, no flags
    p.extend(20u16.to_be_bytes());
    p.extend(tag.to_be_bytes());
    p.extend(65_535u32.to_be_bytes()); // receiver window
    p.extend(1u16.to_be_bytes()); // outbound streams
    p.extend(1u16.to_be_bytes()); // inbound streams
    p.extend(1u32.to_be_bytes()); // initial TSN
    let crc = crc32c(&p);
    p[8..12].copy_from_slice(&crc.to_le_bytes());
    p
}

/// What an SCTP INIT says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SctpInit {
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Initiate tag.
    pub tag: u32,
    /// Whether the checksum is right.
    pub checksum_ok: bool,
}

/// Reads an SCTP packet (without its IP header) if its first chunk is an INIT.
#[must_use]
pub fn parse_sctp_init(p: &[u8]) -> Option<SctpInit> {
    if p.len() < 32 || p[12] != 1 {
        return None;
    }
    let mut copy = p.to_vec();
    copy[8..12].fill(0);
    Some(SctpInit {
        source_port: u16::from_be_bytes([p[0], p[1]]),
        destination_port: u16::from_be_bytes([p[2], p[3]]),
        tag: u32::from_be_bytes([p[16], p[17], p[18], p[19]]),
        checksum_ok: crc32c(&copy).to_le_bytes() == p[8..12],
    })
}

/// The payload of an IPv4 packet, with its protocol number, source and destination.
#[must_use]
pub fn parse_ipv4(p: &[u8]) -> Option<(u8, IpAddr, IpAddr, &[u8])> {
    if p.len() < 20 || p[0] >> 4 != 4 {
        return None;
    }
    let header = usize::from(p[0] & 15) * 4;
    let address = |at: usize| IpAddr::from([p[at], p[at + 1], p[at + 2], p[at + 3]]);
    Some((p[9], address(12), address(16), p.get(header..)?))
}

/// The payload of an IPv6 packet without extension headers.
#[must_use]
pub fn parse_ipv6(p: &[u8]) -> Option<(u8, IpAddr, IpAddr, &[u8])> {
    if p.len() < 40 || p[0] >> 4 != 6 {
        return None;
    }
    let address = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&p[at..at + 16]).expect("16 bytes"));
    Some((p[6], address(8), address(24), &p[40..]))
}

/// An ICMP (ICMPv6 if `v6`) echo request. The kernel fills in the checksum of ICMPv6.
#[must_use]
pub fn icmp_echo(v6: bool, id: u16, sequence: u16) -> Vec<u8> {
    let mut p = vec![if v6 { 128 } else { 8 }, 0, 0, 0];
    p.extend(id.to_be_bytes());
    p.extend(sequence.to_be_bytes());
    p.extend(b"tandem-echo");
    if !v6 {
        let sum = internet_checksum(&p);
        p[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    p
}

fn internet_checksum(data: &[u8]) -> u16 {
    let mut sum: u32 = 0;
    for pair in data.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded to 16 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_gives_the_check_value_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn an_init_is_read_back() {
        let packet = sctp_init(1000, 53, 0xdead_beef);
        let init = parse_sctp_init(&packet).unwrap();
        assert_eq!(init, SctpInit { source_port: 1000, destination_port: 53, tag: 0xdead_beef, checksum_ok: true });
    }

    #[test]
    fn an_echo_has_a_checksum_that_sums_to_zero() {
        assert_eq!(internet_checksum(&icmp_echo(false, 7, 1)), 0);
    }
}
