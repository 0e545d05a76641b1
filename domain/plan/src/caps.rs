//! A spec's `traffic` as caps of the domain's disks, and what they add to the bounds of the VM that
//! they hold.

use rtvirtio_spec::{Task, Vm};
use rtvirtio_traffic::{Arrival, Direction, Place, Tspec, Unit, compile};
use rtvirtio_units::Nanos;

/// Keys of the VM's disk, one a line.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Caps {
    /// Lines such as `read_cap = { ... }`.
    pub lines: Vec<String>,
    /// Directions without one, and why.
    pub refused: Vec<String>,
}

/// The caps of a VM. Its network directions are those of a network, which a spec does not have.
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

/// Longest time for which the VM's own caps hold one of its requests back, when its guest stands
/// still for `catch_up` and then makes up for it; `None` when nothing bounds that.
///
/// The delay of a token bucket with arrivals of rate R and burst B: the largest horizontal distance
/// of the curves, `(B - burst) / rate` and `(B - largest) / peak` (Le Boudec and Thiran, Network
/// Calculus, section 1.5).
pub(crate) fn held_back(vm: &Vm, catch_up: Nanos) -> Option<Nanos> {
    let mut longest = 0.0f64;
    for (direction, tspec) in disk_limits(vm) {
        let tasks = vm.tasks.iter().filter(|task| moves(task, direction));
        let (mut rate, mut burst) = (0.0, 0.0);
        for task in tasks {
            // Without a rate it takes what the cap lets go, and the others of its VM wait.
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
        longest = longest.max(delay(burst, &cap));
    }
    Some(Nanos::from_secs_f64(longest))
}

fn delay(burst: f64, cap: &Arrival) -> f64 {
    let long = (burst - cap.burst) / cap.rate;
    let short = cap.peak.map_or(0.0, |(peak, piece)| (burst - piece) / peak);
    long.max(short).max(0.0)
}

fn moves(task: &Task, direction: Direction) -> bool {
    match direction {
        Direction::Read => task.op.write_share() < 1.0,
        _ => task.op.write_share() > 0.0,
    }
}
