//! Causes among those who use the CPUs.

use crate::{Cause, CauseKind, Facts, WAITED};

/// Share of the host's CPUs from which on the threads of a VM that uses them wait for each other.
const OWN: f64 = 0.8;

impl Facts {
    /// Whether the VM itself uses the host's CPUs; `None` where that is not known.
    fn uses_cpus_itself(&self) -> Option<bool> {
        Some(self.own_cpus? >= OWN * f64::from(self.cpus?))
    }

    /// Waits for CPUs that the hypervisor below the host took, or that others use. `is_stopped`
    /// where its own quota stopped it for long: some kernels count that as waits for a CPU.
    pub(crate) fn waits_for_cpus(&self, is_stopped: bool) -> Option<Cause> {
        if let Some(stolen) = self.stolen.filter(|stolen| *stolen >= WAITED) {
            let percent = 100.0 * stolen;
            return Some(Cause {
                kind: CauseKind::CpuSteal,
                share: None,
                evidence: format!(
                    "the hypervisor below this host took {percent:.0} % of the host's CPU time"
                ),
                remedy: "give this host its CPUs".to_owned(),
            });
        }
        // A quota that was not read may be what its threads waited for.
        self.quota.filter(|_| !is_stopped && self.uses_cpus_itself() == Some(false))?;
        let ready = self.ready.filter(|ready| *ready >= WAITED)?;
        Some(Cause {
            kind: CauseKind::CpuOthers,
            share: None,
            evidence: format!(
                "a thread of it was ready without a CPU for {ready:.2} s of each second: others use the CPUs"
            ),
            remedy: "end other programs, lower the rates, or give the VM a CPU contract (`cpu` in the spec)"
                .to_owned(),
        })
    }
}
