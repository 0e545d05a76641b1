//! Devices that are slower or faster than their profiles.

use std::collections::BTreeMap;
use std::sync::Arc;

use rtvirtio_model::ageing::{Ageing, AgeingState, Part, WINDOW_S};
use rtvirtio_units::Nanos;
use rtvirtio_workflow::device_ageing::DeviceAgeing;
use serde::Serialize;

use super::facts::devices;
use crate::linux::RunningVm;

/// State of a device against its profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceAge {
    /// Service times are those of the profile.
    AsProfiled,
    /// Service times or standstills are longer: bounds from the profile do not hold.
    Slower,
    /// Service times are shorter: a new profile would allow more.
    Faster,
    /// Too few windows could tell.
    Unclear,
}

/// A device against its profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AgeingObservation {
    /// State of the service times and standstills.
    pub state: DeviceAge,
    /// Factor of the profile's service times that covers what was seen.
    pub factor: f64,
    /// Median time of requests in the last windows as a multiple of the profile's, for `reads` and
    /// `writes` that were seen.
    pub ratios: BTreeMap<&'static str, f64>,
    /// Standstills that are to be allowed for, where they are longer than the profile's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standstill_ns: Option<Nanos>,
    /// Time since the factor was last changed, in seconds; `None` of a device as profiled.
    pub since_s: Option<f64>,
    /// Windows without enough requests.
    pub few: u64,
    /// Windows in which requests waited for each other or for the host.
    pub waited: u64,
    /// Reason of the alarm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarm: Option<String>,
    /// Whether plans are made for it as it is now.
    pub is_followed: bool,
    /// Running VMs with tasks on it.
    pub vms: Vec<String>,
}

/// Devices of which windows were seen, by path.
pub(super) fn observed(
    all: &DeviceAgeing,
    vms: &[Arc<RunningVm>],
    is_followed: bool,
) -> BTreeMap<String, AgeingObservation> {
    let one = |(path, ageing): (&std::path::Path, &Ageing)| {
        let on_it = vms.iter().filter(|vm| devices(vm).any(|device| device == *path));
        let vms = on_it.map(|vm| vm.contract.vm.name.clone()).collect();
        (path.display().to_string(), AgeingObservation::new(ageing, vms, is_followed))
    };
    all.all().map(one).collect()
}

impl AgeingObservation {
    pub(crate) fn new(ageing: &Ageing, vms: Vec<String>, is_followed: bool) -> Self {
        let (state, changes) = match ageing.state() {
            AgeingState::AsProfiled => (DeviceAge::AsProfiled, Vec::new()),
            AgeingState::Slower(changes) => (DeviceAge::Slower, changes),
            AgeingState::Faster(changes) => (DeviceAge::Faster, changes),
            AgeingState::Unclear { .. } => (DeviceAge::Unclear, Vec::new()),
        };
        let ratio = |part: Part| Some((part.name(), ageing.ratio_of(part)?));
        let since = changes.iter().map(|change| change.since).min();
        let uncounted = ageing.uncounted();
        Self {
            state,
            factor: ageing.factor(),
            ratios: [Part::Reads, Part::Writes].into_iter().filter_map(ratio).collect(),
            standstill_ns: ageing.standstill(),
            since_s: since.map(|windows| windows as f64 * WINDOW_S),
            few: uncounted.few,
            waited: uncounted.waited,
            alarm: ageing.alarm(),
            is_followed,
            vms,
        }
    }

    /// Factor that plans are to allow for; `None` where the profile's times hold.
    pub(crate) fn to_plan_for(&self) -> Option<f64> {
        (self.is_followed && self.factor > 1.0).then_some(self.factor)
    }

    /// Sentence for users where predictions for this device do not hold: it is slower than its
    /// profile, and a plan that is made for service times `planned` times as long does not cover
    /// it.
    pub(crate) fn void(&self, device: &str, planned: f64) -> Option<String> {
        let alarm = self.alarm.as_ref()?;
        if self.standstill_ns.is_none() && planned >= self.factor {
            return None;
        }
        Some(format!(
            "{device} has aged: {alarm}; what was predicted for it does not hold: `rtvirtio profile {device} \
             --gentle` measures it anew"
        ))
    }
}
