//! Adaptive windows compared with fixed ones: throughput of all VMs, and latency of VMs with a
//! reservation.

use rtvirtio_measure::Run;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::iod::{FloodScheme, kept, measured_ms, middle_ms, total};
use rtvirtio_learn::statistic::median;

/// Shortest deadline that the I/O domain admits with a window of 64 pieces.
const DEADLINE: Nanos = Nanos(15_000_000);

const fn edf(name: &'static str, window: &'static str) -> FloodScheme {
    FloodScheme { name, policy: "edf", window, deadline: DEADLINE, flood: true }
}

/// Fixed windows, the widest above the flood's depth, and two adaptive ones.
pub const WINDOW_SCHEMES: [FloodScheme; 7] = [
    edf("window 1", "1"),
    edf("window 2", "2"),
    edf("window 4", "4"),
    edf("window 8", "8"),
    edf("window 64", "64"),
    edf("adaptive from 8", "{ start = 8, least = 1, most = 64 }"),
    edf("adaptive from 1", "{ start = 1, least = 1, most = 64 }"),
];
/// Number of fixed windows, which come first.
const FIXED: usize = 5;
/// Index of the widest window.
const WIDE: usize = 4;

/// Values of one run with a window.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowRun {
    /// Requests per second of all VMs.
    pub iops: f64,
    /// Smallest share of a declared rate that was reached.
    pub kept: f64,
    /// Slowest median of the tasks with a reservation, ms.
    pub p50_ms: f64,
    /// Worst tail of these tasks as measured, ms.
    pub p9999_ms: f64,
    /// Size of the window at the end, in pieces.
    pub window: u64,
}

impl WindowRun {
    /// Computes the values of a run.
    #[must_use]
    pub fn from_run(run: &Run, window: u64) -> Self {
        Self { iops: total(run), kept: kept(run), p50_ms: middle_ms(run), p9999_ms: measured_ms(run), window }
    }
}

/// Claims of the rounds; empty without rounds.
#[must_use]
pub fn claims(rounds: &[Vec<WindowRun>]) -> Vec<Claim> {
    let whole: Vec<&Vec<WindowRun>> = rounds.iter().filter(|r| r.len() == WINDOW_SCHEMES.len()).collect();
    if whole.is_empty() {
        return Vec::new();
    }
    let n = whole.len();
    let middle = |f: &dyn Fn(&[WindowRun]) -> f64| median(whole.iter().map(|r| f(r)).collect());
    let best = |r: &[WindowRun]| r[..FIXED].iter().map(|w| w.iops).fold(0.0, f64::max);
    let mut claims = Vec::new();
    for (i, id) in [(FIXED, "start_8"), (FIXED + 1, "start_1")] {
        let name = WINDOW_SCHEMES[i].name;
        claims.push(Claim::new(
            format!("iod.window.throughput.{id}"),
            format!("requests per second of all VMs with a window that is {name}, over the best fixed one, median of rounds"),
            middle(&|r| r[i].iops / best(r).max(1.0)),
            "times",
            n,
        ));
        claims.push(Claim::new(
            format!("iod.window.p50.{id}"),
            format!(
                "slowest median of the nine tasks with a window that is {name}, over that with a window of 64"
            ),
            middle(&|r| r[i].p50_ms / r[WIDE].p50_ms.max(1e-6)),
            "times",
            n,
        ));
        claims.push(Claim::new(
            format!("iod.window.found.{id}"),
            format!("the window at the end, {name}"),
            middle(&|r| r[i].window as f64),
            "pieces",
            n,
        ));
    }
    claims
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::iod::flood_config;

    #[test]
    fn every_window_is_admitted() {
        for scheme in &WINDOW_SCHEMES {
            let text = flood_config(scheme, Path::new("/dev/x"), 1 << 30, Nanos(67_400), Path::new("/run/x"));
            rtvirtio_domain_config::File::parse(Path::new("x"), &text).unwrap();
        }
    }

    #[test]
    fn adaptive_windows_are_held_against_the_best_fixed_one() {
        let run = |iops: f64| WindowRun { iops, kept: 1.0, p50_ms: iops / 10.0, p9999_ms: 5.0, window: 3 };
        let round = [10.0, 20.0, 30.0, 40.0, 35.0, 40.0, 20.0].map(run).to_vec();
        let all = claims(&[round.clone(), round[..4].to_vec()]);
        assert_eq!((all[0].value, all[0].n), (1.0, 1), "the round that was cut short does not count");
        assert_eq!((all[1].value, all[3].value, all[5].value), (40.0 / 35.0, 0.5, 3.0));
        assert!(claims(&[]).is_empty());
    }
}
