//! A spec's flows on the I/O domain's scheduler and a link, under virtual time.

use std::collections::{BTreeMap, VecDeque};

use rtvirtio_domain_config::{CATCH_UP, LINK_WINDOW};
use rtvirtio_sched::{ConfigError, Idx, IndexVec, Next, Op, Priority, Request, Scheduler, VirtualLink, VmId};
use rtvirtio_spec::Direction;
use rtvirtio_stats::{Latencies, Random};
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::Serialize;

use crate::network::NetworkPlan;
use crate::simulate::{DRIFT, RATE_SLACK, Traffic};

/// Frames that a flooding VM has in its queue.
const FLOOD: usize = 16;
/// Largest latency that the histograms distinguish: one hour.
const MAX_LATENCY: Nanos = Nanos(3_600_000_000_000);

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlowOutcome {
    /// VM that sends the flow.
    pub vm: String,
    /// Name of the flow in its VM.
    pub flow: String,
    /// Number of frames that left.
    pub n: u64,
    /// Frames per second that the spec declares.
    pub declared_rate: Iops,
    /// Measured frames per second.
    pub rate: Iops,
    /// Median time from the VM's queue until the frame has left.
    pub p50: Nanos,
    /// 99.99th percentile; the maximum where there are fewer than 10 000.
    pub p9999: Nanos,
    /// Longest latency of a frame.
    pub longest: Nanos,
    /// The plan's worst-case latency.
    pub bound: Option<Nanos>,
    /// Latency of its target.
    pub target: Option<Nanos>,
    /// Whether tail and rate meet the target; `None` without one, and for frames to a VM, which are
    /// not simulated.
    pub met: Option<bool>,
}

struct Source {
    flow: usize,
    port: VmId,
    len: u64,
    priority: Priority,
    count: u32,
    period: Nanos,
    next: Nanos,
    hist: Latencies,
    late: u64,
}

#[derive(Clone, Copy)]
struct Frame {
    source: usize,
    due: Nanos,
}

/// Flows of one network.
pub struct NetworkSimulation<'p> {
    plan: &'p NetworkPlan,
    scheduler: Scheduler,
    link: VirtualLink,
    /// Virtual time at which the wire has sent all frames given to it.
    wire_free_at: Nanos,
    sources: Vec<Source>,
    /// Ports that send the largest frames all the time.
    floods: Vec<VmId>,
    /// Frames in the VMs' queues, not yet submitted to the scheduler, by port.
    waiting: IndexVec<VmId, VecDeque<Frame>>,
    /// Frames of sources in the scheduler, by tag.
    taken: BTreeMap<u64, Frame>,
    tag: u64,
    now: Nanos,
}

impl<'p> NetworkSimulation<'p> {
    /// With [`Traffic::Worst`] the frames of a stall come at once, and every VM without a
    /// reservation floods.
    pub fn new(plan: &'p NetworkPlan, traffic: Traffic, seed: u64) -> Result<Self, ConfigError> {
        let mut random = Random::new(seed);
        let sources = plan
            .flows
            .iter()
            .enumerate()
            .filter(|(_, flow)| flow.direction == Direction::Tx)
            .map(|(i, flow)| {
                let count = match traffic {
                    Traffic::Declared => flow.burst,
                    Traffic::Worst => {
                        flow.burst + (flow.rate.0 * plan.config.stall.as_secs_f64()).ceil() as u32
                    }
                };
                let drift = 1.0 + DRIFT * (2.0 * random.unit() - 1.0);
                let period = Nanos::from_secs_f64(drift * f64::from(count) / flow.rate.0);
                Source {
                    flow: i,
                    port: VmId::from_usize(flow.port),
                    len: flow.frame.0,
                    priority: if flow.is_urgent { Priority::URGENT } else { Priority::NORMAL },
                    count,
                    period,
                    next: Nanos((random.unit() * period.0 as f64) as u64),
                    hist: Latencies::with_range(MAX_LATENCY, 3),
                    late: 0,
                }
            })
            .collect();
        let unreserved =
            |(_, port): &(usize, &crate::PortPlan)| port.reserve.is_none() && port.urgent.is_none();
        let floods = plan.ports.iter().enumerate().filter(unreserved).map(|(i, _)| VmId::from_usize(i));
        Ok(Self {
            scheduler: Scheduler::new(&plan.config.tx_sched())?,
            link: VirtualLink::new(LINK_WINDOW, CATCH_UP),
            wire_free_at: Nanos(0),
            sources,
            floods: if traffic == Traffic::Worst { floods.collect() } else { Vec::new() },
            waiting: plan.ports.iter().map(|_| VecDeque::new()).collect(),
            taken: BTreeMap::new(),
            tag: 0,
            now: Nanos(0),
            plan,
        })
    }

    /// Advances virtual time to `end`.
    pub fn run(&mut self, end: Nanos) {
        while self.now < end {
            self.arrive();
            self.submit();
            while let Some((at, piece)) = self.link.pop_completed(self.now) {
                // The piece was submitted by this scheduler.
                let _ = self.scheduler.complete(at, &piece);
            }
            let wake = match self.scheduler.next(self.now) {
                Next::Piece(piece) => {
                    self.link.submit(self.now, piece);
                    // Frames beyond the link's rate (catching up) wait in the interface's queue.
                    self.wire_free_at = Nanos(self.wire_free_at.max(self.now).0 + piece.cost);
                    let done = self.wire_free_at;
                    if let Some(frame) = self.taken.remove(&piece.tag) {
                        self.record(frame, done);
                    }
                    continue;
                }
                Next::Wait(at) => at,
                Next::Full | Next::Idle => Nanos(u64::MAX),
            };
            let arrival = self.sources.iter().map(|s| s.next).min().unwrap_or(end);
            let completion = self.link.next_completion().unwrap_or(Nanos(u64::MAX));
            self.now = wake.min(completion).min(arrival).max(Nanos(self.now.0 + 1)).min(end);
        }
    }

    fn arrive(&mut self) {
        for (i, source) in self.sources.iter_mut().enumerate() {
            while source.next <= self.now {
                for _ in 0..source.count {
                    self.waiting[source.port].push_back(Frame { source: i, due: source.next });
                }
                source.next.0 += source.period.0.max(1);
            }
        }
    }

    /// Submits frames until the scheduler accepts no more.
    fn submit(&mut self) {
        for port in self.waiting.indices() {
            while let Some(frame) = self.waiting[port].front().copied() {
                let source = &self.sources[frame.source];
                let (len, priority) = (source.len, source.priority);
                if self.push(port, len, priority).is_none() {
                    break;
                }
                self.taken.insert(self.tag, frame);
                self.waiting[port].pop_front();
            }
        }
        for i in 0..self.floods.len() {
            let port = self.floods[i];
            let largest = self.plan.config.largest_frame();
            while self.scheduler.outstanding(port) < FLOOD {
                if self.push(port, largest, Priority::NORMAL).is_none() {
                    break;
                }
            }
        }
    }

    fn push(&mut self, port: VmId, len: u64, priority: Priority) -> Option<()> {
        let tag = self.tag + 1;
        let request = Request { tag, op: Op::Write, len, priority, arrival: self.now };
        self.scheduler.submit(port, request).ok()?;
        self.tag = tag;
        Some(())
    }

    fn record(&mut self, frame: Frame, done: Nanos) {
        let source = &mut self.sources[frame.source];
        let took = Nanos(done.0 - frame.due.0);
        source.hist.record(took, 1);
        let target = self.plan.flows[source.flow].target;
        source.late += u64::from(target.is_some_and(|target| took > target.latency));
    }

    /// Frames that left so far.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.sources.iter().map(|s| s.hist.n()).sum()
    }

    /// Outcome of each flow from VMs, in the spec's order.
    #[must_use]
    pub fn outcomes(&self) -> Vec<FlowOutcome> {
        let seconds = self.now.as_secs_f64().max(1e-9);
        let outcome = |source: &Source| {
            let flow = &self.plan.flows[source.flow];
            let (n, hist) = (source.hist.n(), &source.hist);
            let rate = n as f64 / seconds;
            let met = flow.target.map(|target| {
                let allowed = (n as f64 * target.percentile.exceedance()).floor() as u64;
                n > 0 && source.late <= allowed && rate >= RATE_SLACK * flow.rate.0
            });
            FlowOutcome {
                vm: flow.vm.clone(),
                flow: flow.flow.clone(),
                n,
                declared_rate: flow.rate,
                rate: Iops(rate),
                p50: hist.at(Percentile(50.0)),
                p9999: hist.tail(),
                longest: hist.max(),
                bound: flow.bound,
                target: flow.target.map(|target| target.latency),
                met,
            }
        };
        self.sources.iter().map(outcome).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rtvirtio_spec::HostSpec;

    use super::*;
    use crate::plan_networks;

    #[test]
    fn planned_flows_stay_within_their_bounds_beside_floods() {
        let vm = |i: usize, flow: &str| {
            format!(
                "[[vm]]\nname = \"v{i}\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
                 [[vm.nic]]\nmac = \"52:54:00:00:00:0{i}\"\ntap = \"tap{i}\"\n{flow}\n"
            )
        };
        let flow =
            |name: &str, more: &str| format!("[[vm.flow]]\nname = \"{name}\"\ndirection = \"tx\"\n{more}\n");
        let sv = flow("sv", "frame = \"140B\"\nrate = \"4000/s\"\npcp = 4\ntarget = { latency = \"2ms\" }");
        let log =
            flow("log", "frame = \"1000B\"\nrate = \"1000/s\"\nburst = 4\ntarget = { latency = \"8ms\" }");
        let text = "[device]\ntwin = \"qlc-nvme\"\n[[network]]\nlink = \"100Mbit/s\"\n".to_owned()
            + &vm(0, &(sv + &log))
            + &vm(1, "")
            + &vm(2, "");
        let host = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
        let plan = plan_networks(&host, Path::new("/run")).remove(0);
        assert!(plan.feasible, "{plan:#?}");
        for (traffic, seed) in [(Traffic::Worst, 1), (Traffic::Worst, 2), (Traffic::Declared, 3)] {
            let mut simulation = NetworkSimulation::new(&plan, traffic, seed).unwrap();
            simulation.run(Nanos::from_millis(3_000));
            for flow in simulation.outcomes() {
                assert_eq!(flow.met, Some(true), "{flow:?}");
                assert!(flow.n > 2_900 && flow.longest <= flow.bound.unwrap(), "{flow:?}");
            }
        }
    }
}
