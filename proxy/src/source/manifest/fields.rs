//! Names of known fields, to suggest one for a misspelt name.

/// Fields of the kinds that are read, as far as a person writes them.
const KNOWN: &[&str] = &[
    "addresses",
    "addressType",
    "allocateLoadBalancerNodePorts",
    "annotations",
    "appProtocol",
    "cidrs",
    "clientIP",
    "clusterIP",
    "clusterIPs",
    "conditions",
    "endpoints",
    "externalIPs",
    "externalName",
    "externalTrafficPolicy",
    "forNodes",
    "forZones",
    "healthCheckNodePort",
    "hints",
    "hostname",
    "ingress",
    "internalTrafficPolicy",
    "ip",
    "ipFamilies",
    "ipFamilyPolicy",
    "ipMode",
    "labels",
    "loadBalancer",
    "loadBalancerClass",
    "loadBalancerIP",
    "loadBalancerSourceRanges",
    "metadata",
    "name",
    "namespace",
    "nodeName",
    "nodePort",
    "podCIDR",
    "podCIDRs",
    "port",
    "ports",
    "protocol",
    "publishNotReadyAddresses",
    "ready",
    "selector",
    "serving",
    "sessionAffinity",
    "sessionAffinityConfig",
    "spec",
    "status",
    "targetPort",
    "terminating",
    "timeoutSeconds",
    "trafficDistribution",
    "type",
    "zone",
];

/// The known name that `name` was probably meant to be.
pub(crate) fn nearest(name: &str) -> Option<&'static str> {
    let lower = name.to_lowercase();
    KNOWN
        .iter()
        .map(|known| (strsim::damerau_levenshtein(&lower, &known.to_lowercase()), *known))
        .filter(|(distance, known)| *distance <= known.len() / 4 && *known != name)
        .min()
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn misspelt_names_are_recognised_and_foreign_ones_are_not() {
        for (name, expected) in [
            ("clusterIp", Some("clusterIP")),
            ("externalTraficPolicy", Some("externalTrafficPolicy")),
            ("nodeport", Some("nodePort")),
            ("targetPorts", Some("targetPort")),
            ("colour", None),
            ("x", None),
        ] {
            assert_eq!(nearest(name), expected, "{name}");
        }
    }
}
