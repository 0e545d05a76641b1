//! A guest pinned to one core, and its runs.

use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use rtvirtio_cpu::{Contract, Order};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::steal::stolen;
use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::image::Kernel;
use rtvirtio_testbed::qemu::{DiskRegion, GUEST_DISK, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::Named;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::scoped_contracts::{ScopedContracts, VmContract};

use super::load::{DISK, HostFio, MemoryWalk, fio_argv};
use super::wake_up_probe::WakeUpProbe;
use super::{INTERVAL_US, LARGEST_US, Latencies, Setup, WATCH_US, parse};
use crate::guest;
use rtvirtio_harness::cores::{FairGroup, bind, core_and_others};

/// Load before the first counted wake-up.
const WARM_UP: Duration = Duration::from_secs(1);
/// Longest time that a guest under load may need beyond the length on its own clock.
const GUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A guest alone on its core but for the load.
pub struct PinnedGuest<'a> {
    contracts: &'a ScopedContracts<'a>,
    contract: Contract,
    disk: &'a Path,
    name: String,
    /// Kernel release of the guest.
    pub release: String,
    core: u32,
    others: Vec<u32>,
    /// The host, as a result file describes it.
    pub facts: HostFacts,
    vm: QemuGuest,
    /// Dropped after the guest.
    group: FairGroup,
    _run_dir: tempfile::TempDir,
}

impl<'a> PinnedGuest<'a> {
    /// Boots the guest and binds it to the last CPU, and this process to the others.
    pub fn boot(
        kernel: Kernel,
        contracts: &'a ScopedContracts<'a>,
        contract: Contract,
        disk: &'a Path,
        labs: &LabHost,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        let (core, others) = core_and_others()?;
        // Guests inherit the CPUs of this process, and boot faster on all of them.
        bind(std::process::id(), &[&others[..], &[core]].concat())?;
        let image = labs.guest_image(kernel, progress)?;
        let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
        let release = image.release.clone();
        progress.step(&format!("booting a guest with {release}"));
        let run_dir = tempfile::Builder::new().prefix("rtvirtio-").tempdir()?;
        let name = format!("bench-{}", std::process::id());
        let group = FairGroup::make(&format!("{}fair", rtvirtio_kernel::ProcessId::prefix("bench")))?;
        let region = DiskRegion { path: disk.to_owned(), offset: Bytes(0), size: DISK };
        let config = QemuConfig {
            accel,
            workers: true,
            lock_memory: true,
            ..QemuConfig::new(&name, image, region, run_dir.path())
        };
        let mut vm = QemuGuest::start(&config)?;
        // Kernels with autogroups would group it by session; an explicit group works on every
        // kernel.
        group.attach(vm.handle().process.pid)?;
        let facts = guest::facts(&mut vm, accel, format!("a guest of 1 vCPU on CPU {core}"))?;
        bind(std::process::id(), &others)?;
        Ok(Self {
            contracts,
            contract,
            disk,
            name,
            release,
            core,
            others,
            facts,
            vm,
            group,
            _run_dir: run_dir,
        })
    }

    /// Runs a set-up for `length`.
    pub fn measure(
        &mut self,
        setup: Setup,
        length: Duration,
        progress: &dyn Progress,
    ) -> anyhow::Result<Latencies> {
        self.contracts.release()?;
        let pid = self.vm.handle().process.pid;
        // The host's floor is measured without a guest on the core.
        bind(pid, if setup == Setup::Host { &self.others } else { std::slice::from_ref(&self.core) })?;
        let order = match setup {
            Setup::Host | Setup::Guest => None,
            Setup::Prioritised => Some(Order::Contract),
            Setup::AioLowered | Setup::LoadMoved => Some(Order::Rt),
        };
        if let Some(order) = order {
            let named = Named::ask(&mut self.vm.qmp()?)?;
            self.contracts.set(&[VmContract {
                vm: &self.name,
                handle: VmHandle { named, ..VmHandle::of_pid(pid) },
                vcpus_only: false,
                contract: self.contract,
                order,
                used: Vec::new(),
                urgency: None,
            }])?;
        }
        let _walk = MemoryWalk::start(self.core);
        let before = stolen(&Root::default(), self.core)?;
        let mut latencies = match setup {
            Setup::Host => {
                let _fio = HostFio::start(self.disk, self.core)?;
                progress.pause(WARM_UP)?;
                let probe = WakeUpProbe::start(self.core, INTERVAL_US, Some(length))?;
                // The probe ends by itself, exact to one interval.
                progress.pause(length)?;
                probe.finish()?
            }
            Setup::LoadMoved => {
                let _fio = HostFio::start(self.disk, self.core)?;
                progress.pause(WARM_UP)?;
                self.watched(length, progress)?
            }
            _ => {
                let argv = fio_argv(GUEST_DISK);
                let load = self.vm.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())?;
                progress.pause(WARM_UP)?;
                let latencies = self.watched(length, progress)?;
                if self.vm.poll(load)?.is_some() {
                    bail!("the I/O load in the guest ended by itself");
                }
                // On SIGTERM fio waits for requests that it takes to be in flight, sometimes for
                // ever.
                guest::run_command(&mut self.vm, &["killall", "-9", "fio"])?;
                guest::wait_for_exit(&mut self.vm, load, GUEST_TIMEOUT, progress, &mut || Ok(()))?;
                latencies
            }
        };
        // This includes the warm-up, which is short compared with a run.
        let stolen = stolen(&Root::default(), self.core)?.saturating_sub(before);
        latencies.stolen = Some(stolen.as_secs_f64());
        Ok(latencies)
    }

    /// cyclictest in the guest, while the host's core is probed.
    fn watched(&mut self, length: Duration, progress: &dyn Progress) -> anyhow::Result<Latencies> {
        let probe = WakeUpProbe::start(self.core, WATCH_US, None)?;
        let mut latencies = in_guest(&mut self.vm, length, progress)?;
        latencies.floor = Some(Box::new(probe.finish()?));
        Ok(latencies)
    }

    /// Releases the contract and stops the guest.
    pub fn stop(self) -> anyhow::Result<()> {
        self.contracts.release()?;
        self.vm.stop()?;
        drop(self.group);
        Ok(())
    }
}

/// cyclictest in a guest, with the paper's options.
fn in_guest(vm: &mut QemuGuest, length: Duration, progress: &dyn Progress) -> anyhow::Result<Latencies> {
    let argv = [
        "cyclictest".to_owned(),
        "-m".to_owned(),
        "-q".to_owned(),
        "-p99".to_owned(),
        format!("-i{INTERVAL_US}"),
        format!("-h{LARGEST_US}"),
        format!("-D{}", length.as_secs()),
    ];
    let process = vm.spawn(&argv.iter().map(String::as_str).collect::<Vec<_>>())?;
    let output = guest::wait_for_exit(vm, process, length * 2 + GUEST_TIMEOUT, progress, &mut || Ok(()))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.success() {
        bail!("cyclictest in the guest: {stderr:.500}");
    }
    parse(&String::from_utf8_lossy(&output.stdout)).map_err(|e| anyhow::anyhow!("{e}; {stderr:.200}"))
}
