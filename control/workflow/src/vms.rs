//! From a spec, a process or the lab to the VMs' processes and what their monitors say.

use std::path::Path;
use std::time::Duration;

use rtvirtio_kernel::process::{self, of_thread, serves};
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_spec::{HostHandle, Reach, Spec, Vm};
use rtvirtio_vmm::threads::Named;
use rtvirtio_vmm::{Qmp, VmHandle};

use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Result, bail};
use crate::inventory::{Inventory, ListedVm};
use crate::progress::Progress;
use crate::site;

/// How long a monitor may take to answer: it serves one client, and who holds it may not let go; and QEMU's main loop may have a small budget itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// A VM with what leads to its threads.
pub struct NamedVm {
    /// Its name in the spec, or `pid N`.
    pub name: String,
    /// Its processes, and the monitor's word.
    pub handle: VmHandle,
}

/// What `target` names: a spec, a process, or the lab that is up.
pub fn find(
    target: Option<&str>,
    only: Option<&str>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Vec<NamedVm>> {
    let vms = match target {
        Some(text) if text.parse::<u32>().is_ok() => {
            let pid: u32 = text.parse()?;
            vec![NamedVm { name: format!("pid {pid}"), handle: VmHandle::of_pid(pid) }]
        }
        Some(path) => of_spec(&site::load_spec(Path::new(path))?, dirs, progress)?,
        None => of_lab(dirs, progress)?,
    };
    let Some(only) = only else { return Ok(vms) };
    let names: Vec<String> = vms.iter().map(|v| v.name.clone()).collect();
    let chosen: Vec<NamedVm> = vms.into_iter().filter(|v| v.name == only).collect();
    if chosen.is_empty() {
        bail!(Argument, "no VM `{only}`: there is {}", names.join(", "));
    }
    Ok(chosen)
}

/// The VMs of a spec, in its order.
pub fn of_spec(spec: &Spec, dirs: &Dirs, progress: &dyn Progress) -> Result<Vec<NamedVm>> {
    if spec.lab_kind().is_some() {
        let lab = of_lab(dirs, progress)?;
        if !lab.iter().map(|v| &v.name).eq(spec.vms.iter().map(|v| &v.name)) {
            bail!(Argument, "the lab that is up has other VMs than this spec: `rtvirtio-lab up` with it");
        }
        return Ok(lab);
    }
    spec.vms.iter().map(|vm| named(vm, progress)).collect()
}

/// One VM of a spec. The others need not be there.
pub fn one_of_spec(spec: &Spec, name: &str, dirs: &Dirs, progress: &dyn Progress) -> Result<NamedVm> {
    if spec.lab_kind().is_some() {
        let lab = Inventory::load(&dirs.run).context("the lab is gone")?;
        let vm = lab.vms.iter().find(|vm| vm.name == name);
        return of_lab_vm(vm.with_context(|| format!("the lab that is up has no VM `{name}`"))?, progress);
    }
    let vm = spec.vms.iter().find(|vm| vm.name == name);
    named(vm.with_context(|| format!("the spec has no VM `{name}`"))?, progress)
}

fn named(vm: &Vm, progress: &dyn Progress) -> Result<NamedVm> {
    let handle = existing(vm, progress).with_context(|| format!("vm {}", vm.name))?;
    Ok(NamedVm { name: vm.name.clone(), handle })
}

fn of_lab(dirs: &Dirs, progress: &dyn Progress) -> Result<Vec<NamedVm>> {
    let lab = Inventory::load(&dirs.run).context("name a spec or a process, or start a lab")?;
    lab.vms.iter().map(|vm| of_lab_vm(vm, progress)).collect()
}

fn of_lab_vm(vm: &ListedVm, progress: &dyn Progress) -> Result<NamedVm> {
    let root = Root::default();
    let handle = match &vm.guest {
        // Its number may be another process's by now.
        Some(guest) if !guest.process.is_alive() => bail!(
            NotRunning,
            "the lab's QEMU of vm {} (process {}) has ended: `rtvirtio-lab down`, then `rtvirtio-lab up` again",
            vm.name,
            guest.process.pid
        ),
        Some(guest) => of_monitor(&vm.name, &guest.qmp, Some(guest.process.pid), progress)?,
        None => of_cgroup(&root, &Cgroups::detect(&root)?, &vm.cgroup)?,
    };
    Ok(NamedVm { name: vm.name.clone(), handle })
}

fn existing(vm: &Vm, progress: &dyn Progress) -> Result<VmHandle> {
    let root = Root::default();
    let Reach::Existing { host, .. } = &vm.reach else { bail!(Argument, "it is a lab's VM") };
    match host {
        HostHandle::Pid(pid) => Ok(VmHandle::of_pid(*pid)),
        HostHandle::Cgroup(path) => of_cgroup(&root, &Cgroups::detect(&root)?, path),
        HostHandle::Qmp(socket) => of_monitor(&vm.name, socket, None, progress),
    }
}

fn of_cgroup(root: &Root, cgroups: &Cgroups, path: &Path) -> Result<VmHandle> {
    let pids = cgroups.pids(root, path).map_err(|e| {
        let why = if e.is_unsupported() {
            "it is threaded: name the one above it that holds the process, such as machine-qemu-....scope"
        } else {
            "is the VM running?"
        };
        Error::from(e).within(format!("cgroup {}: {why}", path.display()))
    })?;
    Ok(VmHandle { pids: pids.into_iter().collect(), named: Named::default() })
}

/// Asks the monitor; where the process is known anyway, a monitor that does not answer only costs the certainty of the roles.
fn of_monitor(vm: &str, socket: &Path, pid: Option<u32>, progress: &dyn Progress) -> Result<VmHandle> {
    let named = Qmp::connect(socket, PATIENCE).and_then(|mut qmp| Named::ask(&mut qmp));
    match (named, pid) {
        (Ok(named), Some(pid)) => Ok(VmHandle { named, ..VmHandle::of_pid(pid) }),
        (Ok(named), None) => {
            let thread = named.any_thread().context("QEMU names no vCPU")?;
            let root = Root::default();
            const ELSEWHERE: &str =
                "QEMU seems to run in another pid namespace (a container): name the VM by `pid` or `cgroup`";
            let pid = of_thread(&root, thread).with_context(|| {
                format!("the monitor names thread {thread}, which is not here: {ELSEWHERE}")
            })?;
            if !serves(&root, pid, socket)? {
                let name = process::name(&root, pid).unwrap_or_default();
                bail!(
                    NotRunning,
                    "the monitor {} names thread {thread}; here that belongs to process {pid} ({name}), which does not serve it: {ELSEWHERE}",
                    socket.display()
                );
            }
            Ok(VmHandle { named, ..VmHandle::of_pid(pid) })
        }
        (Err(e), Some(pid)) => {
            progress.warn(&format!("{vm}: roles are told from thread names only: {e}"));
            Ok(VmHandle::of_pid(pid))
        }
        (Err(e), None) => Err(e).context("name the VM by `pid` or `cgroup` where its monitor is taken"),
    }
}
