//! Runs in QEMU guests compared with runs of process VMs: whether models learned from processes
//! hold for guests.

use rtvirtio_measure::VmKind;
use rtvirtio_model::learned::Regime;

use rtvirtio_learn::condition::{conditions, inputs};
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::statistic::median;

/// Gives every run in guests to a model that was fitted without its condition: to the first of
/// them, and where all were, to each alternately. Runs that all models know are left out. `models`
/// are the models with the runs that each was fitted on.
#[must_use]
pub fn unseen<M: Clone>(models: &[(M, &[Point])], guests: &[Point]) -> Vec<(M, Vec<Point>)> {
    let mut of: Vec<(M, Vec<Point>)> = models.iter().map(|(model, _)| (model.clone(), Vec::new())).collect();
    let mut turn = 0;
    for condition in conditions(guests) {
        let run = &guests[condition[0]];
        // Neither the kind of a VM nor the length of a run makes it another condition.
        let is_new = |(_, seen): &&(M, &[Point])| !seen.iter().any(|s| s.does_the_same(run));
        let new: Vec<usize> = (0..models.len()).filter(|i| is_new(&&models[*i])).collect();
        let Some(first) = new.first() else { continue };
        let i = if new.len() < models.len() {
            *first
        } else {
            turn += 1;
            (turn - 1) % models.len()
        };
        of[i].1.extend(condition.iter().map(|r| guests[*r].clone()));
    }
    of.retain(|(_, runs)| !runs.is_empty());
    of
}

/// Tails of one task in a guest and in a process VM, under the same settings and load.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Run in the guest.
    pub id: String,
    pub task: usize,
    /// Regime of the run.
    pub regime: Regime,
    /// Tail in the guest, ms.
    pub guest_ms: f64,
    /// Median tail of the process in all its runs of this condition, ms.
    pub process_ms: f64,
}

/// The tasks with a rate that were measured both ways. Tails are as measured, with the host's own
/// stalls: in guests these are not known.
#[must_use]
pub fn pairs(guests: &[Point], processes: &[Point]) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for run in guests {
        // A longer run has a longer tail.
        let same = |p: &&Point| p.kind == VmKind::Process && p.seconds == run.seconds && p.does_the_same(run);
        let same: Vec<&Point> = processes.iter().filter(same).collect();
        if same.is_empty() {
            continue;
        }
        let (spec, config) = inputs(same[0]);
        let regime = Regime::from_config(&spec, &config);
        for (task, (_, stream, result)) in run.tasks().enumerate() {
            if stream.rate.is_some() {
                let others = same.iter().map(|p| p.results[task].p9999.as_millis_f64()).collect();
                let process_ms = median(others);
                let guest_ms = result.p9999.as_millis_f64();
                pairs.push(Pair { id: run.id.clone(), task, regime, guest_ms, process_ms });
            }
        }
    }
    pairs
}

/// Ratio of tails in guests to those in process VMs.
#[derive(Clone, Debug)]
pub struct GuestRatio {
    /// `all`, or the regime of the pairs.
    pub name: String,
    /// Pairs that the medians are over.
    pub n: usize,
    /// Median of guest / process.
    pub ratio: f64,
    /// 10th and 90th percentile of guest / process.
    pub spread: [f64; 2],
    /// Median of guest - process, ms.
    pub more_ms: f64,
}

/// Ratio of all pairs, and of each regime with at least one.
#[must_use]
pub fn guest_ratios(pairs: &[Pair]) -> Vec<GuestRatio> {
    let all = std::iter::once(("all".to_owned(), None));
    let each = Regime::ALL.into_iter().map(|r| (r.name().to_owned(), Some(r)));
    let of = |(name, regime): (String, Option<Regime>)| {
        let of: Vec<&Pair> = pairs.iter().filter(|p| regime.is_none_or(|r| r == p.regime)).collect();
        let mut ratios: Vec<f64> = of.iter().map(|p| p.guest_ms / p.process_ms.max(1e-6)).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| ratios.get((share * ratios.len() as f64) as usize).copied().unwrap_or(f64::NAN);
        let more_ms = median(of.iter().map(|p| p.guest_ms - p.process_ms).collect());
        GuestRatio { name, n: of.len(), ratio: median(ratios.clone()), spread: [at(0.1), at(0.9)], more_ms }
    };
    all.chain(each).map(of).filter(|l| l.n > 0).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;
    use rtvirtio_learn::synthetic::synthetic_runs;

    /// Runs repeated in guests whose tails are three times as long.
    fn in_guests(runs: &[Point]) -> Vec<Point> {
        let mut runs = runs.to_vec();
        for run in &mut runs {
            run.kind = VmKind::Qemu;
            for result in &mut run.results {
                result.p9999 = Nanos(result.p9999.0 * 3);
            }
        }
        runs
    }

    #[test]
    fn a_guest_is_compared_with_the_process_of_its_condition() {
        let processes = synthetic_runs(12, 0.0, 1);
        let guests = in_guests(&processes[..4]);
        let tasks: usize =
            guests.iter().map(|g| g.tasks().filter(|(_, s, _)| s.rate.is_some()).count()).sum();
        let pairs = pairs(&guests, &processes);
        assert_eq!(pairs.len(), tasks);
        for l in guest_ratios(&pairs) {
            assert!((l.ratio - 3.0).abs() < 1e-6, "{l:?}");
            assert!(l.spread.iter().all(|s| (s - 3.0).abs() < 1e-6) && l.more_ms > 0.0, "{l:?}");
        }
        assert_eq!(guest_ratios(&pairs)[0].n, tasks);
        // A condition that no process ran has no counterpart.
        assert!(super::pairs(&guests, &processes[4..]).is_empty());
        assert!(guest_ratios(&[]).is_empty());
    }

    #[test]
    fn no_model_is_judged_by_a_condition_that_it_was_fitted_on() {
        let mut processes = synthetic_runs(190, 0.0, 1);
        // The design may hold a condition twice.
        let once: Vec<usize> = conditions(&processes).into_iter().map(|g| g[0]).collect();
        processes = once.into_iter().map(|i| processes[i].clone()).take(180).collect();
        let mut guests = in_guests(&processes);
        guests[0].seconds = 4.0;
        let models = [("first", &processes[..130]), ("second", &processes[50..])];
        let of = unseen(&models, &guests);
        let ids = |runs: &[Point]| runs.iter().map(|r| r.id.clone()).collect::<Vec<_>>();
        assert_eq!(of.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["first", "second"]);
        assert_eq!(ids(&of[0].1), ids(&guests[130..]));
        // Runs 50 to 130 are known to both models.
        assert_eq!(ids(&of[1].1), ids(&guests[..50]));
        // Runs unknown to all models are distributed over them, with runs of one condition
        // together.
        let none = [("first", &processes[..0]), ("second", &processes[..0])];
        let twice = [&guests[..4], &guests[..4]].concat();
        let of = unseen(&none, &twice);
        let mut expected = [vec![0, 0, 2, 2], vec![1, 1, 3, 3]]
            .map(|of| of.into_iter().map(|i| guests[i].id.clone()).collect::<Vec<_>>());
        expected.iter_mut().for_each(|ids| ids.sort());
        let mut found = [ids(&of[0].1), ids(&of[1].1)];
        found.iter_mut().for_each(|ids| ids.sort());
        assert_eq!(found, expected);
    }
}
