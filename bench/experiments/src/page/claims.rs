//! Claims as rows of a table, and as text.

use crate::claims::Claim;
use crate::page::{Section, Table};

/// Claims as a section with a table.
#[must_use]
pub fn section(claims: &[Claim]) -> Section {
    let head = ["claim", "what", "value", "unit", "n", "should be", ""].map(str::to_owned).to_vec();
    let rows = claims.iter().map(|c| cells(c).to_vec()).collect();
    Section {
        title: "Claims".to_owned(),
        tables: vec![Table { label: "claims".to_owned(), head, rows }],
        ..Section::default()
    }
}

/// Claims for a terminal, one a line.
#[must_use]
pub fn text(claims: &[Claim]) -> String {
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

/// Id, meaning, value, unit, n, limit, and whether the limit is met.
#[must_use]
pub fn cells(c: &Claim) -> [String; 7] {
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
