//! The page and the file of a bundle: the figures of a host next to the reference's.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_measure::HostFacts;

use super::bundle::{Bundle, Outcome, PartResult};
use super::part::PARTS;
use crate::claims::Claim;
use crate::page::xy::table;
use crate::page::{Section, claims as claim_rows};
use crate::report::{ExperimentReport, read};

/// Published figures of the reference host.
const REFERENCE: &str = include_str!("../../../../docs/results/claims.tsv");
/// Description of the reference host.
const REFERENCE_HOST: &str = "The reference is the project's development machine, a virtual machine with two CPUs \
     whose guests are emulated: its figures compare methods and are not those of hardware.";
const HEAD: [&str; 9] =
    ["claim", "what", "here", "unit", "n", "reference", "here / reference", "should be", ""];

/// The report of a saved bundle.
pub fn report(path: &Path) -> anyhow::Result<ExperimentReport> {
    let bundle: Bundle = read(path)?;
    let reference = reference(REFERENCE);
    let claims: Vec<Claim> = bundle.claims().cloned().collect();
    let mut sections: Vec<Section> = bundle.parts.iter().map(|part| section(part, &reference)).collect();
    sections.push(elsewhere());
    let drive = if bundle.own_drive { "a drive of this host" } else { "emulated" };
    let accelerator = bundle.parts.iter().find_map(|part| match &part.outcome {
        Outcome::Measured { accelerator, .. } if accelerator != "none" => Some(accelerator.clone()),
        _ => None,
    });
    let host = HostFacts {
        kernel: bundle.machine.kernel.clone(),
        cpus: bundle.machine.cpus,
        vmm: bundle.machine.programs.get("qemu-system-x86_64").cloned().unwrap_or_default(),
        accelerator: accelerator.unwrap_or_else(|| "none".to_owned()),
        device: drive.to_owned(),
    };
    let mut lead = bundle.machine.sentences();
    lead.push(format!("Guests run with: {}. Drive: {drive}. {REFERENCE_HOST}", host.accelerator));
    let mut report = ExperimentReport::of_data(&bundle, host, claims, String::new(), sections)?;
    report.text = text(&bundle, &reference);
    report.lead = lead;
    Ok(report)
}

/// Values of the published figures by id.
fn reference(table: &str) -> BTreeMap<&str, f64> {
    // The first line names the columns.
    table.lines().skip(1).filter_map(figure).collect()
}

fn figure(line: &str) -> Option<(&str, f64)> {
    let mut cells = line.split('\t');
    Some((cells.next()?, cells.next()?.parse().ok()?))
}

fn section(part: &PartResult, reference: &BTreeMap<&str, f64>) -> Section {
    let known = PARTS.iter().find(|known| known.name == part.name);
    let shows = known.map_or("", |known| known.shows);
    let command = format!("Command: {}", part.command);
    let mut section = Section { title: part.name.clone(), ..Section::default() };
    match &part.outcome {
        Outcome::Measured { seconds, claims, .. } => {
            section.text = vec![format!("What it shows: {shows}. It took {seconds} s."), command];
            let rows = claims.iter().map(|claim| row(claim, reference).to_vec()).collect();
            section.tables = vec![table(&format!("figures of {}", part.name), &HEAD, rows)];
        }
        Outcome::Failed { reason } => section.text = vec![format!("It failed: {reason}."), command],
        Outcome::LeftOut { reason } => section.text = vec![format!("Left out: {reason}."), command],
    }
    section
}

fn row(claim: &Claim, reference: &BTreeMap<&str, f64>) -> [String; 9] {
    let [id, what, value, unit, n, limit, met] = claim_rows::cells(claim);
    let (theirs, ratio) = match reference.get(id.as_str()) {
        Some(&theirs) if theirs > 0.0 => (format!("{theirs:.3}"), format!("{:.2}", claim.value / theirs)),
        Some(&theirs) => (format!("{theirs:.3}"), String::new()),
        None => ("-".to_owned(), String::new()),
    };
    [id, what, value, unit, n, theirs, ratio, limit, met]
}

/// Figures that no part covers, with the command for a host that can measure them.
fn elsewhere() -> Section {
    let rows = [
        (
            "KVM",
            "latencies of guests are hardware's with it",
            "rtvirtio-lab kvm; rtvirtio-bench host --budget 2h",
        ),
        (
            "PREEMPT_RT",
            "cyclictest on a PREEMPT_RT host",
            "boot that kernel; rtvirtio-bench host --only cyclictest --budget 30min",
        ),
        (
            "a drive of your own",
            "targets on it",
            "rtvirtio-bench host --device DIRECTORY --only cases --budget 20min",
        ),
        (
            "resctrl (Intel RDT, AMD)",
            "memory bandwidth by VM",
            "rtvirtio check; rtvirtio regulator resctrl --help",
        ),
        ("QoS-400 (ZynqMP, S32)", "register words for its regulators", "rtvirtio regulator qos400 --help"),
        (
            "a network card of its own",
            "frames of another host",
            "examples/station.toml with uplink = \"packet\"; rtvirtio iod status",
        ),
    ];
    let rows =
        rows.iter().map(|(what, shows, how)| [what, shows, how].map(|cell| (*cell).to_owned()).to_vec());
    let head = ["hardware", "what it would show", "command"];
    Section {
        title: "What needs other hardware".to_owned(),
        tables: vec![table("hardware and commands", &head, rows.collect())],
        ..Section::default()
    }
}

/// Bundle with the reference's figures for a terminal.
fn text(bundle: &Bundle, reference: &BTreeMap<&str, f64>) -> String {
    let mut text = bundle.machine.sentences().join("\n") + "\n";
    for part in &bundle.parts {
        text += &match &part.outcome {
            Outcome::Measured { seconds, .. } => format!("\n{} ({seconds} s)\n", part.name),
            Outcome::Failed { reason } => format!("\n{}: failed: {reason}\n", part.name),
            Outcome::LeftOut { reason } => format!("\n{}: left out: {reason}\n", part.name),
        };
        let Outcome::Measured { claims, .. } = &part.outcome else { continue };
        for claim in claims {
            let [id, what, value, unit, n, theirs, _, limit, met] = row(claim, reference);
            text += &format!(
                "{id:<40} {value:>9} {unit:<8} n {n:>5}  reference {theirs:>9}  {limit:<16} {met:<8} {what}\n"
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::facts::MachineFacts;
    use super::*;
    use crate::saved::Saved;

    #[test]
    fn the_published_figures_are_read() {
        let all = reference(REFERENCE);
        assert!(all.len() > 200, "{}", all.len());
        assert!(all.contains_key("iod.qd1.iops_ratio") || all.keys().any(|id| id.starts_with("iod.")));
        assert_eq!(figure("a.b\t0.250\tshare\t3\tat least 0.100"), Some(("a.b", 0.25)));
        assert_eq!(figure("claim\tvalue\tunit\tn\tlimit"), None);
    }

    #[test]
    fn a_bundle_is_shown_beside_the_reference() {
        let dir = tempfile::tempdir().unwrap();
        let (id, value) = reference(REFERENCE).into_iter().find(|(_, value)| *value > 0.0).unwrap();
        let claim = Claim::new(id, "what it is", 2.0 * value, "ms", 7);
        let machine = MachineFacts {
            system: "Debian".into(),
            kernel: "6.1".into(),
            preempt_rt: false,
            processor: "p".into(),
            cpus: 4,
            memory_mib: 1,
            virtual_machine: false,
            kvm: true,
            programs: BTreeMap::new(),
        };
        let result =
            |name: &str, outcome| PartResult { name: name.into(), command: "c".into(), size: 0, outcome };
        let measured = Outcome::Measured { seconds: 3, accelerator: "kvm".into(), claims: vec![claim] };
        let mut bundle = Bundle {
            schema: Bundle::SCHEMA.into(),
            generated: "now".into(),
            machine,
            own_drive: false,
            parts: vec![result("demo", measured)],
        };
        bundle.put(result("crash", Outcome::Failed { reason: "no room".into() }));
        // Figures stay where a longer measurement fails.
        bundle.put(result("demo", Outcome::Failed { reason: "again".into() }));
        assert_eq!((bundle.measured("demo"), bundle.measured("crash")), (Some(0), None));
        let path = dir.path().join("host.json");
        crate::report::write(&path, &bundle).unwrap();
        let mut report = report(&path).unwrap();
        assert!(report.text.contains("crash: failed: no room"), "{}", report.text);
        assert_eq!(report.host.accelerator, "kvm");
        let html = report.html("t", "now".into());
        assert!(html.contains("2.00") && html.contains("no room") && html.contains("QoS-400"), "{html}");
    }
}
