//! Programs with the shared libraries that they load.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::Packages;
use super::cpio::Tree;
use super::{ImageError, run};

/// Directory of libraries in an image: the first one that Debian's dynamic linker searches.
const LIB_DIR: &str = "lib/x86_64-linux-gnu";

/// `ldd`'s output for one program.
#[derive(Debug, Default, PartialEq, Eq)]
struct Linked {
    /// Libraries, and the dynamic linker by its own absolute path.
    found: Vec<PathBuf>,
    missing: Vec<String>,
}

/// Adds the program `source` as `path`, with its libraries. Libraries that the host lacks come from
/// the packages that the unpacked ones depend on, if `packages` is given.
pub(crate) fn add_program(
    tree: &mut Tree,
    path: &str,
    source: &Path,
    packages: Option<&Packages>,
) -> Result<(), ImageError> {
    tree.file(path, source, 0o755);
    let mut linked = ldd(source, packages)?;
    if let Some(packages) = packages {
        while !linked.missing.is_empty() && packages.unpack_libraries()? {
            linked = ldd(source, Some(packages))?;
        }
    }
    if !linked.missing.is_empty() {
        let libraries = linked.missing.join(", ");
        return Err(ImageError::Library { binary: source.to_path_buf(), libraries });
    }
    for library in linked.found {
        add_library(tree, &library);
    }
    Ok(())
}

fn add_library(tree: &mut Tree, library: &Path) {
    let Some(name) = library.file_name().map(|n| n.to_string_lossy().into_owned()) else { return };
    // The dynamic linker's path is written into every program.
    let path =
        if name.starts_with("ld-linux") { format!("lib64/{name}") } else { format!("{LIB_DIR}/{name}") };
    if !tree.contains(&path) {
        tree.file(&path, library, 0o755);
    }
}

fn ldd(program: &Path, packages: Option<&Packages>) -> Result<Linked, ImageError> {
    let mut command = Command::new("ldd");
    command.arg(program);
    if let Some(packages) = packages {
        let dirs: Vec<_> = packages.library_dirs().iter().map(|d| d.display().to_string()).collect();
        command.env("LD_LIBRARY_PATH", dirs.join(":"));
    }
    run(&mut command, "install libc-bin").map(|text| parse_ldd(&text))
}

/// Lines: `libz.so.1 => /lib/libz.so.1 (0x..)`, `libx.so => not found`,
/// `/lib64/ld-linux-x86-64.so.2 (0x..)`, `linux-vdso.so.1 (0x..)`, `statically linked`.
fn parse_ldd(text: &str) -> Linked {
    let mut linked = Linked::default();
    for line in text.lines().map(str::trim) {
        let place = match line.split_once(" => ") {
            Some((name, "not found")) => {
                if !linked.missing.iter().any(|m| m == name) {
                    linked.missing.push(name.to_owned());
                }
                continue;
            }
            Some((_, place)) => place,
            None => line,
        };
        let path = place.split(" (").next().unwrap_or(place);
        if path.starts_with('/') {
            linked.found.push(PathBuf::from(path));
        }
    }
    linked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_line() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \tliburing.so.2 => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let linked = parse_ldd(text);
        let found = ["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(linked, Linked { found: found.to_vec(), missing: vec!["liburing.so.2".into()] });
        assert_eq!(parse_ldd("\tstatically linked\n"), Linked::default());
    }
}
