//! `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::path::PathBuf;

use crate::{HostError, Root};

/// Line of `mountinfo`, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device number `MAJ:MIN` of the file system.
    pub dev: String,
    /// Directory of that file system that is mounted; not `/` inside a container or for a bind
    /// mount.
    pub root: PathBuf,
    /// Mount point as seen by this process.
    pub point: PathBuf,
    /// Type, such as `cgroup2`.
    pub fs: String,
    /// Source, such as `/dev/sda1`.
    pub source: String,
    /// Options of the file system, such as `blkio`.
    pub options: Vec<String>,
}

/// All mounts that this process sees.
pub fn mounts(root: &Root) -> Result<Vec<Mount>, HostError> {
    const PATH: &str = "/proc/self/mountinfo";
    // A mount point need not be UTF-8.
    let bytes =
        std::fs::read(root.at(PATH)).map_err(|source| HostError::Read { path: PATH.into(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    text.lines()
        .map(|line| {
            parse(line).ok_or_else(|| HostError::Form {
                path: PATH.into(),
                text: line.to_owned(),
                expected: "a mountinfo line",
            })
        })
        .collect()
}

fn parse(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(2);
    let (dev, root, point) = (left.next()?, left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (fs, source) = (right.next()?, right.next()?);
    let options = right.next().unwrap_or("");
    Some(Mount {
        dev: dev.to_owned(),
        root: unescape(root).into(),
        point: unescape(point).into(),
        fs: fs.to_owned(),
        source: unescape(source),
        options: options.split(',').map(str::to_owned).collect(),
    })
}

/// Undoes the octal escapes (`\040` for a space) that the kernel uses in paths.
pub(crate) fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|d| std::str::from_utf8(d).ok()).map(|d| u8::from_str_radix(d, 8));
        match (first, octal) {
            (b'\\', Some(Ok(byte))) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests;
