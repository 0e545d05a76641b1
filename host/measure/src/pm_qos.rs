//! Keeps the host's CPUs out of idle states during a measurement.
//!
//! An idle CPU wakes late: some 100 us from a deep state of real hardware, milliseconds when it is
//! the virtual CPU of a hypervisor that has to be scheduled first. Real-time hosts are set up
//! without that (`idle=poll`, tuned's `force_latency`). Here the kernel's PM QoS is used: while
//! `/dev/cpu_dma_latency` is open, no state with a longer exit latency than the number written is
//! entered (Documentation/power/pm_qos_interface.rst). Closing it, also by a crash, ends the
//! request.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};

use rtvirtio_kernel::Root;

/// PM QoS interface of the kernel.
const FILE: &str = "/dev/cpu_dma_latency";
/// Driver of the idle states; without one the file has no effect.
const DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";

/// PM QoS request that keeps the CPUs out of idle states while this lives.
#[derive(Debug)]
pub struct PmQosGuard {
    _held: File,
}

impl PmQosGuard {
    /// Requests an exit latency of zero.
    ///
    /// # Errors
    /// When the kernel has no such file or no cpuidle driver, or the caller may not write it.
    pub fn hold() -> io::Result<Self> {
        let driver = Root::default().read_optional(DRIVER).ok().flatten().unwrap_or_default();
        if matches!(driver.as_str(), "" | "none") {
            let what = "the kernel has no cpuidle driver, so it cannot be asked to poll";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        // kernel file
        let mut file = OpenOptions::new().write(true).open(FILE)?;
        file.write_all(&0i32.to_ne_bytes())?;
        Ok(Self { _held: file })
    }
}
