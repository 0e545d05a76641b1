//! Drives of VMs: limits and counters, as their VMMs have them.

use std::time::{Duration, Instant};

use rtvirtio_kernel::Root;
use rtvirtio_spec::HostHandle;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::throttle::Drive;

use super::{HostReach, HostVm, QMP_TIMEOUT};
use crate::error::{Result, bail};

/// Time that is left for the monitors of several VMs, which are asked one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MonitorTime {
    total: Duration,
    /// Time that one of them may take, so that one which does not answer leaves time for others.
    one: Duration,
    end: Instant,
}

impl MonitorTime {
    /// Time to read settings, from now on.
    pub fn of_settings() -> Self {
        Self::with_limits(4 * QMP_TIMEOUT, 2 * QMP_TIMEOUT)
    }

    /// Time to read counters before or after a run, from now on.
    pub fn of_counters() -> Self {
        Self::with_limits(Duration::from_secs(10), Duration::from_secs(2))
    }

    fn with_limits(total: Duration, one: Duration) -> Self {
        Self { total, one, end: Instant::now() + total }
    }

    /// Time for the monitor of the next VM.
    fn of_next(&self, vm: &HostVm) -> Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!(
                NotRunning,
                "vm {}: its monitor was not asked: those of the VMs before it took {:?} together",
                vm.name,
                self.total
            );
        }
        Ok(left.min(self.one))
    }
}

impl HostVm {
    /// Drives with their throttling: for a domain of libvirt by libvirt, which asks QEMU, else by
    /// the monitor. `None` without either.
    ///
    /// # Errors
    /// As [`HostVm::handle`], and when no time is left.
    pub(crate) fn drives(&self, time: &MonitorTime) -> Result<Option<Vec<Drive>>> {
        let (root, left) = (Root::default(), time.of_next(self)?);
        match &self.reach {
            HostReach::Named(HostHandle::Domain(_)) => Ok(Some(self.domain(&root)?.drives(left)?)),
            _ => self.monitor_within(&root, left)?.map(|mut qmp| Ok(qmp.query_drives()?)).transpose(),
        }
    }

    /// Drives as of [`HostVm::drives`], with their counters by the same connection. Those of a
    /// domain of libvirt have no counters: asking its monitor taints it.
    pub(crate) fn drives_and_stats(
        &self,
        time: &MonitorTime,
    ) -> Result<(Option<Vec<Drive>>, Vec<DiskStats>)> {
        if let HostReach::Named(HostHandle::Domain(_)) = &self.reach {
            return Ok((self.drives(time)?, Vec::new()));
        }
        let monitor = self.monitor_within(&Root::default(), time.of_next(self)?)?;
        let Some(mut qmp) = monitor else { return Ok((None, Vec::new())) };
        // Limits are known without counters.
        Ok((Some(qmp.query_drives()?), qmp.disk_stats().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rtvirtio_testkit::HANG;

    use super::*;

    #[test]
    fn monitors_that_do_not_answer_have_one_limit_together() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let silent: Vec<(UnixListener, HostVm)> = (0..4)
            .map(|n| {
                let socket = dir.path().join(format!("{n}.qmp"));
                let listener = UnixListener::bind(&socket).unwrap();
                (listener, HostVm::new(&format!("vm{n}"), HostReach::Named(HostHandle::Qmp(socket))))
            })
            .collect();
        let limit = Duration::from_millis(300);
        let (begin, time) = (Instant::now(), MonitorTime::with_limits(limit, limit));
        let why: Vec<String> =
            silent.iter().map(|(_, vm)| format!("{:#}", vm.drives_and_stats(&time).unwrap_err())).collect();
        assert!(begin.elapsed() >= limit && begin.elapsed() < HANG, "{:?}", begin.elapsed());
        assert!(!why[0].contains("was not asked"), "{why:?}");
        for (n, why) in why.iter().enumerate().skip(1) {
            let not_asked = format!(
                "vm vm{n}: its monitor was not asked: those of the VMs before it took 300ms together"
            );
            assert_eq!(*why, not_asked);
        }
        // One alone leaves time for those after it.
        let time = MonitorTime::with_limits(HANG, limit);
        assert_eq!(time.of_next(&silent[0].1).unwrap(), limit);
    }
}
