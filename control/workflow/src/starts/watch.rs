//! Starts that are recognised from a VM's counters, without its guest's word.

use std::path::PathBuf;

use rtvirtio_apply::Binding;
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_startup::{Recogniser, RecogniserConfig, Sample, StartMessage};
use rtvirtio_units::Nanos;

use crate::error::{Context as _, Result};

/// Interval of the samples, for which [`RecogniserConfig`]'s defaults are.
const INTERVAL: Nanos = Nanos(100_000_000);
/// The id of a start that was recognised; a guest that uses it too gains nothing.
const ID: u32 = u32::MAX;

/// A VM whose counters are watched.
pub(super) struct Watch {
    recogniser: Recogniser,
    cgroups: Cgroups,
    cgroup: PathBuf,
    dev: String,
    last: IoCounters,
    next: Nanos,
    starting: bool,
}

impl Watch {
    /// Of a VM of a binding, which has a cgroup of its own.
    pub fn new(vm: &str, binding: &Binding, now: Nanos) -> Result<Self> {
        let cgroup = binding.vms.get(vm).and_then(|vm| vm.cgroup.clone());
        let (cgroup, cgroups) =
            cgroup.zip(binding.cgroups.clone()).with_context(|| format!("{vm}: its cgroup is not known"))?;
        let dev = binding.stack.device.dev.clone();
        let recogniser = Recogniser::new(RecogniserConfig::default(), now);
        let mut watch = Self {
            recogniser,
            cgroups,
            cgroup,
            dev,
            last: IoCounters::default(),
            next: now,
            starting: false,
        };
        watch.last = watch.read()?;
        Ok(watch)
    }

    fn read(&self) -> Result<IoCounters> {
        let read = IoCounters::read(&Root::default(), &self.cgroups, &self.cgroup, &self.dev)?;
        Ok(read.unwrap_or_default())
    }

    /// Start or end that was recognised, at most one in each interval.
    pub fn poll(&mut self, now: Nanos, longest: Nanos) -> Result<Option<StartMessage>> {
        if now < self.next {
            return Ok(None);
        }
        self.next = Nanos(now.0.saturating_add(INTERVAL.0));
        let counters = self.read()?;
        // Counters that began anew say nothing about this interval.
        let done = counters.since(&self.last).unwrap_or_default();
        self.last = counters;
        let sample = Sample { now, reads: done.reads, bytes: done.read_bytes, writes: done.writes };
        let starting = self.recogniser.sample(&sample);
        if std::mem::replace(&mut self.starting, starting) == starting {
            return Ok(None);
        }
        Ok(Some(if starting {
            StartMessage::Start { id: ID, wanted: longest }
        } else {
            StartMessage::End { id: ID }
        }))
    }
}
