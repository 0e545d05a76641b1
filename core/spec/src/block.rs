//! `block` of a task: one size, or a mix of sizes by share.

use rtvirtio_units::{Bytes, Ratio};
use toml::de::DeValue;

use crate::device;
use crate::error::Report;
use crate::field::{Field, Section, kind};
use crate::source::{Span, printable};
use crate::types::BlockShare;

/// Sector size: every block device takes multiples of it.
const SECTOR: u64 = 512;
const MAX_BLOCK: Bytes = Bytes(16 << 20);
/// Limit of sizes in a mix.
const MAX_SIZES: usize = 16;

/// Sizes of a task's requests.
pub(crate) struct Sizes {
    /// The size, or the largest of a mix.
    pub(crate) largest: Bytes,
    /// Sizes of a mix with their shares, smallest first; empty for one size.
    pub(crate) mix: Vec<BlockShare>,
}

impl Sizes {
    /// Smallest size of the mix, or the only size.
    pub(crate) fn smallest(&self) -> Bytes {
        self.mix.first().map_or(self.largest, |m| m.size)
    }

    /// Whether all sizes are multiples of `grain` bytes.
    pub(crate) fn are_multiples_of(&self, grain: u64) -> bool {
        self.largest.0 % grain == 0 && self.mix.iter().all(|m| m.size.0 % grain == 0)
    }
}

/// Reads `block`; `None` when an error was reported.
pub(crate) fn read(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Sizes> {
    if let Some((place, value @ DeValue::Array(_))) = section.get("block") {
        return mix(report, value, place.value);
    }
    let size = size(report, section, "block");
    let largest = section.required(report, "block", "\"4KiB\"", size).into_value()?;
    Some(Sizes { largest, mix: Vec::new() })
}

/// Reads one size under `key`.
fn size(report: &mut Report<'_>, section: &Section<'_, '_>, key: &'static str) -> Field<Bytes> {
    section.quantity::<Bytes>(report, key).and_then(|(block, text)| {
        let problem = if block.0 < SECTOR || block > MAX_BLOCK {
            ("out of its range", format!("write a multiple of 512B from 512B to {MAX_BLOCK}"))
        } else if block.0 % SECTOR != 0 {
            let near = Bytes((block.0 + SECTOR / 2) / SECTOR * SECTOR);
            (
                "not a multiple of 512B",
                device::binary(text, block).unwrap_or_else(|| format!("write \"{near}\"")),
            )
        } else {
            return Field::Given(block);
        };
        report.add(
            section.value_span(key),
            format!("`{key}` is {}, {}", printable(text, 60), problem.0),
            problem.1,
        );
        Field::Bad
    })
}

/// Reads a mix: `[{ size = "4KiB", share = "80%" }, ...]`.
fn mix(report: &mut Report<'_>, value: &DeValue<'_>, span: Span) -> Option<Sizes> {
    let example =
        "write block = [{ size = \"4KiB\", share = \"80%\" }, { size = \"64KiB\", share = \"20%\" }]";
    let DeValue::Array(items) = value else { return None };
    if !(2..=MAX_SIZES).contains(&items.len()) {
        let message = format!("`block` as a list has 2 to {MAX_SIZES} sizes, not {}", items.len());
        report.add(span, message, example);
        return None;
    }
    let mut mix: Vec<BlockShare> = Vec::new();
    let mut good = true;
    for item in items.iter() {
        let DeValue::Table(table) = item.get_ref() else {
            let message = format!("each size of `block` must be a table, not {}", kind(item.get_ref()));
            report.add(item.span(), message, example);
            return None;
        };
        let aliases = [("block", "size"), ("bs", "size"), ("percent", "share"), ("weight", "share")];
        let section = Section::open(report, "block", table, item.span(), &["size", "share"], &aliases);
        let size = size(report, &section, "size");
        let size = section.required(report, "size", "\"4KiB\"", size).into_value();
        let share = section.quantity::<Ratio>(report, "share").and_then(|(share, text)| {
            let percent = share.0 * 100.0;
            if percent > 0.0 && percent < 100.0 && (percent - percent.round()).abs() < 1e-9 {
                return Field::Given(Ratio(percent.round() / 100.0));
            }
            let message = format!("`share` is {}, not a whole percent from 1% to 99%", printable(text, 60));
            report.add(section.value_span("share"), message, "fio mixes sizes by whole percents");
            Field::Bad
        });
        let share = section.required(report, "share", "\"80%\"", share).into_value();
        match size.zip(share) {
            Some((size, _)) if mix.iter().any(|m| m.size == size) => {
                report.add(item.span(), format!("{size} is in the list twice"), "add up the two shares");
                good = false;
            }
            Some((size, share)) => mix.push(BlockShare { size, share }),
            None => good = false,
        }
    }
    if !good {
        return None;
    }
    let sum: f64 = mix.iter().map(|m| m.share.0 * 100.0).sum::<f64>().round();
    if sum != 100.0 {
        report.add(span, format!("the shares of `block` sum to {sum} %"), "they must sum to 100 %");
        return None;
    }
    mix.sort_by_key(|m| m.size);
    Some(Sizes { largest: mix.last()?.size, mix })
}
