//! Role of a thread in its VM, from the monitor's reply and from its name.
//!
//! Names: QEMU `system/cpus.c`, `accel/*/`, `iothread.c`, `util/thread-pool.c` (`worker`),
//! `util/rcu.c` (`call_rcu`); Linux `drivers/vhost/vhost.c` and `kernel/vhost_task.c`
//! (`vhost-PID`), `arch/x86/kvm/i8254.c` (`kvm-pit/PID`), `arch/x86/kvm/mmu/mmu.c`
//! (`kvm-nx-lpage-recovery-PID`), `io_uring/io-wq.c` (`iou-wrk-PID`). Other VMMs always name their
//! threads: Cloud Hypervisor `vmm/src/cpu.rs` (`vcpu0`), `virtio-devices/src/block.rs`
//! (`_disk0_q0`), `vmm/src/lib.rs` (`vmm`); Firecracker `src/vmm/src/vstate/vcpu.rs` (`fc_vcpu 0`),
//! `src/firecracker/src/api_server_adapter.rs` (`fc_api`); crosvm `src/crosvm/sys/linux/vcpu.rs`
//! (`crosvm_vcpu0`); kvmtool `kvm-cpu.c` (`kvm-vcpu-0`).

use std::collections::BTreeSet;
use std::fmt;

use rtvirtio_kernel::task::vcpus_in_name;
use serde::Serialize;

use super::{Named, Thread};

/// Role of a thread in its VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "which")]
pub enum Role {
    /// Runs these vCPUs: one under KVM and multi-threaded TCG, several under single-threaded TCG.
    Vcpu(Vec<u32>),
    /// An I/O thread (`-object iothread`) by its name; `mon_iothread` is the monitor's own.
    IoThread(String),
    /// The VMM's main loop: devices without an I/O thread, timers, the monitor.
    Emulator,
    /// A worker of QEMU's thread pool (`aio=threads`, file operations). Short-lived.
    AioWorker,
    /// A worker of io_uring in the kernel, inside the process.
    IoUringWorker,
    /// Moves packets of vhost-net and vhost-scsi: a thread of QEMU since Linux 6.4, a kernel thread
    /// before.
    Vhost,
    /// Injects ticks of the emulated PIT (KVM on x86); a kernel thread.
    KvmPit,
    /// Splits huge pages back (KVM on x86); a thread of QEMU on new kernels.
    KvmHugePages,
    /// Frees memory of QEMU's RCU.
    Rcu,
    /// Copies memory during a migration.
    Migration,
    /// Serves a screen or a character device to a client.
    Display,
    /// A thread of a helper process in the VM's cgroup, or one whose name shows nothing.
    #[default]
    Other,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vcpu(numbers) => {
                let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
                write!(f, "vcpu {}", numbers.join(","))
            }
            Self::IoThread(name) => write!(f, "iothread {name}"),
            Self::Emulator => write!(f, "emulator"),
            Self::AioWorker => write!(f, "aio worker"),
            Self::IoUringWorker => write!(f, "io_uring worker"),
            Self::Vhost => write!(f, "vhost"),
            Self::KvmPit => write!(f, "kvm-pit"),
            Self::KvmHugePages => write!(f, "kvm huge pages"),
            Self::Rcu => write!(f, "rcu"),
            Self::Migration => write!(f, "migration"),
            Self::Display => write!(f, "display"),
            Self::Other => write!(f, "other"),
        }
    }
}

/// Role of a thread in one of the VM's processes. The monitor's reply takes precedence over the
/// name, which can be chosen freely.
#[must_use]
pub fn user_role(pid: u32, tid: u32, name: &str, named: &Named) -> Role {
    if let Some(cpus) = named.vcpus.get(&tid) {
        return Role::Vcpu(cpus.clone());
    }
    if let Some(io) = named.iothreads.get(&tid) {
        return Role::IoThread(io.clone());
    }
    if let Some(cpus) = vcpus_in_name(name) {
        return Role::Vcpu(cpus);
    }
    if let Some(io) = name.strip_prefix("IO ") {
        return Role::IoThread(io.to_owned());
    }
    match name {
        "worker" => Role::AioWorker,
        "call_rcu" | "rcu" => Role::Rcu,
        _ if name.starts_with("vhost-") => Role::Vhost,
        _ if name.starts_with("iou-wrk-") || name.starts_with("iou-sqp-") => Role::IoUringWorker,
        _ if name.starts_with("kvm-nx-lpage-re") => Role::KvmHugePages,
        _ if name.starts_with("mig/") || name.starts_with("multifd") || name == "live_migration" => {
            Role::Migration
        }
        "vnc_worker" | "SPICE Worker" | "gmain" | "gdbus" => Role::Display,
        // Without thread names every thread has the process's name; then only the first is known.
        _ if tid == pid && (is_qemu(name) || OTHER_VMMS.contains(&name)) => Role::Emulator,
        _ => Role::Other,
    }
}

/// Main threads of other VMMs. Firecracker's serves the devices; the others start device threads.
const OTHER_VMMS: [&str; 4] = [CLOUD_HYPERVISOR, "firecracker", "crosvm", "lkvm"];

/// Name `cloud-hypervisor`, truncated to 15 bytes by the kernel.
const CLOUD_HYPERVISOR: &str = "cloud-hyperviso";

/// Finds the main loop of a VMM with an unknown name, such as QEMU with `-name process=...`: the
/// first thread of a process that runs vCPUs.
pub(super) fn name_main_loop(threads: &mut [Thread]) {
    if threads.iter().any(|t| matches!(t.role, Role::Vcpu(_))) {
        if let Some(main) = threads.iter_mut().find(|t| t.tid == t.pid && t.role == Role::Other) {
            main.role = Role::Emulator;
        }
    }
}

/// Finds Cloud Hypervisor's device threads among a process's threads. Their names begin with the
/// device's id, which a user may choose, so they are meaningful in this process only.
pub(super) fn name_cloud_hypervisor(threads: &mut [Thread]) {
    if !threads.iter().any(|t| t.tid == t.pid && t.name == CLOUD_HYPERVISOR) {
        return;
    }
    let queue = |name: &str| {
        let after = name.rsplit_once("_qp").or_else(|| name.rsplit_once("_q"));
        after.is_some_and(|(_, number)| number.parse::<u32>().is_ok())
    };
    for t in threads.iter_mut().filter(|t| t.role == Role::Other) {
        if t.name == "vmm" {
            t.role = Role::Emulator;
        } else if t.name.starts_with('_') || queue(&t.name) {
            t.role = Role::IoThread(t.name.clone());
        }
    }
}

/// Finds QEMU's RCU thread among a process's threads where its name does not show it: it is started
/// before QEMU has read whether threads are to be named (`rcu_init()`, a constructor), so it is the
/// first after the main thread and has its name.
pub(super) fn name_rcu(threads: &mut [Thread]) {
    let main = threads.iter().find(|t| t.role == Role::Emulator && is_qemu(&t.name));
    let Some(main) = main.map(|t| (t.tid, t.name.clone())) else { return };
    let others = threads.iter_mut().filter(|t| t.tid != main.0);
    if let Some(first) = others.min_by_key(|t| (t.start, t.tid)) {
        if first.role == Role::Other && first.name == main.1 {
            first.role = Role::Rcu;
        }
    }
}

/// Whether a name is QEMU's. The kernel truncates names to 15 bytes: `qemu-system-x86`.
fn is_qemu(name: &str) -> bool {
    name.starts_with("qemu-system-") || name == "qemu-kvm" || name == "kvm" || name == "qemu"
}

/// Role of a kernel thread that was started for a VM; `None` for any other. Its name ends in the id
/// of the process, or for vhost of the thread, that started it.
#[must_use]
pub fn kernel_role(name: &str, pids: &BTreeSet<u32>, tids: &BTreeSet<u32>) -> Option<Role> {
    let (role, owner) = kernel_owner(name)?;
    let owners = if role == Role::Vhost { tids } else { pids };
    owners.contains(&owner).then_some(role)
}

/// Role of a kernel thread that KVM or vhost has started, by its name, with the id of the thread
/// that started it; a process has the id of its first thread.
#[must_use]
pub fn kernel_owner(name: &str) -> Option<(Role, u32)> {
    let of = |prefix: &str, role: Role| Some((role, name.strip_prefix(prefix)?.parse().ok()?));
    of("vhost-", Role::Vhost)
        .or_else(|| of("kvm-pit/", Role::KvmPit))
        .or_else(|| of("kvm-nx-lpage-recovery-", Role::KvmHugePages))
}
