//! A client of the demo: asks again and again, each time by a new connection, and prints one JSON line for each.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Asks an address many times and prints who answered.
#[derive(clap::Args)]
pub struct Options {
    /// Whom to ask.
    #[arg(long)]
    to: SocketAddr,
    /// UDP instead of TCP.
    #[arg(long)]
    udp: bool,
    /// How often.
    #[arg(long, default_value_t = 1)]
    count: u32,
    /// How long to go on, instead of a number of times; milliseconds.
    #[arg(long)]
    for_ms: Option<u64>,
    /// How long to wait for an answer; milliseconds.
    #[arg(long, default_value_t = 1000)]
    timeout_ms: u64,
}

/// What came of one connection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Name of the endpoint, and the source address that it saw.
    Answered(String, String),
    /// Refused at once.
    Refused,
    /// Nothing came within the time.
    Silent,
    /// Something else went wrong.
    Broken(String),
}

/// One line of output.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    /// When the outcome was known: milliseconds since 1970.
    pub at_ms: u64,
    /// What came of it.
    pub outcome: Outcome,
}

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis().try_into().unwrap_or(u64::MAX))
}

/// Runs the command.
///
/// # Errors
/// If the output cannot be written.
pub fn run(options: &Options) -> Result<()> {
    let timeout = Duration::from_millis(options.timeout_ms);
    let begun = Instant::now();
    let mut done = 0;
    let mut out = std::io::stdout().lock();
    loop {
        let more = match options.for_ms {
            Some(length) => begun.elapsed() < Duration::from_millis(length),
            None => done < options.count,
        };
        if !more {
            return Ok(());
        }
        let asked = if options.udp { ask_udp(options.to, timeout) } else { ask_tcp(options.to, timeout) };
        let report = Report { at_ms: now_ms(), outcome: judge(asked) };
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
        done += 1;
        if options.for_ms.is_some() {
            // A steady stream, not a load test.
            std::thread::sleep(Duration::from_millis(4));
        }
    }
}

fn ask_tcp(to: SocketAddr, timeout: Duration) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: demo\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

fn ask_udp(to: SocketAddr, timeout: Duration) -> std::io::Result<String> {
    let any: SocketAddr =
        if to.is_ipv4() { (Ipv4Addr::UNSPECIFIED, 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(timeout))?;
    socket.send(b"who?")?;
    let mut buffer = [0; 1500];
    let length = socket.recv(&mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
}

fn judge(asked: std::io::Result<String>) -> Outcome {
    match asked {
        Ok(text) => match text.trim().split_once(" saw ") {
            Some((name, source)) => Outcome::Answered(name.to_owned(), source.to_owned()),
            None => Outcome::Broken(format!("an answer that is none: {text:?}")),
        },
        Err(error) => match error.kind() {
            ErrorKind::ConnectionRefused => Outcome::Refused,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Outcome::Silent,
            _ => Outcome::Broken(error.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_refused_connection_and_a_silent_one_differ() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        // It listens and never answers.
        assert_eq!(judge(ask_tcp(address, Duration::from_millis(50))), Outcome::Silent);
        drop(listener);
        assert_eq!(judge(ask_tcp(address, Duration::from_millis(500))), Outcome::Refused);
    }

    #[test]
    fn an_answer_is_read() {
        assert_eq!(judge(Ok("web-1 saw ::1\n".into())), Outcome::Answered("web-1".into(), "::1".into()));
        assert!(matches!(judge(Ok(String::new())), Outcome::Broken(_)));
    }
}
