//! Limits on what VMs move, from a spec's `traffic` to the kernel's limits of their cgroups.

use rtvirtio_model::ModelKind;
use rtvirtio_planner::{Enforcement, Knob, LimitKind, Plan, Setting};
use rtvirtio_spec::{Spec, Task, Vm};
use rtvirtio_traffic::{Direction, Tspec, Unit, limit_value};

use crate::error::{Result, bail};
use crate::progress::Progress;

/// Scheme of a plan that holds limits of traffic only.
pub const SCHEME: &str = "traffic";

/// The limits of a device's VMs, as settings of a plan.
///
/// # Errors
/// [`Kind::Infeasible`](crate::Kind::Infeasible) when a VM's tasks with targets declare more than
/// its limit, [`Kind::File`](crate::Kind::File) for a number that the kernel does not hold.
pub fn settings(spec: &Spec) -> Result<Vec<Setting>> {
    let mut all = Vec::new();
    for vm in &spec.vms {
        for (direction, tspec) in Tspec::all(&vm.traffic).filter(|(direction, _)| direction.is_disk()) {
            refuse_own_targets(vm, direction, &tspec)?;
            let Some(value) = limit_value(&tspec) else {
                bail!(
                    File,
                    "vm {}: `traffic.{}` of {} requests per second is more than the kernel's 32 bits hold: leave it out",
                    vm.name,
                    direction.name(),
                    tspec.rate
                );
            };
            all.push(Setting {
                knob: Knob::VmLimit { vm: vm.name.clone(), limit: kind(direction, tspec.unit) },
                value: value.to_string(),
                reason: format!(
                    "`traffic.{}` of the spec; the kernel's burst is what 100 ms are worth",
                    direction.name()
                ),
                strength: Enforcement::Cap,
            });
        }
    }
    Ok(all)
}

fn kind(direction: Direction, unit: Unit) -> LimitKind {
    match (direction, unit) {
        (Direction::Read, Unit::Bytes) => LimitKind::ReadBps,
        (Direction::Read, Unit::Requests) => LimitKind::ReadIops,
        (_, Unit::Bytes) => LimitKind::WriteBps,
        (_, Unit::Requests) => LimitKind::WriteIops,
    }
}

/// Refuses a limit below the rates of tasks with targets: a plan does not know the limit.
fn refuse_own_targets(vm: &Vm, direction: Direction, tspec: &Tspec) -> Result<()> {
    let share = |task: &Task| match direction {
        Direction::Read => 1.0 - task.op.write_share(),
        _ => task.op.write_share(),
    };
    let here: Vec<&Task> = vm.tasks.iter().filter(|task| share(task) > 0.0).collect();
    let Some(task) = here.iter().find(|task| !task.targets.is_empty()) else { return Ok(()) };
    let demand = |task: &&Task| {
        let each = if tspec.unit == Unit::Bytes { task.mean_block() } else { 1.0 };
        task.rate.map_or(f64::INFINITY, |rate| rate.0 * share(task) * each)
    };
    let asked: f64 = here.iter().map(demand).sum();
    if asked <= tspec.rate as f64 {
        return Ok(());
    }
    let unit = if tspec.unit == Unit::Bytes { "bytes" } else { "requests" };
    let asked = if asked.is_finite() { format!("{asked:.0}") } else { "any number of".to_owned() };
    bail!(
        Infeasible,
        "vm {}: its tasks {} {asked} {unit} per second, its own traffic limit is {}, and {} has a target: raise the limit, or lower their rates",
        vm.name,
        if direction == Direction::Read { "read" } else { "write" },
        tspec.rate,
        task.name
    )
}

/// A plan with the limits of its spec. Where the plan has a limit of its own, the smaller one
/// counts.
pub fn with_limits(plan: &Plan, spec: &Spec) -> Result<Plan> {
    let mut plan = plan.clone();
    for limit in settings(spec)? {
        match plan.settings.iter_mut().find(|setting| setting.knob == limit.knob) {
            Some(known) => {
                let value = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
                if value(&limit.value) < value(&known.value) {
                    *known = limit;
                }
            }
            None => plan.settings.push(limit),
        }
    }
    Ok(plan)
}

/// A plan of the limits alone.
pub fn limits_only(spec: &Spec) -> Result<Plan> {
    Ok(Plan {
        scheme: SCHEME.to_owned(),
        model: ModelKind::Slice,
        settings: settings(spec)?,
        tasks: Vec::new(),
        feasible: true,
        infeasible: None,
        evaluated: 0,
    })
}

/// Says which directions are not set: a kernel network has no journaled knob.
pub fn name_unset<'v>(vms: impl Iterator<Item = &'v Vm>, progress: &dyn Progress) {
    let unset = |vm: &Vm| {
        let all = Tspec::all(&vm.traffic).filter(|(direction, _)| !direction.is_disk());
        let mut names: Vec<&str> = all.map(|(direction, _)| direction.name()).collect();
        names.dedup();
        (!names.is_empty()).then(|| (vm.name.clone(), names.join(" and ")))
    };
    let vms: Vec<(String, String)> = vms.filter_map(unset).collect();
    let Some((_, directions)) = vms.first() else { return };
    let names: Vec<&str> = vms.iter().map(|(vm, _)| vm.as_str()).collect();
    progress.step(&format!(
        "traffic: {directions} of {} not set, as that is not journaled: `rtvirtio regulator SPEC --actuator tc-tbf` prints the commands",
        names.join(", ")
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn spec(traffic: &str, task: &str) -> Spec {
        let text = format!(
            "[device]\npath = \"/dev/sda\"\n[[vm]]\nname = \"a\"\ncgroup = \"/a\"\n{traffic}\n\
             [[vm.task]]\nname = \"t\"\nop = \"mixed\"\nwrite_share = \"50%\"\nblock = \"4KiB\"\n{task}\n"
        );
        rtvirtio_spec::parse("s.toml", &text).unwrap()
    }

    fn limit(limit: LimitKind) -> Knob {
        Knob::VmLimit { vm: "a".to_owned(), limit }
    }

    #[test]
    fn each_direction_of_a_disk_is_one_limit() {
        let every = settings(&spec("traffic = { rate = \"20MB/s\", burst = \"1MiB\" }", "")).unwrap();
        let found: Vec<_> = every.iter().map(|s| (s.knob.clone(), s.value.as_str())).collect();
        assert_eq!(
            found,
            [(limit(LimitKind::ReadBps), "20000000"), (limit(LimitKind::WriteBps), "20000000")]
        );
        let one = settings(&spec("traffic.write = { rate = \"500/s\" }", "")).unwrap();
        assert_eq!((one.len(), &one[0].knob), (1, &limit(LimitKind::WriteIops)));
        // Bytes and requests of a direction are two limits of the kernel.
        let both = settings(&spec("traffic.read = { rate = \"50MB/s\", iops = \"3000/s\" }", "")).unwrap();
        let found: Vec<_> = both.iter().map(|s| (s.knob.clone(), s.value.as_str())).collect();
        assert_eq!(found, [(limit(LimitKind::ReadBps), "50000000"), (limit(LimitKind::ReadIops), "3000")]);
        assert!(settings(&spec("traffic.rx = { rate = \"1MB/s\" }", "")).unwrap().is_empty());
    }

    #[test]
    fn the_smaller_of_two_limits_counts() {
        let own = |rate: &str| spec(&format!("traffic.read = {{ rate = \"{rate}\" }}"), "");
        let planned = limits_only(&own("100/s")).unwrap();
        for (rate, value) in [("50/s", "50"), ("200/s", "100")] {
            let both = with_limits(&planned, &own(rate)).unwrap();
            assert_eq!((both.settings.len(), both.settings[0].value.as_str()), (1, value));
        }
        let max = Plan {
            settings: vec![Setting { value: "max".to_owned(), ..planned.settings[0].clone() }],
            ..planned
        };
        assert_eq!(with_limits(&max, &own("7/s")).unwrap().settings[0].value, "7");
    }

    #[test]
    fn a_limit_below_what_a_target_needs_is_refused() {
        let with = |rate: &str| {
            let task = format!("rate = \"{rate}\"\ntarget = {{ latency = \"10ms\" }}");
            settings(&spec("traffic.read = { rate = \"100/s\" }", &task))
        };
        // Half of the requests read.
        assert!(with("200/s").is_ok());
        assert_eq!(with("201/s").unwrap_err().kind(), Kind::Infeasible);
        let task = "rate = \"202/s\"\ntarget = { latency = \"10ms\" }";
        let both = settings(&spec("traffic.read = { rate = \"1GB/s\", iops = \"100/s\" }", task));
        assert_eq!(both.unwrap_err().kind(), Kind::Infeasible);
        let closed =
            settings(&spec("traffic.write = { rate = \"1MB/s\" }", "target = { latency = \"10ms\" }"));
        assert!(closed.unwrap_err().to_string().contains("any number of"));
    }
}
