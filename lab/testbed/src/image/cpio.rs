//! An initramfs archive: cpio's `newc` form, as
//! `Documentation/driver-api/early-userspace/buffer-format.rst` of the kernel defines it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use cpio::newc::{Builder, trailer};

use super::{ImageError, io_at};

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;

enum Node {
    Dir,
    Symlink(String),
    Data { bytes: Vec<u8>, mode: u32 },
    Host { source: PathBuf, mode: u32 },
}

/// Files of a machine: path below the root, without a leading slash. Sorted, so that each directory
/// comes before its content, and the same files always give the same bytes: owner root, time 0.
#[derive(Default)]
pub(crate) struct Tree(BTreeMap<String, Node>);

impl Tree {
    pub(crate) fn dir(&mut self, path: &str) {
        self.parents(path);
        self.0.entry(path.to_owned()).or_insert(Node::Dir);
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) {
        self.put(path, Node::Symlink(target.to_owned()));
    }

    pub(crate) fn data(&mut self, path: &str, bytes: Vec<u8>, mode: u32) {
        self.put(path, Node::Data { bytes, mode });
    }

    /// Adds a copy of the host's file `source`, which is read when the archive is written; symbolic
    /// links are followed.
    pub(crate) fn file(&mut self, path: &str, source: &Path, mode: u32) {
        self.put(path, Node::Host { source: source.to_path_buf(), mode });
    }

    pub(crate) fn contains(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    fn put(&mut self, path: &str, node: Node) {
        self.parents(path);
        self.0.insert(path.to_owned(), node);
    }

    fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            self.0.entry(path[..at].to_owned()).or_insert(Node::Dir);
        }
    }

    /// Bytes of all files; host files have their current size.
    pub(crate) fn bytes(&self) -> u64 {
        let of = |node: &Node| match node {
            Node::Data { bytes, .. } => bytes.len() as u64,
            Node::Host { source, .. } => fs::metadata(source).map_or(0, |m| m.len()),
            Node::Dir | Node::Symlink(_) => 0,
        };
        self.0.values().map(of).sum()
    }

    /// Number of files and directories.
    pub(crate) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Creates all files below the directory `root`, which exists and is empty.
    pub(crate) fn unpack(&self, root: &Path) -> Result<(), ImageError> {
        let mode_of = |mode: u32| <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(mode);
        for (name, node) in &self.0 {
            let path = root.join(name);
            match node {
                Node::Dir => fs::create_dir(&path),
                Node::Symlink(target) => std::os::unix::fs::symlink(target, &path),
                Node::Data { bytes, mode } => {
                    fs::write(&path, bytes).and_then(|()| fs::set_permissions(&path, mode_of(*mode)))
                }
                Node::Host { source, mode } => {
                    fs::copy(source, &path).and_then(|_| fs::set_permissions(&path, mode_of(*mode)))
                }
            }
            .map_err(io_at("make", &path))?;
        }
        Ok(())
    }

    /// Writes the archive to `path`.
    pub(crate) fn write(&self, path: &Path) -> Result<(), ImageError> {
        let file = File::create(path).map_err(io_at("create", path))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        for ((name, node), inode) in self.0.iter().zip(1..) {
            let entry = Builder::new(name).ino(inode).nlink(1);
            match node {
                Node::Dir => {
                    let entry = entry.nlink(2).mode(S_IFDIR | 0o755);
                    append(entry, 0, &mut io::empty(), &mut out)
                }
                Node::Symlink(target) => {
                    append(entry.mode(S_IFLNK | 0o777), target.len() as u64, &mut target.as_bytes(), &mut out)
                }
                Node::Data { bytes, mode } => {
                    append(entry.mode(S_IFREG | mode), bytes.len() as u64, &mut bytes.as_slice(), &mut out)
                }
                Node::Host { source, mode } => {
                    let mut input = File::open(source).map_err(io_at("open", source))?;
                    let size = fs::metadata(source).map_err(io_at("look at", source))?.len();
                    append(entry.mode(S_IFREG | mode), size, &mut input, &mut out)
                }
            }
            .map_err(|e| io::Error::new(e.kind(), format!("{name}: {e}")))
            .map_err(io_at("write", path))?;
        }
        trailer(out).and_then(|mut out| out.flush()).map_err(io_at("write", path))
    }
}

/// Appends one file with `size` bytes of `input`.
fn append(entry: Builder, size: u64, input: &mut dyn Read, out: &mut impl Write) -> io::Result<()> {
    let size = u32::try_from(size).map_err(|_| io::Error::other("larger than 4 GiB"))?;
    let mut entry = entry.write(out, size);
    let copied = io::copy(&mut input.take(size.into()), &mut entry)?;
    if copied != u64::from(size) {
        return Err(io::Error::other("shrank while it was read"));
    }
    entry.finish()?;
    Ok(())
}

#[cfg(test)]
#[path = "cpio_tests.rs"]
mod tests;
