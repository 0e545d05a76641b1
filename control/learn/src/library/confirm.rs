//! Comparison of a device with the library's entry of its kind.

use rtvirtio_model::{DepthPoint, HostModel, Profile};
use serde::Serialize;

use super::Entry;
use super::merge::{ALIKE, MOST_SPREAD, SERIES};

/// Limit of the longest request, relative to the longest of all devices of the kind.
const LONGER: f64 = 2.0;

/// Deviation at one queue depth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deviation {
    /// Name of the series, such as `reads`.
    pub series: String,
    /// Requests in flight on the device.
    pub depth: u32,
    /// Requests per second here.
    pub iops: f64,
    /// Requests per second in the library.
    pub library_iops: f64,
    /// Share by which throughput differs from the library's.
    pub throughput: f64,
    /// Share by which the median latency differs from the library's.
    pub median: f64,
    /// Longest request here, over the longest of the library's at this depth.
    pub longest: f64,
}

/// Result of comparing a few points of a device with an entry.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Confirmation {
    /// Deviations at all compared points.
    pub points: Vec<Deviation>,
    /// Reason why the device is not confirmed; `None` when it is.
    pub differs: Option<String>,
}

/// Compares a few points of a device with the entry of its kind.
#[must_use]
pub fn confirm(entry: &Entry, few: &Profile) -> Confirmation {
    let mut points = Vec::new();
    let mut differs = None;
    for (series, of) in SERIES {
        for here in of(few) {
            let Some(there) = of(&entry.profile).iter().find(|p| p.depth == here.depth) else {
                differs.get_or_insert_with(|| format!("the library has no {series} at depth {}", here.depth));
                continue;
            };
            let point = deviation(series, here, there);
            if let Some(why) = too_far(&point, here, there) {
                differs.get_or_insert(why);
            }
            points.push(point);
        }
    }
    if points.is_empty() {
        differs.get_or_insert_with(|| "nothing was compared".to_owned());
    }
    Confirmation { points, differs }
}

fn deviation(series: &str, here: &DepthPoint, there: &DepthPoint) -> Deviation {
    let over = |a: f64, b: f64| if b > 0.0 { a / b } else { f64::INFINITY };
    Deviation {
        series: series.to_owned(),
        depth: here.depth,
        iops: here.iops.0,
        library_iops: there.iops.0,
        throughput: over(here.iops.0, there.iops.0) - 1.0,
        median: over(here.p50.0 as f64, there.p50.0 as f64) - 1.0,
        longest: over(here.max.0 as f64, there.max.0 as f64),
    }
}

fn too_far(d: &Deviation, here: &DepthPoint, there: &DepthPoint) -> Option<String> {
    // The spread between the library's devices is allowed; a spread of this device's repetitions is
    // not.
    let allowed = ALIKE + there.spread.min(MOST_SPREAD);
    let at = format!("{} at depth {}", d.series, d.depth);
    let apart = |name: &str, share: f64| {
        format!(
            "{at}: {name} is {:+.0} % off the library's, at most {:.0} % are allowed",
            share * 100.0,
            allowed * 100.0
        )
    };
    if here.spread > ALIKE + MOST_SPREAD {
        return Some(format!(
            "{at}: repetitions differ by {:.0} %: something else uses the device",
            here.spread * 100.0
        ));
    }
    if d.throughput.abs() > allowed {
        return Some(apart("throughput", d.throughput));
    }
    if d.median.abs() > allowed {
        return Some(apart("the median latency", d.median));
    }
    (d.longest > LONGER).then(|| {
        format!("{at}: a request took {}, the longest of the library's took {}", here.max, there.max)
    })
}

impl Confirmation {
    /// Largest deviation of throughput or median latency, as a share.
    #[must_use]
    pub fn largest(&self) -> f64 {
        self.points.iter().flat_map(|p| [p.throughput.abs(), p.median.abs()]).fold(0.0, f64::max)
    }

    /// The entry's profile for this device. Its first doubt names the source and the series not
    /// measured here.
    #[must_use]
    pub fn profile(&self, entry: &Entry, few: &Profile) -> Profile {
        let depths: Vec<String> = few.read.iter().map(|p| p.depth.to_string()).collect();
        let with_writes = !few.write.is_empty();
        let unseen = if entry.profile.write.is_empty() || with_writes { "" } else { "; its writes were not" };
        let mut profile =
            Profile { device: few.device.clone(), identity: few.identity.clone(), ..entry.profile.clone() };
        profile.doubts.insert(
            0,
            format!(
                "measured on {} other devices of the kind {}, and confirmed on this one by {} at depths {}, at most {:.0} % off{unseen}: the tails are the longest of those devices",
                entry.shares,
                entry.kind.model,
                if with_writes { "reads and writes" } else { "reads" },
                depths.join(", "),
                self.largest() * 100.0,
            ),
        );
        profile
    }

    /// The entry's model for this device.
    #[must_use]
    pub fn model(model: &HostModel, few: &Profile) -> HostModel {
        let mut own = model.clone();
        own.profile.device = few.device.clone();
        own.profile.identity = few.identity.clone();
        own
    }
}
