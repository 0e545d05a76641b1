//! Interrupts of disks, and the CPUs that each may come to
//! (`Documentation/core-api/irq/irq-affinity.rst`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::topology::cpus_in;
use crate::{BlockDevice, HostError, Root, process, unless_gone};

pub(crate) const IRQS: &str = "/proc/irq";
/// User id of root.
const ROOT: u32 = 0;

/// Interrupt that a device has to itself: a vector of MSI or MSI-X.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vector {
    /// Number of the interrupt.
    pub number: u32,
    /// File of the vector in its device's directory.
    pub file: PathBuf,
    /// Inode of that file, which is another one when the number is given out again.
    pub inode: u64,
    /// CPUs that the interrupt is set to.
    pub cpus: BTreeSet<u32>,
    /// CPUs that it is sent to now, where the kernel tells.
    pub effective: Option<BTreeSet<u32>>,
    /// Whether the kernel says that no program may move it. Before Linux 6.11 most kernels tell by
    /// refusing only.
    pub is_fixed: bool,
}

/// Vectors of the controller of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vectors {
    pub disk: String,
    /// The vectors, by number; none for a disk without a controller on PCI, and for a controller
    /// with a line interrupt, which it may share with others.
    pub all: Vec<Vector>,
    /// CPUs near the controller, where the kernel tells.
    pub local: BTreeSet<u32>,
}

/// The vectors of the controller of a disk, which may serve other disks too.
pub fn vectors(root: &Root, disk: &BlockDevice) -> Result<Vectors, HostError> {
    let mut found = Vectors { disk: disk.name.clone(), ..Vectors::default() };
    let Some(controller) = controller(root, disk)? else { return Ok(found) };
    found.local = cpus_in(root, &controller.join("local_cpulist"))?.unwrap_or_default();
    let dir = controller.join("msi_irqs");
    let names = if root.exists(&dir)? { root.list(&dir)? } else { Vec::new() };
    for number in names.iter().filter_map(|name| name.parse().ok()) {
        let vector = unless_gone(vector(root, number, dir.join(number.to_string())))?;
        found.all.extend(vector.flatten());
    }
    found.all.sort_by_key(|vector| vector.number);
    Ok(found)
}

/// The PCI device nearest above a disk in the tree of devices.
fn controller(root: &Root, disk: &BlockDevice) -> Result<Option<PathBuf>, HostError> {
    let real = |path: &Path| {
        let wrap = |source| HostError::Read { path: path.to_owned(), source };
        std::fs::canonicalize(root.at(path)).map_err(wrap)
    };
    let (dir, top) = (real(&disk.sysfs())?, real(Path::new("/"))?);
    for above in dir.strip_prefix(&top).unwrap_or(&dir).ancestors() {
        let host_path = Path::new("/").join(above);
        let link = host_path.join("subsystem");
        if root.exists(&link)? && real(&link)?.ends_with("bus/pci") {
            return Ok(Some(host_path));
        }
    }
    Ok(None)
}

/// `None` for a vector that no driver has requested.
fn vector(root: &Root, number: u32, file: PathBuf) -> Result<Option<Vector>, HostError> {
    // Read first: an interrupt that gets the number later is another vector.
    let inode = root.inode(&file)?;
    let Some(cpus) = cpus_in(root, &affinity_file(number))? else { return Ok(None) };
    Ok(Some(Vector {
        number,
        file,
        inode,
        cpus,
        effective: effective(root, number)?,
        is_fixed: is_fixed(root, &number.to_string())?,
    }))
}

/// File with the CPUs that an interrupt is set to.
#[must_use]
pub fn affinity_file(number: u32) -> PathBuf {
    PathBuf::from(format!("{IRQS}/{number}/smp_affinity_list"))
}

/// Number of the interrupt of an [`affinity_file`]; `None` for other paths.
#[must_use]
pub fn number_in(path: &str) -> Option<u32> {
    path.strip_prefix(IRQS)?.strip_prefix('/')?.strip_suffix("/smp_affinity_list")?.parse().ok()
}

/// CPUs that an interrupt is sent to now; `None` where the kernel does not tell. They follow a
/// change of the CPUs that it is set to when the interrupt comes next.
pub fn effective(root: &Root, number: u32) -> Result<Option<BTreeSet<u32>>, HostError> {
    cpus_in(root, Path::new(&format!("{IRQS}/{number}/effective_affinity_list")))
}

/// Whether the kernel lets no program move an interrupt, as those of a device's queues, whose
/// affinity it manages itself: from Linux 6.11 on their file is read-only (`register_irq_proc()`),
/// and before a write fails with `EIO`, which is not tried here. False where it does not say.
pub(crate) fn is_fixed(root: &Root, irq: &str) -> Result<bool, HostError> {
    let mode = root.mode(format!("{IRQS}/{irq}/smp_affinity_list"))?;
    if mode.is_some_and(|mode| mode & 0o222 == 0) {
        return Ok(true);
    }
    // Only kernels with CONFIG_GENERIC_IRQ_DEBUGFS have it, and only for root.
    let debug = root.read_optional(format!("/sys/kernel/debug/irq/irqs/{irq}")).ok().flatten();
    Ok(debug.is_some_and(|text| text.contains("IRQD_AFFINITY_MANAGED")))
}

/// Process of root's by the name of irqbalance, which moves interrupts every few seconds.
pub fn balancer(root: &Root) -> Result<Option<u32>, HostError> {
    for pid in process::pids(root)? {
        let name = unless_gone(process::name(root, pid))?;
        if name.as_deref() == Some("irqbalance") && unless_gone(process::user(root, pid))? == Some(ROOT) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::test_root::TestRoot;

    const PORT: &str = "/sys/devices/pci0000:00/0000:00:01.0";

    /// A virtio disk behind a port that has a vector of its own.
    fn host() -> (TestRoot, BlockDevice) {
        let root = TestRoot::new(&[]);
        fs::create_dir_all(root.at("/sys/bus/pci")).unwrap();
        fs::create_dir_all(root.at("/sys/block")).unwrap();
        let controller = format!("{PORT}/0000:01:00.0");
        root.put(&format!("{controller}/virtio1/block/vda/dev"), "254:0\n");
        for of in [PORT, &controller] {
            symlink(root.at("/sys/bus/pci"), root.at(format!("{of}/subsystem"))).unwrap();
        }
        symlink(root.at(format!("{controller}/virtio1/block/vda")), root.at("/sys/block/vda")).unwrap();
        root.put(&format!("{PORT}/msi_irqs/24"), "msi\n");
        root.put("/proc/irq/24/smp_affinity_list", "0-7\n");
        let disk = BlockDevice { name: "vda".to_owned(), dev: "254:0".to_owned(), partition: None };
        (root, disk)
    }

    #[test]
    fn vectors_are_those_of_the_nearest_controller() {
        let (root, disk) = host();
        assert_eq!(vectors(&root, &disk).unwrap().all, [], "a port's vectors are not the disk's");
        let dir = format!("{PORT}/0000:01:00.0");
        root.put(&format!("{dir}/local_cpulist"), "0-3\n");
        for number in [26, 25, 27] {
            root.put(&format!("{dir}/msi_irqs/{number}"), "msix\n");
        }
        root.put("/proc/irq/25/smp_affinity_list", "0-7\n");
        root.put("/proc/irq/25/effective_affinity_list", "2\n");
        root.put("/proc/irq/26/smp_affinity_list", "5\n");
        let fixed = root.at("/proc/irq/26/smp_affinity_list");
        fs::set_permissions(fixed, fs::Permissions::from_mode(0o444)).unwrap();
        let found = vectors(&root, &disk).unwrap();
        assert_eq!(found.local, BTreeSet::from([0, 1, 2, 3]));
        let of: Vec<_> = found.all.iter().map(|v| (v.number, v.cpus.len(), v.is_fixed)).collect();
        assert_eq!(of, [(25, 8, false), (26, 1, true)], "the last one is not in use");
        assert_eq!(found.all[0].effective, Some(BTreeSet::from([2])));
        assert_eq!(found.all[0].inode, root.inode(format!("{dir}/msi_irqs/25")).unwrap());
        root.put("/proc/irq/25/smp_affinity_list", "what\n");
        vectors(&root, &disk).unwrap_err();
        fs::remove_file(root.at("/sys/block/vda")).unwrap();
        assert!(vectors(&root, &disk).unwrap_err().is_gone());
    }

    #[test]
    fn only_roots_irqbalance_counts() {
        let (root, _) = host();
        assert_eq!(balancer(&root).unwrap(), None);
        root.put("/proc/7/comm", "irqbalance\n");
        root.put("/proc/7/status", "Uid:\t1000\t1000\t1000\t1000\n");
        assert_eq!(balancer(&root).unwrap(), None);
        root.put("/proc/7/status", "Uid:\t0\t0\t0\t0\n");
        assert_eq!(balancer(&root).unwrap(), Some(7));
    }
}
