//! The cluster file, the same on every node.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted::{CONFIG_LIMIT, read_config_text};
use rtvirtio_spec::{HostSpec, is_name_char};
use serde::Deserialize;

use crate::PacemakerError;
use crate::node::has_directory;

/// The contracts of a cluster, as in the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Contracts, each with the resource of its VM.
    pub contract: Vec<ClusterEntry>,
}

/// A `[[contract]]` of the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterEntry {
    /// Name of the VM's resource in the CIB, such as that of a `VirtualDomain`.
    pub resource: String,
    /// The spec with the VM, of this file's directory where it is relative.
    pub spec: PathBuf,
    /// The higher, the earlier Pacemaker places it, and the later it is stopped for others; by the
    /// highest criticality of the spec's VMs where it is not given.
    #[serde(default)]
    pub priority: Option<i32>,
}

/// A contract with its spec.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterContract {
    /// Name of the VM's resource.
    pub resource: String,
    /// Absolute path of the spec.
    pub spec_file: PathBuf,
    /// Spec as loaded from it.
    pub spec: HostSpec,
    /// Pacemaker's priority for the resource.
    pub priority: i32,
}

/// Reads a cluster file and its specs.
///
/// # Errors
/// First file that cannot be read, or first invalid entry.
pub fn load(path: &Path) -> Result<Vec<ClusterContract>, PacemakerError> {
    let bad = |message: String| PacemakerError::File { path: path.to_owned(), message };
    let text = read_config_text(path, CONFIG_LIMIT).map_err(|e| bad(format!("it cannot be read: {e}")))?;
    let file: ClusterFile = toml::from_str(&text).map_err(|e| bad(e.to_string().trim_end().to_owned()))?;
    let dir = directory_of(path).map_err(|e| bad(e.to_string()))?;
    let mut names = BTreeSet::new();
    file.contract
        .into_iter()
        .map(|entry| {
            if !is_resource(&entry.resource) {
                return Err(bad(format!(
                    "resource {:?}: a name is 1 to 64 letters, digits, `-`, `_` and `.`, a letter or `_` first",
                    entry.resource
                )));
            }
            if !has_directory(&entry.resource) {
                return Err(bad(format!(
                    "resource {}: `shared`, `plan` and what begins with `vm-` name journals of rtvirtiod; give the resource another name",
                    entry.resource
                )));
            }
            if !names.insert(entry.resource.clone()) {
                return Err(bad(format!(
                    "resource {} has two contracts: put its VMs into one spec",
                    entry.resource
                )));
            }
            let spec_file = dir.join(&entry.spec);
            let spec = rtvirtio_files::load_spec(&spec_file)?;
            let by_criticality = || spec.vms().iter().map(|vm| vm.criticality.priority()).max().unwrap_or(0);
            let priority = entry.priority.unwrap_or_else(by_criticality);
            Ok(ClusterContract { resource: entry.resource, spec_file, spec, priority })
        })
        .collect()
}

/// Whether the name is valid in ids and attribute names of the CIB.
fn is_resource(name: &str) -> bool {
    let first = name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    first && name.len() <= 64 && name.chars().all(is_name_char)
}

/// Directory of a file. The parent of a bare name such as `site.toml` is empty, and no path.
fn directory_of(file: &Path) -> io::Result<PathBuf> {
    let file = std::path::absolute(file)?;
    Ok(file.parent().unwrap_or(Path::new("/")).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_name_lies_in_the_working_directory() {
        let here = std::env::current_dir().unwrap();
        for (file, dir) in
            [("site.toml", here.clone()), ("./site.toml", here.clone()), ("a/b", here.join("a"))]
        {
            assert_eq!(directory_of(Path::new(file)).unwrap(), dir, "{file}");
        }
        assert_eq!(directory_of(Path::new("/etc/site.toml")).unwrap(), Path::new("/etc"));
    }
}
