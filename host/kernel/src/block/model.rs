//! Model of a drive: facts that all drives of the model share.

use crate::{BlockDevice, HostError, Root};

/// Facts that drives of one model and firmware share. None of them tells two such drives apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriveModel {
    /// Vendor and model; `None` where the kernel knows none, as of a loop or virtio device.
    pub model: Option<String>,
    /// Firmware version; `None` where the kernel knows no model.
    pub firmware: Option<String>,
    /// Size in bytes of the whole disk.
    pub size: u64,
    /// Whether it has rotating platters.
    pub rotational: bool,
    /// Smallest request in bytes.
    pub logical_block: u64,
    /// Smallest write that needs no read before it, in bytes.
    pub physical_block: u64,
    /// `write back` when a flush takes effect, `write through` when it does not; `None` where the
    /// kernel does not say.
    pub write_cache: Option<String>,
}

impl BlockDevice {
    /// Model and firmware, from the files of the drivers: `device/model` and `device/firmware_rev`
    /// of NVMe (`drivers/nvme/host/sysfs.c`), `device/vendor`, `device/model` and `device/rev` of
    /// SCSI (`drivers/scsi/scsi_sysfs.c`), `device/name` and `device/fwrev` of MMC
    /// (`drivers/mmc/core/mmc.c`).
    pub fn drive_model(&self, root: &Root) -> Result<DriveModel, HostError> {
        let text = |file: &str| -> Result<Option<String>, HostError> {
            let text = root.read_optional(self.sysfs().join("device").join(file))?;
            let words = text.map(|t| t.split_whitespace().collect::<Vec<_>>().join(" "));
            Ok(words.filter(|t| !t.is_empty()))
        };
        let first = |files: &[&str]| -> Result<Option<String>, HostError> {
            for file in files {
                if let Some(found) = text(file)? {
                    return Ok(Some(found));
                }
            }
            Ok(None)
        };
        // The vendor of virtio and others is a number, which means something only with a model;
        // that of ATA names the command set.
        let model = first(&["model", "name"])?;
        let vendor = text("vendor")?.filter(|v| v != "ATA" && !v.starts_with("0x"));
        let model = model.map(|m| vendor.map_or_else(|| m.clone(), |v| format!("{v} {m}")));
        Ok(DriveModel {
            firmware: first(&["firmware_rev", "rev", "fwrev"])?.filter(|_| model.is_some()),
            model,
            size: self.size(root)?,
            rotational: root.number::<u64>(self.queue("rotational"))? != 0,
            logical_block: root.number(self.queue("logical_block_size"))?,
            physical_block: root.number(self.queue("physical_block_size"))?,
            write_cache: root.read_optional(self.queue("write_cache"))?.filter(|t| !t.is_empty()),
        })
    }
}
