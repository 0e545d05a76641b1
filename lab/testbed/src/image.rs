//! The guest's kernel and initramfs, made from Debian's own packages on the user's machine.
//!
//! Nothing of it is shipped with rtvirtio: the packages are found with apt, unpacked outside of the
//! system (never installed), and the parts that a guest needs go into one initramfs: busybox, fio,
//! cyclictest, the QEMU guest agent, their libraries, and the kernel modules for virtio and the I/O
//! schedulers. A guest therefore needs no root disk: its only disk is the one under test.
//!
//! The initramfs is not compressed. Under TCG unpacking is the guest's own work on an emulated CPU,
//! and costs more than copying the bytes; see `docs/explanation/laboratory.md` for the measured
//! times.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rtvirtio_units::Bytes;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

pub(crate) mod apt;
pub(crate) mod cpio;
pub(crate) mod libs;
pub(crate) mod modules;
#[cfg(test)]
mod tests;

use apt::Packages;
use cpio::Tree;

pub use rtvirtio_spec::Kernel;

/// Debian's meta package of a kernel. The standard one is the cloud kernel: small, and made for
/// virtio. PREEMPT_RT exists only as the full kernel, of the same release and version.
pub(crate) fn kernel_package(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::Standard => "linux-image-cloud-amd64",
        Kernel::Rt => "linux-image-rt-amd64",
    }
}

/// Prefix of the names of directories that hold images of this kind and kernel. No prefix begins
/// with another.
pub(crate) fn kind_name(kind: &str, kernel: Kernel) -> String {
    match kernel {
        Kernel::Standard => kind.to_owned(),
        Kernel::Rt => format!("rt-{kind}"),
    }
}

/// The script of the guest's first process.
const INIT: &str = include_str!("image/guest-init.sh");
/// Modules of a guest. Those that the kernel has built in are left out. ext4 of
/// Linux before 6.14 asks for its checksum by name, not by dependency.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
    "bfq",
    "mq_deadline",
    "kyber_iosched",
    "crc32c_generic",
    "ext4",
];
/// Required space in bytes; packages and image take 450 MB, with the PREEMPT_RT kernel 500.
const ROOM: u64 = 700 << 20;
/// Version of the build: a change makes another image from the same packages.
const FORMAT: u32 = 3;
/// Environment variable that names the directory of an image to use as it is; one with PREEMPT_RT
/// is in its subdirectory [`PREBUILT_RT`].
const PREBUILT: &str = "RTVIRTIO_GUEST_IMAGE";
const PREBUILT_RT: &str = "rt";
/// Age from which images of other packages are removed when a new one has been built.
const OLD_AGE: Duration = Duration::from_secs(7 * 24 * 3600);
/// The last file of an image to be written: an image without it is incomplete.
const MANIFEST: &str = "image.json";

/// A kernel and an initramfs that boot to an answering guest agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestImage {
    /// Path of the kernel (bzImage).
    pub kernel: PathBuf,
    /// Path of the initramfs.
    pub initrd: PathBuf,
    /// Release of the kernel, such as `6.1.0-56-cloud-amd64`.
    pub release: String,
}

impl GuestImage {
    /// Path of the file that makes the image complete and contains its release.
    pub(crate) fn manifest(&self) -> PathBuf {
        self.initrd.with_file_name(MANIFEST)
    }

    /// Memory that a guest needs to boot the image and run fio: the initramfs, the same once more
    /// unpacked, and 192 MiB for the kernel and the programs, in steps of 64 MiB. (An initramfs of
    /// 87 MiB did not boot in 288 MiB, and did in 320.)
    #[must_use]
    pub fn memory(&self) -> Bytes {
        const STEP: u64 = 64 << 20;
        // Without the file QEMU reports that it cannot boot.
        let initrd = fs::metadata(&self.initrd).map_or(0, |m| m.len());
        Bytes((2 * initrd + (192 << 20)).next_multiple_of(STEP))
    }
}

/// Reasons for which there is no guest image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Only x86-64 guests are built.
    #[error("guest images are built for x86_64 only, this is {0}")]
    Architecture(&'static str),
    /// A program of the host is missing.
    #[error("cannot run {tool}: {source}; the guest image is made with it: {remedy}")]
    NoTool {
        tool: String,
        /// Package to install or reinstall.
        remedy: &'static str,
        source: io::Error,
    },
    /// apt does not know a package.
    #[error(
        "apt knows no package {package}: run `apt-get update`; it is in Debian 12 and 13, component main"
    )]
    NoPackage { package: String },
    /// A package could not be downloaded.
    #[error("cannot download {package}: {detail}; check the network, and run `apt-get update`")]
    Download { package: String, detail: String },
    /// A program of the host failed.
    #[error("{command} failed: {detail}")]
    Tool {
        command: String,
        /// Error output, in one line.
        detail: String,
    },
    /// A kernel module is neither in the package nor built in.
    #[error("kernel package {kernel} has no module {module}, which a guest needs")]
    Module { module: String, kernel: String },
    /// A library was not found on the host nor in the packages that a program depends on.
    #[error(
        "{binary} needs {libraries}, which no package it depends on has; install fio and qemu-system-x86 on this host"
    )]
    Library {
        binary: PathBuf,
        /// Missing libraries, separated by commas.
        libraries: String,
    },
    /// The cache directory has too little free space.
    #[error(
        "no room in {path:?} for the guest image: {free_mib} MiB free, {needed_mib} MiB needed; make room or choose another cache directory"
    )]
    NoSpace { path: PathBuf, free_mib: u64, needed_mib: u64 },
    /// A file could not be read or written.
    #[error("cannot {operation} {path:?}: {source}")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

/// Adds operation and path to an I/O error.
pub(crate) fn io_at<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> ImageError + 'a {
    move |source| ImageError::Io { operation, path: path.to_path_buf(), source }
}

/// Default directory of images: `$RTVIRTIO_CACHE_DIR`, as for the programs, else
/// `/var/cache/rtvirtio` for root and `~/.cache/rtvirtio` for others.
#[must_use]
pub fn default_cache() -> PathBuf {
    if let Some(dir) = std::env::var_os("RTVIRTIO_CACHE_DIR") {
        return PathBuf::from(dir);
    }
    match std::env::var_os("HOME") {
        Some(home) if !rustix::process::geteuid().is_root() => PathBuf::from(home).join(".cache/rtvirtio"),
        _ => PathBuf::from("/var/cache/rtvirtio"),
    }
}

/// Makes or finds the image of [`ensure_kernel`] with the standard kernel.
///
/// # Errors
/// See [`ImageError`]; each has a remedy.
pub fn ensure(cache: &Path, progress: &dyn Fn(&str)) -> Result<GuestImage, ImageError> {
    ensure_kernel(cache, Kernel::Standard, progress)
}

/// Makes the guest image with this kernel below `cache`, or finds the one made before from the same
/// packages. Each kernel is downloaded at its first use.
///
/// If `$RTVIRTIO_GUEST_IMAGE` names a directory of an image made before (`vmlinuz`, `initrd.cpio`,
/// `image.json`), that image is used: for a host without a package archive. One with PREEMPT_RT is
/// expected in its subdirectory `rt`.
///
/// `progress` receives one short line before each step that takes time. Of two processes at once
/// the second waits. An image appears complete or not at all.
///
/// # Errors
/// See [`ImageError`]; each has a remedy.
pub fn ensure_kernel(
    cache: &Path,
    kernel: Kernel,
    progress: &dyn Fn(&str),
) -> Result<GuestImage, ImageError> {
    if std::env::consts::ARCH != "x86_64" {
        return Err(ImageError::Architecture(std::env::consts::ARCH));
    }
    if let Some(dir) = std::env::var_os(PREBUILT) {
        let dir = match kernel {
            Kernel::Standard => PathBuf::from(dir),
            Kernel::Rt => PathBuf::from(dir).join(PREBUILT_RT),
        };
        return load(&dir)
            .ok_or_else(|| io_at("use the guest image in", &dir)(io::ErrorKind::NotFound.into()));
    }
    let host_fio = find_program("fio");
    let kernel_packages = apt::kernel_packages(kernel_package(kernel))?;
    let mut package_names: Vec<&str> = kernel_packages.iter().map(String::as_str).collect();
    package_names.extend(["busybox-static", "qemu-guest-agent", "rt-tests"]);
    if host_fio.is_none() {
        package_names.push("fio");
    }
    let versions = apt::candidates(&package_names)?;
    let mut key = Key::new(FORMAT);
    key.add(INIT);
    for (package, version) in &versions {
        key.add(&format!("{package}={version}"));
    }
    if let Some(fio) = &host_fio {
        key.add(&stamp(fio)?);
    }
    build_once(cache, &kind_name("guest", kernel), &key, progress, &mut |work| {
        let packages = Packages::new(work, progress);
        for (package, version) in &versions {
            packages.unpack(package, version)?;
        }
        let tree = guest_tree(&packages, host_fio.as_deref(), MODULES, INIT.as_bytes())?;
        finish(work, &packages, &tree, progress)
    })
}

/// The files of a machine that can run fio and the guest agent.
fn guest_tree(
    packages: &Packages,
    host_fio: Option<&Path>,
    module_names: &[&str],
    init: &[u8],
) -> Result<Tree, ImageError> {
    let mut tree = base_tree(packages, module_names, init)?;
    let fio = match host_fio {
        Some(path) => path.to_path_buf(),
        None => packages.find("usr/bin/fio")?,
    };
    libs::add_program(&mut tree, "usr/bin/fio", &fio, Some(packages))?;
    let cyclictest = packages.find_any(&["usr/bin/cyclictest", "usr/sbin/cyclictest"])?;
    libs::add_program(&mut tree, "usr/bin/cyclictest", &cyclictest, Some(packages))?;
    libs::add_program(&mut tree, "usr/bin/qemu-ga", &packages.find("usr/sbin/qemu-ga")?, Some(packages))?;
    Ok(tree)
}

/// The files of a machine that can boot to a shell: busybox, modules, and `init` as its first
/// process.
pub(crate) fn base_tree(packages: &Packages, module_names: &[&str], init: &[u8]) -> Result<Tree, ImageError> {
    let mut tree = Tree::default();
    for dir in ["proc", "sys", "dev", "run", "tmp", "root", "etc", "usr/bin", "sbin", "var"] {
        tree.dir(dir);
    }
    tree.symlink("var/run", "/run");
    tree.data("init", init.to_vec(), 0o755);
    let busybox = packages.find_any(&["bin/busybox", "usr/bin/busybox"])?;
    tree.file("bin/busybox", &busybox, 0o755);
    for applet in run(Command::new(&busybox).arg("--list"), "reinstall busybox-static")?.lines() {
        if applet != "busybox" {
            tree.symlink(&format!("bin/{applet}"), "busybox");
        }
    }
    modules::add(&mut tree, packages, &busybox, module_names)?;
    Ok(tree)
}

/// Writes kernel, initramfs and manifest into `work`.
pub(crate) fn finish(
    work: &Path,
    packages: &Packages,
    tree: &Tree,
    progress: &dyn Fn(&str),
) -> Result<String, ImageError> {
    let (release, vmlinuz) = packages.kernel()?;
    progress(&format!("writing the initramfs for {release}"));
    fs::copy(&vmlinuz, work.join("vmlinuz")).map_err(io_at("copy", &vmlinuz))?;
    tree.write(&work.join("initrd.cpio"))?;
    Ok(release)
}

/// Runs `build` in a new directory below `cache` unless the image of this kind and key exists, and
/// renames it into place.
pub(crate) fn build_once(
    cache: &Path,
    kind: &str,
    key: &Key,
    progress: &dyn Fn(&str),
    build: &mut dyn FnMut(&Path) -> Result<String, ImageError>,
) -> Result<GuestImage, ImageError> {
    fs::create_dir_all(cache).map_err(io_at("create", cache))?;
    let target = cache.join(format!("{kind}-{}", key.hex()));
    if let Some(image) = load(&target) {
        return Ok(image);
    }
    let lock_path = cache.join("lock");
    let lock = fs::File::create(&lock_path).map_err(io_at("create", &lock_path))?;
    if rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockExclusive).is_err() {
        progress("waiting for another rtvirtio that builds the guest image");
        rustix::fs::flock(lock.as_fd(), FlockOperation::LockExclusive)
            .map_err(|e| io_at("lock", &lock_path)(e.into()))?;
    }
    if let Some(image) = load(&target) {
        return Ok(image);
    }
    // No other process builds now, so existing work directories are those of a killed build.
    remove_leftovers(cache)?;
    let stat = rustix::fs::statvfs(cache).map_err(|e| io_at("look at", cache)(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < ROOM {
        let (free_mib, needed_mib) = (free >> 20, ROOM >> 20);
        return Err(ImageError::NoSpace { path: cache.to_path_buf(), free_mib, needed_mib });
    }
    let work = tempfile::Builder::new()
        .prefix(WORK_PREFIX)
        .tempdir_in(cache)
        .map_err(io_at("make a directory in", cache))?;
    let release = build(work.path())?;
    // The unpacked packages, several hundred MB, are not needed again.
    let unpacked = work.path().join(apt::UNPACKED);
    fs::remove_dir_all(&unpacked).map_err(io_at("remove", &unpacked))?;
    let manifest = work.path().join(MANIFEST);
    fs::write(&manifest, format!("{{\"release\":{release:?}}}\n")).map_err(io_at("write", &manifest))?;
    for file in ["vmlinuz", "initrd.cpio", MANIFEST] {
        let path = work.path().join(file);
        fs::File::open(&path).and_then(|f| f.sync_all()).map_err(io_at("flush", &path))?;
    }
    if target.exists() {
        fs::remove_dir_all(&target).map_err(io_at("remove", &target))?;
    }
    let work = work.keep();
    fs::rename(&work, &target).map_err(io_at("rename", &work))?;
    let readable = <fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    fs::set_permissions(&target, readable).map_err(io_at("chmod", &target))?;
    remove_old(cache, kind, &target);
    load(&target).ok_or_else(|| io_at("read back", &target)(io::ErrorKind::InvalidData.into()))
}

const WORK_PREFIX: &str = "build-";

fn remove_leftovers(cache: &Path) -> Result<(), ImageError> {
    for entry in fs::read_dir(cache).map_err(io_at("list", cache))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(WORK_PREFIX) {
            fs::remove_dir_all(entry.path()).map_err(io_at("remove", &entry.path()))?;
        }
    }
    Ok(())
}

/// Removes old images: they take about 100 MB each, and the kernel package changes every few weeks.
/// Another rtvirtio may still use a younger one.
fn remove_old(cache: &Path, kind: &str, target: &Path) {
    let Ok(entries) = fs::read_dir(cache) else { return };
    for path in entries.flatten().map(|e| e.path()).filter(|p| p != target) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let age = fs::metadata(path.join(MANIFEST)).and_then(|m| m.modified()).map(|t| t.elapsed());
        let old = age.is_ok_and(|age| age.is_ok_and(|age| age > OLD_AGE));
        if old && name.strip_prefix(kind).is_some_and(|rest| rest.starts_with('-')) {
            // An image that stays only takes space.
            let _ = fs::remove_dir_all(&path);
        }
    }
}

fn load(dir: &Path) -> Option<GuestImage> {
    #[derive(Deserialize)]
    struct Manifest {
        release: String,
    }
    let text = fs::read(dir.join(MANIFEST)).ok()?;
    let Manifest { release } = serde_json::from_slice(&text).ok()?;
    let image = GuestImage { kernel: dir.join("vmlinuz"), initrd: dir.join("initrd.cpio"), release };
    (image.kernel.is_file() && image.initrd.is_file()).then_some(image)
}

/// Finds a program in PATH and the system directories (PATH of a plain user lacks sbin).
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/bin", "/usr/sbin", "/bin", "/sbin"].iter().map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|p| p.is_file())
}

/// Name, size and time of a host file, for an image's key.
pub(crate) fn stamp(path: &Path) -> Result<String, ImageError> {
    let meta = fs::metadata(path).map_err(io_at("look at", path))?;
    Ok(format!("{} {} {}.{}", path.display(), meta.len(), meta.mtime(), meta.mtime_nsec()))
}

/// Runs a program of the host and returns its standard output as text.
pub(crate) fn run(command: &mut Command, remedy: &'static str) -> Result<String, ImageError> {
    run_bytes(command, remedy).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a program of the host and returns its standard output.
pub(crate) fn run_bytes(command: &mut Command, remedy: &'static str) -> Result<Vec<u8>, ImageError> {
    let tool = command.get_program().to_string_lossy().into_owned();
    let output = command.env("LC_ALL", "C").output().map_err(|source| ImageError::NoTool {
        tool: tool.clone(),
        remedy,
        source,
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let args: Vec<_> = command.get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let detail = stderr.lines().filter(|l| !l.trim().is_empty()).collect::<Vec<_>>().join("; ");
    Err(ImageError::Tool { command: format!("{tool} {}", args.join(" ")), detail })
}

/// FNV-1a hash of an image's sources. It names directories and needs no cryptographic strength.
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn new(format: u32) -> Key {
        let mut key = Key(0xcbf2_9ce4_8422_2325);
        key.add(&format.to_string());
        key
    }

    pub(crate) fn add(&mut self, part: &str) {
        // The final zero keeps ("ab", "c") and ("a", "bc") apart.
        for byte in part.bytes().chain([0]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub(crate) fn hex(&self) -> String {
        format!("{:016x}", self.0)
    }
}
