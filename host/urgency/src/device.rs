//! `ivshmem` device of a running QEMU, and the memory behind it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted::process::{pick, shared_mappings};
use rtvirtio_urgency::page::LEAST_SIZE;
use rtvirtio_vmm::{Qmp, VmmError};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

use crate::UrgencyError;
use crate::server::{memory_file, take_eventfd};

/// Vendor and device of `ivshmem` (QEMU's `docs/specs/ivshmem-spec.rst`).
const ID: (u64, u64) = (0x1af4, 0x1110);
/// Part of the file name that marks our page where a machine has several such devices.
const NAME: &str = "rtvirtio";

/// Largest number of devices of this kind that are examined.
const MOST_DEVICES: usize = 16;

/// Memory shared by a VM and the host.
#[derive(Debug)]
pub struct Page {
    /// Open file of the memory.
    pub file: File,
    /// Path of the file, for messages.
    pub path: PathBuf,
    /// Size of the file, in bytes.
    pub size: usize,
    /// File that the following process locks.
    pub(crate) lock: File,
    /// Eventfd that the guest signals; `None` without a doorbell.
    pub doorbell: Option<OwnedFd>,
}

impl Page {
    /// Makes a page without a guest, for a guest that does not report.
    pub(crate) fn private() -> std::io::Result<Self> {
        let file = File::from(memfd_create("rtvirtio-urgency", MemfdFlags::CLOEXEC)?);
        file.set_len(LEAST_SIZE as u64)?;
        let lock = file.try_clone()?;
        Ok(Self { file, path: "urgency page".into(), size: LEAST_SIZE, lock, doorbell: None })
    }
}

/// Finds the page of a VM: the memory of its only `ivshmem` device, or of the one whose memory
/// file's name contains `rtvirtio`.
///
/// # Errors
/// [`UrgencyError::NoDevice`], [`UrgencyError::NoMemory`], or as the monitor reports.
pub fn find_page(vm: &str, pid: u32, qmp: &mut Qmp) -> Result<Page, UrgencyError> {
    let mut found = Vec::new();
    for bus in list(&qmp.execute("query-pci", None)?) {
        devices(bus, &mut found);
    }
    if found.len() > MOST_DEVICES {
        let why = format!("it has {} `ivshmem` devices; at most {MOST_DEVICES} are looked at", found.len());
        return Err(UrgencyError::NoMemory { vm: vm.to_owned(), why });
    }
    let (mut pages, mut unopened) = (Vec::new(), None);
    for id in found {
        match memory(vm, pid, qmp, &id) {
            Ok(page) => pages.extend(page),
            // Another device may be for another purpose.
            Err(e @ UrgencyError::NoMemory { .. }) => unopened = unopened.or(Some(e)),
            Err(e) => return Err(e),
        }
    }
    let file = |page: &Page| page.path.file_name().map(|n| n.to_string_lossy().into_owned());
    let named = |page: &Page| file(page).is_some_and(|name| name.contains(NAME));
    let only = || (pages.len() == 1 && unopened.is_none()).then_some(0);
    let at = pages.iter().position(named).or_else(only);
    at.map(|at| pages.swap_remove(at))
        .ok_or_else(|| unopened.unwrap_or_else(|| UrgencyError::NoDevice { vm: vm.to_owned() }))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Collects ids of `ivshmem` devices on a bus and behind its bridges; empty where there is no id.
fn devices(bus: &Value, found: &mut Vec<String>) {
    for device in list(&bus["devices"]) {
        let id = (device["id"]["vendor"].as_u64(), device["id"]["device"].as_u64());
        if id == (Some(ID.0), Some(ID.1)) {
            found.push(device["qdev_id"].as_str().unwrap_or_default().to_owned());
        }
        if device["pci_bridge"].is_object() {
            devices(&device["pci_bridge"], found);
        }
    }
}

/// Property of a QOM object; `None` where it is missing or empty.
fn property(qmp: &mut Qmp, path: &str, name: &str) -> Result<Option<String>, VmmError> {
    match qmp.execute("qom-get", Some(json!({ "path": path, "property": name }))) {
        Ok(value) => Ok(value.as_str().filter(|v| !v.is_empty()).map(str::to_owned)),
        Err(VmmError::Refused { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Memory behind a device; `None` for another kind of device.
fn memory(vm: &str, pid: u32, qmp: &mut Qmp, id: &str) -> Result<Option<Page>, UrgencyError> {
    let mut objects = Vec::new();
    if id.is_empty() {
        let arguments = json!({ "path": "/machine/peripheral-anon" });
        for child in list(&qmp.execute("qom-list", Some(arguments))?) {
            let kind = child["type"].as_str().unwrap_or_default();
            if kind.starts_with("child<ivshmem-") {
                objects.extend(child["name"].as_str().map(|n| format!("/machine/peripheral-anon/{n}")));
            }
        }
    } else {
        objects.push(format!("/machine/peripheral/{id}"));
    }
    for object in objects {
        if let Some(chardev) = property(qmp, &object, "chardev")? {
            return served(vm, pid, qmp, &chardev).map(Some);
        }
        let Some(backend) = property(qmp, &object, "memdev")? else { continue };
        let path = property(qmp, &backend, "mem-path")?;
        let size = qmp.execute("qom-get", Some(json!({ "path": backend, "property": "size" })))?;
        let page = mapped(vm, pid, path.as_deref().map(Path::new), size.as_u64())?;
        return Ok(Some(page));
    }
    Ok(None)
}

/// Memory and doorbell that our server gave to QEMU.
fn served(vm: &str, pid: u32, qmp: &mut Qmp, chardev: &str) -> Result<Page, UrgencyError> {
    let no = |why: String| UrgencyError::NoMemory { vm: vm.to_owned(), why };
    // The monitor's list of character devices has no path for a connected one.
    let path = if chardev.starts_with('/') { chardev.to_owned() } else { format!("/chardevs/{chardev}") };
    let arguments = json!({ "path": path, "property": "addr" });
    let address = qmp.execute("qom-get", Some(arguments))?;
    let socket = address["path"].as_str().filter(|path| path.starts_with('/'));
    let socket = socket.ok_or_else(|| no(format!("its server's socket is `{address}`")))?;
    let memory = memory_file(Path::new(socket));
    let doorbell = take_eventfd(vm, Path::new(socket), pid)?;
    Ok(Page { doorbell: Some(doorbell), ..mapped(vm, pid, Some(&memory), Some(LEAST_SIZE as u64))? })
}

/// Memory that QEMU names, opened by QEMU's own mapping: a path of its choice could lead to a file
/// that only root may write. Memory without a name (`memory-backend-memfd`) must be the only one of
/// its size.
fn mapped(vm: &str, pid: u32, path: Option<&Path>, size: Option<u64>) -> Result<Page, UrgencyError> {
    let no = |why: String| UrgencyError::NoMemory { vm: vm.to_owned(), why };
    let name = path.map_or_else(|| "memory without a name".to_owned(), |path| path.display().to_string());
    let all = shared_mappings(pid).map_err(|e| no(format!("what its QEMU has mapped is not known: {e}")))?;
    let found = pick(&all, path, size);
    let found =
        found.ok_or_else(|| no(format!("{name} is not what its QEMU has mapped, shared and to write")))?;
    let file = found.open().map_err(|e| no(format!("{name}: {e}")))?;
    let size = file.metadata().map_err(|e| no(e.to_string()))?.len();
    // Not the page itself, which others may be able to open, and lock, too.
    let memory = format!("/proc/{pid}/mem");
    // kernel file
    let lock = File::open(&memory).map_err(UrgencyError::io("open", memory))?;
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    Ok(Page { file, path: found.name.clone(), size, lock, doorbell: None })
}
