//! CPUs for the threads of VMs with `cores`, next to those that other VMs have.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::append;
use rtvirtio_cores::{Cpu, Host, Placement, Refused, Request, Use};
use rtvirtio_cpu::{Backend, Contract, Cores, Probe, Settings, choose as mechanism};
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_kernel::{ProcessId, Root, cpuset, pinned_cpus, process, topology, unless_gone};
use rtvirtio_vmm::machines::Vmm;
use rtvirtio_vmm::{Role, Thread};

use super::{Contracted, InForce};
use crate::error::{Context as _, Result, bail};
use crate::pieces::{Key, key};

/// Thousandths of a CPU.
const WHOLE: f64 = 1000.0;
/// User id of root.
const ROOT: u32 = 0;
/// Note where another program than `rtvirtio apply` sets a VM's contract.
pub(crate) const FAIR_SERVER_STAYS: &str = "the fair server of its vCPUs' CPUs is left as it is: `rtvirtio apply` alone \
    heeds `fair_server = \"off\"`";

/// A VM whose threads are to have CPUs.
pub(super) struct CoresAsk<'a> {
    vm: &'a str,
    wanted: &'a rtvirtio_spec::Cores,
    contract: Contract,
    backend: Backend,
    threads: &'a [Thread],
}

impl<'a> CoresAsk<'a> {
    /// `None` where the spec wants no CPUs, or has them as a partition.
    pub(super) fn from_contract(one: &'a Contracted, threads: &'a [Thread]) -> Option<Self> {
        let wanted = one.cores.as_ref().filter(|cores| !cores.partition)?;
        Some(Self { vm: &one.vm, wanted, contract: one.contract, backend: one.backend, threads })
    }

    /// Threads that run vCPUs, each by the first of its vCPUs.
    fn vcpus(&self) -> Vec<u32> {
        let first = |t: &Thread| if let Role::Vcpu(all) = &t.role { all.first().copied() } else { None };
        let all: BTreeSet<u32> = self.threads.iter().filter_map(first).collect();
        all.into_iter().collect()
    }

    /// CPUs that all of its threads may be given, of those that the spec wants.
    fn may_use(&self, root: &Root) -> Result<BTreeSet<u32>> {
        let groups: BTreeMap<_, _> =
            self.threads.iter().map(|t| (t.cgroups.iter().map(|m| &m.path).collect::<Vec<_>>(), t)).collect();
        let mut common: Option<BTreeSet<u32>> = None;
        for thread in groups.into_values() {
            let of = cpuset(root, &thread.cgroups)?;
            let rest = match &common {
                Some(common) => common.intersection(&of).copied().collect(),
                None => of,
            };
            if rest.is_empty() {
                bail!(
                    Infeasible,
                    "{}: no CPUs for its threads: those of {} (thread {}) may use none of the CPUs of the others, by their cpusets \
                     (libvirt: `emulatorpin`, `vcpupin`)",
                    self.vm,
                    thread.role,
                    thread.tid
                );
            }
            common = Some(rest);
        }
        let mut common = common.unwrap_or_default();
        common.retain(|cpu| self.wanted.cpus.as_ref().is_none_or(|only| only.contains(cpu)));
        Ok(common)
    }

    /// Thousandths of a CPU that the contract takes of each.
    fn share(&self) -> u32 {
        (self.contract.share().0 * WHOLE).ceil().clamp(1.0, WHOLE) as u32
    }

    /// Requests in the order in which they are tried: a CPU for the main loop and for each thread
    /// that serves disks or cards, one for all of them, and none. On a CPU of one of its vCPUs a
    /// thread has the budget that the VM has there already.
    fn requests(&self) -> Vec<Request> {
        let serves = |t: &&Thread| matches!(t.role, Role::IoThread(_) | Role::Vhost);
        let many = 1 + self.threads.iter().filter(serves).count();
        let request = |service: usize| Request {
            vcpus: u32::try_from(self.vcpus().len()).unwrap_or(u32::MAX),
            each: if self.wanted.whole { Use::Whole } else { Use::Part(self.share()) },
            service: u32::try_from(service).unwrap_or(u32::MAX),
            service_share: self.share(),
            node: None,
        };
        BTreeSet::from([Reverse(many), Reverse(1), Reverse(0)]).into_iter().map(|n| request(n.0)).collect()
    }
}

/// The host's CPUs, and what is taken of them.
struct Taken {
    host: Host,
    /// CPUs that take whole vCPUs only.
    isolated: BTreeSet<u32>,
    /// CPUs to which vCPUs of other VMMs are pinned, each with the process.
    pinned: BTreeMap<u32, u32>,
}

impl Taken {
    /// The host as contracts of these mechanisms find it: taken are the CPUs of the contracts in
    /// force, `others`, and those to which vCPUs of VMMs other than the processes `own` are pinned,
    /// where these VMMs belong to root or to the user of a VMM with CPUs.
    fn find(
        root: &Root,
        probe: &Probe,
        backends: impl Iterator<Item = Backend>,
        own: BTreeSet<u32>,
        others: &[(InForce, Vec<u32>)],
    ) -> Result<Self> {
        let limit = |backend| mechanism(probe, Some(backend), false).map(|f| f.grant.limit.0);
        let granted = backends.filter_map(limit).fold(1.0, f64::min);
        let cpus = topology(root).context("the host's CPUs are not known")?;
        let isolated: BTreeSet<u32> = cpus.iter().filter(|cpu| cpu.isolated).map(|cpu| cpu.id).collect();
        let online: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.id).collect();
        let mut host = match Host::new(cpus, (granted * WHOLE) as u32) {
            Ok(host) => host,
            Err(e) => bail!(System, "no CPUs can be chosen on this host: {e}"),
        };
        let placed = || others.iter().filter_map(|(of, pids)| Some((of.cores.as_ref()?, pids)));
        placed().for_each(|(cores, _)| take(&mut host, cores));
        // Also of partitions that are to be made.
        let apart = others.iter().filter_map(|(of, _)| of.partition.as_ref());
        apart.flat_map(|partition| &partition.cpus).for_each(|cpu| host.fill(*cpu));
        let known: BTreeSet<u32> =
            own.into_iter().chain(placed().flat_map(|(_, pids)| pids).copied()).collect();
        // Any user may start a program of a VMM's name and pin its threads.
        let mut users = BTreeSet::from([ROOT]);
        for pid in &known {
            if Vmm::of_process(root, *pid)?.is_some() {
                users.extend(unless_gone(process::user(root, *pid))?);
            }
        }
        let mut pinned = BTreeMap::new();
        for pid in process::pids(root)?.into_iter().filter(|pid| !known.contains(pid)) {
            // Any program may name its threads as a VMM does.
            let is_vmm = Vmm::of_process(root, pid)?.is_some();
            let counts = |user: u32| users.contains(&user);
            if !is_vmm || !unless_gone(process::user(root, pid))?.is_some_and(counts) {
                continue;
            }
            let of = pinned_cpus(root, pid, &online)?;
            of.others.iter().for_each(|cpu| host.touch(*cpu));
            pinned.extend(of.vcpus.into_iter().map(|cpu| (cpu, pid)));
        }
        pinned.keys().for_each(|cpu| host.fill(*cpu));
        Ok(Self { host, isolated, pinned })
    }
}

/// The CPUs of a VM whose contract is in force, with one more for each of these threads that runs a
/// vCPU and has none, next to those of `others`, the contracts in force; and the threads for which
/// none is left, each with the reason. `own` are the VM's processes.
///
/// # Errors
/// When it is not known what is taken.
pub(crate) fn with_hotplugged_vcpus(
    root: &Root,
    probe: &Probe,
    of: (&Cores, Backend),
    threads: &[Thread],
    own: BTreeSet<u32>,
    others: &[(InForce, Vec<u32>)],
) -> Result<(Cores, Vec<(Key, String)>)> {
    let (mut cores, mut without) = (of.0.clone(), Vec::new());
    let Taken { mut host, .. } = Taken::find(root, probe, std::iter::once(of.1), own, others)?;
    host.take(&cores.placement);
    let mut threads: Vec<&Thread> = threads.iter().collect();
    threads.sort_by_key(|thread| cores.lacking(thread));
    for thread in threads {
        let Some(vcpu) = cores.lacking(thread) else { continue };
        let mut may_use = cpuset(root, &thread.cgroups)?;
        may_use.retain(|cpu| cores.among.as_ref().is_none_or(|among| among.contains(cpu)));
        host.only(&may_use);
        match host.place_more(&cores.placement, 1) {
            Ok(placement) => {
                host.release(&cores.placement);
                host.take(&placement);
                cores = cores.with_hotplugged(vcpu, placement);
                cores.siblings.extend(siblings(&host, &cores.placement));
            }
            Err(refused) => {
                let why = format!("{refused}; it may use CPUs {}", cpu_ranges(&may_use));
                without.push((key(thread), why));
            }
        }
    }
    Ok((cores, without))
}

/// CPUs for each of these VMs, next to those of the contracts in force, `others`, each with the
/// processes of its VM, and to CPUs that vCPUs of other VMMs are pinned to, without the processes
/// `leaving`, whose contracts these replace. Large VMs are placed first.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) where they do not fit, with what would.
pub(super) fn choose(
    root: &Root,
    probe: &Probe,
    asks: &[CoresAsk<'_>],
    others: &[(InForce, Vec<u32>)],
    leaving: &[ProcessId],
) -> Result<BTreeMap<String, Cores>> {
    if asks.is_empty() {
        return Ok(BTreeMap::new());
    }
    let own = asks.iter().flat_map(|ask| ask.threads).map(|t| t.pid).chain(leaving.iter().map(|of| of.pid));
    let Taken { mut host, isolated, pinned } =
        Taken::find(root, probe, asks.iter().map(|ask| ask.backend), own.collect(), others)?;
    let mut order: Vec<&CoresAsk<'_>> = asks.iter().collect();
    order.sort_by_key(|ask| (!ask.wanted.whole, Reverse(ask.vcpus().len()), Reverse(ask.share())));
    let mut chosen = BTreeMap::new();
    for ask in order {
        if ask.vcpus().is_empty() {
            bail!(
                Argument,
                "{}: no CPUs for its threads: which of them runs which vCPU is not known; name its monitor (`qmp`), or start QEMU with \
                 `-name NAME,debug-threads=on`",
                ask.vm
            );
        }
        let may_use = ask.may_use(root)?;
        host.only(&may_use);
        let placement = match place(&host, ask) {
            Ok(placement) => placement,
            Err(refused) => {
                let why = why(ask, &may_use, &isolated, &pinned);
                bail!(Infeasible, "{}: no CPUs for its threads: {refused}{why}", ask.vm);
            }
        };
        host.take(&placement);
        let (vcpus, among) = (ask.vcpus(), ask.wanted.cpus.clone());
        let siblings = siblings(&host, &placement);
        chosen.insert(ask.vm.to_owned(), Cores { vcpus, placement, among, siblings });
    }
    Ok(chosen)
}

/// Takes what another VM has, also on cores of which a CPU is offline.
fn take(host: &mut Host, cores: &Cores) {
    host.take(&cores.placement);
    cores.siblings.iter().for_each(|cpu| host.keep(*cpu));
}

/// CPUs of the cores on which a placement has whole vCPUs.
fn siblings(host: &Host, placement: &Placement) -> BTreeSet<u32> {
    if placement.request.each != Use::Whole {
        return BTreeSet::new();
    }
    let of_vcpu = |cpu: &&Cpu| placement.vcpus.contains(&cpu.id);
    let cores: BTreeSet<u32> = host.cpus().iter().filter(of_vcpu).map(|cpu| cpu.core).collect();
    host.cpus().iter().filter(|cpu| cores.contains(&cpu.core)).map(|cpu| cpu.id).collect()
}

fn place(host: &Host, ask: &CoresAsk<'_>) -> std::result::Result<Placement, Refused> {
    let mut refused = None;
    for request in ask.requests() {
        match host.place(&request) {
            Ok(placement) => return Ok(placement),
            Err(e) => refused = Some(e),
        }
    }
    Err(refused.unwrap_or(Refused::Request))
}

/// Facts that a refusal does not show of itself.
fn why(
    ask: &CoresAsk<'_>,
    may_use: &BTreeSet<u32>,
    isolated: &BTreeSet<u32>,
    pinned: &BTreeMap<u32, u32>,
) -> String {
    let mut text = match cpu_ranges(may_use) {
        list if list.is_empty() => "; none of the CPUs that it may use is online".to_owned(),
        list => format!("; it may use CPUs {list}"),
    };
    let apart: BTreeSet<u32> = may_use.intersection(isolated).copied().collect();
    if !apart.is_empty() && !ask.wanted.whole {
        text += &format!(
            ", of which {} are isolated and take whole vCPUs only (`whole = true`)",
            cpu_ranges(&apart)
        );
    }
    for (cpu, pid) in pinned.iter().filter(|(cpu, _)| may_use.contains(cpu)).take(MOST_NAMED) {
        text += &format!(", CPU {cpu} has a vCPU of process {pid}");
    }
    text
}

/// Pinned vCPUs of others that a refusal names at most.
const MOST_NAMED: usize = 8;

/// Adds the writes that give threads their CPUs, before those of the contract.
pub(crate) fn give_cpus(cores: &Cores, vm: &str, threads: &[Thread], settings: &mut Settings) {
    let (mut writes, without) = cores.writes(vm, threads);
    append(&mut writes, std::mem::take(&mut settings.writes));
    settings.writes = writes;
    settings.outside.extend(without);
}

/// Like [`give_cpus`], with what the CPUs change of the contract among its notes.
pub(super) fn add(cores: &Cores, probe: &Probe, vm: &str, threads: &[Thread], settings: &mut Settings) {
    give_cpus(cores, vm, threads, settings);
    let placement = &cores.placement;
    if placement.service.is_empty() {
        settings.notes.push(
            "no CPU is left for its other threads: they use those of its vCPUs, and between isolated CPUs the kernel does not spread \
             them; list more CPUs in `cores`"
                .to_owned(),
        );
    }
    if placement.nodes > 1 {
        settings
            .notes
            .push(format!("its CPUs are on {} NUMA nodes: on fewer there was no room", placement.nodes));
    }
    if placement.beyond > 0 {
        settings.notes.push(format!(
            "perhaps {} NUMA nodes or caches fewer would do: there were too many sets of them to try all",
            placement.beyond
        ));
    }
    let deadline = probe.found.iter().any(|f| f.backend == Backend::Deadline);
    if deadline && matches!(settings.backend, Backend::CpuMax | Backend::Throttle) {
        settings.notes.push(
            "with CPUs of its own it has no SCHED_DEADLINE budget, whose threads must be allowed on all CPUs"
                .to_owned(),
        );
    }
}

#[cfg(test)]
pub(crate) mod tests;
