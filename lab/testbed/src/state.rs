//! The parts of a lab, saved before they are made: `lab down` finds them after any crash.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_measure::fio::Region;
use serde::{Deserialize, Serialize};

use crate::FileDisk;
use crate::qemu::QemuHandle;
use crate::twin::TwinHandle;
use rtvirtio_kernel::ProcessId;

const SCHEMA: &str = "rtvirtio.lab.v1";
use rtvirtio_workflow::leftovers::LAB_FILE as FILE;

/// State of a lab, by which another process finds it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabState {
    schema: String,
    /// Whether everything is up.
    pub complete: bool,
    /// File name or other origin of the spec.
    pub spec_name: String,
    /// Text of the spec: the file may change while the lab is up.
    pub spec_text: String,
    /// `kvm`, `tcg` or `none`.
    pub accelerator: String,
    /// Name and version of the VMM, `none` for process VMs.
    pub vmm: String,
    /// Path of the shared block device.
    pub device: Option<PathBuf>,
    /// Name and size of the device, for people.
    pub device_text: String,
    /// Twin behind the device, if it is one.
    pub twin: Option<TwinHandle>,
    /// File behind the device, if the lab made one on a disk.
    #[serde(default)]
    pub file: Option<FileDisk>,
    /// Process of the I/O domain between device and guests, if there is one.
    #[serde(default)]
    pub iod: Option<ProcessId>,
    /// Cgroups that the lab made or will make, parents first.
    pub cgroups: Vec<PathBuf>,
    /// `cgroup.subtree_control` files (v2) into which the lab wrote `+io`, outermost first.
    pub io_enabled: Vec<PathBuf>,
    /// VMs in spec order, as far as they are up.
    pub vms: Vec<LabVm>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabVm {
    /// Name in the spec.
    pub name: String,
    /// Cgroup of the VM below the hierarchy's root.
    pub cgroup: PathBuf,
    /// First byte of the VM's part of the device.
    pub offset: u64,
    /// Length of the part, in bytes.
    pub size: u64,
    /// Release of the guest's kernel; empty for a process VM.
    #[serde(default)]
    pub kernel: String,
    /// QEMU process of the guest; `None` for a process VM.
    pub qemu: Option<QemuHandle>,
}

impl LabVm {
    /// The VM's part of the device.
    #[must_use]
    pub fn region(&self) -> Region {
        Region { offset: rtvirtio_units::Bytes(self.offset), size: rtvirtio_units::Bytes(self.size) }
    }
}

impl LabState {
    /// A lab of which nothing is made yet.
    #[must_use]
    pub fn new(spec_name: &str, spec_text: &str) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            spec_name: spec_name.to_owned(),
            spec_text: spec_text.to_owned(),
            accelerator: "none".to_owned(),
            vmm: "none".to_owned(),
            ..Self::default()
        }
    }

    /// Loads the lab of this run directory; `None` when there is none.
    pub fn load(run_dir: &Path) -> io::Result<Option<Self>> {
        let path = run_dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let state: Self = serde_json::from_str(&text)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {e}", path.display())))?;
        if state.schema != SCHEMA {
            let message = format!("{}: schema {} is of another rtvirtio", path.display(), state.schema);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(Some(state))
    }

    /// Writes the file so that a crash leaves the old or the new one, never a part.
    pub fn save(&self, run_dir: &Path) -> io::Result<()> {
        fs::create_dir_all(run_dir)?;
        rtvirtio_kernel::atomic_write(&run_dir.join(FILE), &serde_json::to_vec_pretty(self)?)
    }

    /// Removes the state file; no error when it does not exist.
    pub fn forget(run_dir: &Path) -> io::Result<()> {
        match fs::remove_file(run_dir.join(FILE)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lab_is_found_again_and_forgotten() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        assert_eq!(LabState::load(dir.path()).unwrap(), None);
        let mut state = LabState::new("a.toml", "text");
        state.vms.push(LabVm {
            name: "vm0".into(),
            cgroup: "/x".into(),
            offset: 0,
            size: 4096,
            kernel: String::new(),
            qemu: None,
        });
        state.save(dir.path()).unwrap();
        assert_eq!(LabState::load(dir.path()).unwrap(), Some(state));
        LabState::forget(dir.path()).unwrap();
        LabState::forget(dir.path()).unwrap();
        assert_eq!(LabState::load(dir.path()).unwrap(), None);
    }

    #[test]
    fn a_broken_file_is_an_error_that_names_it() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "{").unwrap();
        let e = LabState::load(dir.path()).unwrap_err().to_string();
        assert!(e.contains("lab.json"), "{e}");
        let other =
            serde_json::to_string(&LabState { schema: "rtvirtio.lab.v9".into(), ..LabState::new("a", "b") });
        fs::write(dir.path().join(FILE), other.unwrap()).unwrap();
        assert!(LabState::load(dir.path()).unwrap_err().to_string().contains("v9"));
    }
}
