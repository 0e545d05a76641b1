//! Mechanism that limits a thread now.

use std::path::Path;

use rtvirtio_kernel::sched::Policy;
use rtvirtio_kernel::{Cgroups, Hierarchy, HostError, Root};
use rtvirtio_planner::Enforcement;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::Thread;
use serde::Serialize;

use crate::Backend;

/// Mechanism that limits a thread, with its budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Control {
    /// Mechanism; `None` when nothing limits the thread.
    pub by: Option<Backend>,
    /// Guarantee, cap or hint; `None` as for `by`.
    pub strength: Option<Enforcement>,
    /// Budget, as `4ms in 20ms`, or the reason why nothing limits the thread; may have a cgroup's
    /// name.
    pub what: String,
}

impl Control {
    fn none(what: impl Into<String>) -> Self {
        Self { by: None, strength: None, what: what.into() }
    }

    /// Of an ordinary thread in this cgroup.
    fn without_limit(cpu: &Cgroups, cgroup: &Path) -> Self {
        let Some(name) = cgroup.file_name().filter(|_| !Cgroups::is_root(cgroup)) else {
            return Self::none("shares the root group");
        };
        let above = if cpu.hides_parents() { "" } else { " or above" };
        Self::none(format!("no limit in {}{above}", name.to_string_lossy()))
    }

    fn held(by: Backend, budget_us: u64, period_us: u64) -> Self {
        let what = format!("{} in {}", Nanos(budget_us * 1000), Nanos(period_us * 1000));
        Self { by: Some(by), strength: Some(by.strength()), what }
    }
}

/// Mechanism that limits a thread: for a real-time one the nearest budget in its cgroup or those
/// above, which the kernel keeps below the others; for an ordinary one the least quota.
///
/// # Errors
/// When a cgroup's files cannot be read; a cgroup that is gone is none.
pub fn control(root: &Root, cpu: Option<&Cgroups>, thread: &Thread) -> Result<Control, HostError> {
    if let Some(r) = thread.reservation {
        return Ok(Control::held(Backend::Deadline, r.runtime / 1000, r.period / 1000));
    }
    let cgroup = cpu.and_then(|c| Some((c, c.of_thread(&thread.cgroups)?)));
    let real_time = matches!(thread.policy, Some(Policy::Fifo | Policy::Rr));
    let Some((cpu, cgroup)) = cgroup else {
        return Ok(Control::none(if real_time { "real-time without a budget" } else { "no CPU controller" }));
    };
    if !real_time {
        let limits = cpu.cpu_limits_on_path(root, cgroup)?;
        let least = limits.into_iter().min_by(|a, b| a.cpus().total_cmp(&b.cpus()));
        return Ok(least.map_or_else(
            || Control::without_limit(cpu, cgroup),
            |limit| Control::held(Backend::CpuMax, limit.quota_us, limit.period_us),
        ));
    }
    for group in cgroup.ancestors().filter(|g| !Cgroups::is_root(g)) {
        if let Some(found) = real_time_budget(root, cpu, &cpu.dir(group)?)? {
            return Ok(found);
        }
    }
    Ok(Control::none("real-time without a budget of its own"))
}

fn real_time_budget(root: &Root, cpu: &Cgroups, dir: &Path) -> Result<Option<Control>, HostError> {
    if cpu.hierarchy == Hierarchy::V2 {
        let max = root.read_optional(dir.join("cpu.rt.max"))?;
        return Ok(max.and_then(|t| pair(&t)).map(|(q, p)| Control::held(Backend::Hcbs, q, p)));
    }
    let number = |file: &str| -> Result<Option<u64>, HostError> {
        Ok(root.read_optional(dir.join(file))?.and_then(|t| t.parse().ok()))
    };
    let (runtime, period) = (number("cpu.rt_runtime_us")?, number("cpu.rt_period_us")?);
    let held = runtime.filter(|r| *r > 0).zip(period);
    Ok(held.map(|(q, p)| Control::held(Backend::RtGroup, q, p)))
}

/// `4000 20000`; `max 20000` is no limit.
fn pair(text: &str) -> Option<(u64, u64)> {
    let mut words = text.split_whitespace();
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}
