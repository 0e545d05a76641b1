//! The spec file: devices, VMs, tasks and targets, parsed with line and column.
//!
//! [`HostSpec::parse`] turns text into a [`HostSpec`], with a [`Spec`] for each device, that holds
//! no impossible value, or into [`SpecErrors`]: every mistake of the file at once, each with its
//! position, the source line and a remedy. The form of the file is in `docs/reference/spec.md`.
//!
//! The text is not trusted: size, nesting and the number of VMs, tasks and reported errors are
//! bounded, and nothing in it makes the parser panic.

#![deny(missing_docs)]

mod block;
mod contract_keys;
mod cores;
mod cpu;
mod device;
mod disk;
mod error;
mod field;
mod goal;
mod host;
mod libvirt;
mod limits;
mod memory;
mod name;
mod nesting;
mod network;
mod network_read;
mod path;
mod plain;
mod quantity;
mod source;
mod suggest;
mod sync;
mod syntax;
mod target;
mod task;
mod traffic;
mod types;
mod urgency;
mod vm;

use std::path::Path;

use toml::de::DeTable;

pub use cores::Cores;
pub use device::{DEFAULT_TWIN_SIZE, MAX_TWIN_SIZE, MIN_TWIN_SIZE, TWIN_PROFILES};
pub use error::{MAX_SHOWN_ERRORS, SpecError, SpecErrors};
pub use goal::Target;
pub use host::{HostSpec, Part};
pub use limits::{
    DEFAULT_OPEN_DEPTH, MAX_DEVICES, MAX_DISKS_PER_VM, MAX_FILE_BYTES, MAX_FLOWS_PER_VM, MAX_NETWORKS,
    MAX_NICS_PER_VM, MAX_TASKS_PER_VM, MAX_VMS,
};
pub use memory::{Bandwidth, Memory, Ways};
pub use name::{MAX_NAME, dashed, is_name_char};
pub use network::{Direction, Flow, Mark, Network, Nic, Uplink};
pub use path::{PathPart, VmPath};
pub use traffic::{RequestLimit, Traffic, TrafficSpec, TrafficUnit};
pub use types::*;

use error::Report;
use field::Section;

/// Validates the bytes of a spec file of one device, as [`HostSpec::parse_bytes`].
pub fn parse_bytes(file_name: &str, bytes: &[u8]) -> Result<Spec, SpecErrors> {
    HostSpec::parse_bytes(file_name, bytes)?.single().cloned()
}

/// Validates the text of a spec file of one device, as [`HostSpec::parse`].
pub fn parse(file_name: &str, text: &str) -> Result<Spec, SpecErrors> {
    HostSpec::parse(file_name, text)?.single().cloned()
}

impl HostSpec {
    /// Validates the bytes of a spec file, which need not be text. `file_name` as in
    /// [`HostSpec::parse`].
    pub fn parse_bytes(file_name: &str, bytes: &[u8]) -> Result<Self, SpecErrors> {
        if bytes.len() > MAX_FILE_BYTES {
            return Err(SpecErrors::too_large(file_name));
        }
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::parse(file_name, text),
            Err(e) => Err(SpecErrors::not_utf8(file_name, bytes, e.valid_up_to())),
        }
    }

    /// Validates the text of a spec file.
    ///
    /// `file_name` is used in errors; a relative path of a twin profile is relative to its
    /// directory.
    ///
    /// # Errors
    ///
    /// One error for text that is not TOML; otherwise every mistake of the file, in file order.
    pub fn parse(file_name: &str, text: &str) -> Result<Self, SpecErrors> {
        if text.len() > MAX_FILE_BYTES {
            return Err(SpecErrors::too_large(file_name));
        }
        let mut report = Report::new(file_name, text);
        let spec = read(&mut report, text, Path::new(file_name).parent().unwrap_or(Path::new("")));
        report.finish(spec)
    }
}

/// Sections of a spec.
const KEYS: &[&str] = &["device", "memory", "network", "vm"];

/// Reads the whole file; `None` when an error was reported.
fn read(report: &mut Report<'_>, text: &str, directory: &Path) -> Option<HostSpec> {
    if let Some(span) = nesting::too_deep(text) {
        report.add(
            span,
            "this key has too many parts",
            "the longest path of a spec is vm.task.target.latency; remove the inner parts",
        );
        return None;
    }
    let root = match DeTable::parse(text) {
        Ok(root) => root,
        Err(e) => {
            syntax::report(report, text, &e);
            return None;
        }
    };
    // A missing section has no position: the error points to the start of the file.
    let aliases = [
        ("vms", "[[vm]]"),
        ("devices", "[[device]]"),
        ("networks", "[[network]]"),
        ("nic", "[[vm.nic]] below the [[vm]] it belongs to"),
        ("flow", "[[vm.flow]] below the [[vm]] it belongs to"),
        ("path", "[[vm.path]] below the [[vm]] it belongs to"),
        ("task", "[[vm.task]] below the [[vm]] it belongs to"),
        ("tasks", "[[vm.task]] below the [[vm]] it belongs to"),
        ("twin", "twin below [device]"),
        ("lab", "lab below each [[vm]]"),
    ];
    let file = Section::open(report, "a spec", root.get_ref(), 0..0, KEYS, &aliases);
    let devices = device::read_all(report, &file, directory);
    let networks = network_read::read_all(report, &file);
    let vms = vm::read_all(report, &file, &devices, &networks);
    let device_ways = memory::device_ways(report, &file);
    let host = host::assemble(report, text, devices, vms?)?;
    let device_ways = device_ways?;
    (!networks.bad).then_some(host.with_shared(networks.all, device_ways))
}
