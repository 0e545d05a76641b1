//! Kernel modules of an image, with their dependencies.
//!
//! The package has no `modules.dep` (depmod writes it on installation), so dependencies come from
//! depmod's own source: `depends=` in each module's `.modinfo` section.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::Packages;
use super::cpio::Tree;
use super::{ImageError, io_at, run_bytes};

/// Puts the modules and all that they depend on into `lib/modules`, and their file names into
/// `lib/modules/order`, dependencies first: `insmod` in that order works. Built-in modules are left
/// out.
pub(crate) fn add(
    tree: &mut Tree,
    packages: &Packages,
    busybox: &Path,
    names: &[&str],
) -> Result<(), ImageError> {
    let (release, _) = packages.kernel()?;
    // Debian 13 ships them below usr/lib.
    let dir =
        packages.find_any(&[&format!("lib/modules/{release}"), &format!("usr/lib/modules/{release}")])?;
    let mut set = Set { release, busybox, files: BTreeMap::new(), builtin: Vec::new(), order: Vec::new() };
    set.builtin = read_builtin(&dir)?;
    list(&dir, &mut set.files)?;
    for name in names {
        let name = canonical(name);
        if !set.may_lack(&name)? {
            set.visit(&name, 0)?;
        }
    }
    let order: String = set.order.iter().map(|(name, _)| format!("{name}.ko\n")).collect();
    tree.data("lib/modules/order", order.into_bytes(), 0o644);
    for (name, bytes) in set.order {
        tree.data(&format!("lib/modules/{name}.ko"), bytes, 0o644);
    }
    Ok(())
}

/// Module with ext4's checksum, and the name by which ext4 asks for it.
const CHECKSUM: (&str, &str) = ("crc32c_generic", "crc32c");

struct Set<'a> {
    release: String,
    busybox: &'a Path,
    files: BTreeMap<String, PathBuf>,
    builtin: Vec<String>,
    order: Vec<(String, Vec<u8>)>,
}

impl Set<'_> {
    /// Whether the kernel has no such module and needs none: [`CHECKSUM`] where ext4 does not ask
    /// for it, because the checksum is in the kernel's own library, or where ext4 is built in, as
    /// then is what it needs.
    fn may_lack(&self, name: &str) -> Result<bool, ImageError> {
        if name != CHECKSUM.0 || self.files.contains_key(name) || self.builtin.iter().any(|b| b == name) {
            return Ok(false);
        }
        if self.builtin.iter().any(|b| b == "ext4") {
            return Ok(true);
        }
        let Some(path) = self.files.get("ext4") else { return Ok(false) };
        let bytes = self.load(path)?;
        Ok(soft_depends(&bytes).is_some_and(|names| names.iter().all(|n| n != CHECKSUM.1)))
    }

    fn visit(&mut self, name: &str, depth: u32) -> Result<(), ImageError> {
        if self.builtin.iter().any(|b| b == name) || self.order.iter().any(|(n, _)| n == name) {
            return Ok(());
        }
        let missing = || ImageError::Module { module: name.to_owned(), kernel: self.release.clone() };
        // The kernel refuses circular dependencies; the limit stops a damaged package.
        let path = self.files.get(name).filter(|_| depth < 32).ok_or_else(missing)?.clone();
        let bytes = self.load(&path)?;
        let needs = depends(&bytes).ok_or_else(missing)?;
        for need in needs {
            self.visit(&need, depth + 1)?;
        }
        self.order.push((name.to_owned(), bytes));
        Ok(())
    }

    /// A module's bytes, uncompressed. Debian 13 compresses modules, which `insmod` of an old
    /// kernel cannot load.
    fn load(&self, path: &Path) -> Result<Vec<u8>, ImageError> {
        if path.extension().is_some_and(|x| x == "xz") {
            return run_bytes(Command::new(self.busybox).arg("xzcat").arg(path), "reinstall busybox-static");
        }
        fs::read(path).map_err(io_at("read", path))
    }
}

/// Module names treat `-` and `_` alike.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn module_name(file: &str) -> Option<String> {
    file.strip_suffix(".ko").or_else(|| file.strip_suffix(".ko.xz")).map(canonical)
}

fn read_builtin(dir: &Path) -> Result<Vec<String>, ImageError> {
    let path = dir.join("modules.builtin");
    let text = fs::read_to_string(&path).map_err(io_at("read", &path))?;
    Ok(text.lines().filter_map(|l| module_name(l.rsplit('/').next().unwrap_or(l))).collect())
}

fn list(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), ImageError> {
    for entry in fs::read_dir(dir).map_err(io_at("list", dir))? {
        let entry = entry.map_err(io_at("list", dir))?;
        let path = entry.path();
        if entry.file_type().map_err(io_at("look at", &path))?.is_dir() {
            list(&path, files)?;
        } else if let Some(name) = module_name(&entry.file_name().to_string_lossy()) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// Module names in `depends=` of the `.modinfo` section of an ELF64 little-endian module (elf(5));
/// `None` for any other file.
fn depends(module: &[u8]) -> Option<Vec<String>> {
    let info = section(module, b".modinfo")?;
    let field = info.split(|&b| b == 0).find_map(|f| f.strip_prefix(b"depends="))?;
    let names = String::from_utf8_lossy(field);
    Some(names.split(',').filter(|n| !n.is_empty()).map(canonical).collect())
}

/// Module names in `softdep=pre: ...` of a module, which modprobe loads before it; `None` for a
/// file that is no module.
fn soft_depends(module: &[u8]) -> Option<Vec<String>> {
    let fields = section(module, b".modinfo")?.split(|&b| b == 0);
    let soft = fields.filter_map(|field| field.strip_prefix(b"softdep="));
    let names = soft.flat_map(|field| {
        let text = String::from_utf8_lossy(field).into_owned();
        text.split_whitespace().filter(|n| !n.ends_with(':')).map(canonical).collect::<Vec<_>>()
    });
    Some(names.collect())
}

fn section<'a>(elf: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let bytes = |at: usize, n: usize| elf.get(at..at.checked_add(n)?);
    let u16_at = |at| Some(usize::from(u16::from_le_bytes(bytes(at, 2)?.try_into().ok()?)));
    let u32_at = |at| usize::try_from(u32::from_le_bytes(bytes(at, 4)?.try_into().ok()?)).ok();
    let u64_at = |at| usize::try_from(u64::from_le_bytes(bytes(at, 8)?.try_into().ok()?)).ok();
    // Magic, 64 bits, little endian.
    if bytes(0, 6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size, count, names) = (u64_at(0x28)?, u16_at(0x3a)?, u16_at(0x3c)?, u16_at(0x3e)?);
    let header = |i: usize| table.checked_add(i.checked_mul(size)?);
    // In a section header: name at 0, offset in the file at 0x18, size at 0x20.
    let body = |at: usize| bytes(u64_at(at.checked_add(0x18)?)?, u64_at(at.checked_add(0x20)?)?);
    let strings = body(header(names)?)?;
    (0..count).find_map(|i| {
        let at = header(i)?;
        let found = strings.get(u32_at(at)?..)?.split(|&b| b == 0).next()?;
        (found == name).then(|| body(at))?
    })
}

#[cfg(test)]
#[path = "modules_tests.rs"]
mod tests;
