//! Contracts in a real Pacemaker cluster of three nodes: time until all contracts verify again
//! after the loss of a node, a cut link, an operator's move, a new node and a raised contract.

mod overlap;
mod report;
pub mod slow;
mod watch;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::cluster::{BUDGET_US, ContractCluster, NODE_BUDGET_US, PERIOD_US, VmAgent};
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use crate::experiment::{Experiment as _, host_facts};
use crate::saved::Saved as _;

use overlap::Overlap;
use watch::Watch;

/// File name with domains of libvirt by heartbeat's agent.
pub const DOMAINS_FILE: &str = "fleet-cluster-domains.json";
/// File name with domains that start with the contract in force.
pub const PAUSED_FILE: &str = "fleet-cluster-paused.json";
/// File name with VMs as processes and fencing on.
pub const FENCING_FILE: &str = "fleet-cluster-fencing.json";
/// Time limit of a step of a scenario.
const STEP_TIMEOUT: Duration = Duration::from_secs(300);
/// The VMs; two fit on a node.
const VMS: [&str; 4] = ["plc", "hmi", "gate", "log"];
/// `VMS` and a VM that has no room on two nodes.
const ALL: [&str; 5] = ["plc", "hmi", "gate", "log", "cam"];
/// Nodes of the cluster.
const NODES: usize = 3;
/// Budget of a raised contract, us: it still fits next to another on a node.
const RAISED_US: u64 = 1_300;

/// Resource agent that starts the VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ClusterVms {
    /// `ocf:heartbeat:anything`: VMs are processes.
    #[default]
    #[value(help = "Processes")]
    Process,
    /// `ocf:heartbeat:VirtualDomain`: domains of each node's libvirt.
    #[value(help = "Domains")]
    Domain,
    /// `ocf:rtvirtio:VirtualDomain`: domains with the contract in force before the guest starts.
    #[value(help = "Domains that start paused")]
    Paused,
    /// `ocf:heartbeat:anything`, in a cluster with fencing.
    #[value(skip)]
    Fenced,
}

impl ClusterVms {
    /// File name of the result.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Process => ClusterData::FILE,
            Self::Domain => DOMAINS_FILE,
            Self::Paused => PAUSED_FILE,
            Self::Fenced => FENCING_FILE,
        }
    }

    fn is_process(&self) -> bool {
        *self == Self::Process
    }

    fn is_domain(self) -> bool {
        matches!(self, Self::Domain | Self::Paused)
    }

    /// Prefix of the claims' ids.
    fn claims(self) -> &'static str {
        match self {
            Self::Process => "fleet",
            Self::Domain => "fleet.domains",
            Self::Paused => "fleet.paused",
            Self::Fenced => "fleet.fencing",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::Process => "VMs as processes",
            Self::Domain => "domains of libvirt by ocf:heartbeat:VirtualDomain",
            Self::Paused => "domains of libvirt by ocf:rtvirtio:VirtualDomain",
            Self::Fenced => "VMs as processes, with fencing",
        }
    }
}

/// Contents of the result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Resource agent that starts the VMs.
    #[serde(default, skip_serializing_if = "ClusterVms::is_process")]
    pub vms: ClusterVms,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Repetitions of all scenarios.
    pub rounds: Vec<Round>,
}

/// Times and violations of one repetition of all scenarios.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// From `kill -9` of all processes of a node until the contract of its VM verifies elsewhere,
    /// s.
    pub node_dies_s: f64,
    /// From a cut link until the contract of the node's VM verifies elsewhere, s.
    pub link_cut_s: f64,
    /// From the start of a dead node until a contract that had no room verifies on it, s.
    pub node_added_s: f64,
    /// CPU time of the guest before its contract was in force, at the failover after the death of a
    /// node, ms. Only of domains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_before_contract_ms: Option<f64>,
    /// VMs seen running on two nodes while the link was cut, over all checks. Only with fencing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_two_nodes: Option<usize>,
    /// Whether the node behind the cut link had no process left before its VM ran elsewhere. Only
    /// with fencing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub off_before_start: Option<bool>,
    /// From a change of the spec until the kernel has the new budget, s.
    pub raised_s: f64,
    /// From an operator's order until the cluster has finished all resulting transitions, s.
    pub refused_s: f64,
    /// Whether the VM ran on, in the same process, and a reason was published.
    pub refused_without_stop: bool,
    /// Nodes whose contracts exceeded their budget, over all checks.
    pub beyond_capacity: usize,
    /// VMs that ran without a contract that verifies, over all checks after a scenario.
    pub unverified: usize,
}

/// Programs and agents under test.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Path of `rtvirtio-pacemaker`.
    pub program: &'a Path,
    /// Text of the agent `ocf:rtvirtio:VirtualDomain`.
    pub agent: &'static str,
}

impl Parts<'_> {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.program.exists(),
            "{} is missing: build it with `cargo build -p rtvirtio-pacemaker`",
            self.program.display()
        );
        Ok(())
    }
}

/// Host of the measurement.
fn host(device: String) -> HostFacts {
    host_facts(("QEMU, firmware without a system", "tcg"), device)
}

/// Runs the scenarios the given number of times.
///
/// # Errors
/// What does not start, and cancellation.
pub fn measure(
    repeat: usize,
    vms: ClusterVms,
    parts: Parts<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<ClusterData> {
    parts.check()?;
    let mut rounds = Vec::new();
    for i in 0..repeat {
        progress.check_cancelled()?;
        progress.step(&format!("round {} of {repeat}", i + 1));
        rounds.push(round(i, vms, parts, progress).with_context(|| format!("round {}", i + 1))?);
    }
    Ok(ClusterData {
        schema: ClusterData::SCHEMA.to_owned(),
        vms,
        host: host("none: CPU contracts".to_owned()),
        command: match vms {
            ClusterVms::Process => format!("rtvirtio-bench fleet-cluster --repeat {repeat}"),
            ClusterVms::Domain => format!("rtvirtio-bench fleet-cluster --vms domain --repeat {repeat}"),
            ClusterVms::Paused => format!("rtvirtio-bench fleet-cluster --vms paused --repeat {repeat}"),
            ClusterVms::Fenced => format!("rtvirtio-bench fleet-cluster --fencing --repeat {repeat}"),
        },
        generated: generated(),
        rounds,
    })
}

/// Runs all scenarios in a new cluster, so that no round depends on an earlier one.
fn round(number: usize, vms: ClusterVms, parts: Parts<'_>, progress: &dyn Progress) -> anyhow::Result<Round> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-box-").tempdir()?;
    let name = format!("bench-{}-{number}", std::process::id());
    let agent = match vms {
        ClusterVms::Process | ClusterVms::Fenced => VmAgent::Process,
        ClusterVms::Domain => VmAgent::Domain,
        ClusterVms::Paused => VmAgent::Paused(parts.agent),
    };
    let fencing = vms == ClusterVms::Fenced;
    let mut site = ContractCluster::start(dir.path(), &name, parts.program, NODES, agent, fencing)?;
    let mut result = Round::default();
    // Three of four VMs: a node may die and all have room.
    VMS[..3].iter().try_for_each(|vm| site.add_vm(0, vm))?;
    site.set_contracts(&VMS[..3])?;
    let all: Vec<usize> = (0..NODES).collect();
    site.publish(&all)?;
    site.constrain(0)?;
    for vm in &VMS[..3] {
        site.wait_held(vm, &all, STEP_TIMEOUT)?;
    }
    count_violations(&site, &VMS[..3], &mut result);

    progress.step("an operator moves a VM to a node without room");
    refused(&mut site, &mut result)?;
    count_violations(&site, &VMS[..3], &mut result);

    progress.step("a contract is raised");
    let node = site.node_of(0, "plc").context("plc runs nowhere")?;
    let begin = Instant::now();
    site.write_spec("plc", RAISED_US)?;
    wait("the raised budget", || site.budget(node, "plc") == Some(RAISED_US))?;
    result.raised_s = begin.elapsed().as_secs_f64();
    // The kernel has the budget before the agent has read it back.
    site.wait_held("plc", &[node], STEP_TIMEOUT)?;
    count_violations(&site, &VMS[..3], &mut result);
    site.write_spec("plc", BUDGET_US)?;
    wait("the old budget", || site.budget(node, "plc") == Some(BUDGET_US))?;
    site.wait_held("plc", &[node], STEP_TIMEOUT)?;
    count_violations(&site, &VMS[..3], &mut result);

    progress.step("a node dies");
    let dead = site.node_of(0, "plc").context("plc runs nowhere")?;
    let alive: Vec<usize> = all.iter().copied().filter(|n| *n != dead).collect();
    let begin = Instant::now();
    site.cluster.kill_node(dead);
    let watch = vms.is_domain().then(|| Watch::start(&site.cluster, &alive, "plc"));
    site.wait_held("plc", &alive, STEP_TIMEOUT)?;
    result.node_dies_s = begin.elapsed().as_secs_f64();
    result.guest_before_contract_ms = watch.and_then(Watch::before_contract_ms);
    settle(&site, alive[0])?;
    count_violations(&site, &VMS[..3], &mut result);

    progress.step("a node is added");
    // Two nodes hold four contracts; a fifth has no room until the third node is back.
    for vm in [VMS[3], "cam"] {
        site.add_vm(alive[0], vm)?;
    }
    site.set_contracts(&ALL)?;
    site.publish(&alive)?;
    site.constrain(alive[0])?;
    site.wait_held("log", &alive, STEP_TIMEOUT)?;
    settle(&site, alive[0])?;
    ensure!(site.node_of(alive[0], "cam").is_none(), "a contract was placed without room");
    let begin = Instant::now();
    site.start_node(dead)?;
    site.cluster.wait_online(NODES)?;
    site.publish(&[dead])?;
    site.wait_held("cam", &[dead], STEP_TIMEOUT)?;
    result.node_added_s = begin.elapsed().as_secs_f64();
    settle(&site, alive[0])?;
    count_violations(&site, &ALL, &mut result);

    progress.step("a link is cut");
    // The node with one contract: the others have room for none, so the least urgent gives way.
    let cut = site.node_of(alive[0], "plc").context("plc runs nowhere")?;
    let rest: Vec<usize> = all.iter().copied().filter(|n| *n != cut).collect();
    let overlap = fencing.then(|| Overlap::start(&site, NODES, cut, &ALL));
    let begin = Instant::now();
    site.cluster.set_link(cut, false)?;
    site.wait_held("plc", &rest, STEP_TIMEOUT)?;
    result.link_cut_s = begin.elapsed().as_secs_f64();
    settle(&site, rest[0])?;
    if let Some(seen) = overlap.map(Overlap::seen) {
        result.on_two_nodes = Some(seen.on_two_nodes);
        let (off, started) = (site.cluster.switched_off(cut), seen.elsewhere);
        result.off_before_start = Some(matches!((off, started), (Some(off), Some(at)) if off <= at));
    }
    count_violations(&site, &ALL, &mut result);
    Ok(result)
}

/// Fills a node with two contracts, then orders a third VM there, which has to be refused.
fn refused(site: &mut ContractCluster, result: &mut Round) -> anyhow::Result<()> {
    let at =
        |site: &ContractCluster, vm: &str| site.node_of(0, vm).with_context(|| format!("{vm} runs nowhere"));
    let (from, full) = (at(site, "plc")?, at(site, "hmi")?);
    let to = format!("n{}", full + 1);
    let order = |site: &ContractCluster, vm: &str| {
        site.cluster.run(0, &["crm_resource", "--move", "-r", vm, "-N", &to])
    };
    order(site, "gate")?;
    site.wait_held("gate", &[full], STEP_TIMEOUT)?;
    settle(site, 0)?;
    site.publish(&(0..NODES).collect::<Vec<_>>())?;
    let before = site.start_of(from, "plc");
    let begin = Instant::now();
    order(site, "plc")?;
    settle(site, 0)?;
    result.refused_s = begin.elapsed().as_secs_f64();
    let published = site.published(0)?;
    let reason = published
        .iter()
        .any(|p| p["resource"] == "plc" && p["node"] == to.as_str() && p["veto"] == true && p["why"] != "");
    let same = before.is_some() && site.start_of(from, "plc") == before && site.verifies(from, "plc");
    result.refused_without_stop = reason && same;
    for vm in ["plc", "gate"] {
        site.cluster.run(0, &["crm_resource", "--clear", "-r", vm])?;
    }
    settle(site, 0)
}

/// Waits until the cluster has no pending transition.
fn settle(site: &ContractCluster, asked: usize) -> anyhow::Result<()> {
    site.cluster.run(asked, &["crm_resource", "--wait"])?;
    Ok(())
}

fn wait(what: &str, condition: impl Fn() -> bool) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !condition() {
        ensure!(begin.elapsed() < STEP_TIMEOUT, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Counts violations: nodes beyond their budget, and running VMs whose contract does not verify.
fn count_violations(site: &ContractCluster, vms: &[&str], result: &mut Round) {
    let (beyond, unverified) = violations(site, vms);
    result.beyond_capacity += beyond;
    result.unverified += unverified;
}

/// Nodes beyond their budget, and running VMs whose contract does not verify.
fn violations(site: &ContractCluster, vms: &[&str]) -> (usize, usize) {
    let (mut beyond, mut unverified) = (0, 0);
    for node in 0..NODES {
        let budgets: u64 = vms.iter().filter_map(|vm| site.budget(node, vm)).sum();
        // Budgets count in each period, the node's in each second.
        beyond += usize::from(budgets * 1_000_000 / PERIOD_US > NODE_BUDGET_US);
    }
    let asked = (0..NODES).find(|n| site.cluster.run(*n, &["crm_node", "--quorum"]).is_ok_and(|q| q == "1"));
    let Some(asked) = asked else { return (beyond, unverified) };
    for vm in vms {
        if let Some(node) = site.node_of(asked, vm) {
            unverified += usize::from(!site.verifies(node, vm));
        }
    }
    (beyond, unverified)
}
