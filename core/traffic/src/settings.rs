//! What a regulator is set to, and what it keeps.

use std::fmt;

use serde::Serialize;

use crate::curve::Arrival;
use crate::tspec::{Direction, Tspec};

/// A regulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actuator {
    /// Caps of the I/O domain.
    IoDomain,
    /// cgroup v2 `io.max`.
    IoMax,
    /// cgroup v1 `blkio.throttle.*`.
    ThrottleV1,
    /// The token bucket filter of tc.
    TcTbf,
    /// The hierarchical token bucket of tc.
    TcHtb,
    /// A `throttle-group` of QEMU.
    Qemu,
    /// libvirt's `<iotune>` for disks and `<bandwidth>` for network cards.
    Libvirt,
    /// resctrl's schemata: RDT of Intel, QoS extensions of AMD, MPAM of Arm.
    Resctrl,
    /// Registers of an ARM CoreLink QoS-400.
    Qos400,
}

impl Actuator {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::IoDomain,
        Self::IoMax,
        Self::ThrottleV1,
        Self::TcTbf,
        Self::TcHtb,
        Self::Qemu,
        Self::Libvirt,
        Self::Resctrl,
        Self::Qos400,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IoDomain => "io-domain",
            Self::IoMax => "io-max",
            Self::ThrottleV1 => "throttle-v1",
            Self::TcTbf => "tc-tbf",
            Self::TcHtb => "tc-htb",
            Self::Qemu => "qemu",
            Self::Libvirt => "libvirt",
            Self::Resctrl => "resctrl",
            Self::Qos400 => "qos400",
        }
    }
}

impl fmt::Display for Actuator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How firmly a specification is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Worth {
    /// No interval exceeds what is kept, by construction.
    Guarantee,
    /// An upper limit that is enforced, with the error that is named.
    Cap,
    /// Slows traffic down; nothing bounds what passes.
    Hint,
}

impl Worth {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Guarantee => "guarantee",
            Self::Cap => "cap",
            Self::Hint => "hint",
        }
    }
}

/// One number of a specification, and what becomes of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// As asked; `None` for a peak that is not asked for.
    pub asked: Option<f64>,
    /// As kept; `None` when nothing limits it.
    pub kept: Option<f64>,
    /// `kept / asked - 1`.
    pub error: Option<f64>,
}

impl Part {
    pub(crate) fn new(asked: Option<f64>, kept: Option<f64>) -> Self {
        let error = asked.zip(kept).map(|(asked, kept)| kept / asked - 1.0);
        Self { asked, kept, error }
    }
}

/// One thing to set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Setting {
    /// A value for a kernel file.
    File {
        /// The file.
        path: String,
        /// What is written.
        text: String,
    },
    /// A command.
    Command {
        /// Program and arguments.
        line: String,
    },
    /// A key of `iod.toml`, in the table of the VM's disk or port.
    Toml {
        /// The line.
        line: String,
    },
    /// A command of QMP.
    Qmp {
        /// The JSON object.
        json: String,
    },
    /// An element of libvirt's XML.
    Xml {
        /// The element.
        text: String,
    },
    /// A 32-bit register.
    Register {
        /// Its name in the manual.
        name: &'static str,
        /// Its physical address.
        address: u64,
        /// The word.
        value: u32,
        /// Bits that are the specification's; the others keep their value.
        mask: u32,
    },
}

impl fmt::Display for Setting {
    /// A line that a shell, a file or a monitor takes; a register as address and word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, text } => write!(f, "echo \"{text}\" >\"{path}\""),
            Self::Command { line } | Self::Toml { line } => f.write_str(line),
            Self::Qmp { json } => f.write_str(json),
            Self::Xml { text } => f.write_str(text),
            Self::Register { name, address, value, mask } if *mask == u32::MAX => {
                write!(f, "{address:#010x} = {value:#010x}  {name}")
            }
            Self::Register { name, address, value, mask } => {
                write!(f, "{address:#010x} = {value:#010x}  {name}, bits {mask:#010x}")
            }
        }
    }
}

/// A specification as settings of one actuator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compiled {
    /// The actuator.
    pub actuator: Actuator,
    /// The direction.
    pub direction: Direction,
    /// As asked.
    pub asked: Tspec,
    /// What to set, in order.
    pub settings: Vec<Setting>,
    /// What the settings keep, in the unit of `asked`; `None` when nothing bounds it.
    pub kept: Option<Arrival>,
    /// The rate.
    pub rate: Part,
    /// The burst.
    pub burst: Part,
    /// The peak.
    pub peak: Part,
    /// The most by which any interval may exceed what is asked, in its unit; `None` when nothing
    /// bounds it.
    pub excess: Option<f64>,
    /// How firmly.
    pub worth: Worth,
    /// What else to know, one sentence each.
    pub notes: Vec<String>,
}

impl Compiled {
    pub(crate) fn new(
        actuator: Actuator,
        direction: Direction,
        asked: &Tspec,
        kept: Option<Arrival>,
        worth: Worth,
    ) -> Self {
        let of = asked.arrival();
        let peak = |a: &Arrival| a.peak.map(|(peak, _)| peak);
        Self {
            actuator,
            direction,
            asked: *asked,
            settings: Vec::new(),
            rate: Part::new(Some(of.rate), kept.map(|k| k.rate)),
            burst: Part::new(Some(of.burst), kept.map(|k| k.burst)),
            peak: Part::new(peak(&of), kept.as_ref().and_then(peak)),
            excess: kept.and_then(|k| k.excess_over(&of)),
            kept,
            worth,
            notes: Vec::new(),
        }
    }

    pub(crate) fn set(mut self, setting: Setting) -> Self {
        self.settings.push(setting);
        self
    }

    pub(crate) fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }
}
