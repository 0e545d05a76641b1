//! `[device]`: a real device by path, a twin, or a file that the lab makes.

use std::path::{Component, Path, PathBuf};

use rtvirtio_units::Bytes;
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Field, Section, kind, listing, quoted};
use crate::source::printable;
use crate::suggest::closest;
use crate::types::Device;

/// Names of the built-in twin profiles. Any other profile is given by the path of its file.
pub const TWIN_PROFILES: [&str; 4] = ["qlc-nvme", "emmc", "microsd", "disk-1.8in"];
/// Size of a twin whose spec gives none.
pub const DEFAULT_TWIN_SIZE: Bytes = Bytes(1 << 30);
/// Smallest twin: one request of the largest block size.
pub const MIN_TWIN_SIZE: Bytes = Bytes(16 << 20);
/// Largest twin.
pub const MAX_TWIN_SIZE: Bytes = Bytes(64 << 30);
/// A twin is a whole number of these: the page size, which is the unit of the file behind it.
const TWIN_GRAIN: u64 = 4096;

/// Reads `[device]`. A twin with a mistake elsewhere in its table is `Bad`.
pub(crate) fn read(report: &mut Report<'_>, spec: &Section<'_, '_>, directory: &Path) -> Field<Device> {
    let example = "twin = \"qlc-nvme\", or path = \"/dev/nvme0n1\"";
    let (place, value) = match spec.get("device") {
        Some(found) => found,
        None => {
            report.add(
                spec.span.clone(),
                "a spec has no [device]",
                format!("add a line [device], below it {example}"),
            );
            return Field::Absent;
        }
    };
    let DeValue::Table(table) = value else {
        let (message, help) = match value {
            DeValue::Array(_) => (
                "`device` is a list, but a spec has one device".to_owned(),
                "write [device] in single brackets".to_owned(),
            ),
            _ => (
                format!("`device` must be a table, not {}", kind(value)),
                format!("write a line [device], below it {example}"),
            ),
        };
        report.add(place.value, message, help);
        return Field::Bad;
    };
    let aliases =
        [("device", "path"), ("profile", "twin"), ("dev", "path"), ("name", "twin"), ("capacity", "size")];
    let keys = ["twin", "path", "file", "size"];
    let section = Section::open(report, "[device]", table, place.value, &keys, &aliases);
    let ways = ["twin", "path", "file"];
    let given: Vec<_> = ways.iter().filter_map(|way| Some((*way, section.place(way)?.key))).collect();
    let device = match given.as_slice() {
        [] if ways.iter().any(|way| section.meant(way)) => None,
        [] => {
            report.add(
                section.span.clone(),
                "[device] has neither `twin` nor `path`",
                format!("add {example}"),
            );
            None
        }
        [("twin", _)] => twin(report, &section, directory),
        [("path", _)] => real(report, &section),
        [_] => file(report, &section),
        [(first, at), (second, other), ..] => {
            let later = if at.start > other.start { at } else { other };
            let help = if *second == "path" {
                "keep `twin` for an emulated device, or `path` for a real one"
            } else {
                "keep `twin` for an emulated device, `path` for a real one, or `file` for one on a disk of this machine"
            };
            report.add(later.clone(), format!("[device] has both `{first}` and `{second}`"), help);
            None
        }
    };
    device.into()
}

fn real(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Device> {
    let size = section.place("size");
    if let Some(place) = &size {
        report.add(
            place.key.clone(),
            "`size` belongs to a twin; a real device has its own",
            "remove this line",
        );
    }
    let path = section.path(report, "path", "\"/dev/nvme0n1\"").into_value()?;
    size.is_none().then_some(Device::Path(path))
}

fn twin(report: &mut Report<'_>, section: &Section<'_, '_>, directory: &Path) -> Option<Device> {
    let size = size(report, section);
    let profile = section
        .string(report, "twin", "\"qlc-nvme\"")
        .and_then(|text| profile(report, section, directory, text));
    Some(Device::Twin { profile: profile.into_value()?, size: size.or(DEFAULT_TWIN_SIZE)? })
}

fn file(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Device> {
    let size = size(report, section);
    let path = section.path(report, "file", "\"/var/tmp/rtvirtio.img\"");
    Some(Device::File { path: path.into_value()?, size: size.or(DEFAULT_TWIN_SIZE)? })
}

/// Size of a device that the lab makes.
fn size(report: &mut Report<'_>, section: &Section<'_, '_>) -> Field<Bytes> {
    section.quantity::<Bytes>(report, "size").and_then(|(size, text)| {
        let problem = if size < MIN_TWIN_SIZE || size > MAX_TWIN_SIZE {
            ("out of its range", format!("write a size from {MIN_TWIN_SIZE} to {MAX_TWIN_SIZE}"))
        } else if size.0 % TWIN_GRAIN != 0 {
            let near = Bytes((size.0 + TWIN_GRAIN / 2) / TWIN_GRAIN * TWIN_GRAIN);
            ("not a multiple of 4KiB", binary(text, size).unwrap_or_else(|| format!("write \"{near}\"")))
        } else {
            return Field::Given(size);
        };
        report.add(
            section.value_span("size"),
            format!("`size` is {}, {}", printable(text, 60), problem.0),
            problem.1,
        );
        Field::Bad
    })
}

/// A built-in name, or the path of a file.
fn profile(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    directory: &Path,
    text: &str,
) -> Field<String> {
    if TWIN_PROFILES.contains(&text) {
        return Field::Given(text.to_owned());
    }
    let span = section.value_span("twin");
    if text.contains(char::is_control) {
        report.add(span, "`twin` holds a control character", "write a plain name or path");
        return Field::Bad;
    }
    if text.contains('/') || text.ends_with(".toml") {
        let path: PathBuf = directory.join(text).components().filter(|c| *c != Component::CurDir).collect();
        // A slash in it separates a file next to the spec from a built-in name.
        let text = path.display().to_string();
        return Field::Given(if text.contains('/') { text } else { format!("./{text}") });
    }
    let help = match closest(text, TWIN_PROFILES) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!(
            "write {}, or the path of a profile file such as \"./my.toml\"",
            listing(&TWIN_PROFILES, "or")
        ),
    };
    report.add(span, format!("there is no twin profile {}", quoted(text)), help);
    Field::Bad
}

/// "did you mean "4KiB"?" for "4kB": a decimal unit where a binary one was probably meant.
pub(crate) fn binary(text: &str, size: Bytes) -> Option<String> {
    let (i, _) =
        ["kB", "KB", "MB", "GB", "TB"].iter().enumerate().find(|(_, unit)| text.trim().ends_with(**unit))?;
    let power = i.max(1) as i32;
    let value = size.0 as f64 / 1000f64.powi(power);
    let unit = ["KiB", "KiB", "MiB", "GiB", "TiB"].get(i)?;
    (value.fract() == 0.0).then(|| format!("did you mean \"{value}{unit}\"? {unit} is a power of 1024"))
}
