//! `tandem lookup`: asks the oracle.

use super::output::{Format, table};
use crate::agent;
use crate::config::{Config, Flags};
use crate::model::{IpFamily, Outcome, Packet, Protocol, lookup};
use anyhow::{Context, ensure};
use serde::Serialize;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;

pub const EXAMPLES: &str = "\
Examples:
  tandem lookup --manifests DIR 203.0.113.7 10.96.0.10:53 --protocol udp --interface eth0
  tandem lookup --kubeconfig FILE node 10.96.0.1:443      a process of this node";

/// Who sends what where.
#[derive(clap::Args)]
pub struct Query {
    /// Source address, or the word node for a process of this node
    source: String,
    /// Destination as ADDRESS:PORT or [ADDRESS]:PORT; ADDRESS alone with --protocol icmp
    destination: String,
    /// tcp, udp, sctp, or icmp
    #[arg(long, default_value = "tcp", alias = "proto")]
    protocol: String,
    /// Interface by which the packet arrives; without it, a packet that is not from this node comes by an unnamed one
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_port: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    endpoints: Vec<EndpointAnswer>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct EndpointAnswer {
    address: String,
    local: bool,
    masquerade: bool,
}

pub fn run(query: &Query, output: Format, flags: &Flags) -> anyhow::Result<ExitCode> {
    super::output::start_logging(flags.v);
    let config = Config::load(flags, &agent::host_name())?;
    let protocol = match query.protocol.to_lowercase().as_str() {
        "tcp" => Some(Protocol::Tcp),
        "udp" => Some(Protocol::Udp),
        "sctp" => Some(Protocol::Sctp),
        "icmp" => None,
        other => anyhow::bail!("--protocol {other}: use tcp, udp, sctp or icmp"),
    };
    let (destination, port) = parse_destination(&query.destination, protocol.is_some())?;
    let picture = agent::first_picture(&config)?;
    let settings = picture.settings(&config, IpFamily::of(destination));
    let from_node = query.source == "node";
    let source: IpAddr = if from_node {
        settings
            .node_ip
            .or_else(|| settings.local_addresses.first().copied())
            .context("this node has no address of the destination's family: give the source address")?
    } else {
        query
            .source
            .parse()
            .with_context(|| format!("source {:?} is no address and not the word node", query.source))?
    };
    ensure!(
        IpFamily::of(source) == IpFamily::of(destination),
        "{source} and {destination} are of different families: give both as IPv4 or both as IPv6"
    );
    let interface = if from_node { None } else { Some(query.interface.as_deref().unwrap_or("")) };
    let packet = Packet { interface, source, destination, protocol, port };
    let answer = answer(lookup(&picture.table, &settings, &packet));
    output.print(&answer, text)?;
    Ok(ExitCode::SUCCESS)
}

fn parse_destination(text: &str, with_port: bool) -> anyhow::Result<(IpAddr, u16)> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok((address.ip(), address.port()));
    }
    let ip = text
        .trim_matches(['[', ']'])
        .parse::<IpAddr>()
        .with_context(|| format!("destination {text:?}: give ADDRESS:PORT, for IPv6 [ADDRESS]:PORT"))?;
    ensure!(!with_port, "destination {text:?} has no port: give {ip}:PORT, or --protocol icmp");
    Ok((ip, 0))
}

fn answer(outcome: Outcome) -> Answer {
    let plain = |outcome| Answer { outcome, service_port: None, endpoints: Vec::new() };
    match outcome {
        Outcome::Reject => plain("reject"),
        Outcome::Drop => plain("drop"),
        Outcome::NotOurs => plain("notOurs"),
        Outcome::Forward { service_port, choices } => Answer {
            outcome: "forward",
            service_port: Some(format!("{service_port} ({})", service_port.protocol)),
            endpoints: choices
                .iter()
                .map(|choice| EndpointAnswer {
                    address: SocketAddr::new(choice.backend.address, choice.backend.port).to_string(),
                    local: choice.backend.local,
                    masquerade: choice.masquerade,
                })
                .collect(),
        },
    }
}

fn text(answer: &Answer) -> String {
    match answer.outcome {
        "reject" => "rejected with ICMP port unreachable\n".into(),
        "drop" => "dropped\n".into(),
        "notOurs" => "not ours: no service address, the packet goes on unchanged\n".into(),
        _ => {
            let mut out = String::new();
            let _ = writeln!(
                out,
                "forwarded by {} to one of:",
                answer.service_port.as_deref().unwrap_or("an unnamed service port")
            );
            let yes = |b: bool, yes: &str, no: &str| if b { yes.to_string() } else { no.to_string() };
            let rows: Vec<Vec<String>> = answer
                .endpoints
                .iter()
                .map(|e| {
                    vec![
                        e.address.clone(),
                        yes(e.local, "this node", "elsewhere"),
                        yes(e.masquerade, "masqueraded", "kept"),
                    ]
                })
                .collect();
            out + &table(&["ENDPOINT", "RUNS ON", "SOURCE ADDRESS"], &rows)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read_and_mistakes_say_what_to_write() {
        assert_eq!(parse_destination("10.0.0.1:80", true).unwrap(), ("10.0.0.1".parse().unwrap(), 80));
        assert_eq!(parse_destination("[fd00::1]:80", true).unwrap(), ("fd00::1".parse().unwrap(), 80));
        assert_eq!(parse_destination("fd00::1", false).unwrap().1, 0);
        assert!(parse_destination("10.0.0.1", true).unwrap_err().to_string().contains("10.0.0.1:PORT"));
        assert!(parse_destination("web:80", true).unwrap_err().to_string().contains("[ADDRESS]:PORT"));
    }
}
