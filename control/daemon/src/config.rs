//! The configuration of the service: `/etc/rtvirtio/rtvirtiod.toml`.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::error::DaemonError;
use crate::observed::KnobClass;

/// How much the service does by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// It sets nothing, and shows what it would set.
    Observe,
    /// A new or changed contract waits until it is accepted; what was accepted is kept.
    Ask,
    /// It sets what the contracts ask for.
    #[default]
    Auto,
}

/// What becomes of a setting in force that another program has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriftPolicy {
    /// It is shown, and left.
    Report,
    /// It is set again; where that is in vain, it is shown and left.
    #[default]
    Restore,
    /// It is left to the other program for good.
    Yield,
}

/// The configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How much it does by itself.
    pub mode: Mode,
    /// What becomes of changed settings, by kind; `restore` where nothing stands.
    pub drift: BTreeMap<KnobClass, DriftPolicy>,
    /// Between two scans for threads, contract files and VMs.
    #[serde(with = "duration")]
    pub scan: Nanos,
    /// Between two comparisons of every setting with its journal.
    #[serde(with = "duration")]
    pub compare: Nanos,
    /// Between two readings of QEMU's counters and the kernel's.
    #[serde(with = "duration")]
    pub observe: Nanos,
    /// Whether QEMU's counters of libvirt's domains are read too: libvirt marks such a domain as
    /// tainted (`custom-monitor`) until it ends.
    pub monitor_of_libvirt: bool,
}

/// Durations as text with a unit, as everywhere where people write them.
mod duration {
    use rtvirtio_units::Nanos;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &Nanos, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(value)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Nanos, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            drift: BTreeMap::new(),
            scan: Nanos::from_millis(200),
            compare: Nanos::from_millis(5_000),
            observe: Nanos::from_millis(10_000),
            monitor_of_libvirt: false,
        }
    }
}

impl Config {
    /// Shortest time between two scans: more of them would themselves be a load.
    const SHORTEST: Nanos = Nanos::from_millis(10);

    /// Reads a configuration; the default where there is no file.
    ///
    /// # Errors
    /// [`DaemonError::Config`] with the mistake.
    pub fn load(path: &Path) -> Result<Self, DaemonError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(source) => return Err(DaemonError::Io { action: "read", path: path.to_owned(), source }),
        };
        let wrong = |why: String| DaemonError::Config { path: path.to_owned(), why };
        let config: Self = toml::from_str(&text).map_err(|e| wrong(e.to_string()))?;
        for (key, value) in [("scan", config.scan), ("compare", config.compare), ("observe", config.observe)]
        {
            if value < Self::SHORTEST {
                return Err(wrong(format!("`{key}` is {value}: at least {}", Self::SHORTEST)));
            }
        }
        Ok(config)
    }

    /// What becomes of changed settings of this kind.
    #[must_use]
    pub fn drift(&self, class: KnobClass) -> DriftPolicy {
        self.drift.get(&class).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_is_the_default_and_a_mistake_is_named() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("rtvirtiod.toml");
        assert_eq!(Config::load(&path).unwrap(), Config::default());
        std::fs::write(&path, "mode = \"ask\"\nscan = \"100ms\"\n[drift]\nweight = \"yield\"\n").unwrap();
        let config = Config::load(&path).unwrap();
        assert_eq!((config.mode, config.scan), (Mode::Ask, Nanos::from_millis(100)));
        assert_eq!(config.drift(KnobClass::Weight), DriftPolicy::Yield);
        assert_eq!(config.drift(KnobClass::Thread), DriftPolicy::Restore);
        for bad in ["mode = \"autom\"", "scam = \"100ms\"", "scan = \"1ms\"", "[drift]\nwait = \"report\""] {
            std::fs::write(&path, bad).unwrap();
            assert!(matches!(Config::load(&path), Err(DaemonError::Config { .. })), "{bad}");
        }
    }
}
