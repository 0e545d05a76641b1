//! Spec of the lab: a VM with a target, and a neighbour.

use anyhow::Context as _;
use rtvirtio_harness::BENCH_DIR;
use rtvirtio_spec::{LabKind, Spec, Task};

/// Name of the VM whose target is judged.
pub const VM: &str = "victim";
/// Position of that VM.
pub const VICTIM: usize = 0;
/// Position of its neighbour.
pub const NEIGHBOUR: usize = 1;

/// Name of a kind of VM, as in specs.
pub fn vm_name(kind: LabKind) -> &'static str {
    if kind == LabKind::Qemu { "qemu" } else { "process" }
}

/// A VM with a target, and a neighbour that reads once a second.
pub fn spec_text(device: &str, vm: LabKind) -> anyhow::Result<String> {
    let twin = device.strip_prefix("twin:").context("a device that stands still is a twin: twin:NAME")?;
    let kind = vm_name(vm);
    Ok(format!(
        "[device]\ntwin = {twin:?}\nsize = \"512MiB\"\n\
         [[vm]]\nname = \"{VM}\"\nlab = \"{kind}\"\n[[vm.task]]\nname = \"paced\"\nop = \"read\"\n\
         block = \"4KiB\"\nrate = \"100/s\"\ntarget = {{ percentile = \"p99\", latency = \"50ms\" }}\n\
         [[vm]]\nname = \"neighbour\"\nlab = \"{kind}\"\n[[vm.task]]\nname = \"idle\"\nop = \"read\"\n\
         block = \"4KiB\"\nrate = \"1/s\"\n"
    ))
}

/// Declared rate of the VM with the target.
pub fn rate_of(spec: &Spec) -> anyhow::Result<f64> {
    let task = spec.vms.get(VICTIM).and_then(|vm| vm.tasks.first());
    Ok(task.and_then(|task| task.rate).context("a rate")?.0)
}

/// A task that reads as fast as it can.
pub fn flood_task(block_kib: u64, depth: u32) -> anyhow::Result<Task> {
    let text = format!(
        "[device]\ntwin = \"emmc\"\n[[vm]]\nname = \"x\"\nlab = \"process\"\n[[vm.task]]\nname = \"flood\"\n\
         op = \"read\"\nblock = \"{block_kib}KiB\"\ndepth = {depth}\n"
    );
    let mut spec = rtvirtio_spec::parse(BENCH_DIR, &text)?;
    spec.vms.pop().and_then(|mut vm| vm.tasks.pop()).context("a task")
}

#[cfg(test)]
mod tests {
    use super::super::plant::{Kind, draw};
    use super::*;

    #[test]
    fn the_spec_has_a_target_and_a_neighbour_that_is_idle() {
        for kind in [LabKind::Qemu, LabKind::Process] {
            let spec = rtvirtio_spec::parse("x", &spec_text("twin:emmc", kind).unwrap()).unwrap();
            assert_eq!(spec.lab_kind(), Some(kind));
            assert_eq!((spec.vms.len(), rate_of(&spec).unwrap()), (2, 100.0));
            assert_eq!(spec.vms[VICTIM].name, VM);
        }
        assert!(spec_text("file:/x", LabKind::Process).is_err());
    }

    #[test]
    fn every_flood_that_is_drawn_is_a_task() {
        for runs in draw(&[Kind::Neighbour, Kind::Load], 50, 3) {
            for one in runs {
                let (block, depth) = one.flood();
                let task = flood_task(block, depth).unwrap();
                assert!(task.rate.is_none() && task.targets.is_empty() && task.depth == depth);
            }
        }
    }
}
