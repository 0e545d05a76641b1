//! Settings of an actuator, and the limits that they enforce.

use std::borrow::Cow;
use std::fmt;

use rtvirtio_text::shell_word;
use rtvirtio_units::Enforcement;
use serde::Serialize;

use crate::curve::Arrival;
use crate::tspec::{Direction, Tspec};

/// A mechanism that limits traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actuator {
    /// Caps of the I/O domain.
    IoDomain,
    /// Limits of cgroup v2's `io.max`.
    IoMax,
    /// Limits of cgroup v1's `blkio.throttle.*`.
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
    /// Actuators in the order of the command line's help.
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

    /// Name on the command line.
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

/// A number of a specification, as asked and as enforced.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Value as asked; `None` for a peak that is not asked for.
    pub asked: Option<f64>,
    /// Value as enforced; `None` when nothing limits it.
    pub kept: Option<f64>,
    /// Relative error `kept / asked - 1`; `None` without one of them.
    pub error: Option<f64>,
}

impl Part {
    pub(crate) fn new(asked: Option<f64>, kept: Option<f64>) -> Self {
        let error = asked.zip(kept).map(|(asked, kept)| kept / asked - 1.0);
        Self { asked, kept, error }
    }
}

/// A value to set, by the interface that takes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Setting {
    /// A value for a kernel file.
    File {
        /// Path of the file.
        path: String,
        /// Text to be written.
        text: String,
    },
    /// A command of a shell.
    Command {
        /// Program and arguments, quoted for a shell.
        line: String,
    },
    /// A key of `iod.toml`, in the table of the VM's disk or port.
    Toml {
        /// Key and value in TOML.
        line: String,
    },
    /// A command of QMP.
    Qmp {
        /// Command as a JSON object.
        json: String,
    },
    /// An element of libvirt's XML.
    Xml {
        /// Element as XML text.
        text: String,
    },
    /// A 32-bit register, partly written.
    Register {
        /// Name of the register in the manual.
        name: &'static str,
        /// Physical address of the register.
        address: u64,
        /// Word with the bits to set.
        value: u32,
        /// Bits to set; the others keep their value.
        mask: u32,
    },
}

impl fmt::Display for Setting {
    /// Line for a shell, a file or a monitor; a register as address and word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, text } => write!(f, "echo {} >{}", in_quotes(text), in_quotes(path)),
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

/// Text or path in quotes for a shell. One that begins with a shell variable, for what is not known
/// on this host, has it expanded; of any other nothing is: a cgroup may have any name.
fn in_quotes(text: &str) -> Cow<'_, str> {
    let is_plain = |c: char| !c.is_control() && !"\"$`!".contains(c);
    // A backslash, as in the names of systemd's scopes, is itself before these.
    let is_literal = !text.ends_with('\\') && !text.contains("\\\\");
    if text.starts_with('$') || (is_literal && text.chars().all(is_plain)) {
        return Cow::Owned(format!("\"{text}\""));
    }
    shell_word(text)
}

/// A specification as settings of one actuator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compiled {
    /// Actuator that the settings are for.
    pub actuator: Actuator,
    /// Direction of the traffic.
    pub direction: Direction,
    /// Specification as asked.
    pub asked: Tspec,
    /// Settings, in the order in which they are to be made.
    pub settings: Vec<Setting>,
    /// Arrival curve that the settings enforce, in the unit of `asked`; `None` when nothing bounds
    /// it.
    pub kept: Option<Arrival>,
    /// Rate as asked and as enforced.
    pub rate: Part,
    /// Burst as asked and as enforced.
    pub burst: Part,
    /// Peak as asked and as enforced.
    pub peak: Part,
    /// Largest excess over what is asked in any interval, in its unit; `None` when nothing bounds
    /// it.
    pub excess: Option<f64>,
    /// Enforcement of the specification.
    pub worth: Enforcement,
    /// Remarks for the user, one sentence each.
    pub notes: Vec<String>,
}

impl Compiled {
    pub(crate) fn new(
        actuator: Actuator,
        direction: Direction,
        asked: &Tspec,
        kept: Option<Arrival>,
        worth: Enforcement,
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
