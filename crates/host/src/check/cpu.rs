//! CPU: what delays a thread that is ready to submit or complete a request.

use std::path::Path;

use super::Finding;
use crate::mounts::mounts;
use crate::{HostError, Root};

const CPUS: &str = "/sys/devices/system/cpu";
/// Exit latency above which an idle state shows in the tail of a fast flash device, in microseconds.
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

fn number(root: &Root, path: impl AsRef<Path>) -> Result<i64, HostError> {
    let path = path.as_ref();
    let text = root.read(path)?;
    text.trim().parse().map_err(|_| HostError::Form {
        path: path.to_owned(),
        text: text.trim().to_owned(),
        expected: "a number",
    })
}

fn throttling(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.throttling";
    const WHY: &str = "real-time threads that use up their share of a period are stopped until it ends";
    let values = number(root, "/proc/sys/kernel/sched_rt_runtime_us")
        .and_then(|r| Ok((r, number(root, "/proc/sys/kernel/sched_rt_period_us")?)));
    found.push(match values {
        Err(e) => Finding::unknown(ID, &e, WHY),
        Ok((-1, _)) => match super::least_fair_server(root) {
            Some(share) if share > 0.0 => {
                Finding::ok(ID, "off; the fair server keeps a share for ordinary threads", WHY)
            }
            Some(_) => {
                Finding::warn(ID, "off, and so is the fair server of a CPU", WHY, "see rt.fair_server")
            }
            None => Finding::warn(
                ID,
                "off, and this kernel has no fair server: a runaway real-time thread can hang a CPU",
                WHY,
                "sysctl kernel.sched_rt_runtime_us=950000",
            ),
        },
        Ok((0, _)) => Finding::warn(
            ID,
            "real-time threads get no time at all",
            WHY,
            "sysctl kernel.sched_rt_runtime_us=950000",
        ),
        Ok((runtime, period)) => {
            Finding::ok(ID, format!("real-time threads get {runtime} us of each {period} us"), WHY)
        }
    });
}

fn group_budget(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "rt.group";
    const WHY: &str =
        "with CONFIG_RT_GROUP_SCHED a new cgroup has no real-time budget: SCHED_FIFO in it is refused";
    let cpu = mounts(root)
        .unwrap_or_default()
        .into_iter()
        .find(|m| m.fs == "cgroup" && m.options.iter().any(|o| o == "cpu"));
    let file = cpu.map(|m| m.point.join("cpu.rt_runtime_us")).filter(|f| root.exists(f));
    let Some(file) = file else {
        return found.push(Finding::ok(ID, "no real-time budget per cgroup", WHY));
    };
    found.push(match number(root, &file) {
        Err(e) => Finding::unknown(ID, &e, WHY),
        Ok(budget) => Finding::warn(
            ID,
            format!("RT_GROUP_SCHED is on (root budget {budget} us)"),
            WHY,
            "give the VM's cpu cgroup a budget: echo 400000 >cpu.rt_runtime_us, parents first",
        ),
    });
}

fn preemption(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str =
        "without PREEMPT_RT a kernel section can hold up a VM's thread; matters for targets below about 1 ms";
    let rt = root.read_optional("/sys/kernel/realtime").ok().flatten().is_some_and(|t| t == "1");
    let what = if rt { "PREEMPT_RT kernel" } else { "not a PREEMPT_RT kernel" };
    found.push(Finding::ok("preempt_rt", what, WHY));
}

fn governor(root: &Root, found: &mut Vec<Finding>) {
    const ID: &str = "cpu.governor";
    const WHY: &str = "a CPU that is clocked down takes longer to submit and complete requests";
    let mut slow = Vec::new();
    let mut any = false;
    for name in root.list(CPUS).unwrap_or_default() {
        let file = Path::new(CPUS).join(&name).join("cpufreq/scaling_governor");
        if let Ok(governor) = root.read(&file) {
            any = true;
            if governor.trim() != "performance" {
                slow.push(format!("{name} {}", governor.trim()));
            }
        }
    }
    found.push(if !any {
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
    let driver = root.read_optional(Path::new(CPUS).join("cpuidle/current_driver")).ok().flatten();
    let driver = driver.filter(|d| d != "none");
    let states = Path::new(CPUS).join("cpu0/cpuidle");
    let deepest = root
        .list(&states)
        .unwrap_or_default()
        .iter()
        .filter(|s| root.read(states.join(s).join("disable")).is_ok_and(|d| d.trim() == "0"))
        .filter_map(|s| {
            let latency = number(root, states.join(s).join("latency")).ok()?;
            let name = root.read(states.join(s).join("name")).ok()?;
            Some((u64::try_from(latency).ok()?, name.trim().to_owned()))
        })
        .max();
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

fn smt(root: &Root, found: &mut Vec<Finding>) {
    const WHY: &str = "two threads of one core slow each other; pin VMs so that they do not share a core";
    let active = root.read_optional(Path::new(CPUS).join("smt/active")).ok().flatten();
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
    const WHY: &str =
        "QEMU with mem-lock=on needs the limit to cover the guest's memory, else a page fault joins the tail";
    match root.read("/proc/self/limits") {
        Err(e) => found.push(Finding::unknown(ID, &e, WHY)),
        Ok(text) => {
            let limit = text
                .lines()
                .find_map(|l| l.strip_prefix("Max locked memory"))
                .and_then(|l| l.split_whitespace().next())
                .unwrap_or("not given")
                .to_owned();
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
