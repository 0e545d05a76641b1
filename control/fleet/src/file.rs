//! The fleet file, as TOML.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use rtvirtio_capacity::DeviceError;
use rtvirtio_measure::MeasureError;
use rtvirtio_spec::SpecErrors;
use rtvirtio_units::{BytesPerSec, Nanos, Ratio};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Hosts and contracts, as in the file. Paths are relative to its directory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetFile {
    /// At least one; `count` makes several of an entry.
    #[serde(default)]
    pub host: Vec<HostEntry>,
    /// Contracts that are in force nowhere yet.
    #[serde(default)]
    pub contracts: Vec<ContractsEntry>,
}

/// A share of each CPU, written as `"95%"`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(pub Ratio);

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let share: Ratio = text.parse().map_err(serde::de::Error::custom)?;
        if (0.0..=1.0).contains(&share.0) {
            return Ok(Self(share));
        }
        Err(serde::de::Error::custom(format!("{text} is no share of each CPU: write \"0%\" to \"100%\"")))
    }
}

/// A network of a host, written as `"1Gbit/s"` or `{ link = "1Gbit/s", mtu = 9000 }`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkEntry {
    /// Rate of its link.
    pub link: BytesPerSec,
    /// Largest payload of a frame, in bytes; 1500 where the file does not say.
    pub mtu: u32,
    /// Longest time in which the host does not run the I/O domain's thread; that of a plan where
    /// the file does not say.
    pub stall: Option<Nanos>,
}

impl<'de> Deserialize<'de> for LinkEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(LinkVisitor)
    }
}

/// MTU of a network, as in a spec.
const DEFAULT_MTU: u32 = 1_500;

struct LinkVisitor;

impl<'de> Visitor<'de> for LinkVisitor {
    type Value = LinkEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a link's rate as \"1Gbit/s\" or { link = \"1Gbit/s\", mtu = 9000 }")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<LinkEntry, E> {
        Ok(LinkEntry { link: rate(text)?, mtu: DEFAULT_MTU, stall: None })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LinkEntry, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            link: String,
            mtu: Option<u32>,
            stall: Option<String>,
        }
        let table = Table::deserialize(MapAccessDeserializer::new(map))?;
        let mtu = table.mtu.unwrap_or(DEFAULT_MTU);
        if !(68..=9_216).contains(&mtu) {
            return Err(serde::de::Error::custom(format!("`mtu` is {mtu}; it must be 68 to 9216")));
        }
        let stall =
            table.stall.map(|text| text.parse::<Nanos>()).transpose().map_err(serde::de::Error::custom)?;
        Ok(LinkEntry { link: rate(&table.link)?, mtu, stall })
    }
}

fn rate<E: serde::de::Error>(text: &str) -> Result<BytesPerSec, E> {
    let rate: BytesPerSec = text.parse().map_err(E::custom)?;
    if (1e3..=50e9).contains(&rate.0) {
        return Ok(rate);
    }
    Err(E::custom(format!("{text} is no rate of a link: write \"8kbit/s\" to \"400Gbit/s\"")))
}

/// A host, or several equal ones.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostEntry {
    /// Name of the host; with `count` the common prefix of the names.
    pub name: String,
    /// Number of equal hosts, named `NAME-1`, `NAME-2`, ...; `None` for one of this name.
    #[serde(default)]
    pub count: Option<u32>,
    /// Profile of its only disk, as `rtvirtio profile` writes it.
    #[serde(default)]
    pub profile: Option<PathBuf>,
    /// Instead of a profile a built-in twin or a twin's file: declared, not measured.
    #[serde(default)]
    pub twin: Option<String>,
    /// Profiles of several disks, by the names that specs give their devices.
    #[serde(default)]
    pub disks: BTreeMap<String, PathBuf>,
    /// Links of its networks, by the names that specs give them; those of `spec` where the file
    /// does not say.
    #[serde(default)]
    pub networks: BTreeMap<String, LinkEntry>,
    /// Share of each CPU for contracts: 95 % where the file does not say, as the kernel grants
    /// real-time work by default (`sched_rt_runtime_us`).
    #[serde(default)]
    pub cpu: Option<Share>,
    /// Spec of the VMs whose contracts are in force there.
    #[serde(default)]
    pub spec: Option<PathBuf>,
    /// Priority of these contracts; by the criticality of each VM where it is not given.
    #[serde(default)]
    pub priority: Option<i32>,
    /// Shares of each CPU by VM, for those of the spec that declare requests and a deadline.
    #[serde(default)]
    pub budgets: BTreeMap<String, Share>,
}

/// The VMs of a spec, as contracts that need a host.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContractsEntry {
    /// The spec. Its devices count by name only: hosts have devices of their own.
    pub spec: PathBuf,
    /// The higher, the earlier it is placed; by the criticality of each VM where it is not given.
    #[serde(default)]
    pub priority: Option<i32>,
    /// Number of copies of each VM, named `VM-1`, `VM-2`, ...; `None` for one of its name.
    #[serde(default)]
    pub count: Option<u32>,
    /// Shares of each CPU by VM, as in `HostEntry`.
    #[serde(default)]
    pub budgets: BTreeMap<String, Share>,
}

/// Errors of a fleet file and of the files that it names.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FleetError {
    /// A file cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Path of the unreadable file.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The fleet file is not valid TOML or contradicts itself.
    #[error("{}: {message} (docs/reference/fleet-toml.md has the keys)", .path.display())]
    Form {
        path: PathBuf,
        /// Description with line and column where known.
        message: String,
    },
    /// A host that names no disk, or its disks in several ways.
    #[error(
        "host {host}: say one of profile = \"FILE\" (of its only disk), disks = {{ NAME = \"FILE\" }}, or twin = \"NAME\" (docs/reference/fleet-toml.md has the keys)"
    )]
    Disks {
        /// Host's `name` in the fleet file.
        host: String,
    },
    /// A spec cannot be read or is invalid.
    #[error(transparent)]
    Spec(#[from] SpecErrors),
    /// A profile cannot be read.
    #[error("host {host}")]
    Profile {
        /// Host's `name` in the fleet file.
        host: String,
        /// Read or parse error of the profile.
        source: MeasureError,
    },
    /// A profile that shows too little.
    #[error("host {host}")]
    Device {
        /// Host's `name` in the fleet file.
        host: String,
        /// Missing part of the measurement.
        source: DeviceError,
    },
    /// A twin's name or file is invalid.
    #[error("host {host}: {message}")]
    Twin {
        /// Host's `name` in the fleet file.
        host: String,
        /// Error of the twin's loader, as text.
        message: String,
    },
    /// A budget that has to be found first.
    #[error(
        "{}: vm {vm} declares requests and a deadline, and which budget they need depends on the host: say budgets = {{ {vm} = \"20%\" }} next to `spec`, with what \
         `rtvirtio profile cpu` and `rtvirtio plan` show there",
        .spec.display()
    )]
    Budget {
        spec: PathBuf,
        /// VM without an entry in `budgets`.
        vm: String,
    },
}
