//! Two identical nodes side by side, each with a proxy of its own, at one API server.

use crate::apiserver::ApiServer;
use crate::engine::{Cluster, Objects, Program, Proxy};
use crate::envtest::Binaries;
use crate::world::{World, WorldSpec};
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::time::Duration;

/// UDP conntrack entries are cleaned up after the rules are in force, which is all that the sentinel shows.
const CLEAN_UP: Duration = Duration::from_millis(250);

/// Which of the two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// The node of the real kube-proxy.
    Reference,
    /// The node of the proxy that is compared with it.
    Subject,
}

impl Side {
    /// Both.
    pub const BOTH: [Side; 2] = [Side::Reference, Side::Subject];

    /// Position in arrays of two.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Side::Reference => 0,
            Side::Subject => 1,
        }
    }
}

/// The two nodes.
pub struct Pair<'a> {
    /// The objects that both proxies see.
    cluster: Cluster<'a>,
    /// Reference and subject.
    pub worlds: [World; 2],
    /// Reference and subject.
    pub proxies: [Proxy<'a>; 2],
}

impl<'a> Pair<'a> {
    /// Builds both worlds. The proxies start with the first state.
    ///
    /// # Errors
    /// A tool or a socket refuses.
    pub fn new(
        api: &'a ApiServer,
        binaries: &'a Binaries,
        subject: Program,
        flags: &[String],
        spec: &WorldSpec,
        ports: &BTreeSet<u16>,
    ) -> Result<Self> {
        let build = || World::new(spec.clone(), ports);
        let (reference, other) = std::thread::scope(|scope| {
            let other = scope.spawn(build);
            (build(), other.join().expect("building a world does not panic"))
        });
        let proxy = |program| Proxy::new(program, api, binaries, flags);
        Ok(Self {
            cluster: Cluster::new(api),
            worlds: [reference?, other?],
            proxies: [proxy(Program::KubeProxy)?, proxy(subject)?],
        })
    }

    /// Writes a state to the API server; does not wait for the proxies.
    ///
    /// # Errors
    /// The API server refuses an object.
    pub fn apply(&mut self, objects: &Objects) -> Result<()> {
        let watched = self.proxies.iter_mut().any(|proxy| proxy.process().is_some());
        self.cluster.apply(objects, watched)
    }

    /// Starts what does not run yet.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(&mut self) -> Result<()> {
        for (proxy, world) in self.proxies.iter_mut().zip(&self.worlds) {
            if proxy.process().is_none() {
                proxy.connect(&world.node)?;
                proxy.start(&world.node)?;
            }
        }
        Ok(())
    }

    /// Waits until `side` has the state that was written last in force.
    ///
    /// # Errors
    /// It does not get there, or the program ended.
    pub fn settled(&mut self, side: Side) -> Result<()> {
        let world = &self.worlds[side.index()];
        let proxy = &mut self.proxies[side.index()];
        let name = proxy.program().name();
        proxy.settled(&world.node, &self.cluster).with_context(|| name)
    }

    /// Writes a state and returns when both proxies have it in force.
    ///
    /// # Errors
    /// The API server refuses an object, or a proxy does not get there.
    pub fn bring(&mut self, objects: &Objects) -> Result<()> {
        self.apply(objects)?;
        self.start()?;
        Side::BOTH.into_iter().try_for_each(|side| self.settled(side))?;
        std::thread::sleep(CLEAN_UP);
        Ok(())
    }

    /// Ends the proxies and deletes the objects.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn finish(mut self) -> Result<()> {
        self.proxies.iter_mut().for_each(Proxy::end);
        self.cluster.clear()
    }
}
