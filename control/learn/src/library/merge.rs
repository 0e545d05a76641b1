//! Merges shares of one kind into an entry.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rtvirtio_model::{DepthPoint, HostModel, LargeRequests, Profile};
use rtvirtio_units::{Iops, Nanos};

use super::{Entry, LIBRARY_SCHEMA, LibraryError, Shard, Share};
use crate::condition::conditions;
use crate::dataset::Point;
use crate::statistic::median;
use crate::train::{FEWEST, TrainError, TrainSettings, comparable, fit};

/// Largest relative difference of throughput and median latency between two devices of one kind,
/// beyond the spread of their own repetitions. Drives of one model differ by a few percent; a
/// throttled, worn or shared one differs by half.
pub(super) const ALIKE: f64 = 0.20;
/// Limit of the spread of repetitions that is added to `ALIKE`: beyond it the spread proves
/// nothing.
pub(super) const MOST_SPREAD: f64 = 0.30;

/// An entry, and the model learned with it.
#[derive(Clone, Debug)]
pub struct Merged {
    /// Entry merged from all shares.
    pub entry: Entry,
    /// Model learned from all runs; `None` where they are too few.
    pub model: Option<HostModel>,
    /// Number of different conditions measured.
    pub conditions: usize,
    /// Shards of the sweep that no share has.
    pub missing: Vec<Shard>,
}

/// Merges shares of one kind, and fits a model where there are runs enough. `generated` is the
/// time, as text.
///
/// # Errors
/// [`LibraryError`] where the shares are of different kinds, measured in different ways, of the
/// same shard, or contradict each other; nothing is merged then. Too few runs for a model are no
/// error.
pub fn merge(
    shares: &[(PathBuf, Share)],
    settings: &TrainSettings,
    generated: &str,
) -> Result<Merged, LibraryError> {
    let [(first, one), rest @ ..] = shares else { return Err(LibraryError::Nothing) };
    if let Some((path, _)) = shares.iter().find(|(_, share)| share.profile.read.is_empty()) {
        return Err(LibraryError::NoMeasurement { path: path.clone() });
    }
    for (i, (path, share)) in rest.iter().enumerate() {
        if let Some(what) = share.kind.differs(&one.kind) {
            return Err(LibraryError::OtherKind { path: path.clone(), first: first.clone(), what });
        }
        if let Some(what) = measured_otherwise(&share.profile, &one.profile) {
            return Err(LibraryError::OtherMeasurement { path: path.clone(), first: first.clone(), what });
        }
        if let Some((other, _)) = shares[..=i].iter().find(|(_, s)| s.shard == share.shard) {
            return Err(LibraryError::SameShard {
                path: path.clone(),
                first: other.clone(),
                shard: share.shard,
            });
        }
    }
    let profiles: Vec<(&Path, &Profile)> = shares.iter().map(|(p, s)| (p.as_path(), &s.profile)).collect();
    for (name, of) in SERIES {
        contradictions(name, of, &profiles)?;
    }
    let profile = merged(&profiles);
    let points: Vec<Point> = shares.iter().flat_map(|(_, s)| s.runs.iter().cloned()).collect();
    let measured = conditions(&points).len();
    let model =
        if measured < FEWEST { None } else { learned(first, &points, &profile, (settings, generated))? };
    let entry = Entry {
        schema: LIBRARY_SCHEMA.to_owned(),
        kind: one.kind.clone(),
        shares: shares.len(),
        runs: points.len(),
        profile,
        generated: generated.to_owned(),
    };
    Ok(Merged { entry, model, conditions: measured, missing: missing(shares) })
}

fn learned(
    path: &Path,
    points: &[Point],
    profile: &Profile,
    (settings, generated): (&TrainSettings, &str),
) -> Result<Option<HostModel>, LibraryError> {
    match fit(&comparable(points), profile, generated, settings) {
        Ok(model) => Ok(Some(model)),
        // Runs in which the host stalled were excluded, which may leave too few.
        Err(TrainError::TooFew { .. }) => Ok(None),
        Err(e) => Err(LibraryError::Form { path: path.to_owned(), reason: e.to_string() }),
    }
}

/// Shards without a share, for each number of shards that occurs.
fn missing(shares: &[(PathBuf, Share)]) -> Vec<Shard> {
    let have: BTreeSet<(u32, u32)> = shares.iter().map(|(_, s)| (s.shard.total(), s.shard.index())).collect();
    let splits: BTreeSet<u32> = have.iter().map(|(of, _)| *of).collect();
    let all = splits.into_iter().flat_map(|of| (1..=of).map(move |i| (of, i)));
    all.filter(|part| !have.contains(part)).filter_map(|(of, i)| Shard::new(i, of).ok()).collect()
}

/// Selects a series of a profile.
pub(super) type Series = fn(&Profile) -> &[DepthPoint];

/// Every series of a profile, with its name in texts.
pub(super) const SERIES: [(&str, Series); 6] = [
    ("reads", |p| &p.read),
    ("reads with bfq", |p| &p.read_bfq),
    ("writes", |p| &p.write),
    ("synced writes", |p| &p.sync),
    ("large reads", |p| p.large.as_ref().map_or(&[], |l| &l.read)),
    ("large writes", |p| p.large.as_ref().map_or(&[], |l| &l.write)),
];

/// Difference of block size or queue depths between two profiles; `None` when equal.
fn measured_otherwise(ours: &Profile, theirs: &Profile) -> Option<String> {
    if ours.block != theirs.block {
        return Some(format!("blocks of {}, not {}", ours.block, theirs.block));
    }
    let depths = |p: &Profile, of: Series| of(p).iter().map(|p| p.depth).collect::<Vec<_>>();
    SERIES
        .iter()
        .find(|(_, of)| depths(ours, *of) != depths(theirs, *of))
        .map(|(name, of)| format!("{name} at depths {:?}, not {:?}", depths(ours, *of), depths(theirs, *of)))
}

/// Unit and value of a quantity of a point.
type Measure = (&'static str, fn(&DepthPoint) -> f64);

/// Refuses the share that is farthest from the median of the others, where it is too far.
fn contradictions(name: &str, of: Series, profiles: &[(&Path, &Profile)]) -> Result<(), LibraryError> {
    let others = |i: usize| match profiles {
        [a, b] => [b, a][i].0.display().to_string(),
        all => format!("the other {}", all.len() - 1),
    };
    let measures: [Measure; 2] =
        [("requests per second", |p| p.iops.0), ("us median latency", |p| p.p50.0 as f64 / 1e3)];
    for at in 0..profiles.first().map_or(0, |(_, p)| of(p).len()) {
        let points: Vec<&DepthPoint> = profiles.iter().map(|(_, p)| &of(p)[at]).collect();
        let spread = points.iter().map(|p| p.spread).fold(0.0, f64::max).min(MOST_SPREAD);
        for (unit, value) in measures {
            let all: Vec<f64> = points.iter().map(|p| value(p)).collect();
            let apart = |i: usize| {
                let others = all.iter().enumerate().filter(|(o, _)| *o != i).map(|(_, v)| *v);
                let middle = median(others.collect());
                (if middle > 0.0 { (all[i] - middle).abs() / middle } else { 0.0 }, middle)
            };
            let far: Vec<(f64, f64)> = (0..all.len()).map(apart).collect();
            let Some(i) = (0..far.len()).max_by(|a, b| far[*a].0.total_cmp(&far[*b].0)) else { continue };
            if far[i].0 > ALIKE + spread {
                return Err(LibraryError::Contradiction {
                    path: profiles[i].0.to_owned(),
                    others: others(i),
                    what: format!(
                        "{name} at depth {}: {:.0} {unit}, not {:.0}; at most {:.0} % may lie between them",
                        points[i].depth,
                        all[i],
                        far[i].1,
                        (ALIKE + spread) * 100.0,
                    ),
                });
            }
        }
    }
    Ok(())
}

/// Merges profiles of one kind with the same depths.
fn merged(profiles: &[(&Path, &Profile)]) -> Profile {
    let series = |of: Series| -> Vec<DepthPoint> {
        let n = profiles.first().map_or(0, |(_, p)| of(p).len());
        (0..n).map(|at| middle(&profiles.iter().map(|(_, p)| &of(p)[at]).collect::<Vec<_>>())).collect()
    };
    let [read, read_bfq, write, sync, large_read, large_write] = SERIES.map(|(_, of)| series(of));
    let first = profiles[0].1;
    let large =
        first.large.as_ref().map(|l| LargeRequests { block: l.block, read: large_read, write: large_write });
    let mut doubts: Vec<String> = Vec::new();
    for doubt in profiles.iter().flat_map(|(_, p)| &p.doubts) {
        if !doubts.contains(doubt) {
            doubts.push(doubt.clone());
        }
    }
    Profile { read, read_bfq, write, sync, large, doubts, ..first.clone() }
}

/// Merges one point of several devices: medians, and the longest of every tail, because percentiles
/// of several devices cannot be combined.
fn middle(points: &[&DepthPoint]) -> DepthPoint {
    let of = |value: fn(&DepthPoint) -> f64| points.iter().map(|p| value(p)).collect::<Vec<f64>>();
    let longest = |value: fn(&DepthPoint) -> Nanos| points.iter().map(|p| value(p)).max().unwrap_or_default();
    let iops = of(|p| p.iops.0);
    let (least, most) = iops.iter().fold((f64::MAX, 0.0f64), |(l, m), v| (l.min(*v), m.max(*v)));
    let rate = median(iops);
    let between = if rate > 0.0 { (most - least) / rate } else { 0.0 };
    DepthPoint {
        depth: points[0].depth,
        iops: Iops(rate),
        spread: of(|p| p.spread).into_iter().fold((between * 1e4).round() / 1e4, f64::max),
        n: points.iter().map(|p| p.n).sum(),
        p50: Nanos(median(of(|p| p.p50.0 as f64)) as u64),
        p99: longest(|p| p.p99),
        p9999: longest(|p| p.p9999),
        max: longest(|p| p.max),
    }
}
