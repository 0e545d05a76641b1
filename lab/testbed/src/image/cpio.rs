//! An initramfs archive: cpio's `newc` form, as
//! `Documentation/driver-api/early-userspace/buffer-format.rst` of the kernel defines it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

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
        let mut out = Archive { out: BufWriter::with_capacity(1 << 20, file), inode: 0 };
        for (name, node) in &self.0 {
            match node {
                Node::Dir => out.entry(name, S_IFDIR | 0o755, 0, &mut io::empty()),
                Node::Symlink(target) => out.bytes(name, S_IFLNK | 0o777, target.as_bytes()),
                Node::Data { bytes, mode } => out.bytes(name, S_IFREG | mode, bytes),
                Node::Host { source, mode } => {
                    let mut input = File::open(source).map_err(io_at("open", source))?;
                    let size = fs::metadata(source).map_err(io_at("look at", source))?.len();
                    out.entry(name, S_IFREG | mode, size, &mut input)
                }
            }
            .map_err(io_at("write", path))?;
        }
        out.entry("TRAILER!!!", 0, 0, &mut io::empty()).map_err(io_at("write", path))?;
        out.out.flush().map_err(io_at("write", path))
    }
}

struct Archive<W: Write> {
    out: W,
    inode: u32,
}

impl<W: Write> Archive<W> {
    fn bytes(&mut self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.entry(name, mode, bytes.len() as u64, &mut &*bytes)
    }

    fn entry(&mut self, name: &str, mode: u32, size: u64, input: &mut dyn Read) -> io::Result<()> {
        let size =
            u32::try_from(size).map_err(|_| io::Error::other(format!("{name} is larger than 4 GiB")))?;
        self.inode += 1;
        let links = if mode & S_IFDIR != 0 && mode & S_IFREG == 0 { 2 } else { 1 };
        // ino, mode, uid, gid, nlink, mtime, filesize, maj, min, rmaj, rmin, namesize with its
        // zero, check.
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08x}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        // Name and data each end on a multiple of four; the header has 110 bytes.
        self.pad(110 + name.len() as u64 + 1)?;
        let copied = io::copy(&mut input.take(u64::from(size)), &mut self.out)?;
        if copied != u64::from(size) {
            return Err(io::Error::other(format!("{name} shrank while it was read")));
        }
        self.pad(u64::from(size))
    }

    fn pad(&mut self, written: u64) -> io::Result<()> {
        let rest = (4 - written % 4) % 4;
        self.out.write_all(&[0; 3][..rest as usize])
    }
}

#[cfg(test)]
#[path = "cpio_tests.rs"]
mod tests;
