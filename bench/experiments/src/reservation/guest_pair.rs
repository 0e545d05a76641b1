//! Two guests on one core, with contracts and load.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_cpu::{Contract, Order};
use rtvirtio_kernel::Root;
use rtvirtio_measure::HostFacts;
use rtvirtio_measure::http::Load;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::qemu::{GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::{Named, discover};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::scoped_contracts::{ScopedContracts, VmContract};

use super::kills::{self, KillCommand};
use super::{CONNECTIONS, Kills, OWN_BUDGET, web};
use crate::guest;
use rtvirtio_harness::cores::{FairGroup, bind, core_and_others};

/// From the start of a load to its first counted byte: some periods, and the warm-up of the guest's
/// caches and QEMU's translator.
pub const WARM_UP: Duration = Duration::from_millis(1000);
/// Context of an error of a load.
pub const SERVER: &str = "a client of the guest's web server";

/// Contracts of a measurement of throughput; budgets in percent of the core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// The first guest alone with this budget.
    Alone(u64),
    /// Both guests: the neighbour's budget, and whether contracts hold all threads or vCPUs only.
    WithNeighbour(u64, bool),
}

/// A contract for this percentage of a core.
pub fn share_of_core(budget: u64, period: Nanos) -> anyhow::Result<Contract> {
    Contract::new(Nanos(period.0 * budget / 100), period).context("a budget above its period")
}

/// Two guests with a web server each, bound to one core; this process is bound to the others.
pub struct GuestPair<'c> {
    /// Sets and releases the guests' contracts.
    pub contracts: &'c ScopedContracts<'c>,
    names: [String; 2],
    /// The VM, and its neighbour.
    pub vms: [QemuGuest; 2],
    /// Group of both, and of each guest. Dropped after the guests.
    groups: [FairGroup; 3],
    /// Ports of the guests' web servers on the loopback interface.
    pub ports: [u16; 2],
    /// The host, as a result file describes it.
    pub facts: HostFacts,
}

impl<'c> GuestPair<'c> {
    pub fn boot(
        contracts: &'c ScopedContracts<'c>,
        neighbour_vcpus: u16,
        dir: &Path,
        labs: &LabHost,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        let (core, others) = core_and_others()?;
        // Guests inherit the CPUs of this process, and boot faster on all of them.
        bind(std::process::id(), &[&others[..], &[core]].concat())?;
        let group = |name: &str| {
            FairGroup::make(&format!("{}fair-{name}", rtvirtio_kernel::ProcessId::prefix("bench")))
        };
        let groups = [group("both")?, group("vm")?, group("neighbour")?];
        let image = labs.guest_image(Kernel::Standard, progress)?;
        let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
        progress.step("booting two guests");
        let names = ["vm", "neighbour"].map(|n| format!("bench-{}-{n}", std::process::id()));
        let ports = [web::free_port()?, web::free_port()?];
        let config = |i: usize| QemuConfig {
            accel,
            vcpus: if i == 0 { 1 } else { neighbour_vcpus },
            port: Some(ports[i]),
            ..QemuConfig::new(&names[i], image.clone(), GuestDisk::None, dir)
        };
        let mut vms = [QemuGuest::start(&config(0))?, QemuGuest::start(&config(1))?];
        for vm in &mut vms {
            web::serve(vm)?;
            bind(vm.handle().process.pid, &[core])?;
        }
        // Read before this process is bound: the number of CPUs is that of its affinity.
        let device = format!("two guests on CPU {core}");
        let facts = guest::facts(&mut vms[0], accel, device)?;
        bind(std::process::id(), &others)?;
        let pair = Self { contracts, names, vms, groups, ports, facts };
        pair.group(false)?;
        Ok(pair)
    }

    /// Groups the threads so that all of both guests compete with each other, as in the paper, or
    /// guest with guest (as under the kernel's autogroups or libvirt).
    pub fn group(&self, apart: bool) -> anyhow::Result<()> {
        for (i, vm) in self.vms.iter().enumerate() {
            let group = if apart { &self.groups[1 + i] } else { &self.groups[0] };
            group.attach(vm.handle().process.pid)?;
        }
        Ok(())
    }

    /// Kills `apply` and `revert` of a contract of the first guest.
    pub fn kills(
        &mut self,
        kill_command: &KillCommand,
        dir: &Path,
        progress: &dyn Progress,
    ) -> anyhow::Result<Kills> {
        self.contracts.release()?;
        kills::sweep(kill_command, &self.names[0], self.vms[0].handle().process.pid, dir, progress)
    }

    /// Contracts for these guests, and none for the others.
    pub fn set_contracts(
        &mut self,
        contracts: &[(usize, Contract)],
        all_threads: bool,
    ) -> anyhow::Result<()> {
        let mut all = Vec::new();
        for &(i, contract) in contracts {
            let pid = self.vms[i].handle().process.pid;
            let named = Named::ask(&mut self.vms[i].qmp()?)?;
            all.push(VmContract {
                vm: &self.names[i],
                handle: VmHandle { named, ..VmHandle::of_pid(pid) },
                vcpus_only: !all_threads,
                contract,
                order: Order::Contract,
                used: Vec::new(),
                urgency: None,
            });
        }
        Ok(self.contracts.set(&all)?)
    }

    /// Measures one piece: throughput of both guests' clients, MB/s, and CPU time of the first
    /// guest, percent of a core.
    pub fn run_step(
        &mut self,
        step: Step,
        period: Nanos,
        neighbour_computes: bool,
        length: Duration,
        progress: &dyn Progress,
    ) -> anyhow::Result<([f64; 2], f64)> {
        let (neighbour, all_threads) = match step {
            Step::Alone(budget) => {
                self.set_contracts(&[(0, share_of_core(budget, period)?)], true)?;
                return self.throughput(&[true, false], length, progress);
            }
            Step::WithNeighbour(neighbour, all_threads) => (neighbour, all_threads),
        };
        if neighbour_computes {
            self.contracts.release()?;
            web::spin(&mut self.vms[1], 1)?;
        }
        // The neighbour first: at equal periods it gets the higher priority, the worse case for the
        // VM.
        let both = [(1, share_of_core(neighbour, period)?), (0, share_of_core(OWN_BUDGET, period)?)];
        self.set_contracts(&both, all_threads)?;
        let measured = self.throughput(&[true, !neighbour_computes], length, progress)?;
        if neighbour_computes {
            web::stop_spinning(&mut self.vms[1])?;
        }
        Ok(measured)
    }

    /// CPU time of all threads of a guest.
    fn used(&self, i: usize) -> anyhow::Result<Duration> {
        let threads = discover(&Root::default(), &VmHandle::of_pid(self.vms[i].handle().process.pid))?;
        Ok(threads.iter().map(|t| t.cpu_time).sum())
    }

    /// Throughput of the clients of the loaded guests, MB/s, and CPU time of the first guest,
    /// percent of a core.
    pub fn throughput(
        &self,
        loaded: &[bool; 2],
        length: Duration,
        progress: &dyn Progress,
    ) -> anyhow::Result<([f64; 2], f64)> {
        let start = |i: usize| loaded[i].then(|| Load::start(&web::request(self.ports[i]), CONNECTIONS));
        let loads = [start(0), start(1)];
        progress.pause(WARM_UP)?;
        let bytes = || [0, 1].map(|i: usize| loads[i].as_ref().map_or(0, Load::bytes));
        let (begin, before, used) = (Instant::now(), bytes(), self.used(0)?);
        progress.pause(length)?;
        let (after, used) = (bytes(), self.used(0)? - used);
        let seconds = begin.elapsed().as_secs_f64();
        for load in loads.into_iter().flatten() {
            load.finish().context(SERVER)?;
        }
        let mb_per_s = [0, 1].map(|i: usize| after[i].saturating_sub(before[i]) as f64 / 1e6 / seconds);
        Ok((mb_per_s, 100.0 * used.as_secs_f64() / seconds))
    }

    /// Stops both guests without releasing their contracts.
    pub fn stop(self) -> anyhow::Result<()> {
        for vm in self.vms {
            vm.stop()?;
        }
        Ok(())
    }
}
