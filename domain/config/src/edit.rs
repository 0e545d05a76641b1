//! Adding disks to the text of a configuration, and removing them. All else stays as it is written,
//! comments included.

use toml_edit::{ArrayOfTables, DocumentMut, Item, Table};

/// Why a text is not edited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EditError {
    /// It is no TOML.
    #[error("{0}")]
    Parse(#[from] toml_edit::TomlError),
    /// No disk of this name.
    #[error("there is no disk \"{0}\"")]
    NoDisk(String),
    /// No device of this name.
    #[error("there is no device \"{name}\"; the file has {}", known.join(", "))]
    NoDevice {
        /// The name.
        name: String,
        /// Names of the devices.
        known: Vec<String>,
    },
    /// A disk of this name.
    #[error("there is a disk \"{0}\" already; `rtvirtio iod reload` takes over changes of it")]
    Known(String),
    /// The text to add has keys that are not those of disks.
    #[error(
        "only `[[device]]` with `name` and its `[[device.disk]]` tables can be attached; there is `{0}` too"
    )]
    Key(String),
    /// Nothing to add.
    #[error("there is no `[[device.disk]]` table to attach")]
    Nothing,
    /// Inline tables.
    #[error(
        "write `{0}` as tables (`[[device]]`, `[[device.disk]]`), or edit the file by hand and `rtvirtio iod reload`"
    )]
    Inline(&'static str),
}

/// Adds the `[[device.disk]]` tables of `addition` to the devices of the same names. Returns the
/// new text and the names of the disks.
///
/// # Errors
/// [`EditError`].
pub fn add_disks(text: &str, addition: &str) -> Result<(String, Vec<String>), EditError> {
    let mut doc: DocumentMut = text.parse()?;
    let addition: DocumentMut = addition.parse()?;
    if let Some((key, _)) = addition.iter().find(|(key, _)| *key != "device") {
        return Err(EditError::Key(key.to_owned()));
    }
    let mut names = Vec::new();
    for from in tables(&addition, "device")?.into_iter().flatten() {
        if let Some((key, _)) = from.iter().find(|(key, _)| !matches!(*key, "name" | "disk")) {
            return Err(EditError::Key(format!("device.{key}")));
        }
        let name = name_of(from);
        let known: Vec<String> = tables(&doc, "device")?.into_iter().flatten().map(name_of).collect();
        let Some(at) = known.iter().position(|known| *known == name) else {
            return Err(EditError::NoDevice { name, known });
        };
        let Some(disks) = tables(from, "disk")? else { continue };
        let others: Vec<String> = disks_of(&doc)?.into_iter().map(|(_, name)| name).collect();
        let device = device_mut(&mut doc, at)?;
        let list = device.entry("disk").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
        let list = list.as_array_of_tables_mut().ok_or(EditError::Inline("device.disk"))?;
        for disk in disks {
            let name = name_of(disk);
            if others.contains(&name) || names.contains(&name) {
                return Err(EditError::Known(name));
            }
            let mut disk = disk.clone();
            forget_position(&mut disk);
            list.push(disk);
            names.push(name);
        }
    }
    if names.is_empty() {
        return Err(EditError::Nothing);
    }
    Ok((doc.to_string(), names))
}

/// Removes the tables of these disks.
///
/// # Errors
/// [`EditError`].
pub fn remove_disks(text: &str, names: &[String]) -> Result<String, EditError> {
    let mut doc: DocumentMut = text.parse()?;
    for name in names {
        let at = disks_of(&doc)?.into_iter().find(|(_, disk)| disk == name);
        let Some((at, _)) = at else { return Err(EditError::NoDisk(name.clone())) };
        let device = device_mut(&mut doc, at)?;
        let Some(list) = device.get_mut("disk").and_then(Item::as_array_of_tables_mut) else {
            return Err(EditError::Inline("device.disk"));
        };
        list.retain(|disk| name_of(disk) != *name);
        if list.is_empty() {
            device.remove("disk");
        }
    }
    Ok(doc.to_string())
}

/// The array of tables at a key; `None` without it.
fn tables<'a>(table: &'a Table, key: &'static str) -> Result<Option<&'a ArrayOfTables>, EditError> {
    match table.get(key) {
        None => Ok(None),
        Some(item) => item.as_array_of_tables().map(Some).ok_or(EditError::Inline(key)),
    }
}

fn device_mut(doc: &mut DocumentMut, at: usize) -> Result<&mut Table, EditError> {
    let devices = doc.get_mut("device").and_then(Item::as_array_of_tables_mut);
    devices.and_then(|devices| devices.get_mut(at)).ok_or(EditError::Inline("device"))
}

/// All disks, each with the index of its device.
fn disks_of(doc: &DocumentMut) -> Result<Vec<(usize, String)>, EditError> {
    let mut all = Vec::new();
    for (at, device) in tables(doc, "device")?.into_iter().flatten().enumerate() {
        all.extend(tables(device, "disk")?.into_iter().flatten().map(|disk| (at, name_of(disk))));
    }
    Ok(all)
}

fn name_of(table: &Table) -> String {
    table.get("name").and_then(Item::as_str).unwrap_or_default().to_owned()
}

/// A table of another text goes where it is added, not to the line where it was.
fn forget_position(table: &mut Table) {
    table.set_position(None);
    for (_, item) in table.iter_mut() {
        match item {
            Item::Table(inner) => forget_position(inner),
            Item::ArrayOfTables(inner) => inner.iter_mut().for_each(forget_position),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# The host's disks.
control = "/run/iod.sock"

[[device]]
name = "fast"   # NVMe
window = 2

# The controller.
[[device.disk]]
name = "plc"
socket = "/run/plc"
path = "/dev/vg0/plc"
[device.disk.reserve]
share = "10%"
burst = "1ms"
deadline = "5ms"

[[device.disk]]
name = "log"
socket = "/run/log"
path = "/dev/vg0/log"

[[device]]
name = "slow"
[[device.disk]]
name = "archive"
socket = "/run/archive"
path = "/dev/sdb"
"#;

    const ADDITION: &str = r#"
[[device]]
name = "fast"
# A second controller.
[[device.disk]]
name = "plc2"
socket = "/run/plc2"
path = "/dev/vg0/plc2"
[device.disk.reserve]
share = "5%"
burst = "1ms"
deadline = "9ms"
"#;

    fn names(text: &str) -> Vec<Vec<String>> {
        let file = crate::File::parse(std::path::Path::new("x"), text).unwrap();
        file.devices.iter().map(|d| d.disks.iter().map(|disk| disk.name.clone()).collect()).collect()
    }

    #[test]
    fn a_disk_comes_to_its_device_and_goes() {
        let (text, added) = add_disks(TEXT, ADDITION).unwrap();
        assert_eq!(added, ["plc2"]);
        assert_eq!(names(&text), [vec!["plc", "log", "plc2"], vec!["archive"]]);
        let file = crate::File::parse(std::path::Path::new("x"), &text).unwrap();
        let deadlines: Vec<_> =
            file.devices[0].disks.iter().map(|d| d.reserve.map(|r| r.deadline.0)).collect();
        assert_eq!(deadlines, [Some(5_000_000), None, Some(9_000_000)]);
        for comment in ["# The host's disks.", "# NVMe", "# The controller.", "# A second controller."] {
            assert!(text.contains(comment), "{comment}: {text}");
        }
        assert_eq!(remove_disks(&text, &added).unwrap(), TEXT);
        let less = remove_disks(TEXT, &["plc".into(), "archive".into()]).unwrap();
        assert_eq!(names(&less), [vec!["log"], vec![]]);
        // The last disk of a device is taken back, too.
        let again = "[[device]]\nname = \"slow\"\n[[device.disk]]\nname = \"x\"\nsocket = \"/run/x\"\npath = \"/x\"\n";
        assert_eq!(names(&add_disks(&less, again).unwrap().0), [vec!["log"], vec!["x"]]);
    }

    #[test]
    fn what_cannot_be_edited_is_named() {
        let refused = |addition: &str| add_disks(TEXT, addition).unwrap_err().to_string();
        assert!(refused(&ADDITION.replace("\"fast\"", "\"quick\"")).contains("the file has fast, slow"));
        assert!(refused(&ADDITION.replace("plc2", "log")).contains("there is a disk \"log\" already"));
        let more = ADDITION.replace("\"fast\"", "\"fast\"\nwindow = 9");
        assert!(refused(&more).contains("there is `device.window` too"));
        assert!(refused("control = \"/x\"").contains("`control`"));
        assert!(refused("").contains("no `[[device.disk]]` table"));
        assert!(refused("[[device").contains("line 1") || refused("[[device").contains("1 |"));
        let none = remove_disks(TEXT, &["nvme".into()]).unwrap_err();
        assert_eq!(none.to_string(), "there is no disk \"nvme\"");
    }
}
