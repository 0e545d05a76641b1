//! The box's CPUs.

use super::BoxRun;
use crate::image::Kernel;

/// QEMU's arguments for the CPUs of a run.
pub(super) fn arguments(run: &BoxRun<'_>, kernel: Kernel) -> Vec<String> {
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<String>>();
    if !run.two_sockets {
        return words(&["-cpu", processor(kernel), "-smp", "2"]);
    }
    // Linux sees threads of a core by Intel's leaf, or by AMD's, which the emulator lacks.
    let mut all = words(&["-cpu", "max,vendor=GenuineIntel", "-smp", "16,sockets=2,cores=4,threads=2"]);
    for (node, cpus) in ["0-7", "8-15"].iter().enumerate() {
        let object = format!("memory-backend-ram,id=node{node},size={}M", run.memory.0 >> 21);
        let numa = format!("node,nodeid={node},cpus={cpus},memdev=node{node}");
        all.extend(words(&["-object", &object, "-numa", &numa]));
    }
    all
}

/// CPU model of the box. KVM of a PREEMPT_RT kernel asks for a TSC of constant rate
/// (`kvm_arch_init()`): the emulated one has it, but does not report it by default.
fn processor(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::Standard => "max",
        Kernel::Rt => "max,invtsc=on,x-force-features=on",
    }
}
