//! Placements of VMs on the CPUs of random hosts, against the rules and against all placements.
//!
//! Hosts are drawn from a seed, VMs come and end and get vCPUs, and after each step all placements
//! are judged by `rules`, which is written from the guide and not from the placer. On small hosts
//! `exact` tries every placement.

mod exact;
mod hosts;
mod rules;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use rtvirtio_cores::{Host, Placement, Request, Use};
use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_stats::Random;
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::experiment::{Experiment, from_one, host_facts};
use crate::report::ExperimentReport;
use crate::saved::Saved as _;
use exact::{Order, best, order};
use hosts::{Asked, HostCase, Size, asked, host, regular};
use rules::{Vm, broken};

pub use rules::Rule;

/// Most steps on a host: VMs that come, end, or get a vCPU.
const STEPS: usize = 10;
/// Hosts between two looks whether the work is to stop.
const PIECE: usize = 50;
/// VMs of which the time is measured, on 256 CPUs.
const VMS: usize = 64;

/// Options of the experiment.
#[derive(Args, Clone, Copy, Debug)]
pub struct CoresOptions {
    /// Random hosts.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = from_one())]
    pub hosts: usize,
    /// Repetitions of each time.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = from_one())]
    pub repeat: usize,
    /// Seed of hosts and VMs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// Placements with their conditions, as saved in
/// [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoresData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Seed of hosts and VMs.
    pub seed: u64,
    /// Number of random hosts.
    pub hosts: usize,
    /// Outcomes on them.
    pub outcomes: Outcomes,
    /// Times to place 64 VMs on 256 CPUs.
    pub seconds: Seconds,
}

/// Outcomes on random hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcomes {
    /// VMs placed, and vCPUs added.
    pub placed: usize,
    /// VMs and vCPUs refused.
    pub refused: usize,
    /// Rules broken, each with how often. A host is left at the first.
    pub broken: BTreeMap<Rule, usize>,
    /// VMs of which not all sets of nodes or domains were tried.
    pub bounded: usize,
    /// Largest distance from the fewest nodes and domains that was said of one.
    pub beyond: usize,
    /// VMs on small hosts.
    pub small: Small,
}

/// VMs on small hosts, whose placements were all tried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Small {
    /// VMs that came.
    pub vms: usize,
    /// VMs for which there is a placement.
    pub fit: usize,
    /// VMs refused although there is one.
    pub refused_wrongly: usize,
    /// VMs with more nodes or domains than the best placement, by more than was said.
    pub farther: usize,
    /// VMs on as few nodes and domains as the best placement, and on slower CPUs.
    pub slower: usize,
}

impl Small {
    /// Counts a VM by the best of all placements, and by its own with the distance that was said.
    fn count(&mut self, best: Option<Order>, found: Option<(Order, usize)>) {
        self.vms += 1;
        let Some(best) = best else { return };
        self.fit += 1;
        let Some((found, beyond)) = found else {
            self.refused_wrongly += 1;
            return;
        };
        let (domains, nodes) = (found.domains.saturating_sub(beyond), found.nodes.saturating_sub(beyond));
        let are_fewest = (found.nodes, found.domains) == (best.nodes, best.domains);
        // Placements on more nodes may have fewer domains than those on the fewest.
        let is_farther = nodes > best.nodes || (found.nodes == best.nodes && domains > best.domains);
        self.farther += usize::from(is_farther);
        self.slower += usize::from(are_fewest && found.speed > best.speed);
    }
}

/// Times to place 64 VMs on 256 CPUs, s, one for each repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seconds {
    /// VMs with three CPUs of their own and two other threads each, which fill the host.
    pub whole: Vec<f64>,
    /// VMs of this kind and VMs that share their CPUs, by turns.
    pub mixed: Vec<f64>,
}

impl Seconds {
    /// Median of the slower set.
    fn slower(&self) -> (f64, usize) {
        let of = |times: &[f64]| (median(times.to_vec()), times.len());
        let (whole, mixed) = (of(&self.whole), of(&self.mixed));
        if mixed.0 > whole.0 { mixed } else { whole }
    }
}

/// Draws hosts, places VMs on them, and takes the time of a large one.
///
/// # Errors
/// Cancellation, and CPUs or VMs that the experiment draws and the placer does not know as such.
pub fn measure(options: &CoresOptions, progress: &dyn Progress) -> anyhow::Result<CoresData> {
    let mut random = Random::new(options.seed);
    let mut outcomes = Outcomes::default();
    for number in 0..options.hosts {
        if number % PIECE == 0 {
            progress.check_cancelled()?;
        }
        let size = Size::of_host(number);
        run_host(size, host(size, &mut random), &mut random, &mut outcomes)
            .with_context(|| format!("host {number} of seed {}", options.seed))?;
    }
    let (mut whole, mut mixed) = (Vec::new(), Vec::new());
    for _ in 0..options.repeat {
        progress.check_cancelled()?;
        whole.push(time_of(&|_| own_cpus())?);
        mixed.push(time_of(&|vm| if vm % 2 == 0 { own_cpus() } else { shared_cpus() })?);
    }
    let facts = host_facts(("none", "none"), "none: hosts are drawn");
    let CoresOptions { hosts, repeat, seed } = *options;
    Ok(CoresData {
        schema: CoresData::SCHEMA.to_owned(),
        host: facts,
        command: format!("rtvirtio-bench cores --hosts {hosts} --repeat {repeat} --seed {seed}"),
        generated: generated(),
        seed,
        hosts,
        outcomes,
        seconds: Seconds { whole, mixed },
    })
}

fn own_cpus() -> Request {
    Request { vcpus: 3, each: Use::Whole, service: 2, service_share: 100, node: None }
}

fn shared_cpus() -> Request {
    Request { vcpus: 2, each: Use::Part(400), service: 1, ..own_cpus() }
}

/// Time to place 64 VMs on 2 nodes of 8 caches of 8 cores of 2 CPUs, s.
fn time_of(request: &dyn Fn(usize) -> Request) -> anyhow::Result<f64> {
    let mut host = Host::new(regular([2, 8, 8, 2], false), 950)?;
    let begin = Instant::now();
    for vm in 0..VMS {
        let placement = host.place(&request(vm)).with_context(|| format!("VM {vm} of {VMS}"))?;
        host.take(&placement);
    }
    Ok(begin.elapsed().as_secs_f64())
}

/// A host with the VMs that have CPUs of it.
struct Running {
    size: Size,
    case: HostCase,
    host: Host,
    vms: Vec<(Vm, Placement)>,
}

/// VMs come to a host, end, and get vCPUs; all that is on it is judged after each step.
fn run_host(size: Size, case: HostCase, random: &mut Random, outcomes: &mut Outcomes) -> anyhow::Result<()> {
    let empty = case.host()?;
    let mut running = Running { size, host: empty.clone(), case, vms: Vec::new() };
    for _ in 0..1 + random.below(STEPS) {
        let at = random.below(running.vms.len().max(1));
        let step = if running.vms.is_empty() { 2 } else { random.below(6) };
        let said = match step {
            0 => {
                running.end(at);
                None
            }
            1 => running.grow(at, outcomes),
            _ => running.come(random, outcomes),
        };
        let vms: Vec<Vm> = running.vms.iter().map(|(vm, _)| vm.clone()).collect();
        let mut found = broken(&running.case, &vms);
        found.extend(said);
        if !found.is_empty() {
            found.into_iter().for_each(|rule| *outcomes.broken.entry(rule).or_default() += 1);
            return Ok(());
        }
    }
    while !running.vms.is_empty() {
        running.end(0);
    }
    running.host.only(&running.case.ids());
    if running.host != empty {
        *outcomes.broken.entry(Rule::Returned).or_default() += 1;
    }
    Ok(())
}

impl Running {
    /// The VM at this position ends.
    fn end(&mut self, at: usize) {
        let (_, placement) = self.vms.swap_remove(at);
        self.host.release(&placement);
    }

    /// Allows the VM that comes next, or gets a vCPU, its CPUs alone.
    fn allow(&mut self, asked: &Asked) {
        let all = self.case.ids();
        self.host.only(asked.allowed.as_ref().unwrap_or(&all));
    }

    /// A random VM comes. A rule of the placement's own figures that is broken is returned.
    fn come(&mut self, random: &mut Random, outcomes: &mut Outcomes) -> Option<Rule> {
        let asked = asked(self.size, &self.case, random);
        self.allow(&asked);
        let answer = self.host.place(&asked.request).ok();
        let vm = |placement: &Placement| Vm {
            asked: asked.clone(),
            vcpus: placement.vcpus.clone(),
            service: placement.service.clone(),
        };
        if self.size == Size::Small {
            let others: Vec<Vm> = self.vms.iter().map(|(vm, _)| vm.clone()).collect();
            let found = answer.as_ref().map(|one| (order(&self.case, &vm(one)), one.beyond));
            outcomes.small.count(best(&self.case, &others, &asked), found);
        }
        let Some(placement) = answer else {
            outcomes.refused += 1;
            return None;
        };
        outcomes.bounded += usize::from(placement.beyond > 0);
        outcomes.beyond = outcomes.beyond.max(placement.beyond);
        let vm = vm(&placement);
        self.take(vm, placement, outcomes)
    }

    /// The VM at this position gets a vCPU. A rule of the placement's own figures that is broken is
    /// returned.
    fn grow(&mut self, at: usize, outcomes: &mut Outcomes) -> Option<Rule> {
        let (mut vm, had) = self.vms.get(at).cloned()?;
        self.allow(&vm.asked);
        let Ok(more) = self.host.place_more(&had, 1) else {
            outcomes.refused += 1;
            return None;
        };
        let stay = more.vcpus.starts_with(&had.vcpus) && more.service == had.service;
        self.end(at);
        vm.asked.request.vcpus += 1;
        (vm.vcpus, vm.service) = (more.vcpus.clone(), more.service.clone());
        self.take(vm, more, outcomes).or((!stay).then_some(Rule::Moved))
    }

    fn take(&mut self, vm: Vm, placement: Placement, outcomes: &mut Outcomes) -> Option<Rule> {
        let order = order(&self.case, &vm);
        let is_so = (placement.nodes, placement.domains) == (order.nodes, order.domains);
        self.host.take(&placement);
        self.vms.push((vm, placement));
        outcomes.placed += 1;
        (!is_so).then_some(Rule::Said)
    }
}

impl CoresData {
    /// The claims of a result.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let Outcomes { placed, ref broken, bounded, beyond, small, .. } = self.outcomes;
        let share = |n: usize, of: usize| n as f64 / of.max(1) as f64;
        let placed_small = small.fit - small.refused_wrongly.min(small.fit);
        let of_small = |id: &str, what: &str, n: usize| {
            Claim::new(id, what, share(n, placed_small), "share", placed_small)
        };
        let (seconds, n) = self.seconds.slower();
        let count: usize = broken.values().sum();
        vec![
            Claim::new("cores.violations", "rules broken by placements", count as f64, "rules", placed)
                .at_most(0.0),
            Claim::new(
                "cores.refused_wrongly",
                "small cases that fit, refused",
                share(small.refused_wrongly, small.fit),
                "share",
                small.fit,
            )
            .at_most(0.01),
            Claim::new("cores.seconds", "64 VMs placed on 256 CPUs, median", seconds, "s", n).at_most(0.1),
            of_small(
                "cores.farther",
                "small cases with more nodes or domains than the fewest, by more than was said",
                small.farther,
            ),
            of_small(
                "cores.slower",
                "small cases on slower CPUs than the best placement with as few nodes and domains",
                small.slower,
            ),
            Claim::new(
                "cores.bounded",
                "VMs of which not all sets of nodes or domains were tried",
                share(bounded, placed),
                "share",
                placed,
            ),
            Claim::new(
                "cores.beyond",
                "largest number of nodes or domains that is said to be more than the fewest at most",
                beyond as f64,
                "domains",
                placed,
            ),
        ]
    }
}

impl Experiment for CoresData {
    const FORM: &str = "rtvirtio-cores/1";
    const FILE: &str = "cores.json";
    const TITLE: &str = "rtvirtio: CPUs for VMs";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let Outcomes { placed, refused, ref broken, small, .. } = self.outcomes;
        let rules: Vec<String> = broken.iter().map(|(rule, n)| format!("{rule:?} {n}")).collect();
        let rules = if rules.is_empty() { "none".to_owned() } else { rules.join(", ") };
        let lead = format!(
            "{} random hosts, seed {}: {placed} VMs and vCPUs placed, {refused} refused; {} of {} VMs on \
             small hosts fit; rules broken: {rules}. Linux {}; {}, {}.",
            self.hosts, self.seed, small.fit, small.vms, self.host.kernel, self.command, self.generated
        );
        ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, Vec::new())
    }
}

#[cfg(test)]
mod tests;
