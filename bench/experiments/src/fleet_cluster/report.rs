//! Claims and page of contracts in a cluster.

use crate::experiment::Experiment;

use rtvirtio_learn::statistic::median;

use super::{ClusterData, ClusterVms, NODES, Round};
use crate::claims::Claim;
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

/// A scenario: id, description, and time in a round.
type Scenario = (&'static str, &'static str, fn(&Round) -> f64);

const SCENARIOS: [Scenario; 5] = [
    (
        "failover_p50_s",
        "from the death of a node until the contract of its VM verifies on another, median",
        |r| r.node_dies_s,
    ),
    ("link_cut_p50_s", "the same from a cut link, median", |r| r.link_cut_s),
    (
        "node_added_p50_s",
        "from the start of a node until a contract that had no room verifies on it, median",
        |r| r.node_added_s,
    ),
    (
        "raised_p50_s",
        "from a change of a spec until the kernel has the new budget, median (the agent looks every 10 s)",
        |r| r.raised_s,
    ),
    (
        "refused_p50_s",
        "from an operator's move to a node without room until the cluster has settled, median",
        |r| r.refused_s,
    ),
];

impl ClusterData {
    /// The claims of a result.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let n = self.rounds.len();
        let mut claims: Vec<Claim> = SCENARIOS
            .iter()
            .map(|(id, what, time)| {
                let times: Vec<f64> = self.rounds.iter().map(time).collect();
                let without = *id == "link_cut_p50_s" && self.vms != ClusterVms::Fenced;
                let what = format!("{what}{}", if without { "; without fencing" } else { "" });
                Claim::new(format!("{}.{id}", self.vms.claims()), what, median(times), "s", n)
            })
            .collect();
        let free: Vec<f64> = self.rounds.iter().filter_map(|r| r.guest_before_contract_ms).collect();
        if !free.is_empty() {
            let n = free.len();
            claims.push(Claim::new(
                format!("{}.guest_before_contract_p50_ms", self.vms.claims()),
                "CPU time of the guest before its contract was in force, after the death of a node, median",
                median(free),
                "ms",
                n,
            ));
        }
        let fenced: Vec<bool> = self.rounds.iter().filter_map(|r| r.off_before_start).collect();
        if !fenced.is_empty() {
            let first = fenced.iter().filter(|first| **first).count();
            let twice = self.rounds.iter().filter_map(|r| r.on_two_nodes).sum::<usize>();
            claims.push(
                Claim::new(
                    format!("{}.off_before_start", self.vms.claims()),
                    "cut links after which the node had no process left before its VM ran elsewhere",
                    first as f64 / fenced.len() as f64,
                    "share",
                    fenced.len(),
                )
                .at_least(1.0),
            );
            claims.push(
                Claim::new(
                    format!("{}.on_two_nodes", self.vms.claims()),
                    "looks, every 10 ms from a cut link until the cluster had settled, at which a VM ran on two nodes",
                    twice as f64,
                    "looks",
                    fenced.len(),
                )
                .at_most(0.0),
            );
        }
        let kept = self.rounds.iter().filter(|r| r.refused_without_stop).count();
        let sum = |of: fn(&Round) -> usize| self.rounds.iter().map(of).sum::<usize>() as f64;
        claims.push(
            Claim::new(
                format!("{}.refused_without_stop", self.vms.claims()),
                "moves to a full node, refused with a reason, the VM's process running on",
                kept as f64 / n.max(1) as f64,
                "share",
                n,
            )
            .at_least(1.0),
        );
        claims.push(
            Claim::new(
                format!("{}.beyond_capacity", self.vms.claims()),
                "nodes whose contracts were more than their budget, looked at after every scenario",
                sum(|r| r.beyond_capacity),
                "nodes",
                n,
            )
            .at_most(0.0),
        );
        claims.push(
            Claim::new(
                format!("{}.unverified", self.vms.claims()),
                "VMs that ran after a scenario without a contract that verifies",
                sum(|r| r.unverified),
                "VMs",
                n,
            )
            .at_most(0.0),
        );
        claims
    }
}

impl Experiment for ClusterData {
    const FORM: &str = "rtvirtio-fleet-cluster/1";
    const FILE: &str = "fleet-cluster.json";
    const TITLE: &str = "rtvirtio: contracts in a cluster";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "Pacemaker and Corosync, {NODES} nodes in namespaces of one machine, {}; {} CPUs, Linux {}, {}; {}, {}.",
            self.vms.description(),
            self.host.cpus,
            self.host.kernel,
            self.host.vmm,
            self.command,
            self.generated
        );
        ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, vec![section(self)])
    }
}

fn section(data: &ClusterData) -> Section {
    let row = |(_, what, time): &Scenario| {
        let mut times: Vec<f64> = data.rounds.iter().map(time).collect();
        times.sort_by(f64::total_cmp);
        let text = |t: Option<&f64>| t.map_or_else(String::new, |t| format!("{t:.1}"));
        vec![
            (*what).to_owned(),
            text(times.first()),
            format!("{:.1}", median(times.clone())),
            text(times.last()),
        ]
    };
    let fencing = if data.vms == ClusterVms::Fenced { "on" } else { "off" };
    Section {
        title: format!("Scenarios in a cluster: {}", data.vms.description()),
        text: vec![format!("Seconds. Each round is a new cluster. Fencing is {fencing}.")],
        plots: Vec::new(),
        tables: vec![table(
            "times of scenarios",
            &["scenario", "least", "median", "most"],
            SCENARIOS.iter().map(row).collect(),
        )],
    }
}
