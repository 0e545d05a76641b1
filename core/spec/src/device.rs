//! `[device]`: a real device by path, a twin, or a file that the lab creates. `[[device]]`: several
//! real ones, each with a name.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use rtvirtio_units::Bytes;
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Field, Section, any_of, kind, listing, quoted, tables};
use crate::limits::MAX_DEVICES;
use crate::source::{Span, printable};
use crate::suggest::closest;
use crate::types::Device;

/// Names of the built-in twin profiles. Any other profile is given by the path of its file.
pub const TWIN_PROFILES: [&str; 4] = ["qlc-nvme", "emmc", "microsd", "disk-1.8in"];
/// Size of a twin without `size` in the spec.
pub const DEFAULT_TWIN_SIZE: Bytes = Bytes(1 << 30);
/// Smallest twin: one request of the largest block size.
pub const MIN_TWIN_SIZE: Bytes = Bytes(16 << 20);
/// Largest twin: 64 GiB.
pub const MAX_TWIN_SIZE: Bytes = Bytes(64 << 30);
/// Unit of a twin's size: the page size of the file behind it.
const TWIN_GRAIN: u64 = 4096;

const KEYS: &[&str] = &["name", "twin", "path", "file", "size"];
const ALIASES: &[(&str, &str)] =
    &[("device", "path"), ("profile", "twin"), ("dev", "path"), ("capacity", "size")];

/// Devices of a file, in its order.
pub(crate) struct Devices {
    /// Never empty unless `bad`.
    pub(crate) entries: Vec<Entry>,
    /// Whether some name is unreadable, so that a reference to it cannot be judged.
    pub(crate) bad: bool,
}

/// A device of the file.
pub(crate) struct Entry {
    pub(crate) name: Option<String>,
    /// Table of the device in the file.
    pub(crate) at: Span,
    pub(crate) device: Field<Device>,
}

impl Devices {
    /// The device of a file with one; `None` otherwise.
    pub(crate) fn only(&self) -> Option<&Entry> {
        match self.entries.as_slice() {
            [one] => Some(one),
            _ => None,
        }
    }

    /// Index of the device of this name.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|e| e.name.as_deref() == Some(name))
    }

    /// Names in quotes, for a remedy.
    pub(crate) fn names(&self) -> String {
        any_of(self.entries.iter().filter_map(|e| e.name.as_deref()))
    }
}

const EXAMPLE: &str = "twin = \"qlc-nvme\", or path = \"/dev/nvme0n1\"";

/// Reads `[device]`, or every `[[device]]`. A twin with a mistake elsewhere in its table is `Bad`.
pub(crate) fn read_all(report: &mut Report<'_>, spec: &Section<'_, '_>, directory: &Path) -> Devices {
    let bad = |bad| Devices { entries: Vec::new(), bad };
    let Some((place, value)) = spec.get("device") else {
        report.add(
            spec.span.clone(),
            "a spec has no [device]",
            format!("add a line [device], below it {EXAMPLE}"),
        );
        return bad(true);
    };
    match value {
        DeValue::Table(table) => {
            let section = Section::open(report, "[device]", table, place.value, KEYS, ALIASES);
            let (entry, named) = read_device(report, &section, directory, 1);
            Devices { entries: vec![entry], bad: !named }
        }
        DeValue::Array(_) => {
            let Some(tables) = tables(report, spec, "device", "[[device]]") else { return bad(true) };
            let many = tables.len();
            if many > MAX_DEVICES {
                let help = "split the devices over several specs";
                report.add(place.value, format!("a spec has at most {MAX_DEVICES} devices"), help);
                return bad(true);
            }
            let mut devices = bad(false);
            let mut lines = HashMap::new();
            for (table, span) in tables {
                let section = Section::open(report, "[[device]]", table, span, KEYS, ALIASES);
                let (entry, named) = read_device(report, &section, directory, many);
                devices.bad |= !named | !distinct(report, &section, &entry, &mut lines);
                devices.entries.push(entry);
            }
            devices
        }
        _ => {
            report.add(
                place.value,
                format!("`device` must be a table, not {}", kind(value)),
                format!("write a line [device], below it {EXAMPLE}"),
            );
            bad(true)
        }
    }
}

/// Whether no earlier device has the same name or path; otherwise reported.
fn distinct(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    entry: &Entry,
    lines: &mut HashMap<String, usize>,
) -> bool {
    let mut good = true;
    let path = match entry.device.given() {
        Some(Device::Path(path)) => Some(path.display().to_string()),
        _ => None,
    };
    for (key, value) in [("name", entry.name.clone()), ("path", path)] {
        let Some(value) = value else { continue };
        let message = format!("there is already a device with {key} {}", quoted(&value));
        // A path starts with a slash, a name never does.
        good &= section.first_use(report, key, (&mut *lines, value), message, "; name each disk once");
    }
    good
}

/// Reads one of `many` devices; also returns whether its name is readable.
fn read_device(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    directory: &Path,
    many: usize,
) -> (Entry, bool) {
    let name = match section.place("name") {
        None if many > 1 => section.name(report, "\"fast\""),
        None => Field::Absent,
        Some(_) => section.name(report, "\"fast\""),
    };
    let mut device = device(report, section, directory);
    if let (true, Some(made)) = (many > 1, device.given().filter(|d| d.is_made())) {
        let key = if matches!(made, Device::Twin { .. }) { "twin" } else { "file" };
        report.add(
            section.place(key).map_or_else(|| section.span.clone(), |place| place.key),
            format!("`{key}` is made by the lab, which has one device, and this spec has {many}"),
            "give this device a `path`, or keep it alone",
        );
        device = Field::Bad;
    }
    let named = !matches!(name, Field::Bad) && (many == 1 || name.given().is_some());
    (Entry { name: name.into_value().map(str::to_owned), at: section.span.clone(), device }, named)
}

fn device(report: &mut Report<'_>, section: &Section<'_, '_>, directory: &Path) -> Field<Device> {
    let title = section.title;
    let ways = ["twin", "path", "file"];
    let given: Vec<_> = ways.iter().filter_map(|way| Some((*way, section.place(way)?.key))).collect();
    let device = match given.as_slice() {
        [] if ways.iter().any(|way| section.meant(way)) => None,
        [] => {
            report.add(
                section.span.clone(),
                format!("{title} has none of `path`, `twin` and `file`"),
                format!("add {EXAMPLE}"),
            );
            None
        }
        [("twin", _)] => twin(report, section, directory),
        [("path", _)] => real(report, section),
        [_] => file(report, section),
        [(first, at), (second, other), ..] => {
            let later = if at.start > other.start { at } else { other };
            let help = if *second == "path" {
                "keep `twin` for an emulated device, or `path` for a real one"
            } else {
                "keep `twin` for an emulated device, `path` for a real one, or `file` for one on a disk of this machine"
            };
            report.add(later.clone(), format!("{title} has both `{first}` and `{second}`"), help);
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

/// Size of a device that the lab creates.
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

/// Name of a built-in profile, or the path of a file.
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
        // A slash distinguishes a file next to the spec from a built-in name.
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

/// Suggestion of a binary unit for a decimal one that was probably a mistake: "did you mean
/// "4KiB"?" for "4kB".
pub(crate) fn binary(text: &str, size: Bytes) -> Option<String> {
    let (i, _) =
        ["kB", "KB", "MB", "GB", "TB"].iter().enumerate().find(|(_, unit)| text.trim().ends_with(**unit))?;
    let power = i.max(1) as i32;
    let value = size.0 as f64 / 1000f64.powi(power);
    let unit = ["KiB", "KiB", "MiB", "GiB", "TiB"].get(i)?;
    (value.fract() == 0.0).then(|| format!("did you mean \"{value}{unit}\"? {unit} is a power of 1024"))
}
