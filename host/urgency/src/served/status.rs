//! How the vCPUs of a VM stand.

use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::Mode;
use rtvirtio_urgency::{Counters, Level, Reason};
use serde::Serialize;

use super::{Raises, ServedVcpu, ServedVm};

/// How a VM stands.
#[derive(Clone, Debug, Serialize)]
pub struct VmStatus {
    /// Its name.
    pub vm: String,
    /// `off`, `region`, `guest_memory`, or `threads` for a guest that reports nothing.
    pub mode: &'static str,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuStatus>,
    /// Reports with values that are none of the protocol's.
    pub nonsense: u64,
    /// Notices by the doorbell, and those of them that were ignored.
    pub notices: [u64; 2],
    /// Signals of urgent completions by the I/O domain, and those of them that were ignored; `None`
    /// where it signals none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completions: Option<[u64; 2]>,
    /// The weight that its vCPUs have at the floor, as a share of its own, so that what is urgent
    /// counts against its fair share; `None` where it cannot be moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// How long before an announced timer a vCPU is raised, in nanoseconds: what that takes here is
    /// part of it.
    pub lead: Nanos,
    /// CPU time within which an urgent task answers an interrupt by KVM, in nanoseconds; `None`
    /// where those raise no vCPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<Nanos>,
    /// Looks that found a report half written.
    pub unreadable: u64,
    /// Why something is not followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// How a vCPU stands.
#[derive(Clone, Debug, Serialize)]
pub struct VcpuStatus {
    /// Its number.
    pub vcpu: usize,
    /// Its thread.
    pub tid: u32,
    /// Its level.
    pub level: Level,
    /// Why it has it.
    pub reason: Reason,
    /// CPU time above the floor that is left in this period, for tasks, in nanoseconds.
    pub task_left: Nanos,
    /// The same for critical sections.
    pub critical_left: Nanos,
    /// What has happened.
    #[serde(flatten)]
    pub counters: Counters,
    /// What raised it, and how late; for a guest that reports nothing only interrupts
    /// are counted.
    pub raises: Raises,
    /// Whether it is left to another program that has set its policy.
    pub foreign: bool,
}

impl ServedVm {
    /// How it stands.
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
            refused: match (&self.untaken.why, &self.refused) {
                (Some(one), Some(other)) => Some(format!("{one}; {other}")),
                (one, other) => one.clone().or_else(|| other.clone()),
            },
        }
    }
}
