//! Looks for a kube-proxy in this network namespace, beside the event loop: looking takes time and may hang.

use crate::nft::foreign::ForeignTables;
use crate::takeover::rival::Sign;
use crate::takeover::{find_rules, probe};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// Without a hint, how often to look.
const INTERVAL: Duration = Duration::from_secs(10);
/// After a hint (someone changed nftables), wait for the rest of the change.
const PAUSE: Duration = Duration::from_millis(200);

/// A look-out. Ends when it is dropped.
pub struct Lookout {
    hint: Arc<Notify>,
    signs: mpsc::Receiver<Sign>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Lookout {
    /// Starts looking. The first look is at the first hint or after the interval.
    #[must_use]
    pub fn start() -> Self {
        let hint = Arc::new(Notify::new());
        let (sender, signs) = mpsc::channel(4);
        let task = tokio::spawn(look(Arc::clone(&hint), sender));
        Self { hint, signs, task }
    }

    /// Someone changed nftables: look soon.
    pub fn hint(&self) {
        self.hint.notify_one();
    }

    /// The next sign.
    pub async fn next(&mut self) -> Sign {
        match self.signs.recv().await {
            Some(sign) => sign,
            None => std::future::pending().await,
        }
    }
}

async fn look(hint: Arc<Notify>, signs: mpsc::Sender<Sign>) {
    let mut last_error = String::new();
    loop {
        tokio::select! {
            () = hint.notified() => tokio::time::sleep(PAUSE).await,
            () = tokio::time::sleep(INTERVAL) => {}
        }
        let rules = tokio::task::spawn_blocking(|| find_rules(&mut ForeignTables::open()?)).await;
        match rules {
            Ok(Ok(rules)) => {
                last_error.clear();
                if signs.send(Sign::Rules(rules)).await.is_err() {
                    return;
                }
            }
            Ok(Err(error)) => {
                let error = error.to_string();
                if error != last_error {
                    tracing::warn!(
                        "cannot look for rules of kube-proxy: {error}; it is tried again every {INTERVAL:?}"
                    );
                    last_error = error;
                }
            }
            // The runtime ends.
            Err(_) => return,
        }
        // Our own listener says that it is Tandem's, so no port has to be left out.
        if let Some(answer) = probe::probe(&[]).await
            && signs.send(Sign::Answers(answer)).await.is_err()
        {
            return;
        }
    }
}
