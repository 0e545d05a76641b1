//! The comparison as a page.

use super::{Added, AddedData, Compared, DeviceRounds, Quartiles, claims};
use crate::experiment::Experiment;
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

impl Experiment for AddedData {
    const FORM: &str = "rtvirtio-iod-added/1";
    const FILE: &str = "iod-added.json";
    const TITLE: &str = "rtvirtio: added to the bare device";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: random reads of 4 KiB by fio (io_uring, registered buffers and files) and, in turn with it, \
             through the I/O domain by a vhost-user client without a VM; {}.",
            self.host.device, self.command
        );
        let sections = self.devices.iter().map(section).collect();
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections)
    }
}

fn section(device: &DeviceRounds) -> Section {
    let head = ["client", "depth", "n", "value", "bare device", "I/O domain", "difference or ratio"];
    let label = format!("added to {}", device.name);
    Section {
        title: format!("Added to the bare device: {}", device.device),
        text: vec![
            "Median of the rounds (lower to upper quartile); the last column is of pairs of one round. CPU \
             time on the bare device is that of fio's thread, through the I/O domain that of the client's \
             thread and of the I/O domain's process; threads of the kernel count on neither side."
                .to_owned(),
        ],
        tables: vec![table(&label, &head, device.added.iter().flat_map(rows).collect())],
        ..Section::default()
    }
}

/// Rows of one depth and kind of client.
fn rows(added: &Added) -> Vec<Vec<String>> {
    let client = if added.polling { "polls" } else { "sleeps" };
    let row = |value: &str, cells: [String; 3]| {
        let mut row = vec![client.to_owned(), added.depth.to_string(), added.n.to_string(), value.to_owned()];
        row.extend(cells);
        row
    };
    let compared =
        |c: &Compared, digits: usize| [text(&c.bare, digits), text(&c.through, digits), text(&c.pairs, 2)];
    vec![
        row("p50 us", compared(&added.p50_us, 2)),
        row("p99 us", compared(&added.p99_us, 2)),
        row("p99.9 us", compared(&added.p999_us, 2)),
        row("p99.99 us", compared(&added.p9999_us, 2)),
        row("CPU time us", compared(&added.cpu_us, 2)),
        row("of it the I/O domain us", [String::new(), text(&added.domain_cpu_us, 2), String::new()]),
        row("requests/s", compared(&added.iops, 0)),
    ]
}

fn text(q: &Quartiles, digits: usize) -> String {
    format!("{:.digits$} ({:.digits$} to {:.digits$})", q.median, q.low, q.high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_the_spread() {
        let q = Quartiles { low: 1.0, median: 2.25, high: 3.5 };
        assert_eq!(text(&q, 2), "2.25 (1.00 to 3.50)");
        let section = section(&DeviceRounds::new("ram", "RAM disk".to_owned(), Vec::new()));
        let table = &section.tables[0];
        assert_eq!(table.rows.len(), 3 * 2 * 7);
        assert!(table.rows.iter().all(|row| row.len() == table.head.len()), "{:?}", table.rows);
    }
}
