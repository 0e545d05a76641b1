//! The system calls of each role. The lists come from tracing the whole test suite, and each entry
//! is justified: it is used, or belongs to reporting a panic or the end of a thread.
//!
//! Any other call ends the process: this code never makes it, and an error would let an attacker
//! try the next call. QEMU reconnects to the restarted I/O domain, and requests in flight are in
//! its memory.

use std::collections::BTreeMap;
use std::io;

use libc::c_long;
use rtvirtio_engine::confine::Role;
use rtvirtio_engine::memory::{BUFFERS_UPDATE, CLONE_BUFFERS};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// `PR_SET_VMA` of `linux/prctl.h`, by which newer libcs name their memory.
const PR_SET_VMA: u64 = 0x5356_4d41;

/// Memory, locks, time, the end of a thread and the report of a panic.
const COMMON: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_futex,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    // malloc reads the number of CPUs.
    libc::SYS_sched_getaffinity,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

const ENGINE: &[c_long] = &[libc::SYS_io_uring_enter];

/// Frames are read and written by calls that every role has, but for those of a packet socket,
/// which come with their VLAN. The requests of `ioctl` and the option of `setsockopt` are limited
/// in [`filters`].
const NETWORK: &[c_long] = &[libc::SYS_io_uring_enter, libc::SYS_recvmsg];

/// Waiting for front ends, messages with descriptors, and the checks of these descriptors.
const VHOST_USER: &[c_long] = &[
    libc::SYS_ppoll,
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    // `vhost` reads the type of each socket, also in refused messages.
    libc::SYS_getsockopt,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_fstatfs,
    libc::SYS_lseek,
    libc::SYS_readlinkat,
    // Shared memory of requests in flight.
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    // Negotiation in the place of a front end that had negotiated before.
    libc::SYS_socketpair,
    libc::SYS_dup3,
];

/// The control socket, signals, the configuration, and removing the sockets at the end.
const CONTROL: &[c_long] = &[
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Sockets of attached disks: another process binds them and passes them on.
    libc::SYS_listen,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_ppoll,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_unlinkat,
];

/// Starting a thread, and confining it: in addition to what that thread may do, because it inherits
/// this filter.
const SPAWNER: &[c_long] = &[
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_seccomp,
];

/// Optional calls of a backtrace or an older malloc: they fail with an error instead of ending the
/// process.
const REFUSED: &[c_long] = &[libc::SYS_openat, libc::SYS_readlinkat, libc::SYS_getcwd];

/// The older variants of these calls on x86-64.
#[cfg(target_arch = "x86_64")]
mod old {
    use super::c_long;
    pub const VHOST_USER: &[c_long] = &[libc::SYS_readlink];
    pub const CONTROL: &[c_long] = &[libc::SYS_unlink, libc::SYS_poll];
    pub const REFUSED: &[c_long] = &[libc::SYS_open, libc::SYS_readlink, libc::SYS_stat, libc::SYS_lstat];
}
#[cfg(not(target_arch = "x86_64"))]
mod old {
    use super::c_long;
    pub const VHOST_USER: &[c_long] = &[];
    pub const CONTROL: &[c_long] = &[];
    pub const REFUSED: &[c_long] = &[];
}

/// Whether the kernel supports `SECCOMP_RET_KILL_PROCESS` (Linux 4.14).
pub fn is_supported() -> bool {
    let action: u32 = libc::SECCOMP_RET_KILL_PROCESS;
    // SAFETY: the kernel reads four bytes from `action`, which outlives the call.
    let done = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, std::ptr::from_ref(&action))
    };
    done == 0
}

/// Filters for each role, all but the first for calls that fail with an error: the kernel takes the
/// stricter of two verdicts, so the first filter has to allow them.
#[derive(Debug)]
pub struct Filters {
    engine: Vec<BpfProgram>,
    network: Vec<BpfProgram>,
    vhost_user: Vec<BpfProgram>,
    control: Vec<BpfProgram>,
    spawner: Vec<BpfProgram>,
}

impl Filters {
    /// Filters of this process, the only one that its threads may signal. With `pins`, disks'
    /// threads may register buffers with their rings, and engines take them over.
    ///
    /// # Errors
    /// A rule that cannot be compiled; none is.
    pub fn new(log: bool, pins: bool) -> anyhow::Result<Self> {
        let of = |role| filters(role, log, pins);
        Ok(Self {
            engine: of(Role::Engine { passes_priority: false })?,
            network: of(Role::Network)?,
            vhost_user: of(Role::VhostUser)?,
            control: of(Role::Control)?,
            spawner: of(Role::Spawner)?,
        })
    }

    /// Filters the calling thread, irreversibly.
    pub fn apply(&self, role: Role) -> io::Result<()> {
        let filters = match role {
            Role::Engine { .. } => &self.engine,
            Role::Network => &self.network,
            Role::VhostUser => &self.vhost_user,
            Role::Control => &self.control,
            Role::Spawner => &self.spawner,
        };
        // The most permissive one first: the last forbids another seccomp().
        for filter in filters.iter().rev() {
            seccompiler::apply_filter(filter).map_err(io::Error::other)?;
        }
        Ok(())
    }
}

/// The optional calls that a role does not need.
fn refused_except(needs: &[&[c_long]]) -> Vec<c_long> {
    let needs = needs.concat();
    [REFUSED, old::REFUSED].concat().into_iter().filter(|c| !needs.contains(c)).collect()
}

fn filters(role: Role, log: bool, pins: bool) -> anyhow::Result<Vec<BpfProgram>> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(anyhow::Error::new)?;
    let (own, old, refused): (_, _, Vec<c_long>) = match role {
        Role::Engine { .. } => (ENGINE, &[][..], refused_except(&[])),
        Role::Network => (NETWORK, &[][..], refused_except(&[])),
        Role::VhostUser => (VHOST_USER, old::VHOST_USER, refused_except(&[VHOST_USER, old::VHOST_USER])),
        Role::Control => {
            (CONTROL, old::CONTROL, refused_except(&[CONTROL, old::CONTROL, &[libc::SYS_openat]]))
        }
        // Its threads inherit its filters, so it is refused what they are.
        Role::Spawner => (VHOST_USER, old::VHOST_USER, refused_except(&[VHOST_USER, old::VHOST_USER])),
    };
    let mut rules = common()?;
    let any = |calls: &[c_long]| calls.iter().map(|c| (*c, Vec::new())).collect::<Rules>();
    rules.extend(any(own));
    rules.extend(any(old));
    rules.extend(any(&refused));
    if role == Role::Control {
        // Read-only, in addition to landlock's rules for paths.
        let writes = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC) as u64;
        rules.insert(libc::SYS_openat, vec![rule(2, SeccompCmpOp::MaskedEq(writes), 0)?]);
    }
    let registering: &[u8] = match role {
        _ if !pins => &[],
        Role::Engine { .. } => &[BUFFERS_UPDATE, CLONE_BUFFERS],
        // Only engines take buffers over.
        Role::VhostUser | Role::Spawner => &[BUFFERS_UPDATE],
        Role::Network | Role::Control => &[],
    };
    if !registering.is_empty() {
        let operations = registering.iter().map(|of| rule(1, SeccompCmpOp::Eq, u64::from(*of)));
        let operations: Result<Vec<_>, _> = operations.collect();
        rules.insert(libc::SYS_io_uring_register, operations?);
    }
    if role == Role::Network {
        let requests = rtvirtio_domain_resources::uplink::IOCTLS;
        let requests: Result<Vec<_>, _> =
            requests.map(|request| rule(1, SeccompCmpOp::Eq, request)).into_iter().collect();
        rules.insert(libc::SYS_ioctl, requests?);
        let filter = vec![rule(2, SeccompCmpOp::Eq, libc::SO_ATTACH_FILTER as u64)?];
        rules.insert(libc::SYS_setsockopt, filter);
    }
    if matches!(role, Role::VhostUser | Role::Spawner | Role::Control) {
        // The lock of a disk that moves with its guest, and that of its new end when it grows.
        rules.entry(libc::SYS_fcntl).or_default().push(rule(1, SeccompCmpOp::Eq, libc::F_OFD_SETLK as u64)?);
    }
    if role == Role::Spawner {
        rules.extend(any(SPAWNER));
        let thread = (libc::CLONE_THREAD | libc::CLONE_VM) as u64;
        rules.insert(libc::SYS_clone, vec![rule(0, SeccompCmpOp::MaskedEq(thread), thread)?]);
        rules.insert(libc::SYS_clone3, Vec::new());
        let names = [PR_SET_VMA, libc::PR_SET_NAME as u64, libc::PR_SET_NO_NEW_PRIVS as u64];
        let names: Result<Vec<_>, _> =
            names.map(|name| rule(0, SeccompCmpOp::Eq, name)).into_iter().collect();
        rules.insert(libc::SYS_prctl, names?);
    }
    let otherwise = if log { SeccompAction::Log } else { SeccompAction::KillProcess };
    let first = SeccompFilter::new(rules, otherwise, SeccompAction::Allow, arch)?.try_into()?;
    let error = SeccompAction::Errno(libc::EACCES as u32);
    let second = SeccompFilter::new(any(&refused), SeccompAction::Allow, error, arch)?.try_into()?;
    let mut filters = vec![first, second];
    if role == Role::Spawner {
        // A filter cannot read the flags of clone3, which are in memory. After ENOSYS a libc falls
        // back to clone, whose flags are an argument.
        let absent = SeccompAction::Errno(libc::ENOSYS as u32);
        let clone3 = any(&[libc::SYS_clone3]);
        filters.push(SeccompFilter::new(clone3, SeccompAction::Allow, absent, arch)?.try_into()?);
    }
    Ok(filters)
}

fn common() -> Result<Rules, BackendError> {
    let mut rules: Rules = COMMON.iter().map(|c| (*c, Vec::new())).collect();
    // No executable memory.
    let no_code = || rule(2, SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64), 0);
    rules.insert(libc::SYS_mmap, vec![no_code()?]);
    rules.insert(libc::SYS_mprotect, vec![no_code()?]);
    // abort() of this process.
    rules.insert(libc::SYS_tgkill, vec![rule(0, SeccompCmpOp::Eq, u64::from(std::process::id()))?]);
    rules.insert(libc::SYS_prctl, vec![rule(0, SeccompCmpOp::Eq, PR_SET_VMA)?]);
    let commands =
        [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_GETFL, libc::F_GET_SEALS, libc::F_ADD_SEALS];
    let fcntl: Result<Vec<SeccompRule>, BackendError> =
        commands.into_iter().map(|c| rule(1, SeccompCmpOp::Eq, c as u64)).collect();
    rules.insert(libc::SYS_fcntl, fcntl?);
    Ok(rules)
}

/// Rule with one condition on the low 32 bits of an argument: all of these are `int` in the kernel.
fn rule(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?])
}
