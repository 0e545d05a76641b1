//! States of contracts where no service runs: one look of the same loop, which sets nothing.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::{LinuxHost, Places, Waker};
use crate::config::{Config, Mode};
use crate::daemon::Daemon;
use crate::memory::Memory;
use crate::observed::{LOOKED_FOR, Presence};
use crate::snapshot::Snapshot;

/// Timeout of looking for VMs and querying libvirt.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest pause between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// Looks at contracts and host as the service would in its mode `observe`. The plan is left out:
/// none is made without the service.
#[must_use]
pub fn look_once(places: &Places, config: &Config) -> Snapshot {
    let (sender, woken) = channel();
    let waker: Waker = Arc::new(move || {
        // The look may have ended.
        let _ = sender.send(());
    });
    let config = Config { mode: Mode::Observe, plan: None, placement: None, ..config.clone() };
    let mut host = LinuxHost::new(places.clone(), &config, waker);
    host.read_only();
    let mut daemon = Daemon::new(host, config, Memory::default());
    let end = Instant::now() + LOOKUP_TIMEOUT;
    loop {
        daemon.look_next();
        daemon.pass();
        let waits = |presence: &Presence| matches!(presence, Presence::Unknown(why) if why == LOOKED_FOR);
        let is_looking = daemon.observed().vms.values().any(|vm| waits(&vm.presence));
        // What is not known at the end is shown as unknown.
        if !(is_looking || daemon.desired().is_incomplete) || Instant::now() >= end {
            break;
        }
        // A libvirt that does not answer wakes nothing.
        let _ = woken.recv_timeout(PAUSE);
    }
    let mut snapshot = daemon.snapshot().with_contracts(&places.contracts);
    snapshot.plan = None;
    snapshot.arrivals = daemon.host_ref().arrivals(&daemon.observed().admission);
    snapshot.problems.extend(daemon.host_ref().arrivals_problem());
    snapshot.problems.extend(daemon.host_ref().problems().iter().cloned());
    if !snapshot.vms.is_empty() {
        snapshot.problems.push("rtvirtiod does not run, so that nothing keeps these contracts".to_owned());
    }
    snapshot
}
