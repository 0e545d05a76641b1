//! The disks of a configuration: locked, opened, and refused where they overlap or are images.

use std::path::Path;
use std::time::Duration;

use rtvirtio_domain_config::{Disk, File};

use crate::backing::{Backing, BackingConfig, BackingError};
use crate::disk_lock::{DiskLock, DiskUse, Identity, LOCK_TIMEOUT, identity};
use crate::error::OpenError;

/// Takes the locks of files. Those that the process `running` holds are left to it.
pub fn take_locks(running: Option<u32>) -> impl Fn(&Path, DiskUse) -> Result<DiskLock, BackingError> {
    let timeout = if running.is_some() { Duration::ZERO } else { LOCK_TIMEOUT };
    move |path, wanted| match (DiskLock::acquire(path, wanted, timeout), running) {
        (Err(BackingError::InUse { processes, .. }), Some(pid))
            if processes.iter().all(|p| *p == pid) && !processes.is_empty() =>
        {
            DiskLock::open_unlocked(path)
        }
        (done, _) => done,
    }
}

/// The open and locked disks of a configuration.
#[derive(Debug)]
pub struct OpenedDisks {
    /// Open disks of each device.
    pub backings: Vec<Vec<Backing>>,
    /// Locks, one for each file and device.
    pub locks: Vec<DiskLock>,
}

impl OpenedDisks {
    /// Locks and opens all disks; refuses overlaps, and image formats of the disks that `checked`
    /// accepts. A start, `--check`, a dry run and an attach all come through here.
    pub fn open(
        file: &File,
        take: impl Fn(&Path, DiskUse) -> Result<DiskLock, BackingError>,
        checked: impl Fn(&Disk) -> bool,
    ) -> Result<Self, OpenError> {
        let locks = lock_files(file, take)?;
        let backings = open_backings(file, &locks, &checked)?;
        Ok(Self { backings, locks })
    }
}

/// Locks each file and device once, whatever the number of its disks.
fn lock_files(
    file: &File,
    take: impl Fn(&Path, DiskUse) -> Result<DiskLock, BackingError>,
) -> Result<Vec<DiskLock>, OpenError> {
    let mut by_identity: Vec<(Identity, Vec<&Disk>)> = Vec::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks) {
        let meta = std::fs::metadata(&disk.path).map_err(|source| OpenError::Disk {
            disk: disk.name.clone(),
            source: BackingError::Io { path: disk.path.clone(), what: "cannot open", source },
        })?;
        let identity = identity(&meta);
        match by_identity.iter_mut().find(|(known, _)| *known == identity) {
            Some((_, disks)) => disks.push(disk),
            None => by_identity.push((identity, vec![disk])),
        }
    }
    let lock = |(_, disks): (Identity, Vec<&Disk>)| {
        let wanted = DiskUse {
            read_only: disks.iter().all(|d| d.read_only),
            shared: disks.iter().all(|d| d.allows_other_writers()),
        };
        take(&disks[0].path, wanted).map_err(|source| OpenError::Disk { disk: disks[0].name.clone(), source })
    };
    by_identity.into_iter().map(lock).collect()
}

/// Opens all disks; refuses other image formats and overlaps.
fn open_backings(
    file: &File,
    locks: &[DiskLock],
    checked: &impl Fn(&Disk) -> bool,
) -> Result<Vec<Vec<Backing>>, OpenError> {
    let mut backings: Vec<Vec<Backing>> = Vec::new();
    for device in &file.devices {
        let open = |disk: &Disk| {
            open_locked(disk, locks, checked(disk))
                .map_err(|source| OpenError::Disk { disk: disk.name.clone(), source })
        };
        backings.push(device.disks.iter().map(open).collect::<Result<_, _>>()?);
    }
    refuse_overlaps(file, &backings)?;
    for lock in locks {
        refuse_formats(file, &backings, lock, checked)?;
    }
    Ok(backings)
}

fn open_locked(disk: &Disk, locks: &[DiskLock], checked: bool) -> Result<Backing, BackingError> {
    let io = |source| BackingError::Io { path: disk.path.clone(), what: "cannot open", source };
    let there = identity(&std::fs::metadata(&disk.path).map_err(io)?);
    let lock = locks.iter().find(|lock| lock.identity == there);
    let lock = lock.ok_or_else(|| BackingError::Replaced { path: disk.path.clone() })?;
    // Checked before the size, which is the container's.
    if checked && disk.format.is_none() {
        lock.refuse_format(disk.offset.0, None)?;
    }
    let mut backing = Backing::open_locked(&BackingConfig::from(disk), lock)?;
    backing.limits.discard &= disk.discard;
    Ok(backing)
}

/// Checks the start and the end of a file for image formats, for its first and last disk. Disks
/// with `format = "raw"` are not checked: their guests may write any bytes, and no other disk of
/// the file is refused for it.
fn refuse_formats(
    file: &File,
    backings: &[Vec<Backing>],
    lock: &DiskLock,
    checked: impl Fn(&Disk) -> bool,
) -> Result<(), OpenError> {
    let disks = file.devices.iter().flat_map(|d| &d.disks).zip(backings.iter().flatten());
    let on_it: Vec<(&Disk, &Backing)> = disks.filter(|(_, b)| b.identity == lock.identity).collect();
    let first = on_it.iter().map(|(_, b)| b.start).min();
    let last = on_it.iter().map(|(_, b)| b.start + b.limits.size).max();
    for (disk, backing) in on_it.iter().filter(|(disk, _)| checked(disk) && disk.format.is_none()) {
        let failed = |source| OpenError::Disk { disk: disk.name.clone(), source };
        let end = lock.len().map_err(failed)?;
        let is_last = last == Some(backing.start + backing.limits.size);
        lock.refuse_format(backing.start, is_last.then_some(end)).map_err(failed)?;
        if first == Some(backing.start) && backing.start > 0 {
            lock.refuse_format(0, None).map_err(failed)?;
        }
    }
    Ok(())
}

fn refuse_overlaps(file: &File, backings: &[Vec<Backing>]) -> Result<(), OpenError> {
    let named = || {
        let disks = file.devices.iter().flat_map(|d| &d.disks);
        disks.zip(backings.iter().flatten()).enumerate()
    };
    for (i, (first, a)) in named() {
        for (_, (second, b)) in named().skip(i + 1) {
            let meant = (first.shared && second.shared) || (first.migrate && second.migrate);
            if a.overlaps(b) && !meant && !(a.limits.read_only && b.limits.read_only) {
                return Err(OpenError::Overlap { first: first.name.clone(), second: second.name.clone() });
            }
        }
    }
    Ok(())
}
