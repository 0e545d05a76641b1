//! The twin's process: mounts the FUSE file and serves it until it is unmounted or stopped.

use std::io::{self, Read};
use std::path::PathBuf;

use fuser::{Config, MountOption, Session};
use rtvirtio_units::Bytes;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use super::ProfileError;
use super::ServiceModel;
use super::fs::{SharedModel, TwinFs};

/// Threads that serve requests: the largest number of requests in service or waiting at the device.
const THREADS: usize = 64;
/// Real-time priority of the serving threads: a device does not slow down because the host's CPUs
/// are busy.
const FIFO_PRIORITY: i32 = 40;

/// Options of a twin's process.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Name of a built-in profile, or path of one.
    pub profile: String,
    /// Size of the device.
    pub size: Bytes,
    /// Seed of the model's jitter.
    pub seed: u64,
    /// Existing, empty directory to mount on.
    pub mount: PathBuf,
    /// Factor of all service times once the twin is made slow.
    pub slow_by: f64,
}

/// Reasons for which a twin cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The profile is not usable.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// FUSE cannot be mounted or served.
    #[error("cannot serve a FUSE file on {}: {source} (needs root and /dev/fuse: `modprobe fuse`)", mount.display())]
    Fuse { mount: PathBuf, source: io::Error },
}

/// Byte on standard input after which a twin mounts.
pub(super) const GO: u8 = b'\n';

/// Waits for a line break on standard input, then mounts and serves until unmounted. End of input
/// before that means that the parent process has ended, and this process ends too. SIGUSR1 makes
/// the device [`ServeConfig::slow_by`] times as slow as declared, SIGUSR2 as fast as declared
/// again; SIGTERM, SIGINT and SIGHUP unmount.
pub fn serve(config: &ServeConfig) -> Result<(), ServeError> {
    let profile = rtvirtio_files::load_twin(&config.profile)?;
    let mut first = [0];
    if io::stdin().read_exact(&mut first).is_err() || first != [GO] {
        return Ok(());
    }
    let fuse = |source| ServeError::Fuse { mount: config.mount.clone(), source };
    precise_time();
    let model = SharedModel::new(ServiceModel::new(profile, config.size.0, config.seed));
    let fs = TwinFs::new(model.clone(), config.size.0).map_err(fuse)?;
    let mut options = Config::default();
    options.mount_options = vec![
        MountOption::FSName("rtvirtio-twin".to_owned()),
        MountOption::Subtype("rtvirtio".to_owned()),
        MountOption::NoExec,
        MountOption::NoSuid,
        MountOption::NoDev,
    ];
    options.n_threads = Some(THREADS);
    options.clone_fd = true;
    let mut session = Session::new(fs, &config.mount, &options).map_err(fuse)?;
    let slow_by = config.slow_by;
    let mut unmounter = session.unmount_callable();
    let all = [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2];
    let mut signals = signal_hook::iterator::Signals::new(all).map_err(fuse)?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => model.lock().set_slowness(slow_by),
                SIGUSR2 => model.lock().set_slowness(1.0),
                // A failed unmount leaves the session running; the caller then uses SIGKILL and a
                // lazy unmount.
                _ => return drop(unmounter.unmount()),
            }
        }
    });
    session.run().map_err(fuse)
}

/// Sets timers without slack and a real-time policy, inherited by the serving threads. Failures are
/// ignored: both only improve the timing.
fn precise_time() {
    // SAFETY: plain prctl and sched calls on the calling thread with valid arguments.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
        let param = libc::sched_param { sched_priority: FIFO_PRIORITY };
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param);
    }
}
