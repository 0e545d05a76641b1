//! The experiments as one page: the paper's figures drawn from our measurements, its published values beside them.

mod accuracy;
mod cases;
mod contention;
mod cyclictest;
mod guests;
mod reservation;
mod sizes;
mod tails;
mod xy;

use rtvirtio_bench::claims::Claim;
use rtvirtio_report::{BenchSection, BenchTable};

pub use accuracy::{accuracy, calibration};
pub use cases::{achieved, cases, misses, pass_rates};
pub use contention::contention;
pub use cyclictest::cyclictest;
pub use guests::guests;
pub use reservation::reservation;
pub use sizes::sizes;
pub use tails::{tails, tails_text};

/// Claims as a table.
pub fn claims(claims: &[Claim]) -> BenchSection {
    let head = ["claim", "what", "value", "unit", "n", "should be", ""].map(str::to_owned).to_vec();
    let rows = claims.iter().map(|c| claim(c).to_vec()).collect();
    BenchSection {
        title: "Claims".to_owned(),
        tables: vec![BenchTable { label: "claims".to_owned(), head, rows }],
        ..BenchSection::default()
    }
}

/// Claims for a terminal.
pub fn table(claims: &[Claim]) -> String {
    let limit = |c: &Claim| match (c.at_least, c.at_most) {
        (Some(l), _) => format!("(at least {l})"),
        (_, Some(l)) => format!("(at most {l})"),
        _ => String::new(),
    };
    claims
        .iter()
        .map(|c| {
            let met = if c.met { "" } else { "  NOT MET" };
            format!(
                "{:<34} {:>9.3} {:<6} {:<16} n {:>3}  {}{met}\n",
                c.id,
                c.value,
                c.unit,
                limit(c),
                c.n,
                c.what
            )
        })
        .collect()
}

/// Name, what it says, value, unit, n, limit, and whether it is met.
pub fn claim(c: &Claim) -> [String; 7] {
    let limit = match (c.at_least, c.at_most) {
        (Some(l), _) => format!("at least {}", number(l)),
        (_, Some(l)) => format!("at most {}", number(l)),
        _ => "for comparison".to_owned(),
    };
    let met = match (c.at_least.or(c.at_most), c.met) {
        (None, _) => "",
        (_, true) => "met",
        (_, false) => "NOT MET",
    };
    [c.id.clone(), c.what.clone(), number(c.value), c.unit.clone(), c.n.to_string(), limit, met.to_owned()]
}

fn number(v: f64) -> String {
    if v.abs() >= 100.0 { format!("{v:.0}") } else { format!("{v:.3}") }
}
