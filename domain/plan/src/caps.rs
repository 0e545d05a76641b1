//! A spec's `traffic` as caps of the I/O domain's disks and ports, and the delay that the caps add
//! to the VM's own bounds.

use rtvirtio_capacity::{frame_limits, frames_held_back};
use rtvirtio_domain_config::FrameCap;
use rtvirtio_spec::{Flow, Task, Vm};
use rtvirtio_traffic::{CompileError, Compiled, Direction, Place, Stream, Tspec, Unit, compile_among};
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
    let limits: Vec<(Direction, Tspec)> = disk_limits(vm).collect();
    for (direction, tspec) in &limits {
        caps.add(compile_among(tspec, *direction, &limits, &Place::IoDomain));
    }
    caps
}

impl Caps {
    /// Adds a limit; one of bytes and one of requests have one line for both.
    fn add(&mut self, compiled: Result<Compiled, CompileError>) -> bool {
        match compiled {
            Ok(compiled) => {
                let lines = compiled.settings.iter().map(ToString::to_string);
                let new: Vec<String> = lines.filter(|line| !self.lines.contains(line)).collect();
                self.lines.extend(new);
                true
            }
            Err(e) => {
                let why = e.to_string();
                if !self.refused.contains(&why) {
                    self.refused.push(why);
                }
                false
            }
        }
    }
}

fn disk_limits(vm: &Vm) -> impl Iterator<Item = (Direction, Tspec)> {
    Tspec::all(&vm.traffic).filter(|(direction, _)| direction.is_disk())
}

/// Longest time for which the VM's own caps hold one of its requests back, when its vCPUs stall for
/// `catch_up` and then submit all that was due; `None` when nothing bounds that.
///
/// See [`rtvirtio_traffic::held_back()`].
pub(crate) fn held_back(vm: &Vm, catch_up: Nanos) -> Option<Nanos> {
    let mut longest = 0.0f64;
    for direction in [Direction::Read, Direction::Write] {
        let limits: Vec<Tspec> =
            disk_limits(vm).filter(|(way, _)| *way == direction).map(|(_, tspec)| tspec).collect();
        let stream = |task: &Task| {
            // A task without a rate takes all that the cap admits, and the VM's other tasks wait.
            let rate = task.rate.map_or(f64::INFINITY, |rate| rate.0);
            let smallest = task.mix.first().map_or(task.block, |part| part.size);
            Stream {
                bytes: [smallest.0 as f64, task.block.0 as f64],
                rate,
                at_once: rate * catch_up.as_secs_f64() + f64::from(task.at_once()),
            }
        };
        let tasks = vm.tasks.iter().filter(|task| moves(task, direction));
        let streams: Vec<Stream> = tasks.map(stream).collect();
        longest = longest.max(rtvirtio_traffic::held_back(&limits, &streams)?);
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
    sent: Vec<Tspec>,
}

pub(crate) fn port_caps(vm: &Vm, largest_frame: u64) -> PortCaps {
    let mut of = PortCaps::default();
    let limits: Vec<(Direction, Tspec)> = frame_limits(&vm.traffic, largest_frame).collect();
    for (direction, tspec) in limits.iter().copied() {
        if !of.caps.add(compile_among(&tspec, direction, &limits, &Place::IoDomain)) {
            continue;
        }
        let cap = if direction == Direction::Rx { &mut of.rx } else { &mut of.tx };
        cap.peak = cap.peak.or(tspec.peak.map(|peak| peak as f64 / tspec.rate as f64));
        match tspec.unit {
            Unit::Bytes => {
                (cap.bytes, cap.bytes_burst) =
                    (Some(BytesPerSec(tspec.rate as f64)), Some(Bytes(tspec.burst)));
            }
            Unit::Requests => {
                (cap.frames, cap.frames_burst) = (Some(Iops(tspec.rate as f64)), Some(tspec.burst))
            }
        }
        if direction == Direction::Tx {
            of.sent.push(tspec);
        }
    }
    of
}

impl PortCaps {
    /// Longest time for which the caps on what the VM sends hold one of its frames back, when its
    /// vCPU stands still for `stall` and then makes up for it; `None` when nothing bounds that. As
    /// [`held_back`].
    pub(crate) fn holds_back<'f>(
        &self,
        flows: impl Iterator<Item = &'f Flow>,
        stall: Nanos,
    ) -> Option<Nanos> {
        frames_held_back(&self.sent, flows, stall)
    }
}

fn moves(task: &Task, direction: Direction) -> bool {
    match direction {
        Direction::Read => task.op.write_share() < 1.0,
        _ => task.op.write_share() > 0.0,
    }
}
