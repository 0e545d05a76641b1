//! A QEMU guest whose disk the I/O domain serves.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_domain_protocol::status::DiskStatus;
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::qemu::{Accel, GuestDisk, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_vmm::agent::{ExecOutput, Process};

use rtvirtio_workflow::Progress;
use rtvirtio_workflow::domain::client as iod;
use rtvirtio_workflow::{cpus, kernel_release};

/// Interval of polls of the guest's agent, which cost the guest's CPU time.
const AGENT_POLL: Duration = Duration::from_millis(250);
/// Interval of calls of `on_tick`.
const TICK: Duration = Duration::from_millis(5);
/// QEMU reconnects once a second; a busy host needs longer.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit of commands that end at once.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// Boots a guest whose disk is served on `socket`. The guest, and the host as a result file
/// describes it.
///
/// # Errors
/// When the image cannot be made or the guest does not boot.
pub fn boot(
    socket: &Path,
    queues: u16,
    run_dir: &Path,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<(QemuGuest, HostFacts)> {
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    progress.step("booting a guest on the I/O domain");
    let disk = GuestDisk::VhostUser { socket: socket.to_owned(), queues: Some(queues) };
    let mut guest = QemuGuest::start(&QemuConfig { accel, ..QemuConfig::new("vm", image, disk, run_dir) })?;
    let facts = facts(&mut guest, accel, String::new())?;
    Ok((guest, facts))
}

/// The host that runs a guest, as a result file describes it.
///
/// # Errors
/// When QEMU does not answer.
pub fn facts(guest: &mut QemuGuest, accel: Accel, device: String) -> anyhow::Result<HostFacts> {
    let version = guest.qmp()?.version().qemu;
    Ok(HostFacts {
        kernel: kernel_release(),
        cpus: cpus(),
        vmm: format!("QEMU {}.{}.{}", version.major, version.minor, version.micro),
        accelerator: accel.as_str().to_owned(),
        device,
    })
}

/// A program of ours for guests, which lies next to this one.
///
/// # Errors
/// When it was not built.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe()?;
    let beside = |dir: Option<&Path>| dir.map(|d| d.join(name)).filter(|p| p.exists());
    // A test program lies one directory below.
    let found = beside(this.parent()).or_else(|| beside(this.parent().and_then(Path::parent)));
    found.with_context(|| format!("{name} is not next to {}: build the whole workspace", this.display()))
}

/// Waits until a program in the guest ends, and calls `on_tick` every few milliseconds.
///
/// # Errors
/// Cancellation, those of `on_tick`, and a program that does not end within `timeout`.
pub fn wait_for_exit(
    guest: &mut QemuGuest,
    process: Process,
    timeout: Duration,
    progress: &dyn Progress,
    on_tick: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<ExecOutput> {
    let begin = Instant::now();
    let mut next_poll = begin + AGENT_POLL;
    loop {
        progress.check_cancelled()?;
        on_tick()?;
        if Instant::now() >= next_poll {
            if let Some(output) = guest.poll(process)? {
                return Ok(output);
            }
            if begin.elapsed() > timeout {
                bail!("a program in the guest has not ended after {} s: the guest hangs", timeout.as_secs());
            }
            next_poll = Instant::now() + AGENT_POLL;
        }
        std::thread::sleep(TICK);
    }
}

/// Runs a command in the guest to its end and returns its output.
///
/// # Errors
/// A status other than 0, with the command's standard error.
pub fn run_command(guest: &mut QemuGuest, argv: &[&str]) -> anyhow::Result<String> {
    run_command_within(guest, argv, COMMAND_TIMEOUT)
}

/// Runs a command that takes a while, as [`run_command`] does.
///
/// # Errors
/// As [`run_command`], and a command that does not end in time.
pub fn run_command_within(guest: &mut QemuGuest, argv: &[&str], timeout: Duration) -> anyhow::Result<String> {
    let output = guest.exec(argv, timeout)?;
    if !output.success() {
        bail!("`{}` in the guest: {}", argv.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The I/O domain's counters of its first VM.
///
/// # Errors
/// When the domain does not answer, or has no VM.
pub fn vm_status(control: &Path) -> anyhow::Result<DiskStatus> {
    iod::ask(control)?.vms.into_iter().next().context("the I/O domain reports no VM")
}

/// Whether the I/O domain's first VM is attached.
///
/// # Errors
/// An I/O domain that does not answer.
pub fn is_attached(control: &Path) -> anyhow::Result<bool> {
    Ok(vm_status(control)?.attached)
}

/// Waits until the guest is attached.
///
/// # Errors
/// Cancellation, and a guest that does not connect.
pub fn wait_until_attached(control: &Path, progress: &dyn Progress) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !is_attached(control)? {
        progress.check_cancelled()?;
        if begin.elapsed() > ATTACH_TIMEOUT {
            bail!("QEMU has not connected to the I/O domain again after {} s", ATTACH_TIMEOUT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
