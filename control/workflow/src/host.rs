//! Facts of this host.

use std::sync::OnceLock;

use rtvirtio_kernel::Root;

/// Kernel release of this host.
#[must_use]
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// CPUs that this process may use.
#[must_use]
pub fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX))
}

/// Model name of the host's CPUs; `unknown` where the kernel tells none. Read once: some kernels
/// interrupt the other CPUs to tell their frequency there.
pub(crate) fn cpu_model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let cpuinfo = Root::default().read("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
        model.map_or("unknown", |m| m.1.trim()).to_owned()
    })
}
