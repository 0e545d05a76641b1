//! Debian's packages: the versions that apt would install, and their files, unpacked outside of the
//! system.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{ImageError, io_at, run};

/// Directory of the unpacked files below the work directory.
pub(crate) const UNPACKED: &str = "unpacked";
const NEEDS_DEBIAN: &str = "this needs Debian 12 or 13 (or another system with apt)";

/// Resolves a meta package to the kernel package that it depends on: `linux-image-cloud-amd64` to
/// `linux-image-6.1.0-56-cloud-amd64`.
pub(crate) fn resolve(meta: &str) -> Result<String, ImageError> {
    let depends = depends(meta)?;
    let real = depends.into_iter().find(|d| d.starts_with("linux-image-"));
    real.ok_or_else(|| ImageError::NoPackage { package: meta.to_owned() })
}

/// Packages with the files of the kernel of a meta package, in the order of unpacking.
///
/// Debian 12 and 13 have all in `linux-image-VERSION`; later ones have the kernel in
/// `linux-binary-VERSION`, its modules in `linux-modules-VERSION` and the list of those that are
/// built in in `linux-base-VERSION`, on which the first depends.
pub(crate) fn kernel_packages(meta: &str) -> Result<Vec<String>, ImageError> {
    with_parts(resolve(meta)?, &depends)
}

/// The package, and what it depends on of the same kernel.
fn with_parts(
    image: String,
    depends: &dyn Fn(&str) -> Result<Vec<String>, ImageError>,
) -> Result<Vec<String>, ImageError> {
    let suffix = image.strip_prefix("linux-image").unwrap_or(&image).to_owned();
    let mut parts = vec![image];
    let mut at = 0;
    while let Some(package) = parts.get(at) {
        for name in depends(package)? {
            let is_part = name.starts_with("linux-") && name.ends_with(&suffix);
            if is_part && !parts.contains(&name) {
                parts.push(name);
            }
        }
        at += 1;
    }
    Ok(parts)
}

/// Names of the packages that `package` depends on, without the virtual ones.
pub(crate) fn depends(package: &str) -> Result<Vec<String>, ImageError> {
    let text = match run(Command::new("apt-cache").args(["depends", "--important", package]), NEEDS_DEBIAN) {
        Err(ImageError::Tool { .. }) => return Err(ImageError::NoPackage { package: package.to_owned() }),
        other => other?,
    };
    Ok(parse_depends(&text))
}

/// Lines look like `  Depends: libc6`, ` |Depends: debconf`, `  PreDepends: dpkg`, `  Depends:
/// <awk>` (virtual).
fn parse_depends(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.split_once("Depends: ").map(|(_, name)| name.trim()))
        .filter(|name| !name.starts_with('<'))
        .map(|name| name.split(':').next().unwrap_or(name).to_owned())
        .collect()
}

/// The version of each package that apt would install, in the given order.
pub(crate) fn candidates(packages: &[&str]) -> Result<Vec<(String, String)>, ImageError> {
    let text = run(Command::new("apt-cache").arg("policy").args(packages), NEEDS_DEBIAN)?;
    packages
        .iter()
        .map(|package| {
            let version = parse_candidate(&text, package)
                .ok_or_else(|| ImageError::NoPackage { package: (*package).to_owned() })?;
            Ok(((*package).to_owned(), version))
        })
        .collect()
}

/// `apt-cache policy` prints `NAME:` and below it, indented, `Candidate: VERSION` or `(none)`.
fn parse_candidate(text: &str, package: &str) -> Option<String> {
    let mut lines = text.lines().skip_while(|l| l.strip_suffix(':') != Some(package));
    lines.next()?;
    lines
        .take_while(|l| l.starts_with(' '))
        .find_map(|l| l.trim().strip_prefix("Candidate: "))
        .filter(|v| *v != "(none)")
        .map(str::to_owned)
}

/// Packages unpacked over each other in one directory.
pub(crate) struct Packages<'a> {
    root: PathBuf,
    progress: &'a dyn Fn(&str),
    have: RefCell<BTreeSet<String>>,
}

impl<'a> Packages<'a> {
    pub(crate) fn new(work: &Path, progress: &'a dyn Fn(&str)) -> Packages<'a> {
        Packages { root: work.join(UNPACKED), progress, have: RefCell::default() }
    }

    /// Downloads a package and unpacks its files, unless they exist already.
    pub(crate) fn unpack(&self, package: &str, version: &str) -> Result<(), ImageError> {
        if !self.have.borrow_mut().insert(package.to_owned()) {
            return Ok(());
        }
        (self.progress)(&format!("downloading {package} {version}"));
        let dir = self.root.with_file_name("download");
        fs::create_dir_all(&dir).map_err(io_at("create", &dir))?;
        let mut download = Command::new("apt-get");
        // apt's download user cannot write here: root downloads, and the archive's signature
        // protects the file.
        download.args(["-q", "-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=2"]);
        download.args(["-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20", "download"]);
        download.arg(format!("{package}={version}")).current_dir(&dir);
        run(&mut download, NEEDS_DEBIAN).map_err(|e| match e {
            ImageError::Tool { detail, .. } => {
                ImageError::Download { package: format!("{package} {version}"), detail }
            }
            other => other,
        })?;
        let deb = fs::read_dir(&dir)
            .map_err(io_at("list", &dir))?
            .flatten()
            .map(|e| e.path())
            .find(|p| p.extension().is_some_and(|x| x == "deb"));
        let deb = deb.ok_or_else(|| ImageError::Download {
            package: format!("{package} {version}"),
            detail: "apt-get ended well but left no file".to_owned(),
        })?;
        run(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&self.root), NEEDS_DEBIAN)?;
        fs::remove_dir_all(&dir).map_err(io_at("remove", &dir))
    }

    /// The path of an unpacked file.
    pub(crate) fn find(&self, path: &str) -> Result<PathBuf, ImageError> {
        self.find_any(&[path])
    }

    /// Path of the first of these files that was unpacked.
    pub(crate) fn find_any(&self, paths: &[&str]) -> Result<PathBuf, ImageError> {
        let found = paths.iter().map(|p| self.root.join(p)).find(|p| p.exists());
        found.ok_or_else(|| {
            let path = self.root.join(paths.first().copied().unwrap_or_default());
            io_at("find in the packages", &path)(std::io::ErrorKind::NotFound.into())
        })
    }

    /// `uname -r` of the unpacked kernel, and its file: in `/boot`, or with its modules.
    pub(crate) fn kernel(&self) -> Result<(String, PathBuf), ImageError> {
        let boot = self.root.join("boot");
        for (name, path) in entries(&boot)? {
            if let Some(release) = name.strip_prefix("vmlinuz-") {
                return Ok((release.to_owned(), path));
            }
        }
        // Debian 13 ships modules below usr/lib; those after it the kernel too.
        for dir in ["lib/modules", "usr/lib/modules"] {
            for (release, path) in entries(&self.root.join(dir))? {
                let kernel = path.join("vmlinuz");
                if kernel.try_exists().map_err(io_at("look at", &kernel))? {
                    return Ok((release, kernel));
                }
            }
        }
        Err(io_at("find a kernel in", &boot)(std::io::ErrorKind::NotFound.into()))
    }

    /// Directories that hold unpacked libraries, for `LD_LIBRARY_PATH`. Ceph's libraries, which fio
    /// needs, are in a directory of their own, in their RUNPATH as an absolute path.
    pub(crate) fn library_dirs(&self) -> Vec<PathBuf> {
        ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/ceph"]
            .iter()
            .map(|d| self.root.join(d))
            .collect()
    }

    /// Unpacks the libraries that the unpacked packages depend on, one level further. False when
    /// none remain. The C library is the host's: the packages are of the host's own release.
    pub(crate) fn unpack_libraries(&self) -> Result<bool, ImageError> {
        let have: Vec<String> = self.have.borrow().iter().cloned().collect();
        let mut wanted = BTreeSet::new();
        for package in have.iter().filter(|p| !p.starts_with("linux-")) {
            let names = depends(package)?;
            wanted.extend(
                names.into_iter().filter(|n| n.starts_with("lib") && n != "libc6" && !have.contains(n)),
            );
        }
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        if names.is_empty() {
            return Ok(false);
        }
        for (package, version) in candidates(&names)? {
            self.unpack(&package, &version)?;
        }
        Ok(true)
    }
}

/// Names and paths in a directory, in order; none where there is no such directory.
fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, ImageError> {
    let found = match fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => found.map_err(io_at("list", dir))?,
    };
    let mut names = Vec::new();
    for entry in found {
        let entry = entry.map_err(io_at("list", dir))?;
        names.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
#[path = "apt_tests.rs"]
mod tests;
