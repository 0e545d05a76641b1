//! The experiments as one page: the paper's figures drawn from our measurements, its published values beside them.

mod accuracy;
mod cases;
mod contention;

use rtvirtio_bench::claims::Claim;
use rtvirtio_report::{BenchSection, BenchTable};

pub use accuracy::accuracy;
pub use cases::{cases, pass_rates};
pub use contention::contention;

/// Claims as a table.
pub fn claims(claims: &[Claim]) -> BenchSection {
    let limit = |c: &Claim| match (c.at_least, c.at_most) {
        (Some(l), _) => format!("at least {}", number(l)),
        (_, Some(l)) => format!("at most {}", number(l)),
        _ => "for comparison".to_owned(),
    };
    let rows = claims
        .iter()
        .map(|c| {
            let met = if c.at_least.or(c.at_most).is_none() {
                ""
            } else if c.met {
                "met"
            } else {
                "NOT MET"
            };
            vec![
                c.id.clone(),
                c.what.clone(),
                number(c.value),
                c.unit.clone(),
                c.n.to_string(),
                limit(c),
                met.to_owned(),
            ]
        })
        .collect();
    let head = ["claim", "what", "value", "unit", "n", "should be", ""].map(str::to_owned).to_vec();
    BenchSection {
        title: "Claims".to_owned(),
        tables: vec![BenchTable { label: "claims".to_owned(), head, rows }],
        ..BenchSection::default()
    }
}

fn number(v: f64) -> String {
    if v.abs() >= 100.0 { format!("{v:.0}") } else { format!("{v:.3}") }
}
