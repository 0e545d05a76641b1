//! Claims on accuracy.

use super::judge::{Accuracy, Group, NonIdling, enough};
use super::rates::Rates;
use rtvirtio_learn::train::MISS;

use crate::claims::Claim;

/// Largest share of kept rates that a forecast may doubt where BFQ does not idle: each doubt rules
/// out a good setting.
const DOUBTED: f64 = 0.1;

/// Largest share of the tasks that were predicted to keep their rate and did not.
const BROKEN: f64 = 0.01;

/// Claims on tails as measured and, where the host's own stalls are known, on tails less these.
pub fn accuracy_claims(a: &Accuracy, curve: &[Accuracy], confidence: f64) -> Vec<Claim> {
    let n = a.held.len();
    let at = if confidence < 1.0 - MISS { format!(" at {:.0} %", 100.0 * confidence) } else { String::new() };
    let mut claims = Vec::new();
    let mut bound = |id: &str, of: &str, coverage: f64, sharpness: f64, n: usize, groups: &[Group]| {
        let covers = format!("held-out tails {of} below their upper bound{at}");
        claims.push(
            Claim::new(format!("accuracy.{id}.coverage"), covers, coverage, "share", n).at_least(confidence),
        );
        let sharp = format!("median of upper bound{at} over tail {}", of.trim_end_matches(','));
        claims
            .push(Claim::new(format!("accuracy.{id}.sharpness"), sharp, sharpness, "ratio", n).at_most(1.5));
        let (name, n, share) = groups.first().map_or((String::new(), 0, 0.0), Clone::clone);
        let group = format!("the same coverage{at} in its worst group ({name})");
        let claim = Claim::new(format!("accuracy.{id}.worst_group"), group, share, "share", n);
        claims.push(claim.at_least(confidence - 0.02));
    };
    match &a.with_host {
        Some(w) => {
            let of = "as measured, with the host's own stalls,";
            let more = match w.unknown {
                0 => of.to_owned(),
                runs => {
                    format!("{of} of {runs} more runs that the host stalled too often to learn from,")
                }
            };
            bound("bound", &more, w.coverage, w.sharpness, w.n, &w.groups);
            bound("awake", "less the host's own stalls", a.coverage, a.sharpness, n, &a.groups);
        }
        None => bound("bound", "as measured", a.coverage, a.sharpness, n, &a.groups),
    }
    let (less_stalls, measured) = a.non_idling();
    let mut non_idling = |id: &str, of: &str, f: &NonIdling| {
        let covers = format!(
            "held-out tails {of} below their upper bound{at} where BFQ does not idle, as it does not in most plans"
        );
        let claim = Claim::new(format!("accuracy.{id}.coverage"), covers, f.coverage, "share", f.n);
        claims.push(claim.at_least(confidence));
        let sharp = format!("median of that bound over the tail {of}");
        claims.push(Claim::new(format!("accuracy.{id}.sharpness"), sharp, f.sharpness, "ratio", f.n));
    };
    match (less_stalls, measured) {
        (none, _) if none.n == 0 => {}
        (awake, Some(measured)) => {
            non_idling("flowing", "as measured", &measured);
            non_idling("flowing_awake", "less the host's own stalls", &awake);
        }
        (measured, None) => non_idling("flowing", "as measured", &measured),
    }
    claims.extend(of_rates(a));
    let runs = "runs from which on more of them make the expected tail better by less than a tenth (typical factor, learning curve)";
    let enough = enough(curve);
    let mut claim =
        Claim::new("accuracy.points", runs, enough.unwrap_or(a.trained) as f64, "runs", a.trained);
    claim = claim.at_most(1000.0);
    if enough.is_none() {
        claim.what.push_str("; not reached, more runs would help");
        claim.met = false;
    }
    claims.push(claim);
    claims
}

/// Rates by whether BFQ idles: part of a claim's id, text, counts, and the share of kept rates that
/// may be doubted.
pub fn rates(a: &Accuracy) -> [(&'static str, &'static str, Rates, Option<f64>); 2] {
    [
        ("flowing", "does not idle", a.non_idling_rates, Some(DOUBTED)),
        // Where BFQ idles, waiting is random, and a doubt is right.
        ("idling", "idles", a.idling_rates, None),
    ]
}

/// Claims on shares of wrong rate forecasts, where BFQ idles and where it does not.
fn of_rates(a: &Accuracy) -> Vec<Claim> {
    let mut claims = Vec::new();
    for (id, place, rates, doubted) in rates(a) {
        let what = format!(
            "held-out tasks that lost more than a hundredth of their rate, of those that were to keep it, where BFQ {place}"
        );
        let broken =
            Claim::new(format!("accuracy.{id}.broken"), what, rates.broken_share(), "share", rates.promised);
        let what =
            format!("held-out tasks that were to lose it, of those that kept their rate, where BFQ {place}");
        let refused =
            Claim::new(format!("accuracy.{id}.refused"), what, rates.refused_share(), "share", rates.kept);
        claims.extend((rates.promised > 0).then(|| broken.at_most(BROKEN)));
        claims.extend((rates.kept > 0).then(|| match doubted {
            Some(most) => refused.at_most(most),
            None => refused,
        }));
    }
    claims
}
