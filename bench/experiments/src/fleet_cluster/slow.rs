//! The disk of one node becomes slow: its node vetoes contracts with I/O targets, no contract is
//! placed there, an operator's move is refused with the reason; the veto ends when the disk has
//! recovered.
//!
//! The disks are emulated, with the same reads on each. VMs have no guest OS that could read.

use crate::experiment::Experiment;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::LabHost;
use rtvirtio_testbed::cluster::{ContractCluster, NodeDisk, VmAgent};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{NODES, Parts, STEP_TIMEOUT, VMS, host, settle, violations};
use crate::claims::Claim;
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;
use crate::saved::Saved as _;

/// Device profile of each node's emulated disk.
const TWIN: &str = "qlc-nvme";
/// Profile measured on such an emulated disk.
const PROFILE: &str = include_str!("../../../../control/learn/data/qlc-nvme.profile.json");
/// Size of each node's disk.
const SIZE: Bytes = Bytes(64 << 20);
/// Slow disk's service time over the declared one. With the overhead of FUSE and the loop device
/// this is about ten times the measured time.
const SLOW_BY: u32 = 20;
/// Reads per second on each disk; a slow disk still completes them.
const READS_PER_S: u32 = 200;
/// Time with these reads before a disk becomes slow: a judgement takes 1000 requests.
const HEALTHY: Duration = Duration::from_secs(8);
/// Text in the reason of such a veto.
const REASON: &str = "times as long as when it was measured";
/// Interval of the nodes' publications.
const EVERY: &str = "1s";

/// Contents of [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlowData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Slow disk's service time over the declared one.
    pub slow_by: u32,
    /// Reads per second on each disk.
    pub reads_per_s: u32,
    /// Time with these reads before a disk becomes slow, s.
    pub healthy_s: f64,
    /// Repetitions of the scenario.
    pub rounds: Vec<SlowRound>,
}

/// Times and violations of one repetition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlowRound {
    /// From a slow disk until its node vetoes every contract, s.
    pub veto_s: f64,
    /// Published reason of the veto.
    pub why: String,
    /// Vetoes for a slow disk of nodes whose disk is as fast as declared, checked before and while
    /// another is slow.
    pub vetoes_of_healthy: usize,
    /// VMs that started on the node while its disk was slow, although it was the emptiest.
    pub placed_there: usize,
    /// From an operator's order to move a VM there until the cluster has finished all transitions
    /// that follow from it, s.
    pub refused_s: f64,
    /// Whether the VM ran on, in the same process with its contract, and the reason was published.
    pub refused_without_stop: bool,
    /// From a disk that is as fast as before until its node has no veto, s.
    pub recovered_s: f64,
    /// From an operator's order to move a VM to the recovered node until its contract verifies, s.
    pub moved_s: f64,
    /// Nodes whose contracts exceeded their budget, over all checks.
    pub beyond_capacity: usize,
    /// VMs that ran without a contract that verifies, over all checks.
    pub unverified: usize,
}

/// Runs the scenario the given number of times.
///
/// # Errors
/// What does not start, and cancellation.
pub fn measure(
    repeat: usize,
    parts: Parts<'_>,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<SlowData> {
    parts.check()?;
    let mut rounds = Vec::new();
    for i in 0..repeat {
        progress.check_cancelled()?;
        progress.step(&format!("round {} of {repeat}", i + 1));
        rounds.push(round(i, parts, labs, progress).with_context(|| format!("round {}", i + 1))?);
    }
    Ok(SlowData {
        schema: SlowData::SCHEMA.to_owned(),
        host: host(format!("twin {TWIN} (emulated), one for each node")),
        command: format!("rtvirtio-bench fleet-cluster --slow --repeat {repeat}"),
        generated: generated(),
        slow_by: SLOW_BY,
        reads_per_s: READS_PER_S,
        healthy_s: HEALTHY.as_secs_f64(),
        rounds,
    })
}

/// The cluster in which one disk becomes slow.
struct Scenario<'p> {
    site: ContractCluster,
    disks: Vec<NodeDisk>,
    result: SlowRound,
    progress: &'p dyn Progress,
}

fn round(
    number: usize,
    parts: Parts<'_>,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<SlowRound> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-box-").tempdir()?;
    let name = format!("bench-{}-{number}", std::process::id());
    let mut site = ContractCluster::start(dir.path(), &name, parts.program, NODES, VmAgent::Process, false)?;
    site.promise_io();
    let all: Vec<usize> = (0..NODES).collect();
    let disk = |node: &usize| {
        let server = |mount: &Path| {
            let mut command = (labs.twin_server)(TWIN, SIZE, mount);
            command.args(["--slow-by", &SLOW_BY.to_string()]);
            command
        };
        NodeDisk::make(&site.cluster, *node, dir.path(), SIZE, server, PROFILE)
    };
    let disks = all.iter().map(disk).collect::<Result<Vec<_>, _>>()?;
    let mut scenario = Scenario { site, disks, result: SlowRound::default(), progress };
    scenario.play(&all)?;
    Ok(scenario.result)
}

impl Scenario<'_> {
    fn play(&mut self, all: &[usize]) -> anyhow::Result<()> {
        let site = &mut self.site;
        let [first, second, third] = [VMS[0], VMS[1], VMS[2]];
        for vm in [first, second, third] {
            site.add_vm(0, vm)?;
        }
        // The third VM starts when the disk is slow.
        site.cluster.run(0, &target_role(third, "Stopped"))?;
        site.set_contracts(&[first, second, third])?;
        site.publish(all)?;
        site.constrain(0)?;
        let at = [site.wait_held(first, all, STEP_TIMEOUT)?, site.wait_held(second, all, STEP_TIMEOUT)?];
        settle(site, 0)?;
        let slow = all.iter().copied().find(|n| !at.contains(n)).context("every node has a VM")?;
        let _publishers = site.publish_every(all, EVERY)?;
        for disk in &mut self.disks {
            disk.load(READS_PER_S)?;
        }
        std::thread::sleep(HEALTHY);
        let published = self.site.published(0)?;
        self.result.vetoes_of_healthy += vetoes(&published).into_iter().filter(of_slow_disk).count();
        self.count_violations();

        self.progress.step("the disk of a node becomes slow");
        self.disks[slow].set_slow(true)?;
        self.result.veto_s = self.wait_vetoes(slow, 3)?;
        self.site.cluster.run(0, &target_role(third, "Started"))?;
        let on = self.site.wait_held(third, all, STEP_TIMEOUT)?;
        self.result.placed_there += usize::from(on == slow);
        self.refused(at[0], slow)?;
        self.count_violations();

        self.progress.step("the disk is as fast as before");
        self.disks[slow].set_slow(false)?;
        self.result.recovered_s = self.wait_vetoes(slow, 0)?;
        let begin = Instant::now();
        self.order(first, slow)?;
        self.site.wait_held(first, &[slow], STEP_TIMEOUT)?;
        self.result.moved_s = begin.elapsed().as_secs_f64();
        settle(&self.site, 0)?;
        self.count_violations();
        Ok(())
    }

    /// Orders the first VM to the node with the slow disk, which has to be refused.
    fn refused(&mut self, from: usize, slow: usize) -> anyhow::Result<()> {
        let vm = VMS[0];
        settle(&self.site, 0)?;
        let before = self.site.start_of(from, vm);
        let begin = Instant::now();
        self.order(vm, slow)?;
        settle(&self.site, 0)?;
        self.result.refused_s = begin.elapsed().as_secs_f64();
        let published = self.site.published(0)?;
        let all = vetoes(&published);
        let veto = all.iter().find(|p| p["resource"] == vm && p["node"] == node_name(slow).as_str());
        let why = veto.and_then(|p| p["why"].as_str()).unwrap_or_default();
        self.result.why = why.to_owned();
        // A node that two contracts fill vetoes a third, whatever its disk does.
        let elsewhere = all.iter().filter(|p| p["node"] != node_name(slow).as_str());
        self.result.vetoes_of_healthy += elsewhere.filter(|p| of_slow_disk(p)).count();
        let same = before.is_some() && self.site.start_of(from, vm) == before && self.site.verifies(from, vm);
        self.result.refused_without_stop = same && is_of_slow_disk(why);
        // A refused order stands until it is cleared.
        self.site.cluster.run(0, &["crm_resource", "--clear", "-r", vm])?;
        settle(&self.site, 0)
    }

    fn order(&self, vm: &str, to: usize) -> anyhow::Result<()> {
        self.site.cluster.run(0, &["crm_resource", "--move", "-r", vm, "-N", &node_name(to)])?;
        Ok(())
    }

    /// Waits until a node vetoes `n` contracts; returns the time, s.
    fn wait_vetoes(&self, node: usize, n: usize) -> anyhow::Result<f64> {
        let (begin, name) = (Instant::now(), node_name(node));
        loop {
            let published = self.site.published(0)?;
            let there = vetoes(&published).into_iter().filter(|p| p["node"] == name.as_str()).count();
            if there == n {
                return Ok(begin.elapsed().as_secs_f64());
            }
            ensure!(begin.elapsed() < STEP_TIMEOUT, "waited in vain for {n} vetoes of {name}: {published:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn count_violations(&mut self) {
        let (beyond, unverified) = violations(&self.site, &VMS[..3]);
        self.result.beyond_capacity += beyond;
        self.result.unverified += unverified;
    }
}

fn is_of_slow_disk(why: &str) -> bool {
    why.contains(REASON)
}

fn of_slow_disk(veto: &&Value) -> bool {
    veto["why"].as_str().is_some_and(is_of_slow_disk)
}

fn node_name(node: usize) -> String {
    format!("n{}", node + 1)
}

fn target_role<'a>(vm: &'a str, role: &'a str) -> [&'a str; 8] {
    ["crm_resource", "--resource", vm, "--meta", "--set-parameter", "target-role", "-v", role]
}

fn vetoes(published: &[Value]) -> Vec<&Value> {
    published.iter().filter(|p| p["veto"] == true).collect()
}

/// A time of a round: id, description, and accessor.
type Time = (&'static str, String, fn(&SlowRound) -> f64);

impl SlowData {
    fn times(&self) -> [Time; 4] {
        [
            (
                "veto_p50_s",
                format!(
                    "from a disk with {} reads/s that takes {} times as long as declared, after {} s of them as measured, until its node \
                     vetoes every contract with I/O targets, median",
                    self.reads_per_s, self.slow_by, self.healthy_s
                ),
                |r| r.veto_s,
            ),
            (
                "refused_p50_s",
                "from an operator's move to the node with the slow disk until the cluster has settled, median".to_owned(),
                |r| r.refused_s,
            ),
            (
                "recovered_p50_s",
                "from a disk that is as fast as before until its node vetoes nothing, median".to_owned(),
                |r| r.recovered_s,
            ),
            (
                "moved_p50_s",
                "from an operator's move to that node, now, until the contract verifies there, median".to_owned(),
                |r| r.moved_s,
            ),
        ]
    }

    /// The claims of a result.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let n = self.rounds.len();
        let id = |id: &str| format!("fleet.slow.{id}");
        let mut claims: Vec<Claim> = self
            .times()
            .into_iter()
            .map(|(name, what, time)| {
                let times = self.rounds.iter().map(time).collect();
                Claim::new(id(name), what, median(times), "s", n)
            })
            .collect();
        let kept = self.rounds.iter().filter(|r| r.refused_without_stop).count();
        claims.push(
            Claim::new(
                id("refused_without_stop"),
                "moves to the node with the slow disk that were refused with that reason, the VM running on in the same process",
                kept as f64 / n.max(1) as f64,
                "share",
                n,
            )
            .at_least(1.0),
        );
        type Count = (&'static str, &'static str, &'static str, fn(&SlowRound) -> usize);
        let counts: [Count; 4] = [
            (
                "placed_there",
                "VMs that started on the node with the slow disk, the emptiest of all",
                "VMs",
                |r| r.placed_there,
            ),
            ("vetoes_of_healthy", "vetoes for a slow disk where it is as fast as declared", "vetoes", |r| {
                r.vetoes_of_healthy
            }),
            ("beyond_capacity", "nodes whose contracts were more than their budget", "nodes", |r| {
                r.beyond_capacity
            }),
            ("unverified", "VMs that ran without a contract that verifies", "VMs", |r| r.unverified),
        ];
        for (name, what, unit, of) in counts {
            let sum = self.rounds.iter().map(of).sum::<usize>();
            claims.push(Claim::new(id(name), what, sum as f64, unit, n).at_most(0.0));
        }
        claims
    }
}

impl Experiment for SlowData {
    const FORM: &str = "rtvirtio-fleet-cluster-slow/1";
    const FILE: &str = "fleet-cluster-slow.json";
    const TITLE: &str = "rtvirtio: contracts in a cluster";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "A slow disk in a cluster of Pacemaker and Corosync, {NODES} nodes in namespaces of one machine; {} CPUs, Linux {}; disks: {}; {}, {}.",
            self.host.cpus, self.host.kernel, self.host.device, self.command, self.generated
        );
        ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, vec![section(self)])
    }
}

fn section(data: &SlowData) -> Section {
    let row = |(_, what, time): Time| {
        let mut times: Vec<f64> = data.rounds.iter().map(time).collect();
        times.sort_by(f64::total_cmp);
        let text = |t: Option<&f64>| t.map_or_else(String::new, |t| format!("{t:.1}"));
        vec![what, text(times.first()), format!("{:.1}", median(times.clone())), text(times.last())]
    };
    let why = data.rounds.first().map(|r| format!("Published reason: {}", r.why));
    let head = "Seconds. Each round is a new cluster. The twins stand in for drives.".to_owned();
    Section {
        title: "A slow disk in a cluster".to_owned(),
        text: std::iter::once(head).chain(why).collect(),
        plots: Vec::new(),
        tables: vec![table(
            "times of the scenario",
            &["scenario", "least", "median", "most"],
            data.times().into_iter().map(row).collect(),
        )],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_was_stopped_or_placed_there_is_a_claim_not_met() {
        let good = SlowRound { veto_s: 6.0, refused_without_stop: true, ..SlowRound::default() };
        let data = |round: &SlowRound| SlowData {
            schema: SlowData::SCHEMA.to_owned(),
            host: host(TWIN.to_owned()),
            command: String::new(),
            generated: String::new(),
            slow_by: SLOW_BY,
            reads_per_s: READS_PER_S,
            healthy_s: HEALTHY.as_secs_f64(),
            rounds: vec![good.clone(), round.clone()],
        };
        let missed = |round: SlowRound| -> Vec<String> {
            let claims = data(&round).claims();
            claims.into_iter().filter(|c| !c.met).map(|c| c.id).collect()
        };
        assert_eq!(missed(good.clone()), Vec::<String>::new());
        assert_eq!(
            missed(SlowRound { refused_without_stop: false, placed_there: 1, ..good.clone() }),
            ["fleet.slow.refused_without_stop", "fleet.slow.placed_there"]
        );
    }
}
