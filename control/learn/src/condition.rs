//! The condition of a run, its regime, and its inputs to a model.

use rtvirtio_measure::VmKind;
use rtvirtio_model::learned::Regime;
use rtvirtio_model::{Config, Elevator};
use rtvirtio_spec::{Device, LabKind, Spec};
use rtvirtio_units::Bytes;

use crate::dataset::{Outcome, Point};
use crate::load::{Stream, spec};

/// Indices of the points by condition, in order of first appearance.
#[must_use]
pub fn conditions(points: &[Point]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (i, p) in points.iter().enumerate() {
        match groups.iter_mut().find(|g| points[g[0]].repeats(p)) {
            Some(group) => group.push(i),
            None => groups.push(vec![i]),
        }
    }
    groups
}

/// Spec and configuration of a point.
#[must_use]
pub fn inputs(point: &Point) -> (Spec, Config) {
    let device = Device::Twin { profile: point.device.clone(), size: Bytes(1 << 30) };
    (spec(&point.vms, device, lab_kind(point.kind)), point.knobs.config())
}

/// Kind in a spec of the VMs of a lab, which are of one kind.
pub(crate) fn lab_kind(kind: VmKind) -> LabKind {
    match kind {
        VmKind::Qemu => LabKind::Qemu,
        VmKind::Process | VmKind::Mixed => LabKind::Process,
    }
}

/// Regime of the point's settings.
#[must_use]
pub fn regime(point: &Point) -> Regime {
    let (spec, config) = inputs(point);
    Regime::from_config(&spec, &config)
}

/// Whether a run is like those of the RT-VirtIO paper (its Table II): BFQ, 4 KiB random reads at a
/// rate, no caps, no neighbour. The paper's network has no input for anything else.
#[must_use]
pub fn paper_domain(point: &Point) -> bool {
    let plain = |s: &Stream| *s == Stream { rate: s.rate, target: s.target, ..Stream::paced(1.0) };
    point.knobs.elevator == Elevator::Bfq
        && point.knobs.caps.iter().all(Option::is_none)
        && point.vms.iter().flatten().all(|s| s.rate.is_some() && plain(s))
}

/// Share of the declared rate that was lost; `None` without a rate.
#[must_use]
pub fn lost(stream: &Stream, outcome: &Outcome) -> Option<f64> {
    stream.rate.map(|r| (1.0 - outcome.rate.0 / r.0).clamp(0.0, 1.0))
}
