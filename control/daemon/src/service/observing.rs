//! Threads that sample VMs, apart from the loop.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::ServiceOptions;
use crate::config::Correction;
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
    let dirs = || options.places.dirs.clone();
    let coverage = Arc::default();
    let mut sampler = Sampler::new(dirs(), config.monitor_of_libvirt, config.plan.is_some())
        .following(config.profile.correct == Correction::Follow)
        .with_coverage(Arc::clone(&coverage));
    let scanned = (Arc::clone(&shared.uncovered), coverage);
    let of_service = Arc::clone(&shared);
    let running = move || lock(&of_service.running).clone();
    let of_uncovered = uncovered::watch(dirs(), every, running, scanned)?;
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
