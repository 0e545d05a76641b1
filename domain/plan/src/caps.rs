//! A spec's `traffic` as caps of the I/O domain's disks and ports, and the delay that the caps add
//! to the VM's own bounds.

use rtvirtio_capacity::{frame_limits, frames_held_back};
use rtvirtio_domain_config::FrameCap;
use rtvirtio_spec::{Flow, Task, Vm};
use rtvirtio_traffic::{Direction, Place, Tspec, Unit, compile};
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos};

/// Keys of the VM's disk or port, one a line.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Caps {
    /// Lines such as `read_cap = { ... }`.
    pub lines: Vec<String>,
    /// Reasons for directions without a cap, one each.
    pub refused: Vec<String>,
}

/// The caps of a VM's disk.
pub(crate) fn caps(vm: &Vm) -> Caps {
    let mut caps = Caps::default();
    for (direction, tspec) in disk_limits(vm) {
        match compile(&tspec, direction, &Place::IoDomain) {
            Ok(compiled) => caps.lines.extend(compiled.settings.iter().map(ToString::to_string)),
            Err(e) => caps.refused.push(e.to_string()),
        }
    }
    caps
}

fn disk_limits(vm: &Vm) -> impl Iterator<Item = (Direction, Tspec)> {
    Tspec::all(&vm.traffic).filter(|(direction, _)| direction.is_disk())
}

/// Longest time for which the VM's own caps hold one of its requests back, when its vCPUs stall for
/// `catch_up` and then submit all that was due; `None` when nothing bounds that.
///
/// See [`Arrival::holds_back`](rtvirtio_traffic::Arrival::holds_back).
pub(crate) fn held_back(vm: &Vm, catch_up: Nanos) -> Option<Nanos> {
    let mut longest = 0.0f64;
    for (direction, tspec) in disk_limits(vm) {
        let tasks = vm.tasks.iter().filter(|task| moves(task, direction));
        let (mut rate, mut burst) = (0.0, 0.0);
        for task in tasks {
            // A task without a rate takes all that the cap admits, and the VM's other tasks wait.
            let asked = task.rate?.0;
            let each = match tspec.unit {
                Unit::Bytes => task.block.0 as f64,
                Unit::Requests => 1.0,
            };
            rate += asked * each;
            burst += (asked * catch_up.as_secs_f64() + 1.0) * each;
        }
        let cap = tspec.arrival();
        if rate > cap.rate {
            return None;
        }
        longest = longest.max(cap.holds_back(burst));
    }
    Some(Nanos::from_secs_f64(longest))
}

/// The caps of a VM's port; a VM with several has them on each.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PortCaps {
    /// Keys of the port, and the reasons for directions without a cap.
    pub caps: Caps,
    /// Cap on frames to the VM; `tx` is the one on frames from it.
    pub rx: FrameCap,
    pub tx: FrameCap,
    /// Limit of frames from the VM.
    sent: Option<Tspec>,
}

/// The caps of a VM's port.
pub(crate) fn port_caps(vm: &Vm, largest_frame: u64) -> PortCaps {
    let mut of = PortCaps::default();
    for (direction, tspec) in frame_limits(&vm.traffic, largest_frame) {
        let compiled = match compile(&tspec, direction, &Place::IoDomain) {
            Ok(compiled) => compiled,
            Err(e) => {
                of.caps.refused.push(e.to_string());
                continue;
            }
        };
        of.caps.lines.extend(compiled.settings.iter().map(ToString::to_string));
        let mut cap =
            FrameCap { peak: tspec.peak.map(|peak| peak as f64 / tspec.rate as f64), ..FrameCap::default() };
        match tspec.unit {
            Unit::Bytes => {
                (cap.bytes, cap.bytes_burst) =
                    (Some(BytesPerSec(tspec.rate as f64)), Some(Bytes(tspec.burst)));
            }
            Unit::Requests => {
                (cap.frames, cap.frames_burst) = (Some(Iops(tspec.rate as f64)), Some(tspec.burst))
            }
        }
        if direction == Direction::Rx {
            of.rx = cap;
        } else {
            (of.tx, of.sent) = (cap, Some(tspec));
        }
    }
    of
}

impl PortCaps {
    /// Longest time for which the cap on frames from the VM holds one of them back, when its vCPU
    /// stalls for `stall` and then sends all that was due; `None` when nothing bounds that. As
    /// [`held_back`].
    pub(crate) fn holds_back<'f>(
        &self,
        flows: impl Iterator<Item = &'f Flow>,
        stall: Nanos,
    ) -> Option<Nanos> {
        frames_held_back(self.sent.as_ref(), flows, stall)
    }
}

fn moves(task: &Task, direction: Direction) -> bool {
    match direction {
        Direction::Read => task.op.write_share() < 1.0,
        _ => task.op.write_share() > 0.0,
    }
}
