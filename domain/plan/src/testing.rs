//! Specs and a device for the tests.

use rtvirtio_capacity::DeviceModel;
use rtvirtio_spec::Spec;
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::Bytes;

pub(crate) fn device() -> DeviceModel {
    DeviceModel::declared("qlc", &TwinProfile::built_in("qlc-nvme").unwrap(), Bytes(1 << 30))
}

/// VMs, each by its name and the text of its tasks.
pub(crate) fn spec(vms: &[(&str, &str)]) -> Spec {
    let mut text = "[device]\ntwin = \"qlc-nvme\"\n".to_owned();
    for (name, tasks) in vms {
        text += &format!("[[vm]]\nname = \"{name}\"\nlab = \"qemu\"\n{tasks}");
    }
    rtvirtio_spec::parse("test", &text).unwrap()
}

pub(crate) fn task(name: &str, more: &str) -> String {
    task_of(name, "read", "4KiB", more)
}

pub(crate) fn task_of(name: &str, op: &str, block: &str, more: &str) -> String {
    format!("[[vm.task]]\nname = \"{name}\"\nop = \"{op}\"\nblock = \"{block}\"\n{more}\n")
}

/// A task of reads with a rate and a target.
pub(crate) fn with(rate: u32, target: &str) -> String {
    let target = format!("target = {{ percentile = \"p99.99\", latency = \"{target}\" }}");
    task("t", &format!("rate = \"{rate}/s\"\n{target}"))
}
