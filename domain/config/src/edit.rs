//! Adding disks and ports to the text of a configuration, and removing them. All other text is
//! kept, comments included.

use toml_edit::{ArrayOfTables, DocumentMut, Item, Table};

/// Causes for which a text is not edited.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EditError {
    /// The text is not valid TOML.
    #[error("{0}")]
    Parse(#[from] toml_edit::TomlError),
    /// No disk or port of this name.
    #[error("there is no disk and no port \"{0}\"")]
    Unknown(String),
    /// No disk, or no port, of this name.
    #[error("there is no {kind} \"{name}\"")]
    NoMember {
        /// Kind of the name, `disk` or `port`.
        kind: &'static str,
        /// Name that was given.
        name: String,
    },
    /// A disk and a port of this name.
    #[error("there are a disk and a port \"{0}\": name one of them as disk:{0} or port:{0}")]
    Both(String),
    /// No device or network of this name.
    #[error("there is no {kind} \"{name}\"; the file has {}", known.join(", "))]
    NoParent {
        /// Kind of the tables to add to, `device` or `network`.
        kind: &'static str,
        /// Name that the text to add gives.
        name: String,
        /// Names in the configuration.
        known: Vec<String>,
    },
    /// A disk or port of this name.
    #[error("there is a {kind} \"{name}\" already; `rtvirtio iod reload` takes over changes of it")]
    Known {
        /// Kind of both, `disk` or `port`.
        kind: &'static str,
        /// Name that is taken.
        name: String,
    },
    /// The text to add has keys that are not those of disks and ports.
    #[error(
        "only `[[device]]` with `name` and its `[[device.disk]]` tables, and `[[network]]` with `name` and its `[[network.port]]` tables, can be attached; there is `{0}` too"
    )]
    Key(String),
    /// The text to add has no disk and no port.
    #[error("there is no `[[device.disk]]` or `[[network.port]]` table to attach")]
    Nothing,
    /// A key that is an inline table or a value instead of `[[...]]` tables.
    #[error(
        "write `{0}` as tables (`[[device]]`, `[[device.disk]]`, `[[network]]`, `[[network.port]]`), or edit the file by hand and `rtvirtio iod reload`"
    )]
    Inline(&'static str),
}

/// A part that can be added and removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Disk,
    Port,
}

impl Kind {
    const ALL: [Self; 2] = [Self::Disk, Self::Port];

    /// Key of the tables that contain this kind.
    fn parent(self) -> &'static str {
        match self {
            Self::Disk => "device",
            Self::Port => "network",
        }
    }

    /// Key of the tables of this kind.
    fn key(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Port => "port",
        }
    }
}

/// Adds the `[[device.disk]]` and `[[network.port]]` tables of `addition` to the devices and
/// networks of the same names. Returns the new text and the names of what was added.
pub fn add(text: &str, addition: &str) -> Result<(String, Vec<String>), EditError> {
    let mut doc: DocumentMut = text.parse()?;
    let addition: DocumentMut = addition.parse()?;
    let is_parent = |key: &str| Kind::ALL.iter().any(|kind| kind.parent() == key);
    if let Some((key, _)) = addition.iter().find(|(key, _)| !is_parent(key)) {
        return Err(EditError::Key(key.to_owned()));
    }
    let mut names = Vec::new();
    for kind in Kind::ALL {
        add_kind(&mut doc, &addition, kind, &mut names)?;
    }
    if names.is_empty() {
        return Err(EditError::Nothing);
    }
    Ok((doc.to_string(), names))
}

fn add_kind(
    doc: &mut DocumentMut,
    addition: &DocumentMut,
    kind: Kind,
    names: &mut Vec<String>,
) -> Result<(), EditError> {
    for from in tables(addition, kind.parent())?.into_iter().flatten() {
        if let Some((key, _)) = from.iter().find(|(key, _)| *key != "name" && *key != kind.key()) {
            return Err(EditError::Key(format!("{}.{key}", kind.parent())));
        }
        let name = name_of(from);
        let known: Vec<String> = tables(doc, kind.parent())?.into_iter().flatten().map(name_of).collect();
        let Some(at) = known.iter().position(|known| *known == name) else {
            return Err(EditError::NoParent { kind: kind.parent(), name, known });
        };
        let Some(new) = tables(from, kind.key())? else { continue };
        // Members of this device that were added before are among them.
        let others: Vec<String> = all_of(doc, kind)?.into_iter().map(|(_, name)| name).collect();
        let mut added: Vec<String> = Vec::new();
        let list = parent_mut(doc, kind, at)?
            .entry(kind.key())
            .or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
        let list = list.as_array_of_tables_mut().ok_or(EditError::Inline(kind.key()))?;
        for one in new {
            let name = name_of(one);
            if others.contains(&name) || added.contains(&name) {
                return Err(EditError::Known { kind: kind.key(), name });
            }
            let mut one = one.clone();
            forget_position(&mut one);
            list.push(one);
            added.push(name);
        }
        names.extend(added);
    }
    Ok(())
}

/// Removes the tables of these disks and ports. A name that both have is written with its kind,
/// `disk:NAME` or `port:NAME`.
pub fn remove(text: &str, names: &[String]) -> Result<String, EditError> {
    let mut doc: DocumentMut = text.parse()?;
    for name in names {
        let (kind, at, name) = find(&doc, name)?;
        let parent = parent_mut(&mut doc, kind, at)?;
        let Some(list) = parent.get_mut(kind.key()).and_then(Item::as_array_of_tables_mut) else {
            return Err(EditError::Inline(kind.key()));
        };
        list.retain(|one| name_of(one) != name);
        if list.is_empty() {
            parent.remove(kind.key());
        }
    }
    Ok(doc.to_string())
}

/// Kind, index of the parent and name of what `text` names.
fn find<'a>(doc: &DocumentMut, text: &'a str) -> Result<(Kind, usize, &'a str), EditError> {
    let of = |kind: Kind, name: &str| -> Result<Option<usize>, EditError> {
        Ok(all_of(doc, kind)?.into_iter().find(|(_, known)| known == name).map(|(at, _)| at))
    };
    for kind in Kind::ALL {
        let Some(name) = text.strip_prefix(kind.key()).and_then(|rest| rest.strip_prefix(':')) else {
            continue;
        };
        return match of(kind, name)? {
            Some(at) => Ok((kind, at, name)),
            None => Err(EditError::NoMember { kind: kind.key(), name: name.to_owned() }),
        };
    }
    match (of(Kind::Disk, text)?, of(Kind::Port, text)?) {
        (Some(_), Some(_)) => Err(EditError::Both(text.to_owned())),
        (Some(at), None) => Ok((Kind::Disk, at, text)),
        (None, Some(at)) => Ok((Kind::Port, at, text)),
        (None, None) => Err(EditError::Unknown(text.to_owned())),
    }
}

/// The array of tables at a key; `None` without it.
fn tables<'a>(table: &'a Table, key: &'static str) -> Result<Option<&'a ArrayOfTables>, EditError> {
    match table.get(key) {
        None => Ok(None),
        Some(item) => item.as_array_of_tables().map(Some).ok_or(EditError::Inline(key)),
    }
}

fn parent_mut(doc: &mut DocumentMut, kind: Kind, at: usize) -> Result<&mut Table, EditError> {
    let parents = doc.get_mut(kind.parent()).and_then(Item::as_array_of_tables_mut);
    parents.and_then(|parents| parents.get_mut(at)).ok_or(EditError::Inline(kind.parent()))
}

/// All of a kind, each with the index of its device or network.
fn all_of(doc: &DocumentMut, kind: Kind) -> Result<Vec<(usize, String)>, EditError> {
    let mut all = Vec::new();
    for (at, parent) in tables(doc, kind.parent())?.into_iter().flatten().enumerate() {
        all.extend(tables(parent, kind.key())?.into_iter().flatten().map(|one| (at, name_of(one))));
    }
    Ok(all)
}

fn name_of(table: &Table) -> String {
    table.get("name").and_then(Item::as_str).unwrap_or_default().to_owned()
}

/// Clears the line numbers of a table of another text, so that it is placed where it is added.
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
        let (text, added) = add(TEXT, ADDITION).unwrap();
        assert_eq!(added, ["plc2"]);
        assert_eq!(names(&text), [vec!["plc", "log", "plc2"], vec!["archive"]]);
        let file = crate::File::parse(std::path::Path::new("x"), &text).unwrap();
        let deadlines: Vec<_> =
            file.devices[0].disks.iter().map(|d| d.reserve.map(|r| r.deadline.0)).collect();
        assert_eq!(deadlines, [Some(5_000_000), None, Some(9_000_000)]);
        for comment in ["# The host's disks.", "# NVMe", "# The controller.", "# A second controller."] {
            assert!(text.contains(comment), "{comment}: {text}");
        }
        assert_eq!(remove(&text, &added).unwrap(), TEXT);
        let less = remove(TEXT, &["plc".into(), "archive".into()]).unwrap();
        assert_eq!(names(&less), [vec!["log"], vec![]]);
        // The last disk of a device is taken back, too.
        let again = "[[device]]\nname = \"slow\"\n[[device.disk]]\nname = \"x\"\nsocket = \"/run/x\"\npath = \"/x\"\n";
        assert_eq!(names(&add(&less, again).unwrap().0), [vec!["log"], vec!["x"]]);
    }

    #[test]
    fn what_cannot_be_edited_is_named() {
        let refused = |addition: &str| add(TEXT, addition).unwrap_err().to_string();
        assert!(refused(&ADDITION.replace("\"fast\"", "\"quick\"")).contains("the file has fast, slow"));
        assert!(refused(&ADDITION.replace("plc2", "log")).contains("there is a disk \"log\" already"));
        let more = ADDITION.replace("\"fast\"", "\"fast\"\nwindow = 9");
        assert!(refused(&more).contains("there is `device.window` too"));
        assert!(refused("control = \"/x\"").contains("`control`"));
        assert!(refused("").contains("no `[[device.disk]]` or `[[network.port]]` table"));
        assert!(refused("[[device").contains("line 1") || refused("[[device").contains("1 |"));
        let none = remove(TEXT, &["nvme".into()]).unwrap_err();
        assert_eq!(none.to_string(), "there is no disk and no port \"nvme\"");
        let none = remove(TEXT, &["port:plc".into()]).unwrap_err();
        assert_eq!(none.to_string(), "there is no port \"plc\"");
    }

    const NETWORK: &str = r#"
[[network]]
name = "lan"   # behind eth1
link = "1Gbit/s"

[[network.port]]
name = "plc"
socket = "/run/plc-net"
tap = "plc0"
mac = "52:54:00:00:00:0a"
"#;

    #[test]
    fn a_port_comes_to_its_network_and_goes() {
        let text = TEXT.to_owned() + NETWORK;
        let more = "[[network]]\nname = \"lan\"\n[[network.port]]\nname = \"hmi\"\nsocket = \"/run/hmi\"\ntap = \"hmi0\"\nmac = \"52:54:00:00:00:0b\"\n";
        let (both, added) = add(&text, &(ADDITION.to_owned() + more)).unwrap();
        assert_eq!(added, ["plc2", "hmi"]);
        let file = crate::File::parse(std::path::Path::new("x"), &both).unwrap();
        let ports: Vec<&str> = file.networks[0].ports.iter().map(|port| port.name.as_str()).collect();
        assert_eq!((ports, file.devices[0].disks.len()), (vec!["plc", "hmi"], 3));
        assert!(both.contains("# behind eth1"), "{both}");
        assert_eq!(remove(&both, &added).unwrap(), text);
        // A disk and a port of one VM have its name.
        let which = remove(&text, &["plc".into()]).unwrap_err().to_string();
        assert!(which.contains("disk:plc or port:plc"), "{which}");
        let without = remove(&text, &["port:plc".into()]).unwrap();
        let file = crate::File::parse(std::path::Path::new("x"), &without).unwrap();
        assert_eq!((file.networks[0].ports.len(), file.devices[0].disks.len()), (0, 2));
        let twice = add(&text, NETWORK).unwrap_err().to_string();
        assert!(twice.contains("there is `network.link` too"), "{twice}");
        let twice = add(&text, &NETWORK.replace("link = \"1Gbit/s\"\n", "")).unwrap_err().to_string();
        assert!(twice.contains("there is a port \"plc\" already"), "{twice}");
        let none = add(&text, &more.replace("\"lan\"", "\"wan\"")).unwrap_err().to_string();
        assert!(none.contains("there is no network \"wan\"; the file has lan"), "{none}");
    }
}
