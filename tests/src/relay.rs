//! TCP relays between network namespaces: what listens in one is answered by a server in another.
//!
//! So one API server serves any number of nodes without a device or an address of its own in their namespaces, and an
//! outage of the network between them is a relay that is closed.

use crate::netns;
use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A running relay; closes its connections and stops on drop.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Listens at `listen` in the namespace `from` (`None` = that of the process) for what is at `target` in `to`.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(from: Option<&Path>, listen: SocketAddr, to: &Path, target: SocketAddr) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let streams = Arc::new(Mutex::new(Vec::new()));
        let (from, to) = (from.map(Path::to_path_buf), to.to_path_buf());
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = {
            let (stop, streams) = (stop.clone(), streams.clone());
            std::thread::Builder::new().name("relay".into()).spawn(move || {
                if let Some(from) = from {
                    netns::enter(&from);
                }
                let bound = TcpListener::bind(listen).and_then(|l| {
                    l.set_nonblocking(true)?;
                    Ok((l.local_addr()?, l))
                });
                match bound {
                    Ok((address, listener)) => {
                        let _ = ready.send(Ok(address));
                        accept(&listener, &to, target, &stop, &streams);
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                }
            })?
        };
        let address = wait.recv().context("relay thread ended")?.with_context(|| format!("relay at {listen}"))?;
        Ok(Self { address, stop, streams, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for stream in self.streams.lock().expect("no thread panics with the lock").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

type Streams = Mutex<Vec<TcpStream>>;

fn accept(listener: &TcpListener, to: &Path, target: SocketAddr, stop: &AtomicBool, streams: &Arc<Streams>) {
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                let (to, streams): (PathBuf, _) = (to.to_path_buf(), streams.clone());
                let _ = std::thread::Builder::new().name("relay-connection".into()).spawn(move || {
                    netns::enter(&to);
                    let _ = stream.set_nonblocking(false);
                    if let Ok(far) = TcpStream::connect(target) {
                        connect(stream, far, &streams);
                    }
                });
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn connect(near: TcpStream, far: TcpStream, streams: &Streams) {
    let (Ok(near2), Ok(far2)) = (near.try_clone(), far.try_clone()) else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    {
        let mut all = streams.lock().expect("no thread panics with the lock");
        all.extend([near.try_clone(), far.try_clone()].into_iter().flatten());
    }
    let back = std::thread::spawn(move || copy(far2, near2));
    copy(near, far);
    let _ = back.join();
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => {
                if to.write_all(&buffer[..n]).is_err() {
                    break;
                }
            }
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
