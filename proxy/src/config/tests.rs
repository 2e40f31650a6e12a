use super::*;
use clap::Parser;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    flags: Flags,
}

fn load(args: &[&str]) -> Result<Config, ConfigError> {
    let args = std::iter::once("tandem").chain(args.iter().copied()).map(Into::into);
    let flags = Command::try_parse_from(flags::normalise(args)).expect("flags parse").flags;
    Config::load(&flags, "Host-A\n")
}

fn errors(args: &[&str]) -> String {
    load(args).expect_err("is refused").to_string()
}

fn with_file(text: &str, args: &[&str]) -> Result<Config, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    std::fs::write(&path, text).unwrap();
    let mut all = vec!["--config", path.to_str().unwrap()];
    all.extend(args);
    load(&all)
}

const HEAD: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";

#[test]
fn defaults_are_those_of_kube_proxy() {
    let config = load(&[]).unwrap();
    assert_eq!(config.node_name, "host-a");
    assert_eq!(config.node_port_addresses, ["primary"]);
    assert_eq!(config.masquerade_mark, 0x4000);
    assert_eq!((config.sync_period, config.min_sync_period), (Duration::from_secs(30), None));
    assert_eq!(config.source, SourceConfig::Kubernetes { kubeconfig: None, master: None });
    assert_eq!(config.metrics_bind_address, Some("127.0.0.1:10249".parse().unwrap()));
}

#[test]
fn underscores_and_boolean_spellings_of_kubernetes_are_taken() {
    let config = load(&[
        "--masquerade_all",
        "--hostname_override=NODE_1",
        "--iptables-min-sync-period=3s",
        "--nodeport-addresses=10.0.0.0/8,primary",
    ]);
    let config = config.unwrap();
    assert!(config.masquerade_all);
    assert_eq!(config.node_name, "node_1");
    assert_eq!(config.min_sync_period, Some(Duration::from_secs(3)));
    assert_eq!(config.node_port_addresses, ["10.0.0.0/8", "primary"]);
    assert!(!load(&["--masquerade-all=false"]).unwrap().masquerade_all);
}

#[test]
fn all_errors_are_reported_together() {
    let text = errors(&[
        "--masquerade-bit=40",
        "--cluster-cidr=10.0.0.0/8, fd00::/48",
        "--nodeport-addresses=Localhost",
        "--min-sync-period=40s",
    ]);
    for part in
        ["masqueradeBit: 40", "clusterCIDR: \" fd00::/48\"", "nodePortAddresses: [0]: \"Localhost\"", "minSyncPeriod"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn cluster_cidr_takes_one_or_one_of_each_family() {
    assert_eq!(load(&["--cluster-cidr=10.0.0.1/8,fd00::/48"]).unwrap().cluster_cidrs.len(), 2);
    assert!(errors(&["--cluster-cidr=10.0.0.0/8,10.1.0.0/16"]).contains("one of each family"));
    assert!(errors(&["--cluster-cidr="]).contains("no CIDR"), "given but empty is invalid");
    assert!(load(&["--cluster-cidr=x", "--detect-local-mode=NodeCIDR"]).is_ok(), "other modes do not validate it");
}

#[test]
fn interface_modes_need_a_name_that_linux_allows() {
    assert!(errors(&["--detect-local-mode=BridgeInterface"]).contains("--pod-bridge-interface"));
    assert!(
        errors(&["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=abcdefghijklmnop"])
            .contains("15 bytes")
    );
    assert!(errors(&["--detect-local-mode=Foo"]).contains("\"Foo\" is no mode"));
}

#[test]
fn hostname_of_blanks_is_refused() {
    assert!(errors(&["--hostname-override=   "]).contains("hostnameOverride"));
    assert!(errors(&["--hostname-override=a\nERROR b"]).contains("a\\nerror b"), "quoted on one line");
}

#[test]
fn file_values_act_and_flags_beside_it_do_not() {
    let text = format!(
        "{HEAD}mode: nftables\nclusterCIDR: 10.244.0.0/16\nhostnameOverride: foo\nnftables:\n  masqueradeAll: true\n  masqueradeBit: 5\n  syncPeriod: 10s\n---\nkind: Ignored\n"
    );
    let config = with_file(&text, &["--cluster-cidr=10.0.0.0/8"]).unwrap();
    assert_eq!(config.cluster_cidrs, ["10.244.0.0/16".parse().unwrap()]);
    assert!(config.masquerade_all);
    assert_eq!(config.masquerade_mark, 32);
    assert_eq!(config.sync_period, Duration::from_secs(10));
    assert_eq!(config.node_name, "foo");
    assert_eq!(with_file(&text, &["--hostname-override=  bar "]).unwrap().node_name, "bar");
}

#[test]
fn file_of_another_kind_or_type_is_refused_with_its_path() {
    let text = with_file("apiVersion: v1\nkind: Pod\n", &[]).unwrap_err().to_string();
    assert!(text.contains("config.yaml") && text.contains("kind \"Pod\""), "{text}");
    assert!(with_file(&format!("{HEAD}nodePortAddresses: 7\n"), &[]).is_err());
    assert!(load(&["--config=/nonexistent/x"]).unwrap_err().to_string().contains("/nonexistent/x"));
}

#[test]
fn manifests_win_over_the_api_server() {
    assert_eq!(load(&["--manifests=/m", "--kubeconfig=/k"]).unwrap().source, SourceConfig::Manifests("/m".into()));
}

#[test]
fn the_gate_of_external_ips_acts_from_flag_and_file() {
    assert!(load(&["--feature-gates=NFTablesProxyMode=true"]).unwrap().external_ips_enabled);
    assert!(!load(&["--feature-gates=X=true,AllowServiceExternalIPs=false"]).unwrap().external_ips_enabled);
    let text = format!("{HEAD}featureGates:\n  AllowServiceExternalIPs: false\n");
    assert!(!with_file(&text, &[]).unwrap().external_ips_enabled);
}
