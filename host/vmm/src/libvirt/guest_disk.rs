//! Name of a disk inside the guest: `vdb` of libvirt may be `/dev/vda` there.

use std::path::PathBuf;

use serde::Deserialize;

use super::{Disk, GuestAddress};
use crate::{GuestAgent, VmmError};

/// Type `GuestDiskInfo` of `qga/qapi-schema.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct GuestDisk {
    name: String,
    partition: bool,
    address: Option<Address>,
}

/// Type `GuestDiskAddress` of `qga/qapi-schema.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Address {
    bus_type: String,
    bus: i64,
    target: i64,
    unit: i64,
    pci_controller: PciAddress,
    serial: Option<String>,
}

/// Type `GuestPCIAddress`; -1 for a disk that is not behind PCI.
#[derive(Debug, Deserialize)]
struct PciAddress {
    domain: i64,
    bus: i64,
    slot: i64,
    function: i64,
}

/// Device of this disk in the guest, found by its serial number if there is one, else by its
/// address, never by its name.
///
/// # Errors
/// The agent does not answer, or not exactly one disk of the guest matches.
pub fn guest_device(agent: &mut GuestAgent, disk: &Disk) -> Result<PathBuf, VmmError> {
    let disks = agent.disks()?;
    match matching(&disks, disk).as_slice() {
        [one] => Ok(PathBuf::from(&one.name)),
        found => Err(VmmError::GuestDisk {
            target: disk.target.clone(),
            found: found.iter().map(|d| d.name.clone()).collect(),
        }),
    }
}

fn matching<'a>(disks: &'a [GuestDisk], disk: &Disk) -> Vec<&'a GuestDisk> {
    let whole = || disks.iter().filter(|d| !d.partition);
    if let Some(serial) = &disk.serial {
        // udev truncates a serial number of virtio-blk to 20 characters (VIRTIO_BLK_ID_BYTES).
        let same = |d: &&GuestDisk| {
            let found = d.address.as_ref().and_then(|a| a.serial.as_deref());
            found.is_some_and(|found| found == serial || (found.len() == 20 && serial.starts_with(found)))
        };
        let found: Vec<_> = whole().filter(same).collect();
        if !found.is_empty() {
            return found;
        }
    }
    let same = |d: &&GuestDisk| match (&d.address, disk.address) {
        (Some(a), Some(GuestAddress::Pci { domain, bus, slot, function })) => {
            let p = &a.pci_controller;
            a.bus_type == "virtio"
                && (p.domain, p.bus, p.slot, p.function)
                    == (domain.into(), bus.into(), slot.into(), function.into())
        }
        (Some(a), Some(GuestAddress::Drive { bus, target, unit })) => {
            a.bus_type != "virtio" && (a.bus, a.target, a.unit) == (bus.into(), target.into(), unit.into())
        }
        _ => false,
    };
    whole().filter(same).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answer of Debian 12's agent under libvirt 9.0, with a second disk and a partition.
    const ANSWER: &str = r#"[
        {"name":"/dev/vda","dependencies":[],"partition":false,"address":{"bus-type":"virtio","bus":0,"unit":0,
         "pci-controller":{"bus":3,"slot":0,"domain":0,"function":0},"dev":"/dev/vda","target":0}},
        {"name":"/dev/vda1","dependencies":["/dev/vda"],"partition":true},
        {"name":"/dev/vdb","dependencies":[],"partition":false,"address":{"bus-type":"virtio","bus":0,"unit":0,
         "serial":"0123456789abcdefghij",
         "pci-controller":{"bus":4,"slot":0,"domain":0,"function":0},"dev":"/dev/vdb","target":0}},
        {"name":"/dev/sda","dependencies":[],"partition":false,"address":{"bus-type":"scsi","bus":0,"unit":3,
         "pci-controller":{"bus":5,"slot":0,"domain":0,"function":0},"dev":"/dev/sda","target":0}}]"#;

    fn found(disk: &Disk) -> Vec<String> {
        let disks: Vec<GuestDisk> = serde_json::from_str(ANSWER).unwrap();
        matching(&disks, disk).iter().map(|d| d.name.clone()).collect()
    }

    #[test]
    fn a_disk_is_matched_by_serial_or_address_and_never_by_name() {
        let at = |bus| Some(GuestAddress::Pci { domain: 0, bus, slot: 0, function: 0 });
        let disk = Disk { target: "vdb".to_owned(), address: at(3), ..Disk::default() };
        assert_eq!(found(&disk), ["/dev/vda"]);
        assert_eq!(found(&Disk { address: at(9), ..disk.clone() }), [""; 0]);
        assert_eq!(found(&Disk { address: None, ..disk.clone() }), [""; 0]);
        let serial = Some("0123456789abcdefghijklmnop".to_owned());
        assert_eq!(found(&Disk { serial, address: at(3), ..disk.clone() }), ["/dev/vdb"]);
        // An agent without udev reports no serial number.
        let other = Some("unknown".to_owned());
        assert_eq!(found(&Disk { serial: other, address: at(3), ..disk.clone() }), ["/dev/vda"]);
        let scsi = Some(GuestAddress::Drive { bus: 0, target: 0, unit: 3 });
        assert_eq!(found(&Disk { address: scsi, ..disk }), ["/dev/sda"]);
    }
}
