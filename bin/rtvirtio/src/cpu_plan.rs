//! The spec's CPU contracts as writes on this host.

use std::collections::BTreeMap;

use anyhow::bail;
use rtvirtio_apply::{Write, append};
use rtvirtio_cpu::{Ask, Backend, Contract, Found, Order, Settings, admit, choose, probe, settings};
use rtvirtio_host::Root;
use rtvirtio_spec::{CpuNeed, Priorities, Spec, Vm};
use rtvirtio_vmm::threads::discover;

use crate::args::Global;
use crate::ui::Ui;
use crate::vm_threads;

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
    let (mut all, mut out) = (Vec::new(), Vec::new());
    for (vm, named, backend, contract, order) in chosen {
        let threads = discover(&root, &named.handle)?;
        let ask = Ask { vm: &vm.name, threads: &threads, contract, order, used: &[] };
        let settings = settings(&root, &probe, backend, &ask)?;
        append(&mut all, settings.writes.clone());
        out.push(VmCpu { vm: vm.name.clone(), settings });
    }
    Ok((all, out))
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
