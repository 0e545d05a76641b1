//! Status of a VM and its vCPUs.

use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::Mode;
use rtvirtio_urgency::{Counters, Level, Reason};
use serde::Serialize;

use super::{Raises, ServedVcpu, ServedVm};

#[derive(Clone, Debug, Serialize)]
pub struct VmStatus {
    pub vm: String,
    /// `off`, `region`, `guest_memory`, or `threads` for a guest that reports nothing.
    pub mode: &'static str,
    /// Status of each vCPU.
    pub vcpus: Vec<VcpuStatus>,
    /// Number of reports with values outside of the protocol.
    pub nonsense: u64,
    /// Number of doorbell notices, and of ignored ones among them.
    pub notices: [u64; 2],
    /// Number of signals of urgent completions by the I/O domain, and of ignored ones among them;
    /// `None` where it sends none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completions: Option<[u64; 2]>,
    /// Weight of its vCPUs at the floor, as a share of its own, which charges urgent CPU time
    /// against its fair share; `None` where it cannot be moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Time by which a vCPU is raised before an announced timer, in nanoseconds; includes the time
    /// that raising takes here.
    pub lead: Nanos,
    /// CPU time within which an urgent task answers an interrupt by KVM, in nanoseconds; `None`
    /// where those raise no vCPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<Nanos>,
    /// Number of polls that found a report half written.
    pub unreadable: u64,
    /// Reason why a part is not followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Status of a vCPU.
#[derive(Clone, Debug, Serialize)]
pub struct VcpuStatus {
    /// Number of the vCPU.
    pub vcpu: usize,
    /// Thread id of the vCPU.
    pub tid: u32,
    /// Scheduling level of its thread.
    pub level: Level,
    /// Reason for this level.
    pub reason: Reason,
    /// CPU time above the floor that is left in this period, for tasks, in nanoseconds.
    pub task_left: Nanos,
    /// CPU time left for critical sections, in nanoseconds.
    pub critical_left: Nanos,
    /// Counts of its events.
    #[serde(flatten)]
    pub counters: Counters,
    /// Delays of raising it, by cause; for a guest that does not report only interrupts are
    /// counted.
    pub raises: Raises,
    /// Whether it is left to another program that has set its policy.
    pub foreign: bool,
}

impl ServedVm {
    /// Current status of the VM.
    #[must_use]
    pub fn status(&self) -> VmStatus {
        let one = |v: &ServedVcpu| {
            let (task_left, critical_left) = v.machine.left();
            VcpuStatus {
                vcpu: v.vcpu,
                tid: v.thread.movable().tid,
                level: v.thread.level(),
                reason: v.machine.reason(),
                task_left,
                critical_left,
                counters: v.machine.counters(),
                raises: v.trace.raises(),
                foreign: v.foreign,
            }
        };
        VmStatus {
            vm: self.name.clone(),
            mode: match self.mode {
                _ if !self.reports => "threads",
                Mode::Off => "off",
                Mode::Region => "region",
                Mode::GuestMemory { .. } => "guest_memory",
            },
            vcpus: self.vcpus.iter().map(one).collect(),
            nonsense: self.nonsense,
            notices: self.bell.as_ref().map_or([0, 0], |(_, bell)| [bell.rung(), bell.ignored()]),
            completions: self.completions.as_ref().map(|(_, bell)| [bell.rung(), bell.ignored()]),
            weight: self.weight,
            lead: self.lead.get(),
            answer: self.interrupts.is_some().then(|| self.answer.get()),
            unreadable: self.unreadable,
            refused: {
                let all = [self.untaken.why.as_deref(), self.refused.as_deref(), self.lacks_tracer()];
                let all: Vec<&str> = all.into_iter().flatten().collect();
                (!all.is_empty()).then(|| all.join("; "))
            },
        }
    }
}
