//! CPU: settings that delay a thread which is ready to submit or complete a request.

use std::path::Path;

use rustix::io::Errno;

use super::Finding;
use super::realtime::{self, is_unthrottled};
use crate::{HostError, Root, process};

const CPUS: &str = "/sys/devices/system/cpu";
/// Exit latency above which an idle state shows in the tail of a fast flash device, in
/// microseconds.
const DEEP_US: u64 = 50;

pub(super) fn check(root: &Root, found: &mut Vec<Finding>) {
    throttling(root, found);
    group_budget(root, found);
    preemption(root, found);
    governor(root, found);
    idle(root, found);
    smt(root, found);
    memlock(root, found);
}

fn throttling(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.throttling";
    const WHY: &str = "real-time threads that use up their share of a period are stopped until it ends";
    const REMEDY: &str = "sysctl kernel.sched_rt_runtime_us=950000";
    let read = || {
        let runtime = root.number::<i64>("/proc/sys/kernel/sched_rt_runtime_us")?;
        let period = root.number::<i64>("/proc/sys/kernel/sched_rt_period_us")?;
        Ok::<_, HostError>((runtime, period, super::stops_fifo(root)?, super::least_fair_server(root)?))
    };
    let (runtime, period, stops, server) = match read() {
        Ok(read) => read,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    // The whole period is Linux 7's default.
    let is_off = !stops || is_unthrottled(runtime, period);
    let deadline = if is_unthrottled(runtime, period) {
        String::new()
    } else {
        format!("; {runtime} us of each {period} us bound deadline reservations only")
    };
    found.push(match server {
        _ if !is_off && runtime == 0 => {
            Finding::warn(ID, "real-time threads get no time at all", WHY, REMEDY)
        }
        _ if !is_off => {
            Finding::ok(ID, format!("real-time threads get {runtime} us of each {period} us"), WHY)
        }
        Some(_) if runtime == 0 => {
            Finding::warn(ID, "off, and deadline threads get no time at all", WHY, REMEDY)
        }
        Some(share) if share > 0.0 => {
            let what = "off; the fair server alone keeps a share for ordinary threads";
            Finding::ok(ID, format!("{what}{deadline}"), WHY)
        }
        Some(_) => {
            let what = "off, and so is the fair server of a CPU";
            Finding::warn(ID, format!("{what}{deadline}"), WHY, "see rt.fair_server")
        }
        None => Finding::warn(
            ID,
            "off, and this kernel has no fair server: a runaway real-time thread can hang a CPU",
            WHY,
            REMEDY,
        ),
    });
}

fn group_budget(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.group";
    const WHY: &str =
        "with CONFIG_RT_GROUP_SCHED a new cgroup has no real-time budget: SCHED_FIFO in it is refused";
    let budget = realtime::group_budget(root);
    found.push(match budget.and_then(|file| file.map(|file| root.number::<i64>(file)).transpose()) {
        Err(e) => Finding::unknown(ID, &e, WHY),
        Ok(None) => Finding::ok(ID, "no real-time budget per cgroup", WHY),
        Ok(Some(budget)) => Finding::warn(
            ID,
            format!("RT_GROUP_SCHED is on (root budget {budget} us)"),
            WHY,
            "give the VM's cpu cgroup a budget: echo 400000 >cpu.rt_runtime_us, parents first",
        ),
    });
}

/// Whether the kernel is one with PREEMPT_RT. Its version says so; the file is of the patches that
/// were outside of Linux, and of few kernels from 7 on.
pub fn preempt_rt(root: &Root) -> Result<bool, HostError> {
    if root.read_optional("/sys/kernel/realtime")?.is_some_and(|text| text.trim() == "1") {
        return Ok(true);
    }
    let version = root.read("/proc/sys/kernel/version")?;
    Ok(version.split_whitespace().any(|word| word == "PREEMPT_RT"))
}

fn preemption(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str = "without PREEMPT_RT a kernel section can hold up a VM's thread; relevant for targets below about 1 ms";
    found.push(match preempt_rt(root) {
        Ok(rt) => {
            Finding::ok("preempt_rt", if rt { "PREEMPT_RT kernel" } else { "not a PREEMPT_RT kernel" }, WHY)
        }
        Err(e) => Finding::unknown("preempt_rt", &e, WHY),
    });
}

fn governor(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "cpu.governor";
    const WHY: &str = "a CPU that is clocked down takes longer to submit and complete requests";
    let mut slow = Vec::new();
    let mut any = false;
    let mut unread = None;
    let names = root.list(CPUS).unwrap_or_else(|e| {
        unread = Some(e);
        Vec::new()
    });
    for name in names.iter().filter(|n| n.starts_with("cpu")) {
        let file = Path::new(CPUS).join(name).join("cpufreq/scaling_governor");
        match root.read_optional(&file) {
            Ok(None) => {}
            Ok(Some(governor)) => {
                any = true;
                if governor != "performance" {
                    slow.push(format!("{name} {governor}"));
                }
            }
            // The CPU is offline (`show()` in drivers/cpufreq/cpufreq.c).
            Err(e) if e.is_errno(Errno::BUSY) => {}
            Err(e) => unread = Some(e),
        }
    }
    found.push(if let (Some(e), true) = (&unread, slow.is_empty()) {
        Finding::unknown(ID, e, WHY)
    } else if !any {
        Finding::ok(ID, "the clock is not set by this kernel (a VM, or the firmware)", WHY)
    } else if slow.is_empty() {
        Finding::ok(ID, "performance on all CPUs", WHY)
    } else {
        Finding::warn(ID, slow.join(", "), WHY, "cpupower frequency-set -g performance")
    });
}

fn idle(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "cpu.idle";
    const WHY: &str = "waking from a deep idle state adds its exit latency to a request";
    let driver = root.read_optional(Path::new(CPUS).join("cpuidle/current_driver"));
    let (driver, deepest) = match driver.and_then(|d| Ok((d.filter(|d| d != "none"), deepest_idle(root)?))) {
        Ok(both) => both,
        Err(e) => return found.push(Finding::unknown(ID, &e, WHY)),
    };
    found.push(match (driver, deepest) {
        (None, _) => Finding::ok(ID, "no idle driver", WHY),
        (Some(driver), Some((us, state))) if us > DEEP_US => Finding::warn(
            ID,
            format!("{driver}: deepest idle state {state} takes {us} us to leave"),
            WHY,
            "cpupower idle-set -D 50 (disables states above 50 us), or hold /dev/cpu_dma_latency open",
        ),
        (Some(driver), Some((us, state))) => {
            Finding::ok(ID, format!("{driver}: deepest idle state {state}, {us} us"), WHY)
        }
        (Some(driver), None) => Finding::ok(ID, format!("{driver}: no idle state in use"), WHY),
    });
}

/// Exit latency in microseconds and name of the deepest idle state that is in use on CPU 0.
fn deepest_idle(root: &Root) -> Result<Option<(u64, String)>, HostError> {
    let states = Path::new(CPUS).join("cpu0/cpuidle");
    let mut deepest = None;
    if !root.exists(&states)? {
        return Ok(deepest);
    }
    for state in root.list(&states)? {
        let dir = states.join(state);
        if root.number::<i64>(dir.join("disable"))? == 0 {
            let latency = u64::try_from(root.number::<i64>(dir.join("latency"))?).unwrap_or(0);
            deepest = deepest.max(Some((latency, root.read(dir.join("name"))?.trim().to_owned())));
        }
    }
    Ok(deepest)
}

fn smt(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str = "two threads of one core slow each other; pin VMs so that they do not share a core";
    let active = match root.read_optional(Path::new(CPUS).join("smt/active")) {
        Ok(active) => active,
        Err(e) => return found.push(Finding::unknown("cpu.smt", &e, WHY)),
    };
    found.push(match active.as_deref() {
        Some("1") => Finding::warn(
            "cpu.smt",
            "two threads share each core",
            WHY,
            "pin VMs with targets to whole cores (lscpu -e shows them), or echo off >/sys/devices/system/cpu/smt/control",
        ),
        Some(_) => Finding::ok("cpu.smt", "off", WHY),
        None => Finding::ok("cpu.smt", "not known to this kernel", WHY),
    });
}

fn memlock(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "memlock";
    const WHY: &str = "QEMU with mem-lock=on needs the limit to cover the guest's memory, else a page fault adds to the tail";
    match process::memlock_limit(root, None) {
        Err(e) => found.push(Finding::unknown(ID, &e, WHY)),
        Ok(limit) => {
            let limit = limit.unwrap_or_else(|| "not given".to_owned());
            found.push(if limit == "unlimited" {
                Finding::ok(ID, "locked memory is unlimited", WHY)
            } else {
                let remedy =
                    "root may exceed it; for others set LimitMEMLOCK=infinity or `ulimit -l unlimited`";
                Finding::ok(ID, format!("locked memory is limited to {limit} bytes; {remedy}"), WHY)
            });
        }
    }
}
