//! A pod of the demo: answers each request with its own name and the source address that it saw.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

/// Serves HTTP on a TCP port, or the same answers on a UDP port, until it is ended.
#[derive(clap::Args)]
pub struct Options {
    /// The name to answer with.
    #[arg(long)]
    name: String,
    /// The port to listen on, on all addresses.
    #[arg(long)]
    port: u16,
    /// UDP instead of TCP.
    #[arg(long)]
    udp: bool,
}

/// Runs the command.
///
/// # Errors
/// If the port cannot be listened on.
pub fn run(options: &Options) -> Result<()> {
    // The IPv6 wildcard takes IPv4 too; a machine without IPv6 has only the other.
    let addresses: [SocketAddr; 2] =
        [(Ipv6Addr::UNSPECIFIED, options.port).into(), (Ipv4Addr::UNSPECIFIED, options.port).into()];
    if options.udp {
        serve_udp(&UdpSocket::bind(&addresses[..]).context("cannot listen")?, &options.name)
    } else {
        serve_tcp(&TcpListener::bind(&addresses[..]).context("cannot listen")?, &options.name)
    }
}

/// `web-1 saw 192.0.2.7`: what [`super::client`] reads, and what a person sees with curl.
fn answer(name: &str, peer: SocketAddr) -> String {
    format!("{name} saw {}\n", peer.ip().to_canonical())
}

fn serve_udp(socket: &UdpSocket, name: &str) -> Result<()> {
    let mut buffer = [0; 1500];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((_, peer)) => {
                // A client that has gone is no concern of the next one.
                let _ = socket.send_to(answer(name, peer).as_bytes(), peer);
            }
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error).context("cannot receive"),
        }
    }
}

fn serve_tcp(listener: &TcpListener, name: &str) -> Result<()> {
    loop {
        let (stream, peer) = listener.accept().context("cannot accept")?;
        let text = answer(name, peer);
        // A client that breaks off is no concern of the next one.
        std::thread::spawn(move || respond(stream, &text));
    }
}

fn respond(mut stream: TcpStream, text: &str) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|w| w == b"\r\n\r\n") && request.len() < 16384 {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        request.extend_from_slice(&buffer[..length]);
    }
    let length = text.len();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
    )
}
