//! Marker of a contract in force that asks for no setting and therefore has no journal.

use std::io;

use rtvirtio_apply::StateDir;
use rtvirtio_kernel::Root;
use rtvirtio_workflow::started::StartedVm;
use rtvirtio_workflow::{Dirs, write_state};
use serde::{Deserialize, Serialize};

use crate::PacemakerError;

/// Name of the file, in the directory where the journal would be.
pub(crate) const FILE: &str = "nothing-to-set";
/// Identifies this run of the kernel.
pub(crate) const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The run of the kernel, and the starts of VMs, in which the contract is in force.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Marker {
    boot_id: String,
    /// Without VMs of which no process is known.
    vms: Vec<StartedVm>,
}

/// Marks the contract with its journal in `own` as in force for these starts of VMs.
pub(crate) fn save(own: &Dirs, vms: &[StartedVm]) -> Result<(), PacemakerError> {
    let marker = Marker { boot_id: boot_id()?, vms: vms.to_vec() };
    let text = serde_json::to_vec_pretty(&marker).map_err(|e| failed(own, e.into()))?;
    Ok(write_state(&own.state, FILE, &text)?)
}

/// Whether the contract is marked as in force, in this run of the kernel and for VMs that have not
/// ended since.
///
/// # Errors
/// When that is unknown: a marker that cannot be read is not absent.
pub(crate) fn is_in_force(own: &Dirs) -> Result<bool, PacemakerError> {
    let Some(dir) = StateDir::find(&own.state)? else { return Ok(false) };
    let text = match dir.read(FILE) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        read => read.map_err(|e| failed(own, e))?,
    };
    // Without a boot, so of none that is known to be this one.
    if text.is_empty() {
        return Ok(false);
    }
    let marker: Marker = serde_json::from_slice(&text).map_err(|e| {
        let why = format!("damaged ({e}): the agent's `stop` removes it");
        failed(own, io::Error::new(io::ErrorKind::InvalidData, why))
    })?;
    Ok(marker.boot_id == boot_id()? && !marker.vms.iter().any(StartedVm::has_ended))
}

pub(crate) fn remove(own: &Dirs) -> Result<(), PacemakerError> {
    let Some(dir) = StateDir::find(&own.state)? else { return Ok(()) };
    dir.remove(FILE).map_err(|e| failed(own, e))
}

fn boot_id() -> Result<String, PacemakerError> {
    Ok(Root::default().read(BOOT_ID)?.trim().to_owned())
}

fn failed(own: &Dirs, source: io::Error) -> PacemakerError {
    PacemakerError::State { path: own.state.join(FILE), source }
}
