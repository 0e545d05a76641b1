//! The box: a whole Linux host inside one QEMU process, for the kernel paths that the development
//! machine may not have.
//!
//! It runs Debian's kernel with cgroup v2 only, a null_blk device that supports BFQ, and its own
//! KVM: QEMU's translator emulates AMD's SVM (`-cpu max`), so `kvm-amd` loads and stock guests boot
//! in it under `-accel kvm`. It needs no root and touches nothing outside itself. It proves
//! function, not speed: every instruction in it is translated.
//!
//! The host's own fio and QEMU are copied in with their libraries, and [`crate::image`]'s guest
//! image.

mod command;
mod cpus;
mod error;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_units::Bytes;
use rtvirtio_vmm::probe::QEMU;
use rtvirtio_vmm::spawn::{Lifetime, spawn};

use crate::image::cpio::Tree;
use crate::image::{
    self, GuestImage, ImageError, Kernel, apt, base_tree, build_once, find_program, finish, io_at,
    kernel_package, kind_name, libs, stamp,
};

pub use command::{BoxCommand, run_command};
pub use error::BoxError;

/// The script of the box's first process.
const INIT: &str = include_str!("boxed/box-init.sh");
/// Version of the build: a change makes another image from the same parts.
const FORMAT: u32 = 1;
/// The box's kernel modules, each with its arguments.
const MODULES: &[(&str, &str)] = &[
    ("virtio_pci", ""),
    ("virtio_blk", ""),
    ("virtio_console", ""),
    ("bfq", ""),
    ("mq_deadline", ""),
    ("kyber_iosched", ""),
    // 60 us a request, one at a time: requests queue up, as on the devices of the papers.
    (
        "null_blk",
        "queue_mode=2 irqmode=2 completion_nsec=60000 hw_queue_depth=1 submit_queues=1 nr_devices=1 gb=4",
    ),
    ("loop", ""),
    ("dm_mod", ""),
    ("dm_multipath", ""),
    ("dm_round_robin", ""),
    ("md_mod", ""),
    ("raid1", ""),
    ("fuse", ""),
    ("kvm_amd", ""),
    ("tun", ""),
    ("vhost_net", ""),
];
/// Firmware for a guest that boots a kernel directly, where Debian's QEMU looks for it.
const FIRMWARE: &[&str] = &[
    "usr/share/seabios/bios-256k.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
];
/// Directory of the guest image in the box.
const GUEST_DIR: &str = "guest";
/// Mark that the first process writes to the status port before it starts the script.
const BEGINS: &str = "begins";
/// Timeout of a boot to the script: about 10 s on an idle machine. One boot in some dozens hangs
/// before its console prints anything.
const BOOT: Duration = Duration::from_secs(60);
/// Timeout of the console's first output: about 2 s.
const FIRST_WORD: Duration = Duration::from_secs(20);
/// Longest silence of a script that starts guests: a guest that boots prints nothing for some 25 s.
const QUIET: Duration = Duration::from_secs(75);
/// Largest number of runs of a box with guests.
const RUNS: u32 = 3;
/// Size of the disk for a run's results.
const RESULTS: Bytes = Bytes(256 << 20);
/// Largest number of boots of a run. Nothing of the run has happened before the script begins, so
/// another boot changes no result.
const BOOTS: u32 = 3;

/// A host to boot: kernel, and an initramfs with tools and guest image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxImage {
    /// Kernel, initramfs, kernel release.
    pub host: GuestImage,
    guest: GuestImage,
    kernel: Kernel,
}

impl BoxImage {
    /// Memory that each further guest adds to the box's own.
    #[must_use]
    pub fn guest_memory(&self) -> Bytes {
        self.guest.memory()
    }
}

/// A script to run in the box, with its programs and files.
#[derive(Debug, Clone)]
pub struct BoxRun<'a> {
    /// Shell script (busybox `sh`) that runs as root in `/root`. `/dev/nullb0` is the device for
    /// tests.
    pub script: &'a str,
    /// Programs of this host to put into `/usr/local/bin`, with the libraries they need.
    pub programs: &'a [&'a Path],
    /// Further files: absolute path in the box, path on this host.
    pub files: &'a [(&'a str, &'a Path)],
    /// Memory of the box. [`BoxRun::new`] takes enough for one guest in it; add
    /// [`BoxImage::guest_memory`] for each more.
    pub memory: Bytes,
    /// Timeout from the start of the boot that reaches the script.
    pub timeout: Duration,
    /// Timeout of a script that prints nothing, so that a box that hangs is ended earlier than one
    /// that works.
    pub quiet: Duration,
    /// A file for the box's second disk, `/dev/vdb`, made anew for each boot.
    pub results: Option<&'a Path>,
    /// Whether the box has 16 CPUs and no KVM: two sockets, each a NUMA node, of four cores of two
    /// threads; else it has two CPUs.
    pub two_sockets: bool,
    /// Set to stop the run.
    pub cancel: Option<&'a AtomicBool>,
}

impl<'a> BoxRun<'a> {
    /// A run of the script alone, with memory for one guest; it may be silent all the time.
    #[must_use]
    pub fn new(script: &'a str, timeout: Duration) -> BoxRun<'a> {
        BoxRun {
            script,
            programs: &[],
            files: &[],
            memory: Bytes(2 << 30),
            timeout,
            quiet: timeout,
            results: None,
            two_sockets: false,
            cancel: None,
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxOutcome {
    /// The script's exit status. `None` when the box ended without one: its kernel died, or it
    /// could not unpack.
    pub exit_code: Option<i32>,
    /// Output of the script, both streams.
    pub output: String,
    /// Output of the kernel's console.
    pub console: String,
    /// Time of the whole run, power-off and all boots included.
    pub took: Duration,
    /// Boots until the script was reached.
    pub boots: u32,
}

/// Makes or finds the image of [`ensure_kernel`] with the standard kernel.
pub fn ensure(cache: &Path, progress: &dyn Fn(&str)) -> Result<BoxImage, BoxError> {
    ensure_kernel(cache, Kernel::Standard, progress)
}

/// Makes the box's image with this host kernel below `cache`, or finds the one made before from the
/// same parts. The guests in it have the standard one.
///
/// # Errors
/// As [`image::ensure_kernel`]; and QEMU and fio must be installed.
pub fn ensure_kernel(cache: &Path, kernel: Kernel, progress: &dyn Fn(&str)) -> Result<BoxImage, BoxError> {
    let guest = image::ensure(cache, progress)?;
    let qemu = find_program(QEMU).ok_or(BoxError::NoQemu)?;
    let fio = find_program("fio").ok_or_else(|| {
        let source = std::io::ErrorKind::NotFound.into();
        ImageError::NoTool { tool: "fio".into(), remedy: "install the package fio", source }
    })?;
    let kernel_packages = apt::kernel_packages(kernel_package(kernel))?;
    let mut package_names: Vec<&str> = kernel_packages.iter().map(String::as_str).collect();
    package_names.push("busybox-static");
    let versions = apt::candidates(&package_names)?;
    let mut key = image::Key::new(FORMAT);
    key.add(INIT);
    for (module, arguments) in MODULES {
        key.add(&format!("{module} {arguments}"));
    }
    for (package, version) in &versions {
        key.add(&format!("{package}={version}"));
    }
    for path in [&qemu, &fio, &guest.initrd] {
        key.add(&stamp(path)?);
    }
    let host = build_once(cache, &kind_name("box", kernel), &key, progress, &mut |work| {
        let packages = apt::Packages::new(work, progress);
        for (package, version) in &versions {
            packages.unpack(package, version)?;
        }
        let names: Vec<&str> = MODULES.iter().map(|(name, _)| *name).collect();
        let mut tree = base_tree(&packages, &names, INIT.as_bytes())?;
        for (name, arguments) in MODULES.iter().filter(|(_, arguments)| !arguments.is_empty()) {
            tree.data(&format!("lib/modules/{name}.ko.args"), arguments.as_bytes().to_vec(), 0o644);
        }
        libs::add_program(&mut tree, "usr/bin/fio", &fio, Some(&packages))?;
        libs::add_program(&mut tree, &format!("usr/bin/{QEMU}"), &qemu, Some(&packages))?;
        for path in FIRMWARE {
            let source = Path::new("/").join(path);
            // Debian 13 has the translator in the program itself. QEMU names a firmware that is
            // missing.
            if source.is_file() {
                tree.file(path, &source, 0o644);
            }
        }
        for source in [&guest.kernel, &guest.initrd, &guest.manifest()] {
            if let Some(name) = source.file_name() {
                tree.file(&format!("{GUEST_DIR}/{}", name.to_string_lossy()), source, 0o644);
            }
        }
        finish(work, &packages, &tree, progress)
    })?;
    Ok(BoxImage { host, guest, kernel })
}

/// Runs a script that starts guests under the box's KVM, as [`run()`] does. Under emulated SVM
/// (QEMU 7.2 and 10.0) a nested guest can crash the box, by a kernel panic, a silent reset, or a
/// CPU that never leaves KVM (each seen once in ten or more runs): a flaw of the emulation. A box
/// that ended without the script's exit status, that hung (it printed nothing for 75 s, and twice
/// as long at each further try), or for which `lost` is true, is started anew, twice at most: a
/// failure of the tested program is repeated.
pub fn run_with_guests(
    image: &BoxImage,
    run: &BoxRun,
    on_line: &dyn Fn(&str),
    lost: &dyn Fn(&BoxOutcome) -> bool,
) -> Result<BoxOutcome, BoxError> {
    let quiet = |n| BoxRun { quiet: run.quiet.min(QUIET * patience(n)), ..run.clone() };
    for n in 1..RUNS {
        match self::run(image, &quiet(n), on_line) {
            Ok(out) if out.exit_code.is_none() || lost(&out) => {
                on_line(&format!("the box died: once more. Its console ended with:\n{}", tail(&out.console)));
            }
            Err(e @ BoxError::Timeout { .. }) => on_line(&format!("{e}\nonce more")),
            other => return other,
        }
    }
    self::run(image, &quiet(RUNS), on_line)
}

/// Factor of the limits of the `n`th try, from 1: a machine that is only slow reaches them at last.
fn patience(n: u32) -> u32 {
    1 << (n - 1).min(4)
}

/// Boots the box, runs the script in it and powers it off. Each line that the script prints also
/// goes to `on_line` as it comes. Two virtual CPUs. A boot that does not reach the script within a
/// minute is ended, and another tried; likewise a boot whose console is silent for 20 s. Each
/// further boot has twice the time.
///
/// # Errors
/// See [`BoxError`]. A script that fails is an outcome, not an error.
pub fn run(image: &BoxImage, run: &BoxRun, on_line: &dyn Fn(&str)) -> Result<BoxOutcome, BoxError> {
    let start = Instant::now();
    let dir = tempfile::Builder::new()
        .prefix(&rtvirtio_kernel::ProcessId::prefix("box"))
        .tempdir()
        .map_err(io_at("make a directory in", &std::env::temp_dir()))?;
    let files = RunFiles::new(dir.path());
    payload(run, &files.payload)?;
    for boots in 1..=BOOTS {
        match boot(image, run, &files, patience(boots), on_line)? {
            Boot::Ran => {
                return Ok(BoxOutcome {
                    exit_code: files.status().and_then(|s| s.parse().ok()),
                    output: read(&files.output),
                    console: read(&files.console),
                    took: start.elapsed(),
                    boots,
                });
            }
            Boot::Stuck => on_line(&format!("boot {boots} of {BOOTS} did not reach the script")),
        }
    }
    Err(BoxError::Boot { boots: BOOTS, console: tail(&read(&files.console)) })
}

/// End of a boot.
enum Boot {
    /// The script began; the box is off again.
    Ran,
    /// The script never began.
    Stuck,
}

fn boot(
    image: &BoxImage,
    run: &BoxRun,
    files: &RunFiles,
    patience: u32,
    on_line: &dyn Fn(&str),
) -> Result<Boot, BoxError> {
    let start = Instant::now();
    let child =
        spawn(command(image, run, files)?, Vec::new(), Lifetime::WithParent).map_err(BoxError::Spawn)?;
    let mut child = Reaper(child);
    let mut lines = Lines { path: &files.output, offset: 0, partial: Vec::new() };
    let (mut printed, mut last) = (0, start);
    loop {
        let ended = child.0.try_wait().map_err(BoxError::Spawn)?;
        lines.follow(on_line);
        let begun = files.status().is_some();
        if !begun || lines.offset != printed {
            (printed, last) = (lines.offset, Instant::now());
        }
        match ended {
            Some(status) if !status.success() => {
                return Err(BoxError::Qemu {
                    status: status.to_string(),
                    stderr: tail(&read(&files.stderr)),
                });
            }
            Some(_) => return Ok(if begun { Boot::Ran } else { Boot::Stuck }),
            None if run.is_cancelled() => return Err(BoxError::Cancelled),
            None if !begun && start.elapsed() > BOOT * patience => return Ok(Boot::Stuck),
            None if !begun && start.elapsed() > FIRST_WORD * patience && files.console_is_empty() => {
                return Ok(Boot::Stuck);
            }
            None if begun && start.elapsed() > run.timeout => return Err(files.timeout(run.timeout, false)),
            None if begun && last.elapsed() > run.quiet => return Err(files.timeout(run.quiet, true)),
            None => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Files of one run, in a directory that is removed after it.
struct RunFiles {
    payload: PathBuf,
    console: PathBuf,
    output: PathBuf,
    status: PathBuf,
    stderr: PathBuf,
}

impl RunFiles {
    fn new(dir: &Path) -> RunFiles {
        let at = |name: &str| dir.join(name);
        RunFiles {
            payload: at("payload.cpio"),
            console: at("console"),
            output: at("output"),
            status: at("status"),
            stderr: at("stderr"),
        }
    }

    fn console_is_empty(&self) -> bool {
        fs::metadata(&self.console).is_ok_and(|m| m.len() == 0)
    }

    fn timeout(&self, waited: Duration, quiet: bool) -> BoxError {
        let (output, console) = (tail(&read(&self.output)), tail(&read(&self.console)));
        BoxError::Timeout { waited, quiet, output, console }
    }

    /// Output of the status port since the script began: empty, or its exit status. `None` before
    /// that.
    fn status(&self) -> Option<String> {
        Some(read(&self.status).trim().strip_prefix(BEGINS)?.trim().to_owned())
    }
}

/// The run's own files as an archive on a disk: they change with every build, the box's image does
/// not.
fn payload(run: &BoxRun, path: &Path) -> Result<(), ImageError> {
    let mut tree = Tree::default();
    tree.data("run.sh", run.script.as_bytes().to_vec(), 0o755);
    for program in run.programs {
        if let Some(name) = program.file_name() {
            libs::add_program(
                &mut tree,
                &format!("usr/local/bin/{}", name.to_string_lossy()),
                program,
                None,
            )?;
        }
    }
    for (place, source) in run.files {
        tree.file(place.trim_start_matches('/'), source, 0o644);
    }
    tree.write(path)?;
    // A disk has whole sectors.
    let file = File::options().write(true).open(path).map_err(io_at("open", path))?;
    let len = file.metadata().map_err(io_at("look at", path))?.len();
    file.set_len(len.next_multiple_of(4096)).map_err(io_at("extend", path))
}

fn command(image: &BoxImage, run: &BoxRun, files: &RunFiles) -> Result<Command, BoxError> {
    let stderr = File::create(&files.stderr).map_err(io_at("create", &files.stderr))?;
    let mut command = Command::new(find_program(QEMU).ok_or(BoxError::NoQemu)?);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-name", "rtvirtio-box", "-no-reboot"])
        .args(["-machine", "q35", "-accel", "tcg,thread=multi"])
        .args(["-m", &format!("{}M", run.memory.0 >> 20)])
        .arg("-kernel")
        .arg(&image.host.kernel)
        .arg("-initrd")
        .arg(&image.host.initrd)
        .args(["-append", "console=ttyS0 panic=-1 tsc=reliable no_timer_check mitigations=off cgroup_no_v1=all"])
        .arg("-blockdev")
        .arg(serde_json::json!({
            "driver": "file", "filename": files.payload, "node-name": "payload", "read-only": true, "locking": "off",
        }).to_string())
        .args(["-device", "virtio-blk-pci,drive=payload"]);
    command.args(cpus::arguments(run, image.kernel));
    if let Some(path) = run.results {
        let disk = File::create(path).map_err(io_at("create", path))?;
        disk.set_len(RESULTS.0).map_err(io_at("extend", path))?;
        let disk = serde_json::json!({ "driver": "file", "filename": path, "node-name": "results" });
        command.arg("-blockdev").arg(disk.to_string()).args(["-device", "virtio-blk-pci,drive=results"]);
    }
    for path in [&files.console, &files.output, &files.status] {
        File::create(path).map_err(io_at("create", path))?;
        command.arg("-serial").arg(format!("file:{}", path.display()));
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    Ok(command)
}

/// Reports the complete lines of a growing file once each.
struct Lines<'a> {
    path: &'a Path,
    offset: u64,
    partial: Vec<u8>,
}

impl Lines<'_> {
    fn follow(&mut self, on_line: &dyn Fn(&str)) {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(self.path)?;
            file.seek(SeekFrom::Start(self.offset))?;
            let mut bytes = Vec::new();
            file.take(1 << 20).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        // An error only delays the lines; the whole output is read in the end.
        let bytes = read().unwrap_or_default();
        self.offset += bytes.len() as u64;
        self.partial.extend_from_slice(&bytes);
        while let Some(end) = self.partial.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            on_line(String::from_utf8_lossy(&line).trim_end());
        }
    }
}

fn read(path: &Path) -> String {
    fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
}

/// The last 20 lines.
#[must_use]
pub fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Kills the box when dropped.
struct Reaper(std::process::Child);

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
