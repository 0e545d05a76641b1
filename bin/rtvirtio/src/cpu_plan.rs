//! The spec's CPU contracts as writes on this host.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use rtvirtio_apply::{Write, append};
use rtvirtio_cpu::{Ask, Backend, Contract, Found, Order, Settings, admit, choose, probe, settings};
use rtvirtio_host::Root;
use rtvirtio_spec::{CpuNeed, Priorities, Spec, Vm};
use rtvirtio_vmm::Thread;
use rtvirtio_vmm::threads::discover;

use crate::args::Global;
use crate::ui::Ui;
use crate::vm_threads;

/// How long threads are looked at before a budget is split over them: load moves between a VM's threads within seconds.
const LOOK: Duration = Duration::from_secs(1);
/// A VM that uses less than this part of one CPU, all threads together, is idle.
const IDLE: u32 = 10;

/// What is set for one VM.
#[derive(serde::Serialize)]
pub struct VmCpu {
    /// Its name.
    pub vm: String,
    /// How its contract is held.
    #[serde(flatten)]
    pub settings: Settings,
}

/// A mechanism with the contracts that it is to hold.
type Asked<'p> = (&'p Found, Vec<(String, Contract)>);

/// The writes for all VMs that have a contract, and what they are worth. Empty where none has one.
pub fn writes(spec: &Spec, global: &Global, ui: &Ui) -> anyhow::Result<(Vec<Write>, Vec<VmCpu>)> {
    if spec.vms.iter().all(|vm| vm.cpu.need.is_none()) {
        return Ok((Vec::new(), Vec::new()));
    }
    let root = Root::default();
    let probe = probe(&root)?;
    let named = vm_threads::of_spec(spec, global, ui)?;
    let mut asks: BTreeMap<Backend, Asked<'_>> = BTreeMap::new();
    let mut chosen = Vec::new();
    for (vm, named) in spec.vms.iter().zip(&named) {
        let Some((contract, order)) = asked(vm)? else { continue };
        let Some(found) = choose(&probe, None, order == Order::Rt) else {
            let why: Vec<String> = probe.missing.iter().map(|(b, why)| format!("{b}: {why}")).collect();
            bail!("vm {}: no mechanism of this kernel can hold its contract: {}", vm.name, why.join("; "));
        };
        asks.entry(found.backend).or_insert((found, Vec::new())).1.push((vm.name.clone(), contract));
        chosen.push((vm, named, found.backend, contract, order));
    }
    for (found, contracts) in asks.values() {
        admit(&found.grant, contracts)?;
    }
    let split = asks.contains_key(&Backend::Deadline);
    let mut before = Vec::new();
    for (_, named, backend, _, _) in &chosen {
        before.push(if *backend == Backend::Deadline { discover(&root, &named.handle)? } else { Vec::new() });
    }
    if split {
        ui.step("looking which threads use the CPU, to split the budget over them");
        std::thread::sleep(LOOK);
    }
    let (mut all, mut out) = (Vec::new(), Vec::new());
    for ((vm, named, backend, contract, order), before) in chosen.into_iter().zip(before) {
        let threads = discover(&root, &named.handle)?;
        let used = lately(&before, &threads);
        let ask = Ask { vm: &vm.name, threads: &threads, contract, order, used: &used };
        let settings = settings(&root, &probe, backend, &ask)?;
        append(&mut all, settings.writes.clone());
        out.push(VmCpu { vm: vm.name.clone(), settings });
    }
    Ok((all, out))
}

/// CPU time that each thread used since `before`; nothing for a VM that was idle, whose threads' whole life then says more. That of one which
/// boots is all QEMU's start: a vCPU that got its part by that would not come up.
fn lately(before: &[Thread], now: &[Thread]) -> Vec<(u32, Duration)> {
    let since = |t: &Thread| {
        let old = before.iter().find(|b| (b.tid, b.start) == (t.tid, t.start))?;
        Some((t.tid, t.cpu_time.saturating_sub(old.cpu_time)))
    };
    let used: Vec<_> = now.iter().filter_map(since).collect();
    if used.iter().map(|u| u.1).sum::<Duration>() < LOOK / IDLE { Vec::new() } else { used }
}

/// The contract and order of a VM; `None` when it asks for nothing.
fn asked(vm: &Vm) -> anyhow::Result<Option<(Contract, Order)>> {
    let order = match vm.cpu.priorities {
        Some(Priorities::Rt) => Order::Rt,
        None => Order::Contract,
    };
    match vm.cpu.need {
        None => Ok(None),
        Some(CpuNeed::Contract { budget, period }) => match Contract::new(budget, period) {
            Some(contract) => Ok(Some((contract, order))),
            None => bail!("vm {}: a budget of {budget} in {period} is impossible", vm.name),
        },
        Some(CpuNeed::Demand { requests, deadline }) => bail!(
            "vm {}: a demand of {requests} within {deadline} needs the VM's measured curve of throughput over budget, which this version \
             cannot make yet; write cpu = {{ budget = ..., period = ... }}",
            vm.name
        ),
    }
}

/// Tells on standard error how each contract is held, and what is outside of it.
pub fn explain(all: &[VmCpu], ui: &Ui) {
    for VmCpu { vm, settings: s } in all {
        let strength = format!("{:?}", s.strength).to_lowercase();
        ui.step(&format!("{vm}: its CPU contract is held by {} ({strength})", s.backend));
        for note in &s.notes {
            ui.step(&format!("{vm}: {note}"));
        }
        for (tid, why) in &s.outside {
            ui.step(&format!("{vm}: thread {tid} is outside of it: {why}"));
        }
    }
}
