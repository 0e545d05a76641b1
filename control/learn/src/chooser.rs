//! Chooses the next conditions: first a Latin hypercube, then where the trees disagree most.

use rtvirtio_model::Profile;
use rtvirtio_model::learned::{Regime, features};
use rtvirtio_spec::{Device, LabKind};

use crate::condition::{self, regime};
use crate::dataset::Point;
use crate::design::{Condition, Limits, conditions};
use crate::load::spec;
use crate::train::{FEWEST, TrainError, TrainSettings, comparable, fit};

/// Candidates that the forest rates.
const POOL: usize = 240;

/// Rotation of regimes while there are too few non-idling conditions for a bound of their own:
/// three of four are non-idling, as most plans are.
const NON_IDLING_FIRST: [Regime; 8] = [
    Regime::NonIdling,
    Regime::NonIdlingWithUnpacedNeighbour,
    Regime::Idling,
    Regime::NonIdling,
    Regime::NonIdlingWithUnpacedNeighbour,
    Regime::IdlingWithUnpacedNeighbour,
    Regime::NonIdling,
    Regime::NonIdlingWithUnpacedNeighbour,
];

/// Conditions of a pool, `n` of them, on which the trees disagree most; taken from each regime in
/// turn, so that one hard regime does not take all the time.
///
/// # Errors
/// [`TrainError`], such as too few points to fit on.
pub fn least_sure(
    points: &[Point],
    profile: &Profile,
    device: &Device,
    limits: &Limits<'_>,
    n: usize,
    seed: u64,
) -> Result<Vec<Condition>, TrainError> {
    let settings = TrainSettings { seed, ..TrainSettings::default() };
    let seconds = points.first().map_or(10.0, |p| p.seconds);
    let points = comparable(points);
    let model = fit(&points, profile, "", &settings)?;
    let flows = |members: &&Vec<usize>| regime(&points[members[0]]).is_non_idling();
    let non_idling = condition::conditions(&points).iter().filter(flows).count();
    let turns = if non_idling < FEWEST { &NON_IDLING_FIRST[..] } else { &Regime::ALL[..] };
    let mut pool: Vec<(f64, usize, Condition)> = Vec::new();
    for condition in conditions(POOL, limits, seed) {
        let spec = spec(&condition.vms, device.clone(), LabKind::Process);
        let config = condition.knobs.config();
        let (rows, _) = features(profile, &spec, &config, seconds)
            .map_err(|source| TrainError::Point { id: "candidate".to_owned(), source })?;
        let regime = Regime::from_config(&spec, &config);
        let mut widest = 0.0f64;
        for row in &rows {
            widest = widest.max(model.spread(row, regime)?);
        }
        pool.push((widest, regime.category(), condition));
    }
    pool.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut out = Vec::new();
    while out.len() < n && !pool.is_empty() {
        for regime in turns {
            if let Some(at) = pool.iter().position(|(_, r, _)| *r == regime.category()) {
                out.push(pool.remove(at).2);
            }
        }
    }
    out.truncate(n);
    Ok(out)
}
