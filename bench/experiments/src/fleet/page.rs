//! The page of simulated fleets.

use rtvirtio_report::svg::Spread;

use super::{Filled, FleetData};
use crate::page::Section;
use crate::page::xy::{axis, plot, series, table};

/// Sections on the cost of a decision, and on the contracts placed.
pub fn sections(data: &FleetData) -> Vec<Section> {
    vec![cost(data), placed(data)]
}

fn micros(f: &Filled) -> f64 {
    1e6 * f.seconds / f.vms.max(1) as f64
}

fn cost(data: &FleetData) -> Section {
    let points = data.fleets.iter().map(|f| {
        let (hosts, us) = (f.hosts as f64, micros(f));
        (hosts, us, format!("{} hosts: {us:.2} us", f.hosts))
    });
    let curve = series(0, "mean of all decisions", points.collect());
    let growth = plot(
        "Time of one decision over the number of hosts",
        axis("hosts", Spread::Log),
        axis("microseconds for a decision", Spread::Log),
        vec![curve],
        None,
    );
    Section {
        title: "Cost of a decision".to_owned(),
        text: vec![format!(
            "A decision finds a host for one contract, or finds that none admits it, on one core. {} contracts come for each host, more than fit.",
            super::VMS_PER_HOST
        )],
        plots: vec![("Mean time of a decision while a fleet is filled.".to_owned(), growth)],
        tables: Vec::new(),
    }
}

fn placed(data: &FleetData) -> Section {
    let row = |f: &Filled| {
        [
            f.vms,
            f.placed,
            f.placed_by_sums,
            f.first_fit,
            f.pacemaker,
            f.placed_decreasing,
            f.first_fit_decreasing,
        ]
        .map(|n| n.to_string())
    };
    let rows = data
        .fleets
        .iter()
        .map(|f| {
            let mut cells = vec![f.hosts.to_string()];
            cells.extend(row(f));
            cells.push(format!("{:.2}", micros(f)));
            cells
        })
        .collect();
    let head = [
        "hosts",
        "contracts",
        "placed",
        "by sums alone",
        "first fit",
        "Pacemaker's rule",
        "placed, largest first",
        "first fit, largest first",
        "us for a decision",
    ];
    Section {
        title: "Contracts placed".to_owned(),
        text: vec!["Every rule has the same hosts and contracts. First fit and Pacemaker's rule know integers that they add up.".to_owned()],
        plots: Vec::new(),
        tables: vec![table("contracts placed by rule", &head, rows)],
    }
}
