//! Directories of the scopes, and what is saved in them next to each journal: read by everyone who
//! asks what the service holds, changed by [`Scopes`](crate::scopes::Scopes) alone.

use std::path::PathBuf;

use rtvirtio_apply::JOURNAL_FILE;
use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::trusted::DATA_LIMIT;
use serde::{Deserialize, Serialize};

use crate::contracts::InForce;
use crate::dirs::{Dirs, is_there};
use crate::error::{Context as _, Error, Kind, Result};

/// The directory of all scopes, in the state directory.
const SCOPES: &str = "contracts";
/// Prefix of the directory of a VM's scope, before its name.
pub(crate) const VM: &str = "vm-";
/// Directory of the scope for several VMs together.
pub(crate) const SHARED: &str = "shared";
/// File with the contract in force, next to a VM's journal; ignored without one.
pub(crate) const IN_FORCE_FILE: &str = "contract.json";

/// Contract in force for one VM, as saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmInForce {
    pub vm: String,
    /// Identifies the contract that is carried out.
    pub contract: String,
    /// The start of the VM that it belongs to.
    pub processes: Vec<ProcessId>,
    /// CPU contract in force, if it has one.
    pub cpu: Option<InForce>,
    /// Reason for putting it in force, for the user.
    pub reason: String,
    /// Time at which it was put in force, RFC 3339.
    pub since: String,
}

/// The scopes' directory; it need not exist.
#[must_use]
pub fn dir(dirs: &Dirs) -> PathBuf {
    dirs.state.join(SCOPES)
}

/// Whether a directory of this name is the service's: others are of resources of a cluster.
pub(crate) fn is_own(name: &str) -> bool {
    name.starts_with(VM) || [SHARED, "plan"].contains(&name)
}

/// Directory of a VM's scope; it need not exist.
pub(crate) fn vm_dir(dirs: &Dirs, vm: &str) -> PathBuf {
    dir(dirs).join(format!("{VM}{vm}"))
}

/// Directory of the journal of the groups above partitions; it need not exist.
pub(crate) fn cpusets_dir(dirs: &Dirs) -> PathBuf {
    dir(dirs).join(SHARED).join("cpusets")
}

/// Entries of the scopes' directory, by name; sorted.
pub(crate) fn entries(dirs: &Dirs) -> Result<Vec<(String, PathBuf)>> {
    let dir = dir(dirs);
    let mut all = Vec::new();
    if !is_there(&dir)? {
        return Ok(all);
    }
    for entry in std::fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
        let path = entry.with_context(|| dir.display().to_string())?.path();
        all.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), path));
    }
    all.sort();
    Ok(all)
}

/// The VMs for which a journal is there, sorted.
pub fn vms(dirs: &Dirs) -> Result<Vec<String>> {
    let mut vms = Vec::new();
    for (name, path) in entries(dirs)? {
        if let Some(vm) = name.strip_prefix(VM) {
            if is_there(&path.join(JOURNAL_FILE))? {
                vms.push(vm.to_owned());
            }
        }
    }
    Ok(vms)
}

/// Contract in force for a VM; `None` without a journal.
///
/// # Errors
/// When the file beside the journal is damaged, or missing.
pub fn in_force(dirs: &Dirs, vm: &str) -> Result<Option<VmInForce>> {
    let dir = vm_dir(dirs, vm);
    if !is_there(&dir.join(JOURNAL_FILE))? {
        return Ok(None);
    }
    let path = dir.join(IN_FORCE_FILE);
    let text = rtvirtio_kernel::trusted::read_config(&path, DATA_LIMIT)
        .with_context(|| path.display().to_string())?;
    let found = serde_json::from_slice(&text)
        .map_err(|e| Error::from_source(Kind::File, e))
        .with_context(|| format!("{} is damaged: it is put back, and applied again", path.display()))?;
    Ok(Some(found))
}

/// Whether [`in_force`] has failed because the file next to a journal is missing or damaged.
/// Without it the journal can only be put back; what cannot be read now may be read the next time.
#[must_use]
pub fn is_lost(error: &Error) -> bool {
    let source = error.cause::<std::io::Error>();
    error.kind() == Kind::File || source.is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

/// Whether there is a journal of the groups above those of VMs, which several contracts share.
pub fn has_shared(dirs: &Dirs) -> Result<bool> {
    Ok(is_there(&dir(dirs).join(SHARED).join(JOURNAL_FILE))? || has_cpusets(dirs)?)
}

/// Whether there is a journal of the groups above partitions.
pub(crate) fn has_cpusets(dirs: &Dirs) -> Result<bool> {
    is_there(&cpusets_dir(dirs).join(JOURNAL_FILE))
}

/// Whether a scope has a journal.
pub fn any_in_force(dirs: &Dirs) -> Result<bool> {
    let shared = has_shared(dirs)?;
    Ok(!vms(dirs)?.is_empty() || shared || is_there(&dirs.held_plan().join(JOURNAL_FILE))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_directory_nothing_is_in_force() {
        let (_dir, dirs) = crate::fixtures::dirs();
        assert_eq!(vms(&dirs).unwrap(), Vec::<String>::new());
        assert_eq!(in_force(&dirs, "plc").unwrap(), None);
        assert!(!any_in_force(&dirs).unwrap());
        std::fs::create_dir_all(vm_dir(&dirs, "plc")).unwrap();
        assert!(!any_in_force(&dirs).unwrap(), "a directory without a journal");
        std::fs::write(vm_dir(&dirs, "plc").join(JOURNAL_FILE), "{}").unwrap();
        assert_eq!(vms(&dirs).unwrap(), ["plc"]);
        assert!(in_force(&dirs, "plc").is_err(), "a journal without its file is not the same as none");
    }
}
