//! One knob's file, and what its text means.

use std::fmt;
use std::path::{Path, PathBuf};

use rtvirtio_host::text;
use serde::{Deserialize, Serialize};

/// Where a file is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// On the host.
    Host,
    /// Inside a guest.
    Guest {
        /// VM name.
        vm: String,
        /// Socket of its agent on the host.
        agent: PathBuf,
    },
}

/// How the text of a knob's file is read, written and compared. A *value* below is one canonical word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// The text itself, without surrounding white space.
    Plain,
    /// `none [bfq]`: the value is the name in brackets.
    Elevator,
    /// Milliseconds that the kernel rounds up to its tick.
    Jiffies,
    /// A device's line in a BFQ weight file: the value is the weight, or `default` without a line.
    ///
    /// The per-device line is used, not the group's default, because it leaves the VM's other disks alone and because writing the
    /// default erases the lines of all devices (`bfq_io_set_weight_legacy()`).
    DeviceWeight {
        /// `MAJ:MIN`.
        dev: String,
    },
    /// A device's line in a v1 `blkio.throttle.*_device` file: the value is the limit, or `max` without a line.
    Throttle {
        /// `MAJ:MIN`.
        dev: String,
    },
    /// One key of a device's line in v2 `io.max`: the value is the limit, or `max`.
    IoMax {
        /// `MAJ:MIN`.
        dev: String,
        /// `rbps`, `wbps`, `riops` or `wiops`.
        key: String,
    },
    /// Whether `io` stands in a v2 `cgroup.subtree_control`: the value is `+io` or `-io`.
    IoEnabled,
}

/// One knob's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Where it is.
    pub place: Place,
    /// Absolute path there.
    pub path: PathBuf,
    /// What its text means.
    pub form: Form,
}

impl Form {
    /// The value that a text holds; `None` when the text has another form.
    #[must_use]
    pub fn value(&self, file: &str) -> Option<String> {
        let or = |limit: Option<u64>| limit.map_or_else(|| "max".to_owned(), |v| v.to_string());
        Some(match self {
            Self::Plain | Self::Jiffies => file.trim().to_owned(),
            Self::Elevator => text::elevators(file)?.current,
            Self::DeviceWeight { dev } => match text::weights(file)?.devices.get(dev) {
                Some(weight) => weight.to_string(),
                None => "default".to_owned(),
            },
            Self::Throttle { dev } => or(text::throttle_limit(file, dev)),
            Self::IoMax { dev, key } => or(text::io_max_limit(file, dev, key)),
            Self::IoEnabled => (if text::has_word(file, "io") { "+io" } else { "-io" }).to_owned(),
        })
    }

    /// What to write for a value. A weight of `default` cannot be written as such: see `restore`.
    #[must_use]
    pub fn text(&self, value: &str) -> String {
        match self {
            Self::Plain | Self::Elevator | Self::Jiffies | Self::IoEnabled => value.to_owned(),
            Self::DeviceWeight { dev } => format!("{dev} {value}"),
            // v1 takes 0 for "no limit" and knows no `max`.
            Self::Throttle { dev } => format!("{dev} {}", if value == "max" { "0" } else { value }),
            Self::IoMax { dev, key } => format!("{dev} {key}={value}"),
        }
    }

    /// The value of a line that is not there; `None` for forms that always have a value.
    #[must_use]
    pub fn unset(&self) -> Option<&'static str> {
        match self {
            Self::DeviceWeight { .. } => Some("default"),
            Self::Throttle { .. } | Self::IoMax { .. } => Some("max"),
            Self::Plain | Self::Elevator | Self::Jiffies | Self::IoEnabled => None,
        }
    }

    /// A value as a person reads it.
    #[must_use]
    pub fn shown(&self, value: &str) -> String {
        match self {
            Self::Throttle { dev } => format!("{dev} {value}"),
            _ => self.text(value),
        }
    }

    /// Whether a value that was read is what the kernel shows after `written` was written.
    #[must_use]
    pub fn is(&self, found: &str, written: &str) -> bool {
        if found == written {
            return true;
        }
        match (self, found.parse::<u64>(), written.parse::<u64>()) {
            (Self::Jiffies, Ok(found), Ok(written)) => text::jiffies_readbacks(written).contains(&found),
            // "008" and "8" are one number.
            (_, Ok(found), Ok(written)) => found == written,
            _ => false,
        }
    }
}

impl Target {
    /// A host file.
    #[must_use]
    pub fn host(path: impl Into<PathBuf>, form: Form) -> Self {
        Self { place: Place::Host, path: path.into(), form }
    }

    /// A file of the same place in the same directory.
    #[must_use]
    pub(crate) fn sibling(&self, name: &str) -> Self {
        Self { place: self.place.clone(), path: self.path.with_file_name(name), form: Form::Plain }
    }

    /// Whether the file belongs to a cgroup of the host.
    pub(crate) fn in_cgroup(&self) -> bool {
        let in_sys = |dir| self.path.starts_with(Path::new(dir));
        self.place == Place::Host && !in_sys("/sys/block") && !in_sys("/sys/devices")
    }

    /// The device whose line in the file is meant, if it is one line of many.
    pub(crate) fn dev(&self) -> Option<&str> {
        match &self.form {
            Form::DeviceWeight { dev } | Form::Throttle { dev } | Form::IoMax { dev, .. } => Some(dev),
            Form::Plain | Form::Elevator | Form::Jiffies | Form::IoEnabled => None,
        }
    }
}

impl fmt::Display for Target {
    /// `/sys/block/sda/queue/scheduler`, or `vm0:/sys/block/vda/queue/scheduler` inside a guest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Place::Guest { vm, .. } = &self.place {
            write!(f, "{vm}:")?;
        }
        write!(f, "{}", self.path.display())
    }
}

#[cfg(test)]
mod tests;
