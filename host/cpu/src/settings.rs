//! From a VM's threads and its contract to writes.

use std::collections::BTreeSet;
use std::path::Path;

use rtvirtio_apply::{Form, Place, Target, Write};
use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::{Cgroups, Hierarchy, HostError, Root, process, text, unless_gone};
use rtvirtio_planner::Enforcement;
use rtvirtio_vmm::threads::main_loop_without_vcpus;
use rtvirtio_vmm::{Role, Thread};

use crate::ask::{main_of, scheduling};
use crate::{Ask, Backend, CpuError, Order, Probe, Settings, attr, deadline, managed};

const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Name of the cgroup that is made for a VM, directly below the root.
#[must_use]
pub fn group_name(vm: &str) -> String {
    format!("rtvirtio-{vm}")
}

/// Turns a request into writes, without writing anything. Admission is the caller's, because it
/// concerns all VMs: [`crate::admit`].
///
/// # Errors
/// [`CpuError::NoVcpu`] where no vCPU is known; [`CpuError::CannotHold`] where the mechanism cannot
/// hold these threads, each with a remedy.
pub fn settings(root: &Root, probe: &Probe, backend: Backend, ask: &Ask<'_>) -> Result<Settings, CpuError> {
    settings_in(root, probe, (backend, None), ask)
}

/// Like [`settings`], for a VM whose root domain has these CPUs once partitions are made, before
/// its settings are written: its threads are as by [`crate::Partition::entered`] or
/// [`crate::outside`].
pub fn settings_in(
    root: &Root,
    probe: &Probe,
    (backend, domain): (Backend, Option<&BTreeSet<u32>>),
    ask: &Ask<'_>,
) -> Result<Settings, CpuError> {
    if ask.threads.is_empty() {
        return Err(CpuError::NoThreads { vm: ask.vm.to_owned() });
    }
    has_vcpus(ask)?;
    let mut out = Settings::none(backend);
    match backend {
        Backend::RtGroup => {
            let cgroups = hierarchy(probe, backend, ask)?;
            let files = [
                ("cpu.rt_period_us", ask.contract.period_us()),
                ("cpu.rt_runtime_us", ask.contract.budget_us()),
            ];
            group_v1(root, cgroups, ask, &files, &mut out)?;
            priorities(ask, &mut out);
        }
        Backend::CpuMax => {
            let cgroups = hierarchy(probe, backend, ask)?;
            let all = ask.contract.budget_us().saturating_mul(reach(root, ask)?);
            if cgroups.hierarchy == Hierarchy::V1 {
                let files = [("cpu.cfs_period_us", ask.contract.period_us()), ("cpu.cfs_quota_us", all)];
                group_v1(root, cgroups, ask, &files, &mut out)?;
            } else {
                units_file(root, cgroups, ask, "cpu.max", all, &mut out)?;
            }
            let real_time = ask.threads.iter().filter(|t| t.policy.is_some_and(|p| p.is_real_time()));
            out.outside.extend(
                real_time.map(|t| (t.tid, "it is real-time, and the cap holds ordinary threads".to_owned())),
            );
        }
        Backend::Hcbs => {
            let cgroups = hierarchy(probe, backend, ask)?;
            units_file(root, cgroups, ask, "cpu.rt.max", ask.contract.budget_us(), &mut out)?;
            priorities(ask, &mut out);
        }
        Backend::Deadline => deadline::deadline((root, domain), probe, ask, &mut out)?,
        Backend::Throttle => {
            priorities(ask, &mut out);
            out.notes.push(format!(
                "this kernel has no budget for a group of real-time threads: the contract of {} is not enforced, and only what the \
                 kernel keeps for ordinary threads limits the VM",
                ask.contract
            ));
        }
    }
    if ask.order == Order::Rt {
        out.notes.extend(unlocked(root, ask));
    }
    weaken(ask, &mut out);
    Ok(out)
}

/// Refuses a VM whose vCPUs are not among the known threads: a budget for the main loop alone would
/// look like a guarantee, and a real-time priority for it would starve the guest.
fn has_vcpus(ask: &Ask<'_>) -> Result<(), CpuError> {
    let none = || ask.threads.iter().all(|t| !matches!(t.role, Role::Vcpu(_)));
    let without = main_loop_without_vcpus(ask.threads).or_else(|| none().then(|| main_thread(ask)));
    without.map_or(Ok(()), |main| {
        Err(CpuError::NoVcpu {
            vm: ask.vm.to_owned(),
            pid: main.pid,
            name: main.name.clone(),
            threads: ask.threads.iter().filter(|t| t.pid == main.pid).count(),
        })
    })
}

/// Lowers the strength to a hint if a vCPU is outside of the contract.
fn weaken(ask: &Ask<'_>, out: &mut Settings) {
    let vcpu = |tid: u32| ask.threads.iter().find(|t| t.tid == tid && matches!(t.role, Role::Vcpu(_)));
    let outside: Vec<_> = out.outside.iter().filter_map(|(tid, _)| vcpu(*tid)).collect();
    if let Some(first) = outside.first() {
        out.strength = Enforcement::Hint;
        out.notes.push(format!(
            "{} of thread {} is outside of the contract, which therefore promises nothing",
            first.role, first.tid
        ));
    }
}

/// Number of CPUs that the VM can use at one time: those that its threads may run on, at most as
/// many as it has threads.
fn reach(root: &Root, ask: &Ask<'_>) -> Result<u64, CpuError> {
    let online = root.read(ONLINE)?;
    let online = text::cpu_list(&online).ok_or_else(|| HostError::form(ONLINE, &online, "a list of CPUs"))?;
    let masks = ask.threads.iter().filter_map(|t| text::cpu_list(&t.affinity));
    let may: BTreeSet<_> = masks.flatten().filter(|cpu| online.contains(cpu)).collect();
    Ok(may.len().min(ask.threads.len()).max(1) as u64)
}

fn hierarchy<'p>(probe: &'p Probe, backend: Backend, ask: &Ask<'_>) -> Result<&'p Cgroups, CpuError> {
    probe.cgroups.as_ref().ok_or_else(|| CpuError::CannotHold {
        vm: ask.vm.to_owned(),
        backend,
        why: "no cgroup hierarchy has the CPU controller".to_owned(),
        remedy: "mount one; see `rtvirtio check`".to_owned(),
    })
}

/// Thread whose cgroup and policy stand for the whole VM.
fn main_thread<'t>(ask: &Ask<'t>) -> &'t Thread {
    main_of(ask.threads).unwrap_or(&ask.threads[0])
}

/// Scheduling that a thread's children inherit; DEADLINE cannot be inherited, so such a thread's
/// children are ordinary.
fn heirs(thread: &Thread) -> Attr {
    match thread.policy {
        Some(policy) if thread.reservation.is_none() => {
            let nice = if policy.is_real_time() { 0 } else { thread.nice };
            Attr { policy, priority: thread.priority, ..Attr::other(nice) }
        }
        _ => Attr::other(0),
    }
}

/// Sets the budget of a v1 group: of one of our own, or of the VM's where a manager keeps its
/// threads in groups below it.
fn group_v1(
    root: &Root,
    cgroups: &Cgroups,
    ask: &Ask<'_>,
    files: &[(&str, u64)],
    out: &mut Settings,
) -> Result<(), CpuError> {
    match managed::group(cgroups, main_thread(ask)) {
        Some(group) => managed::budget(cgroups, ask, group, files, out),
        None => own_group(root, cgroups, ask, files, out),
    }
}

/// Makes a v1 group of our own with the files set, and all threads in it. The VM's own group is
/// left alone: it may hold other processes, and on v1 a real-time budget would first have to be
/// given to every group above it.
fn own_group(
    root: &Root,
    cgroups: &Cgroups,
    ask: &Ask<'_>,
    files: &[(&str, u64)],
    out: &mut Settings,
) -> Result<(), CpuError> {
    let group = Path::new("/").join(group_name(ask.vm));
    let dir = cgroups.dir(&group)?;
    if root.exists(&dir)? {
        return Err(CpuError::GroupExists { vm: ask.vm.to_owned(), path: dir });
    }
    let main = main_thread(ask);
    let home = cgroups.dir(cgroups.of_thread(&main.cgroups).unwrap_or(Path::new("/")))?;
    let form = Form::Group { home, scheduling: heirs(main).to_string() };
    let target = Target { place: Place::Host, path: dir.clone(), form };
    out.writes.push(Write::new(format!("cgroup of {}", ask.vm), target, "present"));
    for (file, value) in files {
        let target = Target::host(dir.join(file), Form::Plain);
        let write = Write::new(format!("{file} of {}", ask.vm), target, value.to_string());
        // A real-time budget is given back before its group is removed: killed in between, the file
        // shows 0.
        let also_ours = if *file == "cpu.rt_runtime_us" { vec!["0".to_owned()] } else { Vec::new() };
        out.writes.push(Write { created_by: Some(0), also_ours, ..write });
    }
    out.writes.extend(ask.threads.iter().map(|t| managed::moved(cgroups, ask, t, &group)));
    Ok(())
}

/// Sets the limit of the VM's unit: on v2 a process may not be taken out of its unit.
fn units_file(
    root: &Root,
    cgroups: &Cgroups,
    ask: &Ask<'_>,
    file: &str,
    budget_us: u64,
    out: &mut Settings,
) -> Result<(), CpuError> {
    let backend = out.backend;
    let cannot = |why: String, remedy: &str| CpuError::CannotHold {
        vm: ask.vm.to_owned(),
        backend,
        why,
        remedy: remedy.to_owned(),
    };
    let of = |t: &Thread| Cgroups::unit_of(cgroups.of_thread(&t.cgroups).unwrap_or(Path::new("/")));
    let unit = of(main_thread(ask));
    let alone = "start the VM in a cgroup of its own, e.g. with `systemd-run --scope`";
    if Cgroups::is_root(&unit) {
        return Err(cannot("it runs in the root cgroup, which has no limit".to_owned(), alone));
    }
    let pids = cgroups.pids(root, &unit)?;
    let mut helpers = Vec::new();
    for other in pids.iter().filter(|p| !ask.threads.iter().any(|t| t.pid == **p)) {
        let Some(name) = unless_gone(process::name(root, *other))? else { continue };
        if !managed::is_helper_process(root, *other) {
            return Err(cannot(
                format!("process {other} ({name}) runs in its cgroup {} too", unit.display()),
                &format!(
                    "where it serves the VM, name the VM by `cgroup = '{}'`, and the contract holds all in it together; else {alone}",
                    unit.display()
                ),
            ));
        }
        helpers.push(format!("{name} ({other})"));
    }
    if !helpers.is_empty() {
        out.notes.push(format!(
            "{} in its cgroup {}: the budget holds what serves the VM too, so leave room for it",
            helpers.join(", "),
            unit.display()
        ));
    }
    let path = cgroups.dir(&unit)?.join(file);
    if !root.exists(&path)? {
        let why = format!("{} does not exist: the cpu controller is not enabled for it", path.display());
        return Err(cannot(
            why,
            "echo +cpu to cgroup.subtree_control of the group above it (systemd: CPUAccounting=yes)",
        ));
    }
    let value = format!("{budget_us} {}", ask.contract.period_us());
    if file == "cpu.max" {
        let wanted = budget_us as f64 / ask.contract.period_us() as f64;
        let above = cgroups.cpu_limits_on_path(root, &unit)?.into_iter().filter(|l| l.cgroup != unit);
        out.notes.extend(above.filter(|l| l.cpus() < wanted).map(|l| {
            format!(
                "{} ({}) lets all that is below it have {:.2} CPUs at most, and the contract of {} is {wanted:.2}: raise it, or the VM gets less",
                l.cgroup.display(),
                l.file,
                l.cpus(),
                ask.vm
            )
        }));
    }
    out.writes.push(Write::new(format!("{file} of {}", ask.vm), Target::host(path, Form::Plain), value));
    let stray = ask.threads.iter().filter(|t| of(t) != unit);
    out.outside.extend(stray.map(|t| (t.tid, format!("it is in another cgroup than {}", unit.display()))));
    Ok(())
}

/// Writes real-time priorities, services before vCPUs: at no moment does a vCPU have a higher
/// priority than the threads that serve it.
pub(crate) fn priorities(ask: &Ask<'_>, out: &mut Settings) {
    let mut wanted = Vec::new();
    // The VM's manager moves a new thread into a group without a budget.
    let managed = out.group.is_some();
    for t in ask.threads {
        let attr = attr(&t.role, ask.order, ask.level, out.backend).map(|attr| Attr {
            reset_on_fork: attr.reset_on_fork || (managed && attr.policy.is_real_time()),
            ..attr
        });
        match attr {
            _ if t.reservation.is_some() => {
                out.outside.push((t.tid, "it has a deadline reservation of its own".to_owned()));
            }
            None => out.outside.push((t.tid, format!("a thread of role `{}` is left ordinary", t.role))),
            Some(attr) => {
                if !attr.policy.is_real_time() {
                    out.outside.push((t.tid, "AIO workers stay ordinary, as the priorities say".to_owned()));
                }
                // An ordinary thread that stays ordinary keeps its nice value.
                let ordinary = t.policy.is_some_and(|p| !p.is_real_time());
                if attr.policy.is_real_time() || !ordinary {
                    wanted.push((t, attr));
                }
            }
        }
    }
    if managed && ask.order == Order::Contract {
        out.notes.push(
            "libvirt moves each I/O thread and vCPU that is plugged in into a group without a real-time budget; so new threads \
             start as ordinary ones, outside of the contract, until `rtvirtio keep` takes them in, or rtvirtiod where it runs"
                .to_owned(),
        );
    }
    wanted.sort_by_key(|(_, attr)| std::cmp::Reverse(attr.priority));
    out.writes.extend(wanted.into_iter().map(|(t, attr)| scheduling(ask, t, attr)));
}

/// Note for a VM that is not locked in RAM (the paper's `mlockall`): page faults add latency.
fn unlocked(root: &Root, ask: &Ask<'_>) -> Option<String> {
    let (locked, resident) = process::locked_memory(root, main_thread(ask).pid).ok()?;
    (locked < resident / 2).then(|| {
        format!(
            "{} MiB of {} MiB in RAM are locked; start QEMU with `-overcommit mem-lock=on` (libvirt: <memoryBacking><locked/>)",
            locked >> 20,
            resident >> 20
        )
    })
}
