//! How traffic of local pods is told from other traffic.

use ipnet::IpNet;
use proxy_common::IpFamily;
use std::str::FromStr;
use std::sync::Arc;

/// `detectLocalMode` of KubeProxyConfiguration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DetectLocalMode {
    /// Source inside `clusterCIDR`.
    #[default]
    ClusterCidr,
    /// Source inside this Node's podCIDRs.
    NodeCidr,
    /// Arrived by the interface `bridgeInterface`.
    BridgeInterface,
    /// Arrived by an interface whose name begins with `interfaceNamePrefix`.
    InterfaceNamePrefix,
}

/// The name is none of kube-proxy's modes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no mode: use ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")]
pub struct UnknownDetectLocalMode(String);

impl FromStr for DetectLocalMode {
    type Err = UnknownDetectLocalMode;

    /// An empty name is the default.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "" | "ClusterCIDR" => Ok(Self::ClusterCidr),
            "NodeCIDR" => Ok(Self::NodeCidr),
            "BridgeInterface" => Ok(Self::BridgeInterface),
            "InterfaceNamePrefix" => Ok(Self::InterfaceNamePrefix),
            other => Err(UnknownDetectLocalMode(other.to_owned())),
        }
    }
}

/// The rule that tells pod traffic from other traffic, already chosen for one family.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum LocalDetector {
    /// No detector for this family.
    #[default]
    None,
    /// Source address inside this network (modes ClusterCIDR and NodeCIDR).
    Cidr(IpNet),
    /// Input interface has exactly this name (mode BridgeInterface).
    Interface(Arc<str>),
    /// Input interface name begins with this prefix (mode InterfaceNamePrefix).
    InterfacePrefix(Arc<str>),
}

impl LocalDetector {
    /// The detector of one family. The CIDR modes use the first network of the family and have no detector without one; the
    /// interface modes are the same for both families. An empty interface name, which configuration refuses, is no detector:
    /// as a prefix it would call all traffic local.
    #[must_use]
    pub fn select(
        mode: DetectLocalMode,
        cluster_cidrs: &[IpNet],
        pod_cidrs: &[IpNet],
        bridge_interface: &str,
        interface_name_prefix: &str,
        family: IpFamily,
    ) -> Self {
        let first = |nets: &[IpNet]| {
            nets.iter().find(|net| IpFamily::of(net.addr()) == family).map_or(Self::None, |net| Self::Cidr(net.trunc()))
        };
        match mode {
            DetectLocalMode::ClusterCidr => first(cluster_cidrs),
            DetectLocalMode::NodeCidr => first(pod_cidrs),
            DetectLocalMode::BridgeInterface if !bridge_interface.is_empty() => {
                Self::Interface(bridge_interface.into())
            }
            DetectLocalMode::InterfaceNamePrefix if !interface_name_prefix.is_empty() => {
                Self::InterfacePrefix(interface_name_prefix.into())
            }
            DetectLocalMode::BridgeInterface | DetectLocalMode::InterfaceNamePrefix => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::nets;

    fn cidr(text: &str) -> LocalDetector {
        LocalDetector::Cidr(text.parse().unwrap())
    }

    fn both(mode: DetectLocalMode, cluster_cidrs: &[&str], pod_cidrs: &[&str]) -> [LocalDetector; 2] {
        let (cluster_cidrs, pod_cidrs) = (nets(cluster_cidrs), nets(pod_cidrs));
        IpFamily::ALL.map(|family| LocalDetector::select(mode, &cluster_cidrs, &pod_cidrs, "cbr0", "veth", family))
    }

    #[test]
    fn q1_each_family_has_its_cluster_cidr_whatever_the_order() {
        let expected = [cidr("10.0.0.0/14"), cidr("2002:0:0:1234::/64")];
        assert_eq!(both(DetectLocalMode::ClusterCidr, &["10.0.0.0/14", "2002:0:0:1234::/64"], &[]), expected);
        assert_eq!(both(DetectLocalMode::ClusterCidr, &["2002:0:0:1234::/64", "10.0.0.0/14"], &[]), expected);
    }

    #[test]
    fn q2_a_family_without_a_cidr_has_no_detector() {
        let found = both(DetectLocalMode::ClusterCidr, &["2002:0:0:1234::/64"], &["10.1.0.0/24"]);
        assert_eq!(found, [LocalDetector::None, cidr("2002:0:0:1234::/64")]);
    }

    #[test]
    fn q3_node_cidr_uses_the_first_pod_cidr_of_the_family_and_ignores_the_cluster_cidr() {
        let pods = ["10.1.2.0/24", "fd00:1::/64", "10.9.9.0/24"];
        let found = both(DetectLocalMode::NodeCidr, &["10.0.0.0/8", "fd00::/16"], &pods);
        assert_eq!(found, [cidr("10.1.2.0/24"), cidr("fd00:1::/64")]);
        assert_eq!(both(DetectLocalMode::NodeCidr, &["10.0.0.0/8"], &[]), [LocalDetector::None, LocalDetector::None]);
    }

    #[test]
    fn q4_interface_modes_are_the_same_in_both_families() {
        let bridge = LocalDetector::Interface("cbr0".into());
        assert_eq!(both(DetectLocalMode::BridgeInterface, &["10.0.0.0/8"], &[]), [bridge.clone(), bridge]);
        let prefix = LocalDetector::InterfacePrefix("veth".into());
        assert_eq!(both(DetectLocalMode::InterfaceNamePrefix, &["10.0.0.0/8"], &[]), [prefix.clone(), prefix]);
    }

    #[test]
    fn an_empty_interface_name_calls_nothing_local() {
        for mode in [DetectLocalMode::BridgeInterface, DetectLocalMode::InterfaceNamePrefix] {
            let found = LocalDetector::select(mode, &nets(&["10.0.0.0/8"]), &[], "", "", IpFamily::V4);
            assert_eq!(found, LocalDetector::None);
        }
    }

    #[test]
    fn modes_have_kube_proxys_names() {
        assert_eq!("".parse(), Ok(DetectLocalMode::ClusterCidr));
        assert_eq!("NodeCIDR".parse(), Ok(DetectLocalMode::NodeCidr));
        let error = "clustercidr".parse::<DetectLocalMode>().unwrap_err();
        assert!(error.to_string().contains("\"clustercidr\" is no mode"), "{error}");
    }
}
