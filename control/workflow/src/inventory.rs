//! VMs that a lab has started, as it lists them for the product.

use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::trusted::DATA_LIMIT;
use rtvirtio_measure::fio::Region;
use rtvirtio_spec::Spec;
use serde::{Deserialize, Serialize};

use crate::dirs::write_state;
use crate::error::{Context as _, Kind, Result, bail, ensure};

const SCHEMA: &str = "rtvirtio.inventory.v1";
/// Name of the list in the run directory.
const FILE: &str = "inventory.json";

/// The VMs of a lab that is up, and their device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    schema: String,
    /// Name of the spec's file, for messages.
    pub spec_name: String,
    /// The spec's text: the file may change while the VMs run.
    pub spec_text: String,
    /// The shared block device.
    pub device: PathBuf,
    /// Description of the device for result files.
    pub device_text: String,
    /// VMM and version, `none` for process VMs.
    pub vmm: String,
    /// `kvm`, `tcg` or `none`.
    pub accelerator: String,
    /// The I/O domain between device and guests, if there is one.
    pub domain: Option<ProcessId>,
    /// The process that serves an emulated device, if it is one.
    #[serde(default)]
    pub emulator: Option<ProcessId>,
    /// VMs in the order of the spec.
    pub vms: Vec<ListedVm>,
}

/// A VM of the lab.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedVm {
    /// Name in the spec.
    pub name: String,
    /// Cgroup, as a path below the hierarchy's root.
    pub cgroup: PathBuf,
    /// The QEMU guest; `None` for a process VM.
    pub guest: Option<ListedGuest>,
    /// Region of the device for tasks that run on the host.
    pub region: Region,
}

/// Process, sockets and disk of a QEMU guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedGuest {
    /// Process of the guest's QEMU.
    pub process: ProcessId,
    /// Socket of QEMU's monitor.
    pub qmp: PathBuf,
    /// The guest agent's socket.
    pub agent: PathBuf,
    /// The disk inside the guest that its tasks use.
    pub disk: PathBuf,
}

impl Inventory {
    /// A list for this spec; VMs and facts are filled in later.
    #[must_use]
    pub fn new(spec_name: &str, spec_text: &str, device: &Path) -> Self {
        Self {
            schema: SCHEMA.to_owned(),
            spec_name: spec_name.to_owned(),
            spec_text: spec_text.to_owned(),
            device: device.to_owned(),
            device_text: String::new(),
            vmm: "none".to_owned(),
            accelerator: "none".to_owned(),
            domain: None,
            emulator: None,
            vms: Vec::new(),
        }
    }

    /// The VMs that are up in a run directory.
    ///
    /// # Errors
    /// [`Kind::NotRunning`] when there are none; [`Kind::File`] when the list is another one's.
    pub fn load(run_dir: &Path) -> Result<Self> {
        let path = run_dir.join(FILE);
        let text = match rtvirtio_kernel::trusted::read_config(&path, DATA_LIMIT) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                bail!(NotRunning, "no lab is up: make one with `rtvirtio-lab up SPEC`")
            }
            read => read.with_context(|| path.display().to_string())?,
        };
        let list: Self = serde_json::from_slice(&text)
            .map_err(|e| crate::Error::from_source(Kind::File, e))
            .with_context(|| path.display().to_string())?;
        ensure!(
            list.schema == SCHEMA,
            File,
            "{}: schema {} is of another rtvirtio",
            path.display(),
            list.schema
        );
        Ok(list)
    }

    /// Writes the list so that a crash leaves the old or the new one.
    pub fn save(&self, run_dir: &Path) -> Result<()> {
        write_state(run_dir, FILE, &serde_json::to_vec_pretty(self)?)
    }

    /// Removes the list; no error when there is none.
    pub fn remove(run_dir: &Path) -> Result<()> {
        match std::fs::remove_file(run_dir.join(FILE)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(e).with_context(|| run_dir.join(FILE).display().to_string())
            }
            _ => Ok(()),
        }
    }

    /// The list, if it is of this spec.
    ///
    /// # Errors
    /// [`Kind::NotRunning`] when none is up; [`Kind::Argument`] when others are.
    pub fn of_spec(spec: &Spec, run_dir: &Path) -> Result<Self> {
        let list = Self::load(run_dir)?;
        let up = list.spec()?;
        let same = |a: &Spec, b: &Spec| {
            a.device == b.device
                && a.vms.iter().map(|v| (&v.name, &v.reach)).eq(b.vms.iter().map(|v| (&v.name, &v.reach)))
        };
        ensure!(
            same(&up, spec),
            Argument,
            "the lab that is up (from {}) has another device or other VMs than this spec: \
             `rtvirtio-lab down`, then `rtvirtio-lab up` with this spec",
            list.spec_name
        );
        Ok(list)
    }

    /// The spec from which the VMs were started.
    ///
    /// # Errors
    /// [`Kind::File`] when its text has been damaged.
    pub fn spec(&self) -> Result<Spec> {
        Ok(rtvirtio_spec::parse(&self.spec_name, &self.spec_text)?)
    }

    /// Process ids of the guests' QEMUs and of the I/O domain.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let guests = self.vms.iter().filter_map(|vm| vm.guest.as_ref()).map(|guest| guest.process.pid);
        self.domain.iter().map(|domain| domain.pid).chain(guests).collect()
    }

    /// Process ids of all that carries out the guests' requests: as [`Inventory::pids`], and of an
    /// emulated device.
    #[must_use]
    pub fn serving(&self) -> Vec<u32> {
        let mut pids = self.pids();
        pids.extend(self.emulator.iter().map(|emulator| emulator.pid));
        pids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_found_again_and_removed() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        assert_eq!(Inventory::load(dir.path()).unwrap_err().kind(), Kind::NotRunning);
        let list = Inventory::new("a.toml", "text", Path::new("/dev/loop0"));
        list.save(dir.path()).unwrap();
        assert_eq!(Inventory::load(dir.path()).unwrap(), list);
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        let e = Inventory::load(dir.path()).unwrap_err();
        assert_eq!(e.kind(), Kind::File);
        assert!(format!("{e:#}").contains(FILE));
        let other = Inventory { schema: "rtvirtio.inventory.v9".to_owned(), ..list };
        other.save(dir.path()).unwrap();
        assert_eq!(Inventory::load(dir.path()).unwrap_err().kind(), Kind::File);
        Inventory::remove(dir.path()).unwrap();
        Inventory::remove(dir.path()).unwrap();
    }
}
