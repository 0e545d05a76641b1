//! The `ivshmem` device of a running QEMU, and the memory behind it.

use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rtvirtio_urgency::page::LEAST_SIZE;
use rtvirtio_vmm::{Qmp, VmmError};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::{Value, json};

use crate::UrgencyError;
use crate::server::{memory_file, take_eventfd};

/// Vendor and device of `ivshmem` (QEMU's `docs/specs/ivshmem-spec.rst`).
const ID: (u64, u64) = (0x1af4, 0x1110);
/// What distinguishes our page where a machine has several such devices.
const NAME: &str = "rtvirtio";

/// The memory that a VM and the host share.
#[derive(Debug)]
pub struct Page {
    /// Its file.
    pub file: File,
    /// Where that is.
    pub path: PathBuf,
    /// Its size, in bytes.
    pub size: usize,
    /// What the guest's notices arrive at; `None` without a doorbell.
    pub doorbell: Option<OwnedFd>,
}

impl Page {
    /// A page that no guest shares, for a guest that reports nothing.
    pub(crate) fn private() -> std::io::Result<Self> {
        let file = File::from(memfd_create("rtvirtio-urgency", MemfdFlags::CLOEXEC)?);
        file.set_len(LEAST_SIZE as u64)?;
        Ok(Self { file, path: "urgency page".into(), size: LEAST_SIZE, doorbell: None })
    }
}

/// Finds the page of a VM: the memory of its only `ivshmem` device, or of the one whose memory's
/// file is named `rtvirtio...`.
///
/// # Errors
/// [`UrgencyError::NoDevice`], [`UrgencyError::NoMemory`], or as the monitor reports.
pub fn find_page(vm: &str, pid: u32, qmp: &mut Qmp) -> Result<Page, UrgencyError> {
    let mut found = Vec::new();
    for bus in list(&qmp.execute("query-pci", None)?) {
        devices(bus, &mut found);
    }
    let mut pages = Vec::new();
    for id in found {
        pages.extend(memory(vm, pid, qmp, &id)?);
    }
    let file = |page: &Page| page.path.file_name().map(|n| n.to_string_lossy().into_owned());
    let named = |page: &Page| file(page).is_some_and(|name| name.contains(NAME));
    let at = pages.iter().position(named).or_else(|| (pages.len() == 1).then_some(0));
    at.map(|at| pages.swap_remove(at)).ok_or_else(|| UrgencyError::NoDevice { vm: vm.to_owned() })
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Ids of the `ivshmem` devices on a bus and those behind it; empty for one without an id.
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

/// A property of an object; `None` where it has none such.
fn property(qmp: &mut Qmp, path: &str, name: &str) -> Result<Option<String>, VmmError> {
    match qmp.execute("qom-get", Some(json!({ "path": path, "property": name }))) {
        Ok(value) => Ok(value.as_str().filter(|v| !v.is_empty()).map(str::to_owned)),
        Err(VmmError::Refused { .. }) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The memory behind a device; `None` for one of another kind.
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
        let page = match property(qmp, &backend, "mem-path")? {
            Some(path) => open(vm, pid, Path::new(&path))?,
            None => unnamed(vm, pid, qmp, &backend)?,
        };
        return Ok(Some(page));
    }
    Ok(None)
}

/// The memory and the doorbell that our server gave to QEMU.
fn served(vm: &str, pid: u32, qmp: &mut Qmp, chardev: &str) -> Result<Page, UrgencyError> {
    let no = |why: String| UrgencyError::NoMemory { vm: vm.to_owned(), why };
    // The monitor's list of character devices has no path for one that has connected.
    let path = if chardev.starts_with('/') { chardev.to_owned() } else { format!("/chardevs/{chardev}") };
    let arguments = json!({ "path": path, "property": "addr" });
    let address = qmp.execute("qom-get", Some(arguments))?;
    let socket = address["path"].as_str().filter(|path| path.starts_with('/'));
    let socket = socket.ok_or_else(|| no(format!("its server's socket is `{address}`")))?;
    let memory = memory_file(Path::new(socket));
    let doorbell = take_eventfd(vm, Path::new(socket), pid)?;
    Ok(Page { doorbell: Some(doorbell), ..open(vm, pid, &memory)? })
}

fn open(vm: &str, pid: u32, path: &Path) -> Result<Page, UrgencyError> {
    let no = |why: String| UrgencyError::NoMemory { vm: vm.to_owned(), why };
    // By the process's own view: it may run with another root.
    let path = match path.strip_prefix("/") {
        Ok(below) => Path::new("/proc").join(pid.to_string()).join("root").join(below),
        Err(_) => return Err(no(format!("{} is relative to where QEMU was started", path.display()))),
    };
    let file = OpenOptions::new().read(true).write(true).open(&path);
    let file = file.map_err(|e| no(format!("{}: {e}", path.display())))?;
    let size = file.metadata().map_err(|e| no(e.to_string()))?.len();
    Ok(Page { file, path, size: usize::try_from(size).unwrap_or(usize::MAX), doorbell: None })
}

/// Memory without a name (`memory-backend-memfd`): the only open file of this size that QEMU has.
fn unnamed(vm: &str, pid: u32, qmp: &mut Qmp, backend: &str) -> Result<Page, UrgencyError> {
    let no = |why: &str| UrgencyError::NoMemory { vm: vm.to_owned(), why: why.to_owned() };
    let size = qmp.execute("qom-get", Some(json!({ "path": backend, "property": "size" })))?;
    let size = size.as_u64().ok_or_else(|| no("its size is not known"))?;
    let dir = PathBuf::from(format!("/proc/{pid}/fd"));
    let mut fits = Vec::new();
    for entry in fs::read_dir(&dir).map_err(UrgencyError::io("list", &dir))?.flatten() {
        let is_memory = fs::read_link(entry.path()).is_ok_and(|l| l.to_string_lossy().starts_with("/memfd:"));
        if is_memory && fs::metadata(entry.path()).is_ok_and(|m| m.len() == size) {
            fits.push(entry.path());
        }
    }
    let [path] = fits.as_slice() else { return Err(no("it has no name and no size of its own")) };
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.map_err(UrgencyError::io("open", path))?;
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    Ok(Page { file, path: path.clone(), size, doorbell: None })
}
