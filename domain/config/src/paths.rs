//! The paths in a file, and their collisions.

use std::path::{Path, PathBuf};

use crate::error::FileError;
use crate::schema::File;

/// A path of the file, with its name for errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPath {
    /// Key and disk, such as `socket of disk "a"`.
    pub what: String,
    /// The path as written in the file.
    pub path: PathBuf,
    /// Whether it is a disk's backing: several disks may be parts of one file.
    is_backing: bool,
}

impl NamedPath {
    /// Whether these two may lead to the same file.
    #[must_use]
    pub fn may_share_with(&self, other: &Self) -> bool {
        self.is_backing && other.is_backing
    }
}

impl File {
    /// All paths in the file, and the path of the file itself.
    #[must_use]
    pub fn paths(&self, config: &Path) -> Vec<NamedPath> {
        let named =
            |what: String, path: &Path, is_backing| NamedPath { what, path: path.to_owned(), is_backing };
        let mut paths = vec![
            named("the configuration file".into(), config, false),
            named("`control`".into(), &self.control, false),
        ];
        for disk in self.devices.iter().flat_map(|d| &d.disks) {
            let what = |key: &str| format!("`{key}` of disk \"{}\"", disk.name);
            paths.push(named(what("socket"), &disk.socket, false));
            paths.push(named(what("path"), &disk.path, true));
        }
        for port in self.networks.iter().flat_map(|n| &n.ports) {
            paths.push(named(format!("`socket` of port \"{}\"", port.name), &port.socket, false));
        }
        paths
    }

    /// Refuses two equal paths. They are compared as text, absolute and without `.` and `..`.
    pub(crate) fn refuse_collisions(&self, config: &Path) -> Result<(), FileError> {
        let paths = self.paths(config);
        let normal: Vec<PathBuf> = paths.iter().map(|p| normalize(&p.path)).collect();
        for (i, first) in paths.iter().enumerate() {
            for (j, second) in paths.iter().enumerate().skip(i + 1) {
                if normal[i] == normal[j] && !first.may_share_with(second) {
                    return Err(FileError::Collision {
                        first: first.what.clone(),
                        second: second.what.clone(),
                        path: normal[i].clone(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// The directory of a path; `.` for a bare name.
#[must_use]
pub fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn normalize(path: &Path) -> PathBuf {
    // Without a current directory a path stays relative, and is compared as such.
    path_clean::clean(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()))
}
