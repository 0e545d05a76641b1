//! Queueing disciplines of an interface that hold frames back, with their counters, as `tc -s`
//! shows them (tc(8)).

use std::process::{Command, Stdio};

use serde::Deserialize;

/// Disciplines that hold frames back to a rate; `overlimits` of the others counts nothing of the
/// kind.
const LIMITING: [&str; 5] = ["tbf", "htb", "hfsc", "cake", "fq"];

/// Queueing discipline, as `tc -s -j qdisc show` prints it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Qdisc {
    pub kind: String,
    #[serde(default)]
    pub handle: String,
    /// Frames that had to wait for the rate, since the discipline was set.
    #[serde(default)]
    pub overlimits: u64,
}

/// Disciplines that limit an interface.
pub(super) fn limiting(interface: &str) -> Result<Vec<Qdisc>, String> {
    let out = Command::new("tc")
        .args(["-s", "-j", "qdisc", "show", "dev", interface])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("tc: {e}"))?;
    if !out.status.success() {
        return Err(format!("tc: {}", String::from_utf8_lossy(&out.stderr).trim()));
    }
    parsed(&out.stdout)
}

fn parsed(text: &[u8]) -> Result<Vec<Qdisc>, String> {
    let mut all: Vec<Qdisc> = serde_json::from_slice(text).map_err(|e| format!("tc: {e}"))?;
    all.retain(|one| LIMITING.contains(&one.kind.as_str()));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames over a rate, in a namespace of their own.
    #[test]
    fn a_real_discipline_counts_what_it_holds_back() {
        use rtvirtio_testkit::{Need, has};
        let needs = [Need::Root, Need::Program("tc"), Need::Program("unshare"), Need::Program("bash")];
        if !has("a_real_discipline_counts_what_it_holds_back", &needs) {
            return;
        }
        let script = "set -e; ip link add a0 type veth peer name b0; ip address add 10.9.9.1/24 dev a0; \
            ip link set a0 up; ip link set b0 up; ip neighbour add 10.9.9.2 lladdr 02:00:00:00:00:01 dev a0; \
            tc qdisc add dev a0 root tbf rate 64kbit burst 2000 latency 1s; \
            for i in 1 2 3 4 5 6; do head -c 1000 /dev/zero > /dev/udp/10.9.9.2/9; done; \
            tc -s -j qdisc show dev a0";
        let out = Command::new("unshare").args(["--net", "bash", "-c", script]).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let all = parsed(&out.stdout).unwrap();
        let [tbf] = &all[..] else { panic!("{all:?}") };
        assert!(tbf.kind == "tbf" && tbf.overlimits > 0, "{tbf:?}");
    }

    #[test]
    fn only_what_limits_is_kept() {
        // As iproute2 6.1 prints it.
        let text = br#"[{"kind":"tbf","handle":"8001:","root":true,"options":{"rate":125000,"burst":1600,"lat":50000},"bytes":4242,"packets":42,"drops":1,"overlimits":17,"requeues":0,"backlog":0,"qlen":0},{"kind":"pfifo_fast","handle":"0:","root":true,"overlimits":0}]"#;
        let tbf = Qdisc { kind: "tbf".to_owned(), handle: "8001:".to_owned(), overlimits: 17 };
        assert_eq!(parsed(text).unwrap(), [tbf]);
        assert!(parsed(b"{}").is_err());
        assert_eq!(parsed(b"[]").unwrap(), []);
        assert!(limiting("no-such-interface0").is_err());
    }
}
