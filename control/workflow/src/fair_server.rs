//! Switches the kernel's fair server off on the CPUs of vCPUs, where `cores` of the spec says so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rtvirtio_apply::{Form, Target, Write};
use rtvirtio_cpu::{Backend, Cores};
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_kernel::{Root, fair_server, topology};
use rtvirtio_spec::HostSpec;

use crate::contracts::{FAIR_SERVER_STAYS, VmCpu};
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::interrupts::journaled;
use crate::progress::Progress;

/// Runtime of a server that is off.
const OFF: &str = "0";

/// VM with the fair server off on its vCPUs' CPUs.
struct Wanted<'a> {
    vm: &'a str,
    backend: Backend,
    cores: &'a Cores,
}

fn wanted<'a>(host: &HostSpec, held: &'a [VmCpu]) -> Vec<Wanted<'a>> {
    let cores_of = |name: &str| host.vms().iter().find(|vm| vm.name == name)?.cpu.cores.as_ref();
    let is_off = |of: &&VmCpu| cores_of(&of.vm).is_some_and(|cores| cores.fair_server_off);
    let one =
        |of: &'a VmCpu| Some(Wanted { vm: &of.vm, backend: of.settings.backend, cores: of.cores.as_ref()? });
    held.iter().filter(is_off).filter_map(one).collect()
}

/// The writes that switch the fair server off on the CPUs of the vCPUs of VMs that want it.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) where a CPU is not isolated, or none is left for a
/// VM's other threads; others where the server cannot be set. Each names the remedy.
pub(crate) fn writes(
    host: &HostSpec,
    held: &[VmCpu],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Vec<Write>> {
    let (all, root) = (wanted(host, held), Root::default());
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let elsewhere = journaled(&root, dirs, fair_server::cpu_in)
        .context("whether another state directory has set the fair server is not known")?;
    let mut writes = Vec::new();
    for one in &all {
        writes.extend(one.writes(&root, &elsewhere)?);
        progress.warn(&one.price());
    }
    Ok(writes)
}

/// Says of each VM that wants the fair server off that it is left.
pub(crate) fn warn_left(host: &HostSpec, held: &[VmCpu], progress: &dyn Progress) {
    for one in wanted(host, held) {
        progress.warn(&format!("{}: {FAIR_SERVER_STAYS}", one.vm));
    }
}

impl Wanted<'_> {
    fn cpus(&self) -> BTreeSet<u32> {
        self.cores.placement.vcpus.iter().copied().collect()
    }

    /// `elsewhere` are CPUs whose server another state directory has set.
    fn writes(&self, root: &Root, elsewhere: &BTreeMap<u32, PathBuf>) -> Result<Vec<Write>> {
        let vm = self.vm;
        self.check_threads()?;
        self.check_isolated(root)?;
        let one = |cpu: u32| -> Result<Write> {
            if let Some(state) = elsewhere.get(&cpu) {
                bail!(
                    InForce,
                    "{vm}: the fair server of CPU {cpu} is a setting in force of another state directory: put that back first \
                     (`rtvirtio revert --state-dir {}`)",
                    state.display()
                );
            }
            if let Some(why) = fair_server::missing(root, cpu)? {
                bail!(System, "{vm}: the fair server of CPU {cpu} cannot be switched off: {why}");
            }
            let target = Target::host(fair_server::runtime_file(cpu), Form::Plain);
            Ok(Write::new(format!("fair server of CPU {cpu} ({vm})"), target, OFF))
        };
        self.cpus().into_iter().map(one).collect()
    }

    fn check_threads(&self) -> Result<()> {
        let vm = self.vm;
        if self.backend == Backend::CpuMax {
            bail!(
                Argument,
                "{vm}: `fair_server = \"off\"` is of use to real-time vCPUs only, and under cpu.max they are ordinary threads: add \
                 priorities = \"rt\", or leave it out"
            );
        }
        if self.cores.placement.service.is_empty() {
            bail!(
                Infeasible,
                "{vm}: with `fair_server = \"off\"` its other threads would get no time on its vCPUs' CPUs, and have none of their \
                 own: list one more in `cpus` that is not isolated"
            );
        }
        Ok(())
    }

    fn check_isolated(&self, root: &Root) -> Result<()> {
        let cpus = topology(root).context("the host's CPUs are not known")?;
        let isolated: BTreeSet<u32> = cpus.iter().filter(|cpu| cpu.isolated).map(|cpu| cpu.id).collect();
        let shared: BTreeSet<u32> = self.cpus().difference(&isolated).copied().collect();
        if shared.is_empty() {
            return Ok(());
        }
        let isolated = if isolated.is_empty() { "none".to_owned() } else { cpu_ranges(&isolated) };
        bail!(
            Infeasible,
            "{}: `fair_server = \"off\"` is for isolated CPUs only, and its vCPUs have CPU {}, which is not: list isolated CPUs in \
             `cpus` (isolated here: {isolated}), or start the host with isolcpus={}",
            self.vm,
            cpu_ranges(&shared),
            cpu_ranges(&self.cpus())
        )
    }

    /// Price of it, in words for the user.
    fn price(&self) -> String {
        format!(
            "{}: with the fair server off, ordinary threads that are bound to CPU {} (kernel workers among them) get no time while a \
             real-time vCPU runs there without a pause, and what waits for one of them hangs until the vCPU sleeps",
            self.vm,
            cpu_ranges(&self.cpus())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kind;
    use crate::contracts::cores_tests::{host, placed, put};

    const ISOLATED: &str = "/sys/devices/system/cpu/isolated";

    /// vCPUs on CPUs 4 and 5, the other threads on CPU 0.
    fn cores() -> Cores {
        let mut cores = placed(&[4, 5]);
        cores.placement.service = vec![0];
        cores
    }

    fn of(root: &Root, backend: Backend, cores: &Cores, elsewhere: &[u32]) -> Result<Vec<Write>> {
        let elsewhere = elsewhere.iter().map(|cpu| (*cpu, PathBuf::from("/other"))).collect();
        Wanted { vm: "plc", backend, cores }.writes(root, &elsewhere)
    }

    /// Checks the kind of an error and words of its remedy.
    #[track_caller]
    fn refused(of: Result<Vec<Write>>, kind: Kind, remedy: &str) {
        let error = of.unwrap_err();
        let text = format!("{error:#}");
        assert!(error.kind() == kind && text.starts_with("plc: ") && text.contains(remedy), "{text}");
    }

    #[test]
    fn the_fair_server_is_switched_off_on_isolated_cpus_alone() {
        let (_dir, root) = host();
        let cores = cores();
        let rt = |elsewhere: &[u32]| of(&root, Backend::Throttle, &cores, elsewhere);
        refused(rt(&[]), Kind::Infeasible, "(isolated here: none), or start the host with isolcpus=4-5");
        put(&root, ISOLATED, "5-7\n");
        refused(
            rt(&[]),
            Kind::Infeasible,
            "have CPU 4, which is not: list isolated CPUs in `cpus` (isolated here: 5-7)",
        );
        put(&root, ISOLATED, "4-7\n");
        put(&root, "/proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
        refused(rt(&[]), Kind::System, "comes with Linux 6.12");
        put(&root, "/proc/sys/kernel/osrelease", "6.12.9\n");
        refused(rt(&[]), Kind::System, "debugfs is not mounted: mount -t debugfs");
        for cpu in 0..8 {
            put(&root, fair_server::runtime_file(cpu).to_str().unwrap(), "50000000\n");
        }
        let writes = rt(&[6]).unwrap();
        let shown: Vec<String> =
            writes.iter().map(|write| format!("{} {}", write.target, write.value)).collect();
        let file = |cpu: u32| format!("/sys/kernel/debug/sched/fair_server/cpu{cpu}/runtime 0");
        assert_eq!(shown, [file(4), file(5)]);
        refused(rt(&[5]), Kind::InForce, "--state-dir /other");
        let text = Wanted { vm: "plc", backend: Backend::Throttle, cores: &cores }.price();
        assert!(text.contains("CPU 4-5") && text.contains("hangs"), "{text}");
    }

    #[test]
    fn a_vm_that_would_only_lose_by_it_is_refused() {
        let (_dir, root) = host();
        put(&root, ISOLATED, "4-7\n");
        refused(of(&root, Backend::CpuMax, &cores(), &[]), Kind::Argument, "priorities = \"rt\"");
        refused(
            of(&root, Backend::RtGroup, &placed(&[4, 5]), &[]),
            Kind::Infeasible,
            "list one more in `cpus`",
        );
    }
}
