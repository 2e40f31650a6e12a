//! Addresses of this host's interfaces, the source addresses of its default routes, and a signal when they change.

use futures::{StreamExt, TryStreamExt};
use netlink_packet_core::NetlinkMessage;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage, AddressScope};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteType};
use proxy_common::IpFamily;
use rtnetlink::{MulticastGroup, RouteMessageBuilder};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use tokio::task::JoinHandle;

/// Why addresses or routes could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The route netlink socket could not be opened.
    #[error("cannot open a route netlink socket: {0}")]
    Open(#[from] io::Error),
    /// The kernel refused a request.
    #[error("cannot list {what}: {source}")]
    List {
        /// `addresses` or `routes`
        what: &'static str,
        /// The answer.
        #[source]
        source: rtnetlink::Error,
    },
}

/// One address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Assigned {
    address: IpAddr,
    link: u32,
    /// Scope global: usable beyond the link.
    global: bool,
}

/// A view of the addresses of one network namespace: the one in which [`Addresses::open`] was called.
pub struct Addresses {
    handle: rtnetlink::Handle,
    changes: futures::channel::mpsc::UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, netlink_sys::SocketAddr)>,
    driver: JoinHandle<()>,
}

impl Drop for Addresses {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Addresses {
    /// Opens a socket in the calling thread's namespace and listens for changes from now on, so that a list that is read
    /// afterwards cannot miss one. Must be called inside a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let groups = [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
        let (connection, handle, changes) = rtnetlink::new_multicast_connection(&groups)?;
        Ok(Self { handle, changes, driver: tokio::spawn(connection) })
    }

    /// All addresses of all interfaces, up or down, loopback included, both families.
    pub async fn list(&self) -> Result<BTreeSet<IpAddr>, Error> {
        Ok(self.assigned().await?.into_iter().map(|assigned| assigned.address).collect())
    }

    async fn assigned(&self) -> Result<Vec<Assigned>, Error> {
        let messages = self.handle.address().get().execute().try_collect::<Vec<_>>().await;
        let messages = messages.map_err(|source| Error::List { what: "addresses", source })?;
        Ok(messages.iter().filter_map(assigned).collect())
    }

    /// The source address that the best default route of `family` gives to what the node sends: the route's preferred
    /// source, else the first global address of its interface. `None` without a default route or address.
    pub async fn default_source(&self, family: IpFamily) -> Result<Option<IpAddr>, Error> {
        let query = match family {
            IpFamily::V4 => RouteMessageBuilder::<Ipv4Addr>::new().build(),
            IpFamily::V6 => RouteMessageBuilder::<Ipv6Addr>::new().build(),
        };
        let routes = self.handle.route().get(query).execute().try_collect::<Vec<_>>().await;
        let routes = routes.map_err(|source| Error::List { what: "routes", source })?;
        Ok(choose_source(&routes, &self.assigned().await?, family))
    }

    /// Waits until an address was added or removed, or notifications were lost. Everything that is pending counts as one
    /// change. `false` = the socket is gone; open a new one.
    pub async fn changed(&mut self) -> bool {
        if self.changes.next().await.is_none() {
            return false;
        }
        while self.changes.try_recv().is_ok() {}
        true
    }
}

fn assigned(message: &AddressMessage) -> Option<Assigned> {
    // On a point-to-point IPv4 link IFA_ADDRESS is the peer and IFA_LOCAL is ours; IPv6 without a peer has no IFA_LOCAL.
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) if local => Some(*address),
            AddressAttribute::Address(address) if !local => Some(*address),
            _ => None,
        })
    };
    let address = find(true).or_else(|| find(false))?;
    Some(Assigned { address, link: message.header.index, global: message.header.scope == AddressScope::Universe })
}

fn choose_source(routes: &[RouteMessage], assigned: &[Assigned], family: IpFamily) -> Option<IpAddr> {
    let mut defaults: Vec<_> = routes
        .iter()
        .filter(|route| {
            route.header.destination_prefix_length == 0
                && route.header.kind == RouteType::Unicast
                && route.header.table == RouteHeader::RT_TABLE_MAIN
        })
        .collect();
    let priority = |route: &RouteMessage| {
        route
            .attributes
            .iter()
            .find_map(|a| if let RouteAttribute::Priority(p) = a { Some(*p) } else { None })
            .unwrap_or(0)
    };
    defaults.sort_by_key(|route| priority(route)); // stable: equal metrics stay in the kernel's order
    defaults.into_iter().find_map(|route| {
        let preferred = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::PrefSource(RouteAddress::Inet(ip)) => Some(IpAddr::V4(*ip)),
            RouteAttribute::PrefSource(RouteAddress::Inet6(ip)) => Some(IpAddr::V6(*ip)),
            _ => None,
        });
        let link = route.attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Oif(link) => Some(*link),
            RouteAttribute::MultiPath(hops) => hops.first().map(|hop| hop.interface_index),
            _ => None,
        });
        let of_link =
            || assigned.iter().find(|a| Some(a.link) == link && a.global && IpFamily::of(a.address) == family);
        preferred.or_else(|| of_link().map(|a| a.address))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netns::NetNs;
    use crate::sys::netns::tests::{for_test, sh};
    use std::time::Duration;

    /// Runs `work` in a one-thread runtime inside `netns`.
    fn inside<T: Send>(netns: &NetNs, work: impl AsyncFnOnce() -> T + Send) -> T {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        netns.run(|| runtime().block_on(work())).unwrap()
    }

    #[test]
    fn addresses_of_all_interfaces_are_listed_and_a_peer_is_not_ours() {
        let Some(netns) = for_test() else { return };
        sh(&netns, "ip link add d0 type veth peer name d1; ip addr add 10.20.30.51/24 dev d0; ip addr add 10.1.1.1 peer 10.1.1.2/32 dev d0
            ip link set d0 up; ip addr add 2001:db8::5/64 dev d0 nodad; ip addr add 192.0.2.9/32 dev d1");
        let found = inside(&netns, async || Addresses::open().unwrap().list().await.unwrap());
        for address in ["127.0.0.1", "::1", "10.20.30.51", "10.1.1.1", "2001:db8::5", "192.0.2.9"] {
            assert!(found.contains(&address.parse().unwrap()), "{address} is missing in {found:?}");
        }
        assert!(!found.contains(&"10.1.1.2".parse().unwrap()), "the peer's address is not ours");
    }

    #[test]
    fn the_default_route_with_the_best_metric_names_the_source() {
        let Some(netns) = for_test() else { return };
        let sources = || {
            inside(&netns, async || {
                let addresses = Addresses::open().unwrap();
                let v4 = addresses.default_source(IpFamily::V4).await.unwrap();
                (
                    v4.map(|a| a.to_string()),
                    addresses.default_source(IpFamily::V6).await.unwrap().map(|a| a.to_string()),
                )
            })
        };
        assert_eq!(sources(), (None, None));
        sh(
            &netns,
            "for i in 0 1; do ip link add d$i type veth peer name p$i; ip link set d$i up; ip link set p$i up; done
            ip addr add 10.0.0.5/24 dev d0; ip addr add 10.0.1.5/24 dev d1; ip addr add 10.0.1.6/24 dev d1
            ip route add default via 10.0.1.1 dev d1 metric 50; ip route add default via 10.0.0.1 dev d0 metric 200
            ip addr add 2001:db8::5/64 dev d0 nodad; ip -6 route add default via 2001:db8::1 dev d0",
        );
        assert_eq!(sources(), (Some("10.0.1.5".into()), Some("2001:db8::5".into())));
        sh(&netns, "ip route change default via 10.0.1.1 dev d1 metric 50 src 10.0.1.6");
        assert_eq!(sources().0.as_deref(), Some("10.0.1.6"));
    }

    #[test]
    fn a_new_and_a_removed_address_are_signalled_once_per_burst() {
        let Some(netns) = for_test() else { return };
        inside(&netns, async || {
            let mut addresses = Addresses::open().unwrap();
            addresses.list().await.unwrap();
            let quiet = tokio::time::timeout(Duration::from_millis(100), addresses.changed()).await;
            assert!(quiet.is_err(), "no change, no signal");
            for command in
                ["ip addr add 10.9.9.9/32 dev lo; ip addr add 10.9.9.8/32 dev lo", "ip addr del 10.9.9.9/32 dev lo"]
            {
                sh(&NetNs::current().unwrap(), command);
                let signal = tokio::time::timeout(Duration::from_secs(5), addresses.changed()).await;
                assert_eq!(signal, Ok(true), "{command}");
            }
            assert!(!addresses.list().await.unwrap().contains(&"10.9.9.9".parse().unwrap()));
        });
    }
}
