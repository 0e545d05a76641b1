//! A file system with programs of this host and all files that they load, to measure their start in
//! a guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rtvirtio_units::Bytes;

use crate::image::cpio::Tree;
use crate::image::{ImageError, find_program, io_at, libs, run};

/// Program that makes a file system from a directory, without mounting it.
const MKFS: &str = "mkfs.ext4";
/// Sizes are multiples of this.
const STEP: u64 = 1 << 20;

/// An ext4 image without a journal, for reading only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppDisk {
    /// Path of the image.
    pub file: PathBuf,
    /// Size of the image.
    pub size: Bytes,
    /// Paths of the programs in the image.
    pub programs: Vec<PathBuf>,
    /// Bytes of the programs and all files with them.
    pub content: Bytes,
}

impl AppDisk {
    /// Makes `work/app.img` with `programs` (paths, or names in PATH), their libraries as `ldd`
    /// finds them, and `dirs` at their own paths: files that the programs load at run time, such as
    /// an interpreter's modules, with their libraries. `work` needs room for the files twice.
    ///
    /// # Errors
    /// No such program, no `mkfs.ext4`, or a file that cannot be copied.
    pub fn make(work: &Path, programs: &[&str], dirs: &[PathBuf]) -> Result<Self, ImageError> {
        let mut tree = Tree::default();
        // Mount points for the guest.
        for dir in ["dev", "proc", "tmp"] {
            tree.dir(dir);
        }
        let mut sources = Vec::new();
        for program in programs {
            let source = find(program)?;
            libs::add_program(&mut tree, &below_root(&source), &source, None)?;
            sources.push(source);
        }
        for dir in dirs {
            add_dir(&mut tree, dir)?;
        }
        let root = work.join("app");
        fs::create_dir(&root).map_err(io_at("create", &root))?;
        tree.unpack(&root)?;
        // A block and an inode for each file in addition to its bytes, and the file system's own
        // tables.
        let content = tree.bytes();
        let size = (content + content / 8 + tree.len() * 8_192 + 8 * STEP).next_multiple_of(STEP);
        let file = work.join("app.img");
        let mkfs = find_program(MKFS).unwrap_or_else(|| MKFS.into());
        let mut command = Command::new(mkfs);
        command.args(["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal", "-d"]).arg(&root).arg(&file);
        run(command.arg(format!("{}k", size >> 10)), "install e2fsprogs")?;
        fs::remove_dir_all(&root).map_err(io_at("remove", &root))?;
        Ok(Self { file, size: Bytes(size), programs: sources, content: Bytes(content) })
    }
}

/// The file of a program, links resolved.
fn find(program: &str) -> Result<PathBuf, ImageError> {
    let missing = || io_at("find", Path::new(program))(std::io::ErrorKind::NotFound.into());
    let found = if program.contains('/') { Some(PathBuf::from(program)) } else { find_program(program) };
    let source = found.ok_or_else(missing)?;
    fs::canonicalize(&source).map_err(io_at("find", &source))
}

fn below_root(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').to_owned()
}

fn add_dir(tree: &mut Tree, dir: &Path) -> Result<(), ImageError> {
    tree.dir(&below_root(dir));
    for entry in fs::read_dir(dir).map_err(io_at("list", dir))? {
        let path = entry.map_err(io_at("list", dir))?.path();
        let name = below_root(&path);
        let kind = path.symlink_metadata().map_err(io_at("look at", &path))?.file_type();
        if kind.is_symlink() {
            let target = fs::read_link(&path).map_err(io_at("read", &path))?;
            tree.symlink(&name, &target.to_string_lossy());
        } else if kind.is_dir() {
            add_dir(tree, &path)?;
        } else if path.extension().is_some_and(|x| x == "so") {
            libs::add_program(tree, &name, &path, None)?;
        } else if kind.is_file() {
            tree.file(&name, &path, 0o644);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_and_its_libraries_are_in_a_file_system() {
        let test = "a_program_and_its_libraries_are_in_a_file_system";
        if find_program(MKFS).is_none() || find_program("debugfs").is_none() {
            return rtvirtio_testkit::skip(test, "e2fsprogs is not installed");
        }
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let more = dir.path().join("more");
        fs::create_dir(&more).unwrap();
        fs::write(more.join("data"), "here").unwrap();
        std::os::unix::fs::symlink("data", more.join("link")).unwrap();
        let app = AppDisk::make(dir.path(), &["sh", "cat"], std::slice::from_ref(&more)).unwrap();
        assert_eq!(fs::metadata(&app.file).unwrap().len(), app.size.0);
        assert!(!dir.path().join("app").exists(), "the copy of the files is removed");
        let ask = |what: &str| {
            let debugfs = find_program("debugfs").unwrap();
            let out = Command::new(debugfs).args(["-R", what]).arg(&app.file).output().unwrap();
            String::from_utf8_lossy(&out.stdout).into_owned()
        };
        assert_eq!(ask(&format!("cat {}/data", more.display())), "here");
        assert!(ask(&format!("stat {}/link", more.display())).contains("symlink"));
        for program in &app.programs {
            assert!(ask(&format!("stat {}", program.display())).contains("Type: regular"));
        }
        assert!(ask("ls /lib64").contains("ld-linux"), "{}", ask("ls /lib64"));
        assert!(AppDisk::make(dir.path(), &["no-such-program"], &[]).is_err());
    }
}
