//! Weight of a VM at its floor, reduced by its CPU time above the floor.

use std::io::ErrorKind;

use rtvirtio_apply::{Guard, Hold, Levels};
use rtvirtio_units::Nanos;

use super::ServedVm;

/// Least change of a weight that is written, as a logarithm: about two of the journal's steps.
const LEAST_STEP: f64 = 0.15;

impl ServedVm {
    /// At the end of a window, moves the weight that the VM's vCPUs have at the floor.
    pub(super) fn move_weight(&mut self, levels: &Levels, now: Nanos) {
        let Some(weight) = self.share.weight(now).filter(|_| self.config.floor == 0) else { return };
        // A tiny step is not worth a write while other vCPUs wait to be raised.
        let is_step = |old: f64| weight == 1.0 && old < 1.0 || (weight / old).ln().abs() > LEAST_STEP;
        if self.weight.is_none_or(is_step) {
            if let Ok(Hold::Free(guard)) = levels.hold() {
                self.weight = self.set_weight(weight, levels, &guard);
            }
        }
        // A weight that is not moved is the original one.
        self.share.set(self.weight.unwrap_or(1.0));
    }

    /// Sets the VM's weight to this share of its own: its cgroup's where the journal has that one,
    /// else its threads'. Returns the share that was set; `None` where it cannot be moved.
    pub(super) fn set_weight(&mut self, weight: f64, levels: &Levels, guard: &Guard<'_>) -> Option<f64> {
        if let Some(file) = levels.files().iter().find(|file| file.is_weight_of(&self.name)) {
            let own: f64 = file.contract.parse().ok().filter(|own| *own > 0.0)?;
            let all = std::iter::once(&file.contract).chain(&file.levels);
            let all = all.filter_map(|text| Some((text, text.parse::<f64>().ok()? / own)));
            let distance = |of: f64| (of / weight).ln().abs();
            let (text, nearest) = all.min_by(|a, b| distance(a.1).total_cmp(&distance(b.1)))?;
            return match guard.set_file(file, text) {
                Ok(_) => Some(nearest),
                // Gone with its VM, which its threads show.
                Err(e) if e.kind() == ErrorKind::NotFound => None,
                Err(e) => {
                    self.refused = Some(format!("weight at the floor: {e}"));
                    None
                }
            };
        }
        let mut found = None;
        for v in self.vcpus.iter_mut().filter(|v| !v.foreign) {
            match v.thread.set_weight(weight, guard) {
                Ok(of) => found = of,
                Err(e) if rtvirtio_kernel::is_gone(&e) => {}
                Err(e) => self.refused = Some(format!("nice value of vCPU {}: {e}", v.vcpu)),
            }
        }
        found
    }
}
