//! The runs as a page.

use crate::experiment::Experiment;

use super::{PlannedData, PlannedPoint, claims};
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

impl Experiment for PlannedData {
    const FORM: &str = "rtvirtio-regulation-plan/1";
    const FILE: &str = "regulation-plan.json";
    const TITLE: &str = "rtvirtio: planned limits";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} runs of {} s next to limits of `plan --traffic`; {}.",
            self.host.device,
            self.points.len(),
            self.seconds,
            self.command
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section(self)])
    }
}

fn section(data: &PlannedData) -> Section {
    let refused = data.refused.iter().map(|r| {
        format!("Refused: {}, requests of {}, within {}: {}.", r.held_by.name(), r.block, r.target, r.why)
    });
    let head = [
        "held by",
        "requests",
        "target",
        "limit /s",
        "burst",
        "peak /s",
        "bound",
        "longest",
        "less stalls",
        "n",
        "neighbour /s",
        "",
    ];
    Section {
        title: "A victim next to a limit of `plan --traffic`".to_owned(),
        text: std::iter::once(format!(
            "The longest stall of the device's profile is {}. Rows without a target have the neighbour without a limit.",
            data.stall
        ))
        .chain(refused)
        .collect(),
        tables: vec![table("runs", &head, data.points.iter().map(row).collect())],
        ..Section::default()
    }
}

fn row(p: &PlannedPoint) -> Vec<String> {
    let of = |text: &dyn Fn(&super::PlannedLimit) -> String| p.limit.as_ref().map_or("-".to_owned(), text);
    let judged = p.limit.map_or("", |limit| match p.victim.is_within(limit.target) {
        true if p.victim.is_within(limit.bound) => "held",
        true => "held, beyond the bound",
        false => "MISSED",
    });
    vec![
        p.held_by.name().to_owned(),
        p.block.to_string(),
        of(&|l| l.target.to_string()),
        of(&|l| l.rate.to_string()),
        of(&|l| l.burst.to_string()),
        of(&|l| l.peak.map_or("-".to_owned(), |peak| peak.to_string())),
        of(&|l| l.bound.to_string()),
        p.victim.longest.to_string(),
        p.victim.awake.map_or("-".to_owned(), |ns| ns.to_string()),
        p.victim.n.to_string(),
        format!("{:.0}", p.neighbour),
        judged.to_owned(),
    ]
}
