//! `cargo xtask demo`: a cluster in a box, served by Tandem, with real traffic.

pub mod client;
mod kubernetes;
mod manifests;
pub mod server;
mod topology;
mod visit;
mod watch;

use crate::command::{self, cargo, program, workspace_root};
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use topology::inside;

/// Makes a cluster of network namespaces, serves the example manifests with Tandem, and sends real traffic to them.
#[derive(clap::Args)]
pub struct Options {
    /// Leave everything running at the end, and say how to look around.
    #[arg(long)]
    keep: bool,
    /// Serve from a real kube-apiserver instead of manifests.
    #[arg(long)]
    kubernetes: bool,
    /// Only remove what an earlier demo left.
    #[arg(long, conflicts_with_all = ["keep", "kubernetes"])]
    clean: bool,
    /// Use the release build, which takes longer to build.
    #[arg(long)]
    release: bool,
    /// Show every command.
    #[arg(long)]
    verbose: bool,
}

/// Where the demo keeps its manifests, logs and scripts. Only root can write there.
const DIRECTORY: &str = "/run/tandem-demo";

/// Pod addresses of the whole cluster, by which Tandem tells pods from others.
const CLUSTER_CIDR: &str = "10.244.0.0/16,fd00:10:244::/56";

/// The endpoint that is removed, and its addresses.
const GONE: (&str, [&str; 2]) = ("web-2", ["10.244.1.12", "fd00:10:244:1::12"]);

/// Set by Ctrl-C: the handler is cleaning up, and what fails meanwhile fails because of that.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Runs the command.
///
/// # Errors
/// If something cannot be set up, or does not go as expected.
pub fn run(options: &Options) -> Result<()> {
    if !crate::setup::is_root() {
        bail!("the demo makes network namespaces, which needs root: run it with sudo");
    }
    let root = workspace_root()?;
    let _lock = lock()?;
    if options.clean {
        clean()?;
        println!("Removed what the demo made.");
        return Ok(());
    }
    step("Looking for what is missing");
    crate::setup::run(&Default::default())?;
    step("Building Tandem");
    let tandem = build(&root, options)?;
    let kubernetes = if options.kubernetes { Some(kubernetes::binaries(&root)?) } else { None };
    let built = Instant::now();

    ctrlc::set_handler(|| {
        if !INTERRUPTED.swap(true, Ordering::SeqCst) {
            eprintln!("\nInterrupted: cleaning up");
            if let Err(error) = clean() {
                eprintln!("error: {error:#}; try again: cargo xtask demo --clean");
            }
            std::process::exit(130);
        }
    })
    .context("Ctrl-C cannot be handled")?;
    clean().context("what an earlier demo left cannot be removed")?;

    let shown = show(&root, &tandem, kubernetes.as_ref(), options, built);
    if INTERRUPTED.load(Ordering::SeqCst) {
        // The handler ends this process when it has cleaned up.
        std::thread::sleep(Duration::from_secs(30));
    }
    if options.keep && topology::existing().is_ok_and(|names| !names.is_empty()) {
        look_around(&tandem, options);
    } else {
        if shown.is_err() {
            show_log_end();
        }
        clean()?;
        println!("Everything that the demo made is removed.");
    }
    shown
}

/// Two demos at once would share names.
fn lock() -> Result<File> {
    let path = format!("{DIRECTORY}.lock");
    let file = File::create(&path).with_context(|| format!("cannot create {path}"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => bail!("another demo is running on this machine; wait for its end"),
        Err(std::fs::TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {path}")),
    }
}

fn step(what: &str) {
    println!("\n== {what}");
}

fn build(root: &Path, options: &Options) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--locked", "--package", "proxy", "--bin", "tandem"]).current_dir(root);
    if options.release {
        command.arg("--release");
    }
    command::run(&mut command)?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join(if options.release { "release/tandem" } else { "debug/tandem" }))
}

/// The whole show.
fn show(
    root: &Path,
    tandem: &Path,
    kubernetes: Option<&kubernetes::Binaries>,
    options: &Options,
    built: Instant,
) -> Result<()> {
    let itself = std::env::current_exe().context("this program's own path is unknown")?;
    let directory = Path::new(DIRECTORY);
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {DIRECTORY}"))?;

    step("Making the cluster: two nodes, five pods that serve, a pod that asks, two clients outside");
    topology::build(directory, options.verbose)?;
    for pod in &topology::PODS {
        if let Some((port, udp)) = pod.serves {
            let mut command = inside(pod.name, &itself);
            command.args(["demo-server", "--name", pod.name, "--port", &port.to_string()]);
            if udp {
                command.arg("--udp");
            }
            start(&mut command, &format!("{}.log", pod.name))?;
        }
    }

    let manifests = directory.join("manifests");
    manifests::copy(&root.join("deploy/examples"), &manifests)?;
    let mut arguments = vec![
        "--hostname-override=demo-node".to_owned(),
        format!("--cluster-cidr={CLUSTER_CIDR}"),
        format!("--run-dir={DIRECTORY}/tandem"),
    ];
    let api = match kubernetes {
        Some(binaries) => {
            step("Starting etcd and kube-apiserver in the node's namespace");
            let api = kubernetes::Api::start(binaries, directory)?;
            for (_, object) in manifests::read(&manifests)? {
                api.create(&object)?;
            }
            arguments.push(format!("--kubeconfig={}", api.kubeconfig().display()));
            Some(api)
        }
        None => {
            arguments.push(format!("--manifests={}", manifests.display()));
            None
        }
    };

    step("Starting Tandem on the node");
    println!("$ tandem {}", arguments.join(" "));
    let begun = Instant::now();
    let mut agent = start(inside("node", tandem).args(&arguments), "tandem.log")?;
    wait_until_served(&itself, &mut agent)?;
    println!(
        "first answer {:.1} s after the start of Tandem, {:.1} s after the build",
        begun.elapsed().as_secs_f64(),
        built.elapsed().as_secs_f64()
    );

    step("Sending traffic");
    let mut rows = Vec::new();
    for visit in &visit::VISITS {
        let outcomes = visit.run(&itself)?;
        let verdict = visit.judge(&outcomes);
        rows.push((visit, outcomes, verdict));
    }
    println!("{}", visit::table(&rows));
    let wrong = rows.iter().filter(|(_, _, verdict)| verdict.is_err()).count();
    if wrong > 0 {
        bail!("{wrong} of {} visits did not go as expected", rows.len());
    }

    step(&format!("Removing {} while a pod keeps asking 10.96.0.10", GONE.0));
    watch::run(&itself, "shell", "10.96.0.10:80", &["web-1", "web-2", "web-3"], GONE.0, || match &api {
        Some(api) => {
            let objects: Vec<_> = manifests::read(&manifests)?.into_iter().map(|(_, object)| object).collect();
            manifests::without_endpoint(&objects, "web", &GONE.1).iter().try_for_each(|slice| api.replace(slice))
        }
        None => manifests::remove_endpoint(&manifests.join("web.yaml"), "web", &GONE.1),
    })?;
    if let Some(status) = agent.try_wait().context("Tandem's state is unknown")? {
        bail!("Tandem ended ({status})");
    }
    println!("\nAll went as expected.");
    Ok(())
}

/// Starts a program that outlives a Ctrl-C at this terminal (the handler ends it in order); its output goes to a file.
fn start(command: &mut Command, log: &str) -> Result<Child> {
    let path = Path::new(DIRECTORY).join(log);
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    let errors = file.try_clone()?;
    command.stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
    command.spawn().with_context(|| format!("cannot run `{}`", command::shown(command)))
}

fn wait_until_served(itself: &Path, agent: &mut Child) -> Result<()> {
    for address in ["10.96.0.10:80", "[fd00:10:96::10]:80"] {
        let begun = Instant::now();
        loop {
            if let Some(status) = agent.try_wait()? {
                bail!("Tandem ended ({status}) before it served anything");
            }
            let mut command = inside("shell", itself);
            command.args(["demo-client", "--to", address, "--timeout-ms", "100"]);
            if command::output(&mut command)?.contains("answered") {
                break;
            }
            if begun.elapsed() > Duration::from_secs(30) {
                bail!("no answer from {address} within 30 s");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

fn show_log_end() {
    if let Ok(text) = std::fs::read_to_string(Path::new(DIRECTORY).join("tandem.log")) {
        let lines: Vec<&str> = text.lines().collect();
        eprintln!("\nThe end of Tandem's log:");
        for line in &lines[lines.len().saturating_sub(20)..] {
            eprintln!("  {line}");
        }
    }
}

/// Ends and removes all that a demo made, whichever run it was.
fn clean() -> Result<()> {
    topology::remove()?;
    match std::fs::remove_dir_all(DIRECTORY) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {DIRECTORY}"))
        }
        _ => Ok(()),
    }
}

fn look_around(tandem: &Path, options: &Options) {
    let shell = |name: &str, words: &str| {
        let mut command = program("ip", ["netns", "exec", &topology::namespace(name)]);
        command.args(words.split(' '));
        println!("  {}", command::shown(&command));
    };
    println!("\nThe cluster keeps running. Look around:\n");
    println!("The rules in the node's kernel, and who would answer a packet:");
    shell("node", "nft list table ip tandem");
    let source = if options.kubernetes {
        format!("--kubeconfig={DIRECTORY}/kubeconfig")
    } else {
        format!("--manifests={DIRECTORY}/manifests")
    };
    shell(
        "node",
        &format!(
            "{} lookup {source} --hostname-override=demo-node --cluster-cidr={CLUSTER_CIDR} 10.244.1.20 10.96.0.10:80",
            tandem.display()
        ),
    );
    println!("Ask a Service, as a pod and as a client outside:");
    shell("shell", "curl http://10.96.0.10/");
    shell("client", "curl http://192.0.2.10:30080/");
    shell("client", "curl http://203.0.113.10/");
    if options.kubernetes {
        println!("Change the cluster (with kubectl, if you have it):");
        shell("node", &format!("kubectl --kubeconfig={DIRECTORY}/kubeconfig edit endpointslice web-v4"));
    } else {
        println!("Change the cluster: edit a file in {DIRECTORY}/manifests");
    }
    println!("Tandem's log: {DIRECTORY}/tandem.log");
    println!("\nRemove it all: cargo xtask demo --clean");
}
