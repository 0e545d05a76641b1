//! Kinds of devices that share one library entry.

use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_model::fingerprint;
use rtvirtio_spec::dashed;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::{Error, Result, cpus, kernel_release};
use serde::{Deserialize, Serialize};

use super::LibraryError;

/// Longest prefix of a file's name that comes from the model, in characters.
const LONGEST_NAME: usize = 48;

/// Facts on which the numbers of a profile depend. Devices with equal facts are measured as one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceKind {
    /// The drive's vendor and model, or the name that the user gives where it has none.
    pub model: String,
    /// Firmware version; `None` where the kernel does not say.
    pub firmware: Option<String>,
    /// Capacity of the device.
    pub size: Bytes,
    /// Whether it has a platter.
    pub rotational: bool,
    /// Logical block size: the smallest request.
    pub logical_block: Bytes,
    /// Physical block size: the smallest write without read-modify-write.
    pub physical_block: Bytes,
    /// `write back` or `write through`; `None` where the kernel does not say.
    pub write_cache: Option<String>,
    /// CPUs of the host: few of them are the limit of a fast drive.
    pub cpus: u32,
    /// Kernel release of the host.
    pub kernel: String,
}

impl DeviceKind {
    /// Kind of a device of this host. `named` replaces a missing model.
    ///
    /// # Errors
    /// [`LibraryError::NoModel`] without a model and a name; when sysfs cannot be read.
    pub fn read(root: &Root, device: &BlockDevice, named: Option<&str>) -> Result<Self> {
        let drive = device.drive_model(root)?;
        let no_model = || Error::from(LibraryError::NoModel { device: device.name.clone() });
        Ok(Self {
            model: named.map(str::to_owned).or(drive.model).ok_or_else(no_model)?,
            firmware: drive.firmware,
            size: Bytes(drive.size),
            rotational: drive.rotational,
            logical_block: Bytes(drive.logical_block),
            physical_block: Bytes(drive.physical_block),
            write_cache: drive.write_cache,
            cpus: cpus(),
            kernel: kernel_release(),
        })
    }

    /// Name of the kind's files: the model, and a fingerprint of all facts.
    #[must_use]
    pub fn key(&self) -> String {
        let model = self.model.trim().trim_start_matches('.');
        let name: String = dashed(model).chars().take(LONGEST_NAME).collect();
        // Serialising these fields cannot fail.
        let facts = serde_json::to_vec(self).unwrap_or_default();
        format!("{name}-{}", &fingerprint(&facts)[..8])
    }

    /// First fact in which two kinds differ, in words; `None` when they are equal.
    #[must_use]
    pub fn differs(&self, other: &Self) -> Option<String> {
        let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
        let platter = |is: bool| if is { "with a platter" } else { "without a platter" }.to_owned();
        let facts = [
            ("model", self.model.clone(), other.model.clone()),
            ("firmware", or(&self.firmware), or(&other.firmware)),
            ("size", self.size.to_string(), other.size.to_string()),
            ("drive", platter(self.rotational), platter(other.rotational)),
            ("logical block", self.logical_block.to_string(), other.logical_block.to_string()),
            ("physical block", self.physical_block.to_string(), other.physical_block.to_string()),
            ("write cache", or(&self.write_cache), or(&other.write_cache)),
            ("CPUs of the host", self.cpus.to_string(), other.cpus.to_string()),
            ("kernel", self.kernel.clone(), other.kernel.clone()),
        ];
        let found = facts.into_iter().find(|(_, ours, theirs)| ours != theirs);
        found.map(|(name, ours, theirs)| format!("{name} {ours}, not {theirs}"))
    }
}
