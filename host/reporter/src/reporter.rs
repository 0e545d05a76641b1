//! Process that reports: at most one in a guest, with a heartbeat.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::{Mode, RawReport};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::{Device, ReporterError};

/// Lock file: locked as long as a process reports.
const LOCK: &str = "/run/rtvirtio-guest.lock";
/// Interval of the heartbeat; the page's protocol requires one in 300 ms.
const BEAT: Duration = Duration::from_millis(100);

/// Current time of the guest's clock in reports: `CLOCK_MONOTONIC`.
#[must_use]
pub fn now() -> Nanos {
    let t = clock_gettime(ClockId::Monotonic);
    Nanos(t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs())
}

/// Right to report, with a thread for the heartbeat. Dropping it tells the host that the guest no
/// longer reports.
#[derive(Debug)]
pub struct Reporter {
    device: Arc<Device>,
    stop: Arc<AtomicBool>,
    beat: Option<JoinHandle<()>>,
    _lock: File,
}

impl Reporter {
    /// Starts reporting in this mode.
    ///
    /// # Errors
    /// [`ReporterError::Taken`] when another process reports.
    pub fn begin(device: Device, mode: Mode) -> Result<Self, ReporterError> {
        let lock = lock(Path::new(LOCK))?;
        let device = Arc::new(device);
        device.region().set_mode(mode);
        let stop = Arc::new(AtomicBool::new(false));
        let (beating, stopped) = (device.clone(), stop.clone());
        let beat = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                beating.region().beat();
                std::thread::park_timeout(BEAT);
            }
        });
        Ok(Self { device, stop, beat: Some(beat), _lock: lock })
    }

    /// Device with the shared page.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Reports the state of a vCPU, from now on.
    ///
    /// # Errors
    /// [`ReporterError::TooSmall`] for a vCPU without a block.
    pub fn report(&self, vcpu: usize, report: &RawReport) -> Result<(), ReporterError> {
        let region = self.device.region();
        let block = region.block(vcpu).ok_or(ReporterError::TooSmall { vcpu, blocks: region.vcpus() })?;
        block.write(&RawReport { written: now().0, ..*report });
        Ok(())
    }
}

fn lock(path: &Path) -> Result<File, ReporterError> {
    let file = rtvirtio_kernel::trusted::lock_file(path).map_err(ReporterError::io("open", path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(ReporterError::Taken { lock: path.to_owned() }),
        Err(e) => Err(ReporterError::io("lock", path)(e.into())),
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(beat) = self.beat.take() {
            beat.thread().unpark();
            // The thread returns nothing.
            let _ = beat.join();
        }
        self.device.region().set_mode(Mode::Off);
        self.device.ring();
    }
}
