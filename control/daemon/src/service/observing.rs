//! Threads that sample VMs, apart from the loop.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::ServiceOptions;
use crate::error::DaemonError;
use crate::lock::lock;
use crate::observe::{Sampler, uncovered};
use crate::shared::Shared;

/// Starts a thread that samples running VMs, and one that scans for I/O on which no setting acts.
/// Each ends when its sender is dropped.
pub(super) fn observe(options: &ServiceOptions, shared: Arc<Shared>) -> Result<[Sender<()>; 2], DaemonError> {
    let (sender, end) = channel::<()>();
    let every = Duration::from_nanos(options.config.observe.0);
    let config = &options.config;
    let mut sampler =
        Sampler::new(options.places.dirs.clone(), config.monitor_of_libvirt, config.plan.is_some());
    let of_uncovered = uncovered::watch(options.places.dirs.clone(), every, Arc::clone(&shared.uncovered))?;
    let run = move || {
        while matches!(end.recv_timeout(every), Err(RecvTimeoutError::Timeout)) {
            let vms = lock(&shared.running).clone();
            let _ = shared.observation.send_replace(Arc::new(sampler.sample(&vms)));
        }
    };
    let spawned = std::thread::Builder::new().name("observe".to_owned()).spawn(run);
    let path = PathBuf::from("observe");
    spawned.map_err(|source| DaemonError::Io { action: "start the thread", path, source })?;
    Ok([sender, of_uncovered])
}
