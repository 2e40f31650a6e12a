//! `cargo xtask setup`: installs what a fresh Debian machine lacks for building, testing and the demo.
//!
//! It looks first and installs only what is missing, so it may run before every other command.

use crate::command;
use anyhow::{Result, bail};
use std::process::Command;

/// Installs the packages that building, testing and the demo need (Debian, as root). Does nothing if all are there.
#[derive(Default, clap::Args)]
pub struct Options {
    /// Only say what is missing; fail if something is.
    #[arg(long)]
    check: bool,
}

/// How the presence of a requirement is recognised.
enum Sign {
    /// One of these programs is in PATH.
    Program(&'static str),
    /// pkg-config knows this library.
    Library(&'static str),
}

/// Sign, Debian package, what it is for.
const REQUIREMENTS: &[(Sign, &str, &str)] = &[
    (Sign::Program("cc"), "gcc", "linking"),
    (Sign::Program("cc"), "libc6-dev", "linking"),
    (Sign::Program("pkg-config"), "pkg-config", "finding libraries"),
    (Sign::Library("libmnl"), "libmnl-dev", "building the agent"),
    (Sign::Library("libnftnl"), "libnftnl-dev", "building the agent"),
    (Sign::Program("nft"), "nftables", "tests and demo: looking at the kernel's rules"),
    (Sign::Program("conntrack"), "conntrack", "tests: looking at the kernel's connections"),
    (Sign::Program("ip"), "iproute2", "tests and demo: network namespaces"),
    (Sign::Program("iptables"), "iptables", "tests: what kube-proxy left behind"),
    (Sign::Program("sysctl"), "procps", "tests and demo"),
    (Sign::Program("curl"), "curl", "demo: talking to the API server"),
    (Sign::Program("openssl"), "openssl", "demo: a key for the API server"),
];

/// What is missing now: package and purpose.
fn missing() -> Vec<(&'static str, &'static str)> {
    let present = |sign: &Sign| match sign {
        Sign::Program(name) => command::exists(name),
        Sign::Library(name) => {
            Command::new("pkg-config").args(["--exists", name]).status().is_ok_and(|status| status.success())
        }
    };
    REQUIREMENTS.iter().filter(|(sign, ..)| !present(sign)).map(|(_, package, purpose)| (*package, *purpose)).collect()
}

/// The `ID` and `ID_LIKE` words of os-release text.
fn distributions(os_release: &str) -> Vec<String> {
    os_release
        .lines()
        .filter_map(|line| line.strip_prefix("ID=").or_else(|| line.strip_prefix("ID_LIKE=")))
        .flat_map(|value| value.trim_matches('"').split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Runs the command.
///
/// # Errors
/// If something is missing that cannot be installed here; the message says what to do.
pub fn run(options: &Options) -> Result<()> {
    let missing = missing();
    if missing.is_empty() {
        println!("setup: nothing is missing");
    } else {
        println!("setup: missing:");
        for (package, purpose) in &missing {
            println!("  {package:14} {purpose}");
        }
        if options.check {
            bail!("{} packages are missing; `cargo xtask setup` as root installs them", missing.len());
        }
        install(&missing.iter().map(|(package, _)| *package).collect::<Vec<_>>())?;
    }
    if !command::exists("go") {
        println!(
            "setup: Go is missing. Only the tests against the real Kubernetes need it (Go 1.26 or newer): see https://go.dev/dl, or \
             set KUBEBUILDER_ASSETS to a directory that holds kube-apiserver, etcd and kube-proxy."
        );
    }
    Ok(())
}

/// Runs `setup` for another command: silent if nothing is missing.
///
/// # Errors
/// As [`run`].
pub fn ensure() -> Result<()> {
    if missing().is_empty() { Ok(()) } else { run(&Options { check: false }) }
}

fn install(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    let os_release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !distributions(&os_release).iter().any(|id| id == "debian" || id == "ubuntu") {
        bail!("this is not Debian; install these, or what your distribution calls them, and run again: {list}");
    }
    if !is_root() {
        bail!(
            "only root can install packages; run this and try again: sudo apt-get update && sudo apt-get install -y {list}"
        );
    }
    let apt = |arguments: &[&str]| {
        let mut command = command::program("apt-get", arguments);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    command::run(&mut apt(&["update", "-q"]))?;
    let mut arguments = vec!["install", "-y", "-q", "--no-install-recommends"];
    arguments.extend(packages);
    command::run(&mut apt(&arguments))?;
    let still = missing();
    if !still.is_empty() {
        bail!(
            "still missing after the installation: {}",
            still.iter().map(|(package, _)| *package).collect::<Vec<_>>().join(" ")
        );
    }
    Ok(())
}

/// Whether this process is root.
#[must_use]
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_and_its_children_are_recognised() {
        assert_eq!(distributions("NAME=\"Debian\"\nID=debian\n"), ["debian"]);
        assert_eq!(distributions("ID=ubuntu\nID_LIKE=debian\n"), ["ubuntu", "debian"]);
        assert_eq!(
            distributions("ID=\"rocky\"\nID_LIKE=\"rhel centos fedora\"\n"),
            ["rocky", "rhel", "centos", "fedora"]
        );
        assert!(distributions("VERSION_ID=12\n").is_empty());
    }
}
